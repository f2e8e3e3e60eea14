//! The one thread that owns the connection. What was asked meanwhile shares a transaction, releases
//! first; while another process writes, it waits in short slices and looks at each whether somebody
//! has given up or a release has come.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rusqlite::{Connection, ErrorCode, TransactionBehavior};
use tokio::sync::oneshot;

use super::error;
use super::file::{LockFile, pause};
use super::rows::Trouble;
use super::wake::Waker;
use crate::common::error::{Error, ErrorCode as OurCode, Result};
use crate::common::key::Key;

/// How an operation looks at the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    /// Nothing may be written: another process is writing.
    Reading,
    /// The file is ours for the moment.
    Writing,
}

/// What kind of operation it is, in the order of their turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// It never writes, so it waits for nobody.
    Read,
    /// Releases, and extends: somebody waits for them or depends on them.
    Urgent,
    /// Everything else.
    Write,
}

/// What an operation came to.
pub(super) struct Done<T> {
    pub(super) answer: T,
    /// The key that is free now.
    pub(super) freed: Option<Key>,
}

impl<T> Done<T> {
    /// An answer that frees no key.
    pub(super) fn of(answer: T) -> Self {
        Self { answer, freed: None }
    }
}

/// The handle of the worker; the thread ends with it.
#[derive(Debug)]
pub(super) struct Worker {
    queue: Arc<Queue>,
    patience: Duration,
}

impl Worker {
    pub(super) fn start(file: LockFile, waker: Arc<Waker>, patience: Duration) -> Result<Self> {
        let queue = Arc::new(Queue::default());
        let serve = {
            let queue = Arc::clone(&queue);
            move || queue.serve(file, &waker)
        };
        let thread = std::thread::Builder::new().name("syncguard-sqlite".to_owned()).spawn(serve);
        thread.map_err(|cause| {
            let message = "no thread could be started for the lock file";
            Error::new(OurCode::RateLimited, message).with_source(cause)
        })?;
        Ok(Self { queue, patience })
    }

    /// Lets the worker do something and waits for the answer. `work` may be asked several times; it
    /// answers `None` when it has to write and may not.
    ///
    /// # Cancel safety
    ///
    /// Dropped, it does not happen any more unless it is happening already.
    pub(super) async fn call<T, Work>(&self, kind: Kind, work: Work) -> Result<T>
    where
        T: Send + 'static,
        Work: FnMut(&Connection, Access) -> Result<Option<Done<T>>, Trouble> + Send + 'static,
    {
        let (reply, answer) = oneshot::channel();
        let give_up_at = self.give_up_at();
        let reply = Some(reply);
        let call = Call { kind, work, reply, result: None, freed: None, give_up_at };
        self.queue.push(Box::new(call));
        answer.await.unwrap_or_else(|_closed| Err(error::gone()))
    }

    /// Lets the worker do something whose outcome does not matter. It needs no runtime.
    pub(super) fn send<Work>(&self, kind: Kind, work: Work)
    where
        Work: FnMut(&Connection, Access) -> Result<Option<Done<()>>, Trouble> + Send + 'static,
    {
        let give_up_at = self.give_up_at();
        let call = Call { kind, work, reply: None, result: None, freed: None, give_up_at };
        self.queue.push(Box::new(call));
    }

    fn give_up_at(&self) -> Instant {
        /// As good as no limit.
        const LONGEST: Duration = Duration::from_hours(24 * 365);
        Instant::now() + self.patience.min(LONGEST)
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.queue.waiting().is_closed = true;
        self.queue.changed.notify_one();
    }
}

/// Something to do, whatever it answers.
trait Job: Send {
    fn kind(&self) -> Kind;
    /// Whether somebody still waits for the answer.
    fn is_wanted(&self) -> bool;
    fn give_up_at(&self) -> Instant;
    /// Does it, and says whether there is an answer.
    fn run(&mut self, db: &Connection, access: Access) -> rusqlite::Result<bool>;
    /// The key that is free once this is committed.
    fn freed(&mut self) -> Option<Key>;
    /// Answers: what it came to, or why it did not.
    fn settle(self: Box<Self>, committed: Result<()>);
}

struct Call<T, Work> {
    kind: Kind,
    work: Work,
    /// None where nobody waits for the outcome.
    reply: Option<oneshot::Sender<Result<T>>>,
    result: Option<Result<T>>,
    freed: Option<Key>,
    give_up_at: Instant,
}

impl<T, Work> Job for Call<T, Work>
where
    T: Send,
    Work: FnMut(&Connection, Access) -> Result<Option<Done<T>>, Trouble> + Send,
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
            Err(Trouble::Refused(error)) => self.result = Some(Err(error)),
            Err(Trouble::Sqlite(error)) => return Err(error),
        }
        Ok(self.result.is_some())
    }

    fn freed(&mut self) -> Option<Key> {
        self.freed.take()
    }

    fn settle(self: Box<Self>, committed: Result<()>) {
        let Self { reply, result, .. } = *self;
        let result = committed.and_then(|()| result.unwrap_or_else(|| Err(error::gone())));
        if let Some(reply) = reply {
            // Whoever has gone needs no answer.
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

#[derive(Default)]
struct Waiting {
    jobs: Batch,
    is_closed: bool,
}

impl Queue {
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, job: Box<dyn Job>) {
        self.waiting().jobs.push(job);
        self.changed.notify_one();
    }

    /// Puts what has come into the batch, releases before everything else.
    fn take_into(&self, batch: &mut Batch) {
        batch.append(&mut self.waiting().jobs);
        // Stable: what came first of its kind stays first.
        batch.sort_by_key(|job| job.kind() == Kind::Write);
    }

    /// Waits for something to do; `false` when the backend is gone and nothing is left.
    fn wait(&self) -> bool {
        let is_idle = |waiting: &mut Waiting| waiting.jobs.is_empty() && !waiting.is_closed;
        let waiting = self.changed.wait_while(self.waiting(), is_idle);
        !waiting.unwrap_or_else(PoisonError::into_inner).jobs.is_empty()
    }

    fn serve(&self, mut file: LockFile, waker: &Waker) {
        while self.wait() {
            let mut batch = Batch::new();
            self.take_into(&mut batch);
            self.serve_batch(&mut file, waker, batch);
        }
    }

    fn serve_batch(&self, file: &mut LockFile, waker: &Waker, mut batch: Batch) {
        loop {
            batch.retain(|job| job.is_wanted());
            let now = Instant::now();
            let late = batch.extract_if(.., |job| job.give_up_at() <= now);
            late.for_each(|job| job.settle(Err(error::busy())));
            let Some(give_up_at) = batch.iter().map(|job| job.give_up_at()).min() else { return };
            let db = match file.connection(give_up_at) {
                Ok(db) => db,
                // Some have more patience than others.
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
                        // In a file that is no longer at the path: once more, in the other one.
                        continue;
                    }
                    let freed: Vec<Key> = batch.iter_mut().filter_map(|job| job.freed()).collect();
                    waker.tell(&freed);
                    return batch.into_iter().for_each(|job| job.settle(Ok(())));
                }
                Err(cause) if is_busy(&cause) => {
                    // An acquire that sees the lock held needs no more than that.
                    read(db, &mut batch, |_kind| true);
                    pause();
                    self.take_into(&mut batch);
                }
                // One of them may be the reason; alone, it fails alone.
                Err(cause) if batch.len() > 1 && !error::is_disk_failure(&cause) => {
                    for job in batch {
                        self.serve_batch(file, waker, vec![job]);
                    }
                    return;
                }
                Err(cause) => return refuse(batch, &error::map(&cause)),
            }
        }
    }
}

/// Serves those for whom reading is enough. What fails stays, to fail in a transaction.
fn read(db: &Connection, batch: &mut Batch, is_asked: impl Fn(Kind) -> bool) {
    let served = batch.extract_if(.., |job| {
        is_asked(job.kind()) && job.run(db, Access::Reading).unwrap_or(false)
    });
    served.for_each(|job| job.settle(Ok(())));
}

/// Does everything in one transaction.
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

    use super::*;

    #[tokio::test]
    async fn what_was_committed_to_a_file_that_was_replaced_meanwhile_is_done_again() {
        let folder = std::env::temp_dir().join(format!("syncguard-worker-{}", std::process::id()));
        fs::create_dir_all(&folder).expect("created");
        let path = folder.join("locks.db");
        let waker = Arc::new(Waker::new(&path));
        let file = LockFile::new(path.clone());
        let worker = Worker::start(file, waker, Duration::from_secs(10)).expect("starts");
        let mut rounds = 0;
        let work = move |db: &Connection, access: Access| {
            if access == Access::Reading {
                return Ok(None);
            }
            rounds += 1;
            db.execute("INSERT INTO syncguard_fences VALUES ('k', ?1)", [rounds])?;
            if rounds == 1 {
                // In the middle of the transaction.
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
        assert_eq!(stored.await.expect("works"), 2, "it is in the file that others see");
        fs::remove_dir_all(&folder).expect("removed");
    }
}
