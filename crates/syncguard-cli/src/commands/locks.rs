//! `acquire`, `release` and `extend`: for scripts, which keep the lock id themselves.

use std::io::Read;
use std::time::Duration;

use serde::Serialize;
use syncguard::backend::{ExtendRequest, ReleaseRequest};
use syncguard::{AnyBackend, ExtendOutcome, LockBackend, LockGuard, LockId, ReleaseOutcome};

use crate::Context;
use crate::args::{Acquire, Extend, OneId, Release};
use crate::exit::{FAILED, Failure, NO, USAGE};
use crate::waiting::{self, Obtained};
use crate::{output, signals};

/// How long to undo an attempt that was in flight when the wait ended.
const UNDO_LIMIT: Duration = Duration::from_secs(5);

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Receipt<'a> {
    lock_id: &'a str,
    fence: String,
    expires_at_ms: u64,
}

#[derive(Serialize)]
struct Answer {
    released: bool,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Extension {
    extended: bool,
    expires_at_ms: Option<u64>,
}

/// Returns the lock id from the argument or from standard input.
pub(crate) fn lock_id(args: &OneId) -> Result<LockId, Failure> {
    let mut text = args.lock_id.clone();
    if text == "-" {
        text.clear();
        std::io::stdin().read_to_string(&mut text).map_err(|cause| {
            Failure::new(FAILED, format!("cannot read standard input: {cause}"))
        })?;
    }
    LockId::parse(text.trim()).map_err(|error| {
        Failure::new(USAGE, error.message())
            .hint("use the lock id that `syncguard acquire` printed")
    })
}

pub(crate) async fn acquire(context: &Context, args: Acquire) -> Result<u8, Failure> {
    let key = waiting::key(&args.key)?;
    let options = waiting::options(&args.waiting)?;
    output::check_is_open()?;
    let connecting = Box::pin(waiting::locker(context, &key, &args.waiting, options));
    let locker = match waiting::unless_ended(connecting).await {
        Ok(locker) => locker?,
        Err(signal) => return Ok(signals::die_by(signal as i32)),
    };
    let obtained = waiting::obtain(context, &locker, &key, &args.waiting).await;
    let (ended, signal) = match obtained {
        Ok(Obtained::Lock(guard)) => (hand_out(context, guard).await, None),
        Ok(Obtained::Interrupted(signal)) => (Ok(FAILED), Some(signal)),
        Err(failure) => (Err(failure), None),
    };
    // An attempt that was in flight may have acquired a lock whose id is not known here.
    drop(locker.shutdown_within(UNDO_LIMIT).await);
    signal.map_or(ended, |signal| Ok(signals::die_by(signal as i32)))
}

/// Prints the lock id. If that fails, releases the lock.
async fn hand_out(context: &Context, guard: LockGuard<AnyBackend>) -> Result<u8, Failure> {
    let (lock_id, fence, expires_at) = (guard.lock_id(), guard.fence(), guard.expires_at());
    let receipt = Receipt {
        lock_id: lock_id.expose(),
        fence: fence.to_string(),
        expires_at_ms: expires_at.as_millis(),
    };
    if let Err(failure) = context.output.receipt(&receipt, || format!("{}\n", lock_id.expose())) {
        return Err(match guard.release().await {
            Ok(_released) => failure,
            Err(_error) => failure.hint("the lock could not be released and will expire"),
        });
    }
    let _lock_id = guard.detach();
    if !context.output.shows_events() {
        let until = output::time(expires_at);
        context.output.note(&format!("acquired with fence {fence}, until {until}"));
    }
    Ok(0)
}

pub(crate) async fn release(context: &Context, args: Release) -> Result<u8, Failure> {
    let lock_id = lock_id(&args.id)?;
    let backend = context.target.connect_existing().await?;
    let released = backend.release(&ReleaseRequest::new(lock_id)).await?;
    let released = released == ReleaseOutcome::Released;
    context.output.data(&Answer { released }, || {
        if released { "released\n".to_owned() } else { "not held\n".to_owned() }
    })?;
    backend.quiesce().await;
    Ok(if released { 0 } else { NO })
}

pub(crate) async fn extend(context: &Context, args: Extend) -> Result<u8, Failure> {
    let (lock_id, ttl) = (lock_id(&args.id)?, waiting::ttl("--ttl", args.ttl)?);
    let backend = context.target.connect_existing().await?;
    let expires_at = match backend.extend(&ExtendRequest::new(lock_id, ttl)).await? {
        ExtendOutcome::Extended(extension) => Some(extension.expires_at()),
        ExtendOutcome::NotHeld(_) => None,
    };
    let answer = Extension {
        extended: expires_at.is_some(),
        expires_at_ms: expires_at.map(syncguard::Timestamp::as_millis),
    };
    context.output.data(&answer, || match expires_at {
        Some(expires_at) => format!("extended until {}\n", output::time(expires_at)),
        None => "not held\n".to_owned(),
    })?;
    Ok(if expires_at.is_some() { 0 } else { NO })
}
