//! The records of the TypeScript implementation: ours are the same field by field, and both can use
//! one server together. Its side is played by scripts written from the description of its wire
//! format.
#![cfg(feature = "redis")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{AsyncCommands, Client, Script};
use serde_json::Value;
use syncguard::backend::{
    AcquireOutcome, AcquireRequest, ExtendRequest, Hint, KeySpace, ReleaseRequest,
};
use syncguard::redis::RedisConfig;
use syncguard::{
    ExtendOutcome, HolderInfo, Key, LockBackend, LockId, NotHeldReason, RedisBackend,
    ReleaseOutcome, Ttl, diagnostics,
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

/// The other side: the operations of the TypeScript implementation, with its keys, its arguments
/// and its answers.
struct Peer {
    raw: MultiplexedConnection,
    space: KeySpace,
}

impl Peer {
    /// Returns the fence, or `None` if the lock is contended.
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

    /// Returns 1 for success.
    async fn release(&mut self, lock_id: &LockId) -> i64 {
        let script = Script::new(include_str!("typescript/release.lua"));
        let index = self.space.index_key(lock_id).expect("fits");
        let mut call = script.key(index);
        call.arg(lock_id.expose()).arg(1000).invoke_async(&mut self.raw).await.expect("works")
    }

    /// Returns whether it was extended.
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

/// Their extend decodes and encodes the record; their acquire writes a new one.
#[tokio::test(flavor = "multi_thread")]
async fn they_keep_our_holder_when_they_extend_and_name_none_when_they_acquire() {
    let Some(server) = RedisServer::start(&RedisOptions::default()) else { return };
    let (backend, mut peer) = sides(&server).await;
    let holder = HolderInfo::of_this_process(Some("a \"label\" with / and \\"));
    let request = AcquireRequest::new(key("k"), Ttl::DEFAULT).expect("randomness");
    let request = request.with_holder(Some(holder.clone()));
    assert!(matches!(backend.acquire(&request).await, Ok(AcquireOutcome::Acquired(_))));
    assert!(peer.extend(&request.lock_id(), 60_000).await);
    let info = diagnostics::get_by_key(&backend, &key("k")).await.expect("works").expect("held");
    assert_eq!(info.holder, Some(holder));
    let extended = backend.extend(&ExtendRequest::new(request.lock_id(), ttl(60_000))).await;
    assert!(matches!(extended, Ok(ExtendOutcome::Extended(_))), "{extended:?}");
    assert_eq!(peer.release(&request.lock_id()).await, 1);
    assert_eq!(peer.acquire(&key("k"), &new_id(), 30_000).await, Some(2));
    let info = diagnostics::get_by_key(&backend, &key("k")).await.expect("works").expect("held");
    assert_eq!(info.holder, None);
}

fn new_id() -> LockId {
    AcquireRequest::new(key("any"), Ttl::DEFAULT).expect("randomness").lock_id()
}

#[tokio::test(flavor = "multi_thread")]
async fn we_can_see_extend_and_release_their_locks() {
    let Some(server) = RedisServer::start(&RedisOptions::default()) else { return };
    let (backend, mut peer) = sides(&server).await;
    let (key, theirs) = (key("a/b \u{7f} é"), new_id());
    assert_eq!(peer.acquire(&key, &theirs, 30_000).await, Some(1));
    let request = AcquireRequest::new(key.clone(), Ttl::DEFAULT).expect("randomness");
    let outcome = backend.acquire(&request).await.expect("works");
    assert!(matches!(outcome, AcquireOutcome::Contended { .. }), "{outcome:?}");
    let found = diagnostics::get_by_id_raw(&backend, &theirs).await.expect("works").expect("held");
    assert_eq!((found.key, found.lock_id), (key.clone(), theirs));
    let extended = backend.extend(&ExtendRequest::new(theirs, ttl(60_000))).await.expect("works");
    assert!(matches!(extended, ExtendOutcome::Extended(_)), "{extended:?}");
    assert!(peer.extend(&theirs, 30_000).await, "and they still can");
    let release = ReleaseRequest::new(theirs);
    assert_eq!(backend.release(&release).await.expect("works"), ReleaseOutcome::Released);
    assert_eq!(peer.release(&theirs).await, -1);
    let outcome = backend.acquire(&request).await.expect("works");
    let AcquireOutcome::Acquired(lease) = outcome else { panic!("{outcome:?}") };
    assert_eq!(lease.fence().get(), 2, "one counter for both");
}

#[tokio::test(flavor = "multi_thread")]
async fn they_can_see_extend_and_release_our_locks() {
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
async fn an_extend_keeps_unknown_fields() {
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

/// Decoding and encoding a record changes what other writers wrote; only the expiry may change.
#[tokio::test(flavor = "multi_thread")]
async fn an_extend_changes_nothing_but_the_expiry() {
    let Some(server) = RedisServer::start(&RedisOptions::default()) else { return };
    let (backend, mut peer) = sides(&server).await;
    let ours = AcquireRequest::new(key("ours"), Ttl::DEFAULT).expect("randomness");
    drop(backend.acquire(&ours).await.expect("works"));
    let theirs = new_id();
    assert_eq!(peer.acquire(&key("theirs"), &theirs, 30_000).await, Some(1));
    // Layouts of a record, with a placeholder for the expiry: as JSON.stringify and cjson write it,
    // and unusual ones.
    let odd = new_id();
    let fields = r#""key":"odd","fence":"000000000000007","acquiredAtMs":1794769120208"#;
    let id = odd.expose();
    let layouts = [
        format!(r#"{{"lockId":"{id}","expiresAtMs":#,{fields},"tags":[],"n":12345678901234567}}"#),
        format!(
            r#"{{{fields},"lockId":"{id}","tags":[],"deep":{{"expiresAtMs":1,"x":[{{}}]}},"expiresAtMs":#}}"#
        ),
        format!(
            r#"{{ "a":"}}{{\\\"" , "expiresAtMs" : # , "b" : ["expiresAtMs", 2.50] , "lockId" : "{id}" , {fields} }}"#
        ),
        format!(r#"{{"expiresAtMs":1,"lockId":"{id}",{fields},"expires\u0041tMs":#}}"#),
    ];
    let expiry = "4102444800000";
    for layout in layouts {
        let record = layout.replace('#', expiry);
        assert!(serde_json::from_str::<Value>(&record).is_ok(), "{record}");
        peer.raw.set::<_, _, ()>("syncguard:odd", &record).await.expect("works");
        let index = peer.space.index_key(&odd).expect("fits");
        peer.raw.set::<_, _, ()>(index, "syncguard:odd").await.expect("works");
        let request = ExtendRequest::new(odd, ttl(60_000));
        let ExtendOutcome::Extended(extended) = backend.extend(&request).await.expect("works")
        else {
            panic!("{layout}")
        };
        let after: String = peer.raw.get("syncguard:odd").await.expect("works");
        assert_eq!(after, layout.replace('#', &extended.expires_at().as_millis().to_string()));
        assert!(peer.extend(&odd, 30_000).await, "their side still reads it");
    }
    for (name, lock_id) in [("syncguard:ours", ours.lock_id()), ("syncguard:theirs", theirs)] {
        let before: String = peer.raw.get(name).await.expect("works");
        let was = serde_json::from_str::<Value>(&before).expect("JSON")["expiresAtMs"].to_string();
        let request = ExtendRequest::new(lock_id, ttl(60_000));
        let ExtendOutcome::Extended(extended) = backend.extend(&request).await.expect("works")
        else {
            panic!("{name}")
        };
        let after: String = peer.raw.get(name).await.expect("works");
        let is = extended.expires_at().as_millis().to_string();
        assert_eq!(after, before.replace(&was, &is));
    }
}

/// The server removes abandoned locks: the lock and its index entry have an expiry after an acquire
/// and after an extend; the counter never has one.
#[tokio::test(flavor = "multi_thread")]
async fn lock_and_index_expire_physically_and_the_counter_does_not() {
    let Some(server) = RedisServer::start(&RedisOptions::default()) else { return };
    let (backend, mut raw) = connect(&server, "syncguard").await;
    let request = AcquireRequest::new(key("k"), ttl(30_000)).expect("randomness");
    assert!(matches!(backend.acquire(&request).await.expect("works"), AcquireOutcome::Acquired(_)));
    // Settled point 2: TTL, tolerance and a fixed grace.
    let check = |records: Vec<(String, String, String, i64)>, ttl_ms: i64| {
        assert_eq!(records.len(), 3, "{records:?}");
        for (name, _, _, expiry) in records {
            if name == "syncguard:fence:syncguard:k" {
                assert_eq!(expiry, -1, "a counter never expires");
            } else {
                let limits = ttl_ms - 20_000..=ttl_ms + 2000;
                assert!(limits.contains(&expiry), "{name} after {ttl_ms} ms: {expiry}");
            }
        }
    };
    check(dump(&mut raw).await, 30_000);
    for (ttl_ms, signed) in [(600_000, 600_000), (60_000, 60_000)] {
        let request = ExtendRequest::new(request.lock_id(), ttl(ttl_ms));
        assert!(matches!(
            backend.extend(&request).await.expect("works"),
            ExtendOutcome::Extended(_)
        ));
        check(dump(&mut raw).await, signed);
    }
    // An extend sets the expiry even of records that have none.
    for name in ["syncguard:k", "syncguard:id:*"] {
        let names: Vec<String> = raw.keys(name).await.expect("works");
        raw.persist::<_, ()>(&names[0]).await.expect("works");
    }
    let request = ExtendRequest::new(request.lock_id(), ttl(30_000));
    assert!(matches!(backend.extend(&request).await.expect("works"), ExtendOutcome::Extended(_)));
    check(dump(&mut raw).await, 30_000);
}

/// A late holder gets the reason, as long as the store knows it.
#[tokio::test(flavor = "multi_thread")]
async fn expired_and_not_found_are_distinguished() {
    let Some(server) = RedisServer::start(&RedisOptions::default()) else { return };
    let (backend, mut raw) = connect(&server, "syncguard").await;
    let (seconds, _): (u64, u64) = redis::cmd("TIME").query_async(&mut raw).await.expect("works");
    for hinted in [false, true] {
        let dead = new_id();
        let index = format!("syncguard:id:{}", dead.expose());
        let record = format!(
            r#"{{"lockId":"{}","expiresAtMs":{},"acquiredAtMs":1,"key":"k","fence":"000000000000001"}}"#,
            dead.expose(),
            seconds * 1000 - 1500,
        );
        raw.set::<_, _, ()>("syncguard:k", &record).await.expect("works");
        raw.set::<_, _, ()>(index, "syncguard:k").await.expect("works");
        let hint = || if hinted { Hint::key(key("k")) } else { Hint::default() };
        let release = |id| ReleaseRequest::new(id).with_hint(hint());
        let extend = |id| ExtendRequest::new(id, Ttl::DEFAULT).with_hint(hint());
        let unknown = new_id();
        let extended = backend.extend(&extend(dead)).await.expect("works");
        assert!(matches!(extended, ExtendOutcome::NotHeld(NotHeldReason::Expired)), "{extended:?}");
        let released = backend.release(&release(dead)).await.expect("works");
        assert_eq!(released, ReleaseOutcome::NotHeld(NotHeldReason::Expired));
        let extended = backend.extend(&extend(unknown)).await.expect("works");
        assert!(
            matches!(extended, ExtendOutcome::NotHeld(NotHeldReason::NotFound)),
            "{extended:?}"
        );
        let released = backend.release(&release(unknown)).await.expect("works");
        assert_eq!(released, ReleaseOutcome::NotHeld(NotHeldReason::NotFound));
    }
}

/// A prefix that is not in NFC would let a user key name another key's fence counter.
#[tokio::test(flavor = "multi_thread")]
async fn a_prefix_in_another_unicode_form_reserves_the_same_keys() {
    let Some(server) = RedisServer::start(&RedisOptions::default()) else { return };
    let (composed, decomposed) = ("caf\u{e9}", "cafe\u{301}");
    let url = format!("{}?prefix=cafe%CC%81", server.url());
    let config = RedisConfig::from_url(&url).expect("a URL");
    let backend = RedisBackend::connect(config).await.expect("connects");
    let request = AcquireRequest::new(key("foo"), Ttl::DEFAULT).expect("randomness");
    assert!(matches!(backend.acquire(&request).await.expect("works"), AcquireOutcome::Acquired(_)));
    for prefix in [composed, decomposed] {
        let counter = key(&format!("fence:{prefix}:foo"));
        let error = backend.is_locked(&counter).await.expect_err("the counter of foo");
        assert_eq!(error.code(), syncguard::ErrorCode::InvalidArgument, "{error:?}");
    }
    // Both forms are one prefix, and all names are in NFC.
    let (same, mut raw) = connect(&server, composed).await;
    assert!(same.is_locked(&key("foo")).await.expect("works"));
    for (name, ..) in dump(&mut raw).await {
        assert!(name.starts_with(composed), "{name}");
    }
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
                if let AcquireOutcome::Acquired(lease) =
                    backend.acquire(&request).await.expect("works")
                {
                    enter(&inside, &last_fence, lease.fence().get());
                    granted += 1;
                    tokio::task::yield_now().await;
                    inside.fetch_sub(1, Ordering::SeqCst);
                    let release = ReleaseRequest::new(request.lock_id());
                    assert_eq!(
                        backend.release(&release).await.expect("works"),
                        ReleaseOutcome::Released
                    );
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
    // A key may look like an index key, but an existing index entry is not overwritten.
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
    assert_eq!(backend.release(&release).await.expect("works"), ReleaseOutcome::Released);
    // JSON at the key of a fence counter is detected before anything is written.
    raw.set::<_, _, ()>("syncguard:fence:syncguard:bar", "{}").await.expect("works");
    let error = backend.acquire(&acquire("bar")).await.expect_err("not a counter");
    assert_eq!(error.code(), syncguard::ErrorCode::Internal);
    assert!(!backend.is_locked(&key("bar")).await.expect("works"));
}
