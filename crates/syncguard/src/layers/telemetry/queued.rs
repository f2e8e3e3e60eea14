//! A user's callback, on a thread of its own behind a bounded queue.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread;

use crate::common::error::{Error, ErrorCode, Result};
use crate::contract::event::{EngineEvent, EventSink, LockEvent};

/// An event, as a [`QueuedSink`] hands it to its callback.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Event {
    /// An operation at a backend.
    Operation(LockEvent),
    /// Something above single operations.
    Engine(EngineEvent),
}

/// Calls a closure for every event, on a thread of its own.
///
/// A slow closure delays later events and, when the queue is full, loses them
/// ([`dropped`](Self::dropped) counts them); a panicking one loses that event. Locks never wait.
/// The thread ends after the last event when the last clone of the sink is dropped.
///
/// ```
/// use std::sync::Arc;
/// use syncguard::{Event, Layer, MemoryBackend, QueuedSink, TelemetryLayer};
///
/// let sink = QueuedSink::new(|event| {
///     if let Event::Operation(event) = event {
///         println!("{} {}", event.operation.as_str(), event.ok);
///     }
/// })?;
/// let backend = TelemetryLayer::new(Arc::new(sink)).layer(MemoryBackend::new());
/// # Ok::<(), syncguard::Error>(())
/// ```
#[derive(Clone)]
pub struct QueuedSink {
    queue: SyncSender<Event>,
    dropped: Arc<AtomicU64>,
}

impl QueuedSink {
    /// How many events may wait for the closure.
    pub const CAPACITY: usize = 1024;

    /// Starts the thread that calls `hear`.
    pub fn new(mut hear: impl FnMut(&Event) + Send + 'static) -> Result<Self> {
        let (queue, events) = sync_channel(Self::CAPACITY);
        let call_all = move || {
            for event in events {
                // The next event may fare better.
                drop(catch_unwind(AssertUnwindSafe(|| hear(&event))));
            }
        };
        thread::Builder::new().name("syncguard-events".into()).spawn(call_all).map_err(
            |cause| {
                Error::new(ErrorCode::Internal, "could not start the thread for telemetry")
                    .with_source(cause)
                    .without_effect()
            },
        )?;
        Ok(Self { queue, dropped: Arc::default() })
    }

    /// How many events were lost because the queue was full.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    fn put(&self, event: Event) {
        if self.queue.try_send(event).is_err() {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl EventSink for QueuedSink {
    fn operation(&self, event: &LockEvent) {
        self.put(Event::Operation(event.clone()));
    }

    fn engine(&self, event: &EngineEvent) {
        self.put(Event::Engine(*event));
    }
}

impl fmt::Debug for QueuedSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QueuedSink").field("dropped", &self.dropped()).finish_non_exhaustive()
    }
}
