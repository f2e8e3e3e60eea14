//! The guard and its handles, which block the thread on the async ones.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::Owned;
use crate::common::error::{Error, Result};
use crate::common::fence::{Fence, Fenced};
use crate::common::key::Key;
use crate::common::lock_id::LockId;
use crate::common::lost_reason::LostReason;
use crate::common::time::Timestamp;
use crate::common::ttl::Ttl;
use crate::contract::LockBackend;
use crate::contract::outcome::{ExtendOutcome, ReleaseOutcome};
use crate::lock::guard::{LockGuard as AsyncLockGuard, LockHandle as AsyncLockHandle};

/// A held lock. See [`crate::LockGuard`].
///
/// Dropping it waits for the release, for at most the
/// [release timeout](crate::LockOptions::release_timeout). In async code, which must not block, the
/// release continues in the background.
#[must_use = "dropping the guard releases the lock at once; keep it in a named variable"]
pub struct LockGuard<B: LockBackend> {
    /// `None` only while the guard is being dropped or detached.
    guard: Option<AsyncLockGuard<B>>,
    handle: AsyncLockHandle<B>,
    inner: Arc<Owned<B>>,
}

impl<B: LockBackend> LockGuard<B> {
    pub(super) fn new(guard: AsyncLockGuard<B>, inner: &Arc<Owned<B>>) -> Self {
        let handle = guard.handle();
        Self { guard: Some(guard), handle, inner: Arc::clone(inner) }
    }

    /// Releases the lock and waits for the outcome. See [`crate::LockGuard::release`].
    pub fn release(&self) -> Result<ReleaseOutcome> {
        let guard = self.guard.as_ref().expect("BUG: a guard is there until it is dropped");
        self.inner.block_on(guard.release())?
    }

    /// Consumes the guard without releasing the lock. See [`crate::LockGuard::detach`].
    #[must_use]
    pub fn detach(mut self) -> LockId {
        let guard = self.guard.take().expect("BUG: a guard is there until it is dropped");
        guard.detach()
    }
}

impl<B: LockBackend> Drop for LockGuard<B> {
    fn drop(&mut self) {
        if let Some(guard) = self.guard.take() {
            // In async code this fails, and dropping the async guard releases the lock instead.
            drop(self.inner.block_on(guard.finish()));
        }
    }
}

/// A handle to a held lock for the work that runs under it. See [`crate::LockHandle`].
///
/// It can inspect and extend the lock, but not release it. You can send clones to other threads. A
/// handle keeps the locker's runtime alive.
pub struct LockHandle<B: LockBackend> {
    handle: AsyncLockHandle<B>,
    inner: Arc<Owned<B>>,
}

impl<B: LockBackend> Clone for LockHandle<B> {
    fn clone(&self) -> Self {
        self.handle()
    }
}

/// Implements the methods that a guard and a handle have in common.
macro_rules! lease_methods {
    ($type:ident) => {
        impl<B: LockBackend> $type<B> {
            /// Returns the key of the lock.
            #[must_use]
            pub fn key(&self) -> &Key {
                self.handle.key()
            }

            /// Returns the id that holds the lock. It is a secret: anyone who has it can release
            /// the lock.
            #[must_use]
            pub fn lock_id(&self) -> LockId {
                self.handle.lock_id()
            }

            /// Returns the fence, for code that is generic over the backend.
            #[must_use]
            pub fn try_fence(&self) -> Option<Fence> {
                self.handle.try_fence()
            }

            /// Returns when the lock expires, by the backend's time authority.
            #[must_use]
            pub fn expires_at(&self) -> Timestamp {
                self.handle.expires_at()
            }

            /// Returns how long the lock is certainly still held, by this machine's clock; zero if
            /// it was lost or released.
            #[must_use]
            pub fn remaining(&self) -> Duration {
                self.handle.remaining()
            }

            /// Returns whether the lock is certainly still held. It may be lost by the time you act
            /// on it: rely on the fence.
            #[must_use]
            pub fn is_valid(&self) -> bool {
                self.handle.is_valid()
            }

            /// Fails unless the lock is certainly still held. See
            /// [`crate::LockGuard::ensure_valid`].
            pub fn ensure_valid(&self) -> Result<()> {
                self.handle.ensure_valid()
            }

            /// Returns why the lock is no longer held, or `None` while it is held.
            #[must_use]
            pub fn ended(&self) -> Option<LostReason> {
                self.handle.ended()
            }

            /// Returns a token that is canceled when the lock is lost. Work on a thread can check
            /// it between two steps.
            #[must_use]
            pub fn lost_token(&self) -> CancellationToken {
                self.handle.lost_token()
            }

            /// Calls `callback` on a thread of the runtime if the lock is lost, but not if it is
            /// released.
            pub fn on_lost(&self, callback: impl FnOnce(LostReason) + Send + 'static) {
                let handle = self.handle.clone();
                self.inner.spawn(async move {
                    match handle.lost().await {
                        LostReason::Released => {}
                        reason => drop(tokio::task::spawn_blocking(move || callback(reason))),
                    }
                });
            }

            /// Sets the expiry to *now + ttl* and waits for the outcome. The TTL is a [`Ttl`] or a
            /// [`Duration`]. [`ExtendOutcome::NotHeld`] means that the lock is lost.
            pub fn extend<T>(&self, ttl: T) -> Result<ExtendOutcome>
            where
                T: TryInto<Ttl> + Send,
                Error: From<T::Error>,
            {
                self.inner.block_on(self.handle.extend(ttl))?
            }

            /// Returns a handle for work that runs under this lock, also on other threads.
            #[must_use]
            pub fn handle(&self) -> LockHandle<B> {
                LockHandle { handle: self.handle.clone(), inner: Arc::clone(&self.inner) }
            }
        }

        impl<B: LockBackend<Fencing = Fenced>> $type<B> {
            /// Returns the fence of this acquisition. Send it with every write.
            #[must_use]
            pub fn fence(&self) -> Fence {
                self.handle.fence()
            }
        }

        impl<B: LockBackend> fmt::Debug for $type<B> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_struct(stringify!($type)).field("key", self.key()).finish_non_exhaustive()
            }
        }
    };
}

lease_methods!(LockGuard);
lease_methods!(LockHandle);
