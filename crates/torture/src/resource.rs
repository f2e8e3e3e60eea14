//! A fenced resource in the store under test: keys of Redis, rows of PostgreSQL. Both keep the
//! order in which writes were accepted. Unlike the register, it suffers the faults of the store.

use std::time::Duration;

use syncguard::postgres::{FencedTable, tokio_postgres};
use syncguard::redis::{FencedKeys, FencedScript, redis};
use syncguard::{Error, Fence, Key};
use tokio::sync::Mutex;

use crate::journal::number_of;
use crate::register::Accepted;

/// The key of Redis, and the table of PostgreSQL, to which accepted writes are appended.
pub const LOG: &str = "torture_log";
/// The table of the largest fences.
const FENCES: &str = "torture_fences";

/// The SQL that returns the accepted writes, in order.
pub const READ_SQL: &str =
    "SELECT key || ' ' || fence || ' ' || id FROM torture_log ORDER BY place";

/// Returns the SQL that creates the tables.
///
/// # Panics
///
/// Never panics, because the name is valid.
#[must_use]
pub fn schema_sql() -> String {
    let fences = FencedTable::new(FENCES).expect("a valid name").schema_sql();
    format!("{fences}; CREATE TABLE {LOG} (place bigserial, key int, fence bigint, id text)")
}

/// Reads accepted writes, one `key fence id` per line.
#[must_use]
pub fn parse(log: &str) -> Vec<Accepted> {
    let accepted = |line: &str| {
        let mut fields = line.split(' ');
        let (key, fence) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
        Some(Accepted { key, fence, id: fields.next()?.to_owned() })
    };
    log.lines().filter_map(accepted).collect()
}

/// A client's connection to the resource. Only one write at a time uses it.
#[derive(Debug)]
pub struct Resource {
    url: String,
    connection: Mutex<Option<Connection>>,
}

enum Connection {
    Redis(redis::aio::MultiplexedConnection),
    Postgres(tokio_postgres::Client),
}

impl std::fmt::Debug for Connection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Connection")
    }
}

impl Resource {
    /// Creates a resource in the store with a URL, whose options are ignored. Connects later.
    #[must_use]
    pub fn new(url: &str) -> Self {
        let url = url.split('?').next().unwrap_or_default().to_owned();
        Self { url, connection: Mutex::new(None) }
    }

    /// Writes, and returns whether the write was accepted. Returns `None` if that is not known, or
    /// if another write is in progress.
    pub async fn write(&self, key: &Key, fence: Fence, id: &str) -> Option<bool> {
        const LIMIT: Duration = Duration::from_secs(1);
        let mut connection = self.connection.try_lock().ok()?;
        // A connection whose state is not known is not used again.
        let write = async {
            let mut open = match connection.take() {
                Some(open) => open,
                None => self.connect().await?,
            };
            let written = open.write(key, fence, id).await;
            match written {
                Ok(()) => {
                    *connection = Some(open);
                    Some(true)
                }
                Err(error) if error.is_stale_fence() => {
                    *connection = Some(open);
                    Some(false)
                }
                Err(_unknown) => None,
            }
        };
        tokio::time::timeout(LIMIT, write).await.ok().flatten()
    }

    async fn connect(&self) -> Option<Connection> {
        if self.url.starts_with("redis:") {
            let client = redis::Client::open(self.url.as_str()).ok()?;
            let connection = client.get_multiplexed_async_connection().await.ok()?;
            return Some(Connection::Redis(connection));
        }
        let connected = tokio_postgres::connect(&self.url, tokio_postgres::NoTls).await;
        let (client, connection) = connected.ok()?;
        tokio::spawn(async move { drop(connection.await) });
        Some(Connection::Postgres(client))
    }
}

impl Connection {
    async fn write(&mut self, key: &Key, fence: Fence, id: &str) -> Result<(), Error> {
        const APPEND: &str = "return redis.call('RPUSH', ARGV[2], ARGV[1])";
        let number = number_of(key);
        match self {
            Self::Redis(connection) => {
                let script = FencedScript::new(APPEND)?;
                let (name, line) =
                    (format!("{LOG}:{number}"), format!("{number} {} {id}", fence.get()));
                let arguments = [line.as_str(), LOG];
                let keys = [name.as_str()];
                let fenced = FencedKeys::new();
                fenced.run::<_, u64>(connection, &(key, fence), &script, &keys, &arguments).await?;
                Ok(())
            }
            Self::Postgres(client) => {
                let failed = |_cause: tokio_postgres::Error| unknown();
                let transaction = client.transaction().await.map_err(failed)?;
                FencedTable::new(FENCES)?.check(&transaction, &(key, fence)).await?;
                let (number, fence) = (i32::try_from(number).unwrap_or(0), i64::from(fence));
                let insert = format!("INSERT INTO {LOG} (key, fence, id) VALUES ($1, $2, $3)");
                transaction.execute(&insert, &[&number, &fence, &id]).await.map_err(failed)?;
                transaction.commit().await.map_err(failed)
            }
        }
    }
}

fn unknown() -> Error {
    Error::new(syncguard::ErrorCode::ServiceUnavailable, "the write may have failed")
}

#[cfg(test)]
mod tests {
    use super::{LOG, Resource, parse, schema_sql};
    use crate::journal::key_of;
    use syncguard::Fence;
    use test_support::{PostgresOptions, PostgresServer, RedisOptions, RedisServer};

    async fn refuses_a_smaller_fence(url: &str) {
        let (resource, key) = (Resource::new(url), key_of(3));
        let fence = |number| Fence::new(number).expect("valid");
        assert_eq!(resource.write(&key, fence(5), "a").await, Some(true));
        assert_eq!(resource.write(&key, fence(4), "b").await, Some(false));
        assert_eq!(resource.write(&key_of(4), fence(4), "b").await, Some(true));
    }

    fn fences(log: &str) -> Vec<(u32, u64, String)> {
        parse(log).into_iter().map(|write| (write.key, write.fence, write.id)).collect()
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn redis_keeps_accepted_writes_in_order() {
        let Some(server) = RedisServer::start(&RedisOptions::default()) else { return };
        refuses_a_smaller_fence(&server.url()).await;
        let log = server.cli(&["LRANGE", LOG, "0", "-1"]);
        assert_eq!(fences(&log), [(3, 5, "a".to_owned()), (4, 4, "b".to_owned())]);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn postgres_keeps_accepted_writes_in_order() {
        let Some(server) = PostgresServer::start(&PostgresOptions::default()) else { return };
        drop(server.sql(&schema_sql()));
        refuses_a_smaller_fence(&server.url()).await;
        let log = server.sql(super::READ_SQL);
        assert_eq!(fences(&log), [(3, 5, "a".to_owned()), (4, 4, "b".to_owned())]);
    }
}
