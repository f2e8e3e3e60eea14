//! The guard: a held lock that is released when it is dropped.

use std::fmt;
use std::future::{Future, poll_fn};
use std::ops::Deref;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::carried::Carried;
use super::heartbeat;
use super::hold::{Grant, Hold};
use super::locker::Context;
use super::options::ReleaseSource;
use super::reaper::release_later;
use crate::common::error::Result;
use crate::common::fence::{Fence, Fenced, Fencing};
use crate::common::key::Key;
use crate::common::lock_id::LockId;
use crate::common::time::Timestamp;
use crate::common::ttl::Ttl;
use crate::contract::LockBackend;
use crate::contract::event::LostReason;
use crate::contract::outcome::{Absence, Extend, Release};
use crate::contract::request::ReleaseRequest;

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
    ending: Ending,
}

/// How far a guard is on its way out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    /// Dropping the guard must release the lock. `true`: a release before had no answer.
    Armed { release_was_sent: bool },
    /// A release goes on in the background, or the lock was deliberately kept.
    HandedOn,
    /// The store has answered a release.
    Answered,
}

impl<B: LockBackend> LockGuard<B> {
    pub(super) fn new(context: Arc<Context<B>>, key: Key, grant: Grant<B::Fencing>) -> Self {
        let hold = Arc::new(Hold::new(context, key, grant));
        if hold.context.options.renew {
            heartbeat::start(&hold);
        }
        Self { held: Held(hold), ending: Ending::Armed { release_was_sent: false } }
    }

    fn hold(&self) -> &Arc<Hold<B>> {
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
        if self.ending == Ending::Answered {
            return Ok(Release::NotHeld(Absence::NotFound));
        }
        let hold = Arc::clone(self.hold());
        hold.context.check_for_a_runtime()?;
        hold.let_go();
        let release_was_sent = self.ending != Ending::Armed { release_was_sent: false };
        self.ending = Ending::HandedOn;
        let request = ReleaseRequest::new(hold.lock_id).with_hint(hold.hint());
        let caller = Arc::clone(&hold);
        let call = async move { caller.context.backend.release(&request).await };
        let adopt = |rest| release_later(Arc::clone(&hold), ReleaseSource::Guard, rest);
        let mut call = Carried::new(call, adopt);
        let begun = poll_fn(|context| Poll::Ready(Pin::new(&mut call).poll(context))).await;
        let answer = match begun {
            Poll::Ready(answer) => answer,
            Poll::Pending => {
                // Only a call that waits needs its runtime. Elsewhere it is handed home.
                hold.context.check_runtime()?;
                call.await
            }
        };
        match answer {
            Ok(answer) => {
                self.ending = Ending::Answered;
                if matches!(answer, Release::NotHeld(_)) && !release_was_sent {
                    hold.was_not_held();
                }
                hold.undo_what_is_in_doubt();
                hold.give_back();
                // The release before this one may have worked although its answer was lost.
                Ok(if release_was_sent { Release::Released } else { answer })
            }
            Err(error) => {
                let may_have_worked = release_was_sent || error.may_have_taken_effect();
                self.ending = Ending::Armed { release_was_sent: may_have_worked };
                Err(error.with_key(&hold.key).with_lock_id(hold.lock_id))
            }
        }
    }

    /// Gives the lock back within the time that the options allow. What remains to be done goes on
    /// in the background, and is reported there.
    pub(crate) async fn finish(&mut self) {
        let hold = Arc::clone(self.hold());
        hold.let_go();
        tokio::select! {
            biased;
            // After an error the guard is still armed: dropping it tries again and reports.
            _answer = self.release() => {}
            () = hold.context.ticker.sleep_until(hold.release_limit()) => {}
        }
    }

    /// Keeps the lock beyond this guard, until its TTL, and hands out its id: another process can
    /// [`adopt`](crate::Locker::adopt) it, or `release` and `extend` it by that id.
    ///
    /// Renewal ends.
    #[must_use]
    pub fn leak(mut self) -> LockId {
        self.hold().let_go();
        self.hold().give_back();
        self.ending = Ending::HandedOn;
        self.hold().lock_id
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
        self.hold().let_go();
        if matches!(self.ending, Ending::Armed { .. }) {
            release_later(Arc::clone(self.hold()), ReleaseSource::Guard, None);
        }
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
pub struct Held<B: LockBackend>(Arc<Hold<B>>);

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
        self.0.context.check_runtime()?;
        let answer = self.0.extend(ttl).await;
        answer.map_err(|error| error.with_key(&self.0.key).with_lock_id(self.0.lock_id))
    }

    /// Waits until the lock is lost and tells why. Never ends while it is ours, nor after the
    /// guard has let go.
    ///
    /// With [renewal](crate::LockOptions::renew) it is told at once; without, when the time is over.
    ///
    /// # Cancel safety
    ///
    /// Nothing is changed, dropped or not.
    pub async fn lost(&self) -> LostReason {
        self.0.lost().await
    }

    /// Runs work as long as the lock is ours: at its loss the work is dropped.
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

    /// A token that is cancelled when the lock is lost.
    #[must_use]
    pub fn lost_token(&self) -> CancellationToken {
        let token = CancellationToken::new();
        let (hold, lost) = (Arc::clone(&self.0), token.clone());
        self.0.context.reaper.spawn_untracked(async move {
            tokio::select! {
                biased;
                _reason = hold.lost() => lost.cancel(),
                () = hold.ended() => {}
            }
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
