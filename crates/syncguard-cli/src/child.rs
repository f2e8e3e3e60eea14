//! The command: a process in a group of its own, in the foreground of the terminal.

use std::ffi::OsString;
use std::time::{Duration, Instant};

use nix::sys::signal::{self, Signal};
use nix::unistd::Pid;
use rustix::io::Errno;
use rustix::process::{WaitOptions, WaitStatus};
use syncguard::{Fence, Key};

use crate::exit::{FAILED, Failure};
use crate::program;
use crate::spawn::spawn;
use crate::terminal::Terminal;
use crate::{signals, target};

/// The command that runs.
#[derive(Debug)]
pub(crate) struct CommandProcess {
    pid: Pid,
    group: Pid,
    terminal: Option<Terminal>,
}

/// What became of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// It has ended.
    Ended(Ending),
    /// It was stopped, by Ctrl-Z or because it wanted the terminal.
    Stopped(Option<Signal>),
    /// Nothing.
    None,
}

/// How it has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    Code(u8),
    /// The number of a signal, which may be one without a name.
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
    /// Starts it in `group`.
    pub(crate) fn start(
        command: &[OsString],
        group: Pid,
        key: &Key,
        fence: Fence,
    ) -> Result<Self, Failure> {
        let variables = [
            ("SYNCGUARD_KEY", Some(key.as_str())),
            ("SYNCGUARD_FENCE", Some(&*fence.to_string())),
            (target::VARIABLE, None),
        ];
        let terminal = Terminal::open();
        // A reader of our output in a pipeline may need the terminal more, a pager for example. The
        // command gets it when it asks for it, which it cannot where the question is ignored.
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
        Ok(Self { pid, group, terminal })
    }

    /// Gives it the terminal, and lets it go on if it was stopped meanwhile for not having it.
    pub(crate) fn resume(&self) {
        if let Some(terminal) = &self.terminal
            && terminal.is_ours()
        {
            terminal.give(self.group);
        }
        self.send(Signal::SIGCONT);
    }

    /// Sends a signal to the command and all that it has started.
    pub(crate) fn send(&self, signal: Signal) {
        // A group that has ended needs no signal.
        signal::killpg(self.group, signal).unwrap_or_default();
    }

    /// Passes a signal on, even to a command that is stopped.
    pub(crate) fn forward(&self, signal: Signal) {
        self.send(signal);
        self.send(Signal::SIGCONT);
    }

    /// What has become of it since the last time. Reaps whatever else has ended: as process 1 of a
    /// container, this process inherits what others leave behind.
    pub(crate) fn change(&self) -> Change {
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

    /// Whether it was stopped because it wants the terminal, which it can have.
    pub(crate) fn may_have_the_terminal(&self, stopped_by: Option<Signal>) -> bool {
        let asks = matches!(stopped_by, Some(Signal::SIGTTIN | Signal::SIGTTOU));
        asks && self.terminal.as_ref().is_some_and(|terminal| {
            // It asked a moment before it was given, or has not needed it until now.
            terminal.foreground() == Some(self.group) || terminal.is_ours()
        })
    }

    /// It was stopped. At a terminal so do we, so that the shell can go on. Returns when the shell
    /// lets us go on, or at once if there is none that could. The answer is whether the command is
    /// to go on, too.
    pub(crate) fn stop_with_it(&self, by: Option<Signal>) -> bool {
        let Some(terminal) = &self.terminal else { return false };
        if terminal.foreground() == Some(self.group) {
            terminal.take_back();
        }
        let stopped = Instant::now();
        // With a script that started us, which would wait for us otherwise.
        signals::stop_by(|| signal::killpg(terminal.own_group(), Signal::SIGTSTP));
        // A `kill -STOP` that did not stop us, too, is not undone.
        by != Some(Signal::SIGSTOP) || stopped.elapsed() > Duration::from_millis(20)
    }

    /// Ctrl-C ended it: a script that started us is to hear of it, as if it had been in the
    /// foreground itself.
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
