//! The connection that the locks of a server share.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use redis::aio::{ConnectionLike, MultiplexedConnection};
use redis::{Cmd, RedisError, RedisFuture, RedisResult, Value};
use tokio::sync::watch;
use tokio::time::{Instant, timeout};

use super::dial::Dialed;
use super::error;
use super::scripts::{Call, is_unknown};
use super::topology::Resolver;
use crate::common::backoff::reconnect_delay;
use crate::common::error::Result;

/// A connection with its type erased, for example the caller's own.
#[derive(Clone)]
pub(super) struct SharedConnection {
    database: i64,
    send: Arc<dyn Fn(Cmd) -> RedisFuture<'static, Value> + Send + Sync>,
}

impl SharedConnection {
    pub(super) fn new<C: ConnectionLike + Clone + Send + Sync + 'static>(connection: C) -> Self {
        let database = connection.get_db();
        let send = Arc::new(move |command| {
            let mut connection = connection.clone();
            Box::pin(async move { connection.req_packed_command(&command).await })
                as RedisFuture<'static, Value>
        });
        Self { database, send }
    }

    pub(super) fn database(&self) -> i64 {
        self.database
    }

    /// Runs a script, in one round trip if the server knows it.
    pub(super) async fn run(&self, call: &Call) -> RedisResult<Value> {
        match self.send(call.command.clone()).await.and_then(Value::extract_error) {
            Err(cause) if is_unknown(&cause) => {
                self.send(call.with_text()).await.and_then(Value::extract_error)
            }
            answer => answer,
        }
    }

    /// Sends a command. Its answer may contain an error.
    pub(super) fn send(&self, command: Cmd) -> RedisFuture<'static, Value> {
        (self.send)(command)
    }
}

/// A multiplexed connection to the server in charge. It reconnects by itself, once for all callers.
///
/// A call in progress is never repeated, unless the server reports that it did nothing because
/// another server is in charge, or may be. A connection that failed, or on which an answer did not
/// come in time, is replaced, and late answers on it are discarded.
#[derive(Clone)]
pub(super) struct Multiplexed {
    shared: Arc<MultiplexedInner>,
}

struct MultiplexedInner {
    resolver: Arc<Resolver>,
    state: Mutex<MultiplexedState>,
    /// The connection to the node that imports our slot, and its address. It serves one call at a
    /// time, because `ASKING` applies to the next command on the connection.
    importing: tokio::sync::Mutex<Option<(String, MultiplexedConnection)>>,
}

struct MultiplexedState {
    /// Counts connections, so that a call replaces only the connection that it used.
    generation: u64,
    /// The number of failures to connect in a row.
    failures: u32,
    link: ConnectionState,
}

enum ConnectionState {
    Connected {
        dialed: Dialed,
        since: Instant,
    },
    /// A task is connecting; all callers wait for it.
    Connecting(watch::Receiver<Option<RedisResult<Dialed>>>),
    Disconnected,
}

impl Multiplexed {
    pub(super) fn resolver(&self) -> &Resolver {
        &self.shared.resolver
    }

    /// Returns the number of the connection in use.
    pub(super) fn generation(&self) -> u64 {
        self.shared.state().generation
    }

    /// Creates a connection that connects when it is used.
    pub(super) fn new(resolver: Arc<Resolver>) -> Self {
        let state =
            MultiplexedState { generation: 0, failures: 0, link: ConnectionState::Disconnected };
        let (state, importing) = (Mutex::new(state), tokio::sync::Mutex::default());
        Self { shared: Arc::new(MultiplexedInner { resolver, state, importing }) }
    }

    /// Connects.
    pub(super) async fn open(resolver: Arc<Resolver>) -> Result<Self> {
        let connection = Self::new(resolver);
        match connection.link().await {
            Ok(_) => Ok(connection),
            Err(cause) => Err(error::refused(&cause)),
        }
    }

    /// Runs a script on the node that imports our slot. `ASK` means that none of the keys is on the
    /// node that owns the slot, and none can be created there, so those that exist are here.
    ///
    /// The outer error comes from before the script: nothing was done.
    pub(super) async fn ask_the_importer(
        &self,
        redirection: &RedisError,
        call: &Call,
    ) -> RedisResult<RedisResult<Value>> {
        let Some((address, _slot)) = redirection.redirect_node() else {
            return Err(redirection.clone());
        };
        let limit = self.shared.resolver.response_timeout();
        let Ok(mut importing) = timeout(limit, self.shared.importing.lock()).await else {
            return Err(io::Error::from(io::ErrorKind::TimedOut).into());
        };
        // Put back only after its last answer: if this call fails or is dropped, it is closed.
        let mut connection = match importing.take() {
            Some((known, connection)) if known == address => connection,
            _ => self.shared.resolver.connect_to(address).await?,
        };
        match connection
            .req_packed_command(&redis::cmd("ASKING"))
            .await
            .and_then(Value::extract_error)
        {
            // A user who may not send ASKING waits until the slot has moved.
            Err(cause) if cause.code().is_some() => return Ok(Err(redirection.clone())),
            answer => answer?,
        };
        let answer =
            connection.req_packed_command(&call.asked()).await.and_then(Value::extract_error);
        if answer.as_ref().err().is_none_or(|cause| cause.code().is_some()) {
            *importing = Some((address.to_owned(), connection));
        }
        Ok(answer)
    }

    /// Returns whether to look for the server in charge again: not right after the last time, or
    /// every call to a server that cannot serve would start a search.
    pub(super) fn may_search(&self, generation: u64) -> bool {
        const INTERVAL: Duration = Duration::from_millis(500);
        let state = self.shared.state();
        match &state.link {
            ConnectionState::Connected { since, .. } if state.generation == generation => {
                since.elapsed() >= INTERVAL
            }
            // Another call has replaced the connection.
            _ => true,
        }
    }

    /// Returns the connection and its number. Connects if there is none, once for all callers.
    pub(super) async fn link(&self) -> RedisResult<(u64, MultiplexedConnection)> {
        let (generation, mut connecting) = {
            let mut state = self.shared.state();
            if let ConnectionState::Connected { dialed, .. } = &state.link
                && dialed.is_closed()
            {
                // Nothing was sent on it.
                state.disconnect();
            }
            let connecting = match &state.link {
                ConnectionState::Connected { dialed, .. } => {
                    return Ok((state.generation, dialed.connection.clone()));
                }
                ConnectionState::Connecting(connecting) => connecting.clone(),
                ConnectionState::Disconnected => {
                    let (sender, connecting) = watch::channel(None);
                    // In a task, so that a caller that is dropped does not stop it for the others.
                    let shared = Arc::clone(&self.shared);
                    let delay = reconnect_delay(state.failures);
                    tokio::spawn(shared.connect(state.generation, delay, sender));
                    state.link = ConnectionState::Connecting(connecting.clone());
                    connecting
                }
            };
            (state.generation, connecting)
        };
        let outcome = match connecting.wait_for(Option::is_some).await {
            Ok(outcome) => outcome.clone(),
            // The runtime of that task has ended; the next caller connects in its own.
            Err(_closed) => None,
        };
        let connected = outcome.unwrap_or_else(|| {
            self.replace(generation);
            Err(io::Error::from(io::ErrorKind::ConnectionAborted).into())
        });
        connected.map(|dialed| (generation, dialed.connection))
    }

    /// Drops a connection, unless another call has already done so.
    pub(super) fn replace(&self, generation: u64) {
        let mut state = self.shared.state();
        if state.generation == generation {
            state.disconnect();
        }
    }
}

impl MultiplexedState {
    fn disconnect(&mut self) {
        self.generation += 1;
        self.link = ConnectionState::Disconnected;
    }
}

impl MultiplexedInner {
    fn state(&self) -> MutexGuard<'_, MultiplexedState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn connect(
        self: Arc<Self>,
        generation: u64,
        delay: Duration,
        done: watch::Sender<Option<RedisResult<Dialed>>>,
    ) {
        tokio::time::sleep(delay).await;
        let mut connected = self.resolver.connect(self.resolver.connection_config()).await;
        if let Err(cause) = &connected
            && is_full(&self.resolver, cause).await
        {
            connected = Err(error::full());
        }
        // A call may have given up this attempt; then another one counts.
        if let mut state = self.state()
            && state.generation == generation
        {
            (state.failures, state.link) = match &connected {
                Ok(dialed) => (
                    0,
                    ConnectionState::Connected { dialed: dialed.clone(), since: Instant::now() },
                ),
                Err(_) => (state.failures.saturating_add(1), ConnectionState::Disconnected),
            };
        }
        done.send_replace(Some(connected));
    }
}

/// Returns whether connecting failed because the server has reached `maxclients`. Such a server
/// sends an error and closes before the driver sends anything, so the driver only sees a closed
/// connection. The error has no code but `ERR`, so its text decides.
async fn is_full(resolver: &Resolver, cause: &RedisError) -> bool {
    if cause.code().is_some() || cause.is_timeout() || cause.is_connection_refusal() {
        return false;
    }
    let greeting = resolver.greeting().await;
    greeting.is_some_and(|text| text.starts_with("-ERR max number of clients reached"))
}
