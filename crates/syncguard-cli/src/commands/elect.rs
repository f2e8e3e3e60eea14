//! `elect`: runs a command while this process leads, and campaigns again when it ends.

use std::mem::ManuallyDrop;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use syncguard::primitives::Election;
use syncguard::{AnyBackend, Locker};

use super::run::{Ended, Job, RELEASE_LIMIT, grace};
use crate::Context;
use crate::args::{Conflict, Elect, WaitLimit, Waiting};
use crate::child::Ending;
use crate::event::{Event, millis};
use crate::exit::{Failure, NOT_ACQUIRED};
use crate::held::Held;
use crate::progress::indicate;
use crate::signals;
use crate::supervision::lost;
use crate::waiting;
use crate::watcher::Watcher;

/// The pause before the next campaign after a command that ended at once.
const PAUSE: Duration = Duration::from_secs(1);

pub(crate) async fn elect(context: &Context, args: Elect) -> Result<u8, Failure> {
    let key = waiting::key(&args.key)?;
    let ttl = waiting::ttl("--ttl", args.ttl)?;
    let grace = grace(args.ttl, args.supervised.grace)?;
    let waiting = Waiting {
        ttl: args.ttl,
        wait: WaitLimit::Forever,
        no_wait: false,
        conflict: Conflict { exit_code: NOT_ACQUIRED, fail_fast: false },
        holder: args.holder.clone(),
    };
    let options = waiting::options(&waiting)?.renew().stop_margin(grace);
    let connecting = Box::pin(waiting::locker(context, &key, &waiting, options));
    let locker = match waiting::unless_ended(connecting).await {
        Ok(locker) => locker?,
        Err(signal) => return Ok(signals::die_by(signal as i32)),
    };
    // It is shut down below. Files and connections are closed when the process exits.
    let locker = ManuallyDrop::new(locker);
    let election = locker.election(&key)?;
    let job = Job { supervised: &args.supervised, ttl, grace, max_hold: None, hold_at_least: None };
    loop {
        let started = Instant::now();
        let term = Box::pin(lead(context, &locker, &election, &job)).await;
        let ended = match term {
            Ok(Term::Ended(ended)) => ended,
            Ok(Term::Interrupted(signal)) => {
                drop(locker.shutdown_within(RELEASE_LIMIT).await);
                return Ok(signals::die_by(signal as i32));
            }
            Err(failure) => {
                drop(locker.shutdown_within(RELEASE_LIMIT).await);
                return Err(failure);
            }
        };
        let is_interrupted =
            matches!(ended, Ended::Command(Ending::Signal(by)) if by == Signal::SIGINT as i32);
        if args.once || is_interrupted || signals::was_ended() {
            drop(locker.shutdown_within(RELEASE_LIMIT).await);
            return ended.exit_code(None);
        }
        context.output.note(&format!("{}; campaigning again", describe(&ended)));
        signals::wait_again();
        let rest = PAUSE.saturating_sub(started.elapsed());
        if let Err(signal) = waiting::unless_ended(tokio::time::sleep(rest)).await {
            drop(locker.shutdown_within(RELEASE_LIMIT).await);
            return Ok(signals::die_by(signal as i32));
        }
    }
}

/// How a term ended.
enum Term {
    Ended(Ended),
    /// A signal arrived before it began.
    Interrupted(Signal),
}

/// Campaigns, and runs the command in one term.
async fn lead(
    context: &Context,
    locker: &Locker<AnyBackend>,
    election: &Election<AnyBackend>,
    job: &Job<'_>,
) -> Result<Term, Failure> {
    let mut watcher = Watcher::start(job.grace)?;
    let started = Instant::now();
    let backend = OnceLock::from(locker.backend().clone());
    let campaign = async {
        tokio::select! {
            leadership = election.campaign() => leadership,
            () = indicate(context, election.key(), &backend) => {
                unreachable!("BUG: progress never completes")
            }
        }
    };
    let leadership = match waiting::unless_ended(campaign).await {
        Ok(Ok(leadership)) => leadership,
        Ok(Err(error)) => {
            watcher.dismiss();
            return Err(error.into());
        }
        Err(signal) => {
            watcher.dismiss();
            return Ok(Term::Interrupted(signal));
        }
    };
    context.output.event(&Event::Acquired {
        key: election.key().as_str(),
        fence: leadership.term().to_string(),
        waited_ms: millis(started.elapsed()),
    });
    job.run(context, locker, Held::Lead(leadership), watcher).await.map(Term::Ended)
}

/// Describes how a term ended.
fn describe(ended: &Ended) -> String {
    match ended {
        Ended::Command(Ending::Code(code)) => format!("the command ended with exit code {code}"),
        Ended::Command(Ending::Signal(signal)) => {
            format!("the command was terminated by signal {signal}")
        }
        Ended::TooLong => "the command took too long".to_owned(),
        Ended::Lost(reason) => format!("{}; the command was terminated", lost(reason)),
        Ended::LostUnnoticed => "the lead was lost while the command ended".to_owned(),
    }
}
