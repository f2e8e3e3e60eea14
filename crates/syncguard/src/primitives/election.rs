//! Elections: at most one process leads.

use std::fmt;
use std::future::Future;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use super::names::leader_key;
use super::observer::Observer;
use crate::common::backoff::random_fraction;
use crate::common::error::{Error, Result};
use crate::common::fence::{Fence, Fenced};
use crate::common::key::Key;
use crate::common::lost_reason::LostReason;
use crate::common::sync::{Mutex, MutexGuard};
use crate::contract::LockBackend;
use crate::contract::outcome::ReleaseOutcome;
use crate::lock::clock::LocalInstant;
use crate::lock::guard::{LockGuard, LockHandle};
use crate::lock::locker::Locker;

impl<B: LockBackend> Locker<B> {
    /// Returns an election: at most one of the processes that [campaign](Election::campaign) in it
    /// leads at a time.
    ///
    /// Its lock has the key `<name>:leader`. It is always renewed, and waited for without a
    /// timeout; the other options are those of this locker.
    pub fn election<K>(&self, name: K) -> Result<Election<B>>
    where
        K: TryInto<Key>,
        Error: From<K::Error>,
    {
        let key = leader_key(&self.key(name)?)?;
        let mut options = self.options().clone().renew().wait_forever().retry_on_error(false);
        // A leader that resigns hands over at once.
        options.hold_at_least = Duration::ZERO;
        // The next leader is needed at once, whichever it is.
        options.is_ordered = false;
        let locker = self.unscoped().with_options(options)?;
        let shared = ElectionState {
            locker,
            key,
            following: AtomicUsize::new(0),
            latest: Mutex::new(Latest { leadership: None, resigned_at: None }),
        };
        Ok(Election(Arc::new(shared)))
    }
}

/// An election, from [`Locker::election`]. Clones are cheap and belong to the same candidate.
///
/// Leadership is a lease: it ends when it is not renewed. A leader that was paused may not have
/// noticed yet that another one leads, so send the [term](Leadership::term) with every write, as
/// with the fence of a lock.
///
/// ```
/// use syncguard::{Locker, MemoryBackend, primitives::Role};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> syncguard::Result<()> {
/// let locker = Locker::new(MemoryBackend::new())?;
/// let election = locker.election("shard-7")?;
/// let leadership = election.campaign().await?;
/// println!("leading in term {}", leadership.term());
/// assert_eq!(election.role(), Role::Leading);
/// leadership.resign().await?;
/// # locker.shutdown().await
/// # }
/// ```
#[doc(alias = "leader")]
pub struct Election<B: LockBackend>(Arc<ElectionState<B>>);

pub(super) struct ElectionState<B: LockBackend> {
    pub(super) locker: Locker<B>,
    pub(super) key: Key,
    /// How many calls wait while another process is known to lead.
    following: AtomicUsize,
    latest: Mutex<Latest<B>>,
}

/// The latest leadership of this candidate.
struct Latest<B: LockBackend> {
    leadership: Option<LockHandle<B>>,
    resigned_at: Option<LocalInstant>,
}

/// The role of a candidate, for health checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Role {
    /// This candidate leads.
    Leading,
    /// This candidate campaigns, and another one leads.
    Following,
    /// This candidate does not campaign, or the store cannot be reached.
    Unknown,
}

impl Role {
    /// Returns a word for probes and labels: `leading`, `following` or `unknown`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Leading => "leading",
            Self::Following => "following",
            Self::Unknown => "unknown",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl<B: LockBackend> Election<B> {
    /// How long a candidate that has resigned lets others go first.
    const STAND_BACK: Duration = Duration::from_millis(50);

    /// Returns the key of the election's lock.
    #[must_use]
    pub fn key(&self) -> &Key {
        &self.0.key
    }

    /// Waits until this process leads.
    ///
    /// It continues through retryable errors of the store. It fails with
    /// [`ErrorCode::Aborted`](crate::ErrorCode::Aborted) when the
    /// [token](crate::LockOptions::cancel) is canceled or the locker is shut down, and with the
    /// store's own error otherwise.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future ends the campaign. A lock that it gets meanwhile is released in the
    /// background.
    pub async fn campaign(&self) -> Result<Leadership<B>> {
        const LONGEST_PAUSE: Duration = Duration::from_secs(1);
        let locker = &self.0.locker;
        locker.check_usable()?;
        let resigned_at = self.0.latest().resigned_at;
        if let Some(at) = resigned_at {
            let pause = (at + Self::STAND_BACK).since(locker.now());
            self.pause(pause).await;
        }
        let mut pause = Duration::from_millis(50);
        loop {
            match self.stand().await {
                Ok(guard) => return Ok(self.lead(guard)),
                Err(error) if error.is_retryable() => {
                    tracing::debug!(
                        key_hash = %self.0.key.hash_id(),
                        code = error.code().as_str(),
                        "could not campaign, retrying: {}",
                        error.message()
                    );
                    self.pause(pause.mul_f64(0.5 + random_fraction() / 2.0)).await;
                    pause = (pause * 2).min(LONGEST_PAUSE);
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Sleeps, unless the campaign has to end.
    async fn pause(&self, duration: Duration) {
        tokio::select! {
            biased;
            () = self.0.locker.stopped() => {}
            () = self.0.locker.sleep(duration) => {}
        }
    }

    /// Waits for the lock until the store fails.
    async fn stand(&self) -> Result<LockGuard<B>> {
        let locker = &self.0.locker;
        // Another candidate in this process goes first.
        if !locker.is_wanted_here(&self.0.key)
            && let Some(guard) = locker.try_lock(&self.0.key).await?
        {
            return Ok(guard);
        }
        let _following = Following::begin(&self.0.following);
        locker.lock(&self.0.key).await
    }

    /// Leads if no process does: one attempt. Returns `None` if another one leads.
    ///
    /// # Cancel safety
    ///
    /// If dropped before it completes, the attempt continues in the background and a lock that it
    /// gets is released.
    pub async fn try_campaign(&self) -> Result<Option<Leadership<B>>> {
        let guard = self.0.locker.try_lock(&self.0.key).await?;
        Ok(guard.map(|guard| self.lead(guard)))
    }

    fn lead(&self, guard: LockGuard<B>) -> Leadership<B> {
        self.0.latest().leadership = Some(guard.handle());
        Leadership { guard, election: Arc::clone(&self.0) }
    }

    /// Campaigns, runs `work` while this process leads, and campaigns again when the work ends or
    /// the lead is lost. When the lead is lost, the work is dropped.
    ///
    /// Returns when the [token](crate::LockOptions::cancel) is canceled or the locker is
    /// [shut down](Locker::shutdown): the work is dropped and the lead is handed over at once; the
    /// shutdown waits for that. Errors of the store that are not retryable end it too.
    ///
    /// ```
    /// use std::time::Duration;
    /// use syncguard::{Locker, MemoryBackend};
    ///
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> syncguard::Result<()> {
    /// let locker = Locker::new(MemoryBackend::new())?;
    /// let election = locker.election("scheduler")?;
    /// let serving = tokio::spawn(async move {
    ///     election.run(|lead| async move {
    ///         loop {
    ///             println!("scheduling with fence {}", lead.fence());
    ///             tokio::time::sleep(Duration::from_secs(1)).await;
    ///         }
    ///     }).await
    /// });
    /// # tokio::time::sleep(Duration::from_millis(10)).await;
    /// locker.shutdown().await?;
    /// serving.await.expect("no panic")
    /// # }
    /// ```
    ///
    /// # Cancel safety
    ///
    /// Dropping the future drops the work and hands over the lead in the background.
    pub async fn run<Work>(&self, mut work: impl FnMut(LockHandle<B>) -> Work) -> Result<()>
    where
        Work: Future<Output = ()>,
    {
        let locker = &self.0.locker;
        locker.check_usable()?;
        let _handing_over = locker.delay_shutdown();
        loop {
            let leadership = match self.campaign().await {
                Ok(leadership) => leadership,
                Err(error) if error.is_canceled() || error.is_shut_down() => return Ok(()),
                Err(error) => return Err(error),
            };
            let is_stopped = tokio::select! {
                biased;
                () = locker.stopped() => true,
                _ended = leadership.run(work(leadership.handle())) => false,
            };
            leadership.note_end();
            leadership.guard.finish().await;
            if is_stopped {
                return Ok(());
            }
        }
    }

    /// Returns the role of this candidate now, without asking the store: for a health check.
    ///
    /// While the store cannot be reached, it becomes [`Role::Unknown`] within seconds; a leader
    /// leads until its lease is over.
    #[must_use]
    pub fn role(&self) -> Role {
        let leads = self.0.latest().leadership.as_ref().is_some_and(LockHandle::is_valid);
        if leads {
            Role::Leading
        } else if self.0.following.load(Ordering::SeqCst) > 0 {
            Role::Following
        } else {
            Role::Unknown
        }
    }

    /// Observes who leads, without campaigning. See [`Observer`].
    #[must_use]
    pub fn observe(&self) -> Observer<B> {
        Observer::new(Arc::clone(&self.0))
    }
}

impl<B: LockBackend> ElectionState<B> {
    fn latest(&self) -> MutexGuard<'_, Latest<B>> {
        self.latest.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<B: LockBackend> Clone for Election<B> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<B: LockBackend> fmt::Debug for Election<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Election")
            .field("key", &self.0.key)
            .field("role", &self.role())
            .finish_non_exhaustive()
    }
}

/// Counts a call that waits while another candidate leads.
struct Following<'a>(&'a AtomicUsize);

impl<'a> Following<'a> {
    fn begin(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::SeqCst);
        Self(count)
    }
}

impl Drop for Following<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// The lead in an [`Election`], renewed in the background. Dropping it resigns in the background.
#[must_use = "dropping the leadership resigns at once; keep it in a named variable"]
pub struct Leadership<B: LockBackend> {
    guard: LockGuard<B>,
    election: Arc<ElectionState<B>>,
}

impl<B: LockBackend> Leadership<B> {
    /// Returns the term, for code that is generic over the backend. `None` on backends without
    /// fencing.
    #[must_use]
    pub fn try_term(&self) -> Option<Fence> {
        self.guard.try_fence()
    }

    /// Returns whether this process is certain to lead now. It may lose the lead by the time you
    /// act on it, so send the term with every write.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        self.guard.is_valid()
    }

    /// Waits until this process no longer leads and returns why: [`LostReason::Released`] after it
    /// resigned.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future changes nothing.
    pub async fn lost(&self) -> LostReason {
        self.guard.lost().await
    }

    /// Runs work while this process leads: when the lead is lost, the work is dropped. See
    /// [`LockGuard::run`].
    ///
    /// # Cancel safety
    ///
    /// Dropping the future drops the work; this process continues to lead.
    pub async fn run<T>(&self, work: impl Future<Output = T>) -> Result<T, LostReason> {
        self.guard.run(work).await
    }

    /// Hands over the lead: the next candidate leads at once. This candidate lets others go first
    /// for a moment if it campaigns again.
    ///
    /// # Cancel safety
    ///
    /// If dropped before it completes, the release continues in the background.
    pub async fn resign(&self) -> Result<ReleaseOutcome> {
        self.note_end();
        self.guard.release().await
    }

    /// Returns a handle to the lock, for the work that runs under it.
    #[must_use]
    pub fn handle(&self) -> LockHandle<B> {
        self.guard.handle()
    }

    /// Returns the guard of the lock.
    pub fn guard(&self) -> &LockGuard<B> {
        &self.guard
    }

    fn note_end(&self) {
        let now = self.election.locker.now();
        let mut latest = self.election.latest();
        // A later term of the same candidate goes on.
        let is_it = |latest: &mut LockHandle<B>| latest.lock_id() == self.guard.lock_id();
        if latest.leadership.take_if(is_it).is_some() {
            latest.resigned_at = Some(now);
        }
    }
}

impl<B: LockBackend<Fencing = Fenced>> Leadership<B> {
    /// Returns the term: the fence of the lock, which grows with every leader. Send it with every
    /// write.
    #[must_use]
    pub fn term(&self) -> Fence {
        self.guard.fence()
    }
}

impl<B: LockBackend> Drop for Leadership<B> {
    fn drop(&mut self) {
        self.note_end();
    }
}

impl<B: LockBackend> fmt::Debug for Leadership<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Leadership").field("guard", &self.guard).finish_non_exhaustive()
    }
}
