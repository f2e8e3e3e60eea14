//! Supervises a command and its lock: forwards signals, stops and continues together with the
//! command, and terminates the command before the lock expires.

use std::ffi::OsString;
use std::time::Duration;

use nix::sys::signal::{self, Signal};
use nix::unistd::Pid;
use rustix::process::WaitOptions;
use syncguard::{ExtendOutcome, LostReason, Ttl};
use tokio::time::{Instant, MissedTickBehavior};

use crate::child::{Change, CommandProcess, Ending};
use crate::exit::Failure;
use crate::held::Held;
use crate::output::{self, Output};
use crate::signals::{self, FORWARDED};
use crate::spawn::spawn;
use crate::watcher::{Watcher, WatcherReport, before_expiry};
use crate::{Context, target, waiting};

/// A command under supervision, with its lock and its limits.
pub(crate) struct Supervision<'a> {
    pub(crate) context: &'a Context,
    pub(crate) held: &'a Held,
    pub(crate) watcher: &'a mut Watcher,
    pub(crate) ttl: Ttl,
    pub(crate) grace: Duration,
    pub(crate) max_hold: Option<Duration>,
    pub(crate) on_lost: Option<&'a str>,
}

/// How the supervision ended.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// The command ended by itself.
    Ended(Ending),
    /// The command took longer than `--max-hold` and was terminated.
    TooLong,
    /// The lock was lost, and the command was terminated.
    Lost(LostReason),
}

/// Why the command must end.
enum Stop {
    TooLong,
    Lost(LostReason),
    /// The lock was lost while the command was stopped, so the command must not continue.
    LostWhileStopped(LostReason),
}

impl Supervision<'_> {
    /// Runs the command to its end.
    pub(crate) async fn run(mut self, command: &[OsString]) -> Result<Outcome, Failure> {
        // Before the start: as long as SIGCHLD is ignored, the end of a child goes unnoticed.
        let mut changed = waiting::listen(Signal::SIGCHLD)?;
        let group = self.watcher.group().await?;
        if let Some(reason) = self.loss_if_not_fresh().await {
            return Ok(Outcome::Lost(reason));
        }
        signals::supervise();
        self.watcher.held_for(self.held.remaining());
        let mut process = CommandProcess::start(command, group, self.held)?;
        let outcome = self.supervise(&mut process, &mut changed).await;
        process.release_terminal();
        outcome
    }

    async fn supervise(
        &mut self,
        process: &mut CommandProcess,
        changed: &mut tokio::signal::unix::Signal,
    ) -> Result<Outcome, Failure> {
        let started = Instant::now();
        let held = self.held;
        // The guard renews every third of the TTL, so this notices a renewal before the next one.
        let period = self.ttl.as_duration() / 6;
        let mut tick = tokio::time::interval_at(started + period, period);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut expires_at = started + held.remaining();
        let too_long = self.max_hold.and_then(|longest| started.checked_add(longest));
        let mut was_stopped_at = None;
        let stop = loop {
            match process.change() {
                Change::Ended(ending) => {
                    if ending == Ending::Signal(Signal::SIGINT as i32) {
                        process.pass_interrupt_on();
                    }
                    if self.watcher.has_ended_group() {
                        return Ok(Outcome::Lost(LostReason::Expiring));
                    }
                    return Ok(Outcome::Ended(ending));
                }
                Change::Stopped(by) if process.may_have_the_terminal(by) => process.resume(),
                Change::Stopped(by) => {
                    self.watcher.pause();
                    let goes_on = process.stop_with_it(by);
                    if let Some(reason) = self.loss().await {
                        break Stop::LostWhileStopped(reason);
                    }
                    was_stopped_at = Some(Instant::now());
                    self.watcher.held_for(held.remaining());
                    if goes_on {
                        process.resume();
                    }
                }
                Change::None => {}
            }
            tokio::select! {
                _ = changed.recv() => {}
                signal = signals::received() => match signal {
                    // Sent by this process to the group that it shares with a script.
                    Signal::SIGTSTP if was_stopped_at.is_some_and(is_recent) => {}
                    // Ctrl-Z in a pipeline, where this process has the terminal: it stops when the
                    // command does.
                    Signal::SIGTSTP => process.send(Signal::SIGTSTP),
                    Signal::SIGCONT => if let Some(reason) = self.loss().await {
                        break Stop::Lost(reason);
                    },
                    signal => self.pass_on(process, signal).await,
                },
                report = self.watcher.report() => if report == WatcherReport::Ended
                    && !process.has_ended()
                {
                    if let Err(failure) = self.watcher.replace() {
                        // The command must not run without a watcher.
                        self.ask_and_kill(process, changed, Instant::now() + self.grace).await;
                        return Err(failure);
                    }
                    self.watcher.held_for(held.remaining());
                },
                reason = held.lost() => break Stop::Lost(reason),
                _ = tick.tick() => {
                    let remaining = held.remaining();
                    if !remaining.is_zero() {
                        expires_at = Instant::now() + remaining;
                        self.watcher.held_for(remaining);
                    }
                }
                () = sleep_until(too_long) => break Stop::TooLong,
            }
        };
        Ok(self.end(process, changed, stop, expires_at).await)
    }

    /// Forwards a signal, unless it has reached the command already.
    async fn pass_on(&mut self, process: &CommandProcess, signal: Signal) {
        if FORWARDED.contains(&signal) && !self.watcher.has_seen(signal).await {
            self.watcher.expect(signal);
            process.forward(signal);
        }
    }

    /// Returns why the lock is lost, if it is. Asks the store unless the lock was just acquired.
    async fn loss_if_not_fresh(&self) -> Option<LostReason> {
        const FRESH: Duration = Duration::from_millis(100);
        let age = self.ttl.as_duration().saturating_sub(self.held.remaining());
        if age < FRESH.min(self.ttl.as_duration() / 6) { None } else { self.loss().await }
    }

    /// Returns why the lock is lost, if it is. Asks the store; if that fails, the guard's clock
    /// decides.
    async fn loss(&self) -> Option<LostReason> {
        match self.held.extend(self.ttl).await {
            Ok(ExtendOutcome::Extended(_)) => None,
            Err(_) if self.held.is_valid() => None,
            Ok(ExtendOutcome::NotHeld(_)) | Err(_) => Some(self.held.lost().await),
        }
    }

    /// Terminates the process group of the command, with `SIGTERM` and then `SIGKILL`.
    async fn end(
        &mut self,
        process: &mut CommandProcess,
        changed: &mut tokio::signal::unix::Signal,
        stop: Stop,
        expires_at: Instant,
    ) -> Outcome {
        let now = Instant::now();
        let until_expiry = before_expiry(expires_at.saturating_duration_since(now));
        let (outcome, why, grace) = match stop {
            Stop::TooLong => {
                let longest = output::duration(self.max_hold.unwrap_or_default());
                let why = format!("the command took longer than {longest}");
                (Outcome::TooLong, why, self.grace)
            }
            Stop::LostWhileStopped(reason) => {
                let why = lost(&reason);
                (Outcome::Lost(reason), why, Duration::ZERO)
            }
            Stop::Lost(reason) => {
                let why = lost(&reason);
                // A lock that is already gone has no expiry that could limit the grace.
                let grace =
                    if is_gone(&reason) { self.grace } else { self.grace.min(until_expiry) };
                (Outcome::Lost(reason), why, grace)
            }
        };
        let hook = match &outcome {
            Outcome::Lost(reason) => self.start_hook(reason),
            _ => None,
        };
        if !grace.is_zero() {
            let shown = output::duration(grace);
            self.context.output.note(&format!("{why}; sending SIGTERM; SIGKILL in {shown}"));
        }
        let output = self.context.output;
        let end_hook = async {
            if let Some(hook) = hook {
                end_hook(output, hook, now).await;
            }
        };
        tokio::join!(self.ask_and_kill(process, changed, now + grace), end_hook);
        outcome
    }

    /// Sends `SIGTERM`. When the command has ended, and no later than at `kill_at`, sends `SIGKILL`
    /// to the rest of the group, because nothing may continue without a lock.
    async fn ask_and_kill(
        &mut self,
        process: &mut CommandProcess,
        changed: &mut tokio::signal::unix::Signal,
        kill_at: Instant,
    ) {
        /// The watcher acts only if this process does not.
        const LATER: Duration = Duration::from_millis(100);
        // In case this process is stopped meanwhile.
        self.watcher.kill_after(kill_at.saturating_duration_since(Instant::now()) + LATER);
        if Instant::now() < kill_at {
            self.watcher.expect(Signal::SIGTERM);
            process.forward(Signal::SIGTERM);
            self.wait_for_end(process, changed, kill_at).await;
        }
        process.send(Signal::SIGKILL);
        while !process.has_ended() {
            changed.recv().await;
        }
    }

    async fn wait_for_end(
        &mut self,
        process: &mut CommandProcess,
        changed: &mut tokio::signal::unix::Signal,
        kill_at: Instant,
    ) {
        loop {
            match process.change() {
                Change::Ended(_) => return,
                Change::Stopped(_) => process.send(Signal::SIGCONT),
                Change::None => {}
            }
            tokio::select! {
                _ = changed.recv() => {}
                signal = signals::received() => self.pass_on(process, signal).await,
                () = tokio::time::sleep_until(kill_at) => return,
            }
        }
    }

    /// Starts the `--on-lost` command, which runs while the main command is terminated.
    fn start_hook(&self, reason: &LostReason) -> Option<Pid> {
        let variables = self.held.variables();
        let mut variables: Vec<_> =
            variables.iter().map(|(name, value)| (*name, Some(value.as_str()))).collect();
        variables.push(("SYNCGUARD_LOST_REASON", Some(reason.as_str())));
        variables.push((target::VARIABLE, None));
        let started = spawn(&["sh", "-c", self.on_lost?].map(OsString::from), &variables, None);
        if let Err(cause) = &started {
            self.context.output.print_note(&format!("cannot run the --on-lost command: {cause}"));
        }
        started.ok()
    }
}

/// Waits for the `--on-lost` command, and kills it after 10 seconds.
async fn end_hook(output: Output, hook: Pid, started: Instant) {
    const LIMIT: Duration = Duration::from_secs(10);
    // `CommandProcess::change` may have reaped it already.
    while signal::kill(hook, None).is_ok() && !has_ended(hook) {
        if started.elapsed() > LIMIT {
            output.print_note("the --on-lost command took longer than 10s and was killed");
            signal::kill(hook, Signal::SIGKILL).unwrap_or_default();
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn has_ended(process: Pid) -> bool {
    let process = rustix::process::Pid::from_raw(process.as_raw());
    !matches!(rustix::process::waitpid(process, WaitOptions::NOHANG), Ok(None))
}

/// Returns whether the store has reported that the lock is gone, so that it can be reached.
pub(crate) fn is_gone(reason: &LostReason) -> bool {
    matches!(reason, LostReason::NotHeld | LostReason::Broken { .. })
}

/// Returns the message about a lost lock.
pub(crate) fn lost(reason: &LostReason) -> String {
    match reason {
        LostReason::NotHeld => "lock lost: broken, or no longer in the store".to_owned(),
        LostReason::Broken { by, reason } => {
            let by = by.as_ref().map(|by| format!(" by {}", output::holder(by)));
            let reason = reason.as_deref().map(|reason| format!(": {}", output::printable(reason)));
            format!("lock lost: broken{}{}", by.unwrap_or_default(), reason.unwrap_or_default())
        }
        LostReason::Expiring | LostReason::Unreachable => {
            "lock lost: it could not be renewed in time".to_owned()
        }
        reason => format!("lock lost: {reason}"),
    }
}

fn is_recent(at: Instant) -> bool {
    at.elapsed() < Duration::from_millis(100)
}

async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}
