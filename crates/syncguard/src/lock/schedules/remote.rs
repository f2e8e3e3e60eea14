//! A store behind a network, for the engine's schedules.

#![cfg(test)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use shuttle::future::yield_now;
use shuttle::rand::{Rng, thread_rng};
use tokio::time::Instant;

use crate::backends::memory::{MemoryBackend, MemoryConfig};
use crate::common::clock::Clock;
use crate::common::error::{Error, ErrorCode, Result};
use crate::common::fence::Fenced;
use crate::common::key::Key;
use crate::common::lock_id::LockId;
use crate::common::time::Timestamp;
use crate::contract::LockBackend;
use crate::contract::capabilities::Capabilities;
use crate::contract::notifier::Subscription;
use crate::contract::outcome::{AcquireOutcome, ExtendOutcome, ReleaseOutcome};
use crate::contract::request::{AcquireRequest, ExtendRequest, ReleaseRequest};
use crate::contract::stored_lock::StoredLock;

/// The memory backend, with await points before and after every effect. A few acquires and extends
/// are lost on their way, are answered with a timeout, or take effect after that.
#[derive(Clone, Debug)]
pub(super) struct Remote {
    pub(super) store: MemoryBackend,
    faults_left: Arc<AtomicU32>,
}

/// The time of the schedule.
#[derive(Debug)]
struct ScheduleClock(Instant);

impl Clock for ScheduleClock {
    fn now(&self) -> Timestamp {
        let passed_ms = u64::try_from(self.0.elapsed().as_millis()).expect("a short run");
        Timestamp::from_millis(1_000_000 + passed_ms)
    }
}

impl Remote {
    pub(super) fn new(faults: u32) -> Self {
        let config = MemoryConfig::default().clock(Arc::new(ScheduleClock(Instant::now())));
        Self {
            store: MemoryBackend::with_config(config),
            faults_left: Arc::new(AtomicU32::new(faults)),
        }
    }

    /// Sends a request, and returns its answer or a timeout.
    async fn send<T, Sending>(&self, request: impl FnOnce(MemoryBackend) -> Sending) -> Result<T>
    where
        T: Send + 'static,
        Sending: Future<Output = Result<T>> + Send + 'static,
    {
        let request = request(self.store.clone());
        yield_now().await;
        if self.faults_left.load(Ordering::Relaxed) == 0 || thread_rng().r#gen::<bool>() {
            let answer = request.await;
            yield_now().await;
            return answer;
        }
        self.faults_left.fetch_sub(1, Ordering::Relaxed);
        match thread_rng().gen_range(0..3) {
            0 => drop(request),
            1 => drop(request.await),
            _ => super::spawn(async {
                yield_now().await;
                drop(request.await);
            }),
        }
        yield_now().await;
        Err(Error::new(ErrorCode::NetworkTimeout, "the answer was lost"))
    }
}

impl LockBackend for Remote {
    type Fencing = Fenced;

    fn capabilities(&self) -> Capabilities {
        // An undo can overtake its acquire.
        Capabilities { undo_is_final: false, ..self.store.capabilities() }
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<AcquireOutcome> {
        let request = request.clone();
        self.send(|store| async move { store.acquire(&request).await }).await
    }

    async fn release(&self, request: &ReleaseRequest) -> Result<ReleaseOutcome> {
        let request = request.clone();
        self.send(|store| async move { store.release(&request).await }).await
    }

    async fn extend(&self, request: &ExtendRequest) -> Result<ExtendOutcome> {
        let request = request.clone();
        self.send(|store| async move { store.extend(&request).await }).await
    }

    async fn is_locked(&self, key: &Key) -> Result<bool> {
        self.store.is_locked(key).await
    }

    async fn lookup_key(&self, key: &Key) -> Result<Option<StoredLock>> {
        self.store.lookup_key(key).await
    }

    async fn lookup_id(&self, lock_id: &LockId) -> Result<Option<StoredLock>> {
        self.store.lookup_id(lock_id).await
    }

    async fn subscribe(&self, key: &Key) -> Option<Subscription> {
        yield_now().await;
        let subscription = self.store.subscribe(key).await;
        yield_now().await;
        subscription
    }
}
