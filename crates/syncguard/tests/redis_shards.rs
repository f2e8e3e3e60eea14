//! Locks that are distributed over all nodes of a Redis Cluster.
#![cfg(feature = "redis")]

mod servers;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use servers::{cycle, eventually, grant, key, request, waiter, woken};
use syncguard::backend::{
    AcquireOutcome, AcquireRequest, ExtendRequest, Finding, Hint, ReleaseRequest,
};
use syncguard::redis::RedisConfig;
use syncguard::{
    ErrorCode, ExtendOutcome, LockBackend, LockId, LockOptions, Locker, NotHeldReason,
    RedisBackend, ReleaseOutcome, Ttl,
};
use test_support::{RedisCluster, RedisOptions, RedisServer};
use tokio::sync::Mutex;
use tokio::task::JoinSet;

/// A Cluster that the tests use one after the other, each with its own prefix.
static CLUSTER: LazyLock<Mutex<Option<RedisCluster>>> =
    LazyLock::new(|| Mutex::new(RedisCluster::start(0)));

async fn connect(url: &str) -> RedisBackend {
    let config = RedisConfig::from_url(url).expect("a URL");
    RedisBackend::connect(config).await.expect("connects")
}

/// Returns the name of a record of a key.
fn name(url: &str, kind: &str, text: &str) -> String {
    let names = syncguard::diagnostics::explain_key(url, &key(text)).expect("valid");
    names.into_iter().find(|(found, _)| *found == kind).expect("it has one").1
}

/// Returns the first of the keys `{begin}0`, `{begin}1`, … that are on a node.
fn keys_on(cluster: &RedisCluster, url: &str, node: usize, begin: &str) -> Vec<String> {
    let names = (0..).map(|number| format!("{begin}{number}"));
    let is_there = |text: &String| cluster.node_of(&name(url, "lock", text)) == node;
    names.filter(is_there).take(4).collect()
}

/// Returns how many scripts a node has run.
fn scripts_run(node: &RedisServer) -> u64 {
    let stats = node.cli(&["INFO", "commandstats"]);
    let calls = stats.lines().filter_map(|line| {
        let line = line.strip_prefix("cmdstat_eval")?;
        line.split_once("calls=")?.1.split(',').next()?.parse::<u64>().ok()
    });
    calls.sum()
}

/// Returns on how many nodes a call ran scripts.
async fn nodes_asked<T>(cluster: &RedisCluster, call: impl Future<Output = T>) -> (T, usize) {
    let count = || -> Vec<u64> { cluster.nodes().iter().map(scripts_run).collect() };
    let before = count();
    let answer = call.await;
    let asked = count().iter().zip(&before).filter(|(now, before)| now > before).count();
    (answer, asked)
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_thousand_locks_spread_over_the_nodes_and_are_all_listed() {
    const LOCKS: usize = 10_000;
    let cluster = CLUSTER.lock().await;
    let Some(cluster) = cluster.as_ref() else { return };
    for node in cluster.nodes() {
        assert!(node.cli(&["FLUSHALL"]).contains("OK"));
    }
    let backend = connect(&cluster.url("shards=256&prefix=spread")).await;
    let mut tasks = JoinSet::new();
    for task in 0..64 {
        let backend = backend.clone();
        tasks.spawn(async move {
            for number in (task..LOCKS).step_by(64) {
                grant(&backend, &format!("order:{number}")).await;
            }
        });
    }
    while let Some(done) = tasks.join_next().await {
        done.expect("granted");
    }
    // A lock has a record, an index entry and a counter.
    let even = LOCKS / 3;
    for node in cluster.nodes() {
        let size = node.cli(&["DBSIZE"]).trim().trim_start_matches("(integer) ").to_owned();
        let locks = size.parse::<usize>().expect("a number") / 3;
        assert!(locks.abs_diff(even) < even / 5, "{locks} of {even}");
        // One connection for 256 shards.
        let clients = node.cli(&["CLIENT", "LIST", "TYPE", "normal"]);
        let is_ours = |client: &&str| client.contains("resp=3");
        assert_eq!(clients.lines().filter(is_ours).count(), 1, "{clients}");
    }
    let admin = backend.admin().expect("Redis has one");
    let (mut listed, mut after) = (std::collections::HashSet::new(), None);
    loop {
        let page = admin.list(after.as_ref()).await.expect("works");
        for lock in page.locks {
            listed.insert(syncguard::diagnostics::LockInfoRaw::from(lock).key.as_str().to_owned());
        }
        after = page.next;
        if after.is_none() {
            break;
        }
    }
    assert_eq!(listed.len(), LOCKS);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_id_that_names_its_shard_is_looked_for_on_one_node_and_another_on_all() {
    let cluster = CLUSTER.lock().await;
    let Some(cluster) = cluster.as_ref() else { return };
    let url = cluster.url("shards=16&prefix=ids");
    let backend = connect(&url).await;
    let capabilities = backend.capabilities();
    assert_eq!(capabilities.shards, Some(16));
    // Every script is known to every node from now on, so that a call is one script.
    for number in 0..64 {
        cycle(&backend, &format!("warm{number}")).await.expect("works");
    }
    let named = AcquireRequest::for_backend(capabilities, key("named"), Ttl::DEFAULT);
    let named = named.expect("randomness");
    let unnamed = request("unnamed");
    for (request, nodes) in [(&named, 1), (&unnamed, 3)] {
        let acquired = backend.acquire(request).await.expect("works");
        assert!(matches!(acquired, AcquireOutcome::Acquired(_)), "{acquired:?}");
        let lock_id = request.lock_id();
        let (found, asked) = nodes_asked(cluster, backend.lookup_id(&lock_id)).await;
        assert!(found.expect("works").is_some());
        assert_eq!(asked, nodes);
        let extend = ExtendRequest::new(lock_id, Ttl::DEFAULT);
        let (extended, asked) = nodes_asked(cluster, backend.extend(&extend)).await;
        assert!(matches!(extended.expect("works"), ExtendOutcome::Extended(_)));
        assert_eq!(asked, nodes);
        // A right hint leads there at once, and a wrong one changes nothing.
        let hinted = extend.clone().with_hint(Hint::key(request.key().clone()));
        let (extended, asked) = nodes_asked(cluster, backend.extend(&hinted)).await;
        assert!(matches!(extended.expect("works"), ExtendOutcome::Extended(_)));
        assert_eq!(asked, 1);
        for number in 0..8 {
            let wrong = extend.clone().with_hint(Hint::key(key(&format!("other{number}"))));
            let extended = backend.extend(&wrong).await.expect("works");
            assert!(matches!(extended, ExtendOutcome::Extended(_)), "{extended:?}");
        }
        let release = ReleaseRequest::new(lock_id);
        let (released, asked) = nodes_asked(cluster, backend.release(&release)).await;
        assert_eq!(released.expect("works"), ReleaseOutcome::Released);
        assert_eq!(asked, nodes);
        let (released, asked) = nodes_asked(cluster, backend.release(&release)).await;
        let not_found = ReleaseOutcome::NotHeld(NotHeldReason::NotFound);
        assert_eq!(released.expect("works"), not_found);
        assert_eq!(asked, nodes);
        assert!(backend.lookup_id(&lock_id).await.expect("works").is_none());
    }
    // An undo is final wherever the request may still arrive.
    let undone = request("undone");
    backend.release(&ReleaseRequest::undo(&undone)).await.expect("works");
    for text in ["undone", "elsewhere", "and there"] {
        let late = AcquireRequest::from_parts(key(text), undone.lock_id(), Ttl::DEFAULT);
        let outcome = backend.acquire(&late).await.expect("works");
        assert!(matches!(outcome, AcquireOutcome::AlreadyUsed), "{text}: {outcome:?}");
    }
    // A locker makes ids that name their shard.
    let locker = Locker::new(backend.clone()).expect("in a runtime");
    let guard = locker.lock("by a locker").await.expect("free");
    let (found, asked) = nodes_asked(cluster, backend.lookup_id(&guard.lock_id())).await;
    assert!(found.expect("works").is_some());
    assert_eq!(asked, 1);
    // The number of a shard that does not exist is none.
    let beyond = AcquireRequest::for_backend(
        connect(&cluster.url("shards=1024&prefix=beyond")).await.capabilities(),
        key("last of all"),
        Ttl::DEFAULT,
    );
    let beyond = beyond.expect("randomness").lock_id();
    assert!(backend.lookup_id(&beyond).await.expect("works").is_none());
    assert_eq!(guard.release().await.expect("works"), ReleaseOutcome::Released);
}

#[tokio::test(flavor = "multi_thread")]
async fn another_number_of_shards_is_refused() {
    let cluster = CLUSTER.lock().await;
    let Some(cluster) = cluster.as_ref() else { return };
    let refused = async |option: &str| {
        let config = RedisConfig::from_url(&cluster.url(option)).expect("a URL");
        let error = RedisBackend::connect(config).await.expect_err(option);
        assert_eq!(error.code(), ErrorCode::InvalidArgument, "{error:?}");
        error.to_string()
    };
    let first = connect(&cluster.url("shards=8&prefix=count")).await;
    cycle(&first, "k").await.expect("works");
    let message = refused("shards=16&prefix=count").await;
    assert!(message.contains("has 8 shards, not 16"), "{message}");
    let second = connect(&cluster.url("shards=8&prefix=count")).await;
    assert_eq!(cycle(&second, "k").await.expect("works"), 2);
    // With another prefix, or all in one slot, they are other locks.
    let other = connect(&cluster.url("shards=16&prefix=other")).await;
    assert_eq!(cycle(&other, "k").await.expect("works"), 1);
    let single = connect(&cluster.url("prefix=%7Bcount%7D")).await;
    assert_eq!(cycle(&single, "k").await.expect("works"), 1);
    for (option, word) in [
        ("shards=0", "1 to 1024"),
        ("shards=1025", "1 to 1024"),
        ("shards=8&prefix=%7Ba%7D", "braces"),
    ] {
        assert!(refused(option).await.contains(word), "{option}");
    }
    let long = format!("shards=8&prefix={}", "p".repeat(940));
    assert!(refused(&long).await.contains("prefix"));
    let config = RedisConfig::from_url("redis://127.0.0.1:1/0?shards=8").expect("a URL");
    let error = RedisBackend::connect(config).await.expect_err("not a Cluster");
    assert_eq!(error.code(), ErrorCode::InvalidArgument);
    assert!(error.to_string().contains("redis+cluster://"), "{error}");
    // What is wrong with the nodes is reported once.
    let subjects: Vec<&str> = first.findings().await.iter().map(Finding::subject).collect();
    assert_eq!(subjects, ["aof", "fences", "full-coverage"]);
    assert!(single.findings().await.iter().all(|finding| finding.subject() != "full-coverage"));
}

/// Takes and releases locks, and remembers their fences.
struct Load {
    grants: AtomicU64,
    errors: AtomicU64,
    fences: std::sync::Mutex<HashMap<String, Vec<u64>>>,
    is_over: AtomicBool,
}

impl Load {
    fn start(backend: &RedisBackend, keys: &[String]) -> (Arc<Self>, JoinSet<()>) {
        let load = Arc::new(Self {
            grants: AtomicU64::new(0),
            errors: AtomicU64::new(0),
            fences: std::sync::Mutex::default(),
            is_over: AtomicBool::new(false),
        });
        let mut tasks = JoinSet::new();
        for text in keys {
            let (load, backend, text) = (Arc::clone(&load), backend.clone(), text.clone());
            tasks.spawn(async move {
                while !load.is_over.load(Ordering::SeqCst) {
                    load.cycle(&backend, &text).await;
                    tokio::time::sleep(Duration::from_millis(2)).await;
                }
            });
        }
        (load, tasks)
    }

    async fn cycle(&self, backend: &RedisBackend, text: &str) {
        let ttl = Ttl::new(Duration::from_secs(1)).expect("valid");
        let request = AcquireRequest::for_backend(backend.capabilities(), key(text), ttl);
        let request = request.expect("randomness");
        match backend.acquire(&request).await {
            Ok(AcquireOutcome::Acquired(lease)) => {
                self.grants.fetch_add(1, Ordering::SeqCst);
                self.note(text, lease.fence().get());
                let release = ReleaseRequest::new(request.lock_id());
                if backend.release(&release).await.is_err() {
                    self.errors.fetch_add(1, Ordering::SeqCst);
                }
            }
            // A lock whose release failed is free after its TTL.
            Ok(_contended) => {}
            Err(error) => {
                assert!(error.is_retryable(), "{error:?}");
                self.errors.fetch_add(1, Ordering::SeqCst);
            }
        }
    }

    fn note(&self, text: &str, fence: u64) {
        let mut fences = self.fences.lock().expect("no panic");
        fences.entry(text.to_owned()).or_default().push(fence);
    }

    fn grants(&self) -> u64 {
        self.grants.load(Ordering::SeqCst)
    }

    /// Stops, and returns how often a fence was not larger than the one before, per key.
    async fn stop(&self, mut tasks: JoinSet<()>) -> Vec<usize> {
        self.is_over.store(true, Ordering::SeqCst);
        while let Some(done) = tasks.join_next().await {
            done.expect("no panic");
        }
        let fences = self.fences.lock().expect("no panic");
        let steps_back =
            |fences: &Vec<u64>| fences.windows(2).filter(|two| two[1] <= two[0]).count();
        fences.values().map(steps_back).collect()
    }
}

/// Returns the rate of grants until a condition holds.
async fn rate(load: &Load, until: impl AsyncFnOnce()) -> f64 {
    let (began, before) = (Instant::now(), load.grants());
    until().await;
    #[expect(clippy::cast_precision_loss, reason = "a small count")]
    let grants = (load.grants() - before) as f64;
    grants / began.elapsed().as_secs_f64()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_primary_that_fails_stops_only_its_own_shards() {
    let options = RedisOptions::default().with(["--cluster-require-full-coverage", "no"]);
    let Some(mut cluster) = RedisCluster::start_with(1, &options) else { return };
    let url = cluster.url("shards=64");
    let backend = connect(&url).await;
    assert!(backend.findings().await.iter().all(|finding| finding.subject() != "full-coverage"));
    let victim = cluster.node_of(&name(&url, "lock", "k"));
    cluster.nodes()[victim].wait_until_replicated();
    let others: Vec<String> = [0, 1, 2]
        .into_iter()
        .filter(|node| *node != victim)
        .flat_map(|node| keys_on(&cluster, &url, node, "other"))
        .collect();
    let affected = keys_on(&cluster, &url, victim, "affected");
    let (others, other_tasks) = Load::start(&backend, &others);
    let (affected, affected_tasks) = Load::start(&backend, &affected);
    // A lock on another node that is renewed all the time, and one that is waited for.
    let elsewhere = keys_on(&cluster, &url, (victim + 1) % 3, "held")[0].clone();
    let ttl = Ttl::new(Duration::from_secs(2)).expect("valid");
    let options = LockOptions::default().ttl(ttl).renew();
    let locker = Locker::builder(backend.clone()).options(options).build().expect("in a runtime");
    let held = locker.lock(elsewhere.as_str()).await.expect("free");
    let before = rate(&others, async || tokio::time::sleep(Duration::from_secs(1)).await).await;
    let granted = affected.grants();
    assert!(granted > 0);
    cluster.nodes_mut()[victim].crash();
    let during = rate(&others, async || {
        tokio::time::sleep(Duration::from_millis(100)).await;
        let stopped_at = affected.grants();
        eventually("a replica serves", async || affected.grants() > stopped_at + 4).await;
    })
    .await;
    assert!(during > before / 4.0, "{during} grants per second of {before}");
    assert_eq!(others.errors.load(Ordering::SeqCst), 0, "the other shards are not affected");
    assert!(affected.errors.load(Ordering::SeqCst) > 0, "the failed node was in use");
    assert!(others.stop(other_tasks).await.iter().all(|steps_back| *steps_back == 0));
    // Replication is asynchronous: the last grants may be lost, once.
    assert!(affected.stop(affected_tasks).await.iter().all(|steps_back| *steps_back <= 1));
    assert!(locker.backend().is_locked(held.key()).await.expect("works"));
    assert_eq!(held.release().await.expect("works"), ReleaseOutcome::Released);
    // Waiters have found the new node too.
    let text = keys_on(&cluster, &url, victim_after(&cluster, &url), "awaited")[0].clone();
    let guard = waiter(backend.clone()).lock(text.as_str()).await.expect("free");
    let waiting = waiter(connect(&url).await);
    let waiting = tokio::spawn(async move { waiting.lock(text.as_str()).await.map(drop) });
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(guard.release().await.expect("works"), ReleaseOutcome::Released);
    woken(waiting).await;
}

/// Returns the node that serves the shards of the one that failed.
fn victim_after(cluster: &RedisCluster, url: &str) -> usize {
    cluster.node_of(&name(url, "lock", "k"))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slot_that_moves_under_load_loses_no_lock() {
    let cluster = CLUSTER.lock().await;
    let Some(cluster) = cluster.as_ref() else { return };
    let url = cluster.url("shards=16&prefix=moving");
    let backend = connect(&url).await;
    let lock = name(&url, "lock", "moves");
    let shard = lock.split_once('}').expect("a tag").0.to_owned() + "}";
    let is_in_shard = |text: &String| name(&url, "lock", text).starts_with(&shard);
    let keys: Vec<String> =
        (0..).map(|number| format!("m{number}")).filter(is_in_shard).take(8).collect();
    let (held, moving) = keys.split_at(4);
    let mut holders = Vec::new();
    for text in held {
        let ttl = Ttl::new(Duration::from_secs(2)).expect("valid");
        let options = LockOptions::default().ttl(ttl).renew();
        let locker = Locker::builder(backend.clone()).options(options).build();
        let locker = locker.expect("in a runtime");
        holders.push(locker.lock(text.as_str()).await.expect("free"));
    }
    let (waits_for, waiting) = (held[0].clone(), waiter(connect(&url).await));
    let woken_up = tokio::spawn(async move { waiting.lock(waits_for.as_str()).await.map(drop) });
    let (load, tasks) = Load::start(&backend, moving);
    let enough = async |what: &str| {
        let goal = load.grants() + 50;
        eventually(what, async || load.grants() >= goal).await;
    };
    enough("before").await;
    let migration = tokio::task::block_in_place(|| cluster.begin_migration(&lock));
    enough("while the slot moves").await;
    let names = [name(&url, "lock", &held[1]), name(&url, "fence", &moving[0])];
    tokio::task::block_in_place(|| migration.move_keys(&names.each_ref().map(String::as_str)));
    enough("while some keys have moved").await;
    // Longer than the TTL of the locks, so that they were renewed meanwhile.
    tokio::time::sleep(Duration::from_secs(3)).await;
    tokio::task::block_in_place(|| migration.finish());
    enough("after").await;
    assert_eq!(load.errors.load(Ordering::SeqCst), 0, "no call failed");
    assert!(load.stop(tasks).await.iter().all(|steps_back| *steps_back == 0));
    assert!(!woken_up.is_finished(), "the lock was held all the time");
    for guard in holders {
        let released = guard.release().await.expect("works");
        assert_eq!(released, ReleaseOutcome::Released, "it was not lost");
    }
    woken(woken_up).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_id_is_not_held_on_any_shard() {
    let cluster = CLUSTER.lock().await;
    let Some(cluster) = cluster.as_ref() else { return };
    let backend = connect(&cluster.url("shards=16&prefix=wrong")).await;
    let stranger = LockId::parse("AAECAwQFBgcICQoLDA0ODw").expect("valid");
    assert!(backend.lookup_id(&stranger).await.expect("works").is_none());
    let released = backend.release(&ReleaseRequest::new(stranger)).await.expect("works");
    assert_eq!(released, ReleaseOutcome::NotHeld(NotHeldReason::NotFound));
    // A semaphore's permits are in several shards.
    let locker = Locker::new(backend).expect("in a runtime");
    let semaphore = locker.semaphore("pool", 5).expect("valid");
    let mut permits = Vec::new();
    for _ in 0..5 {
        permits.push(semaphore.acquire().await.expect("free"));
    }
    assert!(semaphore.try_acquire().await.expect("works").is_none());
    permits.pop().expect("one").release().await.expect("works");
    assert!(semaphore.try_acquire().await.expect("works").is_some());
}
