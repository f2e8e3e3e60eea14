//! The guard: a held lock that is released when it is dropped.

use std::fmt;
use std::future::Future;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::context::Context;
use super::lease_task;
use super::shared_lease::{Grant, SharedLease};
use super::wait_queue::{LocalHolder, Ticket};
use crate::common::error::{Error, Result};
use crate::common::fence::{Fence, Fenced};
use crate::common::key::Key;
use crate::common::lock_id::LockId;
use crate::common::lost_reason::LostReason;
use crate::common::time::Timestamp;
use crate::common::ttl::Ttl;
use crate::contract::LockBackend;
use crate::contract::event::EngineEventKind;
use crate::contract::fenced_lock::FencedLock;
use crate::contract::outcome::{ExtendOutcome, ReleaseOutcome};

/// A held lock. Dropping it releases the lock in the background.
///
/// * Keep it in a named variable: `let _ = locker.lock(..).await?` releases the lock at once.
/// * Prefer [`release`](Self::release): it waits for the answer and returns it.
/// * Dropping never blocks or panics, and works outside a runtime. If the locker's runtime ends
///   first, the release never runs: **call [`Locker::shutdown`] before the runtime ends**. Failures
///   are reported to [`on_release_error`](crate::LockOptions::on_release_error).
/// * The lock is a lease. It is certain to be held only for its TTL, counted from *before the
///   request was sent* ([`remaining`](Self::remaining)); send the [`fence`](Self::fence) with every
///   write.
///
/// ```
/// use syncguard::{Locker, MemoryBackend, ReleaseOutcome};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> syncguard::Result<()> {
/// let locker = Locker::new(MemoryBackend::new())?;
/// let guard = locker.lock("invoice:42").await?;
/// println!("writing with fence {}", guard.fence());
/// assert_eq!(guard.release().await?, ReleaseOutcome::Released);
/// # locker.shutdown().await
/// # }
/// ```
///
/// [`Locker::shutdown`]: crate::Locker::shutdown
#[doc(alias = "lease")]
#[doc(alias = "permit")]
#[must_use = "dropping the guard releases the lock at once; keep it in a named variable"]
pub struct LockGuard<B: LockBackend>(Arc<SharedLease<B>>);

impl<B: LockBackend> LockGuard<B> {
    /// Creates a guard and records it in its queue: that of the ticket, or that of its key.
    pub(super) fn new(
        context: Arc<Context<B>>,
        key: Key,
        grant: Grant<B::Fencing>,
        ticket: Option<&Ticket<'_>>,
    ) -> Self {
        let until = grant.deadline();
        let lease = Arc::new(SharedLease::new(context, key, grant));
        let holder: Weak<dyn LocalHolder> = Arc::<SharedLease<B>>::downgrade(&lease);
        match ticket {
            Some(ticket) => ticket.hold(until, holder),
            None => lease.context.engine.wait_queues.hold(&lease.key, until, holder),
        }
        lease.report(|| EngineEventKind::Acquired);
        if lease.context.options.renew {
            lease_task::start(&lease);
        }
        Self(lease)
    }

    /// Releases the lock and waits for the answer.
    ///
    /// [`ReleaseOutcome::NotHeld`] means that the lock had been lost before. Afterwards the guard
    /// does nothing: a second call returns `NotHeld` without asking the store. After an error you
    /// can call it again, and dropping the guard retries in the background. You can also release a
    /// guard that is in an [`Arc`].
    ///
    /// # Cancel safety
    ///
    /// If dropped before it completes, the release continues in the background.
    pub async fn release(&self) -> Result<ReleaseOutcome> {
        self.0.context.engine.check_for_a_runtime()?;
        self.0.release().await
    }

    /// Releases the lock within the time that the options allow. A release that fails or takes
    /// longer continues in the background, and is reported there.
    pub(crate) async fn finish(&self) {
        let limit = self.0.release_limit();
        tokio::select! {
            biased;
            // After an error, dropping the guard retries and reports.
            _answer = self.release() => {}
            () = self.0.context.engine.ticker.sleep_until(limit) => {}
        }
    }

    /// Records that nobody uses the lock: it is released at once when the guard is dropped,
    /// whatever `hold_at_least` says.
    pub(super) fn discard(&self) {
        self.0.discard();
    }

    /// Keeps the lock beyond this guard, until its TTL, and returns its id: another process can
    /// [`resume`](crate::Locker::resume) it, or `release` and `extend` it by that id.
    ///
    /// The lock is no longer renewed.
    #[must_use]
    pub fn detach(self) -> LockId {
        self.0.keep();
        self.0.lock_id
    }
}

impl<B: LockBackend> Drop for LockGuard<B> {
    fn drop(&mut self) {
        self.0.abandon();
    }
}

/// A handle to a held lock, for the work that runs under it: it can inspect and extend the lock,
/// but not release it. Clones are cheap.
pub struct LockHandle<B: LockBackend>(Arc<SharedLease<B>>);

impl<B: LockBackend> Clone for LockHandle<B> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

/// The methods that a guard and a handle have in common.
macro_rules! lease_methods {
    ($type:ident) => {
        impl<B: LockBackend> $type<B> {
            /// Returns the key.
            #[must_use]
            pub fn key(&self) -> &Key {
                &self.0.key
            }

            /// Returns the id that holds the lock. Keep it secret: any process that has it can
            /// release the lock.
            #[must_use]
            pub fn lock_id(&self) -> LockId {
                self.0.lock_id
            }

            /// Returns the fence, for code that is generic over the backend. `None` on backends
            /// without fencing.
            #[must_use]
            pub fn try_fence(&self) -> Option<Fence> {
                self.0.fence()
            }

            /// Returns when the lock expires, by the backend's time authority.
            #[must_use]
            pub fn expires_at(&self) -> Timestamp {
                self.0.expires_at()
            }

            /// Returns how long the lock is certain to remain held, by this machine's clock; zero
            /// once it is lost or released.
            #[must_use]
            pub fn remaining(&self) -> Duration {
                self.0.remaining()
            }

            /// Returns whether the lock is certain to be held now. It may be lost by the time you
            /// act on it, so send the fence with every write.
            #[must_use]
            pub fn is_valid(&self) -> bool {
                !self.remaining().is_zero()
            }

            /// Fails with the error of a lost lock unless the lock is certain to be held now: a
            /// cheap local check before a write. The lock may be lost right after it, so send the
            /// fence with the write.
            ///
            /// ```
            /// # use syncguard::{Locker, MemoryBackend};
            /// # #[tokio::main(flavor = "current_thread")]
            /// # async fn main() -> syncguard::Result<()> {
            /// # let locker = Locker::new(MemoryBackend::new())?;
            /// let guard = locker.lock("report").await?;
            /// guard.ensure_valid()?;
            /// guard.release().await?;
            /// assert!(guard.ensure_valid().is_err_and(|error| error.lost().is_some()));
            /// # locker.shutdown().await
            /// # }
            /// ```
            pub fn ensure_valid(&self) -> Result<()> {
                if self.is_valid() {
                    return Ok(());
                }
                let reason = self.ended().unwrap_or(LostReason::Expired);
                Err(Error::lost_lock(reason).with_key(&self.0.key))
            }

            /// Returns why the lock is no longer held, or `None` while it is:
            /// [`LostReason::Released`] after the guard released it.
            #[must_use]
            pub fn ended(&self) -> Option<LostReason> {
                self.0.end()
            }

            /// Sets the expiry to *now + ttl*, given as a [`Ttl`] or a [`Duration`].
            /// [`ExtendOutcome::NotHeld`] means that the lock is lost.
            ///
            /// # Cancel safety
            ///
            /// If dropped before it completes, the extend continues in the background and its
            /// outcome is recorded.
            pub async fn extend<T>(&self, ttl: T) -> Result<ExtendOutcome>
            where
                T: TryInto<Ttl> + Send,
                Error: From<T::Error>,
            {
                let ttl = ttl.try_into()?;
                self.0.context.engine.check_runtime()?;
                let answer = self.0.extend(ttl).await;
                answer.map_err(|error| error.with_key(&self.0.key).with_lock_id(self.0.lock_id))
            }

            /// Waits until the lock is no longer held and returns why: [`LostReason::Released`] if
            /// the guard released it, another reason if it was lost.
            ///
            /// With [renewal](crate::LockOptions::renew), a lock that was taken away is noticed at
            /// once where the store can notify, and otherwise at the next renewal; without it, when
            /// the TTL is over. You can await this in any runtime, and outside one.
            ///
            /// # Cancel safety
            ///
            /// Dropping the future changes nothing.
            pub async fn lost(&self) -> LostReason {
                lease_task::start(&self.0);
                self.0.ended().await
            }

            /// Returns a handle for work that runs under this lock: it can inspect and extend the
            /// lock, but not release it.
            #[must_use]
            pub fn handle(&self) -> LockHandle<B> {
                LockHandle(Arc::clone(&self.0))
            }

            /// Runs work while the lock is held: when the lock is lost or released, the work is
            /// dropped. If that has already happened, the work does not start.
            ///
            /// Work on a blocking thread cannot be ended this way; it must check
            /// [`is_valid`](Self::is_valid) itself, and send the fence with every write.
            ///
            /// ```
            /// # use syncguard::{Locker, MemoryBackend};
            /// # #[tokio::main(flavor = "current_thread")]
            /// # async fn main() -> syncguard::Result<()> {
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

            /// Returns a token that is canceled when the lock is no longer held, for any reason
            /// that [`lost`](Self::lost) returns.
            #[must_use]
            pub fn lost_token(&self) -> CancellationToken {
                let token = CancellationToken::new();
                self.cancel_when_lost(&token);
                token
            }

            /// Cancels a token when the lock is no longer held.
            pub(crate) fn cancel_when_lost(&self, token: &CancellationToken) {
                // The token is canceled however the task ends, even if its runtime shuts down.
                let (handle, cancel_on_drop) = (self.handle(), token.clone().drop_guard());
                self.0.context.engine.background.spawn_untracked(async move {
                    handle.lost().await;
                    drop(cancel_on_drop);
                });
            }
        }

        impl<B: LockBackend<Fencing = Fenced>> $type<B> {
            /// Returns the fence of this acquisition. Send it with every write.
            ///
            /// This method exists only on fencing backends; on others, this does not compile:
            ///
            /// ```compile_fail,E0599
            /// use syncguard::{Fence, LockBackend, LockGuard};
            /// use syncguard::backend::Unfenced;
            ///
            /// fn fence(guard: &LockGuard<impl LockBackend<Fencing = Unfenced>>) -> Fence {
            ///     guard.fence()
            /// }
            /// ```
            ///
            /// Code that is generic over the backend uses [`try_fence`](Self::try_fence).
            #[must_use]
            pub fn fence(&self) -> Fence {
                self.0.token
            }
        }

        impl<B: LockBackend<Fencing = Fenced>> FencedLock for $type<B> {
            fn key(&self) -> &Key {
                self.key()
            }

            fn fence(&self) -> Fence {
                self.fence()
            }
        }

        impl<B: LockBackend> fmt::Debug for $type<B> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_struct(stringify!($type))
                    .field("key", self.key())
                    .field("fence", &self.try_fence())
                    .field("remaining", &self.remaining())
                    .finish_non_exhaustive()
            }
        }
    };
}

lease_methods!(LockGuard);
lease_methods!(LockHandle);
