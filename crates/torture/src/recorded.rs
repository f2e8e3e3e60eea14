//! A backend that records every operation of another one: those of callers, and those that the
//! engine makes in the background.

use std::sync::Arc;

use syncguard::backend::{
    AcquireAnyOutcome, AcquireAnyRequest, AcquireOutcome, AcquireRequest, Admin, BreakNote,
    Capabilities, ExtendRequest, Fenced, ReleaseRequest, StoredLock, Subscription,
};
use syncguard::{AnyBackend, ExtendOutcome, Key, LockBackend, LockId, ReleaseOutcome, Result};

use crate::history::{Event, Kind, Outcome, now};
use crate::journal::{Journal, number_of};

/// The backend.
#[derive(Clone, Debug)]
pub struct Recorded {
    inner: AnyBackend,
    journal: Arc<Journal>,
    locker: u32,
    /// Whether a grant that is not confirmed is undone: others may see it until then.
    undoes_grants: bool,
}

impl Recorded {
    /// Wraps the backend of a locker.
    #[must_use]
    pub fn new(inner: AnyBackend, journal: Arc<Journal>, locker: u32) -> Self {
        Self { inner, journal, locker, undoes_grants: false }
    }

    /// Sets whether the backend undoes a grant that replicas do not confirm.
    #[must_use]
    pub fn undoes_grants(mut self, undoes_grants: bool) -> Self {
        self.undoes_grants = undoes_grants;
        self
    }

    async fn record<T>(
        &self,
        kind: Kind,
        key: u32,
        id: LockId,
        ttl_ms: u64,
        call: impl Future<Output = Result<T>>,
        outcome: impl FnOnce(&T) -> Outcome,
    ) -> Result<T> {
        let (op, id_text, locker) = (self.journal.number(), id.expose().to_owned(), self.locker);
        let begin = Event::Begin { op, at: now(), kind, key, id: id_text, ttl_ms, locker };
        self.journal.write(&begin);
        let result = call.await;
        let at = now();
        let outcome = match &result {
            Ok(value) => outcome(value),
            Err(error) if error.may_have_taken_effect() => Outcome::Unknown,
            Err(_) if self.undoes_grants && kind == Kind::Acquire => Outcome::Undone,
            Err(_) => Outcome::Failed,
        };
        self.journal.write(&Event::End { op, at, outcome });
        if let Err(error) = &result {
            self.journal.check(error, Some(id));
        }
        result
    }

    fn key_of(&self, id: LockId, hint: Option<&Key>) -> u32 {
        self.journal.key_of(id).or_else(|| hint.map(number_of)).unwrap_or(u32::MAX)
    }
}

#[deny(clippy::missing_trait_methods)]
impl LockBackend for Recorded {
    type Fencing = Fenced;

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<AcquireOutcome> {
        let (id, key, ttl_ms) =
            (request.lock_id(), number_of(request.key()), request.ttl().as_millis());
        self.journal.note_key(id, key);
        let call = self.inner.acquire(request);
        self.record(Kind::Acquire, key, id, ttl_ms, call, |outcome| match outcome {
            AcquireOutcome::Acquired(lease) => Outcome::Granted(lease.fence().get()),
            AcquireOutcome::Contended { .. } => Outcome::Contended,
            AcquireOutcome::AlreadyUsed => Outcome::AlreadyUsed,
        })
        .await
    }

    async fn acquire_any(&self, request: &AcquireAnyRequest) -> Result<AcquireAnyOutcome> {
        // The clients take single locks.
        self.inner.acquire_any(request).await
    }

    async fn release(&self, request: &ReleaseRequest) -> Result<ReleaseOutcome> {
        let id = request.lock_id();
        let key = self.key_of(id, request.hint().key.as_ref());
        let kind = if request.is_undo() { Kind::Undo } else { Kind::Release };
        let call = self.inner.release(request);
        self.record(kind, key, id, 0, call, |outcome| match outcome {
            ReleaseOutcome::Released => Outcome::Released,
            ReleaseOutcome::NotHeld(_) => Outcome::NotHeld,
        })
        .await
    }

    async fn extend(&self, request: &ExtendRequest) -> Result<ExtendOutcome> {
        let (id, ttl_ms) = (request.lock_id(), request.ttl().as_millis());
        let key = self.key_of(id, request.hint().key.as_ref());
        let call = self.inner.extend(request);
        self.record(Kind::Extend, key, id, ttl_ms, call, |outcome| match outcome {
            ExtendOutcome::Extended(_) => Outcome::Extended,
            ExtendOutcome::NotHeld(_) => Outcome::NotHeld,
        })
        .await
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
