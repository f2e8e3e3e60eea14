//! Locks in a Firestore database, shared with everybody who reaches it.
//!
//! * No transactions: plain strong reads, and one commit that demands that nothing has changed since.
//!   An acquire is two requests, a release or an extend by its guard is one.
//! * Every client's own clock decides, so it is compared with the server's all the time.
//! * Documents are those of the TypeScript implementation: the two exclude each other, and release,
//!   extend and look up each other's locks.
//!
//! See `docs/specs/firestore.md` for what can make fences go backwards here.

mod clock_check;
mod config;
mod error;
mod names;
mod record;
mod requests;
mod wake;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

pub use google_cloud_auth;
use googleapis_tonic_google_firestore_v1::google::firestore::v1 as api;
pub use tonic;

use crate::common::backoff::random_fraction;
use crate::common::cleanup::CleanupGate;
use crate::common::error::{Error, Result};
use crate::common::fence::{Fence, Fenced};
use crate::common::key::Key;
use crate::common::lock_id::LockId;
use crate::common::time::{Timestamp, is_live};
use crate::common::ttl::Ttl;
use crate::contract::LockBackend;
use crate::contract::advice::Advice;
use crate::contract::capabilities::{Capabilities, TimeAuthority};
use crate::contract::inspect::{Cursor, Inspection, Inspector, Page};
use crate::contract::outcome::{Absence, Acquire, Extend, Extension, Lease, Release};
use crate::contract::request::{AcquireRequest, ExtendRequest, Hint, Receipt, ReleaseRequest};
use crate::contract::stored_lock::StoredLock;
use crate::contract::wake::WakeUps;
pub use config::FirestoreConfig;
use names::Names;
use record::{Record, Version};
use requests::{Commit, Conflict, Requests};
use wake::Waker;

const NAME: &str = "firestore";

/// How often a change is tried while others change the same documents.
const ROUNDS: u32 = 6;

/// Locks in a Firestore database. Clones share the connection.
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
    shared: Arc<Shared>,
}

struct Shared {
    requests: Arc<Requests>,
    names: Names,
    waker: Waker,
    cleanup: CleanupGate,
    is_emulator: bool,
}

/// What a guard remembers, so that its lock can be changed without looking first.
struct Held {
    lock_id: LockId,
    document: String,
    version: Version,
    expires_at: Timestamp,
}

/// What is done to a lock that is held.
#[derive(Clone, Copy)]
enum Change {
    Release,
    Extend(Ttl),
}

/// A change that was made.
struct Changed {
    document: String,
    version: Option<Version>,
    now: Timestamp,
}

/// What came of a change.
enum Attempt {
    Done(Changed),
    Conflict(Conflict),
    /// The lock is dead.
    TooLate,
}

/// The lock of an id, and what must be deleted with it.
struct Resolved {
    lock: Result<Record, Absence>,
    debris: Vec<Record>,
}

impl FirestoreBackend {
    /// Connects to a database: reads from it, so that missing credentials and a wrong project are
    /// noticed now. A clock that is off is written to the log.
    ///
    /// # Cancel safety
    ///
    /// Dropped half-way, nothing is left behind.
    pub async fn connect(config: FirestoreConfig) -> Result<Self> {
        let names = config.names()?;
        let cleanup = CleanupGate::new(config.cleanup_in_is_locked);
        let is_emulator = config.emulator.is_some();
        let requests = Arc::new(Requests::new(config, names.clone())?);
        requests.touch().await.map_err(|error| named(error, "connect"))?;
        if requests.clock_error().is_some() {
            // The first answer was late, because the connection was made for it.
            requests.touch().await.map_err(|error| named(error, "connect"))?;
        }
        let waker = Waker::start(Arc::clone(&requests), names.clone());
        Ok(Self { shared: Arc::new(Shared { requests, names, waker, cleanup, is_emulator }) })
    }

    /// The lock of a key, dead or alive.
    async fn read(&self, key: &Key) -> Result<Option<Record>> {
        let [lock, _] = self.shared.names.documents(key)?;
        let [found] = self.shared.requests.read([&lock]).await?;
        found.map(Record::read).transpose()
    }

    /// All locks under an id, dead or alive.
    async fn find(&self, lock_id: LockId) -> Result<Vec<Record>> {
        let found = self.shared.requests.find(&lock_id).await?;
        let records: Vec<Record> = found.into_iter().map(Record::read).collect::<Result<_>>()?;
        if records.len() > 1 {
            tracing::warn!(
                documents = records.len(),
                "one lock id is in several documents of firestore; was a backup merged?"
            );
        }
        // Whatever was asked for: only what is ours is changed.
        Ok(records.into_iter().filter(|record| record.lock.lock_id == lock_id).collect())
    }

    /// Deletes a record that was found dead, on the side.
    fn clean_up(&self, record: Record) {
        let backend = self.clone();
        tokio::spawn(async move {
            let requests = &backend.shared.requests;
            // Best effort: what is left is left to the next acquire. By a clock that is off, what
            // looks dead may be alive.
            if requests.approve_clock().await.is_ok() {
                drop(requests.commit(vec![deletion(&record)]).await);
            }
        });
    }
}

fn named(error: Error, operation: &'static str) -> Error {
    error.with_operation(NAME, operation)
}

/// Waits before another round: nothing before the first, then longer each time, all of it jitter.
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

    async fn acquire(&self, request: &AcquireRequest) -> Result<Acquire> {
        let acquired = self.try_acquire(request).await;
        acquired.map_err(|error| named(error.with_key(request.key()), "acquire"))
    }

    async fn release(&self, request: &ReleaseRequest) -> Result<Release> {
        let lock_id = request.lock_id();
        let released = self.change(lock_id, request.hint(), Change::Release).await;
        match released.map_err(|error| named(error.with_lock_id(lock_id), "release"))? {
            Ok(_) => Ok(Release::Released),
            Err(absence) => Ok(Release::NotHeld(absence)),
        }
    }

    async fn extend(&self, request: &ExtendRequest) -> Result<Extend> {
        let (lock_id, ttl) = (request.lock_id(), request.ttl());
        let extended = self.change(lock_id, request.hint(), Change::Extend(ttl)).await;
        match extended.map_err(|error| named(error.with_lock_id(lock_id), "extend"))? {
            Ok(Changed { document, version, now }) => {
                let expires_at = now.expiry(ttl);
                let receipt = receipt(lock_id, document, version, expires_at);
                let extension = Extension::new(expires_at);
                Ok(Extend::Extended(match receipt {
                    Some(receipt) => extension.with_receipt(receipt),
                    None => extension,
                }))
            }
            Err(absence) => Ok(Extend::NotHeld(absence)),
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

    async fn wake_ups(&self, key: &Key) -> Option<WakeUps> {
        self.shared.waker.subscribe(key).await
    }

    fn inspector(&self) -> Option<Arc<dyn Inspector>> {
        Some(Arc::new(self.clone()))
    }
}

impl FirestoreBackend {
    async fn try_acquire(&self, request: &AcquireRequest) -> Result<Acquire> {
        let (requests, key) = (&self.shared.requests, request.key());
        let [lock, counter] = self.shared.names.documents(key)?;
        let mut refused = None;
        for round in 0..ROUNDS {
            pause(round).await;
            let read = requests.read([&lock, &counter]).await;
            // A conflict is no proof that a commit did not happen.
            let [found, number] =
                read.map_err(|error| if round > 0 { error.after_effect() } else { error })?;
            let found = found.map(Record::read).transpose()?;
            if let Some(outcome) = self.refusal(found.as_ref(), request) {
                // Our own record, dead by now, of a commit that was answered with a conflict.
                let is_late = round > 0 && matches!(outcome, Acquire::Spent);
                let late = Acquire::Contended { free_in: Some(Duration::ZERO) };
                return Ok(if is_late { late } else { outcome });
            }
            let fence = Fence::after(record::read_counter(number.as_ref())?)?;
            requests.approve_clock().await?;
            // It may have been mended meanwhile, and then the lock may be alive.
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
            let expires_at = now.expiry(request.ttl());
            let taken = StoredLock::new(key.clone(), request.lock_id(), fence, now, expires_at);
            let writes = vec![
                requests::set(&counter, record::counter_fields(fence, key), versions[0]),
                requests::set(&lock, record::lock_fields(&taken), versions[1]),
            ];
            match requests.commit(writes).await {
                Ok(Commit::Done(versions)) => {
                    fence.warn_near_the_end(key);
                    let version = versions.into_iter().next_back().flatten();
                    return Ok(granted(fence, expires_at, request.lock_id(), lock, version));
                }
                Ok(Commit::Conflict(conflict)) => {
                    refused = (!conflict.is_race).then_some((versions, conflict.error));
                }
                Err(error) if error.may_have_taken_effect() => {
                    return self.look_again(request, &lock).await.ok_or(error);
                }
                Err(error) => return Err(error),
            }
        }
        // Others were faster each time: so it is theirs.
        let looked = self.look_again(request, &lock).await;
        Ok(looked.unwrap_or(Acquire::Contended { free_in: None }))
    }

    /// The answer to an acquire was lost; what is there tells whether it was granted. If not, it may
    /// still be on its way.
    async fn look_again(&self, request: &AcquireRequest, lock: &str) -> Option<Acquire> {
        let [found] = self.shared.requests.read([lock]).await.ok()?;
        let found = Record::read(found?).ok()?;
        let outcome = self.refusal(Some(&found), request);
        outcome.filter(|outcome| matches!(outcome, Acquire::Acquired(_)))
    }

    /// What a record says to an acquire; `None` when the lock is free.
    fn refusal(&self, found: Option<&Record>, request: &AcquireRequest) -> Option<Acquire> {
        let Record { name, version, lock } = found?;
        let now = self.shared.requests.now();
        match (lock.lock_id == request.lock_id(), is_live(lock.expires_at, now)) {
            (true, true) => {
                let (name, version) = (name.clone(), Some(*version));
                Some(granted(lock.token, lock.expires_at, lock.lock_id, name, version))
            }
            (true, false) => Some(Acquire::Spent),
            (false, true) => {
                Some(Acquire::Contended { free_in: Some(lock.expires_at.dead_in(now)) })
            }
            (false, false) => None,
        }
    }

    /// Changes the lock that an id holds, whatever others do meanwhile.
    async fn change(
        &self,
        lock_id: LockId,
        hint: &Hint,
        change: Change,
    ) -> Result<Result<Changed, Absence>> {
        let held = hint.receipt.as_ref().and_then(Receipt::get::<Held>);
        let is_ours =
            |held: &&Held| held.lock_id == lock_id && self.shared.names.is_lock(&held.document);
        if let Some(held) = held.filter(is_ours) {
            let place = (held.document.as_str(), held.version, held.expires_at);
            if let Attempt::Done(changed) = self.commit(lock_id, place, &[], change).await? {
                return Ok(Ok(changed));
            }
            // It is not what the guard remembers.
        }
        let mut refused = None;
        for round in 0..ROUNDS {
            pause(round).await;
            let Resolved { lock, debris } = self.resolve(lock_id, hint).await?;
            let record = match lock {
                Ok(record) => record,
                Err(absence) => {
                    if !debris.is_empty() {
                        let deletions = debris.iter().map(deletion).collect();
                        // What cannot be deleted now is found again.
                        drop(self.shared.requests.commit(deletions).await);
                    }
                    return Ok(Err(absence));
                }
            };
            if let Some((before, error)) = refused.take()
                && before == record.version
            {
                return Err(error);
            }
            let place = (record.name.as_str(), record.version, record.lock.expires_at);
            match self.commit(lock_id, place, &debris, change).await? {
                Attempt::Done(changed) => return Ok(Ok(changed)),
                Attempt::Conflict(conflict) if !conflict.is_race && debris.is_empty() => {
                    refused = Some((record.version, conflict.error));
                }
                Attempt::Conflict(_) | Attempt::TooLate => {}
            }
        }
        Err(error::conflict())
    }

    /// Makes a change in one commit, if the lock is still alive.
    async fn commit(
        &self,
        lock_id: LockId,
        (document, version, expires_at): (&str, Version, Timestamp),
        debris: &[Record],
        change: Change,
    ) -> Result<Attempt> {
        let requests = &self.shared.requests;
        if matches!(change, Change::Extend(_)) {
            requests.approve_clock().await?;
        }
        let now = requests.now();
        if !is_live(expires_at, now) {
            return Ok(Attempt::TooLate);
        }
        let mut writes: Vec<api::Write> = debris.iter().map(deletion).collect();
        writes.push(change.write(document, version, now));
        let changed = |version| Changed { document: document.to_owned(), version, now };
        match requests.commit(writes).await {
            Ok(Commit::Done(versions)) => {
                Ok(Attempt::Done(changed(versions.into_iter().next_back().flatten())))
            }
            Ok(Commit::Conflict(conflict)) => Ok(Attempt::Conflict(conflict)),
            Err(error) if error.may_have_taken_effect() => {
                // The answer was lost; what is there tells whether it happened.
                let Ok([found]) = requests.read([document]).await else { return Err(error) };
                match found.map(Record::read).transpose() {
                    Ok(found) if change.is_seen_in(found.as_ref(), lock_id, now) => {
                        Ok(Attempt::Done(changed(found.map(|found| found.version))))
                    }
                    _ => Err(error),
                }
            }
            Err(error) => Err(error),
        }
    }

    /// Finds the lock of an id: where the hint says, or else by the id.
    async fn resolve(&self, lock_id: LockId, hint: &Hint) -> Result<Resolved> {
        if let Some(key) = &hint.key {
            let [lock, _] = self.shared.names.documents(key)?;
            let [found] = self.shared.requests.read([&lock]).await?;
            // What makes no sense there is not ours, unless the id says so.
            let found = found.and_then(|found| Record::read(found).ok());
            let is_ours = |record: &Record| {
                let is_live = is_live(record.lock.expires_at, self.shared.requests.now());
                record.lock.lock_id == lock_id && is_live
            };
            if let Some(record) = found.filter(is_ours) {
                return Ok(Resolved { lock: Ok(record), debris: Vec::new() });
            }
        }
        let found = self.find(lock_id).await?;
        let now = self.shared.requests.now();
        let is_single = found.len() == 1;
        let (mut live, dead): (Vec<Record>, Vec<Record>) =
            found.into_iter().partition(|record| is_live(record.lock.expires_at, now));
        let lock = match (live.pop(), dead.is_empty()) {
            (Some(record), _) if live.is_empty() => Ok(record),
            // Which of them is meant nobody can know.
            (Some(_), _) => Err(Absence::Unknown),
            (None, true) => Err(Absence::NotFound),
            (None, false) => Err(Absence::Expired),
        };
        // A dead record alone stays, so that the next answer is the same.
        Ok(Resolved { lock, debris: if is_single { Vec::new() } else { dead } })
    }
}

impl Change {
    fn write(self, document: &str, version: Version, now: Timestamp) -> api::Write {
        match self {
            Self::Release => requests::delete(document, version),
            Self::Extend(ttl) => {
                requests::update(document, record::expiry_field(now.expiry(ttl)), version)
            }
        }
    }

    /// Whether what is there is what this leaves behind.
    fn is_seen_in(self, found: Option<&Record>, lock_id: LockId, now: Timestamp) -> bool {
        match (self, found) {
            (Self::Release, found) => found.is_none(),
            (Self::Extend(ttl), Some(Record { lock, .. })) => {
                lock.lock_id == lock_id && lock.expires_at == now.expiry(ttl)
            }
            (Self::Extend(_), None) => false,
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
) -> Acquire {
    let lease = Lease::new(fence, expires_at);
    Acquire::Acquired(match receipt(lock_id, document, version, expires_at) {
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

impl Inspector for FirestoreBackend {
    fn list<'a>(&'a self, after: Option<&'a Cursor>) -> Inspection<'a, Page> {
        let after = after.map_or("", Cursor::place);
        Box::pin(async move {
            let listed = self.shared.requests.list(after).await;
            let (documents, next) = listed.map_err(|error| named(error, "list"))?;
            let now = self.shared.requests.now();
            // A document that makes no sense is no lock; the operations on its key say so.
            let records = documents.into_iter().filter_map(|document| Record::read(document).ok());
            let locks = records.map(|record| record.lock);
            let live = locks.filter(|lock| is_live(lock.expires_at, now)).collect();
            Ok(Page::new(live, (!next.is_empty()).then(|| Cursor::new(next))))
        })
    }

    fn advice(&self) -> Inspection<'_, Vec<Advice>> {
        Box::pin(async move {
            self.shared.requests.touch().await.map_err(|error| named(error, "advice"))?;
            let mut found = Vec::new();
            if self.shared.is_emulator {
                found.push(Advice::new(
                    "emulator",
                    "this is an emulator: its locks and fences end with it",
                ));
            }
            if let Some(worst) = self.shared.requests.clock_error() {
                found.push(Advice::new(
                    "clock",
                    format!(
                        "the clock of this machine may be {} ms off firestore's: locks are granted by \
                         it; synchronize it (NTP)",
                        worst.as_millis()
                    ),
                ));
            }
            Ok(found)
        })
    }
}
