//! A busy backend, so that operations travel in batches.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::common::error::Result;
use crate::common::holder::BreakNote;
use crate::common::key::Key;
use crate::common::lock_id::LockId;
use crate::common::ttl::Ttl;
use crate::contract::LockBackend;
use crate::contract::admin::Admin;
use crate::contract::capabilities::Capabilities;
use crate::contract::notifier::Subscription;
use crate::contract::outcome::{AcquireAnyOutcome, AcquireOutcome, ExtendOutcome, ReleaseOutcome};
use crate::contract::request::{AcquireAnyRequest, AcquireRequest, ExtendRequest, ReleaseRequest};
use crate::contract::stored_lock::StoredLock;

/// Accompanies every acquire, release and extend with the same operations on other locks, at the
/// same time.
///
/// A backend that sends concurrent operations in batches sends each operation of the kit together
/// with others: two of the companions are on their way when the operation begins. Some of them
/// succeed, and some do not.
#[derive(Clone, Debug)]
pub struct Crowded<B> {
    inner: B,
    /// Counts the companions, for their keys.
    companions: Arc<AtomicU64>,
}

impl<B: LockBackend> Crowded<B> {
    /// Wraps a backend.
    pub fn new(inner: B) -> Self {
        Self { inner, companions: Arc::default() }
    }

    /// Creates a request for a lock of which the case knows nothing. It ends soon by itself.
    fn companion(&self) -> AcquireRequest {
        const TTL: Duration = Duration::from_secs(1);
        let number = self.companions.fetch_add(1, Ordering::Relaxed);
        let unique = LockId::random().expect("randomness");
        let key = Key::new(format!("companion:{number}:{}", unique.hash_id())).expect("valid");
        AcquireRequest::new(key, Ttl::new(TTL).expect("valid")).expect("randomness")
    }

    async fn release_companions(&self, companions: [&AcquireRequest; 2]) {
        let [first, second] = companions.map(|one| ReleaseRequest::new(one.lock_id()));
        // The companions' outcomes do not matter, here and below.
        let released = tokio::join!(
            Box::pin(self.inner.release(&first)),
            Box::pin(self.inner.release(&second))
        );
        drop(released);
    }
}

#[deny(clippy::missing_trait_methods)]
impl<B: LockBackend> LockBackend for Crowded<B> {
    type Fencing = B::Fencing;

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<AcquireOutcome<B::Fencing>> {
        let [first, second] = [self.companion(), self.companion()];
        let (ahead, gathered) = (self.companion(), self.companion());
        let contended = AcquireRequest::new(first.key().clone(), first.ttl()).expect("randomness");
        let (_, _, outcome, ..) = tokio::join!(
            biased;
            Box::pin(self.inner.acquire(&first)),
            Box::pin(self.inner.acquire(&ahead)),
            Box::pin(self.inner.acquire(request)),
            Box::pin(self.inner.acquire(&second)),
            Box::pin(self.inner.acquire(&contended)),
            Box::pin(self.inner.acquire(&gathered)),
        );
        self.release_companions([&first, &second]).await;
        self.release_companions([&ahead, &gathered]).await;
        outcome
    }

    async fn acquire_any(
        &self,
        request: &AcquireAnyRequest,
    ) -> Result<AcquireAnyOutcome<B::Fencing>> {
        self.inner.acquire_any(request).await
    }

    async fn release(&self, request: &ReleaseRequest) -> Result<ReleaseOutcome> {
        let [held, unknown] = [self.companion(), self.companion()];
        drop(Box::pin(self.inner.acquire(&held)).await);
        let companions = [&unknown, &held].map(|one| ReleaseRequest::new(one.lock_id()));
        let (_, _, outcome, _) = tokio::join!(
            biased;
            Box::pin(self.inner.release(&companions[0])),
            Box::pin(self.inner.release(&companions[0])),
            Box::pin(self.inner.release(request)),
            Box::pin(self.inner.release(&companions[1])),
        );
        outcome
    }

    async fn extend(&self, request: &ExtendRequest) -> Result<ExtendOutcome> {
        let [held, unknown] = [self.companion(), self.companion()];
        drop(Box::pin(self.inner.acquire(&held)).await);
        let companions = [&unknown, &held].map(|one| ExtendRequest::new(one.lock_id(), one.ttl()));
        let (_, _, outcome, _) = tokio::join!(
            biased;
            Box::pin(self.inner.extend(&companions[0])),
            Box::pin(self.inner.extend(&companions[0])),
            Box::pin(self.inner.extend(request)),
            Box::pin(self.inner.extend(&companions[1])),
        );
        self.release_companions([&held, &unknown]).await;
        outcome
    }

    async fn is_locked(&self, key: &Key) -> Result<bool> {
        self.inner.is_locked(key).await
    }

    async fn lookup_key(&self, key: &Key) -> Result<Option<StoredLock<B::Fencing>>> {
        self.inner.lookup_key(key).await
    }

    async fn lookup_id(&self, lock_id: &LockId) -> Result<Option<StoredLock<B::Fencing>>> {
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
