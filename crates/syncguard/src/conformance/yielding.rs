//! A slow backend, so that futures can be dropped at awkward moments.

use tokio::task::yield_now;

use std::sync::Arc;

use crate::common::error::Result;
use crate::common::holder::BreakNote;
use crate::common::key::Key;
use crate::common::lock_id::LockId;
use crate::contract::LockBackend;
use crate::contract::admin::Admin;
use crate::contract::capabilities::Capabilities;
use crate::contract::notifier::Subscription;
use crate::contract::outcome::{AcquireAnyOutcome, AcquireOutcome, ExtendOutcome, ReleaseOutcome};
use crate::contract::request::{AcquireAnyRequest, AcquireRequest, ExtendRequest, ReleaseRequest};
use crate::contract::stored_lock::StoredLock;

/// Awaits twice before and twice after every operation of the inner backend.
///
/// A backend that completes in its first poll has no await points to be dropped at; this adds some,
/// on both sides of the effect. An undo is not final here: it can overtake an acquire.
#[derive(Clone, Debug)]
pub struct Yielding<B>(B);

impl<B: LockBackend> Yielding<B> {
    /// Wraps a backend.
    pub fn new(inner: B) -> Self {
        Self(inner)
    }
}

async fn slowly<T>(operation: impl Future<Output = T>) -> T {
    yield_now().await;
    yield_now().await;
    let answer = operation.await;
    yield_now().await;
    yield_now().await;
    answer
}

#[deny(clippy::missing_trait_methods)]
impl<B: LockBackend> LockBackend for Yielding<B> {
    type Fencing = B::Fencing;

    fn capabilities(&self) -> Capabilities {
        Capabilities { undo_is_final: false, ..self.0.capabilities() }
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<AcquireOutcome<B::Fencing>> {
        slowly(self.0.acquire(request)).await
    }

    async fn acquire_any(
        &self,
        request: &AcquireAnyRequest,
    ) -> Result<AcquireAnyOutcome<B::Fencing>> {
        slowly(self.0.acquire_any(request)).await
    }

    async fn release(&self, request: &ReleaseRequest) -> Result<ReleaseOutcome> {
        slowly(self.0.release(request)).await
    }

    async fn extend(&self, request: &ExtendRequest) -> Result<ExtendOutcome> {
        slowly(self.0.extend(request)).await
    }

    async fn is_locked(&self, key: &Key) -> Result<bool> {
        slowly(self.0.is_locked(key)).await
    }

    async fn lookup_key(&self, key: &Key) -> Result<Option<StoredLock<B::Fencing>>> {
        slowly(self.0.lookup_key(key)).await
    }

    async fn lookup_id(&self, lock_id: &LockId) -> Result<Option<StoredLock<B::Fencing>>> {
        slowly(self.0.lookup_id(lock_id)).await
    }

    async fn subscribe(&self, key: &Key) -> Option<Subscription> {
        slowly(self.0.subscribe(key)).await
    }

    async fn watch(&self, key: &Key) -> Option<Subscription> {
        slowly(self.0.watch(key)).await
    }

    async fn waiters(&self, key: &Key) -> Option<u32> {
        slowly(self.0.waiters(key)).await
    }

    async fn break_note(&self, lock_id: &LockId) -> Option<BreakNote> {
        slowly(self.0.break_note(lock_id)).await
    }

    async fn quiesce(&self) {
        slowly(self.0.quiesce()).await;
    }

    fn admin(&self) -> Option<Arc<dyn Admin>> {
        self.0.admin()
    }
}
