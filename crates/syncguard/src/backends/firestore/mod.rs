//! Locks in a Firestore database, shared by every client of that database.
//!
//! * There are no transactions: an operation is strongly consistent reads and one commit, which
//!   fails if a document has changed since it was read. An acquire is two requests; a release or an
//!   extend through the guard is one.
//! * Each client decides by its own clock whether a lock is live, so every response is used to
//!   compare that clock with the server's.
//! * The documents are those of the TypeScript implementation: both exclude each other, and each
//!   can release, extend and look up the other's locks.
//!
//! [The guide](https://github.com/syncguard/syncguard/blob/main/docs/guide/firestore.md)
//! describes connection URLs, permissions, and what can make fences go backwards.

mod admin;
mod change;
mod clock_check;
mod config;
mod error;
mod fenced;
mod listener;
mod names;
mod record;
mod requests;

use std::fmt;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

pub use google_cloud_auth;
pub use googleapis_tonic_google_firestore_v1::google::firestore::v1 as api;
pub use tonic;

use crate::common::backoff::random_fraction;
use crate::common::cleanup::CleanupGate;
use crate::common::error::{Error, Result};
use crate::common::fence::{Fence, Fenced};
use crate::common::fence_source::FenceSource;
use crate::common::key::Key;
use crate::common::lock_id::LockId;
use crate::common::time::{Timestamp, is_live};
use crate::contract::LockBackend;
use crate::contract::admin::Admin;
use crate::contract::capabilities::{Capabilities, TimeAuthority};
use crate::contract::notifier::Subscription;
use crate::contract::outcome::{AcquireOutcome, ExtendOutcome, Extension, Lease, ReleaseOutcome};
use crate::contract::request::{AcquireRequest, ExtendRequest, Receipt, ReleaseRequest};
use crate::contract::stored_lock::StoredLock;
use change::{Change, Changed};
pub use config::FirestoreConfig;
pub use fenced::FencedCollection;
use listener::FirestoreListener;
use names::Names;
use record::{Record, Version};
use requests::{Commit, Requests};

const NAME: &str = "firestore";

/// How many times a change is attempted while other clients change the same documents.
const ROUNDS: u32 = 6;

/// A backend that keeps locks in a Firestore database. Clones share the connection.
///
/// ```no_run
/// use syncguard::firestore::FirestoreConfig;
/// use syncguard::{FirestoreBackend, Locker};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> syncguard::Result<()> {
/// let backend = FirestoreBackend::connect(FirestoreConfig::new("my-project")).await?;
/// let locker = Locker::new(backend)?;
/// let guard = locker.lock("invoice:42").await?;
/// # drop(guard); locker.shutdown().await
/// # }
/// ```
#[derive(Clone)]
pub struct FirestoreBackend {
    shared: Arc<FirestoreInner>,
}

struct FirestoreInner {
    requests: Arc<Requests>,
    names: Names,
    listener: FirestoreListener,
    cleanup: CleanupGate,
    is_emulator: bool,
    fences: FenceSource,
}

/// The receipt of a guard: with it, the lock can be changed without reading it first.
struct Held {
    lock_id: LockId,
    document: String,
    version: Version,
    expires_at: Timestamp,
}

impl FirestoreBackend {
    /// Connects to a database and reads from it, so that missing credentials or a wrong project
    /// fail here. Logs a warning if this machine's clock differs too much from the server's.
    ///
    /// # Cancel safety
    ///
    /// If you drop the future before it completes, nothing is left behind.
    pub async fn connect(config: FirestoreConfig) -> Result<Self> {
        config.validate()?;
        let names = config.names()?;
        let cleanup = CleanupGate::new(config.network.cleanup_in_is_locked);
        let (is_emulator, fences) = (config.emulator.is_some(), config.fences);
        let requests = Arc::new(Requests::new(config, names.clone())?);
        requests.touch().await.map_err(|error| named(error, "connect"))?;
        if requests.clock_error().is_some() {
            // The first response includes the time to connect, so compare the clocks once more.
            requests.touch().await.map_err(|error| named(error, "connect"))?;
        }
        let listener = FirestoreListener::start(Arc::clone(&requests), names.clone());
        Ok(Self {
            shared: Arc::new(FirestoreInner {
                requests,
                names,
                listener,
                cleanup,
                is_emulator,
                fences,
            }),
        })
    }

    /// Reads the lock of a key, live or expired.
    async fn read(&self, key: &Key) -> Result<Option<Record>> {
        let [lock, _] = self.shared.names.documents(key)?;
        let [found] = self.shared.requests.read([&lock]).await?;
        found.map(Record::read).transpose()
    }

    /// Finds all locks with an id, live or expired.
    async fn find(&self, lock_id: LockId) -> Result<Vec<Record>> {
        let found = self.shared.requests.find(&lock_id).await?;
        let records: Vec<Record> = found.into_iter().map(Record::read).collect::<Result<_>>()?;
        if records.len() > 1 {
            tracing::warn!(
                documents = records.len(),
                "one lock id is in several documents; check whether a backup was merged"
            );
        }
        // Whatever the query returned, only locks with this id may be changed.
        Ok(records.into_iter().filter(|record| record.lock.lock_id == lock_id).collect())
    }

    /// Deletes an expired record in the background.
    fn clean_up(&self, record: Record) {
        let backend = self.clone();
        tokio::spawn(async move {
            let requests = &backend.shared.requests;
            // Best effort: the next acquire replaces a record that is left. If the clock is off,
            // the record may only look expired.
            if requests.approve_clock().await.is_ok() {
                drop(requests.commit(vec![deletion(&record)]).await);
            }
        });
    }
}

fn named(error: Error, operation: &'static str) -> Error {
    error.with_operation(NAME, operation)
}

/// Waits before a round: not before the first one, then with exponential backoff and full jitter.
async fn pause(round: u32) {
    const FIRST: Duration = Duration::from_millis(10);
    if round > 0 {
        let longest = FIRST.saturating_mul(2_u32.saturating_pow(round - 1));
        tokio::time::sleep(longest.mul_f64(random_fraction())).await;
    }
}

impl fmt::Debug for FirestoreBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FirestoreBackend")
            .field("collections", &self.shared.names.collections())
            .finish_non_exhaustive()
    }
}

impl LockBackend for FirestoreBackend {
    type Fencing = Fenced;

    fn capabilities(&self) -> Capabilities {
        Capabilities::new::<Fenced>(NAME, TimeAuthority::Client)
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<AcquireOutcome> {
        let mut has_conflicted = false;
        let acquired = self.try_acquire(request, &mut has_conflicted).await;
        acquired.map_err(|error| {
            // A conflict does not prove that the commit had no effect.
            let error = if has_conflicted { error.after_effect() } else { error };
            named(error.with_key(request.key()), "acquire")
        })
    }

    async fn release(&self, request: &ReleaseRequest) -> Result<ReleaseOutcome> {
        let lock_id = request.lock_id();
        let released = self.change(lock_id, request.hint(), Change::Release).await;
        match released.map_err(|error| named(error.with_lock_id(lock_id), "release"))? {
            Ok(_) => Ok(ReleaseOutcome::Released),
            Err(reason) => Ok(ReleaseOutcome::NotHeld(reason)),
        }
    }

    async fn extend(&self, request: &ExtendRequest) -> Result<ExtendOutcome> {
        let (lock_id, ttl) = (request.lock_id(), request.ttl());
        let channel = self.shared.requests.channel_number();
        let change = pin!(self.change(lock_id, request.hint(), Change::Extend(ttl)));
        let extended = request.bounded(change).await.unwrap_or_else(|| {
            self.shared.requests.replace_channel(channel);
            Err(error::timeout())
        });
        match extended.map_err(|error| named(error.with_lock_id(lock_id), "extend"))? {
            Ok(Changed { document, version, now }) => {
                let expires_at = now.expiry(ttl);
                let receipt = receipt(lock_id, document, version, expires_at);
                let extension = Extension::new(expires_at);
                Ok(ExtendOutcome::Extended(match receipt {
                    Some(receipt) => extension.with_receipt(receipt),
                    None => extension,
                }))
            }
            Err(reason) => Ok(ExtendOutcome::NotHeld(reason)),
        }
    }

    async fn is_locked(&self, key: &Key) -> Result<bool> {
        let found = self.read(key).await;
        let found = found.map_err(|error| named(error.with_key(key), "is_locked"))?;
        let Some(record) = found else { return Ok(false) };
        let (expires_at, now) = (record.lock.expires_at, self.shared.requests.now());
        if self.shared.cleanup.admits(expires_at, now) {
            self.clean_up(record);
        }
        Ok(is_live(expires_at, now))
    }

    async fn lookup_key(&self, key: &Key) -> Result<Option<StoredLock>> {
        let found = self.read(key).await;
        let found = found.map_err(|error| named(error.with_key(key), "lookup"))?;
        let now = self.shared.requests.now();
        Ok(found.map(|record| record.lock).filter(|lock| is_live(lock.expires_at, now)))
    }

    async fn lookup_id(&self, lock_id: &LockId) -> Result<Option<StoredLock>> {
        let found = self.find(*lock_id).await;
        let found = found.map_err(|error| named(error.with_lock_id(*lock_id), "lookup"))?;
        let now = self.shared.requests.now();
        let mut locks = found.into_iter().map(|record| record.lock);
        Ok(locks.find(|lock| is_live(lock.expires_at, now)))
    }

    async fn subscribe(&self, key: &Key) -> Option<Subscription> {
        self.shared.listener.subscribe(key).await
    }

    async fn watch(&self, key: &Key) -> Option<Subscription> {
        // Firestore reports the deletion of a document to waiters and holders alike.
        self.shared.listener.subscribe(key).await
    }

    fn admin(&self) -> Option<Arc<dyn Admin>> {
        Some(Arc::new(self.clone()))
    }
}

impl FirestoreBackend {
    async fn try_acquire(
        &self,
        request: &AcquireRequest,
        has_conflicted: &mut bool,
    ) -> Result<AcquireOutcome> {
        let (requests, key) = (&self.shared.requests, request.key());
        let [lock, counter] = self.shared.names.documents(key)?;
        let mut refused = None;
        for round in 0..ROUNDS {
            pause(round).await;
            let [found, number] = requests.read([&lock, &counter]).await?;
            let found = found.map(Record::read).transpose()?;
            if let Some(outcome) = self.answer(found.as_ref(), request, *has_conflicted).await? {
                return Ok(outcome);
            }
            let last = record::read_counter(number.as_ref())?;
            requests.approve_clock().await?;
            // The clock may have been corrected meanwhile, and by the new time the lock may be
            // live.
            if let Some(outcome) = self.refusal(found.as_ref(), request) {
                return Ok(outcome);
            }
            let versions =
                [number.and_then(|number| number.update_time), found.map(|found| found.version)];
            if let Some((before, error)) = refused.take()
                && before == versions
            {
                return Err(error);
            }
            let now = requests.now();
            let fence = self.shared.fences.next(last, now)?;
            let expires_at = now.expiry(request.ttl());
            let taken = StoredLock::new(key.clone(), request.lock_id(), fence)
                .acquired_at(now)
                .expires_at(expires_at)
                .held_by(request.holder().cloned());
            let writes = vec![
                requests::set(&counter, record::counter_fields(fence, key), versions[0]),
                requests::set(&lock, record::lock_fields(&taken), versions[1]),
            ];
            match requests.commit(writes).await {
                Ok(Commit::Done(committed)) => {
                    // All clocks of this machine may have stood still since the read; the time of
                    // the commit reveals that.
                    requests.known_clock().map_err(Error::after_effect)?;
                    fence.warn_near_the_end(key);
                    let version = committed.last_version();
                    return Ok(granted(fence, expires_at, request.lock_id(), lock, version));
                }
                Ok(Commit::Conflict(conflict)) => {
                    *has_conflicted = true;
                    refused = (!conflict.is_race).then_some((versions, conflict.error));
                }
                Err(error) if error.may_have_taken_effect() => {
                    return self.look_again(request, &lock).await.ok_or(error);
                }
                Err(error) => return Err(error),
            }
        }
        // Another client won every round, unless the last commit took effect despite its conflict.
        // If this read fails, the outcome is unknown.
        let [found] = requests.read([&lock]).await?;
        let found = found.map(Record::read).transpose()?;
        let outcome = self.answer(found.as_ref(), request, *has_conflicted).await?;
        Ok(outcome.unwrap_or(AcquireOutcome::Contended { expires_in: None }))
    }

    /// Reads the lock after the response to an acquire was lost. Returns `None` unless the lock was
    /// granted, because the commit may still be in progress.
    async fn look_again(&self, request: &AcquireRequest, lock: &str) -> Option<AcquireOutcome> {
        let [found] = self.shared.requests.read([lock]).await.ok()?;
        let found = Record::read(found?).ok()?;
        let outcome = self.answer(Some(&found), request, false).await.ok()?;
        outcome.filter(|outcome| matches!(outcome, AcquireOutcome::Acquired(_)))
    }

    /// Returns the outcome of an acquire for the record that was read, or `None` if the lock is
    /// free. A replay is granted only if the clock can be trusted.
    async fn answer(
        &self,
        found: Option<&Record>,
        request: &AcquireRequest,
        has_conflicted: bool,
    ) -> Result<Option<AcquireOutcome>> {
        let mut outcome = self.refusal(found, request);
        if matches!(outcome, Some(AcquireOutcome::Acquired(_))) {
            self.shared.requests.approve_clock().await.map_err(Error::after_effect)?;
            outcome = self.refusal(found, request);
        }
        Ok(match outcome {
            // The record of this request, expired by now: its commit took effect despite a
            // conflict.
            Some(AcquireOutcome::AlreadyUsed) if has_conflicted => {
                Some(AcquireOutcome::Contended { expires_in: Some(Duration::ZERO) })
            }
            outcome => outcome,
        })
    }

    /// Returns the outcome that a record implies for an acquire, or `None` if the lock is free.
    fn refusal(&self, found: Option<&Record>, request: &AcquireRequest) -> Option<AcquireOutcome> {
        let Record { name, version, lock } = found?;
        let now = self.shared.requests.now();
        match (lock.lock_id == request.lock_id(), is_live(lock.expires_at, now)) {
            (true, true) => {
                let (name, version) = (name.clone(), Some(*version));
                Some(granted(lock.token, lock.expires_at, lock.lock_id, name, version))
            }
            (true, false) => Some(AcquireOutcome::AlreadyUsed),
            (false, true) => {
                Some(AcquireOutcome::Contended { expires_in: Some(lock.expires_at.dead_in(now)) })
            }
            (false, false) => None,
        }
    }
}

fn deletion(record: &Record) -> api::Write {
    requests::delete(&record.name, record.version)
}

fn granted(
    fence: Fence,
    expires_at: Timestamp,
    lock_id: LockId,
    document: String,
    version: Option<Version>,
) -> AcquireOutcome {
    let lease = Lease::new(fence, expires_at);
    AcquireOutcome::Acquired(match receipt(lock_id, document, version, expires_at) {
        Some(receipt) => lease.with_receipt(receipt),
        None => lease,
    })
}

fn receipt(
    lock_id: LockId,
    document: String,
    version: Option<Version>,
    expires_at: Timestamp,
) -> Option<Receipt> {
    Some(Receipt::new(Held { lock_id, document, version: version?, expires_at }))
}
