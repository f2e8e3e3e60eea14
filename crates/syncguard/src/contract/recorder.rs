//! Reports backend operations to sinks. Without a sink nothing is computed.

use std::fmt;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Instant;

use super::LockBackend;
use super::callback_queue::SinkHandle;
use super::event::{EngineEvent, EventSink, LockEvent, Operation, Reason};
use super::outcome::{AcquireAnyOutcome, AcquireOutcome, ExtendOutcome, ReleaseOutcome};
use super::request::{AcquireAnyRequest, AcquireRequest, ExtendRequest, ReleaseRequest};
use super::stored_lock::StoredLock;
use crate::common::error::Result;
use crate::common::key::Key;
use crate::common::lock_id::LockId;

/// Calls a backend and reports to sinks how each call ended.
#[derive(Clone, Debug, Default)]
pub(crate) struct Recorder {
    sinks: Vec<Sink>,
    include_raw: IncludeRaw,
}

#[derive(Clone, Debug)]
struct Sink {
    handle: SinkHandle,
    wants_keys: bool,
}

/// Which events include raw keys and lock ids.
#[derive(Clone, Default)]
pub(crate) enum IncludeRaw {
    #[default]
    Never,
    Always,
    If(Arc<dyn Fn(&LockEvent) -> bool + Send + Sync>),
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

/// The key and the lock id of an operation, as far as it has them.
#[derive(Clone, Copy, Default)]
struct Subject<'a> {
    key: Option<&'a Key>,
    lock_id: Option<LockId>,
}

impl Recorder {
    pub(crate) fn add(&mut self, sink: Arc<dyn EventSink>) {
        let wants_keys = sink.wants_keys();
        self.sinks.push(Sink { handle: SinkHandle::new(sink), wants_keys });
    }

    pub(crate) fn set_include_raw(&mut self, include_raw: IncludeRaw) {
        self.include_raw = include_raw;
    }

    pub(crate) fn is_off(&self) -> bool {
        self.sinks.is_empty()
    }

    /// Returns how many events were dropped because the queue in front of a sink was full.
    pub(crate) fn dropped(&self) -> u64 {
        self.sinks.iter().map(|sink| sink.handle.dropped()).sum()
    }

    /// Reports an event of a locker, above single operations. The event has no key yet.
    pub(crate) fn engine(&self, key: &Key, event: impl FnOnce() -> EngineEvent) {
        if !self.is_off() {
            let event = event();
            for sink in &self.sinks {
                let key = sink.wants_keys.then(|| key.clone());
                sink.handle.engine(EngineEvent { key, ..event.clone() });
            }
        }
    }

    pub(crate) async fn acquire<B: LockBackend>(
        &self,
        backend: &B,
        request: &AcquireRequest,
    ) -> Result<AcquireOutcome<B::Fencing>> {
        let subject = Subject { key: Some(request.key()), lock_id: None };
        let judge = |outcome: &AcquireOutcome<B::Fencing>| match outcome {
            AcquireOutcome::Acquired(_) => (true, None),
            AcquireOutcome::Contended { .. } => (false, Some(Reason::Locked)),
            AcquireOutcome::AlreadyUsed => (false, None),
        };
        let granted = Some(request.lock_id());
        self.record(
            backend,
            Operation::Acquire,
            subject,
            pin!(backend.acquire(request)),
            judge,
            granted,
        )
        .await
    }

    pub(crate) async fn acquire_any<B: LockBackend>(
        &self,
        backend: &B,
        request: &AcquireAnyRequest,
    ) -> Result<AcquireAnyOutcome<B::Fencing>> {
        let started = self.start();
        let result = backend.acquire_any(request).await;
        let judge = |outcome: &AcquireAnyOutcome<B::Fencing>| match outcome {
            AcquireAnyOutcome::Acquired { .. } => (true, None),
            AcquireAnyOutcome::Contended { .. } => (false, Some(Reason::Locked)),
        };
        if let Some(started) = started {
            let subject = match &result {
                Ok(AcquireAnyOutcome::Acquired { key, .. }) => {
                    Subject { key: Some(key), lock_id: Some(request.first().lock_id()) }
                }
                _ => Subject { key: request.keys().first(), lock_id: None },
            };
            self.send(event(backend, Operation::Acquire, started, &result, judge), subject);
        }
        result
    }

    pub(crate) async fn release<B: LockBackend>(
        &self,
        backend: &B,
        request: &ReleaseRequest,
    ) -> Result<ReleaseOutcome> {
        let key = request.hint().key.as_ref();
        let subject = Subject { key, lock_id: Some(request.lock_id()) };
        let judge = |outcome: &ReleaseOutcome| match outcome {
            ReleaseOutcome::Released => (true, None),
            ReleaseOutcome::NotHeld(reason) => (false, Reason::not_held(*reason)),
        };
        self.record(
            backend,
            Operation::Release,
            subject,
            pin!(backend.release(request)),
            judge,
            None,
        )
        .await
    }

    pub(crate) async fn extend<B: LockBackend>(
        &self,
        backend: &B,
        request: &ExtendRequest,
    ) -> Result<ExtendOutcome> {
        let key = request.hint().key.as_ref();
        let subject = Subject { key, lock_id: Some(request.lock_id()) };
        let judge = |outcome: &ExtendOutcome| match outcome {
            ExtendOutcome::Extended(_) => (true, None),
            ExtendOutcome::NotHeld(reason) => (false, Reason::not_held(*reason)),
        };
        self.record(backend, Operation::Extend, subject, pin!(backend.extend(request)), judge, None)
            .await
    }

    pub(crate) async fn is_locked<B: LockBackend>(&self, backend: &B, key: &Key) -> Result<bool> {
        let subject = Subject { key: Some(key), lock_id: None };
        let call = pin!(backend.is_locked(key));
        self.record(backend, Operation::IsLocked, subject, call, |locked| (*locked, None), None)
            .await
    }

    pub(crate) async fn lookup_key<B: LockBackend>(
        &self,
        backend: &B,
        key: &Key,
    ) -> Result<Option<StoredLock<B::Fencing>>> {
        let subject = Subject { key: Some(key), lock_id: None };
        let call = pin!(backend.lookup_key(key));
        let judge = |found: &Option<_>| (found.is_some(), None);
        self.record(backend, Operation::Lookup, subject, call, judge, None).await
    }

    pub(crate) async fn lookup_id<B: LockBackend>(
        &self,
        backend: &B,
        lock_id: &LockId,
    ) -> Result<Option<StoredLock<B::Fencing>>> {
        let subject = Subject { key: None, lock_id: Some(*lock_id) };
        let call = pin!(backend.lookup_id(lock_id));
        let judge = |found: &Option<_>| (found.is_some(), None);
        self.record(backend, Operation::Lookup, subject, call, judge, None).await
    }

    /// Returns when an operation that is reported starts, which is now.
    fn start(&self) -> Option<Instant> {
        (!self.is_off()).then(Instant::now)
    }

    /// Runs an operation and reports how it ended.
    ///
    /// `judge` returns whether the operation had the requested effect, and if not, why. `granted`
    /// is the lock id that a success grants. The call is passed by reference: a future that takes
    /// another by value has room for two of it.
    async fn record<T: Send>(
        &self,
        backend: &impl LockBackend,
        operation: Operation,
        mut subject: Subject<'_>,
        call: Pin<&mut (impl Future<Output = Result<T>> + Send)>,
        judge: impl FnOnce(&T) -> (bool, Option<Reason>) + Send,
        granted: Option<LockId>,
    ) -> Result<T> {
        let started = self.start();
        let result = call.await;
        if let Some(started) = started {
            let event = event(backend, operation, started, &result, judge);
            subject.lock_id = subject.lock_id.or(granted.filter(|_| event.ok));
            self.send(event, subject);
        }
        result
    }

    fn send(&self, mut event: LockEvent, subject: Subject<'_>) {
        event.key_hash = subject.key.map(Key::hash_id);
        event.lock_id_hash = subject.lock_id.map(|id| id.hash_id());
        let include = match &self.include_raw {
            IncludeRaw::Never => false,
            IncludeRaw::Always => true,
            // A panic in a predicate must never break a lock.
            IncludeRaw::If(choose) => {
                catch_unwind(AssertUnwindSafe(|| choose(&event))).unwrap_or(false)
            }
        };
        event.lock_id = subject.lock_id.filter(|_| include);
        for sink in &self.sinks {
            event.key = subject.key.filter(|_| include || sink.wants_keys).cloned();
            sink.handle.operation(event.clone());
        }
    }
}

/// Returns the event of an operation, which does not name its subject yet.
fn event<T>(
    backend: &impl LockBackend,
    operation: Operation,
    started: Instant,
    result: &Result<T>,
    judge: impl FnOnce(&T) -> (bool, Option<Reason>),
) -> LockEvent {
    let (ok, reason) = match result {
        Ok(value) => judge(value),
        Err(error) => (false, Some(Reason::Error(error.code()))),
    };
    let mut event =
        LockEvent::new(backend.capabilities().backend, operation, ok, started.elapsed());
    event.reason = reason;
    event
}
