//! `setup` and `url`: the store itself.

use serde::Serialize;
use syncguard::LockBackend;

use crate::Context;
use crate::address::Address;
use crate::exit::{Failure, USAGE};
use crate::output;

#[derive(Serialize)]
struct Setup {
    ready: bool,
}

pub(crate) async fn setup(context: &Context) -> Result<u8, Failure> {
    let backend = context.target.connect().await?;
    if let Some(inspector) = backend.inspector() {
        inspector.setup().await?;
    }
    context.output.data(&Setup { ready: true }, || "ready\n".to_owned())?;
    Ok(0)
}

#[derive(Serialize)]
struct Url {
    url: String,
    source: &'static str,
}

/// Shows which store is used.
pub(crate) fn url(context: &Context) -> Result<u8, Failure> {
    let address = Address::parse(context.target.url()).ok_or_else(|| {
        Failure::new(USAGE, "the URL cannot be shown without the risk of showing a password")
            .hint("percent-encode /, ? and # in its password")
    })?;
    let url = Url { url: address.redacted(), source: context.target.source() };
    context.output.data(&url, || format!("{}\n", output::printable(&url.url)))?;
    Ok(0)
}
