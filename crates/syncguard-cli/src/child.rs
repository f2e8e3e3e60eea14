//! The command: a process in the watcher's process group, in the foreground of the terminal.

use std::ffi::OsString;
use std::time::{Duration, Instant};

use nix::sys::signal::{self, Signal};
use nix::unistd::Pid;
use rustix::io::Errno;
use rustix::process::{WaitOptions, WaitStatus};

use crate::exit::{FAILED, Failure};
use crate::held::Held;
use crate::program;
use crate::spawn::spawn;
use crate::terminal::Terminal;
use crate::{signals, target};

/// The running command.
#[derive(Debug)]
pub(crate) struct CommandProcess {
    pid: Pid,
    group: Pid,
    terminal: Option<Terminal>,
    /// What is known of its state and was not returned yet. That it has ended stays.
    known: Change,
}

/// A change of the state of the command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// The command ended.
    Ended(Ending),
    /// The command was stopped, by Ctrl-Z or because it used the terminal from the background.
    Stopped(Option<Signal>),
    /// Nothing changed.
    None,
}

/// How the command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    Code(u8),
    /// The number of a signal, possibly a real-time signal, which has no name.
    Signal(i32),
}

impl Ending {
    fn of(status: WaitStatus) -> Self {
        match (status.exit_status(), status.terminating_signal()) {
            (_, Some(signal)) => Self::Signal(signal),
            (code, None) => {
                Self::Code(code.and_then(|code| u8::try_from(code).ok()).unwrap_or(FAILED))
            }
        }
    }
}

impl CommandProcess {
    /// Starts the command in `group`.
    pub(crate) fn start(command: &[OsString], group: Pid, held: &Held) -> Result<Self, Failure> {
        let variables = held.variables();
        let mut variables: Vec<_> =
            variables.iter().map(|(name, value)| (*name, Some(value.as_str()))).collect();
        variables.push((target::VARIABLE, None));
        let terminal = Terminal::open();
        // In a pipeline, the reader of the output may need the terminal, for example a pager. The
        // command then gets it when it is stopped by SIGTTIN, unless that signal is ignored.
        let must_ask = is_pipe(&std::io::stdout()) && !signals::is_ignored(Signal::SIGTTIN);
        let given = terminal.as_ref().filter(|terminal| !must_ask && terminal.is_ours());
        if let Some(terminal) = given {
            terminal.give(group);
        }
        let started = program::start(command, |command| spawn(command, &variables, Some(group)));
        let pid = started.inspect_err(|_failure| {
            if let Some(terminal) = given {
                terminal.take_back();
            }
        })?;
        Ok(Self { pid, group, terminal, known: Change::None })
    }

    /// Gives the command the terminal, and continues it if it is stopped.
    pub(crate) fn resume(&self) {
        if let Some(terminal) = &self.terminal
            && terminal.is_ours()
        {
            terminal.give(self.group);
        }
        self.send(Signal::SIGCONT);
    }

    /// Sends a signal to the process group of the command.
    pub(crate) fn send(&self, signal: Signal) {
        // Fails if the group has ended.
        signal::killpg(self.group, signal).unwrap_or_default();
    }

    /// Forwards a signal, even to a stopped command.
    pub(crate) fn forward(&self, signal: Signal) {
        self.send(signal);
        self.send(Signal::SIGCONT);
    }

    /// Returns what changed since the last call; once the command has ended, always that.
    pub(crate) fn change(&mut self) -> Change {
        self.look();
        let change = self.known;
        if !matches!(change, Change::Ended(_)) {
            self.known = Change::None;
        }
        change
    }

    /// Returns whether the command has ended.
    pub(crate) fn has_ended(&mut self) -> bool {
        self.look();
        matches!(self.known, Change::Ended(_))
    }

    fn look(&mut self) {
        if !matches!(self.known, Change::Ended(_)) {
            match self.reap() {
                Change::None => {}
                latest => self.known = latest,
            }
        }
    }

    /// Returns what changed. Reaps all other children, too: as process 1 of a container, this
    /// process inherits orphans.
    fn reap(&self) -> Change {
        loop {
            match rustix::process::wait(WaitOptions::NOHANG | WaitOptions::UNTRACED) {
                Ok(Some((pid, status))) if pid.as_raw_nonzero().get() == self.pid.as_raw() => {
                    if status.stopped() {
                        let signal = status.stopping_signal();
                        let signal = signal.and_then(|signal| Signal::try_from(signal).ok());
                        return Change::Stopped(signal);
                    }
                    return Change::Ended(Ending::of(status));
                }
                Ok(Some(_)) | Err(Errno::INTR) => {}
                Ok(None) => return Change::None,
                Err(_) => return Change::Ended(Ending::Code(FAILED)),
            }
        }
    }

    /// Returns whether the command was stopped because it needs the terminal, and can have it.
    pub(crate) fn may_have_the_terminal(&self, stopped_by: Option<Signal>) -> bool {
        let asks = matches!(stopped_by, Some(Signal::SIGTTIN | Signal::SIGTTOU));
        asks && self.terminal.as_ref().is_some_and(|terminal| {
            // It was stopped just before it got the terminal, or did not need it until now.
            terminal.foreground() == Some(self.group) || terminal.is_ours()
        })
    }

    /// Stops this process because the command was stopped by `by`, so that the shell gets the
    /// terminal. Does so only at a terminal. Returns when the shell continues this process, or
    /// immediately if no shell could. The result is whether to continue the command.
    pub(crate) fn stop_with_it(&self, by: Option<Signal>) -> bool {
        let Some(terminal) = &self.terminal else { return false };
        if terminal.foreground() == Some(self.group) {
            terminal.take_back();
        }
        let stopped = Instant::now();
        // Includes a calling script, which would otherwise keep waiting for this process.
        signals::stop_by(|| signal::killpg(terminal.own_group(), Signal::SIGTSTP));
        // Keep a `kill -STOP` of the command in effect if this process was not stopped.
        by != Some(Signal::SIGSTOP) || stopped.elapsed() > Duration::from_millis(20)
    }

    /// Sends `SIGINT` to a calling script after Ctrl-C ended the command, as if the script had been
    /// in the foreground.
    pub(crate) fn pass_interrupt_on(&self) {
        if let Some(terminal) = &self.terminal
            && terminal.foreground() == Some(self.group)
        {
            terminal.take_back();
            signal::killpg(terminal.own_group(), Signal::SIGINT).unwrap_or_default();
        }
    }

    /// Takes the terminal back.
    pub(crate) fn release_terminal(&self) {
        if let Some(terminal) = &self.terminal
            && terminal.foreground() == Some(self.group)
        {
            terminal.take_back();
        }
    }
}

fn is_pipe(stream: &impl std::os::fd::AsFd) -> bool {
    let file = stream.as_fd().try_clone_to_owned().map(std::fs::File::from);
    let kind = file.and_then(|file| file.metadata()).map(|metadata| metadata.file_type());
    kind.is_ok_and(|kind| std::os::unix::fs::FileTypeExt::is_fifo(&kind))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_command_is_noticed_after_its_stop() {
        let script = ["sh", "-c", "kill -STOP $$"].map(OsString::from);
        let pid = spawn(&script, &[], Some(Pid::from_raw(0))).expect("runs");
        let mut process = CommandProcess { pid, group: pid, terminal: None, known: Change::None };
        let started = Instant::now();
        let until = |holds: &mut dyn FnMut() -> bool| {
            while !holds() {
                assert!(started.elapsed() < Duration::from_secs(20), "it hangs");
                std::thread::sleep(Duration::from_millis(5));
            }
        };
        until(&mut || !process.has_ended() && process.known != Change::None);
        process.send(Signal::SIGKILL);
        until(&mut || process.has_ended());
        assert_eq!(process.change(), Change::Ended(Ending::Signal(9)));
    }
}
