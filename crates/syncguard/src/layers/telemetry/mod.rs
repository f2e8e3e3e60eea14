//! Opt-in events for every operation at a backend.

#[cfg(feature = "metrics")]
pub(crate) mod metrics;
pub(crate) mod queued;
pub(crate) mod tracing;

use std::fmt;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use super::Layer;
use crate::common::error::Result;
use crate::common::key::Key;
use crate::common::lock_id::LockId;
use crate::contract::LockBackend;
use crate::contract::callback_queue::SinkHandle;
use crate::contract::capabilities::Capabilities;
use crate::contract::event::{EventSink, LockEvent, Operation, Reason};
use crate::contract::inspect::Inspector;
use crate::contract::outcome::{Acquire, Extend, Release};
use crate::contract::request::{AcquireRequest, ExtendRequest, ReleaseRequest};
use crate::contract::stored_lock::StoredLock;
use crate::contract::wake::WakeUps;

/// Tells an [`EventSink`] about every operation at a backend, errors included.
///
/// Without the layer nothing is computed. With it, keys and lock ids are hashes unless
/// [`include_raw`](Self::include_raw) says otherwise. A sink that panics is ignored.
#[derive(Clone, Debug)]
pub struct TelemetryLayer {
    sink: SinkHandle,
    include_raw: IncludeRaw,
}

#[derive(Clone)]
enum IncludeRaw {
    Never,
    Always,
    If(Arc<dyn Fn(&LockEvent) -> bool + Send + Sync>),
}

impl TelemetryLayer {
    /// A layer that tells `sink`: on a thread of its own behind a queue, unless the sink
    /// [is inline](EventSink::is_inline).
    #[must_use]
    pub fn new(sink: Arc<dyn EventSink>) -> Self {
        Self { sink: SinkHandle::new(sink), include_raw: IncludeRaw::Never }
    }

    /// How many events were lost because the queue before the sink was full; 0 without a queue.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.sink.dropped()
    }

    /// Adds raw keys and lock ids to every event. For debugging only.
    #[must_use]
    pub fn include_raw(mut self, include: bool) -> Self {
        self.include_raw = if include { IncludeRaw::Always } else { IncludeRaw::Never };
        self
    }

    /// Adds raw keys and lock ids to the events that the predicate chooses. It sees them before
    /// the raw values are added; when it panics, none are. It is called in the middle of an operation
    /// and must return at once.
    #[must_use]
    pub fn include_raw_if(
        mut self,
        choose: impl Fn(&LockEvent) -> bool + Send + Sync + 'static,
    ) -> Self {
        self.include_raw = IncludeRaw::If(Arc::new(choose));
        self
    }
}

impl fmt::Debug for IncludeRaw {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Never => "Never",
            Self::Always => "Always",
            Self::If(_) => "If",
        })
    }
}

impl<B: LockBackend> Layer<B> for TelemetryLayer {
    type Backend = Telemetry<B>;

    fn layer(&self, inner: B) -> Telemetry<B> {
        Telemetry { inner, layer: self.clone() }
    }
}

/// A backend that tells an [`EventSink`] about every operation. Made by [`TelemetryLayer`].
#[derive(Clone, Debug)]
pub struct Telemetry<B> {
    inner: B,
    layer: TelemetryLayer,
}

/// What an operation names: at most a key and a lock id.
#[derive(Clone, Copy, Default)]
struct Subject<'a> {
    key: Option<&'a Key>,
    lock_id: Option<LockId>,
}

impl<B: LockBackend> Telemetry<B> {
    /// The backend inside.
    pub fn inner(&self) -> &B {
        &self.inner
    }

    /// Runs an operation and tells how it ended. `judge` says whether it had the effect that was
    /// asked for, why not, and which lock id it names or was granted.
    async fn told<T: Send>(
        &self,
        operation: Operation,
        subject: Subject<'_>,
        call: impl Future<Output = Result<T>> + Send,
        judge: impl FnOnce(&T) -> (bool, Option<Reason>) + Send,
        id_on_success: Option<LockId>,
    ) -> Result<T> {
        let started = Instant::now();
        let result = call.await;
        let (ok, reason) = match &result {
            Ok(value) => judge(value),
            Err(error) => (false, Some(Reason::Error(error.code()))),
        };
        let mut event = LockEvent::new(operation, ok, started.elapsed());
        event.reason = reason;
        let lock_id = subject.lock_id.or(id_on_success.filter(|_| ok));
        self.layer.tell(event, Subject { lock_id, ..subject });
        result
    }
}

impl TelemetryLayer {
    fn tell(&self, mut event: LockEvent, subject: Subject<'_>) {
        event.key_hash = subject.key.map(Key::hash);
        event.lock_id_hash = subject.lock_id.map(|id| id.hash());
        let include = match &self.include_raw {
            IncludeRaw::Never => false,
            IncludeRaw::Always => true,
            // A panic in a predicate must never break a lock.
            IncludeRaw::If(choose) => {
                catch_unwind(AssertUnwindSafe(|| choose(&event))).unwrap_or(false)
            }
        };
        if include {
            event.key = subject.key.cloned();
            event.lock_id = subject.lock_id;
        }
        self.sink.operation(event);
    }
}

#[deny(clippy::missing_trait_methods)]
impl<B: LockBackend> LockBackend for Telemetry<B> {
    type Fencing = B::Fencing;

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Acquire<B::Fencing>> {
        let subject = Subject { key: Some(request.key()), lock_id: None };
        let judge = |outcome: &Acquire<B::Fencing>| match outcome {
            Acquire::Acquired(_) => (true, None),
            Acquire::Contended { .. } => (false, Some(Reason::Locked)),
            Acquire::Spent => (false, None),
        };
        let call = self.inner.acquire(request);
        self.told(Operation::Acquire, subject, call, judge, Some(request.lock_id())).await
    }

    async fn release(&self, request: &ReleaseRequest) -> Result<Release> {
        let subject = Subject { key: None, lock_id: Some(request.lock_id()) };
        let judge = |outcome: &Release| match outcome {
            Release::Released => (true, None),
            Release::NotHeld(absence) => (false, Reason::from_absence(*absence)),
        };
        self.told(Operation::Release, subject, self.inner.release(request), judge, None).await
    }

    async fn extend(&self, request: &ExtendRequest) -> Result<Extend> {
        let subject = Subject { key: None, lock_id: Some(request.lock_id()) };
        let judge = |outcome: &Extend| match outcome {
            Extend::Extended(_) => (true, None),
            Extend::NotHeld(absence) => (false, Reason::from_absence(*absence)),
        };
        self.told(Operation::Extend, subject, self.inner.extend(request), judge, None).await
    }

    async fn is_locked(&self, key: &Key) -> Result<bool> {
        let subject = Subject { key: Some(key), lock_id: None };
        let call = self.inner.is_locked(key);
        self.told(Operation::IsLocked, subject, call, |locked| (*locked, None), None).await
    }

    async fn lookup_key(&self, key: &Key) -> Result<Option<StoredLock<B::Fencing>>> {
        let subject = Subject { key: Some(key), lock_id: None };
        let call = self.inner.lookup_key(key);
        self.told(Operation::Lookup, subject, call, |found| (found.is_some(), None), None).await
    }

    async fn lookup_id(&self, lock_id: &LockId) -> Result<Option<StoredLock<B::Fencing>>> {
        let subject = Subject { key: None, lock_id: Some(*lock_id) };
        let call = self.inner.lookup_id(lock_id);
        self.told(Operation::Lookup, subject, call, |found| (found.is_some(), None), None).await
    }

    async fn wake_ups(&self, key: &Key) -> Option<WakeUps> {
        self.inner.wake_ups(key).await
    }

    async fn quiesce(&self) {
        self.inner.quiesce().await;
    }

    fn inspector(&self) -> Option<Arc<dyn Inspector>> {
        self.inner.inspector()
    }
}
