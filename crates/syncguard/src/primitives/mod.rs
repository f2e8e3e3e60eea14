//! More than one lock: several keys at once, elections and semaphores.
//!
//! All of it is made of ordinary locks, so the store has no records of another kind: listing,
//! breaking, fences and telemetry work as for every lock.
//!
//! | to | call | locks |
//! |---|---|---|
//! | take several locks, all or none | [`Locker::lock_all`](crate::Locker::lock_all) | the keys |
//! | let one of many processes lead | [`Locker::election`](crate::Locker::election) | `<name>:leader` |
//! | limit how many work at once | [`Locker::semaphore`](crate::Locker::semaphore) | `<name>:slot:<number>`, `<name>:gate` |

mod election;
mod holding;
mod lock_all;
mod multi_guard;
mod names;
mod observer;
mod permit;
mod semaphore;

pub use election::{Election, Leadership, Role};
pub use lock_all::{LockAllRequest, MAX_KEYS};
pub use multi_guard::MultiGuard;
pub use names::{leader_key, slot_key};
pub use observer::{Leader, Observation, Observer};
pub use permit::Permit;
pub use semaphore::{MAX_PERMITS, Semaphore};
