//! The pool of connections. A connection serves one operation at a time, because transactions that
//! are sent at once must not mix.

use std::ops::Deref;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Waker};
use std::time::Duration;

use futures_util::future::try_join_all;
use tokio::sync::{OwnedMutexGuard, Semaphore, SemaphorePermit};
use tokio::time::Instant;
use tokio_postgres::types::Type;
use tokio_postgres::{Client, Row, Statement};

use super::callers_pool::{ClientPool, PooledClient};
use super::config::PostgresConfig;
use super::connector::Connector;
use super::driver::{Driver, drive};
use super::error;
use super::statements::{Parameter, Statements};
use super::transaction::{self, Step};
use crate::common::backoff::random_fraction;
use crate::common::error::{Error, ErrorCode, Result};

/// A bounded set of connections.
pub(super) struct Pool {
    connector: Arc<Connector>,
    statements: Statements,
    /// The caller's own pool, if clients come from there.
    external: Option<Arc<dyn ClientPool>>,
    idle: Mutex<Vec<PooledConnection>>,
    /// Increases when all connections are to be replaced; one of an earlier epoch is not reused.
    epoch: AtomicU64,
    /// Permits for all operations.
    places: Semaphore,
    /// A permit for releases and extends only, used when all others are taken.
    reserved: Semaphore,
    /// Whether a pooler uses another connection every time, so that nothing can be prepared.
    is_pooled: AtomicBool,
    /// Whether the lock table has the column `holder`, as far as is known.
    stores_holders: AtomicBool,
    response_timeout: Duration,
    /// The connection that listens, if operations share it.
    listening: Mutex<Weak<ListeningClient>>,
    shares_listening: bool,
}

/// How urgently an operation needs a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Urgency {
    /// For releases and extends: a waiter or a holder depends on them.
    Urgent,
    Ordinary,
}

/// A connection and its prepared statements, in the order of [`Statements::all`].
struct PooledConnection {
    client: ClientHandle,
    prepared: Vec<Statement>,
    /// When it has to be replaced.
    ends_at: Instant,
    /// The pool's epoch when it was opened.
    epoch: u64,
    /// Whether its statements use the column `holder`.
    stores_holders: bool,
}

/// Our own client and its driver, or a client that was lent.
///
/// Our own client is driven by the task that uses it, and not driven in between, so that no other
/// task is woken for an answer.
enum ClientHandle {
    /// The mutex is never contended: it only makes this type `Sync`.
    Owned(Client, Mutex<Option<Pin<Box<Driver>>>>),
    External(Box<dyn PooledClient>),
}

impl ClientHandle {
    /// Returns whether it still works, as far as it is known without asking the server.
    fn is_open(&mut self) -> bool {
        match self {
            Self::Owned(client, driver) => {
                let Some(driver) = exclusive(driver) else { return false };
                // The next request wakes whoever polled the driver last. That would be the task
                // that sends it, which is running, and the runtime would wake another thread.
                let mut nobody = Context::from_waker(Waker::noop());
                driver.as_mut().poll(&mut nobody).is_pending() && !client.is_closed()
            }
            Self::External(client) => !client.is_closed(),
        }
    }
}

fn exclusive<T>(value: &mut Mutex<T>) -> &mut T {
    value.get_mut().unwrap_or_else(PoisonError::into_inner)
}

impl Deref for ClientHandle {
    type Target = Client;

    fn deref(&self) -> &Client {
        match self {
            Self::Owned(client, _) => client,
            Self::External(client) => client,
        }
    }
}

/// A connection that listens, and that operations may share.
pub(super) struct ListeningClient {
    pub(super) client: Arc<tokio::sync::Mutex<Client>>,
    /// Closes the connection.
    pub(super) lose: Box<dyn Fn() + Send + Sync>,
    /// Whether that was done. The client notices it only later.
    pub(super) is_lost: AtomicBool,
}

/// The connection that listens, while an operation uses it.
struct LentClient {
    client: OwnedMutexGuard<Client>,
    listening: Arc<ListeningClient>,
}

impl Deref for LentClient {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.client
    }
}

impl PooledClient for LentClient {
    fn discard(self: Box<Self>) {
        self.listening.is_lost.store(true, Ordering::SeqCst);
        (self.listening.lose)();
    }
}

/// A connection in use by one operation. It is reused only if all answers have come.
pub(super) struct ConnectionGuard<'a> {
    pool: &'a Pool,
    connection: Option<PooledConnection>,
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
            stores_holders: AtomicBool::new(false),
            response_timeout: config.network.response_timeout,
            listening: Mutex::default(),
            shares_listening: config.pool_size == 1 && config.pool.is_none(),
        }
    }

    /// Opens the connection that listens. In a pool of one it replaces the idle one, and operations
    /// share it from [`share`](Self::share) on.
    pub(super) async fn open_listening(&self) -> Result<Option<(Client, Driver)>> {
        if self.shares_listening {
            self.idle().clear();
        }
        self.connector.open(false).await
    }

    /// Lets operations use the connection that listens, if the pool has no room for another one.
    pub(super) async fn share(&self, listening: &Arc<ListeningClient>) {
        if self.shares_listening {
            let keeping = async {
                listening.client.lock().await.batch_execute(transaction::KEEP_GRANTS).await
            };
            // If it is refused, the connection still works, with the server's own setting. If it is
            // not answered, the next call to the connection finds out that it is lost.
            drop(tokio::time::timeout(self.response_timeout(), keeping).await);
            *self.listening() = Arc::downgrade(listening);
        }
    }

    /// Returns the connection that listens, once no other operation uses it. An urgent operation
    /// does not wait for it.
    async fn borrow_listening(&self, urgency: Urgency) -> Option<PooledConnection> {
        let listening = self.listening().upgrade()?;
        let client = match urgency {
            Urgency::Ordinary => Arc::clone(&listening.client).lock_owned().await,
            Urgency::Urgent => Arc::clone(&listening.client).try_lock_owned().ok()?,
        };
        let lent = LentClient { client, listening };
        let is_lost = lent.is_closed() || lent.listening.is_lost.load(Ordering::SeqCst);
        (!is_lost).then(|| {
            self.connection(ClientHandle::External(Box::new(lent)), Vec::new(), self.epoch())
        })
    }

    fn listening(&self) -> MutexGuard<'_, Weak<ListeningClient>> {
        self.listening.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether operations use the connection that listens.
    pub(super) fn shares_listening(&self) -> bool {
        self.shares_listening
    }

    pub(super) fn response_timeout(&self) -> Duration {
        self.response_timeout
    }

    pub(super) fn is_pooled(&self) -> bool {
        self.is_pooled.load(Ordering::Relaxed)
    }

    /// Records that there is a pooler in front of the server.
    pub(super) fn note_pooler(&self) {
        if !self.is_pooled.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                "detected a pooler in front of PostgreSQL; set pooler=true in the URL to avoid \
                 prepared statements from the start"
            );
        }
        self.idle().clear();
    }

    pub(super) fn stores_holders(&self) -> bool {
        self.stores_holders.load(Ordering::Relaxed)
    }

    /// Records whether the lock table has the column `holder`. If that is new, all connections are
    /// replaced, because they have prepared other statements, and it returns `true`.
    pub(super) fn note_holders(&self, are_stored: bool) -> bool {
        let is_new = self.stores_holders.swap(are_stored, Ordering::Relaxed) != are_stored;
        if is_new {
            self.distrust(self.epoch());
        }
        is_new
    }

    /// Replaces all connections, because what happened on this one affects all: the idle ones at
    /// once, those in use when they are returned. Those that were opened since are kept.
    pub(super) fn replace_all(&self, connection: ConnectionGuard<'_>) {
        let seen = connection.connection().epoch;
        drop(connection);
        self.distrust(seen);
    }

    /// Returns the epoch of connections that are opened now.
    pub(super) fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::SeqCst)
    }

    /// Replaces the connections up to an epoch: one of them got no answer in time, and the network
    /// path to the server may be dead for all.
    pub(super) fn distrust(&self, seen: u64) {
        let raised =
            self.epoch.compare_exchange(seen, seen + 1, Ordering::SeqCst, Ordering::SeqCst);
        if raised.is_ok() {
            self.idle().retain(|connection| connection.epoch > seen);
        }
    }

    /// Replaces all connections, because they lead to a server that cannot be written to.
    pub(super) fn note_read_only(&self, connection: ConnectionGuard<'_>) {
        self.connector.forget_host();
        self.replace_all(connection);
    }

    /// Waits for a connection, at most for the response timeout.
    pub(super) async fn get(&self, urgency: Urgency) -> Result<ConnectionGuard<'_>> {
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
                Some(mut connection) => {
                    if !connection.is_old() && connection.client.is_open() {
                        break Some(connection);
                    }
                }
                None => break None,
            }
        };
        let connection = match (idle, &self.external) {
            (Some(connection), _) => connection,
            (None, Some(theirs)) => self.borrow(theirs.as_ref()).await?,
            (None, None) => match self.borrow_listening(urgency).await {
                Some(connection) => connection,
                None => self.open().await?,
            },
        };
        Ok(ConnectionGuard { pool: self, connection: Some(connection), _place: place })
    }

    async fn borrow(&self, theirs: &dyn ClientPool) -> Result<PooledConnection> {
        match tokio::time::timeout(self.response_timeout, theirs.get()).await {
            Ok(Ok(client)) => Ok(self.connection(ClientHandle::External(client), Vec::new(), 0)),
            // The error of the caller's pool may contain a password.
            Ok(Err(_cause)) => {
                let message = "your own pool returned no connection to PostgreSQL";
                Err(Error::new(ErrorCode::ServiceUnavailable, message).without_effect())
            }
            Err(_elapsed) => Err(error::no_connection()),
        }
    }

    async fn open(&self) -> Result<PooledConnection> {
        let mut epoch = self.epoch();
        let mut opened = self.connector.open(self.is_pooled()).await?;
        if opened.is_none() {
            self.note_pooler();
            opened = self.connector.open(true).await?;
        }
        let (client, driver) = opened.ok_or_else(error::unexpected_response)?;
        let mut driver = Some(Box::pin(driver));
        let timeout = self.response_timeout;
        let mut stores_holders = false;
        let preparing = async {
            let has_holder = &self.statements.has_holder.text;
            let (ours, holder) = tokio::join!(
                client.query_typed(transaction::IS_OURS, &[]),
                client.query_typed(has_holder, &[])
            );
            if !self.is_pooled() && ours?.is_empty() {
                self.note_pooler();
            }
            stores_holders = !holder?.is_empty();
            if self.note_holders(stores_holders) {
                epoch = self.epoch();
            }
            if self.is_pooled() {
                return Ok(Vec::new());
            }
            client.batch_execute(transaction::KEEP_GRANTS).await?;
            let all = self.statements.all().map(|sql| sql.variant(stores_holders));
            let prepared = all.map(|sql| client.prepare_typed(&sql.text, sql.types));
            match try_join_all(prepared).await {
                // The tables or a permission may be missing; operations that need them fail.
                Err(cause) if cause.code().is_some() => Ok(Vec::new()),
                prepared => prepared,
            }
        };
        match tokio::time::timeout(timeout, drive(driver.as_mut(), preparing)).await {
            Ok(Some(Ok(prepared))) => {
                let client = ClientHandle::Owned(client, Mutex::new(driver));
                Ok(PooledConnection { stores_holders, ..self.connection(client, prepared, epoch) })
            }
            Ok(Some(Err(cause))) => Err(error::map(&cause).without_effect()),
            Ok(None) => Err(error::lost().without_effect()),
            Err(_elapsed) => Err(error::timeout().without_effect()),
        }
    }

    fn connection(
        &self,
        client: ClientHandle,
        prepared: Vec<Statement>,
        epoch: u64,
    ) -> PooledConnection {
        // Some jitter, so that connections that were opened together are not replaced together.
        let age = self.connector.max_connection_age().mul_f64(1.0 - random_fraction() / 5.0);
        let now = Instant::now();
        let ends_at = now.checked_add(age).unwrap_or(now + A_LONG_TIME);
        let stores_holders = self.stores_holders();
        PooledConnection { client, prepared, ends_at, epoch, stores_holders }
    }

    fn idle(&self) -> MutexGuard<'_, Vec<PooledConnection>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Longer than any process runs.
const A_LONG_TIME: Duration = Duration::from_hours(24 * 365 * 30);

impl PooledConnection {
    fn is_old(&self) -> bool {
        Instant::now() >= self.ends_at
    }
}

impl ConnectionGuard<'_> {
    fn connection(&self) -> &PooledConnection {
        self.connection.as_ref().expect("BUG: a guard has a connection until it ends")
    }

    /// Takes the driver of the connection, for [`drive`]. Without it the connection is closed.
    pub(super) fn take_driver(&mut self) -> Option<Pin<Box<Driver>>> {
        match &mut self.connection {
            Some(PooledConnection { client: ClientHandle::Owned(_, driver), .. }) => {
                exclusive(driver).take()
            }
            _ => None,
        }
    }

    pub(super) fn put_driver_back(&mut self, driver: Option<Pin<Box<Driver>>>) {
        if let Some(PooledConnection { client: ClientHandle::Owned(_, place), .. }) =
            &mut self.connection
        {
            *exclusive(place) = driver;
        }
    }

    pub(super) fn client(&self) -> &Client {
        &self.connection().client
    }

    /// Returns whether the statements on this connection use the column `holder`.
    pub(super) fn stores_holders(&self) -> bool {
        self.connection().stores_holders
    }

    /// Sends a statement, prepared if possible, and returns its rows.
    pub(super) async fn query(
        &self,
        (sql, values): Step<'_>,
    ) -> Result<Vec<Row>, tokio_postgres::Error> {
        let connection = self.connection();
        let place = self.pool.statements.all().iter().position(|known| known.text == sql.text);
        let sql = sql.variant(connection.stores_holders);
        let parameters = values[..sql.types.len()].iter().map(|value| value as Parameter<'_>);
        if let Some(prepared) = place.and_then(|place| connection.prepared.get(place)) {
            let parameters: Vec<Parameter<'_>> = parameters.collect();
            return connection.client.query(prepared, &parameters).await;
        }
        let types = sql.types.iter().cloned();
        let parameters: Vec<(Parameter<'_>, Type)> = parameters.zip(types).collect();
        connection.client.query_typed(&sql.text, &parameters).await
    }

    /// Returns the connection to the pool after all answers have come. It is closed if it could not
    /// prepare its statements.
    pub(super) fn give_back(mut self) {
        let Some(connection) = self.connection.take() else { return };
        let is_ours = matches!(connection.client, ClientHandle::Owned(..));
        let is_ready = self.pool.is_pooled() || !connection.prepared.is_empty();
        // A lent client returns by itself when it is dropped.
        let is_current =
            connection.epoch == self.pool.epoch.load(Ordering::SeqCst) && !connection.is_old();
        if is_ours && is_ready && is_current && !connection.client.is_closed() {
            self.pool.idle().push(connection);
        }
    }
}

impl Drop for ConnectionGuard<'_> {
    fn drop(&mut self) {
        // Not all answers have come, so the connection must not be reused.
        if let Some(PooledConnection { client: ClientHandle::External(client), .. }) =
            self.connection.take()
        {
            client.discard();
        }
    }
}
