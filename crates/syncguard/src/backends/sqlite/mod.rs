//! Locks in a file, shared by the processes of one machine. No server.
//!
//! * One thread owns the file. What tasks ask at the same time shares a transaction, so many locks
//!   cost one write to the disk; releases go first.
//! * Every answer is on the disk before it is given (`synchronous=FULL`); fences survive whatever the
//!   disk survives.
//! * Wake-ups reach waiters in every process, by a small file beside the locks.
//! * The file must be on a disk of this machine: on a network file system locks are not reliable.
//!
//! See `docs/specs/sqlite.md` for what can make fences go backwards here.

mod config;
mod error;
mod file;
mod file_system;
mod rows;
mod wake;
mod worker;

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use rusqlite::Connection;

use crate::common::cleanup::CleanupGate;
use crate::common::error::{Error, Result};
use crate::common::fence::Fenced;
use crate::common::key::Key;
use crate::common::lock_id::LockId;
use crate::contract::LockBackend;
use crate::contract::advice::Advice;
use crate::contract::capabilities::{Capabilities, TimeAuthority};
use crate::contract::inspect::{Cursor, Inspection, Inspector, Page};
use crate::contract::outcome::{Acquire, Extend, Release};
use crate::contract::request::{AcquireRequest, ExtendRequest, ReleaseRequest};
use crate::contract::stored_lock::StoredLock;
use crate::contract::wake::WakeUps;
pub use config::SqliteConfig;
use file::LockFile;
use rows::Trouble;
use wake::Waker;
use worker::{Access, Done, Kind, Worker};

/// Locks in a file of this machine. Clones share its thread.
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
    shared: Arc<Shared>,
}

struct Shared {
    worker: Worker,
    waker: Arc<Waker>,
    path: PathBuf,
    cleanup: CleanupGate,
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.waker.close();
    }
}

impl SqliteBackend {
    /// Opens the file, and creates it when it is not there.
    ///
    /// # Cancel safety
    ///
    /// Dropped half-way, the file may have been created.
    pub async fn open(config: SqliteConfig) -> Result<Self> {
        if config.busy_timeout.is_zero() {
            return Err(Error::invalid("busy_timeout must be positive"));
        }
        let waker = Arc::new(Waker::new(&config.path));
        let file = LockFile::new(config.path.clone());
        let worker = Worker::start(file, Arc::clone(&waker), config.busy_timeout)?;
        let cleanup = CleanupGate::new(config.cleanup_in_is_locked);
        let shared = Shared { worker, waker, path: config.path, cleanup };
        let backend = Self { shared: Arc::new(shared) };
        backend.read("open", |_db| Ok(())).await?;
        for advice in file_system::advice(&backend.shared.path) {
            tracing::warn!(subject = advice.subject(), "{advice}");
        }
        Ok(backend)
    }

    /// Asks something that needs no writing.
    async fn read<T, Work>(&self, operation: &'static str, work: Work) -> Result<T>
    where
        T: Send + 'static,
        Work: Fn(&Connection) -> Result<T, Trouble> + Send + 'static,
    {
        let work = move |db: &Connection, _access: Access| Ok(Some(Done::of(work(db)?)));
        let answer = self.shared.worker.call(Kind::Read, work).await;
        answer.map_err(|error| error.with_operation(NAME, operation))
    }

    /// Changes something, in a transaction.
    async fn write<T, Work>(&self, operation: &'static str, kind: Kind, work: Work) -> Result<T>
    where
        T: Send + 'static,
        Work: Fn(&Connection) -> Result<Done<T>, Trouble> + Send + 'static,
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
        // An acquire whose caller has gone is not begun any more, and one that has begun is done
        // before an undo has its turn.
        Capabilities::new::<Fenced>(NAME, TimeAuthority::Server).with_final_undo()
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Acquire> {
        let asked = request.clone();
        let work = move |db: &Connection, access: Access| match access {
            Access::Reading => Ok(rows::try_without_writing(db, &asked)?.map(Done::of)),
            Access::Writing => rows::acquire(db, &asked).map(Done::of).map(Some),
        };
        let outcome = self.shared.worker.call(Kind::Write, work).await;
        let outcome = outcome
            .map_err(|error| error.with_key(request.key()).with_operation(NAME, "acquire"))?;
        if let Acquire::Acquired(lease) = &outcome {
            lease.fence().warn_near_the_end(request.key());
        }
        Ok(outcome)
    }

    async fn release(&self, request: &ReleaseRequest) -> Result<Release> {
        let (lock_id, asked) = (request.lock_id(), request.clone());
        let released = self.write("release", Kind::Urgent, move |db| {
            let (answer, freed) = rows::release(db, &asked)?;
            Ok(Done { answer, freed })
        });
        released.await.map_err(|error| error.with_lock_id(lock_id))
    }

    async fn extend(&self, request: &ExtendRequest) -> Result<Extend> {
        let (lock_id, asked) = (request.lock_id(), request.clone());
        let work = move |db: &Connection| rows::extend(db, &asked).map(Done::of);
        let extended = self.write("extend", Kind::Urgent, work).await;
        extended.map_err(|error| error.with_lock_id(lock_id))
    }

    async fn is_locked(&self, key: &Key) -> Result<bool> {
        let asked = key.clone();
        let found = self.read("is_locked", move |db| rows::is_locked(db, &asked)).await;
        let (is_live, dead) = found.map_err(|error| error.with_key(key))?;
        if let Some((dead, now)) = dead
            && self.shared.cleanup.admits(dead.expires_at, now)
        {
            // On the side, and best effort: what is left is left to the next acquire.
            self.shared.worker.send(Kind::Write, move |db, access| match access {
                Access::Reading => Ok(None),
                Access::Writing => rows::clean_up(db, dead.lock_id).map(Done::of).map(Some),
            });
        }
        Ok(is_live)
    }

    async fn lookup_key(&self, key: &Key) -> Result<Option<StoredLock>> {
        let asked = key.clone();
        let found = self.read("lookup", move |db| rows::lookup_key(db, &asked)).await;
        found.map_err(|error| error.with_key(key))
    }

    async fn lookup_id(&self, lock_id: &LockId) -> Result<Option<StoredLock>> {
        let asked = *lock_id;
        let found = self.read("lookup", move |db| rows::lookup_id(db, asked)).await;
        found.map_err(|error| error.with_lock_id(*lock_id))
    }

    async fn wake_ups(&self, key: &Key) -> Option<WakeUps> {
        Some(self.shared.waker.subscribe(key))
    }

    fn inspector(&self) -> Option<Arc<dyn Inspector>> {
        Some(Arc::new(self.clone()))
    }
}

impl Inspector for SqliteBackend {
    fn list<'a>(&'a self, after: Option<&'a Cursor>) -> Inspection<'a, Page> {
        let after = after.map_or_else(String::new, |cursor| cursor.place().to_owned());
        Box::pin(async move {
            let (locks, next) = self.read("list", move |db| rows::list(db, &after)).await?;
            Ok(Page::new(locks, next.map(Cursor::new)))
        })
    }

    fn advice(&self) -> Inspection<'_, Vec<Advice>> {
        let found = file_system::advice(&self.shared.path);
        Box::pin(async move { Ok(found) })
    }
}
