//! The command: a process in a group of its own, in the foreground of the terminal.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::Command;

use nix::errno::Errno;
use nix::sys::signal::{self, Signal};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use syncguard::{Fence, Key};

use crate::exit::{FAILED, Failure};
use crate::program;
use crate::target;
use crate::terminal::Terminal;

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
    /// It has ended, with this code to pass on.
    Ended(u8),
    /// It was stopped, by Ctrl-Z or because it wanted the terminal.
    Stopped(Signal),
    /// Nothing.
    None,
}

impl CommandProcess {
    /// Starts it in `group`.
    pub(crate) fn start(
        command: &[OsString],
        group: Pid,
        key: &Key,
        fence: Fence,
    ) -> Result<Self, Failure> {
        let process = program::start(command, |command| {
            Command::new(&command[0])
                .args(&command[1..])
                .env("SYNCGUARD_KEY", key.as_str())
                .env("SYNCGUARD_FENCE", fence.to_string())
                .env_remove(target::VARIABLE)
                .process_group(group.as_raw())
                .spawn()
        })?;
        let pid = i32::try_from(process.id()).map(Pid::from_raw);
        let pid = pid.map_err(|cause| Failure::new(FAILED, format!("no process id: {cause}")))?;
        let process = Self { pid, group, terminal: Terminal::open() };
        // Whoever reads our output in a pipeline may need the terminal more, a pager for example.
        // The command gets it when it asks for it.
        if is_pipe(&std::io::stdout()) {
            process.send(Signal::SIGCONT);
        } else {
            process.resume();
        }
        Ok(process)
    }

    /// Gives it the terminal, and lets it go on if it was stopped meanwhile for not having it.
    fn resume(&self) {
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

    /// What has become of it since the last time.
    pub(crate) fn change(&self) -> Change {
        let flags = WaitPidFlag::WNOHANG | WaitPidFlag::WUNTRACED;
        match waitpid(self.pid, Some(flags)) {
            Ok(WaitStatus::Exited(_, code)) => Change::Ended(u8::try_from(code).unwrap_or(FAILED)),
            Ok(WaitStatus::Signaled(_, signal, _)) => Change::Ended(by_signal(signal)),
            Ok(WaitStatus::Stopped(_, signal)) => Change::Stopped(signal),
            Err(Errno::ECHILD) => Change::Ended(FAILED),
            _ => Change::None,
        }
    }

    /// It was stopped. At a terminal so do we, so that the shell can go on; when the shell lets us go
    /// on, so does the command.
    pub(crate) fn stop_with_it(&self, by: Signal) {
        let Some(terminal) = &self.terminal else { return };
        let is_its = terminal.foreground() == Some(self.group);
        if matches!(by, Signal::SIGTTIN | Signal::SIGTTOU) && (is_its || terminal.is_ours()) {
            // It asked a moment before it was given, or has not needed it until now.
            return self.resume();
        }
        if is_its {
            terminal.take_back();
        }
        // With a script that started us, which would wait for us otherwise.
        signal::killpg(terminal.own_group(), Signal::SIGSTOP).unwrap_or_default();
        self.resume();
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

/// The code of a command that a signal has ended.
pub(crate) fn by_signal(signal: Signal) -> u8 {
    u8::try_from(128 + signal as i32).unwrap_or(FAILED)
}
