//! Administration of a store: list locks, set up the store, find risky settings.
//!
//! It is separate from [`LockBackend`](super::LockBackend), because no program needs it to lock.

use std::fmt;
use std::future::ready;

use super::BoxFuture;
use super::finding::Finding;
use super::stored_lock::StoredLock;
use crate::common::error::Result;
use crate::common::fence_source::FenceSource;

/// Administers a store. You get it from [`LockBackend::admin`](crate::LockBackend::admin).
pub trait Admin: fmt::Debug + Send + Sync {
    /// Returns a page of the live locks. Continue with its [`next`](Page::next).
    ///
    /// A page may be empty although another follows. A lock that is acquired or released meanwhile
    /// may be missing or appear twice. Fence counters never appear as locks.
    ///
    /// # Cancel safety
    ///
    /// You can drop this future at any time; it only reads.
    fn list<'a>(&'a self, after: Option<&'a Cursor>) -> BoxFuture<'a, Result<Page>>;

    /// Returns what can make locks vanish or fences go backwards in this store.
    ///
    /// # Cancel safety
    ///
    /// You can drop this future at any time; it only reads.
    fn findings(&self) -> BoxFuture<'_, Result<Vec<Finding>>>;

    /// Returns where the fences of this store come from.
    fn fence_source(&self) -> FenceSource {
        FenceSource::Counter
    }

    /// Creates what the store needs and does not have yet. It is idempotent, and several processes
    /// may run it at the same time.
    ///
    /// # Cancel safety
    ///
    /// If you drop this future before it completes, the setup may or may not take effect.
    fn setup(&self) -> BoxFuture<'_, Result<()>> {
        Box::pin(ready(Ok(())))
    }
}

/// Where the next page begins. It is valid only for the store that returned it.
#[derive(Clone, PartialEq, Eq)]
pub struct Cursor(pub(crate) String);

impl Cursor {
    /// Creates a cursor from a place that only the backend understands.
    pub fn new(place: impl Into<String>) -> Self {
        Self(place.into())
    }

    /// Returns the place.
    #[must_use]
    pub fn place(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Cursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The place may contain a key.
        f.debug_struct("Cursor").finish_non_exhaustive()
    }
}

/// A page of the locks of a store.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Page {
    /// Live locks, in no particular order.
    pub locks: Vec<StoredLock>,
    /// Where the next page begins; `None` on the last page.
    pub next: Option<Cursor>,
}

impl Page {
    /// Creates a page.
    #[must_use]
    pub fn new(locks: Vec<StoredLock>, next: Option<Cursor>) -> Self {
        Self { locks, next }
    }
}
