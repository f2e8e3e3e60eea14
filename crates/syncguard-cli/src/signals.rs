//! Signals. They are blocked in every thread, and one thread of their own takes them, so their
//! default actions stay in place: a signal that was ignored on entry stays ignored, for the command
//! too, and this process can die by a signal as the command did.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use nix::sys::signal::{self, SigSet, Signal};
use rustix::process::{Resource, Rlimit, setrlimit};
use tokio::sync::Notify;

use crate::exit::{FAILED, Failure};

/// Signals that end a wait for the lock, and that are passed on to the command.
pub(crate) const ENDING: [Signal; 4] =
    [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP, Signal::SIGQUIT];

/// All that are passed on to the command.
pub(crate) const FORWARDED: [Signal; 6] = [
    Signal::SIGINT,
    Signal::SIGTERM,
    Signal::SIGHUP,
    Signal::SIGQUIT,
    Signal::SIGUSR1,
    Signal::SIGUSR2,
];

/// Who handles signals: no one yet, a wait for the lock, or the supervision of the command.
static STAGE: AtomicU8 = AtomicU8::new(UNHANDLED);
const UNHANDLED: u8 = 0;
const WAITING: u8 = 1;
const SUPERVISING: u8 = 2;

static RECEIVED: Mutex<VecDeque<Signal>> = Mutex::new(VecDeque::new());
static CHANGED: Notify = Notify::const_new();
static WAS_CONTINUED: AtomicBool = AtomicBool::new(false);
static IGNORED: OnceLock<u64> = OnceLock::new();

/// Takes over the handling of signals. To be called before other threads start.
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

/// Whether this process was started with a signal ignored. Known on Linux only.
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
            // Before it is: the other thread may be faster when the process goes on.
            WAS_CONTINUED.store(true, Ordering::SeqCst);
            return with_default_action(signal, || signal::raise(signal));
        }
        _ if stage == SUPERVISING || stage == WAITING && ENDING.contains(&signal) => {}
        _ => std::process::exit(i32::from(die_by(signal as i32))),
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

/// Waits for a signal that ends a wait. From the first call on, such a signal does not end the
/// process by itself.
///
/// # Cancel safety
///
/// No signal is lost when this is dropped.
pub(crate) async fn ending() -> Signal {
    STAGE.fetch_max(WAITING, Ordering::SeqCst);
    next().await
}

/// From now on, no signal has its default action: [`received`] returns them all.
pub(crate) fn supervise() {
    STAGE.store(SUPERVISING, Ordering::SeqCst);
}

/// Waits for the next signal.
///
/// # Cancel safety
///
/// No signal is lost when this is dropped.
pub(crate) async fn received() -> Signal {
    next().await
}

/// Whether the process was stopped and continued since it began.
pub(crate) async fn was_continued() -> bool {
    // After a `kill -CONT`, the thread that takes it may need a moment.
    tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    WAS_CONTINUED.load(Ordering::SeqCst)
}

/// Stops this process as Ctrl-Z does, by sending `SIGTSTP` to it, and returns when it is continued.
/// The kernel does not stop what no shell could continue. On the main thread, which the kernel
/// prefers for a signal that is not blocked there.
pub(crate) fn stop_by(send: impl FnOnce() -> nix::Result<()>) {
    with_default_action(Signal::SIGTSTP, send);
}

/// Ends this process by a signal, as the command was ended. Returns the code that stands for the
/// signal if the process survives it: as process 1, and where the signal was ignored on entry.
pub(crate) fn die_by(number: i32) -> u8 {
    if let Ok(signal) = Signal::try_from(number) {
        // The core of the command is of interest, not ours.
        let none = Rlimit { current: Some(0), maximum: Some(0) };
        setrlimit(Resource::Core, none).unwrap_or_default();
        with_default_action(signal, || signal::raise(signal));
    }
    u8::try_from(128 + number).unwrap_or(FAILED)
}

/// Sends a signal to this thread, and lets it act.
fn with_default_action(signal: Signal, send: impl FnOnce() -> nix::Result<()>) {
    let mut this = SigSet::empty();
    this.add(signal);
    this.thread_unblock().unwrap_or_default();
    send().unwrap_or_default();
    this.thread_block().unwrap_or_default();
}
