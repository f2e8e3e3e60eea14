//! The conformance kit on real Redis servers: standalone, a Cluster with one slot and with shards,
//! through the fault proxy, with long prefixes and on the caller's own connection.
#![cfg(all(feature = "redis", feature = "conformance"))]

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use redis::aio::{ConnectionLike, MultiplexedConnection};
use redis::cluster::ClusterClient;
use redis::cluster_async::ClusterConnection;
use redis::{AsyncCommands, Client};
use serde_json::{Value, json};
use syncguard::backend::{KeySpace, Layer};
use syncguard::conformance::{Crowded, Fixture, RawLock};
use syncguard::diagnostics::explain_key;
use syncguard::redis::RedisConfig;
use syncguard::telemetry::{TelemetryLayer, TracingSink};
use syncguard::{AnyBackend, Fence, FenceSource, Key, LockId, RedisBackend};
use test_support::{Fault, Proxy, RedisCluster, RedisOptions, RedisServer};

/// One server for all cases of the kit; each uses its own keys.
static SERVER: LazyLock<Option<RedisServer>> =
    LazyLock::new(|| RedisServer::start(&RedisOptions::default()));

static CLUSTER: LazyLock<Option<RedisCluster>> = LazyLock::new(|| RedisCluster::start(0));

struct RedisFixture<C = MultiplexedConnection> {
    config: RedisConfig,
    spaces: Spaces,
    /// A connection to the server that has the records.
    raw: C,
    /// The proxy between the backend and the server, if there is one.
    _proxy: Option<Proxy>,
}

/// Where the records of a key are.
enum Spaces {
    One(KeySpace),
    /// With the URL that a key's shard is looked up by.
    Shards(String, Vec<KeySpace>),
}

impl Spaces {
    const SHARDS: usize = 8;

    fn space(prefix: &str) -> KeySpace {
        KeySpace::new(prefix, 1000, 26).expect("valid")
    }

    /// Finds the prefixes of all shards, by looking at keys until each has one.
    fn shards(url: &str) -> Self {
        let mut prefixes = std::collections::BTreeSet::new();
        for number in 0.. {
            let key = Key::new(number.to_string()).expect("valid");
            prefixes.insert(Self::shard(url, &key).prefix().to_owned());
            if prefixes.len() == Self::SHARDS {
                break;
            }
        }
        Self::Shards(url.to_owned(), prefixes.iter().map(|prefix| Self::space(prefix)).collect())
    }

    fn shard(url: &str, key: &Key) -> KeySpace {
        let names = explain_key(url, key).expect("valid");
        let index = &names.iter().find(|(kind, _)| *kind == "index").expect("it has one").1;
        Self::space(index.strip_suffix(":id:<lock id>").expect("an index entry"))
    }

    fn of(&self, key: &Key) -> KeySpace {
        match self {
            Self::One(space) => space.clone(),
            Self::Shards(url, _) => Self::shard(url, key),
        }
    }

    fn all(&self) -> &[KeySpace] {
        match self {
            Self::One(space) => std::slice::from_ref(space),
            Self::Shards(_, spaces) => spaces,
        }
    }
}

impl RedisFixture<ClusterConnection> {
    /// On the shared Cluster, distributed over its nodes.
    async fn with_shards() -> Self {
        let cluster = CLUSTER.as_ref().expect("Redis is installed");
        let url = cluster.url(&format!("shards={}&prefix=sharded", Spaces::SHARDS));
        let config = RedisConfig::from_url(&url).expect("a URL");
        let nodes = cluster.nodes().iter().map(RedisServer::url);
        let raw = ClusterClient::new(nodes).expect("nodes");
        let raw = raw.get_async_connection().await.expect("connects");
        Self { config, spaces: Spaces::shards(&url), raw, _proxy: None }
    }
}

impl RedisFixture {
    /// On the shared server, with the default prefix.
    async fn shared() -> Self {
        Self::with_prefix("syncguard").await
    }

    /// On the shared server.
    async fn with_prefix(prefix: &str) -> Self {
        let server = SERVER.as_ref().expect("checked by every test");
        Self::new(RedisConfig::from_url(&server.url()).expect("a URL"), server, prefix).await
    }

    /// On the shared Cluster.
    async fn on_cluster() -> Self {
        let cluster = CLUSTER.as_ref().expect("Redis is installed");
        let prefix = "shop:{locks}";
        let config = RedisConfig::from_url(&cluster.url("")).expect("a URL");
        Self::new(config, &cluster.nodes()[cluster.node_of(prefix)], prefix).await
    }

    /// On the shared server, through a slow proxy.
    async fn through_proxy() -> Self {
        let server = SERVER.as_ref().expect("checked by every test");
        let proxy = Proxy::start(server.port()).await;
        proxy.set(Fault::Delay(Duration::from_millis(1)));
        let url = format!("redis://127.0.0.1:{}/0", proxy.port());
        let config = RedisConfig::from_url(&url).expect("a URL");
        Self { _proxy: Some(proxy), ..Self::new(config, server, "proxied").await }
    }

    /// On the shared server, with the caller's own connection.
    async fn by_connection() -> Self {
        let server = SERVER.as_ref().expect("checked by every test");
        let config = RedisConfig::from_connection(connection(server).await);
        Self::new(config, server, "own").await
    }

    async fn new(config: RedisConfig, server: &RedisServer, prefix: &str) -> Self {
        let spaces = Spaces::One(Spaces::space(prefix));
        let raw = connection(server).await;
        Self { config: config.prefix(prefix), spaces, raw, _proxy: None }
    }
}

impl<C: ConnectionLike + Clone + Send + Sync> RedisFixture<C> {
    fn lock_key(&self, key: &Key) -> String {
        self.spaces.of(key).lock_key(key).expect("fits")
    }

    fn fence_key(&self, key: &Key) -> String {
        self.spaces.of(key).fence_key(&self.lock_key(key)).expect("fits")
    }

    fn index_key(&self, key: &Key, lock_id: &LockId) -> String {
        self.spaces.of(key).index_key(lock_id).expect("fits")
    }

    async fn now_ms(&self) -> i64 {
        let (seconds, micros): (i64, i64) =
            redis::cmd("TIME").query_async(&mut self.raw.clone()).await.expect("works");
        seconds * 1000 + micros / 1000
    }

    async fn get(&self, name: &str) -> Option<String> {
        self.raw.clone().get(name).await.expect("works")
    }

    async fn set(&self, name: &str, value: &str) {
        self.raw.clone().set::<_, _, ()>(name, value).await.expect("works");
    }
}

async fn connection(server: &RedisServer) -> MultiplexedConnection {
    let client = Client::open(server.url()).expect("a URL");
    client.get_multiplexed_async_connection().await.expect("connects")
}

impl<C: ConnectionLike + Clone + Send + Sync + 'static> Fixture for RedisFixture<C> {
    type Backend = RedisBackend;

    async fn backend(&self) -> RedisBackend {
        RedisBackend::connect(self.config.clone()).await.expect("connects")
    }

    async fn backend_with_cleanup(&self) -> RedisBackend {
        let config = self.config.clone().cleanup_in_is_locked(true);
        RedisBackend::connect(config).await.expect("connects")
    }

    async fn backend_with_clock_fences(&self) -> Option<RedisBackend> {
        let config = self.config.clone().fences(FenceSource::Clock);
        Some(RedisBackend::connect(config).await.expect("connects"))
    }

    async fn delete_fence_counter(&self, key: &Key) {
        self.raw.clone().del::<_, ()>(self.fence_key(key)).await.expect("works");
    }

    async fn plant(&self, lock: &RawLock) {
        let now = self.now_ms().await;
        let record = json!({
            "key": lock.key.as_str(),
            "lockId": lock.lock_id.expose(),
            "fence": lock.fence.to_string(),
            "acquiredAtMs": now - lock.acquired_ms_ago,
            "expiresAtMs": now + lock.expires_in_ms,
        });
        if let Some(old) = self.peek(&lock.key).await {
            let index = self.index_key(&lock.key, &old.lock_id);
            self.raw.clone().del::<_, ()>(index).await.expect("works");
        }
        let lock_key = self.lock_key(&lock.key);
        self.set(&lock_key, &record.to_string()).await;
        self.set(&self.index_key(&lock.key, &lock.lock_id), &lock_key).await;
        self.set(&self.fence_key(&lock.key), &lock.fence.get().to_string()).await;
    }

    async fn peek(&self, key: &Key) -> Option<RawLock> {
        let now = self.now_ms().await;
        let record: Value = serde_json::from_str(&self.get(&self.lock_key(key)).await?).ok()?;
        let number = |name: &str| record[name].as_f64().expect("a number");
        #[expect(clippy::cast_possible_truncation, reason = "times are whole")]
        let millis = |name: &str| number(name) as i64;
        let text = |name: &str| record[name].as_str().expect("a text").to_owned();
        Some(RawLock {
            key: Key::new(text("key")).expect("valid"),
            lock_id: LockId::parse(&text("lockId")).expect("valid"),
            fence: text("fence").parse::<Fence>().expect("15 digits"),
            acquired_ms_ago: now - millis("acquiredAtMs"),
            expires_in_ms: millis("expiresAtMs") - now,
        })
    }

    async fn knows_id(&self, lock_id: &LockId) -> bool {
        for space in self.spaces.all() {
            let entry = self.get(&space.index_key(lock_id).expect("fits")).await;
            // The marker of an undo is empty.
            if entry.is_some_and(|lock_key| !lock_key.is_empty()) {
                return true;
            }
        }
        false
    }

    async fn fence_counter(&self, key: &Key) -> u64 {
        let counter = self.get(&self.fence_key(key)).await;
        counter.map_or(0, |counter| counter.parse().expect("a number"))
    }

    async fn set_fence_counter(&self, key: &Key, counter: u64) {
        self.set(&self.fence_key(key), &counter.to_string()).await;
    }

    async fn corrupt(&self, key: &Key) -> bool {
        self.set(&self.lock_key(key), "not json").await;
        true
    }
}

/// The kit, unless Redis is not installed.
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

kit!(standalone, RedisFixture::shared().await);
kit!(erased, RedisFixture::shared().await.wrapped(AnyBackend::new));
kit!(under_telemetry, {
    let layer = TelemetryLayer::new(Arc::new(TracingSink));
    RedisFixture::shared().await.wrapped(move |backend| layer.layer(backend))
});
kit!(in_batches, RedisFixture::shared().await.wrapped(Crowded::new));
kit!(in_batches_on_cluster, RedisFixture::on_cluster().await.wrapped(Crowded::new));
kit!(prefix_of_470_bytes, RedisFixture::with_prefix(&"p".repeat(470)).await);
kit!(prefix_of_950_bytes, RedisFixture::with_prefix(&"p".repeat(950)).await);
kit!(cluster, RedisFixture::on_cluster().await);
kit!(shards, RedisFixture::with_shards().await);
kit!(through_proxy, RedisFixture::through_proxy().await);
kit!(callers_connection, RedisFixture::by_connection().await);
