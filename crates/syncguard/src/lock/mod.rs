//! Ring 3: the engine. It knows the contract, never a backend.

mod attempt;
pub(crate) mod cancel;
mod carried;
pub(crate) mod clock;
pub(crate) mod guard;
mod heartbeat;
mod hold;
mod lanes;
pub(crate) mod locker;
pub(crate) mod options;
mod reaper;
pub(crate) mod retry;
mod wait;
