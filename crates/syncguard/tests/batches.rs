//! Operations that travel together, on real servers: that they do, that one of them spoils nothing
//! for the others, and that locks still exclude each other beside a TypeScript peer while
//! connections are cut.
#![cfg(all(feature = "redis", feature = "postgres"))]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{AsyncCommands, Client, Script};
use syncguard::backend::{AcquireOutcome, AcquireRequest, ExtendRequest, Hint, ReleaseRequest};
use syncguard::postgres::PostgresConfig;
use syncguard::postgres::tokio_postgres::{self, NoTls};
use syncguard::redis::RedisConfig;
use syncguard::{
    AnyBackend, ErrorCode, ExtendOutcome, Key, LockBackend, LockOptions, Locker, NotHeldReason,
    PostgresBackend, RedisBackend, ReleaseOutcome, Ttl,
};
use test_support::{Fault, PostgresOptions, PostgresServer, Proxy, RedisOptions, RedisServer};

const COUNT: usize = 48;

fn postgres() -> Option<PostgresServer> {
    let server = PostgresServer::start(&PostgresOptions::default().with(["fsync = off"]))?;
    let schema = PostgresConfig::from_url(&server.url()).and_then(|config| config.schema_sql());
    drop(server.sql(&schema.expect("a URL")));
    Some(server)
}

fn redis() -> Option<RedisServer> {
    RedisServer::start(&RedisOptions::default())
}

async fn raw(server: &RedisServer) -> MultiplexedConnection {
    let client = Client::open(server.url()).expect("a URL");
    client.get_multiplexed_async_connection().await.expect("connects")
}

fn requests() -> Vec<AcquireRequest> {
    let request = |number| {
        let key = Key::new(format!("together:{number}")).expect("valid");
        AcquireRequest::new(key, Ttl::DEFAULT).expect("random")
    };
    (0..COUNT).map(request).collect()
}

/// Calls an operation for all requests at the same time, and returns the answers in their order.
async fn all<'a, T: Send + 'static, Call: Future<Output = T> + Send + 'static>(
    requests: &'a [AcquireRequest],
    call: impl Fn(&'a AcquireRequest) -> Call,
) -> Vec<T> {
    let calls: Vec<_> = requests.iter().map(|request| tokio::spawn(call(request))).collect();
    let mut answers = Vec::new();
    for call in calls {
        answers.push(call.await.expect("no panic"));
    }
    answers
}

/// Acquires, extends and releases many locks at the same time. One of them has a foreign record,
/// and one is held by another client.
async fn mixed_batch(
    backend: AnyBackend,
    (is_foreign, refusal): (usize, ErrorCode),
    is_held: usize,
) {
    let requests = requests();
    let backend = Arc::new(backend);
    let acquire = |request: &AcquireRequest| {
        let (backend, request) = (Arc::clone(&backend), request.clone());
        async move { backend.acquire(&request).await }
    };
    for (number, outcome) in all(&requests, acquire).await.into_iter().enumerate() {
        match outcome {
            Err(error) if number == is_foreign => {
                assert_eq!(error.code(), refusal, "{error}");
                assert_eq!(error.key(), Some(requests[number].key()));
                assert!(!error.may_have_taken_effect());
            }
            Ok(AcquireOutcome::Contended { expires_in: Some(_) }) if number == is_held => {}
            Ok(AcquireOutcome::Acquired(lease)) => assert_eq!(lease.fence().get(), 1),
            other => panic!("lock {number}: {other:?}"),
        }
    }
    let extend = |request: &AcquireRequest| {
        let extend = ExtendRequest::new(request.lock_id(), Ttl::DEFAULT);
        let extend = extend.with_hint(Hint::key(request.key().clone()));
        let backend = Arc::clone(&backend);
        async move { backend.extend(&extend).await }
    };
    for (number, outcome) in all(&requests, extend).await.into_iter().enumerate() {
        let is_ours = number != is_foreign && number != is_held;
        match outcome.expect("works") {
            ExtendOutcome::Extended(_) if is_ours => {}
            ExtendOutcome::NotHeld(NotHeldReason::NotFound) if !is_ours => {}
            other => panic!("lock {number}: {other:?}"),
        }
    }
    let release = |request: &AcquireRequest| {
        let release = ReleaseRequest::new(request.lock_id());
        let backend = Arc::clone(&backend);
        async move { backend.release(&release).await }
    };
    for (number, outcome) in all(&requests, release).await.into_iter().enumerate() {
        let is_ours = number != is_foreign && number != is_held;
        match outcome.expect("works") {
            ReleaseOutcome::Released if is_ours => {}
            ReleaseOutcome::NotHeld(NotHeldReason::NotFound) if !is_ours => {}
            other => panic!("lock {number}: {other:?}"),
        }
    }
}

#[tokio::test]
async fn on_redis_locks_travel_together_and_one_spoils_nothing_for_the_others() {
    let Some(server) = redis() else { return };
    let backend = syncguard::connect(&server.url()).await.expect("connects");
    let mut raw = raw(&server).await;
    let held = AcquireRequest::new(requests()[5].key().clone(), Ttl::DEFAULT).expect("random");
    assert!(matches!(backend.acquire(&held).await, Ok(AcquireOutcome::Acquired(_))));
    // A list: reading it as a record is an error of the server's.
    raw.lpush::<_, _, ()>("syncguard:together:3", "foreign").await.expect("works");
    redis::cmd("CONFIG").arg("RESETSTAT").query_async::<()>(&mut raw).await.expect("works");
    mixed_batch(backend, (3, ErrorCode::InvalidArgument), 5).await;
    let info: String =
        redis::cmd("INFO").arg("commandstats").query_async(&mut raw).await.expect("works");
    let calls: usize = info
        .lines()
        .filter(|line| line.starts_with("cmdstat_eval"))
        .filter_map(|line| line.split(['=', ',']).nth(1)?.parse::<usize>().ok())
        .sum();
    assert!(calls < COUNT, "{calls} scripts for {COUNT} locks, acquired, extended and released");
}

#[tokio::test]
async fn on_postgres_locks_travel_together_and_one_spoils_nothing_for_the_others() {
    let Some(server) = postgres() else { return };
    let backend = syncguard::connect(&server.url()).await.expect("connects");
    let held = AcquireRequest::new(requests()[5].key().clone(), Ttl::DEFAULT).expect("random");
    assert!(matches!(backend.acquire(&held).await, Ok(AcquireOutcome::Acquired(_))));
    let planted = server.sql(
        "INSERT INTO syncguard_locks (key, lock_id, expires_at_ms, acquired_at_ms, fence, user_key) \
         VALUES ('together:3', 'x', 1, 1, 'foreign', 'together:3')",
    );
    assert_eq!(planted, "INSERT 0 1");
    mixed_batch(backend, (3, ErrorCode::Internal), 5).await;
    // Rows of one transaction have the same xmin.
    let transactions: usize = server
        .sql("SELECT count(DISTINCT xmin::text) FROM syncguard_fence_counters")
        .parse()
        .expect("a number");
    assert!(transactions < COUNT / 2, "{transactions} transactions for {COUNT} locks");
}

/// A client of another implementation, which knows nothing of batches and notifications.
trait Peer: Send + 'static {
    fn try_lock(&mut self, key: &str) -> impl Future<Output = Option<String>> + Send;
    fn unlock(&mut self, lock_id: &str) -> impl Future<Output = ()> + Send;
}

/// Eight keys, with a flag each that is set while somebody believes to hold the lock.
#[derive(Default)]
struct Held([AtomicBool; 8], AtomicUsize);

impl Held {
    async fn hold(&self, place: usize) {
        assert!(!self.0[place].swap(true, Ordering::SeqCst), "two hold the lock of key {place}");
        tokio::task::yield_now().await;
        self.0[place].store(false, Ordering::SeqCst);
        self.1.fetch_add(1, Ordering::SeqCst);
    }
}

/// Lets many tasks and a peer use the same locks while connections are cut.
async fn storm(backend: AnyBackend, mut peer: impl Peer, proxy: Proxy) {
    const TASKS: usize = 24;
    const ROUNDS: usize = 12;
    let held = Arc::new(Held::default());
    let options = LockOptions::default().ttl(Ttl::new(Duration::from_secs(6)).expect("valid"));
    let options = options.timeout(Duration::from_secs(30)).retry_on_error(true);
    let reader = backend.clone();
    let locker = Locker::builder(backend).options(options).build().expect("valid");
    let tasks: Vec<_> = (0..TASKS)
        .map(|task| {
            let (locker, held) = (locker.clone(), Arc::clone(&held));
            tokio::spawn(async move {
                for round in 0..ROUNDS {
                    let place = (task * 7 + round * 3) % 8;
                    let guard = locker.lock(format!("storm:{place}")).await.expect("in time");
                    held.hold(place).await;
                    // If the connection is cut, it is released in the background.
                    drop(guard.release().await);
                }
            })
        })
        .collect();
    let (others, is_over) = (Arc::clone(&held), Arc::new(AtomicBool::new(false)));
    let ends = Arc::clone(&is_over);
    let peer = tokio::spawn(async move {
        for round in 0.. {
            let place = round % 8;
            if let Some(lock_id) = peer.try_lock(&format!("storm:{place}")).await {
                others.hold(place).await;
                peer.unlock(&lock_id).await;
            }
            if ends.load(Ordering::SeqCst) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    });
    let cutting = async {
        loop {
            tokio::time::sleep(Duration::from_millis(25)).await;
            proxy.set(Fault::ResetAfter(40));
            tokio::time::sleep(Duration::from_millis(10)).await;
            proxy.set(Fault::None);
        }
    };
    let finished = async {
        for task in tasks {
            task.await.expect("no lock was held twice");
        }
    };
    tokio::select! {
        () = finished => {}
        () = cutting => {}
    }
    proxy.set(Fault::None);
    is_over.store(true, Ordering::SeqCst);
    peer.await.expect("no lock was held twice");
    assert!(held.1.load(Ordering::SeqCst) > TASKS * ROUNDS, "the peer got no lock");
    // An acquire of unknown outcome is undone until no copy of it can arrive.
    locker.shutdown_within(Duration::from_secs(20)).await.expect("everything is released");
    for place in 0..8 {
        let key = Key::new(format!("storm:{place}")).expect("valid");
        // The first call may meet a connection that was cut.
        let mut is_locked = reader.is_locked(&key).await;
        if is_locked.is_err() {
            is_locked = reader.is_locked(&key).await;
        }
        assert!(!is_locked.expect("works"), "key {place} was left behind");
    }
}

struct RedisPeer(MultiplexedConnection);

impl Peer for RedisPeer {
    async fn try_lock(&mut self, key: &str) -> Option<String> {
        let request = AcquireRequest::new(Key::new(key).expect("valid"), Ttl::DEFAULT);
        let lock_id = request.expect("random").lock_id().expose().to_owned();
        let lock = format!("syncguard:{key}");
        let script = Script::new(include_str!("typescript/acquire.lua"));
        let mut call = script.key(&lock);
        call.key(format!("syncguard:id:{lock_id}")).key(format!("syncguard:fence:{lock}"));
        call.arg(&lock_id).arg(30_000).arg(1000).arg(&lock).arg(key);
        let answer: redis::Value = call.invoke_async(&mut self.0).await.expect("works");
        (answer != redis::Value::Int(0)).then_some(lock_id)
    }

    async fn unlock(&mut self, lock_id: &str) {
        let script = Script::new(include_str!("typescript/release.lua"));
        let mut call = script.key(format!("syncguard:id:{lock_id}"));
        call.arg(lock_id).arg(1000);
        assert_eq!(call.invoke_async::<i64>(&mut self.0).await.expect("works"), 1);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_redis_locks_exclude_each_other_and_a_peer_while_connections_are_cut() {
    let Some(server) = redis() else { return };
    let proxy = Proxy::start(server.port()).await;
    let url = format!("redis://127.0.0.1:{}/0", proxy.port());
    let config = RedisConfig::from_url(&url).expect("a URL");
    let backend = RedisBackend::connect(config).await.expect("connects");
    storm(AnyBackend::new(backend), RedisPeer(raw(&server).await), proxy).await;
}

struct PostgresPeer(tokio_postgres::Client);

impl Peer for PostgresPeer {
    async fn try_lock(&mut self, key: &str) -> Option<String> {
        let request = AcquireRequest::new(Key::new(key).expect("valid"), Ttl::DEFAULT);
        let lock_id = request.expect("random").lock_id().expose().to_owned();
        let transaction = self.0.transaction().await.expect("works");
        let lock = "SELECT pg_advisory_xact_lock(hashtext($1))";
        transaction.query(lock, &[&key]).await.expect("works");
        let read = "SELECT FROM syncguard_locks WHERE key = $1 AND expires_at_ms > \
                    floor(extract(epoch FROM now()) * 1000)::bigint - 1000";
        if transaction.query_opt(read, &[&key]).await.expect("works").is_some() {
            transaction.commit().await.expect("works");
            return None;
        }
        let count = "INSERT INTO syncguard_fence_counters AS f (fence_key, fence, key_debug) VALUES \
                     ('fence:' || $1::text, 1, $1) ON CONFLICT (fence_key) DO UPDATE SET fence = \
                     f.fence + 1 RETURNING lpad(fence::text, 15, '0')";
        let fence: String = transaction.query_one(count, &[&key]).await.expect("works").get(0);
        let write = "INSERT INTO syncguard_locks (key, lock_id, expires_at_ms, acquired_at_ms, \
                     fence, user_key) SELECT $1, $2, now + 30000, now, $3, $1 FROM (SELECT \
                     floor(extract(epoch FROM now()) * 1000)::bigint AS now) AS clock ON CONFLICT \
                     (key) DO UPDATE SET lock_id = excluded.lock_id, expires_at_ms = \
                     excluded.expires_at_ms, acquired_at_ms = excluded.acquired_at_ms, fence = \
                     excluded.fence";
        transaction.execute(write, &[&key, &lock_id, &fence]).await.expect("works");
        transaction.commit().await.expect("works");
        Some(lock_id)
    }

    async fn unlock(&mut self, lock_id: &str) {
        let delete = "DELETE FROM syncguard_locks WHERE lock_id = $1";
        assert_eq!(self.0.execute(delete, &[&lock_id]).await.expect("works"), 1);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_postgres_locks_exclude_each_other_and_a_peer_while_connections_are_cut() {
    let Some(server) = postgres() else { return };
    let proxy = Proxy::start(server.port()).await;
    let url = format!("postgres://postgres@127.0.0.1:{}/postgres", proxy.port());
    let config = PostgresConfig::from_url(&url).expect("a URL");
    let backend = PostgresBackend::connect(config).await.expect("connects");
    let (client, connection) =
        tokio_postgres::connect(&server.url(), NoTls).await.expect("connects");
    tokio::spawn(connection);
    storm(AnyBackend::new(backend), PostgresPeer(client), proxy).await;
}
