//! The subcommands.

pub(crate) mod break_lock;
pub(crate) mod doctor;
pub(crate) mod elect;
pub(crate) mod fence;
pub(crate) mod locks;
pub(crate) mod look;
pub(crate) mod ls;
pub(crate) mod run;
pub(crate) mod shell;
pub(crate) mod store;
pub(crate) mod wait;
pub(crate) mod watch;
