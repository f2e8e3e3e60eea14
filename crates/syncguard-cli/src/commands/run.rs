//! `syncguard run`: a command while the lock is held.

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use syncguard::{AnyBackend, Extend, LockGuard, LostReason, Ttl};

use crate::Context;
use crate::args::Run;
use crate::child::{Change, CommandProcess, by_signal};
use crate::exit::{Failure, LOST, MAX_HOLD, USAGE};
use crate::output;
use crate::waiting::{self, Obtained};
use crate::watcher::Watcher;

/// Signals that are passed on to the command and all that it has started.
const FORWARDED: [Signal; 6] = [
    Signal::SIGINT,
    Signal::SIGTERM,
    Signal::SIGHUP,
    Signal::SIGQUIT,
    Signal::SIGUSR1,
    Signal::SIGUSR2,
];

/// How long releasing may take before it is left to the lock's time to live.
const RELEASE_LIMIT: Duration = Duration::from_secs(5);

pub(crate) async fn run(context: &Context, args: Run) -> Result<u8, Failure> {
    let key = waiting::key(&args.key)?;
    let options = waiting::options(&args.waiting)?.renew();
    if let Some(least) = args.hold_at_least {
        Ttl::new(least)
            .map_err(|error| Failure::new(USAGE, format!("--hold-at-least: {error}")))?;
    }
    // It starts while we connect and wait.
    let mut watcher = Watcher::start(args.grace)?;
    let locker = waiting::locker(context, &key, &args.waiting, options).await?;
    let guard = match waiting::obtain(context, &locker, &key, &args.waiting).await {
        Ok(Obtained::Lock(guard)) => guard,
        Ok(Obtained::Interrupted(signal)) => {
            drop(locker.shutdown_within(RELEASE_LIMIT).await);
            return Ok(by_signal(signal));
        }
        Err(failure) => {
            drop(locker.shutdown_within(RELEASE_LIMIT).await);
            return Err(failure);
        }
    };
    let held_since = Instant::now();
    let ended = match watcher.group() {
        Ok(group) => {
            let process = CommandProcess::start(&args.command, group, &key, guard.fence());
            match process {
                Ok(process) => supervise(context, &args, &process, &guard).await,
                Err(failure) => Err(failure),
            }
        }
        Err(failure) => Err(failure),
    };
    drop(watcher);
    let rest = args.hold_at_least.and_then(|least| least.checked_sub(held_since.elapsed()));
    let_go(context, *guard, rest.filter(|_| ended.is_ok())).await;
    drop(locker.shutdown_within(RELEASE_LIMIT).await);
    ended
}

/// Waits for the end of the command, and passes signals on to it.
async fn supervise(
    context: &Context,
    args: &Run,
    process: &CommandProcess,
    guard: &LockGuard<AnyBackend>,
) -> Result<u8, Failure> {
    let mut changed = waiting::listen(Signal::SIGCHLD)?;
    let mut stop = waiting::listen(Signal::SIGTSTP)?;
    let (sender, mut signals) = tokio::sync::mpsc::unbounded_channel();
    for signal in FORWARDED {
        let (mut heard, sender) = (waiting::listen(signal)?, sender.clone());
        tokio::spawn(async move {
            while heard.recv().await.is_some() && sender.send(signal).is_ok() {}
        });
    }
    let too_long = async {
        match args.max_hold {
            Some(longest) => tokio::time::sleep(longest).await,
            None => std::future::pending().await,
        }
    };
    tokio::pin!(too_long);
    let (code, why) = loop {
        match process.change() {
            Change::Ended(code) => {
                if code == by_signal(Signal::SIGINT) {
                    process.pass_interrupt_on();
                }
                process.release_terminal();
                return Ok(code);
            }
            Change::Stopped(by) => process.stop_with_it(by),
            Change::None => {}
        }
        tokio::select! {
            _ = changed.recv() => {}
            Some(signal) = signals.recv() => process.forward(signal),
            // Typed in a pipeline, where the terminal is ours: we follow when the command stops.
            _ = stop.recv() => process.send(Signal::SIGTSTP),
            reason = guard.lost() => break (LOST, lost(reason)),
            () = &mut too_long => {
                let longest = output::duration(args.max_hold.unwrap_or_default());
                break (MAX_HOLD, format!("the command took longer than {longest}"));
            }
        }
    };
    let grace = output::duration(args.grace);
    context.output.note(&format!("{why}; sending SIGTERM; SIGKILL in {grace}"));
    end(process, args.grace, &mut changed).await;
    process.release_terminal();
    Err(Failure::new(code, format!("{why}; the command was ended")))
}

fn lost(reason: LostReason) -> String {
    format!("lock lost: {reason}")
}

/// Ends the command and all that it has started: asks first, then kills.
async fn end(process: &CommandProcess, grace: Duration, changed: &mut tokio::signal::unix::Signal) {
    process.forward(Signal::SIGTERM);
    let give_up_at = tokio::time::Instant::now() + grace;
    while !matches!(process.change(), Change::Ended(_)) {
        tokio::select! {
            _ = changed.recv() => {}
            () = tokio::time::sleep_until(give_up_at) => break,
        }
    }
    // Whatever it has left behind must not go on without a lock.
    process.send(Signal::SIGKILL);
    while !matches!(process.change(), Change::Ended(_)) {
        changed.recv().await;
    }
}

/// Releases the lock, or leaves it to the rest of its time.
async fn let_go(context: &Context, mut guard: LockGuard<AnyBackend>, rest: Option<Duration>) {
    // A lock lives for whole milliseconds.
    let millis =
        |rest: Duration| u64::try_from(rest.as_millis()).map(|ms| Duration::from_millis(ms + 1));
    let rest = rest.and_then(|rest| Ttl::new(millis(rest).ok()?).ok());
    if let Some(rest) = rest
        && matches!(guard.extend(rest).await, Ok(Extend::Extended(_)))
    {
        // Nobody needs its id: it ends by itself.
        let _lock_id = guard.leak();
        return;
    }
    if let Err(error) = guard.release().await {
        context.output.note(&format!("the lock could not be released and will expire: {error}"));
    }
}
