//! Locks in a PostgreSQL database, shared by every client of that database.
//!
//! * Every operation is one transaction and one round trip; the server's clock decides. A contended
//!   acquire only reads.
//! * The number of connections is bounded, and holding or waiting for a lock occupies none.
//! * The tables are those of the TypeScript implementation: both exclude each other, and each can
//!   release, extend and look up the other's locks.
//! * It needs PostgreSQL 12 or newer, over TCP, TLS or a Unix socket, or behind a pooler in
//!   transaction mode.
//!
//! [The guide](https://github.com/syncguard/syncguard/blob/main/docs/guide/postgres.md)
//! describes connection URLs, permissions, and what can make fences go backwards.

mod acquire_any;
mod admin;
mod batches;
mod callers_pool;
mod config;
mod connector;
mod driver;
mod error;
mod fenced;
mod listener;
mod names;
mod pool;
mod record;
mod statements;
mod tls;
mod transaction;

use std::fmt;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio_postgres::Row;
use tokio_util::task::TaskTracker;

use crate::common::cleanup::CleanupGate;
use crate::common::error::{Error, Result};
use crate::common::fence::Fenced;
use crate::common::fence_source::FenceSource;
use crate::common::holder::BreakNote;
use crate::common::key::Key;
use crate::common::lock_id::LockId;
use crate::common::time::{CLEANUP_GUARD_MS, Timestamp, is_live};
use crate::contract::LockBackend;
use crate::contract::admin::Admin;
use crate::contract::batch::{Batcher, Joined};
use crate::contract::capabilities::{Capabilities, TimeAuthority};
use crate::contract::finding::Finding;
use crate::contract::notifier::Subscription;
use crate::contract::outcome::{AcquireAnyOutcome, AcquireOutcome, ExtendOutcome, ReleaseOutcome};
use crate::contract::request::{AcquireAnyRequest, AcquireRequest, ExtendRequest, ReleaseRequest};
use crate::contract::stored_lock::StoredLock;
use batches::{AcquireOperation, ExtendOperation, ReleaseOperation};
pub use callers_pool::{ClientPool, Loan, PooledClient};
pub use config::PostgresConfig;
use connector::Connector;
pub use fenced::{FenceTrigger, FencedTable};
use listener::PostgresListener;
use names::Names;
use pool::{Pool, Urgency};
use record::{column, integer, live, outcome, stored};
use statements::{Sql, Statements, Value};
pub use tokio_postgres;
use transaction::Step;

const NAME: &str = "postgres";

/// A backend that keeps locks in a PostgreSQL database. Clones share the connections.
///
/// ```no_run
/// use syncguard::postgres::PostgresConfig;
/// use syncguard::{Locker, PostgresBackend};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> syncguard::Result<()> {
/// let config = PostgresConfig::from_url("postgres://app@localhost/shop")?;
/// let backend = PostgresBackend::connect(config).await?;
/// backend.setup_schema().await?;
/// let locker = Locker::new(backend)?;
/// let guard = locker.lock("invoice:42").await?;
/// # drop(guard); locker.shutdown().await
/// # }
/// ```
#[derive(Clone)]
pub struct PostgresBackend {
    shared: Arc<PostgresInner>,
}

struct PostgresInner {
    pool: Arc<Pool>,
    names: Names,
    statements: Statements,
    listener: PostgresListener,
    cleanup: CleanupGate,
    fences: FenceSource,
    /// When the column `holder` was last looked for.
    looked_for_holder: Mutex<Instant>,
    /// Tasks that continue after their operation has returned.
    background: TaskTracker,
    acquires: Batcher<AcquireOperation>,
    releases: Batcher<ReleaseOperation>,
    extends: Batcher<ExtendOperation>,
}

impl PostgresBackend {
    /// Connects to a server. Fails if the server is too old. The tables need not exist yet.
    ///
    /// # Cancel safety
    ///
    /// If you drop the future before it completes, it leaves nothing behind.
    pub async fn connect(config: PostgresConfig) -> Result<Self> {
        config.validate()?;
        let names = config.names()?;
        let statements = Statements::new(&names);
        let connector = Arc::new(Connector::new(config.clone())?);
        let pool = Arc::new(Pool::new(Arc::clone(&connector), statements.clone(), &config));
        let listener = PostgresListener::start(Arc::clone(&pool), connector, names.clone());
        let background = TaskTracker::new();
        // Waiting for a closed tracker ends whenever no task is running.
        background.close();
        let shared = PostgresInner {
            pool,
            names,
            statements,
            listener,
            cleanup: CleanupGate::new(config.network.cleanup_in_is_locked),
            fences: config.fences,
            looked_for_holder: Mutex::new(Instant::now()),
            background,
            acquires: Batcher::new(batches::LIMIT, batches::LIMIT),
            releases: Batcher::new(batches::LIMIT, batches::LIMIT),
            extends: Batcher::new(batches::LIMIT, batches::LIMIT),
        };
        let backend = Self { shared: Arc::new(shared) };
        let findings = backend.read_findings().await.map_err(|error| named(error, "connect"))?;
        if config.pool.is_some() {
            // Connections of our own look for it when they are opened.
            backend.look_for_holder_column().await;
        }
        for finding in findings.iter().filter(|finding| finding.subject() != "tables") {
            tracing::warn!(subject = finding.subject(), "{finding}");
        }
        Ok(backend)
    }

    /// Creates missing tables and indexes. Several processes may call it at once.
    ///
    /// # Cancel safety
    ///
    /// If you drop the future before it completes, they may or may not have been created.
    pub async fn setup_schema(&self) -> Result<()> {
        let sql = admin::schema_sql(&self.shared.names);
        admin::create(&self.shared.pool, &sql).await.map_err(|error| named(error, "setup"))?;
        self.look_for_holder_column().await;
        Ok(())
    }

    /// Finds out whether the lock table has the column `holder`. A table of the TypeScript
    /// implementation does not, until `setup_schema` adds it; then nothing is stored about holders.
    async fn look_for_holder_column(&self) {
        let found = self.run(Urgency::Ordinary, (&self.shared.statements.has_holder, &[])).await;
        if let Ok(rows) = found {
            self.shared.pool.note_holders(!rows.is_empty());
        }
        *self.shared.looked_for_holder.lock().unwrap_or_else(PoisonError::into_inner) =
            Instant::now();
    }

    /// Looks for the column again in the background, if that is not known to be there and was not
    /// looked for recently: another process may have run `setup_schema`.
    fn look_again_for_holder_column(&self) {
        const INTERVAL: Duration = Duration::from_mins(1);
        if self.shared.pool.stores_holders() {
            return;
        }
        let mut looked =
            self.shared.looked_for_holder.lock().unwrap_or_else(PoisonError::into_inner);
        if looked.elapsed() >= INTERVAL {
            *looked = Instant::now();
            let backend = self.clone();
            self.shared.background.spawn(async move { backend.look_for_holder_column().await });
        }
    }

    /// Returns what about this server can make locks vanish or fences go backwards. It asks the
    /// server now; [`connect`](Self::connect) has logged the same.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: it only reads.
    pub async fn findings(&self) -> Result<Vec<Finding>> {
        self.read_findings().await.map_err(|error| named(error, "findings"))
    }

    async fn read_findings(&self) -> Result<Vec<Finding>> {
        let Names { locks, fences, .. } = &self.shared.names;
        let tables = [locks.quoted(), fences.quoted()];
        let ask = || admin::ask(&self.shared.pool, &tables, self.shared.fences);
        match ask().await {
            // As in `read`.
            Err(error) if error::is_lost(&error) => ask().await,
            findings => findings,
        }
    }

    /// Runs one statement.
    async fn run(&self, urgency: Urgency, step: Step<'_>) -> Result<Vec<Row>> {
        Ok(transaction::run(&self.shared.pool, urgency, None, step).await?)
    }

    /// Runs one statement that only reads. It is repeated once if its connection was closed while
    /// it was idle, by a pooler for example.
    async fn read(&self, urgency: Urgency, step: Step<'_>) -> Result<Vec<Row>> {
        match self.run(urgency, step).await {
            Err(error) if error::is_lost(&error) => self.run(urgency, step).await,
            rows => rows,
        }
    }

    /// Returns the lock that a statement finds, dead or alive, and the server's time.
    async fn find(
        &self,
        urgency: Urgency,
        sql: &Sql,
        parameter: &str,
    ) -> Result<Option<(StoredLock, Timestamp)>> {
        let values = [Value::Text(parameter)];
        let rows = self.read(urgency, (sql, &values)).await?;
        rows.first().map(stored).transpose()
    }

    /// Returns the lock of a key, dead or alive, and the server's time.
    async fn find_by_key(&self, key: &Key) -> Result<Option<(StoredLock, Timestamp)>> {
        let lock_key = self.shared.names.lock_key(key)?;
        self.find(Urgency::Ordinary, &self.shared.statements.by_key, &lock_key).await
    }

    /// Deletes a dead row in the background.
    fn clean_up(&self, lock_id: LockId) {
        let backend = self.clone();
        self.shared.background.spawn(async move {
            let values = [Value::Text(lock_id.expose()), Value::Int8(integer(CLEANUP_GUARD_MS))];
            let step: Step<'_> = (&backend.shared.statements.clean_up, &values);
            // Best effort: if it fails, the row stays until the next acquire.
            drop(backend.run(Urgency::Ordinary, step).await);
        });
    }
}

fn named(error: Error, operation: &'static str) -> Error {
    error.with_operation(NAME, operation)
}

impl fmt::Debug for PostgresBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresBackend").field("names", &self.shared.names).finish_non_exhaustive()
    }
}

impl LockBackend for PostgresBackend {
    type Fencing = Fenced;

    fn capabilities(&self) -> Capabilities {
        Capabilities::new::<Fenced>(NAME, TimeAuthority::Server)
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<AcquireOutcome> {
        self.look_again_for_holder_column();
        let acquired = async {
            let operation = self.acquire_operation(request)?;
            let backend = self.clone();
            let send = move |operations| Box::pin(backend.clone().acquire_batch(operations));
            let (operation, row) = match self.shared.acquires.join(operation, send) {
                Joined::Alone(operation, _departure) => {
                    let row = self.acquire_one(&operation, false).await?;
                    (operation, row)
                }
                Joined::Gathered(reply) => reply.await?,
            };
            let fences = self.shared.fences;
            if let Some(outcome) = outcome(&row, request, fences)? {
                return Ok(outcome);
            }
            // It looked free, but another transaction has the key's advisory lock, or just had it.
            let row = Box::pin(self.acquire_one(&operation, true)).await?;
            let outcome = outcome(&row, request, fences)?;
            Ok(outcome.unwrap_or(AcquireOutcome::Contended { expires_in: None }))
        };
        acquired.await.map_err(|error: Error| named(error.with_key(request.key()), "acquire"))
    }

    async fn acquire_any(&self, request: &AcquireAnyRequest) -> Result<AcquireAnyOutcome> {
        self.look_again_for_holder_column();
        self.try_acquire_any(request).await.map_err(|error| named(error, "acquire"))
    }

    async fn release(&self, request: &ReleaseRequest) -> Result<ReleaseOutcome> {
        let released = self.try_release(request).await;
        released.map_err(|error| named(error.with_lock_id(request.lock_id()), "release"))
    }

    async fn extend(&self, request: &ExtendRequest) -> Result<ExtendOutcome> {
        let epoch = self.shared.pool.epoch();
        let extend = pin!(self.try_extend(request));
        let extended = request.bounded(extend).await.unwrap_or_else(|| {
            self.shared.pool.distrust(epoch);
            Err(error::timeout())
        });
        extended.map_err(|error| named(error.with_lock_id(request.lock_id()), "extend"))
    }

    async fn is_locked(&self, key: &Key) -> Result<bool> {
        let found = self.find_by_key(key).await;
        let found = found.map_err(|error| named(error.with_key(key), "is_locked"))?;
        let Some((lock, now)) = found else { return Ok(false) };
        if self.shared.cleanup.admits(lock.expires_at, now) {
            self.clean_up(lock.lock_id);
        }
        Ok(is_live(lock.expires_at, now))
    }

    async fn lookup_key(&self, key: &Key) -> Result<Option<StoredLock>> {
        let found = self.find_by_key(key).await;
        found.map(live).map_err(|error| named(error.with_key(key), "lookup"))
    }

    async fn lookup_id(&self, lock_id: &LockId) -> Result<Option<StoredLock>> {
        let found =
            self.find(Urgency::Ordinary, &self.shared.statements.by_id, lock_id.expose()).await;
        found.map(live).map_err(|error| named(error.with_lock_id(*lock_id), "lookup"))
    }

    async fn subscribe(&self, key: &Key) -> Option<Subscription> {
        if self.shared.pool.is_pooled() {
            return None;
        }
        self.shared.listener.subscribe(key).await
    }

    async fn watch(&self, key: &Key) -> Option<Subscription> {
        if self.shared.pool.is_pooled() {
            return None;
        }
        self.shared.listener.watch(key).await
    }

    async fn waiters(&self, key: &Key) -> Option<u32> {
        let lock_key = self.shared.names.lock_key(key).ok()?;
        let channel = self.shared.listener.channel();
        let values =
            [Value::Text(&lock_key), Value::Int4(channel.key_space), Value::Int4(channel.any_key)];
        let step: Step<'_> = (&self.shared.statements.waiters, &values);
        let rows = self.run(Urgency::Ordinary, step).await.ok()?;
        u32::try_from(column::<Option<i64>>(rows.first()?, 0).ok()??).ok()
    }

    async fn break_note(&self, lock_id: &LockId) -> Option<BreakNote> {
        self.shared.listener.break_note(lock_id)
    }

    async fn quiesce(&self) {
        self.shared.background.wait().await;
    }

    fn admin(&self) -> Option<Arc<dyn Admin>> {
        Some(Arc::new(self.clone()))
    }
}

impl PostgresBackend {
    async fn try_release(&self, request: &ReleaseRequest) -> Result<ReleaseOutcome> {
        let backend = self.clone();
        let send = move |operations| Box::pin(backend.clone().release_batch(operations));
        self.shared.releases.run(Self::release_operation(request), send).await
    }

    async fn try_extend(&self, request: &ExtendRequest) -> Result<ExtendOutcome> {
        let backend = self.clone();
        let send = move |operations| Box::pin(backend.clone().extend_batch(operations));
        self.shared.extends.run(Self::extend_operation(request), send).await
    }
}
