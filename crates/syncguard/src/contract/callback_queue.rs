//! Runs user callbacks on a thread of their own behind a bounded queue, so that a slow or panicking
//! callback never delays or breaks a lock.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread;

use super::event::{EngineEvent, Event, EventSink, LockEvent};
use crate::common::error::{Error, ErrorCode, Result};

/// A callback behind a queue. The thread ends after the last call when the last clone is dropped.
pub(crate) struct CallbackQueue<T> {
    queue: SyncSender<T>,
    dropped: Arc<AtomicU64>,
}

impl<T: Send + 'static> CallbackQueue<T> {
    /// The maximum number of queued calls.
    pub(crate) const CAPACITY: usize = 1024;

    /// Starts the thread that calls `callback`. The thread continues after a call that panics.
    pub(crate) fn start(
        thread_name: &str,
        mut callback: impl FnMut(&T) + Send + 'static,
    ) -> Result<Self> {
        let (queue, calls) = sync_channel(Self::CAPACITY);
        let make_all = move || {
            for call in calls {
                drop(catch_unwind(AssertUnwindSafe(|| callback(&call))));
            }
        };
        thread::Builder::new().name(thread_name.to_owned()).spawn(make_all).map_err(|cause| {
            Error::new(ErrorCode::Internal, "could not start the callback thread")
                .with_source(cause)
                .without_effect()
        })?;
        Ok(Self { queue, dropped: Arc::default() })
    }

    /// Queues a call; drops and counts it if the queue is full. Never waits. Returns whether it was
    /// queued.
    pub(crate) fn put(&self, call: T) -> bool {
        let is_queued = self.queue.try_send(call).is_ok();
        if !is_queued {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
        is_queued
    }

    /// Returns how many calls were dropped because the queue was full.
    pub(crate) fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }
}

impl<T> Clone for CallbackQueue<T> {
    fn clone(&self) -> Self {
        Self { queue: self.queue.clone(), dropped: Arc::clone(&self.dropped) }
    }
}

impl<T> fmt::Debug for CallbackQueue<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CallbackQueue").field("dropped", &self.dropped).finish_non_exhaustive()
    }
}

/// A sink, behind a queue unless it is [inline](EventSink::is_inline).
#[derive(Clone, Debug)]
pub(crate) enum SinkHandle {
    Inline(Arc<dyn EventSink>),
    Queued(CallbackQueue<Event>),
    /// The thread could not be started; every event is dropped and counted.
    Disabled(Arc<AtomicU64>),
}

impl SinkHandle {
    pub(crate) fn new(sink: Arc<dyn EventSink>) -> Self {
        if sink.is_inline() {
            return Self::Inline(sink);
        }
        let forward = move |event: &Event| match event {
            Event::Operation(event) => sink.operation(event),
            Event::Engine(event) => sink.engine(event),
        };
        match CallbackQueue::start("syncguard-events", forward) {
            Ok(queue) => Self::Queued(queue),
            Err(error) => {
                tracing::warn!("{error}; telemetry events are dropped");
                Self::Disabled(Arc::default())
            }
        }
    }

    pub(crate) fn operation(&self, event: LockEvent) {
        match self {
            // A panic in a sink must never break a lock.
            Self::Inline(sink) => no_panic(|| sink.operation(&event)),
            Self::Queued(queue) => drop(queue.put(Event::Operation(event))),
            Self::Disabled(dropped) => drop(dropped.fetch_add(1, Ordering::Relaxed)),
        }
    }

    pub(crate) fn engine(&self, event: EngineEvent) {
        match self {
            Self::Inline(sink) => no_panic(|| sink.engine(&event)),
            Self::Queued(queue) => drop(queue.put(Event::Engine(event))),
            Self::Disabled(dropped) => drop(dropped.fetch_add(1, Ordering::Relaxed)),
        }
    }

    pub(crate) fn dropped(&self) -> u64 {
        match self {
            Self::Inline(_) => 0,
            Self::Queued(queue) => queue.dropped(),
            Self::Disabled(dropped) => dropped.load(Ordering::Relaxed),
        }
    }
}

fn no_panic(call: impl FnOnce()) {
    if catch_unwind(AssertUnwindSafe(call)).is_err() {
        tracing::debug!("a telemetry sink panicked");
    }
}
