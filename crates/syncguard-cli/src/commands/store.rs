//! `setup`, `gc` and `url`: prepare, clean and show the store.

use serde::Serialize;
use syncguard::LockBackend;

use crate::Context;
use crate::address::Address;
use crate::args::Gc;
use crate::exit::{FAILED, Failure, USAGE};
use crate::output;

#[derive(Serialize)]
struct Setup {
    ready: bool,
}

pub(crate) async fn setup(context: &Context) -> Result<u8, Failure> {
    let backend = context.target.connect().await?;
    if let Some(admin) = backend.admin() {
        admin.setup().await?;
    }
    context.output.data(&Setup { ready: true }, || "ready\n".to_owned())?;
    Ok(0)
}

#[derive(Serialize)]
struct Collection {
    deleted: u64,
}

/// Deletes idle fence counters.
pub(crate) async fn gc(context: &Context, args: &Gc) -> Result<u8, Failure> {
    let backend = context.target.connect_existing().await?;
    let Some(admin) = backend.admin() else {
        return Err(Failure::new(FAILED, "this store cannot delete fence counters"));
    };
    let deleted = admin.collect_fences(args.older_than).await?;
    context.output.data(&Collection { deleted }, || match deleted {
        1 => "1 fence counter deleted\n".to_owned(),
        count => format!("{count} fence counters deleted\n"),
    })?;
    Ok(0)
}

#[derive(Serialize)]
struct Url {
    url: String,
    source: &'static str,
}

/// Prints the URL of the store, without its password.
pub(crate) fn url(context: &Context) -> Result<u8, Failure> {
    let address = Address::parse(context.target.url()).ok_or_else(|| {
        Failure::new(USAGE, "cannot print the URL: its password cannot be identified and hidden")
            .hint("percent-encode /, ? and # in the password")
    })?;
    let url = Url { url: address.redacted(), source: context.target.source() };
    context.output.data(&url, || format!("{}\n", output::printable(&url.url)))?;
    Ok(0)
}
