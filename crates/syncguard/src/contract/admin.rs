//! Administration of a store: list locks, set up the store, find risky settings.
//!
//! It is separate from [`LockBackend`](super::LockBackend), because no program needs it to lock.

use std::fmt;
use std::future::ready;
use std::time::Duration;

use super::BoxFuture;
use super::finding::Finding;
use super::stored_lock::StoredLock;
use crate::common::error::{Error, Result};
use crate::common::fence::Fence;
use crate::common::fence_source::FenceSource;
use crate::common::key::Key;

/// Administers a store. You get it from [`LockBackend::admin`](crate::LockBackend::admin).
///
/// Implement it for a type that shares the connection of the backend, often the backend itself. A
/// [`Cursor`] has a format of your own. Listed locks have fences, so a backend without fences
/// cannot list.
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

    /// Deletes the fence counters whose last grant is longer ago than `idle`, and returns how many.
    ///
    /// Only with fences from the clock ([`FenceSource::Clock`]), in all programs that share the
    /// store: what replaces a deleted counter starts above it. With [`FenceSource::Counter`], or if
    /// `idle` is less than 48 hours (twice the longest TTL), it fails with
    /// [`InvalidArgument`](crate::ErrorCode::InvalidArgument) and deletes nothing.
    ///
    /// It works in bounded batches, and grants do not wait for it. On Redis, counters expire by
    /// themselves; it deletes those from before the clock was used.
    ///
    /// # Cancel safety
    ///
    /// If you drop this future before it completes, some counters are deleted and others are not.
    fn collect_fences(&self, idle: Duration) -> BoxFuture<'_, Result<u64>> {
        let _ = idle;
        Box::pin(ready(Err(Error::invalid("this backend cannot delete fence counters"))))
    }

    /// Checks that no later holder has been at a resource, and remembers the fence in this store:
    /// for scripts and services that cannot compare fences where they write.
    ///
    /// If a larger fence was checked before, it fails with
    /// [`Aborted`](crate::ErrorCode::Aborted), and
    /// [`is_stale_fence`](Error::is_stale_fence) is true. If you pass the key of the lock, a fence
    /// of another lock fails with [`InvalidArgument`](crate::ErrorCode::InvalidArgument).
    ///
    /// Between the check and your write, a later holder can pass the check. Only a check in the
    /// transaction of your write excludes that.
    ///
    /// # Cancel safety
    ///
    /// If you drop this future before it completes, the fence may or may not be remembered.
    fn check_fence<'a>(
        &'a self,
        resource: &'a Key,
        fence: Fence,
        key: Option<&'a Key>,
    ) -> BoxFuture<'a, Result<()>> {
        let _ = (resource, fence, key);
        Box::pin(ready(Err(Error::invalid("this backend cannot remember fences of resources"))))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_keeps_its_place_and_does_not_print_it() {
        let cursor = Cursor::new("canary");
        assert_eq!(cursor.place(), "canary");
        assert_eq!(format!("{cursor:?}"), "Cursor { .. }");
    }
}
