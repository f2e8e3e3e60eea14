//! Ring 3: the engine. It knows the contract, never a backend.
//!
//! Two state machines without I/O decide ([`acquisition`] and [`lease_state`]); what carries out
//! their decisions imports only from above itself in this list.

mod acquisition;
mod background;
pub(crate) mod cancel;
pub(crate) mod clock;
mod detach;
mod lanes;
mod lease_state;
pub(crate) mod options;
pub(crate) mod release_errors;
pub(crate) mod retry;

mod context;

mod cleanup;

mod shared_lease;

mod lease_task;

pub(crate) mod guard;

mod attempt;

mod wait;

pub(crate) mod locker;
