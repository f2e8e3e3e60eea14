//! The watcher: a second process that survives a `kill -9` of the main process. It leads the
//! process group of the command. Unless it is dismissed, it terminates the group when the main
//! process is gone, or when the lock time that the main process last announced runs out.

use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{self, SigSet, Signal};
use nix::unistd::{self, Pid};
use tokio::net::unix::pipe;

use crate::exit::{FAILED, Failure};
use crate::signals::FORWARDED;
use crate::target;
use crate::terminal::Terminal;

/// The first report of a watcher: from now on, it survives signals to the group.
const READY: u8 = 0;

/// The report of a watcher that terminates the group because the announced time ran out.
const OVERDUE: u8 = u8::MAX;

/// Orders from the main process to the watcher, one per line. A number is an order, too: for how
/// many milliseconds the lock is still held. After `KILL`, it is when to kill the group.
const DISMISS: &str = "dismiss";
const PAUSE: &str = "pause";
const KILL: &str = "kill ";

/// How long a signal to several processes may take to reach the last of them.
const DELIVERY: Duration = Duration::from_millis(50);

/// The main process's handle to the watcher. If it is dropped without [`dismiss`](Self::dismiss),
/// the watcher terminates the group.
#[derive(Debug)]
pub(crate) struct Watcher {
    process: Child,
    orders: Option<ChildStdin>,
    reports: pipe::Receiver,
    group: Pid,
    grace: Duration,
    is_ready: bool,
    is_overdue: bool,
    /// Signals that reached the group from another process.
    seen: Vec<(u8, Instant)>,
    /// Signals that this process sent to the group, and that the watcher will report.
    sent: Vec<u8>,
}

/// A report of the watcher.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WatcherReport {
    /// `READY`, `OVERDUE`, or the number of a signal that reached the group.
    Byte(u8),
    /// The watcher itself ended.
    Ended,
}

impl Watcher {
    /// Starts the watcher in a new process group. Must be called inside a tokio runtime.
    pub(crate) fn start(grace: Duration) -> Result<Self, Failure> {
        let (process, orders, reports) = Self::spawn(grace, Pid::from_raw(0))?;
        let group = Pid::from_raw(i32::try_from(process.id()).unwrap_or(i32::MAX));
        let (seen, sent) = (Vec::new(), Vec::new());
        let (is_ready, is_overdue) = (false, false);
        Ok(Self { process, orders, reports, group, grace, is_ready, is_overdue, seen, sent })
    }

    fn spawn(
        grace: Duration,
        group: Pid,
    ) -> Result<(Child, Option<ChildStdin>, pipe::Receiver), Failure> {
        let failed = |cause: std::io::Error| {
            Failure::new(FAILED, format!("cannot start the watcher process: {cause}"))
        };
        let mut process = Command::new(own_program().map_err(failed)?)
            .arg0("syncguard")
            .arg("__watch")
            .arg(grace.as_millis().to_string())
            .env_remove(target::VARIABLE)
            .process_group(group.as_raw())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(failed)?;
        let orders = process.stdin.take();
        let reports = process.stdout.take().ok_or_else(|| failed(std::io::Error::other("no pipe")));
        let reports = pipe::Receiver::from_owned_fd(OwnedFd::from(reports?)).map_err(failed)?;
        Ok((process, orders, reports))
    }

    /// Waits until the watcher survives signals to its group, and returns the group.
    pub(crate) async fn group(&mut self) -> Result<Pid, Failure> {
        while !self.is_ready {
            if self.report().await == WatcherReport::Ended {
                return Err(Failure::new(FAILED, "the watcher process ended unexpectedly"));
            }
        }
        Ok(self.group)
    }

    /// Replaces a watcher that ended. The new one can join the group, because the group exists as
    /// long as the command runs.
    pub(crate) fn replace(&mut self) -> Result<(), Failure> {
        (self.process, self.orders, self.reports) = Self::spawn(self.grace, self.group)?;
        Ok(())
    }

    /// Waits for the next report.
    ///
    /// # Cancel safety
    ///
    /// No report is lost when this is dropped.
    pub(crate) async fn report(&mut self) -> WatcherReport {
        loop {
            let mut byte = [0];
            match self.reports.try_read(&mut byte) {
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                    if self.reports.readable().await.is_err() {
                        return WatcherReport::Ended;
                    }
                }
                Ok(0) | Err(_) => return WatcherReport::Ended,
                Ok(_) => return self.take(byte[0]),
            }
        }
    }

    fn take(&mut self, byte: u8) -> WatcherReport {
        match byte {
            READY => self.is_ready = true,
            OVERDUE => self.is_overdue = true,
            signal => self.note(signal),
        }
        WatcherReport::Byte(byte)
    }

    fn note(&mut self, signal: u8) {
        if let Some(place) = self.sent.iter().position(|sent| *sent == signal) {
            self.sent.swap_remove(place);
        } else {
            self.seen.push((signal, Instant::now()));
        }
    }

    /// Notes that this process is about to send a signal to the group.
    pub(crate) fn expect(&mut self, signal: Signal) {
        if let Ok(signal) = u8::try_from(signal as i32) {
            self.sent.push(signal);
        }
    }

    /// Returns whether a signal that just reached this process also reached the group, for example
    /// because it was sent to all processes of a service.
    ///
    /// # Cancel safety
    ///
    /// If this is dropped before it completes, it may have forgotten a signal that was seen.
    pub(crate) async fn has_seen(&mut self, signal: Signal) -> bool {
        let signal = u8::try_from(signal as i32).unwrap_or_default();
        let until = tokio::time::Instant::now() + DELIVERY;
        loop {
            self.seen.retain(|(_, at)| at.elapsed() < 2 * DELIVERY);
            if let Some(place) = self.seen.iter().position(|(seen, _)| *seen == signal) {
                self.seen.swap_remove(place);
                return true;
            }
            let report = tokio::time::timeout_at(until, self.report()).await;
            if !matches!(report, Ok(WatcherReport::Byte(_))) {
                return false;
            }
        }
    }

    /// Returns whether the watcher terminated the group because the announced time ran out.
    pub(crate) fn has_ended_group(&mut self) -> bool {
        let mut byte = [0];
        // Read directly, because the runtime may not know yet that the pipe is readable.
        while let Ok(1) = unistd::read(&self.reports, &mut byte) {
            self.take(byte[0]);
        }
        self.is_overdue
    }

    fn order(&mut self, order: &str) {
        if let Some(orders) = &mut self.orders {
            // If the watcher ended, `report` returns that.
            drop(orders.write_all(format!("{order}\n").as_bytes()));
        }
    }

    /// Announces that the lock is held for this long. Unless another order follows, the watcher
    /// terminates the group shortly before that time runs out.
    pub(crate) fn held_for(&mut self, time: Duration) {
        self.order(&time.as_millis().to_string());
    }

    /// Announces that this process kills the group within this time. If it does not, because it is
    /// stopped, the watcher does.
    pub(crate) fn kill_after(&mut self, time: Duration) {
        self.order(&format!("{KILL}{}", time.as_millis()));
    }

    /// Withdraws the announced time, because the command is stopped.
    pub(crate) fn pause(&mut self) {
        self.order(PAUSE);
    }

    /// Tells the watcher to exit and to leave the group alone.
    pub(crate) fn dismiss(&mut self) {
        self.order(DISMISS);
        drop(self.orders.take());
    }
}

/// Waits until the watcher has ended, and the group, too, unless the watcher was dismissed.
impl Drop for Watcher {
    fn drop(&mut self) {
        drop(self.orders.take());
        // It may have been reaped together with others.
        drop(self.process.wait());
    }
}

/// Returns the program of this process, even if another version was installed meanwhile.
fn own_program() -> std::io::Result<PathBuf> {
    let running = PathBuf::from("/proc/self/exe");
    if running.exists() { Ok(running) } else { std::env::current_exe() }
}

/// Runs the watcher, and returns its exit code.
pub(crate) fn watch(grace: Duration) -> u8 {
    // Ctrl-C and all other signals are for the command.
    let all = SigSet::all();
    all.thread_block().unwrap_or_default();
    // `killall syncguard` must not kill the process that cleans up.
    #[cfg(target_os = "linux")]
    nix::sys::prctl::set_name(c"sg-watch").unwrap_or_default();
    let owner = unistd::getpgid(Some(unistd::getppid())).ok();
    report(READY);
    std::thread::spawn(move || {
        loop {
            if let Ok(signal) = all.wait()
                && FORWARDED.contains(&signal)
            {
                report(u8::try_from(signal as i32).unwrap_or(READY));
            }
        }
    });
    let mut orders = Orders::default();
    // A little later than the main process, which does the same if it can.
    let mut margin = grace.mul_f32(0.9);
    let mut expires_at: Option<Instant> = None;
    loop {
        let end_at = expires_at.map(|at| at.checked_sub(margin).unwrap_or(at));
        match orders.next(end_at).as_deref() {
            Ok(DISMISS) => return 0,
            Ok(PAUSE) => expires_at = None,
            Ok(order) => {
                let time = order.strip_prefix(KILL);
                if time.is_some() {
                    // The command was asked to end already.
                    margin = Duration::ZERO;
                }
                let time = time.unwrap_or(order).parse().map(Duration::from_millis);
                expires_at = time.ok().map(|time| Instant::now() + time);
            }
            Err(NoOrder::InTime) => {
                let left = expires_at.map(|at| at.saturating_duration_since(Instant::now()));
                report(OVERDUE);
                return end(owner, before_expiry(left.unwrap_or_default()));
            }
            Err(NoOrder::EverAgain) => {
                let left = expires_at.map(|at| at.saturating_duration_since(Instant::now()));
                return end(owner, left.map_or(grace, |left| grace.min(before_expiry(left))));
            }
        }
    }
}

/// The orders that arrive on standard input.
#[derive(Default)]
struct Orders {
    /// Bytes that were read but not returned yet, possibly an incomplete line.
    rest: Vec<u8>,
}

/// Why no order arrived: not before the deadline, or standard input is closed.
enum NoOrder {
    InTime,
    EverAgain,
}

impl Orders {
    /// Waits for the next order, until this time.
    fn next(&mut self, until: Option<Instant>) -> Result<String, NoOrder> {
        let stdin = std::io::stdin();
        loop {
            if let Some(end) = self.rest.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.rest.drain(..=end).collect();
                return Ok(String::from_utf8_lossy(&line).trim_end().to_owned());
            }
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            // Rounded up, so that it does not end early. Too long a wait is split and repeated.
            let limit = left.map_or(PollTimeout::NONE, |left| {
                let left = left.saturating_add(Duration::from_millis(1));
                PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX)
            });
            let mut ready = [PollFd::new(stdin.as_fd(), PollFlags::POLLIN)];
            match poll(&mut ready, limit) {
                Ok(0) if left.is_some_and(|left| left.is_zero()) => return Err(NoOrder::InTime),
                Ok(0) | Err(Errno::EINTR) => {}
                Ok(_) => {
                    let mut bytes = [0; 256];
                    match unistd::read(&stdin, &mut bytes) {
                        Ok(0) => return Err(NoOrder::EverAgain),
                        Ok(count) => self.rest.extend_from_slice(&bytes[..count]),
                        Err(Errno::EINTR) => {}
                        Err(_) => return Err(NoOrder::EverAgain),
                    }
                }
                Err(_) => return Err(NoOrder::EverAgain),
            }
        }
    }
}

/// Returns a time that ends slightly before `left` does.
pub(crate) fn before_expiry(left: Duration) -> Duration {
    left.saturating_sub((left / 10).min(Duration::from_millis(100)))
}

fn report(byte: u8) {
    let mut stdout = std::io::stdout().lock();
    drop(stdout.write_all(&[byte]).and_then(|()| stdout.flush()));
}

/// Terminates the group: sends `SIGTERM`, and `SIGKILL` after this time.
fn end(owner: Option<Pid>, kill_after: Duration) -> u8 {
    let kill_at = Instant::now() + kill_after;
    let group = unistd::getpgrp();
    if let Some(owner) = owner
        && let Some(terminal) = Terminal::open()
        && terminal.foreground() == Some(group)
    {
        // A calling script that continues may read from the terminal.
        terminal.give(owner);
    }
    for gentle in [Signal::SIGTERM, Signal::SIGCONT] {
        signal::killpg(group, gentle).unwrap_or_default();
    }
    // Only from outside of the group can this process see whether the group is empty. The number of
    // a group is not reused while its leader, normally this process, is alive.
    let is_outside = owner.is_some_and(|owner| unistd::setpgid(Pid::from_raw(0), owner).is_ok());
    while Instant::now() < kill_at && !(is_outside && signal::killpg(group, None).is_err()) {
        std::thread::sleep(Duration::from_millis(5));
    }
    signal::killpg(group, Signal::SIGKILL).unwrap_or_default();
    FAILED
}
