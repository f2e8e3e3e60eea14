//! The terminal. One process group at a time is in its foreground: it reads from the terminal and
//! receives Ctrl-C.

use std::fs::File;

use nix::sys::signal::{SigSet, SigmaskHow, Signal};
use nix::unistd::{self, Pid};

/// The controlling terminal of this process.
#[derive(Debug)]
pub(crate) struct Terminal {
    tty: File,
    own_group: Pid,
}

impl Terminal {
    pub(crate) fn open() -> Option<Self> {
        let tty = File::options().read(true).write(true).open("/dev/tty").ok()?;
        Some(Self { tty, own_group: unistd::getpgrp() })
    }

    /// Returns whether the process group of this process is in the foreground.
    pub(crate) fn is_ours(&self) -> bool {
        self.foreground() == Some(self.own_group)
    }

    pub(crate) fn foreground(&self) -> Option<Pid> {
        unistd::tcgetpgrp(&self.tty).ok()
    }

    /// Moves a process group to the foreground.
    pub(crate) fn give(&self, group: Pid) {
        // From the background, this sends SIGTTOU and fails unless that signal is blocked.
        let mut objection = SigSet::empty();
        objection.add(Signal::SIGTTOU);
        let before = objection.thread_swap_mask(SigmaskHow::SIG_BLOCK);
        // Fails if the terminal is gone, and then there is nothing to do.
        unistd::tcsetpgrp(&self.tty, group).unwrap_or_default();
        if let Ok(before) = before {
            before.thread_set_mask().unwrap_or_default();
        }
    }

    /// Returns the process group of this process, which it may share with a calling script.
    pub(crate) fn own_group(&self) -> Pid {
        self.own_group
    }

    pub(crate) fn take_back(&self) {
        self.give(self.own_group);
    }
}
