//! Planted bugs: a backend around another one that breaks one promise. The checker must find each.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::time::Duration;

use syncguard::backend::{
    AcquireAnyOutcome, AcquireAnyRequest, AcquireOutcome, AcquireRequest, Admin, BreakNote,
    Capabilities, ExtendRequest, Fenced, Lease, Notifier, ReleaseRequest, StoredLock, Subscription,
    TIME_TOLERANCE_MS,
};
use syncguard::diagnostics::get_by_key_raw;
use syncguard::{
    AnyBackend, ExtendOutcome, Fence, Key, LockBackend, LockId, NotHeldReason, ReleaseOutcome,
    Result,
};

/// A planted bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bug {
    /// A release by an id that holds nothing releases the lock of another.
    ReleaseIgnoresOwner,
    /// An extend by an id that holds nothing extends the lock of another.
    ExtendIgnoresOwner,
    /// Every second grant of a key repeats a fence.
    FenceStandsStill,
    /// An extend of a dead lock takes it again, with its old fence.
    ExtendRevives,
    /// The tolerance has the wrong sign: a lock is taken over before it expires.
    ToleranceSign,
    /// A release that should undo an acquire of unknown outcome is not sent.
    UndoLost,
    /// Waiters are not notified, or before the lock is free.
    NotificationLost,
    /// A release is answered before it is carried out, and then lost.
    ReleaseLost,
    /// A second release of the same id succeeds too.
    ReleaseTwice,
    /// A held lock is granted to another, with a new fence that the store does not know.
    GrantWithoutStore,
    /// An operation waits for an answer much longer than its limit.
    DeadlineIgnored,
    /// An acquire decides by what the store contained a moment ago, and overwrites a new lock.
    StaleSnapshot,
    /// Waiters are notified before the release takes effect, and not after it.
    NotificationEarly,
    /// In PostgreSQL, the statement of an acquire waits for the advisory lock after its snapshot,
    /// and does not check again what it saw. The proxy plants it.
    StaleStatement,
}

/// All bugs, with their names on the command line.
pub const BUGS: [(&str, Bug); 14] = [
    ("release-ignores-owner", Bug::ReleaseIgnoresOwner),
    ("extend-ignores-owner", Bug::ExtendIgnoresOwner),
    ("fence-stands-still", Bug::FenceStandsStill),
    ("extend-revives", Bug::ExtendRevives),
    ("tolerance-sign", Bug::ToleranceSign),
    ("undo-lost", Bug::UndoLost),
    ("notification-lost", Bug::NotificationLost),
    ("release-lost", Bug::ReleaseLost),
    ("release-twice", Bug::ReleaseTwice),
    ("grant-without-store", Bug::GrantWithoutStore),
    ("deadline-ignored", Bug::DeadlineIgnored),
    ("stale-snapshot", Bug::StaleSnapshot),
    ("notification-early", Bug::NotificationEarly),
    ("stale-statement", Bug::StaleStatement),
];

impl Bug {
    /// Returns the bug with a name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        BUGS.iter().find(|(known, _)| *known == name).map(|(_, bug)| *bug)
    }

    /// Returns the name on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        BUGS.iter().find(|(_, bug)| *bug == self).map_or("", |(name, _)| name)
    }

    /// Returns which texts the proxies replace in the requests of the clients.
    #[must_use]
    pub fn rewrites(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Self::StaleStatement => &STALE_STATEMENT,
            _ => &[],
        }
    }
}

/// The changes of PostgreSQL's `acquire.sql`: it waits for the advisory lock instead of trying it,
/// and neither the counter nor the lock must be as they were in the snapshot.
const STALE_STATEMENT: [(&str, &str); 3] = [
    (
        "\n    THEN false ELSE pg_try_advisory_xact_lock(hashtext($1)) END",
        "THEN false ELSE pg_advisory_xact_lock(hashtext($1))::text='' END",
    ),
    ("WHERE f.fence = (SELECT fence FROM ", "WHERE f.fence >=(SELECT fence FROM "),
    ("WHERE l.expires_at_ms <= ", "WHERE l.expires_at_ms <> "),
];

/// Notifies the waiters of this process before a release takes effect.
static EARLY: LazyLock<Notifier> = LazyLock::new(Notifier::default);

/// A backend with a bug.
#[derive(Debug)]
pub struct Buggy {
    inner: AnyBackend,
    bug: Bug,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    keys: HashMap<LockId, Key>,
    /// Ids that hold their lock under another id.
    revived: HashMap<LockId, LockId>,
    released: Vec<LockId>,
    calls: u64,
}

impl Buggy {
    /// Plants a bug.
    #[must_use]
    pub fn new(inner: AnyBackend, bug: Bug) -> Self {
        Self { inner, bug, state: Mutex::default() }
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn has(&self, bug: Bug) -> bool {
        self.bug == bug
    }

    /// Counts calls, for bugs that strike seldom.
    fn is_one_in(&self, calls: u64) -> bool {
        let mut state = self.state();
        state.calls += 1;
        state.calls.is_multiple_of(calls)
    }

    /// Returns the id under which the store knows a lock.
    fn real_id(&self, id: LockId) -> LockId {
        self.state().revived.get(&id).copied().unwrap_or(id)
    }

    /// Returns the id that holds the lock that another id was for.
    async fn holder_instead_of(&self, id: LockId) -> Option<LockId> {
        let key = self.state().keys.get(&id).cloned()?;
        Some(get_by_key_raw(&self.inner, &key).await.ok()??.lock_id)
    }
}

#[deny(clippy::missing_trait_methods)]
impl LockBackend for Buggy {
    type Fencing = Fenced;

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<AcquireOutcome> {
        self.state().keys.insert(request.lock_id(), request.key().clone());
        if self.has(Bug::DeadlineIgnored) && self.is_one_in(50) {
            // The thread blocks, so that no timeout can end it.
            std::thread::sleep(Duration::from_secs(8));
        }
        let seemed_free = self.has(Bug::StaleSnapshot) && {
            let held = get_by_key_raw(&self.inner, request.key()).await?;
            tokio::time::sleep(Duration::from_millis(3)).await;
            held.is_none()
        };
        match self.inner.acquire(request).await? {
            AcquireOutcome::Contended { .. } if seemed_free => {
                if let Some(holder) = self.holder_instead_of(request.lock_id()).await {
                    self.inner.release(&ReleaseRequest::new(holder)).await?;
                }
                self.inner.acquire(request).await
            }
            AcquireOutcome::Acquired(lease) if self.has(Bug::FenceStandsStill) => {
                let even = (lease.fence().get() & !1).max(1);
                Ok(AcquireOutcome::Acquired(Lease::new(Fence::new(even)?, lease.expires_at())))
            }
            AcquireOutcome::Contended { expires_in: Some(left) }
                if self.has(Bug::ToleranceSign)
                    && left < Duration::from_millis(2 * TIME_TOLERANCE_MS) =>
            {
                if let Some(holder) = self.holder_instead_of(request.lock_id()).await {
                    self.inner.release(&ReleaseRequest::new(holder)).await?;
                }
                self.inner.acquire(request).await
            }
            AcquireOutcome::Contended { expires_in }
                if self.has(Bug::GrantWithoutStore) && self.is_one_in(20) =>
            {
                let held = get_by_key_raw(&self.inner, request.key()).await?;
                let Some(fence) = held.as_ref().and_then(|held| held.info.fence) else {
                    return Ok(AcquireOutcome::Contended { expires_in });
                };
                let expires_at = held.map_or_else(|| unreachable!(), |held| held.info.expires_at);
                let next = Fence::new(fence.get() + 1)?;
                Ok(AcquireOutcome::Acquired(Lease::new(next, expires_at)))
            }
            outcome => Ok(outcome),
        }
    }

    async fn acquire_any(&self, request: &AcquireAnyRequest) -> Result<AcquireAnyOutcome> {
        // The clients take single locks.
        self.inner.acquire_any(request).await
    }

    async fn release(&self, request: &ReleaseRequest) -> Result<ReleaseOutcome> {
        let id = request.lock_id();
        if self.has(Bug::UndoLost) && request.is_undo() {
            return Ok(ReleaseOutcome::NotHeld(NotHeldReason::NotFound));
        }
        if self.has(Bug::ReleaseLost) && self.is_one_in(10) {
            return Ok(ReleaseOutcome::Released);
        }
        let real_id = self.real_id(id);
        if real_id != id {
            return self.inner.release(&ReleaseRequest::new(real_id)).await;
        }
        if self.has(Bug::NotificationEarly) {
            let key = self.state().keys.get(&id).cloned();
            if let Some(key) = key {
                EARLY.notify(&key, None);
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        }
        let outcome = self.inner.release(request).await?;
        match (self.bug, outcome) {
            (Bug::ReleaseIgnoresOwner, ReleaseOutcome::NotHeld(_)) => {
                let Some(holder) = self.holder_instead_of(id).await else { return Ok(outcome) };
                self.inner.release(&ReleaseRequest::new(holder)).await
            }
            (Bug::ReleaseTwice, ReleaseOutcome::Released) => {
                self.state().released.push(id);
                Ok(outcome)
            }
            (Bug::ReleaseTwice, ReleaseOutcome::NotHeld(_)) => {
                let was_released = self.state().released.contains(&id);
                Ok(if was_released { ReleaseOutcome::Released } else { outcome })
            }
            _ => Ok(outcome),
        }
    }

    async fn extend(&self, request: &ExtendRequest) -> Result<ExtendOutcome> {
        let (id, real_id) = (request.lock_id(), self.real_id(request.lock_id()));
        if real_id != id {
            return self.inner.extend(&ExtendRequest::new(real_id, request.ttl())).await;
        }
        let outcome = self.inner.extend(request).await?;
        match (self.bug, &outcome) {
            (Bug::ExtendIgnoresOwner, ExtendOutcome::NotHeld(_)) => {
                let Some(holder) = self.holder_instead_of(id).await else { return Ok(outcome) };
                self.inner.extend(&ExtendRequest::new(holder, request.ttl())).await
            }
            (Bug::ExtendRevives, ExtendOutcome::NotHeld(_)) => {
                let Some(key) = self.state().keys.get(&id).cloned() else { return Ok(outcome) };
                let again = AcquireRequest::new(key, request.ttl())?;
                let AcquireOutcome::Acquired(lease) = self.inner.acquire(&again).await? else {
                    return Ok(outcome);
                };
                self.state().revived.insert(id, again.lock_id());
                Ok(ExtendOutcome::Extended(syncguard::backend::Extension::new(lease.expires_at())))
            }
            _ => Ok(outcome),
        }
    }

    async fn is_locked(&self, key: &Key) -> Result<bool> {
        self.inner.is_locked(key).await
    }

    async fn lookup_key(&self, key: &Key) -> Result<Option<StoredLock>> {
        self.inner.lookup_key(key).await
    }

    async fn lookup_id(&self, lock_id: &LockId) -> Result<Option<StoredLock>> {
        self.inner.lookup_id(lock_id).await
    }

    async fn subscribe(&self, key: &Key) -> Option<Subscription> {
        if self.has(Bug::NotificationLost) {
            // Nothing notifies this one.
            return Some(Notifier::default().subscribe(key));
        }
        if self.has(Bug::NotificationEarly) {
            return Some(EARLY.subscribe(key));
        }
        self.inner.subscribe(key).await
    }

    async fn watch(&self, key: &Key) -> Option<Subscription> {
        self.inner.watch(key).await
    }

    async fn waiters(&self, key: &Key) -> Option<u32> {
        self.inner.waiters(key).await
    }

    async fn break_note(&self, lock_id: &LockId) -> Option<BreakNote> {
        self.inner.break_note(lock_id).await
    }

    async fn quiesce(&self) {
        self.inner.quiesce().await;
    }

    fn admin(&self) -> Option<Arc<dyn Admin>> {
        self.inner.admin()
    }
}
