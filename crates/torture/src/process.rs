//! The client processes, as the coordinator sees them.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::client::ClientOptions;
use crate::history::{Allowance, Event, FaultSpan, History, now};
use crate::journal::watch_gaps;

/// The history, to which the processes add while the checker reads.
#[derive(Clone, Debug, Default)]
pub struct SharedHistory(Arc<Mutex<History>>);

impl SharedHistory {
    /// Returns the history.
    pub fn get(&self) -> MutexGuard<'_, History> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes when the wall clock of this machine jumps, until the history is dropped: then locks
    /// end early or late, and nothing in the run is to blame.
    pub fn watch_clock(&self) {
        const INTERVAL: Duration = Duration::from_millis(50);
        /// Less than how exactly the end of a lock is known.
        const JUMP: i64 = 15_000;
        let history = Arc::downgrade(&self.0);
        std::thread::spawn(move || {
            let mut last = (now(), wall_clock_ahead());
            loop {
                std::thread::sleep(INTERVAL);
                let next = (now(), wall_clock_ahead());
                let Some(history) = history.upgrade() else { return };
                if (next.1 - last.1).abs() > JUMP {
                    let mut history = history.lock().unwrap_or_else(PoisonError::into_inner);
                    history.faults.push(FaultSpan {
                        name: "clock of this machine jumps".to_owned(),
                        client: None,
                        from: last.0,
                        to: next.0,
                        allows: Allowance::Expiry,
                    });
                }
                last = next;
            }
        });
    }

    /// Notes when this process does not run, until the history is dropped.
    pub fn watch_lags(&self) {
        let history = Arc::downgrade(&self.0);
        watch_gaps(move |from, to| {
            let Some(history) = history.upgrade() else { return false };
            history.lock().unwrap_or_else(PoisonError::into_inner).lags.push((from, to));
            true
        });
    }
}

/// Returns how far the wall clock is ahead of the clock of the history, in microseconds. The system
/// may suspend this thread between the two, so it takes the closest of several readings.
fn wall_clock_ahead() -> i64 {
    let read = || {
        let before = now();
        let wall = std::time::UNIX_EPOCH.elapsed().unwrap_or_default().as_micros();
        let took = now() - before;
        (took, i64::try_from(wall).unwrap_or(0) - i64::try_from(before).unwrap_or(0))
    };
    std::iter::repeat_with(read).take(5).min().map_or(0, |(_, ahead)| ahead)
}

/// A client process.
#[derive(Debug)]
pub struct ClientProcess {
    child: Child,
    orders: Option<ChildStdin>,
    reader: Option<JoinHandle<()>>,
    /// Its number in the history.
    number: usize,
    history: SharedHistory,
    log: PathBuf,
}

impl ClientProcess {
    /// Starts a client. Its log goes to a file in a directory.
    pub fn start(
        client: usize,
        options: &ClientOptions,
        history: &SharedHistory,
        directory: &Path,
    ) -> std::io::Result<Self> {
        // A shell, because a signal that it ignores stays ignored: a write beyond the limit for
        // files then fails instead of ending the process.
        const START: &str = r#"trap "" XFSZ; exec "$0" "$@""#;
        let number = history.get().add_process(client, now());
        let log = directory.join(format!("client-{client}-{number}.log"));
        let mut child = Command::new("sh")
            .args(["-c", START])
            .arg(std::env::current_exe()?)
            .args(options.to_arguments())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(File::create(&log)?)
            .spawn()?;
        let orders = child.stdin.take();
        let events = child.stdout.take().ok_or_else(|| std::io::Error::other("no pipe"))?;
        let reader = std::thread::spawn({
            let history = history.clone();
            move || {
                for line in BufReader::new(events).lines().map_while(Result::ok) {
                    if let Some(event) = Event::parse(&line) {
                        history.get().add(number, event);
                    }
                }
            }
        });
        Ok(Self { child, orders, reader: Some(reader), number, history: history.clone(), log })
    }

    /// Returns the file of its log.
    #[must_use]
    pub fn log(&self) -> &Path {
        &self.log
    }

    /// Returns its number in the history.
    #[must_use]
    pub fn number(&self) -> usize {
        self.number
    }

    /// Returns its process id.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends an order, such as `stop`.
    pub fn order(&mut self, order: &str) {
        if let Some(orders) = &mut self.orders {
            // The process may be gone.
            drop(writeln!(orders, "{order}"));
        }
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.child.id()).unwrap_or(i32::MAX);
        // The process is a child that was not waited for, so this id is its own.
        kill(Pid::from_raw(pid), signal).ok();
    }

    /// Returns whether the process has ended.
    pub fn has_ended(&mut self) -> bool {
        !matches!(self.child.try_wait(), Ok(None))
    }

    /// Kills the process, and waits until all its events are in the history.
    pub fn kill(mut self) {
        self.signal(Signal::SIGKILL);
        self.finish();
    }

    /// Waits until the process has ended by itself and all its events are in the history.
    pub fn finish(&mut self) {
        drop(self.child.wait());
        self.history.get().processes[self.number].ended = Some(now());
        if let Some(reader) = self.reader.take() {
            drop(reader.join());
        }
    }
}
