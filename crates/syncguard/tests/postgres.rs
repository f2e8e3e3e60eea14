//! The PostgreSQL backend on a real server: the conformance kit, direct, through PgBouncer, through
//! the fault proxy and on tables that the TypeScript implementation created.
#![cfg(all(feature = "postgres", feature = "conformance"))]

use std::ops::Deref;
use std::sync::{Arc, LazyLock, Mutex};
use std::time::Duration;

use syncguard::backend::Layer;
use syncguard::conformance::{Crowded, Fixture, RawLock};
use syncguard::postgres::tokio_postgres::types::ToSql;
use syncguard::postgres::tokio_postgres::{Client, NoTls, connect};
use syncguard::postgres::{ClientPool, Loan, PooledClient, PostgresConfig};
use syncguard::telemetry::{TelemetryLayer, TracingSink};
use syncguard::{AnyBackend, Fence, FenceSource, Key, LockId, PostgresBackend};
use test_support::{Fault, PgBouncer, PostgresOptions, PostgresServer, Proxy};

/// One server for all cases of the kit; each uses its own keys. The kit does not test flushing to
/// disk.
static SERVER: LazyLock<Option<PostgresServer>> = LazyLock::new(|| {
    let server = PostgresServer::start(&PostgresOptions::default().with(["fsync = off"]))?;
    let ours = PostgresConfig::from_url(&server.url()).and_then(|config| config.schema_sql());
    assert!(server.sql(&ours.expect("a URL")).contains("CREATE"));
    // The unchanged statements of the TypeScript implementation.
    let made = server.sql(
        "CREATE TABLE IF NOT EXISTS syncguard_locks_ts (key TEXT PRIMARY KEY, lock_id TEXT \
             NOT NULL, expires_at_ms BIGINT NOT NULL, acquired_at_ms BIGINT NOT NULL, \
             fence TEXT NOT \
             NULL, user_key TEXT NOT NULL); CREATE UNIQUE INDEX IF NOT EXISTS \
             idx_syncguard_locks_ts_lock_id ON syncguard_locks_ts(lock_id); CREATE INDEX IF \
             NOT EXISTS idx_syncguard_locks_ts_expires ON syncguard_locks_ts(expires_at_ms); \
             CREATE TABLE IF NOT EXISTS syncguard_fence_counters_ts (fence_key TEXT PRIMARY KEY, \
             fence BIGINT NOT NULL DEFAULT 0, key_debug TEXT)",
    );
    assert!(made.contains("CREATE"), "{made}");
    Some(server)
});

static POOLER: LazyLock<Option<PgBouncer>> =
    LazyLock::new(|| PgBouncer::start(SERVER.as_ref().expect("checked by every test")));

struct PostgresFixture {
    config: PostgresConfig,
    raw: Client,
    suffix: &'static str,
    /// The proxy between the backend and the server, if there is one.
    _proxy: Option<Proxy>,
}

impl PostgresFixture {
    async fn new(url: &str, suffix: &'static str) -> Self {
        let server = SERVER.as_ref().expect("checked by every test");
        let (raw, connection) = connect(&server.url(), NoTls).await.expect("connects");
        tokio::spawn(connection);
        let config = PostgresConfig::from_url(url).expect("a URL").pool_size(4).tables(
            format!("syncguard_locks{suffix}"),
            format!("syncguard_fence_counters{suffix}"),
        );
        Self { config, raw, suffix, _proxy: None }
    }

    async fn direct() -> Self {
        Self::new(&SERVER.as_ref().expect("checked by every test").url(), "").await
    }

    /// Operations share the connection that listens.
    async fn on_one_connection() -> Self {
        let fixture = Self::direct().await;
        Self { config: fixture.config.pool_size(1), ..fixture }
    }

    async fn on_typescript_tables() -> Self {
        Self::new(&SERVER.as_ref().expect("checked by every test").url(), "_ts").await
    }

    async fn through_pooler(is_configured: bool) -> Self {
        let pooler = POOLER.as_ref().expect("PgBouncer is installed");
        let fixture = Self::new(&pooler.url(), "").await;
        Self { config: fixture.config.behind_pooler(is_configured), ..fixture }
    }

    async fn from_callers_pool() -> Self {
        let config = PostgresConfig::from_pool(ListPool::default()).pool_size(4);
        Self { config, ..Self::direct().await }
    }

    async fn through_proxy() -> Self {
        let server = SERVER.as_ref().expect("checked by every test");
        let proxy = Proxy::start(server.port()).await;
        proxy.set(Fault::Delay(Duration::from_millis(1)));
        let url = format!("postgres://postgres@127.0.0.1:{}/postgres", proxy.port());
        Self { _proxy: Some(proxy), ..Self::new(&url, "").await }
    }

    fn sql(&self, text: &str) -> String {
        text.replace("LOCKS", &format!("syncguard_locks{}", self.suffix))
            .replace("FENCES", &format!("syncguard_fence_counters{}", self.suffix))
    }

    async fn now_ms(&self) -> i64 {
        let now = "SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint";
        self.raw.query_one(now, &[]).await.expect("works").get(0)
    }
}

/// A minimal pool: a list of idle clients.
#[derive(Clone, Default)]
struct ListPool {
    idle: Arc<Mutex<Vec<Client>>>,
}

struct Lent {
    client: Option<Client>,
    pool: ListPool,
}

impl Deref for Lent {
    type Target = Client;

    fn deref(&self) -> &Client {
        self.client.as_ref().expect("there until it is dropped")
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        self.pool.idle.lock().expect("no panic inside").extend(self.client.take());
    }
}

impl PooledClient for Lent {
    fn discard(mut self: Box<Self>) {
        drop(self.client.take());
    }
}

impl ClientPool for ListPool {
    fn get(&self) -> Loan<'_> {
        Box::pin(async move {
            let idle = self.idle.lock().expect("no panic inside").pop();
            let client = if let Some(client) = idle {
                client
            } else {
                let server = SERVER.as_ref().expect("checked by every test");
                let (client, connection) = connect(&server.url(), NoTls).await?;
                tokio::spawn(connection);
                client
            };
            Ok(Box::new(Lent { client: Some(client), pool: self.clone() }) as Box<dyn PooledClient>)
        })
    }
}

fn fence_key(key: &Key) -> String {
    format!("fence:{}", key.as_str())
}

impl Fixture for PostgresFixture {
    fn stores_holders(&self) -> bool {
        // Tables of the TypeScript implementation have no such column.
        self.suffix != "_ts"
    }

    type Backend = PostgresBackend;

    async fn backend(&self) -> PostgresBackend {
        PostgresBackend::connect(self.config.clone()).await.expect("connects")
    }

    async fn backend_with_cleanup(&self) -> PostgresBackend {
        let config = self.config.clone().cleanup_in_is_locked(true);
        PostgresBackend::connect(config).await.expect("connects")
    }

    async fn backend_with_clock_fences(&self) -> Option<PostgresBackend> {
        let config = self.config.clone().fences(FenceSource::Clock);
        Some(PostgresBackend::connect(config).await.expect("connects"))
    }

    async fn delete_fence_counter(&self, key: &Key) {
        let delete = self.sql("DELETE FROM FENCES WHERE fence_key = $1");
        self.raw.execute(&delete, &[&fence_key(key)]).await.expect("works");
    }

    async fn plant(&self, lock: &RawLock) {
        let now = self.now_ms().await;
        let insert = self.sql(
            "INSERT INTO LOCKS (key, lock_id, expires_at_ms, acquired_at_ms, fence, user_key)
             VALUES ($1, $2, $3, $4, $5, $1) ON CONFLICT (key) DO UPDATE SET
               lock_id = excluded.lock_id, expires_at_ms = excluded.expires_at_ms,
               acquired_at_ms = excluded.acquired_at_ms, fence = excluded.fence",
        );
        let (id, fence) = (lock.lock_id.expose(), lock.fence.to_string());
        let times = (now + lock.expires_in_ms, now - lock.acquired_ms_ago);
        let parameters: [&(dyn ToSql + Sync); 5] =
            [&lock.key.as_str(), &id, &times.0, &times.1, &fence];
        self.raw.execute(&insert, &parameters).await.expect("works");
        self.set_fence_counter(&lock.key, lock.fence.get()).await;
    }

    async fn peek(&self, key: &Key) -> Option<RawLock> {
        let now = self.now_ms().await;
        let select = self
            .sql("SELECT lock_id, fence, acquired_at_ms, expires_at_ms FROM LOCKS WHERE key = $1");
        let row = self.raw.query_opt(&select, &[&key.as_str()]).await.expect("works")?;
        Some(RawLock {
            key: key.clone(),
            lock_id: LockId::parse(row.get(0)).expect("valid"),
            fence: row.get::<_, &str>(1).parse::<Fence>().expect("15 digits"),
            acquired_ms_ago: now - row.get::<_, i64>(2),
            expires_in_ms: row.get::<_, i64>(3) - now,
        })
    }

    async fn knows_id(&self, lock_id: &LockId) -> bool {
        let select = self.sql("SELECT FROM LOCKS WHERE lock_id = $1");
        self.raw.query_opt(&select, &[&lock_id.expose()]).await.expect("works").is_some()
    }

    async fn fence_counter(&self, key: &Key) -> u64 {
        let select = self.sql("SELECT fence FROM FENCES WHERE fence_key = $1");
        let row = self.raw.query_opt(&select, &[&fence_key(key)]).await.expect("works");
        row.map_or(0, |row| row.get::<_, i64>(0).try_into().expect("positive"))
    }

    async fn set_fence_counter(&self, key: &Key, counter: u64) {
        let insert = self.sql(
            "INSERT INTO FENCES (fence_key, fence) VALUES ($1, $2)
             ON CONFLICT (fence_key) DO UPDATE SET fence = excluded.fence",
        );
        let counter = i64::try_from(counter).expect("small");
        self.raw.execute(&insert, &[&fence_key(key), &counter]).await.expect("works");
    }

    async fn corrupt(&self, key: &Key) -> bool {
        let update = self.sql("UPDATE LOCKS SET fence = 'no fence' WHERE key = $1");
        assert_eq!(self.raw.execute(&update, &[&key.as_str()]).await.expect("works"), 1);
        true
    }
}

/// The kit, unless PostgreSQL is not installed.
macro_rules! kit {
    ($name:ident, $fixture:expr) => {
        mod $name {
            use super::*;

            syncguard::conformance_tests!({
                if SERVER.is_none() {
                    return;
                }
                $fixture
            });
        }
    };
}

kit!(direct, PostgresFixture::direct().await);
kit!(erased, PostgresFixture::direct().await.wrapped(AnyBackend::new));
kit!(under_telemetry, {
    let layer = TelemetryLayer::new(Arc::new(TracingSink));
    PostgresFixture::direct().await.wrapped(move |backend| layer.layer(backend))
});
kit!(in_batches, PostgresFixture::direct().await.wrapped(Crowded::new));
kit!(in_batches_through_pooler, {
    PostgresFixture::through_pooler(true).await.wrapped(Crowded::new)
});
kit!(in_batches_on_one_connection, {
    PostgresFixture::on_one_connection().await.wrapped(Crowded::new)
});
kit!(one_connection, PostgresFixture::on_one_connection().await);
kit!(typescript_tables, PostgresFixture::on_typescript_tables().await);
kit!(through_pooler, PostgresFixture::through_pooler(true).await);
kit!(callers_pool, PostgresFixture::from_callers_pool().await);
kit!(through_proxy, PostgresFixture::through_proxy().await);
