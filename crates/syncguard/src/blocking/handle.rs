//! What work under a lock may do with it: look and extend, not release.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::Owned;
use crate::common::error::Result;
use crate::common::fence::{Fence, Fenced};
use crate::common::key::Key;
use crate::common::lock_id::LockId;
use crate::common::time::Timestamp;
use crate::common::ttl::Ttl;
use crate::contract::LockBackend;
use crate::contract::outcome::Extend;
use crate::lock::guard::Held;

/// A handle to a held lock for the work that runs under it: it can look and extend, not release.
/// Clones may go to other threads. See [`crate::Held`].
///
/// A handle keeps the locker's runtime alive.
pub struct LockHandle<B: LockBackend> {
    handle: Held<B>,
    inner: Arc<Owned<B>>,
}

impl<B: LockBackend> LockHandle<B> {
    pub(super) fn new(handle: Held<B>, inner: Arc<Owned<B>>) -> Self {
        Self { handle, inner }
    }

    pub(super) fn owned(&self) -> &Arc<Owned<B>> {
        &self.inner
    }

    /// What is locked.
    #[must_use]
    pub fn key(&self) -> &Key {
        self.handle.key()
    }

    /// The id that holds the lock. A secret: it lets its bearer release the lock.
    #[must_use]
    pub fn lock_id(&self) -> LockId {
        self.handle.lock_id()
    }

    /// The fence, for code that is generic over the backend.
    #[must_use]
    pub fn try_fence(&self) -> Option<Fence> {
        self.handle.try_fence()
    }

    /// When the lock expires, by the backend's time authority.
    #[must_use]
    pub fn expires_at(&self) -> Timestamp {
        self.handle.expires_at()
    }

    /// How long the lock is certainly still ours, by this machine's clock; zero when it is lost or
    /// was released.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        self.handle.remaining()
    }

    /// Whether the lock is certainly still ours. It may not be by the time you act on it: the fence
    /// decides.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        self.handle.is_valid()
    }

    /// A token that is cancelled when the lock is lost. Work on a thread asks it between two steps.
    #[must_use]
    pub fn lost_token(&self) -> CancellationToken {
        self.handle.lost_token()
    }

    /// Sets the expiry to *now + ttl* and waits for the answer. [`Extend::NotHeld`] means that the
    /// lock is lost.
    pub fn extend(&self, ttl: Ttl) -> Result<Extend> {
        self.inner.block_on(self.handle.extend(ttl))?
    }
}

impl<B: LockBackend<Fencing = Fenced>> LockHandle<B> {
    /// The fence of this acquisition: send it along with every write.
    #[must_use]
    pub fn fence(&self) -> Fence {
        self.handle.fence()
    }
}

impl<B: LockBackend> Clone for LockHandle<B> {
    fn clone(&self) -> Self {
        Self { handle: self.handle.clone(), inner: Arc::clone(&self.inner) }
    }
}

impl<B: LockBackend> fmt::Debug for LockHandle<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockHandle").field("key", self.key()).finish_non_exhaustive()
    }
}
