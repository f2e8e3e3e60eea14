//! The guard: a held lock that is released when it is dropped.

use std::fmt;
use std::future::Future;
use std::ops::Deref;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::context::Context;
use super::lanes::{LocalHolder, Visit};
use super::lease_task;
use super::shared_lease::{Grant, SharedLease};
use crate::common::error::Result;
use crate::common::fence::{Fence, Fenced, Fencing};
use crate::common::key::Key;
use crate::common::lock_id::LockId;
use crate::common::lost_reason::LostReason;
use crate::common::time::Timestamp;
use crate::common::ttl::Ttl;
use crate::contract::LockBackend;
use crate::contract::outcome::{Extend, Release};

/// A held lock. Dropping it releases the lock in the background.
///
/// * Keep it in a variable with a name: `let _ = locker.lock(..)` frees the lock at once.
/// * [`release`](Self::release) is the better ending: it waits for the answer and returns it.
/// * Dropping never blocks, never panics and needs no runtime around it. When the runtime of the
///   locker ends first, the release never runs: **call [`Locker::shutdown`] before the runtime
///   ends**. What went wrong reaches
///   [`on_release_error`](crate::LockOptions::on_release_error).
/// * The lock is a lease. It is ours for certain only until *before the request was sent* + TTL
///   ([`remaining`](Held::remaining)); send the [`fence`](Held::fence) with every write.
///
/// ```
/// use syncguard::{Locker, MemoryBackend, Release};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> syncguard::Result<()> {
/// let locker = Locker::new(MemoryBackend::new())?;
/// let mut guard = locker.lock("invoice:42").await?;
/// println!("writing with fence {}", guard.fence());
/// assert_eq!(guard.release().await?, Release::Released);
/// # locker.shutdown().await
/// # }
/// ```
///
/// [`Locker::shutdown`]: crate::Locker::shutdown
#[must_use = "dropping the guard releases the lock at once; keep it in a variable with a name"]
pub struct LockGuard<B: LockBackend> {
    held: Held<B>,
}

impl<B: LockBackend> LockGuard<B> {
    /// A guard whose lane knows of it: the lane of the visit, or the one of its key.
    pub(super) fn new(
        context: Arc<Context<B>>,
        key: Key,
        grant: Grant<B::Fencing>,
        visit: Option<&Visit<'_>>,
    ) -> Self {
        let until = grant.deadline();
        let lease = Arc::new(SharedLease::new(context, key, grant));
        let holder: Weak<dyn LocalHolder> = Arc::<SharedLease<B>>::downgrade(&lease);
        match visit {
            Some(visit) => visit.hold(until, holder),
            None => lease.context.engine.lanes.hold(&lease.key, until, holder),
        }
        if lease.context.options.renew {
            lease_task::start(&lease);
        }
        Self { held: Held(lease) }
    }

    fn lease(&self) -> &Arc<SharedLease<B>> {
        &self.held.0
    }

    /// Gives the lock back and waits for the answer.
    ///
    /// [`Release::NotHeld`] means that the lock had been lost before. Afterwards the guard is
    /// inert: a second call answers `NotHeld` without asking. After an error it can be called
    /// again, and dropping the guard tries in the background.
    ///
    /// # Cancel safety
    ///
    /// Dropped half-way, the release goes on in the background.
    pub async fn release(&mut self) -> Result<Release> {
        self.lease().context.engine.check_for_a_runtime()?;
        self.lease().release().await
    }

    /// Gives the lock back within the time that the options allow. What remains to be done goes on
    /// in the background, and is reported there.
    pub(crate) async fn finish(&mut self) {
        let lease = Arc::clone(self.lease());
        let limit = lease.release_limit();
        tokio::select! {
            biased;
            // After an error dropping the guard tries again and reports.
            _answer = self.release() => {}
            () = lease.context.engine.ticker.sleep_until(limit) => {}
        }
    }

    /// Keeps the lock beyond this guard, until its TTL, and hands out its id: another process can
    /// [`adopt`](crate::Locker::adopt) it, or `release` and `extend` it by that id.
    ///
    /// Renewal ends.
    #[must_use]
    pub fn leak(self) -> LockId {
        self.lease().keep();
        self.lease().lock_id
    }

    /// A handle for work that runs under this lock: it can look and extend, not release.
    #[must_use]
    pub fn held(&self) -> Held<B> {
        self.held.clone()
    }
}

/// A guard can do everything that a handle to its lock can.
impl<B: LockBackend> Deref for LockGuard<B> {
    type Target = Held<B>;

    fn deref(&self) -> &Held<B> {
        &self.held
    }
}

impl<B: LockBackend> Drop for LockGuard<B> {
    fn drop(&mut self) {
        self.lease().abandon();
    }
}

impl<B: LockBackend> fmt::Debug for LockGuard<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockGuard")
            .field("key", self.key())
            .field("fence", &self.try_fence())
            .field("remaining", &self.remaining())
            .finish_non_exhaustive()
    }
}

/// A handle to a held lock for the work that runs under it: it can look and extend, not release.
pub struct Held<B: LockBackend>(Arc<SharedLease<B>>);

impl<B: LockBackend> Clone for Held<B> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<B: LockBackend> Held<B> {
    /// What is locked.
    #[must_use]
    pub fn key(&self) -> &Key {
        &self.0.key
    }

    /// The id that holds the lock. A secret: whoever has it can release.
    #[must_use]
    pub fn lock_id(&self) -> LockId {
        self.0.lock_id
    }

    /// The fence, for code that is generic over the backend.
    #[must_use]
    pub fn try_fence(&self) -> Option<Fence> {
        <B::Fencing as Fencing>::fence(self.0.token)
    }

    /// When the lock expires, by the backend's time authority.
    #[must_use]
    pub fn expires_at(&self) -> Timestamp {
        self.0.expires_at()
    }

    /// How long the lock is still ours for certain, by this machine's clock; zero when it is lost
    /// or was let go.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        self.0.remaining()
    }

    /// Whether the lock is still ours for certain. It may not be by the time you act on it: the
    /// fence decides.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        !self.remaining().is_zero()
    }

    /// Sets the expiry to *now + ttl*. [`Extend::NotHeld`] means that the lock is lost, for ever.
    ///
    /// # Cancel safety
    ///
    /// Dropped half-way, the extend goes on in the background and its answer is noted.
    pub async fn extend(&self, ttl: Ttl) -> Result<Extend> {
        self.0.context.engine.check_runtime()?;
        let answer = self.0.extend(ttl).await;
        answer.map_err(|error| error.with_key(&self.0.key).with_lock_id(self.0.lock_id))
    }

    /// Waits until the lock is not ours any longer and tells why:
    /// [`LostReason::Released`] when the guard gave it back, another reason when it was lost.
    ///
    /// With [renewal](crate::LockOptions::renew) a loss is told at once; without, when the time is
    /// over. It can be awaited in any runtime, and outside of one.
    ///
    /// # Cancel safety
    ///
    /// Nothing is changed, dropped or not.
    pub async fn lost(&self) -> LostReason {
        lease_task::start(&self.0);
        self.0.ended().await
    }

    /// Runs work as long as the lock is ours: when it is lost or given back, the work is dropped. If
    /// that has happened before, the work does not start.
    ///
    /// Work that was moved to a blocking thread cannot be ended that way; it must ask
    /// [`is_valid`](Self::is_valid) itself, and send the fence with every write.
    ///
    /// ```
    /// # use syncguard::{Locker, MemoryBackend};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> syncguard::Result<()> {
    /// # let locker = Locker::new(MemoryBackend::new())?;
    /// let guard = locker.lock("report").await?;
    /// match guard.run(async { 6 * 7 }).await {
    ///     Ok(answer) => assert_eq!(answer, 42),
    ///     Err(reason) => eprintln!("stopped: {reason}"),
    /// }
    /// # drop(guard); locker.shutdown().await
    /// # }
    /// ```
    ///
    /// # Cancel safety
    ///
    /// Dropping the future drops the work; the lock stays with the guard.
    pub async fn run<T>(&self, work: impl Future<Output = T>) -> Result<T, LostReason> {
        tokio::select! {
            biased;
            reason = self.lost() => Err(reason),
            value = work => Ok(value),
        }
    }

    /// A token that is canceled when the lock is not ours any longer, for whatever reason
    /// [`lost`](Self::lost) would tell.
    #[must_use]
    pub fn lost_token(&self) -> CancellationToken {
        let token = CancellationToken::new();
        // Whatever ends the task, the end of its runtime included, cancels the token.
        let (held, cancel_on_drop) = (self.clone(), token.clone().drop_guard());
        self.0.context.engine.background.spawn_untracked(async move {
            held.lost().await;
            drop(cancel_on_drop);
        });
        token
    }
}

impl<B: LockBackend<Fencing = Fenced>> Held<B> {
    /// The fence of this acquisition: send it along with every write.
    ///
    /// It exists on fencing backends only; elsewhere this does not compile:
    ///
    /// ```compile_fail,E0599
    /// use syncguard::{Fence, LockBackend, LockGuard, Unfenced};
    ///
    /// fn fence(guard: &LockGuard<impl LockBackend<Fencing = Unfenced>>) -> Fence {
    ///     guard.fence()
    /// }
    /// ```
    ///
    /// Code that is generic over the backend asks [`try_fence`](Self::try_fence).
    #[must_use]
    pub fn fence(&self) -> Fence {
        self.0.token
    }
}

impl<B: LockBackend> fmt::Debug for Held<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Held").field("key", self.key()).finish_non_exhaustive()
    }
}
