//! Opt-in events for every operation of a backend.

#[cfg(feature = "metrics")]
pub(crate) mod metrics;
pub(crate) mod queued;
pub(crate) mod tracing;

use std::sync::Arc;

use super::Layer;
use crate::common::error::Result;
use crate::common::holder::BreakNote;
use crate::common::key::Key;
use crate::common::lock_id::LockId;
use crate::contract::LockBackend;
use crate::contract::admin::Admin;
use crate::contract::capabilities::Capabilities;
use crate::contract::event::{EventSink, LockEvent};
use crate::contract::notifier::Subscription;
use crate::contract::outcome::{AcquireAnyOutcome, AcquireOutcome, ExtendOutcome, ReleaseOutcome};
use crate::contract::recorder::{IncludeRaw, Recorder};
use crate::contract::request::{AcquireAnyRequest, AcquireRequest, ExtendRequest, ReleaseRequest};
use crate::contract::stored_lock::StoredLock;

/// Reports every operation of a backend to an [`EventSink`], including errors.
///
/// Without the layer nothing is computed. With it, keys and lock ids are hashes unless you enable
/// [`include_raw`](Self::include_raw). A panic in a sink is ignored.
#[derive(Clone, Debug)]
pub struct TelemetryLayer {
    recorder: Recorder,
}

impl TelemetryLayer {
    /// Creates a layer that reports to `sink`, on a thread of its own behind a queue unless the
    /// sink is [inline](EventSink::is_inline).
    #[must_use]
    pub fn new(sink: Arc<dyn EventSink>) -> Self {
        let mut recorder = Recorder::default();
        recorder.add(sink);
        Self { recorder }
    }

    /// Returns how many events were dropped because the queue in front of the sink was full; 0
    /// without a queue.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.recorder.dropped()
    }

    /// Sets whether every event includes raw keys and lock ids. Use it for debugging only.
    #[must_use]
    pub fn include_raw(mut self, include: bool) -> Self {
        let include = if include { IncludeRaw::Always } else { IncludeRaw::Never };
        self.recorder.set_include_raw(include);
        self
    }

    /// Adds raw keys and lock ids to the events for which the predicate returns `true`.
    ///
    /// The predicate gets each event before the raw values are added; if it panics, none are added.
    /// It is called during an operation and must return at once.
    #[must_use]
    pub fn include_raw_if(
        mut self,
        choose: impl Fn(&LockEvent) -> bool + Send + Sync + 'static,
    ) -> Self {
        self.recorder.set_include_raw(IncludeRaw::If(Arc::new(choose)));
        self
    }
}

impl<B: LockBackend> Layer<B> for TelemetryLayer {
    type Backend = Telemetry<B>;

    fn layer(&self, inner: B) -> Telemetry<B> {
        Telemetry { inner, recorder: self.recorder.clone() }
    }
}

/// A backend that reports every operation to an [`EventSink`]. [`TelemetryLayer`] creates it.
#[derive(Clone, Debug)]
pub struct Telemetry<B> {
    inner: B,
    recorder: Recorder,
}

impl<B: LockBackend> Telemetry<B> {
    /// Returns the wrapped backend.
    pub fn inner(&self) -> &B {
        &self.inner
    }
}

#[deny(clippy::missing_trait_methods)]
impl<B: LockBackend> LockBackend for Telemetry<B> {
    type Fencing = B::Fencing;

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<AcquireOutcome<B::Fencing>> {
        self.recorder.acquire(&self.inner, request).await
    }

    async fn acquire_any(
        &self,
        request: &AcquireAnyRequest,
    ) -> Result<AcquireAnyOutcome<B::Fencing>> {
        self.recorder.acquire_any(&self.inner, request).await
    }

    async fn release(&self, request: &ReleaseRequest) -> Result<ReleaseOutcome> {
        self.recorder.release(&self.inner, request).await
    }

    async fn extend(&self, request: &ExtendRequest) -> Result<ExtendOutcome> {
        self.recorder.extend(&self.inner, request).await
    }

    async fn is_locked(&self, key: &Key) -> Result<bool> {
        self.recorder.is_locked(&self.inner, key).await
    }

    async fn lookup_key(&self, key: &Key) -> Result<Option<StoredLock<B::Fencing>>> {
        self.recorder.lookup_key(&self.inner, key).await
    }

    async fn lookup_id(&self, lock_id: &LockId) -> Result<Option<StoredLock<B::Fencing>>> {
        self.recorder.lookup_id(&self.inner, lock_id).await
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
