//! The thread that owns the connection. Pending operations share a transaction, releases and
//! extends first. While another process writes, the thread waits in short slices, and after each
//! slice checks for new operations, dropped callers and deadlines.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rusqlite::{Connection, ErrorCode, TransactionBehavior};
use tokio::sync::oneshot;

use super::error;
use super::file::{LockFile, pause};
use super::listener::{Freed, SqliteListener};
use super::record::RowError;
use crate::common::error::{Error, ErrorCode as OurCode, Result};

/// How an operation may access the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    /// Without the write lock, so nothing may be written.
    Reading,
    /// With the write lock.
    Writing,
}

/// The kind of an operation, in the order in which they run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Never writes, so it never waits for other processes.
    Read,
    /// Releases and extends, which waiters and holders depend on.
    Urgent,
    /// Everything else.
    Write,
}

/// The result of an operation.
pub(super) struct Done<T> {
    pub(super) answer: T,
    /// The key that the operation released.
    pub(super) freed: Option<Freed>,
}

impl<T> Done<T> {
    /// Creates a result that releases no key.
    pub(super) fn of(answer: T) -> Self {
        Self { answer, freed: None }
    }
}

/// The handle of the worker thread, which ends when the handle is dropped.
#[derive(Debug)]
pub(super) struct Worker {
    queue: Arc<Queue>,
    timeout: Duration,
}

impl Worker {
    pub(super) fn start(
        file: LockFile,
        listener: Arc<SqliteListener>,
        timeout: Duration,
    ) -> Result<Self> {
        let queue = Arc::new(Queue::default());
        let serve = {
            let queue = Arc::clone(&queue);
            move || queue.serve(file, &listener)
        };
        let thread = std::thread::Builder::new().name("syncguard-sqlite".to_owned()).spawn(serve);
        thread.map_err(|cause| {
            let message = "cannot start a thread for the lock file";
            Error::new(OurCode::RateLimited, message).with_source(cause)
        })?;
        Ok(Self { queue, timeout })
    }

    /// Runs `work` on the worker thread and waits for the result. `work` may be called several
    /// times; it returns `None` if it must write but has no write access.
    ///
    /// # Cancel safety
    ///
    /// If you drop the future, the work does not run unless it has already started.
    pub(super) async fn call<T, Work>(&self, kind: Kind, work: Work) -> Result<T>
    where
        T: Send + 'static,
        Work: FnMut(&Connection, Access) -> Result<Option<Done<T>>, RowError> + Send + 'static,
    {
        let (reply, answer) = oneshot::channel();
        let give_up_at = self.give_up_at();
        let reply = Some(reply);
        let call = Call { kind, work, reply, result: None, freed: None, give_up_at };
        self.queue.push(Box::new(call));
        answer.await.unwrap_or_else(|_closed| Err(error::gone()))
    }

    /// Runs `work` on the worker thread and ignores the result. Needs no runtime.
    pub(super) fn send<Work>(&self, kind: Kind, work: Work)
    where
        Work: FnMut(&Connection, Access) -> Result<Option<Done<()>>, RowError> + Send + 'static,
    {
        let give_up_at = self.give_up_at();
        let call = Call { kind, work, reply: None, result: None, freed: None, give_up_at };
        self.queue.push(Box::new(call));
    }

    fn give_up_at(&self) -> Instant {
        /// In effect no limit, but small enough that the addition cannot overflow.
        const LONGEST: Duration = Duration::from_hours(24 * 365);
        Instant::now() + self.timeout.min(LONGEST)
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.queue.waiting().is_closed = true;
        self.queue.changed.notify_one();
    }
}

/// A pending operation, whatever its result type.
trait Job: Send {
    fn kind(&self) -> Kind;
    /// Returns whether the caller still waits for the result.
    fn is_wanted(&self) -> bool;
    fn give_up_at(&self) -> Instant;
    /// Runs the operation and returns whether it has a result.
    fn run(&mut self, db: &Connection, access: Access) -> rusqlite::Result<bool>;
    /// Takes the key that is free once the operation is committed.
    fn freed(&mut self) -> Option<Freed>;
    /// Sends the caller the result, or the error of the commit.
    fn settle(self: Box<Self>, committed: Result<()>);
}

struct Call<T, Work> {
    kind: Kind,
    work: Work,
    /// `None` if no caller waits for the result.
    reply: Option<oneshot::Sender<Result<T>>>,
    result: Option<Result<T>>,
    freed: Option<Freed>,
    give_up_at: Instant,
}

impl<T, Work> Job for Call<T, Work>
where
    T: Send,
    Work: FnMut(&Connection, Access) -> Result<Option<Done<T>>, RowError> + Send,
{
    fn kind(&self) -> Kind {
        self.kind
    }

    fn is_wanted(&self) -> bool {
        self.reply.as_ref().is_none_or(|reply| !reply.is_closed())
    }

    fn give_up_at(&self) -> Instant {
        self.give_up_at
    }

    fn run(&mut self, db: &Connection, access: Access) -> rusqlite::Result<bool> {
        match (self.work)(db, access) {
            Ok(Some(done)) => {
                self.result = Some(Ok(done.answer));
                self.freed = done.freed;
            }
            Ok(None) => self.result = None,
            Err(RowError::Refused(error)) => self.result = Some(Err(error)),
            Err(RowError::Sqlite(error)) => return Err(error),
        }
        Ok(self.result.is_some())
    }

    fn freed(&mut self) -> Option<Freed> {
        self.freed.take()
    }

    fn settle(self: Box<Self>, committed: Result<()>) {
        let Self { reply, result, .. } = *self;
        let result = committed.and_then(|()| result.unwrap_or_else(|| Err(error::gone())));
        if let Some(reply) = reply {
            // A caller that was dropped needs no result.
            drop(reply.send(result));
        }
    }
}

type Batch = Vec<Box<dyn Job>>;

#[derive(Default)]
struct Queue {
    waiting: Mutex<Waiting>,
    changed: Condvar,
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Queue").finish_non_exhaustive()
    }
}

/// Refuses the operations that no thread will run.
struct Ending<'a>(&'a Queue);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        let mut waiting = self.0.waiting();
        waiting.is_unserved = true;
        let jobs = std::mem::take(&mut waiting.jobs);
        drop(waiting);
        drop(jobs);
    }
}

#[derive(Default)]
struct Waiting {
    jobs: Batch,
    is_closed: bool,
    /// Whether the thread has ended, because it panicked.
    is_unserved: bool,
}

impl Queue {
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, job: Box<dyn Job>) {
        let mut waiting = self.waiting();
        // Otherwise it is dropped, and its caller gets an error.
        if !waiting.is_unserved {
            waiting.jobs.push(job);
            self.changed.notify_one();
        }
    }

    /// Moves the pending operations into the batch, with reads, releases and extends in front.
    fn take_into(&self, batch: &mut Batch) {
        batch.append(&mut self.waiting().jobs);
        // The sort is stable, so operations otherwise keep their order.
        batch.sort_by_key(|job| job.kind() == Kind::Write);
    }

    /// Waits for an operation. Returns `false` when the backend was dropped and none is left.
    fn wait(&self) -> bool {
        let is_idle = |waiting: &mut Waiting| waiting.jobs.is_empty() && !waiting.is_closed;
        let waiting = self.changed.wait_while(self.waiting(), is_idle);
        !waiting.unwrap_or_else(PoisonError::into_inner).jobs.is_empty()
    }

    fn serve(&self, mut file: LockFile, listener: &SqliteListener) {
        let _ending = Ending(self);
        while self.wait() {
            let mut batch = Batch::new();
            self.take_into(&mut batch);
            self.serve_batch(&mut file, listener, batch);
        }
    }

    fn serve_batch(&self, file: &mut LockFile, listener: &SqliteListener, mut batch: Batch) {
        loop {
            batch.retain(|job| job.is_wanted());
            let now = Instant::now();
            let late = batch.extract_if(.., |job| job.give_up_at() <= now);
            late.for_each(|job| job.settle(Err(error::busy())));
            let Some(give_up_at) = batch.iter().map(|job| job.give_up_at()).min() else { return };
            let db = match file.connection(give_up_at, || listener.watch_current_file()) {
                Ok(db) => db,
                // Only the operations with the earliest deadline have failed.
                Err(error) if error.code() == OurCode::NetworkTimeout => continue,
                Err(error) => return refuse(batch, &error),
            };
            read(db, &mut batch, |kind| kind == Kind::Read);
            if batch.is_empty() {
                return;
            }
            match commit(db, &mut batch) {
                Ok(()) => {
                    if !file.is_current() {
                        // The commit went to a file that is no longer at the path; run again in the
                        // new file.
                        continue;
                    }
                    let freed: Vec<Freed> =
                        batch.iter_mut().filter_map(|job| job.freed()).collect();
                    listener.notify(&freed);
                    return batch.into_iter().for_each(|job| job.settle(Ok(())));
                }
                Err(cause) if is_busy(&cause) => {
                    // An acquire that sees that the lock is held needs no write.
                    read(db, &mut batch, |_kind| true);
                    pause();
                    self.take_into(&mut batch);
                }
                // One operation may be the cause. Run each alone, so that only that one fails.
                Err(cause) if batch.len() > 1 && !error::is_disk_failure(&cause) => {
                    for job in batch {
                        self.serve_batch(file, listener, vec![job]);
                    }
                    return;
                }
                Err(cause) => return refuse(batch, &error::map(&cause)),
            }
        }
    }
}

/// Runs the operations for which reading is enough. One that fails stays in the batch, and runs
/// again in a transaction.
fn read(db: &Connection, batch: &mut Batch, is_asked: impl Fn(Kind) -> bool) {
    let served = batch.extract_if(.., |job| {
        is_asked(job.kind()) && job.run(db, Access::Reading).unwrap_or(false)
    });
    served.for_each(|job| job.settle(Ok(())));
}

/// Runs the batch in one transaction.
fn commit(db: &mut Connection, batch: &mut Batch) -> rusqlite::Result<()> {
    let transaction = db.transaction_with_behavior(TransactionBehavior::Immediate)?;
    for job in batch {
        job.run(&transaction, Access::Writing)?;
    }
    transaction.commit()
}

fn is_busy(cause: &rusqlite::Error) -> bool {
    let code = cause.sqlite_error_code();
    matches!(code, Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked))
}

fn refuse(batch: Batch, error: &Error) {
    for job in batch {
        job.settle(Err(error.clone()));
    }
}

#[cfg(all(test, unix))]
mod tests {
    use std::fs;
    use std::path::PathBuf;

    use super::*;

    /// Starts a worker in a folder of its own.
    fn start(name: &str) -> (PathBuf, Worker) {
        let folder = format!("syncguard-worker-{name}-{}", std::process::id());
        let folder = std::env::temp_dir().join(folder);
        fs::create_dir_all(&folder).expect("created");
        let path = folder.join("locks.db");
        let listener = Arc::new(SqliteListener::new(&path));
        let worker = Worker::start(LockFile::new(path), listener, Duration::from_secs(10));
        (folder, worker.expect("starts"))
    }

    #[tokio::test]
    async fn after_a_panic_every_operation_is_an_error() {
        let (folder, worker) = start("panic");
        for _ in 0..3 {
            let call = worker
                .call(Kind::Read, |_db, _access| -> Result<Option<Done<()>>, RowError> {
                    panic!("on purpose")
                });
            let answer = tokio::time::timeout(Duration::from_secs(20), call).await;
            assert_eq!(
                answer.expect("it does not hang").expect_err("gone").code(),
                OurCode::Internal
            );
        }
        fs::remove_dir_all(&folder).expect("removed");
    }

    #[tokio::test]
    async fn a_commit_to_a_replaced_file_is_repeated_in_the_new_file() {
        let (folder, worker) = start("replaced");
        let path = folder.join("locks.db");
        let mut rounds = 0;
        let work = move |db: &Connection, access: Access| {
            if access == Access::Reading {
                return Ok(None);
            }
            rounds += 1;
            db.execute("INSERT INTO syncguard_fences VALUES ('k', ?1)", [rounds])?;
            if rounds == 1 {
                // Deletes the file in the middle of the transaction.
                for end in ["", "-wal", "-shm"] {
                    drop(fs::remove_file(format!("{}{end}", path.display())));
                }
            }
            Ok(Some(Done::of(rounds)))
        };
        assert_eq!(worker.call(Kind::Write, work).await.expect("works"), 2);
        let stored = worker.call(Kind::Read, |db, _access| {
            let query = "SELECT fence FROM syncguard_fences WHERE key = 'k'";
            Ok(Some(Done::of(db.query_row(query, [], |row| row.get::<_, i64>(0))?)))
        });
        assert_eq!(stored.await.expect("works"), 2, "it is in the file at the path");
        fs::remove_dir_all(&folder).expect("removed");
    }
}
