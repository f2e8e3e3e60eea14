//! The guard of several locks.

use std::fmt;
use std::future::Future;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::common::error::{Error, Result};
use crate::common::fence::{Fence, Fenced};
use crate::common::join::{first_of, join_all};
use crate::common::key::Key;
use crate::common::lost_reason::LostReason;
use crate::common::ttl::Ttl;
use crate::contract::LockBackend;
use crate::contract::outcome::{ExtendOutcome, ReleaseOutcome};
use crate::lock::guard::{LockGuard, LockHandle};

/// Several held locks, from [`Locker::lock_all`](crate::Locker::lock_all). Dropping it releases all
/// of them in the background.
///
/// Losing one is losing all: [`is_valid`](Self::is_valid), [`lost`](Self::lost) and
/// [`run`](Self::run) treat the locks as one. The others stay held until the guard is dropped or
/// released, so that work that is still stopping overlaps with no other holder of theirs.
#[must_use = "dropping the guard releases the locks at once; keep it in a named variable"]
pub struct MultiGuard<B: LockBackend> {
    /// Sorted by key; never empty.
    guards: Vec<LockGuard<B>>,
}

impl<B: LockBackend> MultiGuard<B> {
    pub(super) fn new(guards: Vec<LockGuard<B>>) -> Self {
        Self { guards }
    }

    /// Returns the keys, sorted and without duplicates.
    pub fn keys(&self) -> impl Iterator<Item = &Key> {
        self.guards.iter().map(LockGuard::key)
    }

    /// Returns a handle to the lock of a key, if this guard holds it. It inspects and extends that
    /// lock alone, and is what [`FencedTable`](crate::backend::FencedLock) takes.
    #[must_use]
    pub fn handle<K>(&self, key: K) -> Option<LockHandle<B>>
    where
        K: TryInto<Key>,
    {
        let key = key.try_into().ok()?;
        self.guards.iter().find(|guard| *guard.key() == key).map(LockGuard::handle)
    }

    /// Returns a handle to every lock, in the order of [`keys`](Self::keys).
    #[must_use]
    pub fn handles(&self) -> Vec<LockHandle<B>> {
        self.guards.iter().map(LockGuard::handle).collect()
    }

    /// Returns how long all locks are certain to remain held, by this machine's clock; zero once
    /// one of them is lost or released.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        self.guards.iter().map(LockGuard::remaining).min().unwrap_or_default()
    }

    /// Returns whether all locks are certain to be held now. One may be lost by the time you act on
    /// it, so send the fence of its lock with every write.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        !self.remaining().is_zero()
    }

    /// Fails with the error of a lost lock unless all locks are certain to be held now.
    pub fn ensure_valid(&self) -> Result<()> {
        self.guards.iter().try_for_each(LockGuard::ensure_valid)
    }

    /// Returns why a lock is no longer held, or `None` while all are.
    #[must_use]
    pub fn ended(&self) -> Option<LostReason> {
        self.guards.iter().find_map(LockGuard::ended)
    }

    /// Waits until one of the locks is no longer held and returns why.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future changes nothing.
    pub async fn lost(&self) -> LostReason {
        first_of(self.guards.iter().map(LockGuard::lost)).await
    }

    /// Returns a token that is canceled when one of the locks is no longer held.
    #[must_use]
    pub fn lost_token(&self) -> CancellationToken {
        let token = CancellationToken::new();
        for guard in &self.guards {
            guard.cancel_when_lost(&token);
        }
        token
    }

    /// Runs work while all locks are held: when one is lost or released, the work is dropped. See
    /// [`LockGuard::run`].
    ///
    /// # Cancel safety
    ///
    /// Dropping the future drops the work; the locks stay with the guard.
    pub async fn run<T>(&self, work: impl Future<Output = T>) -> Result<T, LostReason> {
        tokio::select! {
            biased;
            reason = self.lost() => Err(reason),
            value = work => Ok(value),
        }
    }

    /// Sets the expiry of every lock to *now + ttl*. Returns the first outcome that is not
    /// [`ExtendOutcome::Extended`], or the first error.
    ///
    /// # Cancel safety
    ///
    /// If dropped before it completes, the extends continue in the background.
    pub async fn extend<T>(&self, ttl: T) -> Result<ExtendOutcome>
    where
        T: TryInto<Ttl> + Send,
        Error: From<T::Error>,
    {
        let ttl: Ttl = ttl.try_into()?;
        self.extend_to(ttl).await
    }

    async fn extend_to(&self, ttl: Ttl) -> Result<ExtendOutcome> {
        let outcomes = join_all(self.guards.iter().map(|guard| guard.extend(ttl))).await;
        let mut extended = None;
        for outcome in outcomes {
            match outcome? {
                lost @ ExtendOutcome::NotHeld(_) => return Ok(lost),
                outcome @ ExtendOutcome::Extended(_) => extended = Some(outcome),
            }
        }
        Ok(extended.expect("BUG: a guard of several locks has at least one"))
    }

    /// Releases all locks at the same time and waits for the answers.
    ///
    /// [`ReleaseOutcome::NotHeld`] means that one of them had been lost before. After an error you
    /// can call it again, and dropping the guard retries in the background.
    ///
    /// # Cancel safety
    ///
    /// If dropped before it completes, the releases continue in the background.
    pub async fn release(&self) -> Result<ReleaseOutcome> {
        let mut released = ReleaseOutcome::Released;
        for outcome in join_all(self.guards.iter().map(LockGuard::release)).await {
            if let lost @ ReleaseOutcome::NotHeld(_) = outcome? {
                released = lost;
            }
        }
        Ok(released)
    }
}

impl<B: LockBackend<Fencing = Fenced>> MultiGuard<B> {
    /// Returns the fence of every lock with its key. Send the fence of a key with every write that
    /// its lock protects.
    pub fn fences(&self) -> impl Iterator<Item = (&Key, Fence)> {
        self.guards.iter().map(|guard| (guard.key(), guard.fence()))
    }
}

impl<B: LockBackend> fmt::Debug for MultiGuard<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MultiGuard").field("guards", &self.guards).finish()
    }
}
