//! Locks that replicas must confirm. They use a few separate connections, because a connection that
//! waits for replicas serves no other call meanwhile.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use redis::{FromRedisValue, RedisResult, Value};
use tokio::sync::Semaphore;

use super::connection::SharedConnection;
use super::dial::Dialed;
use super::error;
use super::nodes::Nodes;
use super::scripts::Call;
use super::topology::Resolver;
use crate::common::error::{Error, ErrorCode, Result};

/// How many acquires can wait for replicas at once.
const CONNECTIONS: usize = 4;

/// Runs scripts and waits until replicas have received their writes.
pub(super) struct Replicas {
    resolver: Arc<Resolver>,
    wanted: u32,
    timeout: Duration,
    places: Semaphore,
    idle: Mutex<Vec<Dialed>>,
}

/// Where replicas confirm the locks of a shard.
pub(super) enum ReplicaRoute {
    /// Those of the server in charge.
    Server(Replicas),
    /// Those of the node that serves the shard.
    Shard { nodes: Arc<Nodes>, shard: usize },
}

impl ReplicaRoute {
    /// Runs a script and, if it `wrote` something, waits for replicas.
    pub(super) async fn run(
        &self,
        call: &Call,
        wrote: impl Fn(&Value) -> bool + Send,
    ) -> Result<Confirmed> {
        let (nodes, shard) = match self {
            Self::Server(replicas) => {
                return replicas.run(call, wrote).await;
            }
            Self::Shard { nodes, shard } => (nodes, *shard),
        };
        let serving = nodes.serving(shard);
        let node = serving.node().map_err(|cause| error::refused(&cause));
        let replicas = node.map(|node| node.replicas.as_ref());
        let answer = match replicas {
            Ok(Some(replicas)) => replicas.run(call, wrote).await,
            Ok(None) => Err(error::unexpected_response()),
            Err(error) => Err(error),
        };
        if answer.is_err() {
            // The next call finds the node that serves the shard by then.
            nodes.refresh(serving.version).await;
        }
        answer
    }
}

/// An answer, and whether enough replicas have received the write.
pub(super) struct Confirmed {
    pub(super) answer: Value,
    /// The write has taken effect even if this is an error.
    pub(super) confirmation: Result<()>,
}

impl Replicas {
    pub(super) fn new(resolver: Arc<Resolver>, (wanted, timeout): (u32, Duration)) -> Self {
        let places = Semaphore::new(CONNECTIONS);
        Self { resolver, wanted, timeout, places, idle: Mutex::default() }
    }

    /// Runs a script and, if it `wrote` something, waits for replicas.
    ///
    /// `WAIT` covers the writes of its own connection, so the script must write even on a replay.
    ///
    /// A connection is reused only after its last answer. If the call fails or is dropped, the
    /// connection is closed.
    pub(super) async fn run(
        &self,
        call: &Call,
        wrote: impl Fn(&Value) -> bool + Send,
    ) -> Result<Confirmed> {
        let node_timeout = self.resolver.response_timeout();
        let place = tokio::time::timeout(node_timeout, self.places.acquire()).await;
        let Ok(Ok(_place)) = place else {
            return Err(error::timeout().without_effect());
        };
        let idle = self.idle_connection();
        let dialed = match idle {
            Some(dialed) => dialed,
            None => self.connect().await.map_err(|cause| error::refused(&cause))?,
        };
        let connection = SharedConnection::new(dialed.connection.clone());
        let answer = connection.run(call).await.map_err(|cause| {
            // The others lead to the same server, which may be gone or no longer in charge.
            self.idle().clear();
            error::map(&cause)
        })?;
        if !wrote(&answer) {
            self.idle().push(dialed);
            return Ok(Confirmed { answer, confirmation: Ok(()) });
        }
        let mut wait = redis::cmd("WAIT");
        wait.arg(self.wanted).arg(u64::try_from(self.timeout.as_millis()).unwrap_or(u64::MAX));
        let confirmation = match connection.send(wait).await.and_then(Value::extract_error) {
            Ok(count) => {
                self.idle().push(dialed);
                match u32::from_redis_value(count) {
                    Ok(count) if count >= self.wanted => Ok(()),
                    _ => Err(self.refusal()),
                }
            }
            Err(cause) => Err(error::map(&cause)),
        };
        Ok(Confirmed { answer, confirmation })
    }

    fn refusal(&self) -> Error {
        Error::new(
            ErrorCode::ServiceUnavailable,
            format!("fewer than {} replicas confirmed the lock in time", self.wanted),
        )
    }

    async fn connect(&self) -> RedisResult<Dialed> {
        let node_timeout = self.resolver.response_timeout() + self.timeout;
        let config = self.resolver.connection_config().set_response_timeout(Some(node_timeout));
        self.resolver.connect(config).await
    }

    /// Takes an idle connection that the server has not closed.
    fn idle_connection(&self) -> Option<Dialed> {
        let mut idle = self.idle();
        idle.retain(|dialed| !dialed.is_closed());
        idle.pop()
    }

    fn idle(&self) -> std::sync::MutexGuard<'_, Vec<Dialed>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
