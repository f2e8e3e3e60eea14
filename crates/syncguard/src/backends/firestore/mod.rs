//! Locks in a Firestore database, shared with everybody who reaches it.
//!
//! * No transactions: plain strong reads, and one commit that demands that nothing has changed since.
//!   An acquire is two requests, a release or an extend by its guard is one.
//! * Every client's own clock decides, so it is compared with the server's all the time.
//! * Documents are those of the TypeScript implementation: the two exclude each other, and release,
//!   extend and look up each other's locks.
//!
//! See `docs/specs/firestore.md` for what can make fences go backwards here.

mod admin;
mod change;
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
use crate::contract::LockBackend;
use crate::contract::capabilities::{Capabilities, TimeAuthority};
use crate::contract::inspect::Inspector;
use crate::contract::outcome::{Acquire, Extend, Extension, Lease, Release};
use crate::contract::request::{AcquireRequest, ExtendRequest, Receipt, ReleaseRequest};
use crate::contract::stored_lock::StoredLock;
use crate::contract::wake::WakeUps;
use change::{Change, Changed};
pub use config::FirestoreConfig;
use names::Names;
use record::{Record, Version};
use requests::{Commit, Requests};
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
        let mut has_conflicted = false;
        let acquired = self.try_acquire(request, &mut has_conflicted).await;
        acquired.map_err(|error| {
            // A conflict is no proof that a commit did not happen.
            let error = if has_conflicted { error.after_effect() } else { error };
            named(error.with_key(request.key()), "acquire")
        })
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
        let channel = self.shared.requests.channel_number();
        let change = Box::pin(self.change(lock_id, request.hint(), Change::Extend(ttl)));
        let extended = request.bounded(change).await.unwrap_or_else(|| {
            self.shared.requests.replace_channel(channel);
            Err(error::timeout())
        });
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
    async fn try_acquire(
        &self,
        request: &AcquireRequest,
        has_conflicted: &mut bool,
    ) -> Result<Acquire> {
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
                Ok(Commit::Done(committed)) => {
                    // The commit has a time too: all clocks here may have stood still since the read.
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
        // Others were faster each time, unless the last conflict was none. Who cannot look does not
        // know.
        let [found] = requests.read([&lock]).await?;
        let found = found.map(Record::read).transpose()?;
        let outcome = self.answer(found.as_ref(), request, *has_conflicted).await?;
        Ok(outcome.unwrap_or(Acquire::Contended { free_in: None }))
    }

    /// The answer to an acquire was lost; what is there tells whether it was granted. If not, it may
    /// still be on its way.
    async fn look_again(&self, request: &AcquireRequest, lock: &str) -> Option<Acquire> {
        let [found] = self.shared.requests.read([lock]).await.ok()?;
        let found = Record::read(found?).ok()?;
        let outcome = self.answer(Some(&found), request, false).await.ok()?;
        outcome.filter(|outcome| matches!(outcome, Acquire::Acquired(_)))
    }

    /// What was read says to an acquire; `None` when the lock is free. What was granted before is
    /// granted again only by a clock that can be trusted.
    async fn answer(
        &self,
        found: Option<&Record>,
        request: &AcquireRequest,
        has_conflicted: bool,
    ) -> Result<Option<Acquire>> {
        let mut outcome = self.refusal(found, request);
        if matches!(outcome, Some(Acquire::Acquired(_))) {
            self.shared.requests.approve_clock().await.map_err(Error::after_effect)?;
            outcome = self.refusal(found, request);
        }
        Ok(match outcome {
            // Our own record, dead by now, of a commit that was answered with a conflict.
            Some(Acquire::Spent) if has_conflicted => {
                Some(Acquire::Contended { free_in: Some(Duration::ZERO) })
            }
            outcome => outcome,
        })
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
