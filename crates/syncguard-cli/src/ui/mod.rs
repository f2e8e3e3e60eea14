//! `ui`: serves a page that shows the locks of a store live.

mod access;
mod history;
mod observer;
mod server;

use std::net::Ipv4Addr;
use std::sync::Arc;

use tokio::net::TcpListener;

use crate::Context;
use crate::args::Ui;
use crate::exit::{FAILED, Failure, USAGE};
use access::{Access, Token};
use observer::Observer;

pub(crate) async fn ui(context: &Context, args: Ui) -> Result<u8, Failure> {
    let address = args.listen.unwrap_or((Ipv4Addr::LOCALHOST, 0).into());
    let token = match &args.token_file {
        Some(file) => Token::read(file)?,
        None if !address.ip().is_loopback() => {
            let message = "other machines can reach this address; set --token-file";
            return Err(Failure::new(USAGE, message));
        }
        None => Token::random()?,
    };
    let cannot_listen =
        |cause| Failure::new(FAILED, format!("cannot listen on {address}: {cause}"));
    let listener = TcpListener::bind(address).await.map_err(cannot_listen)?;
    let access = Access::new(token, listener.local_addr().map_err(cannot_listen)?);
    // The token is in the file already and need not be in a log too.
    let url = if args.token_file.is_some() { access.origin() } else { access.url() };
    context.output.receipt(&Started { url: &url }, || format!("{url}\n"))?;
    if args.token_file.is_some() {
        context.output.note("open it with ?token= and the token from the file");
    }
    let observer = Observer::new(context.clone(), args.allow_break);
    tokio::spawn(Arc::clone(&observer).watch());
    let router = server::router(access, observer);
    let served = axum::serve(listener, router).await;
    served.map_err(|cause| Failure::new(FAILED, format!("cannot serve the page: {cause}")))?;
    Ok(0)
}

#[derive(serde::Serialize)]
struct Started<'a> {
    url: &'a str,
}
