//! `fence check`: remembers the largest fence of a resource, and refuses smaller ones.

use serde::Serialize;
use syncguard::{Fence, Key, LockBackend};

use crate::Context;
use crate::args::FenceCheck;
use crate::exit::{FAILED, Failure, NO, USAGE};

const FENCE: &str = "SYNCGUARD_FENCE";
const KEY: &str = "SYNCGUARD_KEY";

#[derive(Serialize)]
struct Checked {
    stale: bool,
}

pub(crate) async fn check(context: &Context, args: &FenceCheck) -> Result<u8, Failure> {
    let variable = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
    let usage = |what: &str, error: &syncguard::Error| {
        Failure::new(USAGE, format!("{what}: {}", error.message()))
    };
    let from_environment = if args.fence.is_none() { variable(FENCE) } else { None };
    // The key in the environment belongs to the fence in the environment.
    let key = match (&args.key, &from_environment) {
        (Some(key), _) => Some(key.clone()),
        (None, Some(_)) => variable(KEY),
        (None, None) => None,
    };
    let Some(fence) = args.fence.clone().or(from_environment) else {
        let hint = format!("pass FENCE, or run inside `syncguard run`, which sets {FENCE}");
        return Err(Failure::new(USAGE, "no fence").hint(hint));
    };
    let fence = parse(&fence)?;
    let resource = Key::new(args.resource.as_str());
    let resource = resource.map_err(|error| usage("--resource", &error))?;
    let key = key.map(Key::new).transpose().map_err(|error| usage("--key", &error))?;
    let backend = context.target.connect().await?;
    let Some(admin) = backend.admin() else {
        return Err(Failure::new(FAILED, "this store cannot remember fences of resources"));
    };
    let stale = match admin.check_fence(&resource, fence, key.as_ref()).await {
        Ok(()) => false,
        Err(error) if error.is_stale_fence() => true,
        Err(error) => return Err(error.into()),
    };
    let text = if stale { "stale: a later holder has been there\n" } else { "current\n" };
    context.output.data(&Checked { stale }, || text.to_owned())?;
    Ok(if stale { NO } else { 0 })
}

/// Parses a fence of 1 to 15 digits, with or without leading zeros.
fn parse(text: &str) -> Result<Fence, Failure> {
    let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let number = text.parse().ok().filter(|_| is_number && text.len() <= Fence::DIGITS as usize);
    number
        .and_then(|number| Fence::new(number).ok())
        .ok_or_else(|| Failure::new(USAGE, "invalid fence: expected 1 to 15 digits"))
}
