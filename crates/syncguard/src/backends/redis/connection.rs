//! The one connection that all locks share.

use std::io::{self, Read};
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use redis::aio::{ConnectionLike, MultiplexedConnection};
use redis::{Cmd, ConnectionAddr, RedisError, RedisFuture, RedisResult, Value};
use tokio::sync::watch;
use tokio::time::Instant;

use super::error;
use super::scripts::{Argument, Script};
use super::topology::Finder;
use crate::common::backoff::{random_fraction, reconnect_delay};
use crate::common::error::Result;

/// Where commands are sent.
pub(super) enum Line {
    Ours(MultiplexedConnection),
    Theirs(SharedConnection),
}

impl Line {
    pub(super) async fn send(&mut self, command: Cmd) -> RedisResult<Value> {
        match self {
            Self::Ours(connection) => command.query_async(connection).await,
            Self::Theirs(connection) => (connection.send)(command).await?.extract_error(),
        }
    }
}

/// A connection of the caller's own, of whatever type.
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
}

/// The connection for all locks: ours, or the caller's own, which looks after itself.
pub(super) enum Connection {
    Ours(Multiplexed),
    Theirs(SharedConnection),
}

impl Connection {
    /// Runs a script.
    pub(super) async fn run(
        &self,
        operation: &'static str,
        script: &Script,
        keys: &[&str],
        arguments: &[Argument<'_>],
    ) -> Result<Value> {
        match self {
            Self::Ours(connection) => connection.run(operation, script, keys, arguments).await,
            Self::Theirs(connection) => {
                let mut line = Line::Theirs(connection.clone());
                let answer = script.run(&mut line, keys, arguments).await;
                answer.map_err(|cause| error::map(&cause, operation))
            }
        }
    }

    /// Sends a command that is no script.
    pub(super) async fn ask(&self, command: Cmd) -> RedisResult<Value> {
        let mut line = match self {
            Self::Ours(connection) => Line::Ours(connection.link().await?.1),
            Self::Theirs(connection) => Line::Theirs(connection.clone()),
        };
        line.send(command).await
    }
}

/// A multiplexed connection to the server in charge. It connects again by itself, once for all who
/// wait for it.
///
/// A call that was under way is never repeated, unless the server said that it is not in charge and
/// did nothing. A connection that failed, or on which an answer did not come in time, is replaced: a
/// late answer is nobody's any more.
pub(super) struct Multiplexed {
    shared: Arc<Shared>,
}

struct Shared {
    finder: Arc<Finder>,
    state: Mutex<State>,
}

struct State {
    /// Counts connections, so that nobody replaces one that he has not used.
    generation: u64,
    /// Failures to connect, in a row.
    failures: u32,
    link: Link,
}

enum Link {
    Up(MultiplexedConnection),
    /// Somebody is connecting; all who need it wait for the same.
    Coming(watch::Receiver<Option<RedisResult<MultiplexedConnection>>>),
    Down,
}

/// What an error means for the connection and for the call.
enum Remedy {
    /// The call is over, the connection is fine.
    None,
    /// The call is over, and so is the connection.
    Replace,
    /// Nothing was done, because this server is not in charge; another may be.
    Redirect,
    /// Nothing was done, because the slot is on its way to another server.
    Wait,
}

impl Multiplexed {
    /// Connects.
    pub(super) async fn open(finder: Arc<Finder>) -> Result<Self> {
        let state = State { generation: 0, failures: 0, link: Link::Down };
        let connection = Self { shared: Arc::new(Shared { finder, state: Mutex::new(state) }) };
        match connection.link().await {
            Ok(_) => Ok(connection),
            Err(cause) => {
                let is_full = refused_for_too_many_clients(&connection.shared.finder).await;
                let error =
                    if is_full { error::full() } else { error::map(&cause, error::CONNECT) };
                Err(error.without_effect())
            }
        }
    }

    async fn run(
        &self,
        operation: &'static str,
        script: &Script,
        keys: &[&str],
        arguments: &[Argument<'_>],
    ) -> Result<Value> {
        const REDIRECTS: u32 = 3;
        const SLOT_DELAY: Duration = Duration::from_millis(40);
        let (mut redirects, mut moving_since) = (0, None);
        loop {
            let (generation, link) = self
                .link()
                .await
                .map_err(|cause| error::map(&cause, operation).without_effect())?;
            let cause = match script.run(&mut Line::Ours(link), keys, arguments).await {
                Ok(answer) => return Ok(answer),
                Err(cause) => cause,
            };
            match self.remedy(&cause) {
                Remedy::None => {}
                Remedy::Replace => self.replace(generation),
                Remedy::Redirect => {
                    self.replace(generation);
                    redirects += 1;
                    if redirects <= REDIRECTS {
                        continue;
                    }
                }
                Remedy::Wait => {
                    let since = *moving_since.get_or_insert_with(Instant::now);
                    if since.elapsed() < self.shared.finder.response_timeout() {
                        tokio::time::sleep(SLOT_DELAY.mul_f64(random_fraction())).await;
                        continue;
                    }
                }
            }
            return Err(error::map(&cause, operation));
        }
    }

    fn remedy(&self, cause: &RedisError) -> Remedy {
        let has_others = self.shared.finder.has_others();
        match cause.code() {
            Some("MOVED" | "READONLY") if has_others => Remedy::Redirect,
            Some("ASK" | "TRYAGAIN") if has_others => Remedy::Wait,
            // After a READONLY the same address may lead to another server by now.
            None | Some("NOAUTH" | "WRONGPASS" | "READONLY") => Remedy::Replace,
            Some(_) => Remedy::None,
        }
    }

    /// The connection and its number. Connects when there is none, once for all who ask.
    async fn link(&self) -> RedisResult<(u64, MultiplexedConnection)> {
        let (generation, mut coming) = {
            let mut state = self.shared.state();
            let coming = match &state.link {
                Link::Up(connection) => return Ok((state.generation, connection.clone())),
                Link::Coming(coming) => coming.clone(),
                Link::Down => {
                    let (sender, coming) = watch::channel(None);
                    // In a task, so that a caller who leaves takes nobody's connection with him.
                    let shared = Arc::clone(&self.shared);
                    tokio::spawn(shared.connect(reconnect_delay(state.failures), sender));
                    state.link = Link::Coming(coming.clone());
                    coming
                }
            };
            (state.generation, coming)
        };
        let outcome = match coming.wait_for(Option::is_some).await {
            Ok(outcome) => outcome.clone(),
            // Its runtime has ended; whoever comes next connects in theirs.
            Err(_closed) => None,
        };
        let connected = outcome.unwrap_or_else(|| {
            self.replace(generation);
            Err(io::Error::from(io::ErrorKind::ConnectionAborted).into())
        });
        connected.map(|connection| (generation, connection))
    }

    /// Gives a connection up, unless somebody has done so already.
    fn replace(&self, generation: u64) {
        let mut state = self.shared.state();
        if state.generation == generation {
            state.generation += 1;
            state.link = Link::Down;
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn connect(
        self: Arc<Self>,
        delay: Duration,
        done: watch::Sender<Option<RedisResult<MultiplexedConnection>>>,
    ) {
        tokio::time::sleep(delay).await;
        let connected = self.finder.connect(self.finder.connection_config()).await;
        {
            let mut state = self.state();
            (state.failures, state.link) = match &connected {
                Ok(connection) => (0, Link::Up(connection.clone())),
                Err(_) => (state.failures.saturating_add(1), Link::Down),
            };
        }
        done.send_replace(Some(connected));
    }
}

/// A server that is full says so at once and closes, before the driver has asked anything; the
/// driver only sees that the connection was closed. So ask the server ourselves.
async fn refused_for_too_many_clients(finder: &Finder) -> bool {
    let Some(ConnectionAddr::Tcp(host, port)) = finder.address().cloned() else { return false };
    let timeout = finder.connect_timeout();
    let greeting = move || -> io::Result<String> {
        let mut addresses = (host.as_str(), port).to_socket_addrs()?;
        let address = addresses.next().ok_or(io::ErrorKind::NotFound)?;
        let stream = TcpStream::connect_timeout(&address, timeout)?;
        stream.set_read_timeout(Some(Duration::from_millis(200)))?;
        let mut text = String::new();
        // A server that is not full says nothing until it is asked.
        stream.take(64).read_to_string(&mut text)?;
        Ok(text)
    };
    let greeting = tokio::task::spawn_blocking(greeting).await;
    matches!(greeting, Ok(Ok(text)) if text.starts_with("-ERR max number of clients reached"))
}
