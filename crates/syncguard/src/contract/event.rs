//! Telemetry events: single operations of a backend, and waiting, holding and losing in the engine.
//! Nothing here is computed without a sink.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::outcome::NotHeldReason;
use crate::common::error::ErrorCode;
use crate::common::fence::Fence;
use crate::common::hash_id::HashId;
use crate::common::key::Key;
use crate::common::lock_id::LockId;
use crate::common::lost_reason::LostReason;

/// The operation of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
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
    /// Returns the name in events, which other implementations of the specification share.
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
#[non_exhaustive]
pub enum Reason {
    /// Another holder has the lock.
    Locked,
    /// The lock had expired: the work outlived its TTL. Raise the TTL, or renew.
    Expired,
    /// There is no such lock. For a release, another process has released it or taken it over.
    NotFound,
    /// The backend reported an error.
    Error(ErrorCode),
}

impl Reason {
    /// Returns the text in events: `locked`, `expired`, `not-found`, or the error's code.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Locked => "locked",
            Self::Expired => "expired",
            Self::NotFound => "not-found",
            Self::Error(code) => code.as_str(),
        }
    }

    /// Returns why a lock was not held, if the backend knows.
    #[must_use]
    pub const fn not_held(reason: NotHeldReason) -> Option<Self> {
        match reason {
            NotHeldReason::Expired => Some(Self::Expired),
            NotHeldReason::NotFound => Some(Self::NotFound),
            NotHeldReason::Unknown => None,
        }
    }
}

/// One operation of a backend, as recorded by the
/// [telemetry layer](crate::telemetry::TelemetryLayer).
///
/// Keys and lock ids are hashes. The raw values are present only if you configure the layer to
/// include them, or, for the key, if the sink asks for it ([`EventSink::wants_keys`]). Even then
/// `Debug` does not print them.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LockEvent {
    /// The name of the backend.
    pub backend: &'static str,
    /// The operation.
    pub operation: Operation,
    /// Whether the operation had the requested effect, or found the lock.
    pub ok: bool,
    /// Why it failed, if that is known. `None` for a repeated acquire whose own grant is over or
    /// was undone, for a lock that is not held where the backend cannot tell why, and for a read
    /// that found no lock.
    pub reason: Option<Reason>,
    /// How long the backend took.
    pub elapsed: Duration,
    /// The hash of the key, if it is known before the operation: a lookup by lock id has none, and
    /// neither has a release or an extend whose request has no [`Hint`](crate::backend::Hint).
    pub key_hash: Option<HashId>,
    /// The hash of the lock id, if the operation has one or was granted one.
    pub lock_id_hash: Option<HashId>,
    /// The raw key. It is sensitive.
    pub key: Option<Key>,
    /// The raw lock id. It is a secret.
    pub lock_id: Option<LockId>,
}

impl LockEvent {
    /// Creates an event without reason, key and lock id.
    #[must_use]
    pub fn new(backend: &'static str, operation: Operation, ok: bool, elapsed: Duration) -> Self {
        Self {
            backend,
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
#[non_exhaustive]
pub enum WaitOutcome {
    /// The lock was acquired.
    Acquired,
    /// A single attempt found the lock held.
    Contended,
    /// The wait timed out while others held the lock.
    TimedOut,
    /// The wait was canceled.
    Canceled,
    /// The store reported an error.
    Failed,
}

impl WaitOutcome {
    /// Returns a word for logs and labels.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Acquired => "acquired",
            Self::Contended => "contended",
            Self::TimedOut => "timed-out",
            Self::Canceled => "canceled",
            Self::Failed => "failed",
        }
    }
}

/// An event of a [`Locker`](crate::Locker), above single operations.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct EngineEvent {
    /// The name of the backend.
    pub backend: &'static str,
    /// The hash of the key.
    pub key_hash: HashId,
    /// The [label](crate::LockOptions::label) of the lock.
    pub label: Option<Arc<str>>,
    /// The fence of the lock, if it was acquired on a backend that fences.
    pub fence: Option<Fence>,
    /// The raw key, for sinks that [ask for it](EventSink::wants_keys). It is sensitive.
    pub key: Option<Key>,
    /// What happened.
    pub kind: EngineEventKind,
}

/// What happened in a [`Locker`](crate::Locker).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum EngineEventKind {
    /// A call has to wait for the lock. [`Waited`](Self::Waited) follows.
    Waiting,
    /// A call of `lock`, `try_lock` or `with_lock` ended.
    #[non_exhaustive]
    Waited {
        /// How it ended.
        outcome: WaitOutcome,
        /// How long it took.
        waited: Duration,
        /// Whether it had to wait, which [`Waiting`](Self::Waiting) reported.
        was_queued: bool,
        /// If the lock was acquired after another holder released it: the time from the
        /// notification of the release.
        hand_over: Option<Duration>,
        /// The number of acquire attempts at the store.
        attempts: u32,
        /// How many tasks of this process held or waited for the lock when this wait began.
        queued_behind: u32,
    },
    /// A guard was created. [`Held`](Self::Held) follows.
    Acquired,
    /// A guard was released, detached or dropped.
    #[non_exhaustive]
    Held {
        /// How long the guard lived.
        held: Duration,
    },
    /// A guard lost its lock.
    #[non_exhaustive]
    Lost {
        /// Why the lock was lost.
        reason: LostReason,
    },
    /// A lock was not renewed. The next attempt may succeed.
    #[non_exhaustive]
    RenewalFailed {
        /// The code of the error.
        code: ErrorCode,
    },
}

/// Any telemetry event, as it is queued for a sink.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Event {
    /// An operation of a backend.
    Operation(LockEvent),
    /// An event of a locker, above single operations.
    Engine(EngineEvent),
}

/// Receives events from a [`TelemetryLayer`](crate::telemetry::TelemetryLayer) or a
/// [`Locker`](crate::Locker).
///
/// Unless [`is_inline`](Self::is_inline) returns true, it is called on a thread of its own, behind
/// a bounded queue, so it may block.
/// [`TelemetryLayer::dropped`](crate::telemetry::TelemetryLayer::dropped) counts the events that
/// did not fit into the queue.
pub trait EventSink: fmt::Debug + Send + Sync + 'static {
    /// Receives an operation of a backend, from a
    /// [`TelemetryLayer`](crate::telemetry::TelemetryLayer) or a [`Locker`](crate::Locker).
    #[expect(unused_variables, reason = "the name is documentation")]
    fn operation(&self, event: &LockEvent) {}

    /// Receives an event above single operations, from a [`Locker`](crate::Locker).
    #[expect(unused_variables, reason = "the name is documentation")]
    fn engine(&self, event: &EngineEvent) {}

    /// Returns whether this sink needs no queue, because it returns at once and never blocks. It is
    /// then called during an operation, on the thread of that operation. `false` by default.
    fn is_inline(&self) -> bool {
        false
    }

    /// Returns whether this sink receives raw keys with all events. They are sensitive. `false` by
    /// default.
    fn wants_keys(&self) -> bool {
        false
    }
}
