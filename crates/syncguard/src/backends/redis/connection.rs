//! The one connection that all locks share.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use redis::aio::{ConnectionLike, MultiplexedConnection};
use redis::{Cmd, RedisError, RedisFuture, RedisResult, Value};
use tokio::sync::watch;
use tokio::time::{Instant, timeout};

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
    Theirs {
        connection: SharedConnection,
        /// For what no lock needs; locks have the connection's own timeouts.
        inspection_timeout: Duration,
    },
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
            Self::Theirs { connection, .. } => {
                let mut line = Line::Theirs(connection.clone());
                let answer = script.run(&mut line, keys, arguments).await;
                answer.map_err(|cause| error::map(&cause, operation))
            }
        }
    }

    /// Runs a script, unless its keys are at two nodes while their slot moves: then nothing.
    pub(super) async fn run_together(
        &self,
        operation: &'static str,
        script: &Script,
        keys: &[&str],
        arguments: &[Argument<'_>],
    ) -> Result<Option<Value>> {
        match self {
            Self::Ours(connection) => {
                connection.drive(operation, script, keys, arguments, true).await
            }
            Self::Theirs { .. } => self.run(operation, script, keys, arguments).await.map(Some),
        }
    }

    /// The number of the connection in use.
    pub(super) fn generation(&self) -> u64 {
        match self {
            Self::Ours(connection) => connection.shared.state().generation,
            Self::Theirs { .. } => 0,
        }
    }

    /// Gives a connection up that did not answer in time, unless that has been done already. The
    /// caller's own looks after itself.
    pub(super) fn distrust(&self, generation: u64) {
        if let Self::Ours(connection) = self {
            connection.replace(generation);
        }
    }

    /// Runs a script that no lock needs, with a deadline also on a connection that has none.
    pub(super) async fn inspect(
        &self,
        operation: &'static str,
        script: &Script,
        keys: &[&str],
        arguments: &[Argument<'_>],
    ) -> Result<Value> {
        let answer = self.run(operation, script, keys, arguments);
        match self {
            Self::Ours(_) => answer.await,
            Self::Theirs { inspection_timeout, .. } => timeout(*inspection_timeout, answer)
                .await
                .unwrap_or_else(|_elapsed| Err(error::timeout(operation))),
        }
    }

    /// Sends a command that is no script and that no lock needs.
    pub(super) async fn ask(&self, command: Cmd) -> RedisResult<Value> {
        match self {
            Self::Ours(connection) => Line::Ours(connection.link().await?.1).send(command).await,
            Self::Theirs { connection, inspection_timeout } => {
                let mut line = Line::Theirs(connection.clone());
                timeout(*inspection_timeout, line.send(command))
                    .await
                    .unwrap_or_else(|_elapsed| Err(io::Error::from(io::ErrorKind::TimedOut).into()))
            }
        }
    }
}

/// A multiplexed connection to the server in charge. It connects again by itself, once for all who
/// wait for it.
///
/// A call that was under way is never repeated, unless the server said that it did nothing because
/// another server is in charge, or may be. A connection that failed, or on which an answer did not come in time, is replaced: a
/// late answer is nobody's any more.
pub(super) struct Multiplexed {
    shared: Arc<Shared>,
}

struct Shared {
    finder: Arc<Finder>,
    state: Mutex<State>,
    /// To the node that imports our slot, and its address. One call at a time: `ASKING` is about
    /// the next command on its connection.
    importing: tokio::sync::Mutex<Option<(String, MultiplexedConnection)>>,
}

struct State {
    /// Counts connections, so that nobody replaces one that he has not used.
    generation: u64,
    /// Failures to connect, in a row.
    failures: u32,
    link: Link,
}

enum Link {
    Up {
        connection: MultiplexedConnection,
        since: Instant,
    },
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
    /// Nothing was done, because this server cannot serve now; another may be in charge by now.
    Search,
    /// Nothing was done, because the keys are at the node that imports the slot, or will be.
    Ask,
    /// Nothing was done, because some of the keys are at one node and some at another.
    Wait,
}

impl Multiplexed {
    /// Connects.
    pub(super) async fn open(finder: Arc<Finder>) -> Result<Self> {
        let state = State { generation: 0, failures: 0, link: Link::Down };
        let (state, importing) = (Mutex::new(state), tokio::sync::Mutex::default());
        let connection = Self { shared: Arc::new(Shared { finder, state, importing }) };
        match connection.link().await {
            Ok(_) => Ok(connection),
            Err(cause) if is_full(&connection.shared.finder, &cause).await => Err(error::full()),
            Err(cause) => Err(error::refused(&cause, error::CONNECT)),
        }
    }

    async fn run(
        &self,
        operation: &'static str,
        script: &Script,
        keys: &[&str],
        arguments: &[Argument<'_>],
    ) -> Result<Value> {
        let answer = self.drive(operation, script, keys, arguments, false).await?;
        answer.ok_or_else(|| error::unexpected_response(operation))
    }

    /// Runs a script at whichever server is in charge. Keys that are at two nodes are waited for, or
    /// answered with nothing at once if the caller can do without.
    async fn drive(
        &self,
        operation: &'static str,
        script: &Script,
        keys: &[&str],
        arguments: &[Argument<'_>],
        may_be_apart: bool,
    ) -> Result<Option<Value>> {
        const REDIRECTS: u32 = 3;
        const SLOT_DELAY: Duration = Duration::from_millis(40);
        let (mut redirects, mut has_searched, mut moving_since) = (0, false, None);
        loop {
            let (generation, link) =
                self.link().await.map_err(|cause| error::refused(&cause, operation))?;
            let mut answer = script.run(&mut Line::Ours(link), keys, arguments).await;
            if let Err(cause) = &answer
                && matches!(self.remedy(cause), Remedy::Ask)
            {
                // Rare ways are boxed, here and in the operations: the future of a call is small.
                answer = Box::pin(self.ask_the_importer(cause, script, keys, arguments))
                    .await
                    .map_err(|cause| error::refused(&cause, operation))?;
            }
            let cause = match answer {
                Ok(answer) => return Ok(Some(answer)),
                Err(cause) => cause,
            };
            match self.remedy(&cause) {
                Remedy::Wait if may_be_apart => return Ok(None),
                Remedy::None => {}
                Remedy::Replace => self.replace(generation),
                Remedy::Redirect => {
                    self.replace(generation);
                    redirects += 1;
                    if redirects <= REDIRECTS {
                        continue;
                    }
                }
                Remedy::Search => {
                    if !has_searched && self.may_search(generation) {
                        has_searched = true;
                        self.replace(generation);
                        continue;
                    }
                }
                Remedy::Ask | Remedy::Wait => {
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
            Some("NOREPLICAS" | "CLUSTERDOWN" | "MASTERDOWN") if has_others => Remedy::Search,
            Some("ASK") if has_others => Remedy::Ask,
            Some("TRYAGAIN") if has_others => Remedy::Wait,
            // After a READONLY the same address may lead to another server by now.
            None | Some("NOAUTH" | "WRONGPASS" | "READONLY" | "MASTERDOWN") => Remedy::Replace,
            Some(_) => Remedy::None,
        }
    }

    /// Runs a script at the node that imports our slot. `ASK` says that none of the keys is at the
    /// node that has the slot, and none can come to be there; so whatever exists of them is here.
    ///
    /// The outer error is about what came before the script: nothing was done.
    async fn ask_the_importer(
        &self,
        redirection: &RedisError,
        script: &Script,
        keys: &[&str],
        arguments: &[Argument<'_>],
    ) -> RedisResult<RedisResult<Value>> {
        let Some((address, _slot)) = redirection.redirect_node() else {
            return Err(redirection.clone());
        };
        let limit = self.shared.finder.response_timeout();
        let Ok(mut importing) = timeout(limit, self.shared.importing.lock()).await else {
            return Err(io::Error::from(io::ErrorKind::TimedOut).into());
        };
        // Put back only after its last answer: dropped or failed half-way, it is closed.
        let connection = match importing.take() {
            Some((known, connection)) if known == address => connection,
            _ => self.shared.finder.connect_to(address).await?,
        };
        let mut line = Line::Ours(connection.clone());
        match line.send(redis::cmd("ASKING")).await {
            // A user who may not ask there waits until the slot has moved.
            Err(cause) if cause.code().is_some() => return Ok(Err(redirection.clone())),
            answer => answer?,
        };
        let answer = script.run_asked(&mut line, keys, arguments).await;
        if answer.as_ref().err().is_none_or(|cause| cause.code().is_some()) {
            *importing = Some((address.to_owned(), connection));
        }
        Ok(answer)
    }

    /// Whether it is time to look for the server in charge again: not right after the last time, or
    /// a server that cannot serve would be searched for by every call.
    fn may_search(&self, generation: u64) -> bool {
        const INTERVAL: Duration = Duration::from_millis(500);
        let state = self.shared.state();
        match &state.link {
            Link::Up { since, .. } if state.generation == generation => since.elapsed() >= INTERVAL,
            // Somebody has done so.
            _ => true,
        }
    }

    /// The connection and its number. Connects when there is none, once for all who ask.
    async fn link(&self) -> RedisResult<(u64, MultiplexedConnection)> {
        let (generation, mut coming) = {
            let mut state = self.shared.state();
            let coming = match &state.link {
                Link::Up { connection, .. } => {
                    return Ok((state.generation, connection.clone()));
                }
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
                Ok(connection) => {
                    (0, Link::Up { connection: connection.clone(), since: Instant::now() })
                }
                Err(_) => (state.failures.saturating_add(1), Link::Down),
            };
        }
        done.send_replace(Some(connected));
    }
}

/// Whether connecting failed because the server has as many clients as it allows. Such a server says
/// so at once and closes, before the driver has asked anything; the driver only sees that the
/// connection was closed. Its code is only `ERR`, so here the words decide.
async fn is_full(finder: &Finder, cause: &RedisError) -> bool {
    if cause.code().is_some() || cause.is_timeout() || cause.is_connection_refusal() {
        return false;
    }
    let greeting = finder.greeting().await;
    greeting.is_some_and(|text| text.starts_with("-ERR max number of clients reached"))
}
