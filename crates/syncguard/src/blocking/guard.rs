//! The guard: a held lock that is released when it is dropped.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use super::Owned;
use super::handle::LockHandle;
use crate::common::error::Result;
use crate::common::lock_id::LockId;
use crate::contract::LockBackend;
use crate::contract::outcome::Release;

/// A held lock. Dropping it waits until it is released, for at most
/// [the release's own time](crate::LockOptions::release_timeout); in async code, which must not
/// wait, the release goes on in the background. See [`crate::LockGuard`].
#[must_use = "dropping the guard releases the lock at once; keep it in a variable with a name"]
pub struct LockGuard<B: LockBackend> {
    /// Only empty while it is being dropped or leaked.
    guard: Option<crate::LockGuard<B>>,
    handle: LockHandle<B>,
}

impl<B: LockBackend> LockGuard<B> {
    pub(super) fn new(guard: crate::LockGuard<B>, inner: &Arc<Owned<B>>) -> Self {
        let handle = LockHandle::new(guard.held(), Arc::clone(inner));
        Self { guard: Some(guard), handle }
    }

    /// Gives the lock back and waits for the answer. See [`crate::LockGuard::release`].
    pub fn release(&mut self) -> Result<Release> {
        let guard = self.guard.as_mut().expect("BUG: a guard is there until it is dropped");
        self.handle.owned().block_on(guard.release())?
    }

    /// Keeps the lock beyond this guard. See [`crate::LockGuard::leak`].
    #[must_use]
    pub fn leak(mut self) -> LockId {
        let guard = self.guard.take().expect("BUG: a guard is there until it is dropped");
        guard.leak()
    }

    /// A handle for work that runs under this lock, also on other threads.
    #[must_use]
    pub fn handle(&self) -> LockHandle<B> {
        self.handle.clone()
    }
}

/// A guard can do everything that a handle to its lock can.
impl<B: LockBackend> Deref for LockGuard<B> {
    type Target = LockHandle<B>;

    fn deref(&self) -> &LockHandle<B> {
        &self.handle
    }
}

impl<B: LockBackend> Drop for LockGuard<B> {
    fn drop(&mut self) {
        if let Some(mut guard) = self.guard.take() {
            // In async code this is refused, and the async guard's own drop does it.
            drop(self.handle.owned().block_on(guard.finish()));
        }
    }
}

impl<B: LockBackend> fmt::Debug for LockGuard<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.guard, f)
    }
}
