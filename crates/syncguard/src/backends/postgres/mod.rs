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

use tokio_postgres::Row;

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
pub use fenced::FencedTable;
use pool::{Connector, Pool, Urgency};
use statements::{Sql, Statements};
pub use tokio_postgres;
use transaction::Step;
use wake::Waker;

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
    statements: Statements,
    schema: String,
    waker: Waker,
    cleanup: CleanupGate,
    tables: [String; 2],
}

impl PostgresBackend {
    /// Connects to a server, and refuses one that is too old. The tables need not be there yet.
    ///
    /// # Cancel safety
    ///
    /// Dropped half-way, nothing is left behind.
    pub async fn connect(config: PostgresConfig) -> Result<Self> {
        let (locks, fences) = config.names()?;
        let statements = Statements::new(&locks, &fences);
        let connector = Arc::new(Connector::new(config.clone())?);
        let pool = Pool::new(Arc::clone(&connector), statements.clone(), &config);
        let waker = Waker::start(connector, locks.channel(), config.response_timeout);
        let shared = Shared {
            pool,
            statements,
            schema: schema::sql(&locks, &fences),
            waker,
            cleanup: CleanupGate::new(config.cleanup_in_is_locked),
            tables: [locks.quoted(), fences.quoted()],
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
        schema::create(&self.shared.pool, &self.shared.schema)
            .await
            .map_err(|error| named(error, "setup"))
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
        let [locks, fences] = &self.shared.tables;
        advice::ask(&self.shared.pool, locks, fences).await
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
        let rows = self.run(urgency, (sql, &[&parameter])).await?;
        rows.first().map(stored).transpose()
    }

    /// Deletes a record that was found dead, on the side.
    fn clean_up(&self, lock_id: LockId) {
        let backend = self.clone();
        tokio::spawn(async move {
            let (id, guard) = (lock_id.expose(), integer(CLEANUP_GUARD_MS));
            let step: Step<'_> = (&backend.shared.statements.clean_up, &[&id, &guard]);
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
    row.try_get(place).map_err(|_cause| error::nonsense())
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
        f.debug_struct("PostgresBackend")
            .field("tables", &self.shared.tables)
            .finish_non_exhaustive()
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
        let extended = self.try_extend(request).await;
        extended.map_err(|error| named(error.with_lock_id(request.lock_id()), "extend"))
    }

    async fn is_locked(&self, key: &Key) -> Result<bool> {
        let found =
            self.find(Urgency::Ordinary, &self.shared.statements.by_key, key.as_str()).await;
        let found = found.map_err(|error| named(error.with_key(key), "is_locked"))?;
        let Some((lock, now)) = found else { return Ok(false) };
        if self.shared.cleanup.admits(lock.expires_at, now) {
            self.clean_up(lock.lock_id);
        }
        Ok(is_live(lock.expires_at, now))
    }

    async fn lookup_key(&self, key: &Key) -> Result<Option<StoredLock>> {
        let found =
            self.find(Urgency::Ordinary, &self.shared.statements.by_key, key.as_str()).await;
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

    fn inspector(&self) -> Option<Arc<dyn Inspector>> {
        Some(Arc::new(self.clone()))
    }
}

fn live(found: Option<(StoredLock, Timestamp)>) -> Option<StoredLock> {
    found.filter(|(lock, now)| is_live(lock.expires_at, *now)).map(|(lock, _)| lock)
}

impl PostgresBackend {
    async fn try_acquire(&self, request: &AcquireRequest) -> Result<Acquire> {
        let (key, lock_id) = (request.key().as_str(), request.lock_id());
        let (tolerance, ttl) = (integer(TIME_TOLERANCE_MS), integer(request.ttl().as_millis()));
        let (id, largest) = (lock_id.expose(), integer(Fence::MAX.get()));
        let statements = &self.shared.statements;
        let turn: Step<'_> = (&statements.turn, &[&key]);
        let take: Step<'_> = (&statements.take, &[&key, &tolerance, &id, &ttl, &largest]);
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
        let (lock_id, tolerance) = (request.lock_id(), integer(TIME_TOLERANCE_MS));
        let (id, table) = (lock_id.expose(), self.shared.waker.table());
        let release: Step<'_> = (&self.shared.statements.release, &[&id, &tolerance, &table]);
        let rows = self.run(Urgency::Urgent, release).await?;
        let Some(row) = rows.first() else { return Ok(Release::NotHeld(Absence::NotFound)) };
        if let Some(stored) = column::<Option<&str>>(row, 2)? {
            fence(stored)?;
            let absence = if column(row, 3)? { Absence::NotFound } else { Absence::Expired };
            return Ok(Release::NotHeld(absence));
        }
        // A key that makes no sense has nobody who waits for it.
        if column(row, 1)?
            && let Ok(key) = Key::new(column::<&str>(row, 0)?)
        {
            self.tell(&key);
        }
        Ok(Release::Released)
    }

    /// Tells who waits of a release, on the side.
    fn tell(&self, key: &Key) {
        let (backend, (channel, payload)) = (self.clone(), self.shared.waker.news(key));
        tokio::spawn(async move {
            let step: Step<'_> = (&backend.shared.statements.notify, &[&channel, &payload]);
            // A wake-up that is lost costs time, nothing else.
            drop(backend.run(Urgency::Urgent, step).await);
        });
    }

    async fn try_extend(&self, request: &ExtendRequest) -> Result<Extend> {
        let (lock_id, tolerance) = (request.lock_id(), integer(TIME_TOLERANCE_MS));
        let (id, ttl) = (lock_id.expose(), integer(request.ttl().as_millis()));
        let turn: Step<'_> = (&self.shared.statements.turn_by_id, &[&id]);
        let extend: Step<'_> = (&self.shared.statements.extend, &[&id, &tolerance, &ttl]);
        let steps = [Some(turn), Some(extend)];
        let [_, rows] = transaction::run(&self.shared.pool, Urgency::Urgent, steps).await?;
        let row = rows.first().ok_or_else(error::nonsense)?;
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
    let row = rows.first().ok_or_else(error::nonsense)?;
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
            let step: Step<'_> = (&self.shared.statements.list, &[&after]);
            let rows = self.run(Urgency::Ordinary, step).await;
            let rows = rows.map_err(|error| named(error, "list"))?;
            let next = match rows.last() {
                Some(row) if rows.len() == PAGE => Some(Cursor::new(column::<&str>(row, 0)?)),
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
