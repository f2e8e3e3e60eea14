//! `wait`: waits until a lock is free, without acquiring it.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use syncguard::{AnyBackend, Key, LockBackend, diagnostics};

use crate::Context;
use crate::args::{Wait, WaitLimit};
use crate::exit::Failure;
use crate::progress::indicate;
use crate::{signals, waiting};

/// How long to wait before the next lookup if no notification arrives.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

pub(crate) async fn wait(context: &Context, args: Wait) -> Result<u8, Failure> {
    let key = waiting::key_to_look_at(&args.key)?;
    let deadline = waiting::deadline(args.limit);
    let backend = OnceLock::new();
    let waiting = until_free(context, &args, &key, deadline, &backend);
    tokio::select! {
        biased;
        signal = signals::ending() => Ok(signals::die_by(signal as i32)),
        free = waiting => free.map(|()| 0),
        () = indicate(context, &key, &backend) => unreachable!("BUG: progress never completes"),
    }
}

async fn until_free(
    context: &Context,
    args: &Wait,
    key: &Key,
    deadline: Option<Instant>,
    connected: &OnceLock<AnyBackend>,
) -> Result<(), Failure> {
    /// The last look begins when the time is over.
    const LAST_LOOK: Duration = Duration::from_secs(1);
    let fail_fast = args.conflict.fail_fast;
    // Without time, there is one attempt.
    let limit = deadline.filter(|_| !matches!(args.limit, WaitLimit::For(Duration::ZERO)));
    // A missing SQLite file is an error; an unreachable store is retried.
    let mut backend = match by(limit, Box::pin(context.target.connect_existing())).await {
        Ok(backend) => backend,
        Err(failure) if fail_fast || !failure.may_pass() => return Err(failure),
        Err(_may_pass) => waiting::connect_until(context, deadline).await?,
    };
    connected.set(backend.clone()).unwrap_or_default();
    let limit = limit.and_then(|limit| limit.checked_add(LAST_LOOK));
    loop {
        let last_error = match by(limit, diagnostics::get_by_key(&backend, key)).await {
            Ok(None) => return Ok(()),
            Ok(Some(_)) => None,
            Err(error) if fail_fast || !error.is_retryable() => return Err(error.into()),
            Err(error) => Some(error),
        };
        let is_over = deadline.is_some_and(|deadline| Instant::now() >= deadline);
        if is_over {
            return Err(match (last_error, args.limit) {
                (Some(error), _) => error.into(),
                (None, WaitLimit::For(time)) if !time.is_zero() => {
                    let time = humantime::format_duration(time);
                    let message = format!("the lock did not become free within {time}");
                    waiting::not_acquired(context, args.conflict, &message)
                }
                (None, _) => {
                    let message = "the lock is held by another process";
                    waiting::not_acquired(context, args.conflict, message)
                }
            });
        }
        pause(&mut backend, key, deadline).await;
    }
}

/// Limits a call to the store.
async fn by<T, E: From<syncguard::Error>>(
    deadline: Option<Instant>,
    call: impl Future<Output = Result<T, E>>,
) -> Result<T, E> {
    match deadline {
        Some(deadline) => match tokio::time::timeout_at(deadline.into(), call).await {
            Ok(answer) => answer,
            Err(_elapsed) => Err(waiting::no_response().into()),
        },
        None => call.await,
    }
}

/// Waits for a release, the next lookup, or the deadline.
async fn pause(backend: &mut AnyBackend, key: &Key, deadline: Option<Instant>) {
    let again = Instant::now() + POLL_INTERVAL;
    let until = deadline.map_or(again, |deadline| deadline.min(again));
    let released = async {
        match backend.subscribe(key).await {
            // Look again, because a release may have come before the subscription.
            Some(mut released) => {
                if diagnostics::get_by_key(&*backend, key).await.is_ok_and(|lock| lock.is_some()) {
                    released.notified().await;
                }
            }
            None => std::future::pending().await,
        }
    };
    drop(tokio::time::timeout_at(until.into(), released).await);
}
