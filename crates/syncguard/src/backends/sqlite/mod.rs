//! Locks in a file, shared by the processes of one machine. There is no server.
//!
//! * One thread owns the file. Concurrent operations share a transaction, so many locks cost one
//!   write to the disk; releases and extends run first.
//! * An operation returns only after its transaction is on the disk (`synchronous=FULL`), so fences
//!   survive whatever the disk survives.
//! * Notifications reach waiters in every process through a small file next to the lock file.
//! * The file must be on a local disk: on a network file system, locks are not reliable.
//!
//! [The guide](https://github.com/syncguard/syncguard/blob/main/docs/guide/sqlite.md)
//! describes connection URLs, permissions, and what can make fences go backwards.

mod acquire_any;
mod admin;
mod config;
mod error;
mod fenced;
mod file;
mod file_system;
mod listener;
mod record;
mod waiters;
mod worker;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rusqlite::Connection;

use crate::common::cleanup::CleanupGate;
use crate::common::error::{Cause, Error, Result};
use crate::common::fence::Fenced;
use crate::common::fence_source::FenceSource;
use crate::common::holder::BreakNote;
use crate::common::key::Key;
use crate::common::lock_id::LockId;
use crate::contract::LockBackend;
use crate::contract::admin::Admin;
use crate::contract::capabilities::{Capabilities, TimeAuthority};
use crate::contract::notifier::Subscription;
use crate::contract::outcome::{AcquireAnyOutcome, AcquireOutcome, ExtendOutcome, ReleaseOutcome};
use crate::contract::request::{AcquireAnyRequest, AcquireRequest, ExtendRequest, ReleaseRequest};
use crate::contract::stored_lock::StoredLock;
pub use config::SqliteConfig;
pub use fenced::FencedTable;
use file::LockFile;
use listener::{Freed, SqliteListener};
use record::RowError;
pub use rusqlite;
use worker::{Access, Done, Kind, Worker};

/// A backend that keeps locks in a local file. Clones share its thread.
///
/// ```
/// use syncguard::sqlite::SqliteConfig;
/// use syncguard::{Locker, SqliteBackend};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> syncguard::Result<()> {
/// # let path = std::env::temp_dir().join(format!("syncguard-doc-{}.db", std::process::id()));
/// let locker = Locker::new(SqliteBackend::open(SqliteConfig::new(&path)).await?)?;
/// let guard = locker.lock("nightly-report").await?;
/// println!("working with fence {}", guard.fence());
/// # drop(guard); locker.shutdown().await
/// # }
/// ```
#[derive(Clone)]
pub struct SqliteBackend {
    shared: Arc<SqliteInner>,
}

struct SqliteInner {
    worker: Worker,
    listener: Arc<SqliteListener>,
    path: PathBuf,
    cleanup: CleanupGate,
    fences: FenceSource,
}

impl Drop for SqliteInner {
    fn drop(&mut self) {
        self.listener.close();
    }
}

/// Returns the path from the root: the file stays the same if the process changes its directory.
fn whole_path(path: &Path) -> Result<PathBuf> {
    if path == Path::new(":memory:") {
        let message = "processes cannot share locks in memory; use a file, or the memory backend";
        return Err(Error::invalid(message));
    }
    let whole = std::path::absolute(path);
    whole.map_err(|cause| {
        Error::invalid("the path of the lock file is empty, or the current directory is gone")
            .with_source(Cause(cause.kind().to_string()))
    })
}

impl SqliteBackend {
    /// Opens the file, and creates it if it does not exist.
    ///
    /// # Cancel safety
    ///
    /// If you drop the future before it completes, the file may have been created.
    pub async fn open(config: SqliteConfig) -> Result<Self> {
        if config.busy_timeout.is_zero() {
            return Err(Error::invalid("busy_timeout must be greater than zero"));
        }
        let path = whole_path(&config.path)?;
        let listener = Arc::new(SqliteListener::new(&path));
        let file = LockFile::new(path.clone());
        let worker = Worker::start(file, Arc::clone(&listener), config.busy_timeout)?;
        let cleanup = CleanupGate::new(config.cleanup_in_is_locked);
        let fences = config.fences;
        let shared = SqliteInner { worker, listener, path, cleanup, fences };
        let backend = Self { shared: Arc::new(shared) };
        backend.read("open", |_db| Ok(())).await?;
        for finding in file_system::findings(&backend.shared.path) {
            tracing::warn!(subject = finding.subject(), "{finding}");
        }
        Ok(backend)
    }

    /// Runs an operation that only reads.
    async fn read<T, Work>(&self, operation: &'static str, work: Work) -> Result<T>
    where
        T: Send + 'static,
        Work: Fn(&Connection) -> Result<T, RowError> + Send + 'static,
    {
        let work = move |db: &Connection, _access: Access| Ok(Some(Done::of(work(db)?)));
        let answer = self.shared.worker.call(Kind::Read, work).await;
        answer.map_err(|error| error.with_operation(NAME, operation))
    }

    /// Runs an operation that writes, in a transaction.
    async fn write<T, Work>(&self, operation: &'static str, kind: Kind, work: Work) -> Result<T>
    where
        T: Send + 'static,
        Work: Fn(&Connection) -> Result<Done<T>, RowError> + Send + 'static,
    {
        let work = move |db: &Connection, access: Access| match access {
            Access::Reading => Ok(None),
            Access::Writing => work(db).map(Some),
        };
        let answer = self.shared.worker.call(kind, work).await;
        answer.map_err(|error| error.with_operation(NAME, operation))
    }
}

const NAME: &str = "sqlite";

impl fmt::Debug for SqliteBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqliteBackend").field("path", &self.shared.path).finish_non_exhaustive()
    }
}

impl LockBackend for SqliteBackend {
    type Fencing = Fenced;

    fn capabilities(&self) -> Capabilities {
        // The worker does not start an acquire whose caller was dropped, and an acquire that has
        // started ends before the undo runs.
        Capabilities::new::<Fenced>(NAME, TimeAuthority::Server).with_final_undo()
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<AcquireOutcome> {
        let (asked, fences) = (request.clone(), self.shared.fences);
        let work = move |db: &Connection, access: Access| match access {
            Access::Reading => Ok(record::try_without_writing(db, &asked)?.map(Done::of)),
            Access::Writing => record::acquire(db, &asked, fences).map(Done::of).map(Some),
        };
        let outcome = self.shared.worker.call(Kind::Write, work).await;
        let outcome = outcome
            .map_err(|error| error.with_key(request.key()).with_operation(NAME, "acquire"))?;
        if let AcquireOutcome::Acquired(lease) = &outcome {
            lease.fence().warn_near_the_end(request.key());
        }
        Ok(outcome)
    }

    async fn acquire_any(&self, request: &AcquireAnyRequest) -> Result<AcquireAnyOutcome> {
        let (asked, fences) = (request.clone(), self.shared.fences);
        let work = move |db: &Connection, access: Access| match access {
            Access::Reading => Ok(acquire_any::try_without_writing(db, &asked)?.map(Done::of)),
            Access::Writing => acquire_any::acquire(db, &asked, fences).map(Done::of).map(Some),
        };
        let outcome = self.shared.worker.call(Kind::Write, work).await;
        let outcome = outcome.map_err(|error| error.with_operation(NAME, "acquire"))?;
        if let AcquireAnyOutcome::Acquired { key, lease } = &outcome {
            lease.fence().warn_near_the_end(key);
        }
        Ok(outcome)
    }

    async fn release(&self, request: &ReleaseRequest) -> Result<ReleaseOutcome> {
        let (lock_id, asked) = (request.lock_id(), request.clone());
        let released = self.write("release", Kind::Urgent, move |db| {
            let (answer, freed) = record::release(db, &asked)?;
            let holder_age = asked.holder_age();
            let freed = freed.map(|key| Freed { key, holder_age });
            Ok(Done { answer, freed })
        });
        released.await.map_err(|error| error.with_lock_id(lock_id))
    }

    async fn extend(&self, request: &ExtendRequest) -> Result<ExtendOutcome> {
        let (lock_id, asked) = (request.lock_id(), request.clone());
        let work = move |db: &Connection| record::extend(db, &asked).map(Done::of);
        let extended = self.write("extend", Kind::Urgent, work).await;
        extended.map_err(|error| error.with_lock_id(lock_id))
    }

    async fn is_locked(&self, key: &Key) -> Result<bool> {
        let asked = key.clone();
        let found = self.read("is_locked", move |db| record::is_locked(db, &asked)).await;
        let (is_live, dead) = found.map_err(|error| error.with_key(key))?;
        if let Some((dead, now)) = dead
            && self.shared.cleanup.admits(dead.expires_at, now)
        {
            // In the background and best effort: the next acquire replaces a row that is left.
            self.shared.worker.send(Kind::Write, move |db, access| match access {
                Access::Reading => Ok(None),
                Access::Writing => record::clean_up(db, dead.lock_id).map(Done::of).map(Some),
            });
        }
        Ok(is_live)
    }

    async fn lookup_key(&self, key: &Key) -> Result<Option<StoredLock>> {
        let asked = key.clone();
        let found = self.read("lookup", move |db| record::lookup_key(db, &asked)).await;
        found.map_err(|error| error.with_key(key))
    }

    async fn lookup_id(&self, lock_id: &LockId) -> Result<Option<StoredLock>> {
        let asked = *lock_id;
        let found = self.read("lookup", move |db| record::lookup_id(db, asked)).await;
        found.map_err(|error| error.with_lock_id(*lock_id))
    }

    async fn subscribe(&self, key: &Key) -> Option<Subscription> {
        Some(self.shared.listener.subscribe(key))
    }

    async fn watch(&self, key: &Key) -> Option<Subscription> {
        Some(self.shared.listener.watch(key))
    }

    async fn waiters(&self, key: &Key) -> Option<u32> {
        self.shared.listener.waiters(key)
    }

    async fn break_note(&self, lock_id: &LockId) -> Option<BreakNote> {
        let lock_id = lock_id.hash_id();
        let found = self.read("break_note", move |db| record::break_note(db, lock_id));
        found.await.ok().flatten()
    }

    fn admin(&self) -> Option<Arc<dyn Admin>> {
        Some(Arc::new(self.clone()))
    }
}
