//! Distributed locks: leases with fencing tokens on Redis, PostgreSQL, Firestore, SQLite or in
//! memory.
//!
//! A [`Locker`] takes locks by key on a backend. [`Locker::lock`] waits for the lock and returns a
//! [`LockGuard`], which releases it when it is dropped. A lock is a *lease*: it expires after its
//! [`Ttl`], so a crashed holder blocks others for a bounded time. Every acquisition of a key has a
//! larger [`Fence`], so that a resource can refuse a holder that was paused and came back late.
//!
//! ```
//! use std::time::Duration;
//! use syncguard::Locker;
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> syncguard::Result<()> {
//! let backend = syncguard::connect("memory:").await?; // or redis://…, postgres://…, sqlite:…
//! let locker = Locker::builder(backend).ttl(Duration::from_secs(10)).renew().build()?;
//!
//! let guard = locker.lock("invoice:42").await?;
//! println!("charging with fence {}", guard.fence());
//! guard.release().await?;
//!
//! locker.shutdown().await // before the runtime ends
//! # }
//! ```
//!
//! # Which call do I need?
//!
//! | to | call |
//! |---|---|
//! | wait for a lock | [`Locker::lock`], with options of its own: `locker.lock("k").timeout(d).await` |
//! | run a job unless another process does | [`Locker::try_with_lock`] |
//! | take a lock if it is free | [`Locker::try_lock`], [`Locker::try_lock_for`] |
//! | run work that must stop when the lock is lost | [`Locker::with_lock`], [`LockGuard::run`] |
//! | check a lock before a write | [`LockGuard::ensure_valid`], and the [`fence`](LockGuard::fence) at the resource |
//! | take several locks, elect a leader, limit how many work at once | [`primitives`] |
//! | hand a lock to another process | [`LockGuard::detach`], [`Locker::resume`] |
//! | see who holds what | [`Locker::info`], [`diagnostics`] |
//! | lock without an async runtime | [`blocking`] |
//! | test with virtual time and faults | [`testing`] |
//!
//! # Backends
//!
//! [`connect`] selects one by URL. Each has a module with its configuration: [`memory`],
//! [`sqlite`], [`redis`], [`postgres`], [`firestore`]. [`backend`] is for authors of other ones;
//! [`telemetry`] sends events to logs, metrics and traces.
//!
//! # Errors
//!
//! A lock that is held is not an error: `try_` functions return `None`. An [`Error`] has one of
//! eight [codes](ErrorCode), the same on every backend, and tells whether it [may have taken
//! effect](Error::may_have_taken_effect) and whether a retry [may help](Error::is_retryable).
//!
//! # Guides
//!
//! [Getting started](https://github.com/syncguard/syncguard/blob/main/docs/guide/getting-started.md),
//! [fencing](https://github.com/syncguard/syncguard/blob/main/docs/guide/fencing.md),
//! [waiting](https://github.com/syncguard/syncguard/blob/main/docs/guide/waiting.md),
//! [renewal and loss](https://github.com/syncguard/syncguard/blob/main/docs/guide/renewal-and-loss.md),
//! [more than one lock](https://github.com/syncguard/syncguard/blob/main/docs/guide/more-than-one-lock.md),
//! [cancellation](https://github.com/syncguard/syncguard/blob/main/docs/guide/cancellation.md),
//! [telemetry](https://github.com/syncguard/syncguard/blob/main/docs/guide/telemetry.md),
//! [diagnostics](https://github.com/syncguard/syncguard/blob/main/docs/guide/diagnostics.md),
//! [operating](https://github.com/syncguard/syncguard/blob/main/docs/guide/operating.md),
//! [scale](https://github.com/syncguard/syncguard/blob/main/docs/guide/scale.md),
//! [testing](https://github.com/syncguard/syncguard/blob/main/docs/guide/testing.md),
//! [choosing a backend](https://github.com/syncguard/syncguard/blob/main/docs/guide/choosing-a-backend.md),
//! [writing a backend](https://github.com/syncguard/syncguard/blob/main/docs/guide/writing-a-backend.md)
//! and [the command line](https://github.com/syncguard/syncguard/blob/main/docs/guide/command-line.md).

#![cfg_attr(docsrs, feature(doc_cfg))]

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
pub mod primitives;
pub mod testing;

#[cfg(feature = "firestore")]
pub use backends::firestore::{self, FirestoreBackend};
pub use backends::memory::{self, MemoryBackend};
#[cfg(feature = "postgres")]
pub use backends::postgres::{self, PostgresBackend};
#[cfg(feature = "redis")]
pub use backends::redis::{self, RedisBackend};
#[cfg(feature = "sqlite")]
pub use backends::sqlite::{self, SqliteBackend};
pub use common::error::{Error, ErrorCode, Result};
pub use common::fence::Fence;
pub use common::fence_source::FenceSource;
pub use common::hash_id::HashId;
pub use common::holder::HolderInfo;
pub use common::key::Key;
pub use common::lock_id::LockId;
#[cfg(feature = "serde")]
pub use common::lock_id::lock_id_text;
pub use common::lost_reason::LostReason;
pub use common::time::Timestamp;
pub use common::ttl::Ttl;
pub use connect::connect;
pub use contract::LockBackend;
pub use contract::erased::AnyBackend;
pub use contract::fence_gate::FenceGate;
pub use contract::outcome::{ExtendOutcome, NotHeldReason, ReleaseOutcome};
pub use lock::cancel::cancellable;
pub use lock::guard::{LockGuard, LockHandle};
pub use lock::lock_request::LockRequest;
pub use lock::locker::{Locker, LockerBuilder};
pub use lock::options::LockOptions;
pub use lock::release_errors::{ReleaseContext, ReleaseSource};
pub use lock::retry::{Backoff, Jitter, RetryPolicy};
pub use tokio_util::sync::CancellationToken;

/// What authors of backends and layers need: the contract, its requests and outcomes, and the rules
/// that every store shares. See [`LockBackend`].
pub mod backend {
    pub use crate::common::clock::{Clock, ManualClock, MonotonicClock, SystemClock};
    pub use crate::common::fence::{Fenced, Fencing, Unfenced};
    pub use crate::common::hash_id::hash_key;
    pub use crate::common::holder::BreakNote;
    pub use crate::common::key::MAX_KEY_LENGTH_BYTES;
    pub use crate::common::storage_key::KeySpace;
    pub use crate::common::time::{CLEANUP_GUARD_MS, TIME_TOLERANCE_MS, is_live};
    pub use crate::contract::admin::{Admin, Cursor, Page};
    pub use crate::contract::capabilities::{Capabilities, TimeAuthority};
    pub use crate::contract::fenced_lock::FencedLock;
    pub use crate::contract::finding::Finding;
    pub use crate::contract::notifier::{Notifier, Subscription};
    pub use crate::contract::outcome::{AcquireAnyOutcome, AcquireOutcome, Extension, Lease};
    pub use crate::contract::request::{
        AcquireAnyRequest, AcquireRequest, ExtendRequest, Hint, Receipt, ReleaseRequest,
    };
    pub use crate::contract::stored_lock::StoredLock;
    pub use crate::contract::{BoxFuture, LockBackend};
    pub use crate::layers::Layer;
}

/// Events for logs, metrics and traces.
pub mod telemetry {
    pub use crate::contract::event::{
        EngineEvent, EngineEventKind, Event, EventSink, LockEvent, Operation, Reason, WaitOutcome,
    };
    #[cfg(feature = "metrics")]
    pub use crate::layers::telemetry::metrics::MetricsSink;
    pub use crate::layers::telemetry::queued::QueuedSink;
    pub use crate::layers::telemetry::tracing::TracingSink;
    pub use crate::layers::telemetry::{Telemetry, TelemetryLayer};
}

/// The examples of the guide are tests too.
#[cfg(doctest)]
mod guide {
    #[cfg(feature = "redis")]
    #[doc = include_str!("../README.md")]
    struct Readme;
    #[doc = include_str!("../../../docs/guide/cancellation.md")]
    struct Cancellation;
    #[doc = include_str!("../../../docs/guide/choosing-a-backend.md")]
    struct ChoosingABackend;
    #[doc = include_str!("../../../docs/guide/diagnostics.md")]
    struct Diagnostics;
    #[cfg(all(feature = "firestore", feature = "postgres", feature = "redis", feature = "sqlite"))]
    #[doc = include_str!("../../../docs/guide/fencing.md")]
    struct Fencing;
    #[cfg(feature = "firestore")]
    #[doc = include_str!("../../../docs/guide/firestore.md")]
    struct Firestore;
    #[doc = include_str!("../../../docs/guide/getting-started.md")]
    struct GettingStarted;
    #[doc = include_str!("../../../docs/guide/more-than-one-lock.md")]
    struct MoreThanOneLock;
    #[doc = include_str!("../../../docs/guide/operating.md")]
    struct Operating;
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
