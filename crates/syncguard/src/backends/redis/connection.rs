//! The one connection that all locks share.

use std::io::Read;
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use redis::aio::{ConnectionManager, ConnectionManagerConfig};
use redis::{Client, ConnectionAddr, RedisResult, Value};

use super::error;
use super::scripts::Script;
use crate::common::error::Result;

/// A multiplexed connection that connects again by itself.
///
/// The driver never repeats a call that was under way. A connection that failed, or on which an
/// answer did not come in time, is replaced; the next call connects.
pub(super) struct Connection {
    client: Client,
    config: ConnectionManagerConfig,
    current: Mutex<Current>,
}

struct Current {
    generation: u64,
    manager: ConnectionManager,
}

impl Connection {
    pub(super) async fn open(
        client: Client,
        connect_timeout: Duration,
        response_timeout: Duration,
    ) -> Result<Self> {
        let config = ConnectionManagerConfig::new()
            .set_connection_timeout(Some(connect_timeout))
            .set_response_timeout(Some(response_timeout))
            .set_min_delay(Duration::from_millis(20))
            .set_max_delay(Duration::from_secs(1))
            .set_number_of_retries(0);
        let connecting = ConnectionManager::new_with_config(client.clone(), config.clone());
        let manager = match tokio::time::timeout(connect_timeout, connecting).await {
            Ok(Ok(manager)) => manager,
            Ok(Err(cause)) => {
                let is_full = refused_for_too_many_clients(&client, connect_timeout).await;
                return Err(if is_full { error::full() } else { error::map(&cause, "connect") });
            }
            Err(_elapsed) => return Err(error::timeout("connect").without_effect()),
        };
        let current = Mutex::new(Current { generation: 0, manager });
        Ok(Self { client, config, current })
    }

    pub(super) fn client(&self) -> &Client {
        &self.client
    }

    /// Runs a script.
    pub(super) async fn run(
        &self,
        operation: &'static str,
        script: &Script,
        keys: &[&str],
        arguments: &[&str],
    ) -> Result<Value> {
        let (generation, manager) = {
            let current = self.current();
            (current.generation, current.manager.clone())
        };
        // The driver bounds connecting and answering, by the timeouts it was given.
        script.run(manager, keys, arguments).await.map_err(|cause| {
            // The driver would answer some failures to connect for ever, and a late answer on a
            // connection that was too slow is nobody's any more.
            if cause.code().is_none_or(|code| matches!(code, "NOAUTH" | "WRONGPASS")) {
                self.replace(generation);
            }
            error::map(&cause, operation)
        })
    }

    /// The version of the server, where the user may ask for it.
    pub(super) async fn server_version(&self) -> Option<String> {
        let mut manager = self.current().manager.clone();
        let info: RedisResult<String> =
            redis::cmd("INFO").arg("server").query_async(&mut manager).await;
        let version = |info: &str| {
            let line = info.lines().find_map(|line| line.strip_prefix("redis_version:"));
            line.map(str::to_owned)
        };
        info.ok().as_deref().and_then(version)
    }

    /// Replaces the connection, unless somebody has done so already.
    fn replace(&self, generation: u64) {
        let mut current = self.current();
        if current.generation == generation
            && let Ok(manager) =
                ConnectionManager::new_lazy_with_config(self.client.clone(), self.config.clone())
        {
            *current = Current { generation: generation + 1, manager };
        }
    }

    fn current(&self) -> MutexGuard<'_, Current> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A server that is full says so at once and closes, before the driver has asked anything; the
/// driver only sees that the connection was closed. So ask the server ourselves.
async fn refused_for_too_many_clients(client: &Client, timeout: Duration) -> bool {
    let ConnectionAddr::Tcp(host, port) = client.get_connection_info().addr().clone() else {
        return false;
    };
    let greeting = move || -> std::io::Result<String> {
        let mut addresses = (host.as_str(), port).to_socket_addrs()?;
        let address = addresses.next().ok_or(std::io::ErrorKind::NotFound)?;
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
