//! Waiting for a lock: with a line at the terminal, and an end by Ctrl-C.

use std::io::Write;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use syncguard::{AnyBackend, Key, LockGuard, LockOptions, Locker, Ttl, diagnostics};
use tokio::signal::unix::{self, SignalKind};

use crate::Context;
use crate::args::{Patience, Waiting};
use crate::child::by_signal;
use crate::exit::{FAILED, Failure, NOT_OBTAINED, USAGE};
use crate::output;

/// What came of waiting.
pub(crate) enum Obtained {
    Lock(Box<LockGuard<AnyBackend>>),
    /// A signal came first; this is the code to end with.
    Interrupted(u8),
}

/// A key as it was typed.
pub(crate) fn key(text: &str) -> Result<Key, Failure> {
    Key::new(text).map_err(|error| Failure::new(USAGE, error.to_string()))
}

/// A time to live as it was typed.
pub(crate) fn ttl(duration: Duration) -> Result<Ttl, Failure> {
    Ttl::new(duration).map_err(|error| Failure::new(USAGE, format!("--ttl: {error}")))
}

/// Signals that end the waiting.
pub(crate) const ENDING: [Signal; 4] =
    [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP, Signal::SIGQUIT];

/// Hears one of these signals.
pub(crate) fn listen(signal: Signal) -> Result<unix::Signal, Failure> {
    unix::signal(SignalKind::from_raw(signal as i32))
        .map_err(|cause| Failure::new(FAILED, format!("signals cannot be heard: {cause}")))
}

/// Waits for a lock.
pub(crate) async fn obtain(
    context: &Context,
    locker: &Locker<AnyBackend>,
    key: &Key,
    waiting: &Waiting,
) -> Result<Obtained, Failure> {
    let [mut int, mut term, mut hup, mut quit] = ENDING.map(listen);
    let ended = async {
        tokio::select! {
            _ = int.as_mut().ok()?.recv() => Some(Signal::SIGINT),
            _ = term.as_mut().ok()?.recv() => Some(Signal::SIGTERM),
            _ = hup.as_mut().ok()?.recv() => Some(Signal::SIGHUP),
            _ = quit.as_mut().ok()?.recv() => Some(Signal::SIGQUIT),
        }
    };
    let acquiring = async {
        if waiting.no_wait || waiting.wait == Patience::For(Duration::ZERO) {
            return locker.try_lock(key).await;
        }
        locker.lock(key).await.map(Some)
    };
    tokio::select! {
        biased;
        signal = ended => Ok(Obtained::Interrupted(signal.map_or(FAILED, by_signal))),
        acquired = acquiring => match acquired {
            Ok(Some(guard)) => Ok(Obtained::Lock(Box::new(guard))),
            Ok(None) => Err(not_obtained(context, "the lock is held by somebody else")),
            Err(error) => {
                let failure = Failure::from(error);
                match (failure.code, &waiting.wait) {
                    (NOT_OBTAINED, Patience::For(time)) => Err(not_obtained(
                        context,
                        &format!("the lock was not obtained within {}", output::duration(*time)),
                    )),
                    _ => Err(failure),
                }
            }
        },
        () = indicate(context, locker.backend(), key) => unreachable!("it never ends"),
    }
}

fn not_obtained(context: &Context, message: &str) -> Failure {
    let failure = Failure::new(NOT_OBTAINED, message);
    if context.output.is_live() {
        failure.hint("wait longer with --wait 1m or --wait forever")
    } else {
        failure
    }
}

/// Options for a lock that is waited for like this.
pub(crate) fn options(waiting: &Waiting) -> Result<LockOptions, Failure> {
    let options = LockOptions::default().ttl(ttl(waiting.ttl)?);
    Ok(match waiting.wait {
        // No time at all is one attempt, which needs no limit.
        Patience::For(Duration::ZERO) => options,
        Patience::For(time) => options.timeout(time),
        Patience::Forever => options.wait_forever(),
    })
}

/// Shows at the terminal that somebody waits, and until when the lock is held. Never ends.
async fn indicate(context: &Context, backend: &AnyBackend, key: &Key) {
    const FIRST: Duration = Duration::from_millis(300);
    const AGAIN: Duration = Duration::from_secs(1);
    if !context.output.is_live() {
        return std::future::pending().await;
    }
    let started = Instant::now();
    tokio::time::sleep(FIRST).await;
    // The line goes when this is dropped.
    let mut line = Line::default();
    loop {
        let found = diagnostics::get_by_key(backend, key).await.ok().flatten();
        let until = found.map_or_else(String::new, |found| {
            format!(", held until {}", output::time(found.expires_at))
        });
        let waited = output::duration(Duration::from_secs(started.elapsed().as_secs()));
        line.show(&format!("syncguard: waiting for the lock for {waited}{until} (Ctrl-C ends it)"));
        tokio::time::sleep(AGAIN).await;
    }
}

/// A line at the terminal that is written again and again.
#[derive(Default)]
struct Line {
    is_shown: bool,
}

impl Line {
    fn show(&mut self, text: &str) {
        self.is_shown = true;
        let mut stderr = std::io::stderr().lock();
        drop(write!(stderr, "\r\x1b[2K{text}").and_then(|()| stderr.flush()));
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        if self.is_shown {
            self.show("");
        }
    }
}
