//! The terminal: one group of processes at a time is in its foreground, reads from it and gets
//! Ctrl-C.

use std::fs::File;

use nix::sys::signal::{SigSet, SigmaskHow, Signal};
use nix::unistd::{self, Pid};

/// The terminal of this process.
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

    /// Whether our own group is in the foreground.
    pub(crate) fn is_ours(&self) -> bool {
        self.foreground() == Some(self.own_group)
    }

    pub(crate) fn foreground(&self) -> Option<Pid> {
        unistd::tcgetpgrp(&self.tty).ok()
    }

    /// Puts a group into the foreground.
    pub(crate) fn give(&self, group: Pid) {
        // From the background this is only allowed to who does not hear the objection.
        let mut objection = SigSet::empty();
        objection.add(Signal::SIGTTOU);
        let before = objection.thread_swap_mask(SigmaskHow::SIG_BLOCK);
        // Without a terminal there is nothing to give.
        unistd::tcsetpgrp(&self.tty, group).unwrap_or_default();
        if let Ok(before) = before {
            before.thread_set_mask().unwrap_or_default();
        }
    }

    /// The group of this process: alone in it, or together with a script that started it.
    pub(crate) fn own_group(&self) -> Pid {
        self.own_group
    }

    pub(crate) fn take_back(&self) {
        self.give(self.own_group);
    }
}
