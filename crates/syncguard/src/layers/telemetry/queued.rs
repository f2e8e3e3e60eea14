//! Calls a closure for events, on a thread of its own behind a bounded queue.

use std::fmt;

use crate::common::error::Result;
use crate::contract::callback_queue::CallbackQueue;
use crate::contract::event::{EngineEvent, Event, EventSink, LockEvent};

/// Calls a closure for every event, on a thread of its own.
///
/// A slow closure delays later events. When the queue is full, events are dropped, and
/// [`dropped`](Self::dropped) counts them. A panic in the closure loses only that event. Locks
/// never wait for the closure. The thread ends after the last event when the last clone of the sink
/// is dropped.
///
/// ```
/// use std::sync::Arc;
/// use syncguard::MemoryBackend;
/// use syncguard::backend::Layer;
/// use syncguard::telemetry::{Event, QueuedSink, TelemetryLayer};
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
pub struct QueuedSink(CallbackQueue<Event>);

impl QueuedSink {
    /// The maximum number of queued events.
    pub const CAPACITY: usize = CallbackQueue::<Event>::CAPACITY;

    /// Starts a thread that calls `callback` for every event.
    pub fn new(callback: impl FnMut(&Event) + Send + 'static) -> Result<Self> {
        CallbackQueue::start("syncguard-events", callback).map(Self)
    }

    /// Returns how many events were dropped because the queue was full.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.0.dropped()
    }
}

impl EventSink for QueuedSink {
    fn operation(&self, event: &LockEvent) {
        self.0.put(Event::Operation(event.clone()));
    }

    fn engine(&self, event: &EngineEvent) {
        self.0.put(Event::Engine(event.clone()));
    }

    /// Returns `true`: this sink has a queue of its own.
    fn is_inline(&self) -> bool {
        true
    }
}

impl fmt::Debug for QueuedSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QueuedSink").field("dropped", &self.dropped()).finish_non_exhaustive()
    }
}
