//! Waiting for a lock: through trouble with the store, with a line at the terminal, and an end by
//! Ctrl-C.

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use syncguard::{AnyBackend, ErrorCode, Key, LockGuard, LockOptions, Locker, Ttl};
use tokio::signal::unix::{self, SignalKind};

use crate::Context;
use crate::args::{Conflict, KeyArgs, WaitLimit, Waiting};
use crate::event::{Event, millis};
use crate::exit::{FAILED, Failure, USAGE};
use crate::progress::indicate;
use crate::reporting::Reporting;
use crate::signals;
use crate::target::is_inside_a_run;

/// The variable that names the lock where nothing else does. Commands that are run see their own.
const KEY: &str = "SYNCGUARD_KEY";

/// What came of waiting.
pub(crate) enum Obtained {
    Lock(Box<LockGuard<AnyBackend>>),
    /// A signal came first. Die by it: see [`signals::die_by`].
    Interrupted(Signal),
}

/// The key of a lock to take.
pub(crate) fn key(args: &KeyArgs) -> Result<Key, Failure> {
    if args.argument.is_none() && args.option.is_none() && is_inside_a_run() {
        // It would wait for the lock that it runs under.
        let message = format!("{KEY} names the lock that is held here already");
        return Err(Failure::new(USAGE, message).hint("name another lock with --key"));
    }
    key_to_look_at(args)
}

/// The key of a lock to look at.
pub(crate) fn key_to_look_at(args: &KeyArgs) -> Result<Key, Failure> {
    let typed = args.argument.clone().or_else(|| args.option.clone());
    let text = match typed {
        Some(text) => text,
        None => std::env::var(KEY).ok().filter(|text| !text.is_empty()).ok_or_else(|| {
            Failure::new(USAGE, "no key").hint(format!("name the lock: KEY, --key KEY or {KEY}"))
        })?,
    };
    Key::new(text).map_err(|error| Failure::new(USAGE, error.to_string()))
}

/// A time to live as it was typed.
pub(crate) fn ttl(duration: Duration) -> Result<Ttl, Failure> {
    Ttl::new(duration).map_err(|error| Failure::new(USAGE, format!("--ttl: {error}")))
}

/// Hears one of these signals.
pub(crate) fn listen(signal: Signal) -> Result<unix::Signal, Failure> {
    unix::signal(SignalKind::from_raw(signal as i32))
        .map_err(|cause| Failure::new(FAILED, format!("cannot listen for signals: {cause}")))
}

/// When a wait that begins now ends; `None` for never.
pub(crate) fn deadline(wait: WaitLimit) -> Option<Instant> {
    match wait {
        WaitLimit::For(time) => Instant::now().checked_add(time),
        WaitLimit::Forever => None,
    }
}

/// Options for a lock that is waited for like this.
pub(crate) fn options(waiting: &Waiting) -> Result<LockOptions, Failure> {
    let options =
        LockOptions::default().ttl(ttl(waiting.ttl)?).ride_out_errors(!waiting.conflict.fail_fast);
    Ok(match waiting.wait {
        // No time at all is one attempt, which needs no limit.
        WaitLimit::For(Duration::ZERO) => options,
        WaitLimit::For(time) => options.timeout(time),
        WaitLimit::Forever => options.wait_forever(),
    })
}

/// Time for an attempt, however long connecting took.
const LAST_ATTEMPT: Duration = Duration::from_millis(100);

/// Connects to the store of a lock that is waited for. The time that it takes is part of the wait.
pub(crate) async fn locker(
    context: &Context,
    key: &Key,
    waiting: &Waiting,
    options: LockOptions,
) -> Result<Locker<AnyBackend>, Failure> {
    let one_attempt = waiting.no_wait || waiting.wait == WaitLimit::For(Duration::ZERO);
    let deadline = deadline(waiting.wait);
    context.target.prepare()?;
    let is_patient = !one_attempt && !waiting.conflict.fail_fast;
    let backend = if is_patient {
        connect_until(context, deadline).await?
    } else {
        context.target.open().await?
    };
    let options = match (waiting.wait, deadline) {
        (WaitLimit::For(wait), Some(deadline)) if is_patient => {
            let left = deadline.saturating_duration_since(Instant::now());
            // Connected at the last moment, one attempt is still made.
            options.timeout(left.max(wait.min(LAST_ATTEMPT)))
        }
        _ => options,
    };
    let backend = Reporting::around(backend, context.output, key);
    Ok(Locker::builder(backend).options(options).build()?)
}

/// Connects, again and again while errors may pass, until the deadline.
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
            Err(_elapsed) => syncguard::Error::new(
                ErrorCode::NetworkTimeout,
                "no answer before the wait was over",
            ),
        };
        let pause = delay.mul_f64(0.5 + jitter());
        if deadline.is_some_and(|deadline| Instant::now() + pause >= deadline) {
            return Err(error.into());
        }
        if is_first {
            is_first = false;
            let failure = context.target.locate(error.into());
            context.output.note(&format!("{failure}; trying again until the wait is over"));
        }
        tokio::time::sleep(pause).await;
        delay = (delay * 2).min(LONGEST_DELAY);
    }
}

/// Between 0 and 1, so that processes that failed together do not come back together.
fn jitter() -> f64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let nanos = now.map_or(0, |now| now.subsec_nanos());
    f64::from(nanos.wrapping_mul(std::process::id()) % 1000) / 1000.0
}

/// Waits for a lock.
pub(crate) async fn obtain(
    context: &Context,
    locker: &Locker<AnyBackend>,
    key: &Key,
    waiting: &Waiting,
) -> Result<Obtained, Failure> {
    let started = Instant::now();
    let acquiring = async {
        if waiting.no_wait || waiting.wait == WaitLimit::For(Duration::ZERO) {
            return locker.try_lock(key).await;
        }
        locker.lock(key).await.map(Some)
    };
    let conflict = waiting.conflict;
    tokio::select! {
        biased;
        signal = signals::ending() => Ok(Obtained::Interrupted(signal)),
        acquired = acquiring => match acquired {
            Ok(Some(guard)) => {
                context.output.event(&Event::Acquired {
                    key: key.as_str(),
                    fence: guard.fence().to_string(),
                    waited_ms: millis(started.elapsed()),
                });
                Ok(Obtained::Lock(Box::new(guard)))
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
        () = indicate(context, key) => unreachable!("it never ends"),
    }
}

/// Does something unless a signal ends it first. Die by that: see [`signals::die_by`].
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
