//! Ring 3: the engine. It depends on the contract, never on a backend.
//!
//! Two state machines without I/O make the decisions ([`acquisition`] and [`lease_state`]). The
//! modules that carry them out import only modules above themselves in this list.

mod acquisition;
mod background;
pub(crate) mod cancel;
pub(crate) mod clock;
mod lease_state;
pub(crate) mod options;
pub(crate) mod release_errors;
pub(crate) mod retry;
mod trust;

mod wait_queue;

mod context;

mod cleanup;

mod shared_lease;

mod lease_task;

pub(crate) mod guard;

mod attempt;

mod wait;

pub(crate) mod lock_request;

pub(crate) mod locker;

mod extension;

// Only tests.
mod protocol;
pub(crate) mod schedules;
