#![doc = include_str!("../README.md")]

mod backends;
#[cfg(feature = "blocking")]
pub mod blocking;
mod common;
#[cfg(feature = "conformance")]
pub mod conformance;
mod connect;
mod contract;
pub mod diagnostics;
mod layers;
mod lock;

#[cfg(feature = "firestore")]
pub use backends::firestore::{self, FirestoreBackend};
pub use backends::memory::{self, MemoryBackend};
#[cfg(feature = "postgres")]
pub use backends::postgres::{self, PostgresBackend};
#[cfg(feature = "redis")]
pub use backends::redis::{self, RedisBackend};
#[cfg(feature = "sqlite")]
pub use backends::sqlite::{self, SqliteBackend};
pub use common::clock::{Clock, ManualClock, MonotonicClock, SystemClock};
pub use common::error::{Error, ErrorCode, Result};
pub use common::fence::{Fence, Fenced, Fencing, Unfenced};
pub use common::hash_id::{HashId, hash_key};
pub use common::key::{Key, MAX_KEY_LENGTH_BYTES};
pub use common::lock_id::LockId;
pub use common::lost_reason::LostReason;
pub use common::storage_key::KeySpace;
pub use common::time::{CLEANUP_GUARD_MS, TIME_TOLERANCE_MS, Timestamp, is_live};
pub use common::ttl::Ttl;
pub use connect::{connect, explain_key};
pub use contract::LockBackend;
pub use contract::advice::Advice;
pub use contract::capabilities::{Capabilities, TimeAuthority};
pub use contract::erased::AnyBackend;
pub use contract::event::{
    EngineEvent, Event, EventSink, LockEvent, Operation, Reason, WaitOutcome,
};
pub use contract::inspect::{Cursor, Inspection, Inspector, Page};
pub use contract::outcome::{Absence, Acquire, Extend, Extension, Lease, Release};
pub use contract::request::{AcquireRequest, ExtendRequest, Hint, Receipt, ReleaseRequest};
pub use contract::stored_lock::StoredLock;
pub use contract::wake::{WakeHub, WakeUps};
pub use layers::Layer;
#[cfg(feature = "metrics")]
pub use layers::telemetry::metrics::MetricsSink;
pub use layers::telemetry::queued::QueuedSink;
pub use layers::telemetry::tracing::TracingSink;
pub use layers::telemetry::{Telemetry, TelemetryLayer};
pub use lock::cancel::cancellable;
pub use lock::clock::LocalClock;
pub use lock::guard::{Held, LockGuard};
pub use lock::locker::{Locker, LockerBuilder};
pub use lock::options::LockOptions;
pub use lock::release_errors::{ReleaseContext, ReleaseSource};
pub use lock::retry::{Backoff, Jitter, RetryPolicy};
pub use tokio_util::sync::CancellationToken;

/// The examples of the guide are tests too.
#[cfg(doctest)]
mod guide {
    #[doc = include_str!("../../../docs/guide/cancellation.md")]
    struct Cancellation;
    #[doc = include_str!("../../../docs/guide/choosing-a-backend.md")]
    struct ChoosingABackend;
    #[doc = include_str!("../../../docs/guide/diagnostics.md")]
    struct Diagnostics;
    #[doc = include_str!("../../../docs/guide/fencing.md")]
    struct Fencing;
    #[cfg(feature = "firestore")]
    #[doc = include_str!("../../../docs/guide/firestore.md")]
    struct Firestore;
    #[doc = include_str!("../../../docs/guide/getting-started.md")]
    struct GettingStarted;
    #[cfg(feature = "postgres")]
    #[doc = include_str!("../../../docs/guide/postgres.md")]
    struct Postgres;
    #[cfg(feature = "redis")]
    #[doc = include_str!("../../../docs/guide/redis.md")]
    struct Redis;
    #[doc = include_str!("../../../docs/guide/renewal-and-loss.md")]
    struct RenewalAndLoss;
    #[cfg(feature = "sqlite")]
    #[doc = include_str!("../../../docs/guide/sqlite.md")]
    struct Sqlite;
    #[doc = include_str!("../../../docs/guide/telemetry.md")]
    struct Telemetry;
    #[doc = include_str!("../../../docs/guide/testing.md")]
    struct Testing;
    #[doc = include_str!("../../../docs/guide/waiting.md")]
    struct Waiting;
    #[doc = include_str!("../../../docs/guide/writing-a-backend.md")]
    struct WritingABackend;
}
