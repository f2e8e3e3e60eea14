//! Signals. They are blocked in every thread, and a dedicated thread receives them. Their default
//! actions stay in place: a signal that was ignored on entry stays ignored, also for the command,
//! and this process can die by the signal that killed the command.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use nix::sys::signal::{self, SigSet, Signal};
use rustix::process::{Resource, Rlimit, setrlimit};
use tokio::sync::Notify;

use crate::exit::{FAILED, Failure};

/// Signals that end a wait for the lock, and are forwarded to the command.
pub(crate) const ENDING: [Signal; 4] =
    [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP, Signal::SIGQUIT];

/// All signals that are forwarded to the command.
pub(crate) const FORWARDED: [Signal; 6] = [
    Signal::SIGINT,
    Signal::SIGTERM,
    Signal::SIGHUP,
    Signal::SIGQUIT,
    Signal::SIGUSR1,
    Signal::SIGUSR2,
];

/// What handles signals: nothing yet, a wait for the lock, or the supervision of the command.
static STAGE: AtomicU8 = AtomicU8::new(UNHANDLED);
const UNHANDLED: u8 = 0;
const WAITING: u8 = 1;
const SUPERVISING: u8 = 2;

static RECEIVED: Mutex<VecDeque<Signal>> = Mutex::new(VecDeque::new());
static CHANGED: Notify = Notify::const_new();
static WAS_ENDED: AtomicBool = AtomicBool::new(false);
static WAS_CONTINUED: AtomicBool = AtomicBool::new(false);
static IGNORED: OnceLock<u64> = OnceLock::new();

/// Starts the thread that receives signals. Call this before other threads start.
pub(crate) fn handle() -> Result<(), Failure> {
    let mut handled = SigSet::empty();
    for signal in FORWARDED.into_iter().chain([Signal::SIGTSTP, Signal::SIGCONT]) {
        if !is_ignored(signal) {
            handled.add(signal);
        }
    }
    let failed =
        |cause: std::io::Error| Failure::new(FAILED, format!("cannot handle signals: {cause}"));
    handled.thread_block().map_err(|cause| failed(cause.into()))?;
    let take_all = move || {
        loop {
            if let Ok(signal) = handled.wait() {
                receive(signal);
            }
        }
    };
    std::thread::Builder::new().name("signals".to_owned()).spawn(take_all).map_err(failed)?;
    Ok(())
}

/// Returns whether this process was started with a signal ignored. Works on Linux only.
pub(crate) fn is_ignored(signal: Signal) -> bool {
    let ignored = IGNORED.get_or_init(|| {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
        mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or_default()
    });
    ignored >> (signal as i32 - 1) & 1 == 1
}

fn receive(signal: Signal) {
    let stage = STAGE.load(Ordering::SeqCst);
    match signal {
        Signal::SIGCONT => WAS_CONTINUED.store(true, Ordering::SeqCst),
        Signal::SIGTSTP if stage != SUPERVISING => {
            // Set before the stop, because the main thread may be the first to continue.
            WAS_CONTINUED.store(true, Ordering::SeqCst);
            return with_default_action(signal, || signal::raise(signal));
        }
        _ if stage == SUPERVISING || stage == WAITING && ENDING.contains(&signal) => {}
        _ => std::process::exit(i32::from(die_by(signal as i32))),
    }
    if ENDING.contains(&signal) {
        WAS_ENDED.store(true, Ordering::SeqCst);
    }
    if signal != Signal::SIGCONT || stage == SUPERVISING {
        RECEIVED.lock().unwrap_or_else(PoisonError::into_inner).push_back(signal);
        CHANGED.notify_one();
    }
}

async fn next() -> Signal {
    loop {
        let changed = CHANGED.notified();
        if let Some(signal) = RECEIVED.lock().unwrap_or_else(PoisonError::into_inner).pop_front() {
            return signal;
        }
        changed.await;
    }
}

/// Waits for a signal that ends a wait. From the first call on, such a signal no longer kills the
/// process.
///
/// # Cancel safety
///
/// No signal is lost when this is dropped.
pub(crate) async fn ending() -> Signal {
    STAGE.fetch_max(WAITING, Ordering::SeqCst);
    next().await
}

/// Makes [`received`] return all signals from now on, instead of their default actions. Call this
/// on the main thread, which prints messages.
pub(crate) fn supervise() {
    // While the command has the terminal, `stty tostop` would stop this process at a message.
    let mut objection = SigSet::empty();
    objection.add(Signal::SIGTTOU);
    objection.thread_block().unwrap_or_default();
    STAGE.store(SUPERVISING, Ordering::SeqCst);
}

/// Ends the supervision: from now on, only signals that end a wait are returned.
pub(crate) fn wait_again() {
    STAGE.store(WAITING, Ordering::SeqCst);
    let is_ending = |signal: &Signal| ENDING.contains(signal);
    RECEIVED.lock().unwrap_or_else(PoisonError::into_inner).retain(is_ending);
}

/// Returns whether this process was asked to end.
pub(crate) fn was_ended() -> bool {
    WAS_ENDED.load(Ordering::SeqCst)
}

/// Waits for the next signal.
///
/// # Cancel safety
///
/// No signal is lost when this is dropped.
pub(crate) async fn received() -> Signal {
    next().await
}

/// Returns whether the process was stopped and continued since it started.
pub(crate) async fn was_continued() -> bool {
    // After a `kill -CONT`, the thread that receives it may need a moment.
    tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    WAS_CONTINUED.load(Ordering::SeqCst)
}

/// Stops this process as Ctrl-Z does, by sending `SIGTSTP` to it, and returns when it is continued.
/// The kernel does not stop a process that no shell could continue. Call this on the main thread,
/// which the kernel prefers for a signal that is not blocked there.
pub(crate) fn stop_by(send: impl FnOnce() -> nix::Result<()>) {
    with_default_action(Signal::SIGTSTP, send);
}

/// Kills this process with the signal that killed the command. If the process survives, because it
/// is process 1 or the signal was ignored on entry, returns the exit code for the signal.
pub(crate) fn die_by(number: i32) -> u8 {
    if let Ok(signal) = Signal::try_from(number) {
        // Only the command's core dump is of interest, not that of this process.
        let none = Rlimit { current: Some(0), maximum: Some(0) };
        setrlimit(Resource::Core, none).unwrap_or_default();
        // The standard library handles some signals once, and then restores their default action.
        for _ in 0..2 {
            with_default_action(signal, || signal::raise(signal));
        }
    }
    u8::try_from(128 + number).unwrap_or(FAILED)
}

/// Sends a signal while this thread does not block it, so that its default action takes place.
fn with_default_action(signal: Signal, send: impl FnOnce() -> nix::Result<()>) {
    let mut this = SigSet::empty();
    this.add(signal);
    this.thread_unblock().unwrap_or_default();
    send().unwrap_or_default();
    this.thread_block().unwrap_or_default();
}
