//! The records of the TypeScript implementation: ours are the same field by field, and the two are
//! peers on one server. Its side is played by scripts written from the description of its wire
//! format.
#![cfg(feature = "redis")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{AsyncCommands, Client, Script};
use serde_json::Value;
use syncguard::redis::RedisConfig;
use syncguard::{
    Acquire, AcquireRequest, Extend, ExtendRequest, Key, KeySpace, LockBackend, LockId,
    RedisBackend, Release, ReleaseRequest, Ttl, diagnostics,
};
use test_support::{RedisOptions, RedisServer};

async fn connect(server: &RedisServer, prefix: &str) -> (RedisBackend, MultiplexedConnection) {
    let config = RedisConfig::from_url(&server.url()).expect("a URL").prefix(prefix);
    let backend = RedisBackend::connect(config).await.expect("connects");
    let client = Client::open(server.url()).expect("a URL");
    (backend, client.get_multiplexed_async_connection().await.expect("connects"))
}

fn key(text: &str) -> Key {
    Key::new(text).expect("valid")
}

fn ttl(ms: u64) -> Ttl {
    Ttl::new(Duration::from_millis(ms)).expect("valid")
}

/// Everything in the store: name, type, value and physical expiry.
async fn dump(raw: &mut MultiplexedConnection) -> Vec<(String, String, String, i64)> {
    let mut names: Vec<String> = raw.keys("*").await.expect("works");
    names.sort();
    let mut records = Vec::new();
    for name in names {
        let kind: String = redis::cmd("TYPE").arg(&name).query_async(raw).await.expect("works");
        let value: String = raw.get(&name).await.expect("works");
        let expiry: i64 = raw.pttl(&name).await.expect("works");
        records.push((name, kind, value, expiry));
    }
    records
}

/// One record of the vectors, with the name that it has under another lock id.
fn expected(record: &Value, space: &KeySpace, theirs: &str, ours: &LockId) -> (String, Value) {
    let name = record["key"].as_str().expect("a name");
    let their_index = space.index_key(&LockId::parse(theirs).expect("valid")).expect("fits");
    let name = if name == their_index { space.index_key(ours).expect("fits") } else { name.into() };
    (name, record["value"].clone())
}

#[tokio::test(flavor = "multi_thread")]
async fn stored_records_are_those_of_the_vectors() {
    let Some(server) = RedisServer::start(&RedisOptions::default()) else { return };
    let vectors: Value =
        serde_json::from_str(include_str!("vectors/stored_state_redis.json")).expect("JSON");
    let mut compared = 0;
    for case in vectors["redis"].as_array().expect("a list") {
        let Some(prefix) = case["call"]["keyPrefix"].as_str() else { continue };
        assert_eq!(case["step"], "acquire");
        let (backend, mut raw) = connect(&server, prefix).await;
        redis::cmd("FLUSHALL").query_async::<()>(&mut raw).await.expect("works");
        let space = KeySpace::new(prefix, 1000, 26).expect("valid");
        let user_key = key(case["call"]["key"].as_str().expect("a key"));
        let request = AcquireRequest::new(user_key, Ttl::DEFAULT).expect("randomness");
        let outcome = backend.acquire(&request).await.expect("works");
        assert!(matches!(outcome, Acquire::Acquired(_)), "{outcome:?}");
        let ours = request.lock_id();
        let theirs = case["result"]["lockId"].as_str().expect("an id");
        let records = dump(&mut raw).await;
        let mut wanted: Vec<_> = case["state"]
            .as_array()
            .expect("a list")
            .iter()
            .map(|record| expected(record, &space, theirs, &ours))
            .collect();
        wanted.sort_by(|one, two| one.0.cmp(&two.0));
        assert_eq!(records.len(), wanted.len());
        for ((name, kind, value, expiry), (wanted_name, wanted_value)) in
            records.iter().zip(&wanted)
        {
            assert_eq!(name, wanted_name, "{}", case["scenario"]);
            assert_eq!(kind, "string");
            let wanted_value = wanted_value.as_str().expect("a text");
            if let Ok(Value::Object(wanted)) = serde_json::from_str(wanted_value) {
                let Ok(Value::Object(record)) = serde_json::from_str(value) else {
                    panic!("{value}")
                };
                let fields = |record: &serde_json::Map<String, Value>| {
                    let mut fields: Vec<_> = record.keys().cloned().collect();
                    fields.sort();
                    fields
                };
                assert_eq!(fields(&record), fields(&wanted));
                assert_eq!(record["key"], wanted["key"]);
                assert_eq!(record["fence"], wanted["fence"]);
                assert_eq!(record["lockId"], ours.expose());
                let life = |record: &serde_json::Map<String, Value>| {
                    record["expiresAtMs"].as_i64().expect("a number")
                        - record["acquiredAtMs"].as_i64().expect("a number")
                };
                assert_eq!(life(&record), life(&wanted));
            } else {
                assert_eq!(value, wanted_value);
            }
            // Settled point 2: ours outlive the tolerance, so that all backends answer alike.
            assert!(*expiry == -1 || (31_000..=32_000).contains(expiry), "{expiry}");
        }
        let release = ReleaseRequest::new(ours);
        assert_eq!(backend.release(&release).await.expect("works"), Release::Released);
        let left = dump(&mut raw).await;
        assert_eq!(left.len(), 1, "the fence counter is left: {left:?}");
        assert_eq!((left[0].2.as_str(), left[0].3), ("1", -1));
        compared += 1;
    }
    assert!(compared > 8);
}

/// The other side: the operations of the TypeScript implementation, with its keys, its arguments
/// and its answers.
struct Peer {
    raw: MultiplexedConnection,
    space: KeySpace,
}

impl Peer {
    /// The fence, or nothing when it is contended.
    async fn acquire(&mut self, key: &Key, lock_id: &LockId, ttl_ms: u64) -> Option<u64> {
        let script = Script::new(include_str!("typescript/acquire.lua"));
        let lock = self.space.lock_key(key).expect("fits");
        let answer: redis::Value = script
            .key(&lock)
            .key(self.space.index_key(lock_id).expect("fits"))
            .key(self.space.fence_key(&lock).expect("fits"))
            .arg(lock_id.expose())
            .arg(ttl_ms)
            .arg(1000)
            .arg(&lock)
            .arg(key.as_str())
            .invoke_async(&mut self.raw)
            .await
            .expect("works");
        match answer {
            redis::Value::Int(0) => None,
            answer => {
                let (_one, fence, _expires): (i64, String, i64) =
                    redis::from_redis_value(answer).expect("three");
                Some(fence.parse().expect("a number"))
            }
        }
    }

    /// 1 for success.
    async fn release(&mut self, lock_id: &LockId) -> i64 {
        let script = Script::new(include_str!("typescript/release.lua"));
        let index = self.space.index_key(lock_id).expect("fits");
        let mut call = script.key(index);
        call.arg(lock_id.expose()).arg(1000).invoke_async(&mut self.raw).await.expect("works")
    }

    /// Whether it was extended.
    async fn extend(&mut self, lock_id: &LockId, ttl_ms: u64) -> bool {
        let script = Script::new(include_str!("typescript/extend.lua"));
        let index = self.space.index_key(lock_id).expect("fits");
        let mut call = script.key(index);
        let answer: redis::Value = call
            .arg(lock_id.expose())
            .arg(1000)
            .arg(ttl_ms)
            .invoke_async(&mut self.raw)
            .await
            .expect("works");
        answer != redis::Value::Int(0)
    }
}

async fn sides(server: &RedisServer) -> (RedisBackend, Peer) {
    let (backend, raw) = connect(server, "syncguard").await;
    (backend, Peer { raw, space: KeySpace::new("syncguard", 1000, 26).expect("valid") })
}

fn new_id() -> LockId {
    AcquireRequest::new(key("any"), Ttl::DEFAULT).expect("randomness").lock_id()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lock_of_theirs_is_ours_to_see_extend_and_release() {
    let Some(server) = RedisServer::start(&RedisOptions::default()) else { return };
    let (backend, mut peer) = sides(&server).await;
    let (key, theirs) = (key("a/b \u{7f} é"), new_id());
    assert_eq!(peer.acquire(&key, &theirs, 30_000).await, Some(1));
    let request = AcquireRequest::new(key.clone(), Ttl::DEFAULT).expect("randomness");
    let outcome = backend.acquire(&request).await.expect("works");
    assert!(matches!(outcome, Acquire::Contended { .. }), "{outcome:?}");
    let found = diagnostics::get_by_id_raw(&backend, &theirs).await.expect("works").expect("held");
    assert_eq!((found.key, found.lock_id), (key.clone(), theirs));
    let extended = backend.extend(&ExtendRequest::new(theirs, ttl(60_000))).await.expect("works");
    assert!(matches!(extended, Extend::Extended(_)), "{extended:?}");
    assert!(peer.extend(&theirs, 30_000).await, "and they still can");
    let release = ReleaseRequest::new(theirs);
    assert_eq!(backend.release(&release).await.expect("works"), Release::Released);
    assert_eq!(peer.release(&theirs).await, -1);
    let outcome = backend.acquire(&request).await.expect("works");
    let Acquire::Acquired(lease) = outcome else { panic!("{outcome:?}") };
    assert_eq!(lease.fence().get(), 2, "one counter for both");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lock_of_ours_is_theirs_to_see_extend_and_release() {
    let Some(server) = RedisServer::start(&RedisOptions::default()) else { return };
    let (backend, mut peer) = sides(&server).await;
    let key = key("shared");
    let request = AcquireRequest::new(key.clone(), Ttl::DEFAULT).expect("randomness");
    drop(backend.acquire(&request).await.expect("works"));
    assert_eq!(peer.acquire(&key, &new_id(), 30_000).await, None);
    assert!(peer.extend(&request.lock_id(), 30_000).await);
    assert!(backend.is_locked(&key).await.expect("works"));
    assert_eq!(peer.release(&request.lock_id()).await, 1);
    assert!(!backend.is_locked(&key).await.expect("works"));
    assert_eq!(peer.acquire(&key, &new_id(), 30_000).await, Some(2));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_extend_keeps_fields_that_we_do_not_know() {
    let Some(server) = RedisServer::start(&RedisOptions::default()) else { return };
    let (backend, mut peer) = sides(&server).await;
    let (key, theirs) = (key("extra"), new_id());
    assert_eq!(peer.acquire(&key, &theirs, 30_000).await, Some(1));
    let mut record: Value = {
        let raw: String = peer.raw.get("syncguard:extra").await.expect("works");
        serde_json::from_str(&raw).expect("JSON")
    };
    record["host"] = "node-7".into();
    peer.raw.set::<_, _, ()>("syncguard:extra", record.to_string()).await.expect("works");
    drop(backend.extend(&ExtendRequest::new(theirs, ttl(60_000))).await.expect("works"));
    let raw: String = peer.raw.get("syncguard:extra").await.expect("works");
    let after: Value = serde_json::from_str(&raw).expect("JSON");
    assert_eq!(after["host"], "node-7");
    assert_eq!(after["acquiredAtMs"], record["acquiredAtMs"]);
}

/// Both sides at once on one key: never two holders, and every fence larger than the last.
#[tokio::test(flavor = "multi_thread")]
async fn both_sides_in_parallel_exclude_each_other() {
    let Some(server) = RedisServer::start(&RedisOptions::default()) else { return };
    let (backend, peer) = sides(&server).await;
    let (inside, last_fence) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let enter = |inside: &AtomicU64, last_fence: &AtomicU64, fence: u64| {
        assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two holders");
        assert!(last_fence.swap(fence, Ordering::SeqCst) < fence, "a fence went backwards");
    };
    let mut tasks = Vec::new();
    for _ in 0..4 {
        let (backend, inside, last_fence) =
            (backend.clone(), Arc::clone(&inside), Arc::clone(&last_fence));
        tasks.push(tokio::spawn(async move {
            let mut granted = 0;
            while granted < 100 {
                let request = AcquireRequest::new(key("race"), Ttl::DEFAULT).expect("randomness");
                if let Acquire::Acquired(lease) = backend.acquire(&request).await.expect("works") {
                    enter(&inside, &last_fence, lease.fence().get());
                    granted += 1;
                    tokio::task::yield_now().await;
                    inside.fetch_sub(1, Ordering::SeqCst);
                    let release = ReleaseRequest::new(request.lock_id());
                    assert_eq!(backend.release(&release).await.expect("works"), Release::Released);
                }
            }
        }));
    }
    for _ in 0..4 {
        let mut peer = Peer { raw: peer.raw.clone(), space: peer.space.clone() };
        let (inside, last_fence) = (Arc::clone(&inside), Arc::clone(&last_fence));
        tasks.push(tokio::spawn(async move {
            let mut granted = 0;
            while granted < 100 {
                let lock_id = new_id();
                if let Some(fence) = peer.acquire(&key("race"), &lock_id, 30_000).await {
                    enter(&inside, &last_fence, fence);
                    granted += 1;
                    tokio::task::yield_now().await;
                    inside.fetch_sub(1, Ordering::SeqCst);
                    assert_eq!(peer.release(&lock_id).await, 1);
                }
            }
        }));
    }
    for task in tasks {
        task.await.expect("no panic");
    }
    assert_eq!(last_fence.load(Ordering::SeqCst), 800);
}

#[tokio::test(flavor = "multi_thread")]
async fn internal_records_cannot_be_reached_by_user_keys() {
    let Some(server) = RedisServer::start(&RedisOptions::default()) else { return };
    let (backend, mut raw) = connect(&server, "syncguard").await;
    let acquire = |text: &str| AcquireRequest::new(key(text), Ttl::DEFAULT).expect("randomness");
    // Another key's fence counter is refused before any I/O.
    let error = backend.acquire(&acquire("fence:syncguard:foo")).await.expect_err("reserved");
    assert_eq!(error.code(), syncguard::ErrorCode::InvalidArgument);
    let error = backend.is_locked(&key("fence:syncguard:foo")).await.expect_err("reserved");
    assert_eq!(error.code(), syncguard::ErrorCode::InvalidArgument);
    assert!(dump(&mut raw).await.is_empty());
    // What looks like an index key is a key; where a real index entry is, nothing is overwritten.
    let held = acquire("held");
    drop(backend.acquire(&held).await.expect("works"));
    let before = dump(&mut raw).await;
    let collision = format!("id:{}", held.lock_id().expose());
    let error = backend.acquire(&acquire(&collision)).await.expect_err("an index entry is there");
    assert_eq!(error.code(), syncguard::ErrorCode::Internal);
    let names = |records: Vec<(String, String, String, i64)>| {
        records.into_iter().map(|record| (record.0, record.2)).collect::<Vec<_>>()
    };
    assert_eq!(names(dump(&mut raw).await), names(before));
    let release = ReleaseRequest::new(held.lock_id());
    assert_eq!(backend.release(&release).await.expect("works"), Release::Released);
    // JSON parked on a fence counter's key is noticed before anything is written.
    raw.set::<_, _, ()>("syncguard:fence:syncguard:bar", "{}").await.expect("works");
    let error = backend.acquire(&acquire("bar")).await.expect_err("no counter");
    assert_eq!(error.code(), syncguard::ErrorCode::Internal);
    assert!(!backend.is_locked(&key("bar")).await.expect("works"));
}
