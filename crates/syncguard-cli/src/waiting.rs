//! Waits for a lock: retries after store errors, shows progress, and ends on Ctrl-C.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use syncguard::{AnyBackend, ErrorCode, Fence, Key, LockGuard, LockOptions, Locker, Ttl};
use tokio::signal::unix::{self, SignalKind};

use crate::Context;
use crate::args::{Conflict, KeyArgs, KeysArgs, WaitLimit, Waiting};
use crate::event::{Event, millis};
use crate::exit::{FAILED, Failure, USAGE};
use crate::progress::indicate;
use crate::reporting::Reporting;
use crate::signals;
use crate::target::is_inside_a_run;

/// The variable that names the lock if no argument does. `run` sets it for its command.
const KEY: &str = "SYNCGUARD_KEY";

/// The result of a wait.
pub(crate) enum Obtained<T> {
    Lock(T),
    /// A signal arrived first. End with [`signals::die_by`].
    Interrupted(Signal),
}

/// Returns the keys of locks to acquire, at least one.
pub(crate) fn keys(args: &KeysArgs) -> Result<Vec<Key>, Failure> {
    if args.options.len() < 2 {
        let option = args.options.first().cloned();
        return Ok(vec![key(&KeyArgs { argument: args.argument.clone(), option })?]);
    }
    let key = |text| Key::new(text).map_err(|error| Failure::new(USAGE, error.message()));
    args.options.iter().map(key).collect()
}

/// Returns the key of a lock to acquire.
pub(crate) fn key(args: &KeyArgs) -> Result<Key, Failure> {
    if args.argument.is_none() && args.option.is_none() && is_inside_a_run() {
        // It would wait for the lock of the enclosing run, forever.
        let message = format!("{KEY} is the lock that the enclosing `syncguard run` already holds");
        return Err(Failure::new(USAGE, message).hint("name another lock with --key"));
    }
    key_to_look_at(args)
}

/// Returns the key of a lock to look at.
pub(crate) fn key_to_look_at(args: &KeyArgs) -> Result<Key, Failure> {
    let typed = args.argument.clone().or_else(|| args.option.clone());
    let text = match typed {
        Some(text) => text,
        None => std::env::var(KEY).ok().filter(|text| !text.is_empty()).ok_or_else(|| {
            Failure::new(USAGE, "no key").hint(format!("pass KEY or --key KEY, or set {KEY}"))
        })?,
    };
    Key::new(text).map_err(|error| Failure::new(USAGE, error.message()))
}

/// Converts the value of an option that sets a TTL.
pub(crate) fn ttl(option: &str, duration: Duration) -> Result<Ttl, Failure> {
    Ttl::new(duration).map_err(|_error| {
        Failure::new(USAGE, format!("{option} must be greater than zero and at most 24h"))
    })
}

/// Returns a stream of one kind of signal.
pub(crate) fn listen(signal: Signal) -> Result<unix::Signal, Failure> {
    unix::signal(SignalKind::from_raw(signal as i32))
        .map_err(|cause| Failure::new(FAILED, format!("cannot listen for signals: {cause}")))
}

/// Returns when a wait that begins now ends, or `None` for never.
pub(crate) fn deadline(wait: WaitLimit) -> Option<Instant> {
    match wait {
        WaitLimit::For(time) => Instant::now().checked_add(time),
        WaitLimit::Forever => None,
    }
}

/// Converts the wait options to options of the library.
pub(crate) fn options(waiting: &Waiting) -> Result<LockOptions, Failure> {
    let options = LockOptions::default()
        .ttl(ttl("--ttl", waiting.ttl)?)
        .retry_on_error(!waiting.conflict.fail_fast);
    Ok(match waiting.wait {
        // Zero means one attempt, which needs no timeout.
        WaitLimit::For(Duration::ZERO) => options,
        WaitLimit::For(time) => options.timeout(time),
        WaitLimit::Forever => options.wait_forever(),
    })
}

/// The minimum time for an attempt, no matter how long connecting took.
const LAST_ATTEMPT: Duration = Duration::from_millis(100);

/// Connects to the store, and returns a locker. The time to connect counts as part of the wait.
pub(crate) async fn locker(
    context: &Context,
    key: &Key,
    waiting: &Waiting,
    options: LockOptions,
) -> Result<Locker<AnyBackend>, Failure> {
    let one_attempt = is_once(waiting);
    let deadline = deadline(waiting.wait);
    context.target.prepare()?;
    let retries_errors = !one_attempt && !waiting.conflict.fail_fast;
    let backend = if retries_errors {
        connect_until(context, deadline).await?
    } else {
        context.target.open().await?
    };
    let options = match (waiting.wait, deadline) {
        (WaitLimit::For(wait), Some(deadline)) if retries_errors => {
            let left = deadline.saturating_duration_since(Instant::now());
            // Even if connecting took all of the time, one attempt is made.
            options.timeout(left.max(wait.min(LAST_ATTEMPT)))
        }
        _ => options,
    };
    let backend = Reporting::around(backend, context.output, key);
    let builder = Locker::builder(backend).options(options);
    let builder = match (&waiting.holder.label, waiting.holder.no_holder) {
        (_, true) => builder.no_holder(),
        (Some(label), false) => builder.holder(label),
        (None, false) => builder,
    };
    Ok(builder.build()?)
}

/// Creates the error for a store that did not answer during the wait.
pub(crate) fn no_response() -> syncguard::Error {
    syncguard::Error::new(ErrorCode::NetworkTimeout, "no response before the wait timed out")
}

/// Connects to the store, and retries after retryable errors until the deadline.
pub(crate) async fn connect_until(
    context: &Context,
    deadline: Option<Instant>,
) -> Result<AnyBackend, Failure> {
    const LONGEST_DELAY: Duration = Duration::from_secs(1);
    let mut delay = Duration::from_millis(50);
    let mut is_first = true;
    loop {
        let opening = context.target.open();
        let opened = match deadline {
            Some(deadline) => tokio::time::timeout_at(deadline.into(), opening).await,
            None => Ok(opening.await),
        };
        let error = match opened {
            Ok(Ok(backend)) => return Ok(backend),
            Ok(Err(error)) if error.is_retryable() => error,
            Ok(Err(error)) => return Err(error.into()),
            Err(_elapsed) => no_response(),
        };
        let pause = delay.mul_f64(0.5 + jitter());
        if deadline.is_some_and(|deadline| Instant::now() + pause >= deadline) {
            return Err(error.into());
        }
        if is_first {
            is_first = false;
            let failure = context.target.locate(error.into());
            context.output.note(&format!("{failure}; retrying until the wait ends"));
        }
        tokio::time::sleep(pause).await;
        delay = (delay * 2).min(LONGEST_DELAY);
    }
}

/// Returns a number from 0 to 1, so that processes that failed at the same time do not retry at the
/// same time.
fn jitter() -> f64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let nanos = now.map_or(0, |now| now.subsec_nanos());
    f64::from(nanos.wrapping_mul(std::process::id()) % 1000) / 1000.0
}

/// Returns whether one attempt is made, without waiting.
pub(crate) fn is_once(waiting: &Waiting) -> bool {
    waiting.no_wait || waiting.wait == WaitLimit::For(Duration::ZERO)
}

/// Waits for a lock.
pub(crate) async fn obtain(
    context: &Context,
    locker: &Locker<AnyBackend>,
    key: &Key,
    waiting: &Waiting,
) -> Result<Obtained<LockGuard<AnyBackend>>, Failure> {
    let acquiring = async {
        if is_once(waiting) {
            return locker.try_lock(key).await;
        }
        locker.lock(key).await.map(Some)
    };
    obtain_by(context, locker, key, waiting, acquiring, LockGuard::fence).await
}

/// Waits for what `acquiring` acquires; `None` means that it is held. `key` is shown meanwhile.
pub(crate) async fn obtain_by<T>(
    context: &Context,
    locker: &Locker<AnyBackend>,
    key: &Key,
    waiting: &Waiting,
    acquiring: impl Future<Output = syncguard::Result<Option<T>>>,
    fence: impl Fn(&T) -> Fence,
) -> Result<Obtained<T>, Failure> {
    let started = Instant::now();
    let backend = OnceLock::from(locker.backend().clone());
    let conflict = waiting.conflict;
    tokio::select! {
        biased;
        signal = signals::ending() => Ok(Obtained::Interrupted(signal)),
        acquired = acquiring => match acquired {
            Ok(Some(guard)) => {
                context.output.event(&Event::Acquired {
                    key: key.as_str(),
                    fence: fence(&guard).to_string(),
                    waited_ms: millis(started.elapsed()),
                });
                Ok(Obtained::Lock(guard))
            }
            Ok(None) => Err(not_acquired(context, conflict, "the lock is held by another process")),
            Err(error) => {
                let failure = Failure::from(error);
                match waiting.wait {
                    WaitLimit::For(time) if failure.is_conflict() => {
                        Err(not_acquired(context, conflict, &not_within(time)))
                    }
                    _ => Err(failure),
                }
            }
        },
        () = indicate(context, key, &backend) => unreachable!("BUG: progress never completes"),
    }
}

/// Runs a future until it completes or a signal arrives. End with [`signals::die_by`] on a signal.
pub(crate) async fn unless_ended<T>(work: impl Future<Output = T>) -> Result<T, Signal> {
    tokio::select! {
        biased;
        signal = signals::ending() => Err(signal),
        done = work => Ok(done),
    }
}

pub(crate) fn not_within(time: Duration) -> String {
    format!("the lock was not acquired within {}", humantime::format_duration(time))
}

pub(crate) fn not_acquired(context: &Context, conflict: Conflict, message: &str) -> Failure {
    let failure = Failure::conflict(conflict.exit_code, message);
    if context.output.is_live() {
        failure.hint("wait longer with --wait 1m or --wait forever")
    } else {
        failure
    }
}
