//! Locks in a PostgreSQL database, shared with everybody who reaches it.
//!
//! * One round trip and one transaction per operation; the server's clock decides. A contended
//!   acquire only reads.
//! * A bounded set of connections, none of which is held while a lock is held or waited for.
//! * Tables are those of the TypeScript implementation: the two exclude each other, and release,
//!   extend and look up each other's locks.
//! * PostgreSQL 12 or newer, with TLS, on a socket, or behind a pooler in transaction mode.
//!
//! See `docs/specs/postgres.md` for what can make fences go backwards here.

mod advice;
mod callers_pool;
mod config;
mod connector;
mod driver;
mod error;
mod fenced;
mod names;
mod pool;
mod schema;
mod statements;
mod tls;
mod transaction;
mod wake;

use std::fmt;
use std::sync::Arc;
use std::task::{Context, Waker as TaskWaker};

use tokio_postgres::Row;
use tokio_util::task::TaskTracker;

use crate::common::cleanup::CleanupGate;
use crate::common::error::{Error, Result};
use crate::common::fence::{Fence, Fenced};
use crate::common::key::Key;
use crate::common::lock_id::LockId;
use crate::common::time::{CLEANUP_GUARD_MS, TIME_TOLERANCE_MS, Timestamp, is_live};
use crate::contract::LockBackend;
use crate::contract::advice::Advice;
use crate::contract::capabilities::{Capabilities, TimeAuthority};
use crate::contract::inspect::{Cursor, Inspection, Inspector, Page};
use crate::contract::outcome::{Absence, Acquire, Extend, Extension, Lease, Release};
use crate::contract::request::{AcquireRequest, ExtendRequest, ReleaseRequest};
use crate::contract::stored_lock::StoredLock;
use crate::contract::wake::WakeUps;
pub use callers_pool::{ClientPool, Loan, PooledClient};
pub use config::PostgresConfig;
use connector::Connector;
pub use fenced::FencedTable;
use names::Names;
use pool::{Pool, Urgency};
use statements::{Sql, Statements, Value};
pub use tokio_postgres;
use transaction::Step;
use wake::{Channel, Waker};

const NAME: &str = "postgres";

/// Locks in a PostgreSQL database. Clones share the connections.
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
    shared: Arc<Shared>,
}

struct Shared {
    pool: Pool,
    names: Names,
    statements: Statements,
    waker: Waker,
    cleanup: CleanupGate,
    /// What is done after an answer was given.
    background: TaskTracker,
}

impl PostgresBackend {
    /// Connects to a server, and refuses one that is too old. The tables need not be there yet.
    ///
    /// # Cancel safety
    ///
    /// Dropped half-way, nothing is left behind.
    pub async fn connect(config: PostgresConfig) -> Result<Self> {
        config.validate()?;
        let names = config.names()?;
        let statements = Statements::new(&names);
        let connector = Arc::new(Connector::new(config.clone())?);
        let pool = Pool::new(Arc::clone(&connector), statements.clone(), &config);
        let waker = Waker::start(connector, names.clone(), config.response_timeout);
        let background = TaskTracker::new();
        // So that waiting for it ends whenever nothing is under way.
        background.close();
        let shared = Shared {
            pool,
            names,
            statements,
            waker,
            cleanup: CleanupGate::new(config.cleanup_in_is_locked),
            background,
        };
        let backend = Self { shared: Arc::new(shared) };
        let advice = backend.ask_for_advice().await.map_err(|error| named(error, "connect"))?;
        for advice in advice.iter().filter(|advice| advice.subject() != "tables") {
            tracing::warn!(subject = advice.subject(), "{advice}");
        }
        Ok(backend)
    }

    /// Creates tables and indexes that are missing. Safe when many do it at once.
    ///
    /// # Cancel safety
    ///
    /// Dropped half-way, it may or may not have happened.
    pub async fn setup_schema(&self) -> Result<()> {
        let sql = schema::sql(&self.shared.names);
        schema::create(&self.shared.pool, &sql).await.map_err(|error| named(error, "setup"))
    }

    /// What about this server can make locks vanish or fences go backwards. It is asked now; at
    /// [`connect`](Self::connect) the same was written to the log.
    ///
    /// # Cancel safety
    ///
    /// It only reads.
    pub async fn advice(&self) -> Result<Vec<Advice>> {
        self.ask_for_advice().await.map_err(|error| named(error, "advice"))
    }

    async fn ask_for_advice(&self) -> Result<Vec<Advice>> {
        let Names { locks, fences, .. } = &self.shared.names;
        advice::ask(&self.shared.pool, &locks.quoted(), &fences.quoted()).await
    }

    /// Runs one statement.
    async fn run(&self, urgency: Urgency, step: Step<'_>) -> Result<Vec<Row>> {
        let [rows, _] = transaction::run(&self.shared.pool, urgency, [Some(step), None]).await?;
        Ok(rows)
    }

    /// The lock that a statement finds, dead or alive, and the server's time.
    async fn find(
        &self,
        urgency: Urgency,
        sql: &Sql,
        parameter: &str,
    ) -> Result<Option<(StoredLock, Timestamp)>> {
        let rows = self.run(urgency, (sql, &[Value::Text(parameter)])).await?;
        rows.first().map(stored).transpose()
    }

    /// The lock of a key, dead or alive, and the server's time.
    async fn find_by_key(&self, key: &Key) -> Result<Option<(StoredLock, Timestamp)>> {
        let lock_key = self.shared.names.lock_key(key)?;
        self.find(Urgency::Ordinary, &self.shared.statements.by_key, &lock_key).await
    }

    /// Deletes a record that was found dead, after the answer.
    fn clean_up(&self, lock_id: LockId) {
        let backend = self.clone();
        self.shared.background.spawn(async move {
            let values = [Value::Text(lock_id.expose()), Value::Int8(integer(CLEANUP_GUARD_MS))];
            let step: Step<'_> = (&backend.shared.statements.clean_up, &values);
            // Best effort: what is left is left to the next acquire.
            drop(backend.run(Urgency::Ordinary, step).await);
        });
    }
}

fn named(error: Error, operation: &'static str) -> Error {
    error.with_operation(NAME, operation)
}

/// The server's integers have a sign; no time and no fence of ours needs it.
fn integer(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

fn millis(number: i64) -> Result<Timestamp> {
    u64::try_from(number).map(Timestamp::from_millis).map_err(|_cause| Error::foreign_lock())
}

/// A column, whatever the server put into it.
fn column<'a, T: tokio_postgres::types::FromSql<'a>>(row: &'a Row, place: usize) -> Result<T> {
    row.try_get(place).map_err(|_cause| error::unexpected_response())
}

fn fence(text: &str) -> Result<Fence> {
    text.parse().map_err(|_cause| Error::foreign_lock())
}

/// A lock as it is stored, and the server's time; what makes no sense is an error, never a panic.
fn stored(row: &Row) -> Result<(StoredLock, Timestamp)> {
    let foreign = |_cause| Error::foreign_lock();
    let lock = StoredLock::new(
        Key::new(column::<&str>(row, 0)?).map_err(foreign)?,
        LockId::parse(column(row, 1)?).map_err(foreign)?,
        fence(column(row, 2)?)?,
        millis(column(row, 3)?)?,
        millis(column(row, 4)?)?,
    );
    Ok((lock, millis(column(row, 5)?)?))
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

    async fn acquire(&self, request: &AcquireRequest) -> Result<Acquire> {
        let acquired = self.try_acquire(request).await;
        acquired.map_err(|error| named(error.with_key(request.key()), "acquire"))
    }

    async fn release(&self, request: &ReleaseRequest) -> Result<Release> {
        let released = self.try_release(request).await;
        released.map_err(|error| named(error.with_lock_id(request.lock_id()), "release"))
    }

    async fn extend(&self, request: &ExtendRequest) -> Result<Extend> {
        let epoch = self.shared.pool.epoch();
        let extend = Box::pin(self.try_extend(request));
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

    async fn wake_ups(&self, key: &Key) -> Option<WakeUps> {
        if self.shared.pool.is_pooled() {
            return None;
        }
        self.shared.waker.subscribe(key).await
    }

    async fn quiesce(&self) {
        self.shared.background.wait().await;
    }

    fn inspector(&self) -> Option<Arc<dyn Inspector>> {
        Some(Arc::new(self.clone()))
    }
}

fn live(found: Option<(StoredLock, Timestamp)>) -> Option<StoredLock> {
    found.filter(|(lock, now)| is_live(lock.expires_at, *now)).map(|(lock, _)| lock)
}

impl PostgresBackend {
    async fn try_acquire(&self, request: &AcquireRequest) -> Result<Acquire> {
        let lock_key = self.shared.names.lock_key(request.key())?;
        let fence_key = self.shared.names.fence_key(&lock_key)?;
        let lock_id = request.lock_id();
        let values = [
            Value::Text(&lock_key),
            Value::Int8(integer(TIME_TOLERANCE_MS)),
            Value::Text(lock_id.expose()),
            Value::Int8(integer(request.ttl().as_millis())),
            Value::Int8(integer(Fence::MAX.get())),
            Value::Text(&fence_key),
            Value::Text(request.key().as_str()),
        ];
        let statements = &self.shared.statements;
        let turn: Step<'_> = (&statements.turn, &values[..1]);
        let take: Step<'_> = (&statements.take, &values);
        let taken = self.run(Urgency::Ordinary, take).await?;
        if let Some(outcome) = outcome(&taken, request)? {
            return Ok(outcome);
        }
        // It looked free, and somebody else had the turn, or had it a moment ago.
        let steps = [Some(turn), Some(take)];
        let [_, taken] = transaction::run(&self.shared.pool, Urgency::Ordinary, steps).await?;
        Ok(outcome(&taken, request)?.unwrap_or(Acquire::Contended { free_in: None }))
    }

    async fn try_release(&self, request: &ReleaseRequest) -> Result<Release> {
        let (lock_id, channel) = (request.lock_id(), self.shared.waker.channel());
        let values = [
            Value::Text(lock_id.expose()),
            Value::Int8(integer(TIME_TOLERANCE_MS)),
            Value::Int4(channel.key_space),
            Value::Int4(channel.any_key),
        ];
        let release: Step<'_> = (&self.shared.statements.release, &values);
        let rows = self.run(Urgency::Urgent, release).await?;
        let Some(row) = rows.first() else { return Ok(Release::NotHeld(Absence::NotFound)) };
        if let Some(stored) = column::<Option<&str>>(row, 2)? {
            fence(stored)?;
            let absence = if column(row, 3)? { Absence::NotFound } else { Absence::Expired };
            return Ok(Release::NotHeld(absence));
        }
        // A key that is none has no waiters.
        if column(row, 1)?
            && let Ok(key) = Key::new(column::<&str>(row, 0)?)
        {
            self.notify(&key);
        }
        Ok(Release::Released)
    }

    /// Notifies the waiters of a release. It is sent when this returns, so that a process that ends
    /// then has notified; the answer, which says nothing, is waited for in the background. Only where
    /// no connection is free at once it is sent in the background too, and lost if the process ends
    /// before [`quiesce`](LockBackend::quiesce).
    fn notify(&self, key: &Key) {
        let (backend, payload) = (self.clone(), Channel::payload(key));
        let mut notifying = Box::pin(async move {
            let channel = &backend.shared.waker.channel().name;
            let values = [Value::Text(channel), Value::Text(&payload)];
            let step: Step<'_> = (&backend.shared.statements.notify, &values);
            // A notification that is lost costs time, nothing else.
            drop(backend.run(Urgency::Urgent, step).await);
        });
        // The connection of the release is free again, and this poll drives it.
        let mut context = Context::from_waker(TaskWaker::noop());
        if notifying.as_mut().poll(&mut context).is_pending() {
            self.shared.background.spawn(notifying);
        }
    }

    async fn try_extend(&self, request: &ExtendRequest) -> Result<Extend> {
        let lock_id = request.lock_id();
        let values = [
            Value::Text(lock_id.expose()),
            Value::Int8(integer(TIME_TOLERANCE_MS)),
            Value::Int8(integer(request.ttl().as_millis())),
        ];
        let turn: Step<'_> = (&self.shared.statements.turn_by_id, &values[..1]);
        let extend: Step<'_> = (&self.shared.statements.extend, &values);
        let steps = [Some(turn), Some(extend)];
        let [_, rows] = transaction::run(&self.shared.pool, Urgency::Urgent, steps).await?;
        let row = rows.first().ok_or_else(error::unexpected_response)?;
        if let Some(expires_at) = column::<Option<i64>>(row, 0)? {
            return Ok(Extend::Extended(Extension::new(millis(expires_at)?)));
        }
        absence(row).map(Extend::NotHeld)
    }
}

/// Why nothing was changed: no row, a dead one, or one that is no lock of ours.
fn absence(row: &Row) -> Result<Absence> {
    match column::<Option<&str>>(row, 1)? {
        None => Ok(Absence::NotFound),
        Some(stored) => fence(stored).map(|_| Absence::Expired),
    }
}

/// What `take` says; `None` when the lock looked free and was not taken, because it was not our turn.
fn outcome(rows: &[Row], request: &AcquireRequest) -> Result<Option<Acquire>> {
    let row = rows.first().ok_or_else(error::unexpected_response)?;
    if let Some(taken) = column::<Option<&str>>(row, 0)? {
        let granted = fence(taken)?;
        granted.warn_near_the_end(request.key());
        return Ok(Some(Acquire::Acquired(Lease::new(granted, millis(column(row, 1)?)?))));
    }
    let now = millis(column(row, 2)?)?;
    if let Some(held_by) = column::<Option<&str>>(row, 3)? {
        LockId::parse(held_by).map_err(|_cause| Error::foreign_lock())?;
        let (stored, expires_at) = (fence(column(row, 4)?)?, millis(column(row, 5)?)?);
        match (held_by == request.lock_id().expose(), is_live(expires_at, now)) {
            (true, true) => return Ok(Some(Acquire::Acquired(Lease::new(stored, expires_at)))),
            (true, false) => return Ok(Some(Acquire::Spent)),
            (false, true) => {
                return Ok(Some(Acquire::Contended { free_in: Some(expires_at.dead_in(now)) }));
            }
            (false, false) => {}
        }
    }
    let counter = column::<Option<i64>>(row, 6)?.unwrap_or(0);
    Fence::after(u64::try_from(counter).map_err(|_cause| Error::foreign_counter())?)?;
    Ok(None)
}

impl Inspector for PostgresBackend {
    fn list<'a>(&'a self, after: Option<&'a Cursor>) -> Inspection<'a, Page> {
        const PAGE: usize = 200;
        let after = after.map_or("", Cursor::place);
        Box::pin(async move {
            let values = [Value::Text(after)];
            let step: Step<'_> = (&self.shared.statements.list, &values);
            let rows = self.run(Urgency::Ordinary, step).await;
            let rows = rows.map_err(|error| named(error, "list"))?;
            let next = match rows.last() {
                Some(row) if rows.len() == PAGE => Some(Cursor::new(column::<&str>(row, 6)?)),
                _ => None,
            };
            // A row that makes no sense is no lock; the operations on its key say so.
            let locks = rows.iter().filter_map(|row| live(stored(row).ok()));
            Ok(Page::new(locks.collect(), next))
        })
    }

    fn advice(&self) -> Inspection<'_, Vec<Advice>> {
        Box::pin(Self::advice(self))
    }

    fn setup(&self) -> Inspection<'_, ()> {
        Box::pin(self.setup_schema())
    }
}
