//! Connections, each of one operation at a time: a transaction that is sent at once must not meet
//! another's.

use std::future::poll_fn;
use std::ops::Deref;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::Duration;

use futures_util::future::try_join_all;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::Instant;
use tokio_postgres::types::Type;
use tokio_postgres::{Client, Row, Statement};

use super::callers_pool::{ClientPool, PooledClient};
use super::config::PostgresConfig;
use super::connector::Connector;
use super::driver::{Driver, drive};
use super::error;
use super::statements::{Parameter, Sql, Statements, Value};
use super::transaction;
use crate::common::backoff::random_fraction;
use crate::common::error::{Error, ErrorCode, Result};

/// A bounded set of connections.
pub(super) struct Pool {
    connector: Arc<Connector>,
    statements: Statements,
    /// Where clients come from instead, if the caller has a pool.
    external: Option<Arc<dyn ClientPool>>,
    idle: Mutex<Vec<Link>>,
    /// Rises when all connections are to be replaced; one of an earlier epoch is not used again.
    epoch: AtomicU64,
    /// For everything.
    places: Semaphore,
    /// For releases and extends alone, when all other places are taken.
    reserved: Semaphore,
    /// Nothing can be prepared, because a pooler gives us another connection every time.
    is_pooled: AtomicBool,
    response_timeout: Duration,
}

/// Who asks for a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Urgency {
    /// Releases and extends: somebody waits for them or depends on them.
    Urgent,
    Ordinary,
}

/// A connection and its prepared statements, in the order of [`Statements::all`].
struct Link {
    client: Handle,
    prepared: Vec<Statement>,
    /// When it is old enough to be replaced.
    ends_at: Instant,
    /// The pool's epoch when it was opened.
    epoch: u64,
}

/// A client of ours and what drives it, or one that the caller's pool has lent.
///
/// Ours is driven by whoever uses it and by nobody in between: no other task has to be woken for an
/// answer.
enum Handle {
    /// The lock is never waited for: it only makes references to this possible.
    Ours(Client, Mutex<Option<Pin<Box<Driver>>>>),
    Theirs(Box<dyn PooledClient>),
}

impl Handle {
    /// Whether it still works, as far as can be seen without asking the server.
    async fn is_open(&mut self) -> bool {
        match self {
            Self::Ours(client, driver) => {
                let Some(driver) = exclusive(driver) else { return false };
                let ended =
                    poll_fn(|context| Poll::Ready(driver.as_mut().poll(context).is_ready()));
                !ended.await && !client.is_closed()
            }
            Self::Theirs(client) => !client.is_closed(),
        }
    }
}

fn exclusive<T>(value: &mut Mutex<T>) -> &mut T {
    value.get_mut().unwrap_or_else(PoisonError::into_inner)
}

impl Deref for Handle {
    type Target = Client;

    fn deref(&self) -> &Client {
        match self {
            Self::Ours(client, _) => client,
            Self::Theirs(client) => client,
        }
    }
}

/// A connection of one operation. It goes back only when all answers have come.
pub(super) struct Lease<'a> {
    pool: &'a Pool,
    link: Option<Link>,
    _place: SemaphorePermit<'a>,
}

impl Pool {
    pub(super) fn new(
        connector: Arc<Connector>,
        statements: Statements,
        config: &PostgresConfig,
    ) -> Self {
        Self {
            connector,
            statements,
            external: config.pool.clone(),
            idle: Mutex::default(),
            epoch: AtomicU64::new(0),
            places: Semaphore::new(config.pool_size),
            reserved: Semaphore::new(1),
            is_pooled: AtomicBool::new(config.is_pooled),
            response_timeout: config.response_timeout,
        }
    }

    pub(super) fn response_timeout(&self) -> Duration {
        self.response_timeout
    }

    pub(super) fn is_pooled(&self) -> bool {
        self.is_pooled.load(Ordering::Relaxed)
    }

    /// Notes that a pooler stands between us and the server.
    pub(super) fn note_pooler(&self) {
        if !self.is_pooled.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                "a pooler stands between this client and PostgreSQL; set pooler=true, so that \
                 nothing is prepared from the start"
            );
        }
        self.idle().clear();
    }

    /// Replaces every connection, because what was learned on this one holds for all: the idle ones at
    /// once, those in use when they come back. Those that were opened since are kept.
    pub(super) fn replace_all(&self, lease: Lease<'_>) {
        let seen = lease.link().epoch;
        drop(lease);
        self.distrust(seen);
    }

    /// The epoch of connections that are opened now.
    pub(super) fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::SeqCst)
    }

    /// Replaces the connections up to an epoch: one of them was not answered in time, and the path to the
    /// server may have died for all.
    pub(super) fn distrust(&self, seen: u64) {
        let raised =
            self.epoch.compare_exchange(seen, seen + 1, Ordering::SeqCst, Ordering::SeqCst);
        if raised.is_ok() {
            self.idle().retain(|link| link.epoch > seen);
        }
    }

    /// Notes that a server cannot be written to: connections go to the wrong one.
    pub(super) fn note_read_only(&self, lease: Lease<'_>) {
        self.connector.forget_host();
        self.replace_all(lease);
    }

    /// Waits for a connection, not longer than for an answer.
    pub(super) async fn get(&self, urgency: Urgency) -> Result<Lease<'_>> {
        let ordinary = self.places.acquire();
        let place = async {
            match urgency {
                Urgency::Ordinary => ordinary.await,
                Urgency::Urgent => tokio::select! {
                    biased;
                    place = ordinary => place,
                    place = self.reserved.acquire() => place,
                },
            }
        };
        let place = tokio::time::timeout(self.response_timeout, place).await;
        let Ok(Ok(place)) = place else { return Err(error::no_connection()) };
        let idle = loop {
            let idle = self.idle().pop();
            match idle {
                Some(mut link) => {
                    if !link.is_old() && link.client.is_open().await {
                        break Some(link);
                    }
                }
                None => break None,
            }
        };
        let link = match (idle, &self.external) {
            (Some(link), _) => link,
            (None, Some(theirs)) => self.borrow(theirs.as_ref()).await?,
            (None, None) => self.open().await?,
        };
        Ok(Lease { pool: self, link: Some(link), _place: place })
    }

    async fn borrow(&self, theirs: &dyn ClientPool) -> Result<Link> {
        match tokio::time::timeout(self.response_timeout, theirs.get()).await {
            Ok(Ok(client)) => Ok(self.link(Handle::Theirs(client), Vec::new(), 0)),
            // Its own words may hold a password.
            Ok(Err(_cause)) => {
                let message = "the caller's pool gave no connection to PostgreSQL";
                Err(Error::new(ErrorCode::ServiceUnavailable, message).without_effect())
            }
            Err(_elapsed) => Err(error::no_connection()),
        }
    }

    async fn open(&self) -> Result<Link> {
        let epoch = self.epoch();
        let mut opened = self.connector.open(self.is_pooled()).await?;
        if opened.is_none() {
            self.note_pooler();
            opened = self.connector.open(true).await?;
        }
        let (client, driver) = opened.ok_or_else(error::unexpected_response)?;
        let mut driver = Some(Box::pin(driver));
        let patience = self.response_timeout;
        let preparing = async {
            if !self.is_pooled() && client.query_typed(transaction::IS_OURS, &[]).await?.is_empty()
            {
                self.note_pooler();
            }
            if self.is_pooled() {
                return Ok(Vec::new());
            }
            client.batch_execute(transaction::KEEP_GRANTS).await?;
            let all = self.statements.all().into_iter();
            match try_join_all(all.map(|sql| client.prepare_typed(&sql.text, sql.types))).await {
                // The tables or a right may be missing; whoever needs them is told.
                Err(cause) if cause.code().is_some() => Ok(Vec::new()),
                prepared => prepared,
            }
        };
        match tokio::time::timeout(patience, drive(driver.as_mut(), preparing)).await {
            Ok(Some(Ok(prepared))) => {
                Ok(self.link(Handle::Ours(client, Mutex::new(driver)), prepared, epoch))
            }
            Ok(Some(Err(cause))) => Err(error::map(&cause).without_effect()),
            Ok(None) => Err(error::lost().without_effect()),
            Err(_elapsed) => Err(error::timeout().without_effect()),
        }
    }

    fn link(&self, client: Handle, prepared: Vec<Statement>, epoch: u64) -> Link {
        // Some jitter, so that connections that were opened together are not replaced together.
        let age = self.connector.max_connection_age().mul_f64(1.0 - random_fraction() / 5.0);
        let now = Instant::now();
        let ends_at = now.checked_add(age).unwrap_or(now + A_LONG_TIME);
        Link { client, prepared, ends_at, epoch }
    }

    fn idle(&self) -> MutexGuard<'_, Vec<Link>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Longer than any process lives.
const A_LONG_TIME: Duration = Duration::from_hours(24 * 365 * 30);

impl Link {
    fn is_old(&self) -> bool {
        Instant::now() >= self.ends_at
    }
}

impl Lease<'_> {
    fn link(&self) -> &Link {
        self.link.as_ref().expect("BUG: a lease has a connection until it ends")
    }

    /// What drives the connection, for [`drive`]. Without it the connection is closed.
    pub(super) fn take_driver(&mut self) -> Option<Pin<Box<Driver>>> {
        match &mut self.link {
            Some(Link { client: Handle::Ours(_, driver), .. }) => exclusive(driver).take(),
            _ => None,
        }
    }

    pub(super) fn put_driver_back(&mut self, driver: Option<Pin<Box<Driver>>>) {
        if let Some(Link { client: Handle::Ours(_, place), .. }) = &mut self.link {
            *exclusive(place) = driver;
        }
    }

    pub(super) fn client(&self) -> &Client {
        &self.link().client
    }

    /// Sends a statement, prepared where that is possible; answers with its rows.
    pub(super) async fn query(
        &self,
        sql: &Sql,
        values: &[Value<'_>],
    ) -> Result<Vec<Row>, tokio_postgres::Error> {
        let link = self.link();
        let parameters = values.iter().map(|value| value as Parameter<'_>);
        let place = self.pool.statements.all().iter().position(|known| known.text == sql.text);
        if let Some(prepared) = place.and_then(|place| link.prepared.get(place)) {
            let parameters: Vec<Parameter<'_>> = parameters.collect();
            return link.client.query(prepared, &parameters).await;
        }
        let types = sql.types.iter().cloned();
        let parameters: Vec<(Parameter<'_>, Type)> = parameters.zip(types).collect();
        link.client.query_typed(&sql.text, &parameters).await
    }

    /// All answers have come; the next may use the connection, unless it could not prepare anything.
    pub(super) fn give_back(mut self) {
        let Some(link) = self.link.take() else { return };
        let is_ours = matches!(link.client, Handle::Ours(..));
        let is_ready = self.pool.is_pooled() || !link.prepared.is_empty();
        // Dropped, one that was lent goes back by itself.
        let is_current = link.epoch == self.pool.epoch.load(Ordering::SeqCst) && !link.is_old();
        if is_ours && is_ready && is_current && !link.client.is_closed() {
            self.pool.idle().push(link);
        }
    }
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        // Not all answers have come: nobody may use it any more.
        if let Some(Link { client: Handle::Theirs(client), .. }) = self.link.take() {
            client.discard();
        }
    }
}
