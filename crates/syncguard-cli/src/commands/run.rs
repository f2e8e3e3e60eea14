//! `run`: runs a command while it holds a lock, several locks, or a slot.

use std::mem::ManuallyDrop;
use std::time::{Duration, Instant};

use syncguard::backend::{ExtendRequest, Hint};
use syncguard::{
    AnyBackend, ExtendOutcome, Key, LockBackend, Locker, LostReason, ReleaseOutcome, Ttl,
};

use crate::Context;
use crate::args::{Run, Supervised};
use crate::child::Ending;
use crate::exit::{Failure, LOST, MAX_HOLD, USAGE};
use crate::held::Held;
use crate::output;
use crate::signals;
use crate::supervision::{Outcome, Supervision, is_gone, lost};
use crate::waiting::{self, Obtained};
use crate::watcher::Watcher;

/// How long a release may take before the lock is left to expire.
pub(super) const RELEASE_LIMIT: Duration = Duration::from_secs(5);

pub(crate) async fn run(context: &Context, args: Run) -> Result<u8, Failure> {
    let keys = waiting::keys(&args.keys)?;
    let ttl = waiting::ttl("--ttl", args.waiting.ttl)?;
    let grace = grace(args.waiting.ttl, args.supervised.grace)?;
    check_holding(&args)?;
    let options = waiting::options(&args.waiting)?.renew().stop_margin(grace);
    // The watcher starts while this process connects and waits.
    let mut watcher = Watcher::start(grace)?;
    let connecting = Box::pin(waiting::locker(context, &keys[0], &args.waiting, options));
    let locker = match waiting::unless_ended(connecting).await {
        Ok(locker) => locker?,
        Err(signal) => {
            watcher.dismiss();
            return Ok(signals::die_by(signal as i32));
        }
    };
    // It is shut down below. Files and connections are closed when the process exits.
    let locker = ManuallyDrop::new(locker);
    let held = match obtain(context, &locker, &keys, &args).await {
        Ok(Obtained::Lock(held)) => held,
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
    let (max_hold, hold_at_least) = (args.max_hold, args.hold_at_least);
    let job = Job { supervised: &args.supervised, ttl, grace, max_hold, hold_at_least };
    let ended = job.run(context, &locker, held, watcher).await;
    if !matches!(ended, Ok(Ended::Lost(_))) {
        drop(locker.shutdown_within(RELEASE_LIMIT).await);
    }
    ended?.exit_code(args.max_hold)
}

/// A command to run under what is held.
pub(super) struct Job<'a> {
    pub(super) supervised: &'a Supervised,
    pub(super) ttl: Ttl,
    pub(super) grace: Duration,
    pub(super) max_hold: Option<Duration>,
    pub(super) hold_at_least: Option<Duration>,
}

/// How a job ended.
pub(super) enum Ended {
    Command(Ending),
    /// The command took longer than `--max-hold` and was terminated.
    TooLong,
    /// The lock was lost, and the command was terminated.
    Lost(LostReason),
    /// The command had ended when the lock was found to be lost.
    LostUnnoticed,
}

impl Job<'_> {
    /// Runs the command, and lets go of what is held.
    pub(super) async fn run(
        &self,
        context: &Context,
        locker: &Locker<AnyBackend>,
        held: Held,
        mut watcher: Watcher,
    ) -> Result<Ended, Failure> {
        let held_since = Instant::now();
        let supervision = Supervision {
            context,
            held: &held,
            watcher: &mut watcher,
            ttl: self.ttl,
            grace: self.grace,
            max_hold: self.max_hold,
            on_lost: self.supervised.on_lost.as_deref(),
        };
        let outcome = supervision.run(&self.supervised.command).await;
        // If the supervision failed, dropping the watcher terminates the group. Otherwise the
        // watcher exits while the lock is released.
        let watcher = if outcome.is_ok() {
            watcher.dismiss();
            Some(watcher)
        } else {
            drop(watcher);
            None
        };
        if let Ok(Outcome::Lost(reason)) = outcome {
            if matches!(held, Held::All(_)) && is_gone(&reason) {
                // The others are still held. If that fails, they expire.
                drop(tokio::time::timeout(RELEASE_LIMIT, held.release()).await);
            }
            // A lost lock is not released.
            std::mem::forget(held);
            return Ok(Ended::Lost(reason));
        }
        let rest = self.hold_at_least.and_then(|least| least.checked_sub(held_since.elapsed()));
        let rest = rest.filter(|_| outcome.is_ok());
        let was_held = let_go(context, locker.backend(), held, rest).await;
        drop(watcher);
        match outcome? {
            _ if !was_held => Ok(Ended::LostUnnoticed),
            Outcome::Ended(ending) => Ok(Ended::Command(ending)),
            Outcome::TooLong => Ok(Ended::TooLong),
            Outcome::Lost(_) => unreachable!("BUG: handled above"),
        }
    }
}

impl Ended {
    /// Returns the exit code of this process, or dies by the signal that ended the command.
    pub(super) fn exit_code(self, max_hold: Option<Duration>) -> Result<u8, Failure> {
        match self {
            Self::Command(Ending::Code(code)) => Ok(code),
            Self::Command(Ending::Signal(signal)) => Ok(signals::die_by(signal)),
            Self::TooLong => {
                let longest = output::duration(max_hold.unwrap_or_default());
                let message = format!("the command took longer than {longest} and was terminated");
                Err(Failure::new(MAX_HOLD, message))
            }
            Self::Lost(reason) => {
                let message = format!("{}; the command was terminated", lost(&reason));
                Err(Failure::new(LOST, message))
            }
            Self::LostUnnoticed => {
                let why = lost(&LostReason::NotHeld);
                let message = format!("{why}; the command may have run without it");
                Err(Failure::new(LOST, message))
            }
        }
    }
}

/// Waits for the lock, the locks or the slot. After a timeout, tries once more if the process was
/// stopped meanwhile, because it could not acquire anything during that time.
async fn obtain(
    context: &Context,
    locker: &Locker<AnyBackend>,
    keys: &[Key],
    args: &Run,
) -> Result<Obtained<Held>, Failure> {
    let is_once = waiting::is_once(&args.waiting);
    let acquiring = acquire(locker, keys, args.slots, is_once);
    let obtained =
        waiting::obtain_by(context, locker, &keys[0], &args.waiting, acquiring, Held::fence).await;
    match obtained {
        Err(failure) if failure.is_conflict() && signals::was_continued().await => {
            let held = acquire(locker, keys, args.slots, true).await?;
            held.map(Obtained::Lock).ok_or(failure)
        }
        obtained => obtained,
    }
}

/// Acquires what the options name. Returns `None` if it is held, after one attempt.
async fn acquire(
    locker: &Locker<AnyBackend>,
    keys: &[Key],
    slots: Option<u32>,
    is_once: bool,
) -> syncguard::Result<Option<Held>> {
    match (keys, slots) {
        ([key], Some(slots)) => {
            let semaphore = locker.semaphore(key, slots)?;
            let permit = if is_once {
                semaphore.try_acquire().await?
            } else {
                Some(semaphore.acquire().await?)
            };
            Ok(permit.map(Held::Slot))
        }
        ([key], None) if is_once => Ok(locker.try_lock(key).await?.map(Held::Lock)),
        ([key], None) => Ok(Some(Held::Lock(locker.lock(key).await?))),
        (keys, _) if is_once => Ok(locker.try_lock_all(keys).await?.map(Held::All)),
        (keys, _) => Ok(Some(Held::All(locker.lock_all(keys).await?))),
    }
}

/// Returns the grace, which must be short enough that there is time to renew before it begins.
pub(super) fn grace(ttl: Duration, grace: Option<Duration>) -> Result<Duration, Failure> {
    let grace = grace.unwrap_or(ttl / 3);
    if grace.saturating_add(ttl / 3) < ttl {
        return Ok(grace);
    }
    let (grace, ttl) = (output::duration(grace), output::duration(ttl));
    let message = format!("--grace {grace} must be less than two thirds of --ttl {ttl}");
    Err(Failure::new(USAGE, message))
}

fn check_holding(args: &Run) -> Result<(), Failure> {
    let Some(least) = args.hold_at_least else { return Ok(()) };
    waiting::ttl("--hold-at-least", least).map(drop)
}

/// Releases what is held, or lets the lock expire after the rest of `--hold-at-least`. Returns
/// whether it was held until now, as far as is known.
async fn let_go(
    context: &Context,
    backend: &AnyBackend,
    held: Held,
    rest: Option<Duration>,
) -> bool {
    // A TTL has whole milliseconds, so round up.
    let millis =
        |rest: Duration| u64::try_from(rest.as_millis()).map(|ms| Duration::from_millis(ms + 1));
    let rest = rest.and_then(|rest| Ttl::new(millis(rest).ok()?).ok());
    let is_valid = held.is_valid();
    let (answer, what) = match (rest, held) {
        (Some(rest), Held::Lock(guard)) => {
            let hint = Hint::key(guard.key().clone());
            // The lock is no longer renewed, and expires.
            let request = ExtendRequest::new(guard.detach(), rest).with_hint(hint);
            let answer = tokio::time::timeout(RELEASE_LIMIT, backend.extend(&request)).await;
            let is_held = |outcome| matches!(outcome, ExtendOutcome::Extended(_));
            (answer.map(|answer| answer.map(is_held)), "keep the lock for --hold-at-least")
        }
        (_, held) => {
            let answer = tokio::time::timeout(RELEASE_LIMIT, held.release()).await;
            let is_held = |outcome| outcome == ReleaseOutcome::Released;
            (answer.map(|answer| answer.map(is_held)), "release the lock")
        }
    };
    let cause = match answer {
        Ok(Ok(was_held)) => return was_held,
        Ok(Err(error)) => error.message().to_owned(),
        Err(_elapsed) => "no response in time".to_owned(),
    };
    context.output.note(&format!("cannot {what}: {cause}; it expires after its TTL"));
    is_valid
}
