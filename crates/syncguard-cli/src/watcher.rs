//! The watcher: a second process that outlives a `kill -9` of the first. It leads the group in which
//! the command runs, and ends the group unless it is dismissed: when the first process is gone, and
//! when the time that it last announced is over.

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

/// The first report of a watcher: from now on no signal to the group ends it.
const READY: u8 = 0;

/// The report of a watcher that ends the group because the time is over.
const OVERDUE: u8 = u8::MAX;

/// What the first process tells the watcher, one per line; or for how many milliseconds the lock is
/// still held.
const DISMISS: &str = "dismiss";
const PAUSE: &str = "pause";

/// How long a signal that was sent to many processes takes to reach the last of them.
const DELIVERY: Duration = Duration::from_millis(50);

/// The watcher, as the first process sees it. Dropped without [`dismiss`](Self::dismiss), it ends
/// the group.
#[derive(Debug)]
pub(crate) struct Watcher {
    process: Child,
    orders: Option<ChildStdin>,
    reports: pipe::Receiver,
    group: Pid,
    grace: Duration,
    is_ready: bool,
    is_overdue: bool,
    /// Signals that reached the group, and not from here.
    seen: Vec<(u8, Instant)>,
    /// Signals that were sent to the group from here, and will be reported.
    sent: Vec<u8>,
}

/// Something that the watcher has noticed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Report {
    /// That it is ready, that the time is over, or a signal that has reached the group.
    Byte(u8),
    /// The watcher itself has ended.
    Ended,
}

impl Watcher {
    /// Starts it, in a group of its own. Must be called inside a tokio runtime.
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
            Failure::new(FAILED, format!("cannot start the watcher of the command: {cause}"))
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

    /// The group that it leads, once no signal to the group can end it.
    pub(crate) async fn group(&mut self) -> Result<Pid, Failure> {
        while !self.is_ready {
            if self.report().await == Report::Ended {
                return Err(Failure::new(FAILED, "the watcher of the command has ended"));
            }
        }
        Ok(self.group)
    }

    /// Starts another one in the place of one that has ended. As long as the command runs, its
    /// group exists, and can be joined.
    pub(crate) fn replace(&mut self) -> Result<(), Failure> {
        (self.process, self.orders, self.reports) = Self::spawn(self.grace, self.group)?;
        Ok(())
    }

    /// Waits for the next report.
    ///
    /// # Cancel safety
    ///
    /// No report is lost when this is dropped.
    pub(crate) async fn report(&mut self) -> Report {
        loop {
            let mut byte = [0];
            match self.reports.try_read(&mut byte) {
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                    if self.reports.readable().await.is_err() {
                        return Report::Ended;
                    }
                }
                Ok(0) | Err(_) => return Report::Ended,
                Ok(_) => return self.take(byte[0]),
            }
        }
    }

    fn take(&mut self, byte: u8) -> Report {
        match byte {
            READY => self.is_ready = true,
            OVERDUE => self.is_overdue = true,
            signal => self.note(signal),
        }
        Report::Byte(byte)
    }

    fn note(&mut self, signal: u8) {
        if let Some(place) = self.sent.iter().position(|sent| *sent == signal) {
            self.sent.swap_remove(place);
        } else {
            self.seen.push((signal, Instant::now()));
        }
    }

    /// Notes that a signal is sent to the group from here.
    pub(crate) fn expect(&mut self, signal: Signal) {
        if let Ok(signal) = u8::try_from(signal as i32) {
            self.sent.push(signal);
        }
    }

    /// Whether a signal that has just reached this process has reached the group, too: sent to all
    /// processes of a service, for example.
    ///
    /// # Cancel safety
    ///
    /// Dropped half-way, it may have forgotten a signal that was seen.
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
            if !matches!(report, Ok(Report::Byte(_))) {
                return false;
            }
        }
    }

    /// Whether the watcher has ended the group because the time that was last announced is over.
    pub(crate) fn has_ended_group(&mut self) -> bool {
        let mut byte = [0];
        // Past the runtime, which has not looked since.
        while let Ok(1) = unistd::read(&self.reports, &mut byte) {
            self.take(byte[0]);
        }
        self.is_overdue
    }

    fn order(&mut self, order: &str) {
        if let Some(orders) = &mut self.orders {
            // If it has ended, its reports end too.
            drop(orders.write_all(format!("{order}\n").as_bytes()));
        }
    }

    /// The lock is held for this long, unless more is announced. When that is nearly over, the
    /// watcher ends the group, whatever this process does.
    pub(crate) fn held_for(&mut self, time: Duration) {
        self.order(&time.as_millis().to_string());
    }

    /// The command is stopped, or being ended: nothing is announced.
    pub(crate) fn pause(&mut self) {
        self.order(PAUSE);
    }

    /// All is well: the group is left alone.
    pub(crate) fn dismiss(&mut self) {
        self.order(DISMISS);
        drop(self.orders.take());
    }
}

/// Waits until the watcher has ended, and the group with it unless it was dismissed.
impl Drop for Watcher {
    fn drop(&mut self) {
        drop(self.orders.take());
        // It may have been reaped together with others.
        drop(self.process.wait());
    }
}

/// The program that this process runs, even if another one has been installed since.
fn own_program() -> std::io::Result<PathBuf> {
    let running = PathBuf::from("/proc/self/exe");
    if running.exists() { Ok(running) } else { std::env::current_exe() }
}

/// What the watcher does.
pub(crate) fn watch(grace: Duration) -> u8 {
    // Ctrl-C and everything else is for the command.
    let all = SigSet::all();
    all.thread_block().unwrap_or_default();
    // Who kills all processes called `syncguard` does not mean the one that cleans up after it.
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
    // A little later than the first process, which does the same if it can.
    let patience = grace.mul_f32(0.9);
    let mut expires_at: Option<Instant> = None;
    loop {
        let end_at = expires_at.map(|at| at.checked_sub(patience).unwrap_or(at));
        match orders.next(end_at).as_deref() {
            Ok(DISMISS) => return 0,
            Ok(PAUSE) => expires_at = None,
            Ok(order) => {
                let time = order.parse().map(Duration::from_millis);
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

/// The orders that come by standard input.
#[derive(Default)]
struct Orders {
    /// What was read and is no whole line yet, or was not asked for.
    rest: Vec<u8>,
}

/// Why there is no order.
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
            // Whole milliseconds, so that it is not too early; a wait that is too long is repeated.
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

/// How long to wait so that something is over before this time is.
pub(crate) fn before_expiry(left: Duration) -> Duration {
    left.saturating_sub((left / 10).min(Duration::from_millis(100)))
}

fn report(byte: u8) {
    let mut stdout = std::io::stdout().lock();
    drop(stdout.write_all(&[byte]).and_then(|()| stdout.flush()));
}

/// Ends the group: asks, and kills after this time.
fn end(owner: Option<Pid>, kill_after: Duration) -> u8 {
    let kill_at = Instant::now() + kill_after;
    let group = unistd::getpgrp();
    if let Some(owner) = owner
        && let Some(terminal) = Terminal::open()
        && terminal.foreground() == Some(group)
    {
        // A script that goes on may want to read.
        terminal.give(owner);
    }
    for gentle in [Signal::SIGTERM, Signal::SIGCONT] {
        signal::killpg(group, gentle).unwrap_or_default();
    }
    // From outside of the group it can be seen whether anything is left of it. This process leads
    // it, so its number is not given to another one.
    let is_outside = owner.is_some_and(|owner| unistd::setpgid(Pid::from_raw(0), owner).is_ok());
    while Instant::now() < kill_at && !(is_outside && signal::killpg(group, None).is_err()) {
        std::thread::sleep(Duration::from_millis(5));
    }
    signal::killpg(group, Signal::SIGKILL).unwrap_or_default();
    FAILED
}
