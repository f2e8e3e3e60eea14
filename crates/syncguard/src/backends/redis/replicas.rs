//! Locks that replicas have confirmed: a few connections of their own, because one that waits for
//! replicas serves nobody else meanwhile.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{FromRedisValue, RedisResult, Value};
use tokio::sync::Semaphore;

use super::connection::Line;
use super::error;
use super::scripts::{Argument, Script};
use super::topology::Finder;
use crate::common::error::{Error, ErrorCode, Result};

/// How many acquires can wait for replicas at once.
const CONNECTIONS: usize = 4;

/// Runs scripts and waits until replicas have what they wrote.
pub(super) struct Replicas {
    finder: Arc<Finder>,
    wanted: u32,
    timeout: Duration,
    places: Semaphore,
    idle: Mutex<Vec<MultiplexedConnection>>,
}

/// An answer, and whether enough replicas have the write behind it.
pub(super) struct Confirmed {
    pub(super) answer: Value,
    /// An error says nothing about whether the write took effect: it did.
    pub(super) confirmation: Result<()>,
}

impl Replicas {
    pub(super) fn new(finder: Arc<Finder>, (wanted, timeout): (u32, Duration)) -> Self {
        let places = Semaphore::new(CONNECTIONS);
        Self { finder, wanted, timeout, places, idle: Mutex::default() }
    }

    /// Runs a script and, if it `wrote` something, waits for replicas.
    ///
    /// `WAIT` covers what this connection wrote, so the script must write, also on a replay.
    ///
    /// A connection goes back only after its last answer; dropped or failed, it is closed.
    pub(super) async fn run(
        &self,
        operation: &'static str,
        script: &Script,
        keys: &[&str],
        arguments: &[Argument<'_>],
        wrote: impl Fn(&Value) -> bool + Send,
    ) -> Result<Confirmed> {
        let patience = self.finder.response_timeout();
        let place = tokio::time::timeout(patience, self.places.acquire()).await;
        let Ok(Ok(_place)) = place else {
            return Err(error::timeout(operation).without_effect());
        };
        let idle = self.idle().pop();
        let connection = match idle {
            Some(connection) => connection,
            None => self.connect().await.map_err(|cause| error::refused(&cause, operation))?,
        };
        let mut line = Line::Ours(connection.clone());
        let answer = script.run(&mut line, keys, arguments).await.map_err(|cause| {
            // The others lead to the same server, which may be gone or in charge no more.
            self.idle().clear();
            error::map(&cause, operation)
        })?;
        if !wrote(&answer) {
            self.idle().push(connection);
            return Ok(Confirmed { answer, confirmation: Ok(()) });
        }
        let mut wait = redis::cmd("WAIT");
        wait.arg(self.wanted).arg(u64::try_from(self.timeout.as_millis()).unwrap_or(u64::MAX));
        let confirmation = match line.send(wait).await {
            Ok(count) => {
                self.idle().push(connection);
                match u32::from_redis_value(count) {
                    Ok(count) if count >= self.wanted => Ok(()),
                    _ => Err(self.refusal(operation)),
                }
            }
            Err(cause) => Err(error::map(&cause, operation)),
        };
        Ok(Confirmed { answer, confirmation })
    }

    fn refusal(&self, operation: &'static str) -> Error {
        Error::new(
            ErrorCode::ServiceUnavailable,
            format!("fewer than {} replicas confirmed the lock in time", self.wanted),
        )
        .with_operation("redis", operation)
    }

    async fn connect(&self) -> RedisResult<MultiplexedConnection> {
        let patience = self.finder.response_timeout() + self.timeout;
        let config = self.finder.connection_config().set_response_timeout(Some(patience));
        self.finder.connect(config).await
    }

    fn idle(&self) -> std::sync::MutexGuard<'_, Vec<MultiplexedConnection>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
