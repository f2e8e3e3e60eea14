//! What a person may want from a store beyond locks: see what is held, set it up, hear advice.
//!
//! Separate from [`LockBackend`](super::LockBackend), because no program needs it to lock.

use std::fmt;
use std::future::{Future, ready};
use std::pin::Pin;

use super::advice::Advice;
use super::stored_lock::StoredLock;
use crate::common::error::Result;

/// A future of an [`Inspector`].
pub type Inspection<'a, T> = Pin<Box<dyn Future<Output = Result<T>> + Send + 'a>>;

/// A store, for people. From [`LockBackend::inspector`](crate::LockBackend::inspector).
pub trait Inspector: fmt::Debug + Send + Sync {
    /// Some of the live locks, and where to go on. Fence counters are never taken for locks. A page
    /// may be empty although another follows; a lock that comes or goes meanwhile may be missed or
    /// seen twice.
    ///
    /// # Cancel safety
    ///
    /// It only reads.
    fn list<'a>(&'a self, after: Option<&'a Cursor>) -> Inspection<'a, Page>;

    /// What about this store can make locks vanish or fences go backwards.
    ///
    /// # Cancel safety
    ///
    /// It only reads.
    fn advice(&self) -> Inspection<'_, Vec<Advice>>;

    /// Creates what the store needs and does not have yet. Doing it again, or at the same time
    /// elsewhere, changes nothing.
    ///
    /// # Cancel safety
    ///
    /// Dropped half-way, it may or may not have happened.
    fn setup(&self) -> Inspection<'_, ()> {
        Box::pin(ready(Ok(())))
    }
}

/// Where the next page begins. Only the store that gave it understands it.
#[derive(Clone, PartialEq, Eq)]
pub struct Cursor(pub(crate) String);

impl Cursor {
    /// A place that only the backend understands.
    pub fn new(place: impl Into<String>) -> Self {
        Self(place.into())
    }

    /// The place.
    #[must_use]
    pub fn place(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Cursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // It may be a key.
        f.debug_struct("Cursor").finish_non_exhaustive()
    }
}

/// Some of the locks of a store.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Page {
    /// Live locks, in no particular order.
    pub locks: Vec<StoredLock>,
    /// Where to go on; `None` on the last page.
    pub next: Option<Cursor>,
}

impl Page {
    /// A page.
    #[must_use]
    pub fn new(locks: Vec<StoredLock>, next: Option<Cursor>) -> Self {
        Self { locks, next }
    }
}
