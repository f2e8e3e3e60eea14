//! `run`: runs a command while it holds a lock.

use std::mem::ManuallyDrop;
use std::time::{Duration, Instant};

use syncguard::backend::{ExtendRequest, Hint};
use syncguard::{
    AnyBackend, ExtendOutcome, Key, LockBackend, LockGuard, Locker, LostReason, ReleaseOutcome, Ttl,
};

use crate::Context;
use crate::args::Run;
use crate::child::Ending;
use crate::exit::{Failure, LOST, MAX_HOLD, USAGE};
use crate::output;
use crate::signals;
use crate::supervision::{Outcome, Supervision, lost};
use crate::waiting::{self, Obtained};
use crate::watcher::Watcher;

/// How long a release may take before the lock is left to expire.
const RELEASE_LIMIT: Duration = Duration::from_secs(5);

pub(crate) async fn run(context: &Context, args: Run) -> Result<u8, Failure> {
    let key = waiting::key(&args.key)?;
    let ttl = waiting::ttl(args.waiting.ttl)?;
    let grace = grace(&args)?;
    check_holding(&args)?;
    let options = waiting::options(&args.waiting)?.renew().stop_margin(grace);
    // The watcher starts while this process connects and waits.
    let mut watcher = Watcher::start(grace)?;
    let connecting = Box::pin(waiting::locker(context, &key, &args.waiting, options));
    let locker = match waiting::unless_ended(connecting).await {
        Ok(locker) => locker?,
        Err(signal) => {
            watcher.dismiss();
            return Ok(signals::die_by(signal as i32));
        }
    };
    // It is shut down below. Files and connections are closed when the process exits.
    let locker = ManuallyDrop::new(locker);
    let guard = match obtain(context, &locker, &key, &args).await {
        Ok(Obtained::Lock(guard)) => guard,
        not_obtained => {
            watcher.dismiss();
            drop(locker.shutdown_within(RELEASE_LIMIT).await);
            drop(watcher);
            return match not_obtained {
                Ok(Obtained::Interrupted(signal)) => Ok(signals::die_by(signal as i32)),
                Ok(Obtained::Lock(_)) => unreachable!("BUG: matched above"),
                Err(failure) => Err(failure),
            };
        }
    };
    let held_since = Instant::now();
    let supervision = Supervision {
        context,
        guard: &guard,
        watcher: &mut watcher,
        ttl,
        grace,
        max_hold: args.max_hold,
        on_lost: args.on_lost.as_deref(),
    };
    let outcome = supervision.run(&args.command, &key).await;
    // If the supervision failed, dropping the watcher terminates the group. Otherwise the watcher
    // exits while the lock is released.
    let watcher = if outcome.is_ok() {
        watcher.dismiss();
        Some(watcher)
    } else {
        drop(watcher);
        None
    };
    if let Ok(Outcome::Lost(reason)) = &outcome {
        // A lost lock is not released, and its id is not needed.
        let _lock_id = guard.detach();
        return Err(Failure::new(LOST, format!("{}; the command was terminated", lost(reason))));
    }
    let rest = args.hold_at_least.and_then(|least| least.checked_sub(held_since.elapsed()));
    let rest = rest.filter(|_| outcome.is_ok());
    let was_held = let_go(context, locker.backend(), *guard, rest).await;
    drop(locker.shutdown_within(RELEASE_LIMIT).await);
    drop(watcher);
    if !was_held && outcome.is_ok() {
        let why = lost(&LostReason::NotHeld);
        let message = format!("{why}; the command may have run without it");
        return Err(Failure::new(LOST, message));
    }
    match outcome? {
        Outcome::Ended(Ending::Code(code)) => Ok(code),
        Outcome::Ended(Ending::Signal(signal)) => Ok(signals::die_by(signal)),
        Outcome::TooLong => {
            let longest = output::duration(args.max_hold.unwrap_or_default());
            let message = format!("the command took longer than {longest} and was terminated");
            Err(Failure::new(MAX_HOLD, message))
        }
        Outcome::Lost(_) => unreachable!("BUG: handled above"),
    }
}

/// Waits for the lock. After a timeout, tries once more if the process was stopped meanwhile,
/// because it could not acquire the lock during that time.
async fn obtain(
    context: &Context,
    locker: &Locker<AnyBackend>,
    key: &Key,
    args: &Run,
) -> Result<Obtained, Failure> {
    match waiting::obtain(context, locker, key, &args.waiting).await {
        Err(failure) if failure.is_conflict() && signals::was_continued().await => {
            let guard = locker.try_lock(key).await?;
            guard.map(|guard| Obtained::Lock(Box::new(guard))).ok_or(failure)
        }
        obtained => obtained,
    }
}

/// Returns the grace, which must be short enough that there is time to renew before it begins.
fn grace(args: &Run) -> Result<Duration, Failure> {
    let ttl = args.waiting.ttl;
    let grace = args.grace.unwrap_or(ttl / 3);
    if grace.saturating_add(ttl / 3) < ttl {
        return Ok(grace);
    }
    let (grace, ttl) = (output::duration(grace), output::duration(ttl));
    let message = format!("--grace {grace} must be less than two thirds of --ttl {ttl}");
    Err(Failure::new(USAGE, message))
}

fn check_holding(args: &Run) -> Result<(), Failure> {
    let Some(least) = args.hold_at_least else { return Ok(()) };
    Ttl::new(least)
        .map_err(|error| Failure::new(USAGE, format!("--hold-at-least: {}", error.message())))?;
    Ok(())
}

/// Releases the lock, or lets it expire after the rest of `--hold-at-least`. Returns whether it was
/// held until now, as far as is known.
async fn let_go(
    context: &Context,
    backend: &AnyBackend,
    guard: LockGuard<AnyBackend>,
    rest: Option<Duration>,
) -> bool {
    // A TTL has whole milliseconds, so round up.
    let millis =
        |rest: Duration| u64::try_from(rest.as_millis()).map(|ms| Duration::from_millis(ms + 1));
    let rest = rest.and_then(|rest| Ttl::new(millis(rest).ok()?).ok());
    if let Some(rest) = rest {
        let is_valid = guard.is_valid();
        let hint = Hint::key(guard.key().clone());
        // The lock is no longer renewed, and expires.
        let request = ExtendRequest::new(guard.detach(), rest).with_hint(hint);
        return match tokio::time::timeout(RELEASE_LIMIT, backend.extend(&request)).await {
            Ok(Ok(ExtendOutcome::Extended(_))) => true,
            Ok(Ok(ExtendOutcome::NotHeld(_))) => false,
            Ok(Err(error)) => {
                context.output.note(&format!(
                    "cannot keep the lock for --hold-at-least: {}; it expires after its TTL",
                    error.message()
                ));
                is_valid
            }
            Err(_elapsed) => {
                context.output.note(
                    "cannot keep the lock for --hold-at-least: no response in time; it expires \
                     after its TTL",
                );
                is_valid
            }
        };
    }
    let is_valid = guard.is_valid();
    match tokio::time::timeout(RELEASE_LIMIT, guard.release()).await {
        Ok(Ok(ReleaseOutcome::Released)) => true,
        Ok(Ok(ReleaseOutcome::NotHeld(_))) => false,
        Ok(Err(error)) => {
            context.output.note(&format!(
                "cannot release the lock: {}; it expires after its TTL",
                error.message()
            ));
            is_valid
        }
        Err(_elapsed) => {
            context
                .output
                .note("cannot release the lock: no response in time; it expires after its TTL");
            is_valid
        }
    }
}
