//! Who leads in an election.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::election::ElectionState;
use crate::common::fence::Fence;
use crate::common::holder::HolderInfo;
use crate::common::join::first_of;
use crate::common::time::Timestamp;
use crate::contract::LockBackend;
use crate::contract::notifier::Subscription;

/// Follows who leads in an election, from [`Election::observe`](super::Election::observe).
///
/// It is woken by the store where the store can do that, and looks again only as a fallback, or for
/// a moment while no process leads. It looks at the lock and protects nothing. Where the store
/// counts waiters, it counts as one.
///
/// ```
/// use syncguard::primitives::Observation;
/// # use syncguard::{Locker, MemoryBackend};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> syncguard::Result<()> {
/// # let locker = Locker::new(MemoryBackend::new())?;
/// let election = locker.election("shard-7")?;
/// let mut observer = election.observe();
/// assert_eq!(observer.next().await, Observation::Vacant);
/// let leadership = election.campaign().await?;
/// if let Observation::Led(leader) = observer.next().await {
///     assert_eq!(leader.term, Some(leadership.term()));
/// }
/// # drop(leadership); locker.shutdown().await
/// # }
/// ```
pub struct Observer<B: LockBackend> {
    election: Arc<ElectionState<B>>,
    /// Notifications of releases and of other changes; not every store sends both for both.
    changes: Vec<Subscription>,
    /// What was returned last.
    last: Option<Observation>,
    /// Whether to look now.
    is_due: bool,
    /// How long to wait before looking again while no process leads.
    pause: Duration,
}

/// What an [`Observer`] sees.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Observation {
    /// A process leads.
    Led(Leader),
    /// No process leads.
    Vacant,
    /// The store cannot be reached.
    Unknown,
}

/// The leader of an election. For display only.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Leader {
    /// The term, on a backend that fences.
    pub term: Option<Fence>,
    /// Since when it leads, by the backend's time authority.
    pub since: Timestamp,
    /// Who it is, if the store knows that.
    pub holder: Option<HolderInfo>,
}

impl<B: LockBackend> Observer<B> {
    /// The first and the longest pause between two looks while no process leads.
    const PAUSE: Duration = Duration::from_millis(5);
    const LONGEST_PAUSE: Duration = Duration::from_secs(1);

    pub(super) fn new(election: Arc<ElectionState<B>>) -> Self {
        Self { election, changes: Vec::new(), last: None, is_due: true, pause: Self::PAUSE }
    }

    /// Waits for the next change. The first call returns what is the case now.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the next call returns the change that this one would have returned, or a later
    /// one.
    pub async fn next(&mut self) -> Observation {
        loop {
            if !self.is_due {
                self.wait().await;
                self.is_due = true;
            }
            if !self.is_notified() {
                // Subscribes first, then looks, so that no change in between is missed.
                let (backend, key) = (self.election.locker.backend(), &self.election.key);
                let (changes, releases) = tokio::join!(backend.watch(key), backend.subscribe(key));
                self.changes = changes.into_iter().chain(releases).collect();
            }
            let seen = self.look().await;
            self.is_due = false;
            if self.last.as_ref() != Some(&seen) {
                self.pause = Self::PAUSE;
                self.last = Some(seen.clone());
                return seen;
            }
        }
    }

    /// Returns whether notifications arrive at the moment.
    fn is_notified(&self) -> bool {
        !self.changes.is_empty() && self.changes.iter().all(Subscription::is_working)
    }

    async fn look(&self) -> Observation {
        match self.election.locker.info(&self.election.key).await {
            Ok(Some(lock)) => Observation::Led(Leader {
                term: lock.fence,
                since: lock.acquired_at,
                holder: lock.holder,
            }),
            Ok(None) => Observation::Vacant,
            Err(_) => Observation::Unknown,
        }
    }

    /// Waits until it is time to look again.
    async fn wait(&mut self) {
        let locker = &self.election.locker;
        let is_notified = self.is_notified();
        let limit = match self.last {
            // Not every store reports that a free lock was taken.
            Some(Observation::Vacant) => {
                let pause = self.pause;
                self.pause = (pause * 2).min(Self::LONGEST_PAUSE);
                pause
            }
            // A leader that crashed sends nothing.
            Some(Observation::Led(_)) if is_notified => {
                (locker.options().ttl.as_duration() / 3).max(locker.poll_interval())
            }
            _ => locker.poll_interval(),
        };
        tokio::select! {
            biased;
            // Without a subscription, this never completes.
            _age = first_of(self.changes.iter_mut().map(Subscription::notified)) => {}
            () = locker.sleep(limit) => {}
        }
    }
}

impl<B: LockBackend> fmt::Debug for Observer<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Observer").field("last", &self.last).finish_non_exhaustive()
    }
}
