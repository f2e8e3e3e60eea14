//! A second process that outlives a `kill -9` of the first: it leads the group in which the command
//! runs, and ends the group when the first is gone without a word.

use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use nix::sys::signal::{self, SigSet, Signal};
use nix::unistd::{self, Pid};

use crate::exit::{FAILED, Failure};
use crate::target;

/// What the first process says when all is well.
const ALL_IS_WELL: &[u8] = b"x";

/// The watcher, as the first process sees it.
#[derive(Debug)]
pub(crate) struct Watcher {
    process: Child,
    group: Pid,
    is_ready: bool,
}

impl Watcher {
    /// Starts it, in a group of its own.
    pub(crate) fn start(grace: Duration) -> Result<Self, Failure> {
        let failed = |cause: std::io::Error| {
            Failure::new(FAILED, format!("the watcher of the command does not start: {cause}"))
        };
        let program = std::env::current_exe().map_err(failed)?;
        let process = Command::new(program)
            .arg("__watch")
            .arg(grace.as_millis().to_string())
            .env_remove(target::VARIABLE)
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(failed)?;
        let pid =
            i32::try_from(process.id()).map_err(|cause| failed(std::io::Error::other(cause)))?;
        Ok(Self { process, group: Pid::from_raw(pid), is_ready: false })
    }

    /// The group that it leads, once no signal to the group can end it any more.
    pub(crate) fn group(&mut self) -> Result<Pid, Failure> {
        if !self.is_ready {
            let mut byte = [0];
            let said = self.process.stdout.as_mut().map(|stdout| stdout.read_exact(&mut byte));
            if !matches!(said, Some(Ok(()))) {
                return Err(Failure::new(FAILED, "the watcher of the command has ended"));
            }
            self.is_ready = true;
        }
        Ok(self.group)
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        if let Some(mut stdin) = self.process.stdin.take() {
            drop(stdin.write_all(ALL_IS_WELL));
        }
        drop(self.process.wait());
    }
}

/// What the watcher does: waits until the first process says that all is well, or is gone.
pub(crate) fn watch(grace: Duration) -> u8 {
    // Ctrl-C and everything else is for the command.
    SigSet::all().thread_block().unwrap_or_default();
    drop(std::io::stdout().write_all(ALL_IS_WELL).and_then(|()| std::io::stdout().flush()));
    let mut said = [0];
    match std::io::stdin().read_exact(&mut said) {
        Ok(()) => 0,
        Err(_gone) => {
            let group = unistd::getpgrp();
            for gentle in [Signal::SIGTERM, Signal::SIGCONT] {
                signal::killpg(group, gentle).unwrap_or_default();
            }
            std::thread::sleep(grace);
            // This process is in the group.
            signal::killpg(group, Signal::SIGKILL).unwrap_or_default();
            FAILED
        }
    }
}
