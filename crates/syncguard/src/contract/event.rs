//! What can be observed: single operations at the backend, and waiting, holding and losing in the
//! engine. Nothing here is computed unless somebody listens.

use std::fmt;
use std::time::Duration;

use super::outcome::Absence;
use crate::common::error::ErrorCode;
use crate::common::hash_id::HashId;
use crate::common::key::Key;
use crate::common::lock_id::LockId;
use crate::common::lost_reason::LostReason;

/// Which operation an event is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operation {
    /// [`LockBackend::acquire`](crate::LockBackend::acquire)
    Acquire,
    /// [`LockBackend::release`](crate::LockBackend::release)
    Release,
    /// [`LockBackend::extend`](crate::LockBackend::extend)
    Extend,
    /// [`LockBackend::is_locked`](crate::LockBackend::is_locked)
    IsLocked,
    /// [`LockBackend::lookup_key`](crate::LockBackend::lookup_key) and
    /// [`LockBackend::lookup_id`](crate::LockBackend::lookup_id)
    Lookup,
}

impl Operation {
    /// The name in events, shared with other implementations of the specification.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Acquire => "acquire",
            Self::Release => "release",
            Self::Extend => "extend",
            Self::IsLocked => "isLocked",
            Self::Lookup => "lookup",
        }
    }
}

/// Why an operation failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// Somebody else holds the lock.
    Locked,
    /// The lock had expired.
    Expired,
    /// There is no such lock.
    NotFound,
    /// The backend reported trouble.
    Error(ErrorCode),
}

impl Reason {
    /// The text in events: `locked`, `expired`, `not-found`, or the error's code.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Locked => "locked",
            Self::Expired => "expired",
            Self::NotFound => "not-found",
            Self::Error(code) => code.as_str(),
        }
    }

    /// The reason that an absence is, where the backend knew it.
    #[must_use]
    pub const fn from_absence(absence: Absence) -> Option<Self> {
        match absence {
            Absence::Expired => Some(Self::Expired),
            Absence::NotFound => Some(Self::NotFound),
            Absence::Unknown => None,
        }
    }
}

/// One operation at a backend, as the [telemetry layer](crate::TelemetryLayer) saw it.
///
/// Keys and lock ids are hashes; the raw values are only there when the layer was told to include
/// them, and even then `Debug` does not print them.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LockEvent {
    /// What was asked.
    pub operation: Operation,
    /// Whether it had the effect or the positive answer that was asked for.
    pub ok: bool,
    /// Why not, where it is known.
    pub reason: Option<Reason>,
    /// How long the backend took.
    pub elapsed: Duration,
    /// The key, where the operation names one.
    pub key_hash: Option<HashId>,
    /// The lock id, where the operation names one or was granted one.
    pub lock_id_hash: Option<HashId>,
    /// The raw key. Sensitive.
    pub key: Option<Key>,
    /// The raw lock id. A secret.
    pub lock_id: Option<LockId>,
}

impl LockEvent {
    /// An event without reason, key and lock id.
    #[must_use]
    pub fn new(operation: Operation, ok: bool, elapsed: Duration) -> Self {
        Self {
            operation,
            ok,
            reason: None,
            elapsed,
            key_hash: None,
            lock_id_hash: None,
            key: None,
            lock_id: None,
        }
    }
}

/// How a wait for a lock ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WaitOutcome {
    /// With the lock.
    Acquired,
    /// Without it: a single attempt found it held.
    Contended,
    /// Without it, because others held it too long.
    TimedOut,
    /// Without it, because the waiter was cancelled.
    Cancelled,
    /// Without it, because of trouble with the store.
    Failed,
}

impl WaitOutcome {
    /// A word for logs and labels.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Acquired => "acquired",
            Self::Contended => "contended",
            Self::TimedOut => "timed-out",
            Self::Cancelled => "cancelled",
            Self::Failed => "failed",
        }
    }
}

/// What happened in a [`Locker`](crate::Locker), above single operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum EngineEvent {
    /// A call of `lock`, `try_lock` or `with_lock` has its answer.
    Waited {
        /// The key.
        key_hash: HashId,
        /// How it ended.
        outcome: WaitOutcome,
        /// How long it took.
        waited: Duration,
        /// How often the store was asked.
        attempts: u32,
    },
    /// A guard was released or dropped.
    Held {
        /// The key.
        key_hash: HashId,
        /// How long the guard lived.
        held: Duration,
    },
    /// A lock was lost under its guard.
    Lost {
        /// The key.
        key_hash: HashId,
        /// Why.
        reason: LostReason,
    },
}

/// An event, as it waits in a queue.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Event {
    /// An operation at a backend.
    Operation(LockEvent),
    /// Something above single operations.
    Engine(EngineEvent),
}

/// Receives events from a [`TelemetryLayer`](crate::TelemetryLayer) or a [`Locker`](crate::Locker).
///
/// It is called on a thread of its own, behind a bounded queue
/// ([`TelemetryLayer::dropped`](crate::TelemetryLayer::dropped) counts what did not fit), so it may take
/// its time.
pub trait EventSink: fmt::Debug + Send + Sync + 'static {
    /// An operation at a backend, from a [`TelemetryLayer`](crate::TelemetryLayer).
    #[expect(unused_variables, reason = "the name is documentation")]
    fn operation(&self, event: &LockEvent) {}

    /// Something above single operations, from a [`Locker`](crate::Locker).
    #[expect(unused_variables, reason = "the name is documentation")]
    fn engine(&self, event: &EngineEvent) {}

    /// Whether this sink needs no queue, because it returns at once and never blocks. It is then called
    /// in the middle of an operation, on whatever thread that is. `false` by default.
    fn is_inline(&self) -> bool {
        false
    }
}
