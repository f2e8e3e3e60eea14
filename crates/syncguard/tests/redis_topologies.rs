//! The Redis backend with TLS, Sentinel, Cluster and replicas, and on the caller's own connections.
#![cfg(feature = "redis")]

mod servers;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use redis::cluster::ClusterClientBuilder;
use servers::{cycle, eventually, grant, key, waiter, woken};
use syncguard::backend::{
    AcquireAnyOutcome, AcquireAnyRequest, AcquireOutcome, AcquireRequest, ExtendRequest, Finding,
    Hint, ReleaseRequest,
};
use syncguard::redis::{Client, RedisConfig, TlsCertificates};
use syncguard::{ErrorCode, ExtendOutcome, LockBackend, RedisBackend, ReleaseOutcome, Ttl};
use test_support::{Certificates, RedisCluster, RedisOptions, RedisSentinel, RedisServer};

fn config(url: &str) -> RedisConfig {
    RedisConfig::from_url(url).expect("a URL")
}

async fn connect(url: &str) -> RedisBackend {
    RedisBackend::connect(config(url)).await.expect("connects")
}

/// A release in one backend wakes a waiter in another.
async fn wakes(holder: &RedisBackend, there: &RedisBackend, name: &'static str) {
    let guard = waiter(holder.clone()).lock(name).await.expect("free");
    let waiter = waiter(there.clone());
    let waiting = tokio::spawn(async move { waiter.lock(name).await.map(drop) });
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(guard.release().await.expect("works"), ReleaseOutcome::Released);
    woken(waiting).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tls_works_with_a_private_authority_and_a_user() {
    let certificates = Certificates::new();
    let options = RedisOptions::default()
        .with_tls(&certificates)
        .with(["--user", "app", "on", ">secret", "~*", "&*", "+@all"])
        .with(["--requirepass", "other"]);
    let Some(server) = RedisServer::start(&options) else { return };
    let ca = certificates.path("ca.pem");
    let address = server.tls_url().replace("rediss://", "rediss://app:secret@");
    let backend = connect(&format!("{address}?tls_ca={ca}")).await;
    assert_eq!(cycle(&backend, "k").await.expect("works"), 1);
    wakes(&backend, &backend, "w").await;
    // A client certificate, which the server may ask for.
    let (cert, private) = (certificates.path("client.pem"), certificates.path("client.key"));
    let with_client = format!("{address}?tls_ca={ca}&tls_cert={cert}&tls_key={private}");
    assert_eq!(cycle(&connect(&with_client).await, "k").await.expect("works"), 2);
    // The server is not trusted, is not there, or does not speak TLS.
    let stranger = Certificates::new().path("ca.pem");
    let plain = format!("rediss://localhost:{}/0?tls_ca={ca}", server.port());
    let elsewhere = address.replace("localhost", "127.0.0.2");
    for (url, code, word) in [
        (address.clone(), ErrorCode::ServiceUnavailable, "trusted"),
        (format!("{elsewhere}?tls_ca={ca}"), ErrorCode::ServiceUnavailable, "refused"),
        (plain, ErrorCode::NetworkTimeout, "in time"),
    ] {
        let started = Instant::now();
        let error = RedisBackend::connect(config(&url)).await.expect_err("refused");
        assert_eq!(error.code(), code, "{error:?}");
        assert!(error.to_string().contains(word), "{error}");
        assert!(started.elapsed() < Duration::from_secs(5), "it does not hang");
    }
    // The directory of this authority is gone.
    let error = RedisConfig::from_url(&format!("{address}?tls_ca={stranger}"));
    assert_eq!(error.expect_err("no such file").code(), ErrorCode::InvalidArgument);
    // No crypto provider is installed for the process.
    assert!(rustls::crypto::CryptoProvider::get_default().is_none());
    // The caller's own client, with its certificates or with ours.
    let root_cert = Some(std::fs::read(&ca).expect("a file of ours"));
    let trusts_ours = TlsCertificates { client_tls: None, root_cert };
    let trusts_none = TlsCertificates { client_tls: None, root_cert: None };
    let client = Client::build_with_tls(address.as_str(), trusts_ours.clone()).expect("a URL");
    let backend = RedisBackend::connect(RedisConfig::from_client(&client)).await;
    assert_eq!(cycle(&backend.expect("connects"), "k").await.expect("works"), 3);
    let client = Client::build_with_tls(address.as_str(), trusts_none).expect("a URL");
    let theirs = RedisConfig::from_client(&client);
    let error = RedisBackend::connect(theirs.clone()).await.expect_err("not trusted");
    assert_eq!(error.code(), ErrorCode::ServiceUnavailable, "{error:?}");
    let backend = RedisBackend::connect(theirs.certificates(trusts_ours)).await;
    assert_eq!(cycle(&backend.expect("connects"), "k").await.expect("works"), 4);
    // Certificates without TLS are a mistake.
    let error = RedisBackend::connect(config(&format!("{}?tls_ca={ca}", server.url()))).await;
    assert_eq!(error.expect_err("no TLS").code(), ErrorCode::InvalidArgument);
}

#[tokio::test(flavor = "multi_thread")]
async fn sentinel_names_the_primary_and_a_failover_is_followed() {
    let Some(mut service) = RedisSentinel::start() else { return };
    let backend = connect(&service.url()).await;
    let before = cycle(&backend, "k").await.expect("works");
    wakes(&backend, &backend, "w").await;
    let held = AcquireRequest::new(key("held"), Ttl::DEFAULT).expect("randomness");
    assert!(matches!(backend.acquire(&held).await.expect("works"), AcquireOutcome::Acquired(_)));
    // Wait until the replica has everything, so that nothing is lost.
    eventually("replicated", async || {
        service.servers[1].cli(&["EXISTS", "syncguard:held"]).contains('1')
    })
    .await;
    service.servers[0].crash();
    eventually("a new primary serves", async || cycle(&backend, "k").await.is_ok()).await;
    assert!(cycle(&backend, "k").await.expect("works") > before + 1);
    // The lock is still held, and only its own id can release it.
    let other = AcquireRequest::new(key("held"), Ttl::DEFAULT).expect("randomness");
    let outcome = backend.acquire(&other).await.expect("works");
    assert!(matches!(outcome, AcquireOutcome::Contended { .. }), "{outcome:?}");
    let wrong = backend.release(&ReleaseRequest::new(other.lock_id())).await.expect("works");
    assert!(matches!(wrong, ReleaseOutcome::NotHeld(_)), "{wrong:?}");
    let right = backend.release(&ReleaseRequest::new(held.lock_id())).await.expect("works");
    assert_eq!(right, ReleaseOutcome::Released);
    // Subscriptions have found the new primary too.
    wakes(&backend, &backend, "w").await;
    // The old primary comes back as a replica, and is not taken for the primary.
    service.servers[0].run();
    eventually("it follows", async || {
        service.servers[0].cli(&["INFO", "replication"]).contains("role:slave")
    })
    .await;
    assert!(cycle(&backend, "k").await.is_ok());
    let unknown = service.url().replace("/shop/", "/nowhere/");
    let error = RedisBackend::connect(config(&unknown)).await.expect_err("no such service");
    assert_eq!(error.code(), ErrorCode::ServiceUnavailable, "{error:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn cluster_needs_a_tag_and_finds_its_node() {
    let Some(cluster) = RedisCluster::start(0) else { return };
    for prefix in ["syncguard", "", "%7B%7D", "x%7By"] {
        let url = cluster.url(&format!("prefix={prefix}"));
        let error = RedisBackend::connect(config(&url)).await.expect_err("no tag");
        assert_eq!(error.code(), ErrorCode::InvalidArgument);
        assert!(error.to_string().contains("tag"), "{error}");
    }
    let error = RedisBackend::connect(config(&cluster.nodes()[0].url())).await.expect_err("a node");
    assert!(error.to_string().contains("redis+cluster://"), "{error}");
    // One seed is enough, and tags spread prefixes over the nodes.
    let mut used = std::collections::BTreeSet::new();
    for tag in ["a", "b", "c", "d", "e", "f"] {
        let seed = cluster.nodes()[0].port();
        let url = format!("redis+cluster://127.0.0.1:{seed}?prefix=%7B{tag}%7D");
        let (one, two) = (connect(&url).await, connect(&url).await);
        assert_eq!(cycle(&one, "k").await.expect("works"), 1);
        assert_eq!(cycle(&two, "k").await.expect("works"), 2);
        wakes(&one, &two, "w").await;
        used.insert(cluster.node_of(&format!("{{{tag}}}")));
    }
    assert!(used.len() > 1, "{used:?}");
    // A node that does not answer costs a moment, not the connection.
    let paused = (cluster.node_of("{a}") + 1) % 3;
    cluster.nodes()[paused].pause();
    let ports = [paused, (paused + 1) % 3].map(|node| cluster.nodes()[node].port());
    let url =
        format!("redis+cluster://127.0.0.1:{},127.0.0.1:{}?prefix=%7Ba%7D", ports[0], ports[1]);
    assert!(cycle(&connect(&url).await, "other").await.is_ok());
    cluster.nodes()[paused].resume();
    // The caller's own cluster connection.
    let nodes = cluster.nodes().iter().map(RedisServer::url);
    let theirs = ClusterClientBuilder::new(nodes).retries(0).build().expect("nodes");
    let theirs = theirs.get_async_connection().await.expect("connects");
    let config = RedisConfig::from_connection(theirs).prefix("{a}");
    let backend = RedisBackend::connect(config).await.expect("connects");
    assert_eq!(cycle(&backend, "k").await.expect("works"), 3);
}

/// The slot of our locks moves to another node while they are used: every grant has its own fence,
/// and waiters are notified by the new node.
#[tokio::test(flavor = "multi_thread")]
async fn a_slot_that_moves_is_followed() {
    let Some(cluster) = RedisCluster::start(0) else { return };
    let backend = connect(&cluster.url("prefix=%7Blocks%7D")).await;
    let slot = cluster.nodes()[0].cli(&["CLUSTER", "KEYSLOT", "{locks}"]).trim().to_owned();
    let from = cluster.node_of("{locks}");
    let to = (from + 1) % 3;
    let id = |node: usize| cluster.nodes()[node].cli(&["CLUSTER", "MYID"]).trim().to_owned();
    let (source, target) = (id(from), id(to));
    let mut last = cycle(&backend, "k").await.expect("works");
    wakes(&backend, &backend, "w").await;
    let using = tokio::spawn({
        let backend = backend.clone();
        async move {
            let mut fences = Vec::new();
            for _ in 0..300 {
                // While keys move, an acquire waits, and may fail.
                if let Ok(fence) = cycle(&backend, "k").await {
                    fences.push(fence);
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            fences
        }
    });
    tokio::task::block_in_place(|| {
        let run = |node: usize, arguments: &[&str]| cluster.nodes()[node].cli(arguments);
        drop(run(to, &["CLUSTER", "SETSLOT", &slot, "IMPORTING", &source]));
        drop(run(from, &["CLUSTER", "SETSLOT", &slot, "MIGRATING", &target]));
        let port = cluster.nodes()[to].port().to_string();
        loop {
            let names = run(from, &["CLUSTER", "GETKEYSINSLOT", &slot, "10"]);
            let names: Vec<&str> = names.split_whitespace().collect();
            if names.is_empty() {
                break;
            }
            let mut migrate = vec!["MIGRATE", "127.0.0.1", &port, "", "0", "1000", "KEYS"];
            migrate.extend(names);
            drop(run(from, &migrate));
        }
        for node in [to, from, (from + 2) % 3] {
            drop(run(node, &["CLUSTER", "SETSLOT", &slot, "NODE", &target]));
        }
    });
    assert_eq!(cluster.node_of("{locks}"), to);
    let fences = using.await.expect("no panic");
    for fence in &fences {
        assert!(*fence > last, "{fence} after {last}");
        last = *fence;
    }
    assert!(fences.len() > 250, "{} of 300", fences.len());
    wakes(&backend, &backend, "w").await;
}

/// While a slot moves, which may take hours, locks are acquired, extended and released, wherever
/// their keys are at the moment.
#[tokio::test(flavor = "multi_thread")]
async fn locks_work_while_their_slot_moves() {
    let Some(cluster) = RedisCluster::start(0) else { return };
    let backend = connect(&cluster.url("prefix=%7Blocks%7D")).await;
    let free = cycle(&backend, "used before").await.expect("works");
    cycle(&backend, "moved and used before").await.expect("works");
    let (stays, _) = grant(&backend, "stays").await;
    let (moves, _) = grant(&backend, "moves").await;
    let (splits, _) = grant(&backend, "splits").await;
    let (undone, _) = grant(&backend, "undone").await;
    let migration = cluster.begin_migration("{locks}");
    let index = |request: &AcquireRequest| format!("{{locks}}:id:{}", request.lock_id().expose());
    migration.move_keys(&["{locks}:fence:{locks}:moved and used before"]);
    migration.move_keys(&["{locks}:moves", &index(&moves), "{locks}:fence:{locks}:moves"]);
    migration.move_keys(&["{locks}:splits"]);
    // Holders keep their locks, and other requests do not get them.
    for (held, with_hint) in
        [(&stays, true), (&moves, true), (&stays, false), (&moves, false), (&splits, true)]
    {
        let hint = if with_hint { Hint::key(held.key().clone()) } else { Hint::default() };
        let extend = ExtendRequest::new(held.lock_id(), Ttl::DEFAULT).with_hint(hint);
        let extended = backend.extend(&extend).await.expect("works");
        assert!(matches!(extended, ExtendOutcome::Extended(_)), "{:?}: {extended:?}", held.key());
        assert!(backend.is_locked(held.key()).await.expect("works"));
        let other = AcquireRequest::new(held.key().clone(), Ttl::DEFAULT).expect("randomness");
        let outcome = backend.acquire(&other).await.expect("works");
        assert!(
            matches!(outcome, AcquireOutcome::Contended { .. }),
            "{:?}: {outcome:?}",
            held.key()
        );
        // A replay is granted the same lock.
        let replay = backend.acquire(held).await.expect("works");
        assert!(matches!(replay, AcquireOutcome::Acquired(_)), "{:?}: {replay:?}", held.key());
    }
    // New locks: on a key that was never used, on one whose counter has moved, and on one whose
    // counter has not.
    let mut granted = Vec::new();
    for (name, fence) in [("fresh", 1), ("moved and used before", 2), ("used before", free + 1)] {
        let (request, lease) = grant(&backend, name).await;
        assert_eq!(lease.fence().get(), fence, "{name}");
        let other = AcquireRequest::new(key(name), Ttl::DEFAULT).expect("randomness");
        let outcome = backend.acquire(&other).await.expect("works");
        assert!(matches!(outcome, AcquireOutcome::Contended { .. }), "{name}: {outcome:?}");
        let replay = backend.acquire(&request).await.expect("works");
        let AcquireOutcome::Acquired(replay) = replay else { panic!("{name}: {replay:?}") };
        assert_eq!(replay.fence(), lease.fence(), "{name}");
        granted.push(request);
    }
    // All of them can be released, and acquired again with a larger fence.
    for held in [&stays, &moves, &splits].into_iter().chain(&granted) {
        let release = ReleaseRequest::new(held.lock_id()).with_hint(Hint::key(held.key().clone()));
        let released = backend.release(&release).await.expect("works");
        assert_eq!(released, ReleaseOutcome::Released, "{:?}", held.key());
        assert!(!backend.is_locked(held.key()).await.expect("works"));
    }
    // An undo is final here too: of a lock, and of a request that never arrived.
    let never = AcquireRequest::new(key("never"), Ttl::DEFAULT).expect("randomness");
    for request in [&undone, &never] {
        backend.release(&ReleaseRequest::undo(request)).await.expect("works");
        assert!(!backend.is_locked(request.key()).await.expect("works"));
        let late = backend.acquire(request).await.expect("works");
        assert!(matches!(late, AcquireOutcome::AlreadyUsed), "{:?}: {late:?}", request.key());
    }
    assert_eq!(cycle(&backend, "used before").await.expect("works"), free + 2);
    assert_eq!(cycle(&backend, "stays").await.expect("works"), 2);
    migration.finish();
    for (name, fence) in
        [("used before", free + 3), ("stays", 3), ("moves", 2), ("fresh", 2), ("splits", 2)]
    {
        assert_eq!(cycle(&backend, name).await.expect("works"), fence, "{name}");
    }
}

/// The undo of a request for one of several locks names the first of them, and still finds the one
/// that was granted, wherever its keys are.
#[tokio::test(flavor = "multi_thread")]
async fn an_undo_finds_any_of_several_locks_while_their_slot_moves() {
    let Some(cluster) = RedisCluster::start(0) else { return };
    let backend = connect(&cluster.url("prefix=%7Blocks%7D")).await;
    drop(grant(&backend, "held").await);
    let mut granted = Vec::new();
    for name in ["lock moves", "index moves", "both stay", "both move"] {
        let keys = [key("held"), key(name)].into();
        let request = AcquireAnyRequest::new(keys, Ttl::DEFAULT).expect("randomness");
        let outcome = backend.acquire_any(&request).await.expect("works");
        let AcquireAnyOutcome::Acquired { key, .. } = outcome else { panic!("{outcome:?}") };
        assert_eq!(key.as_str(), name);
        granted.push(request);
    }
    let migration = cluster.begin_migration("{locks}");
    let index =
        |place: usize| format!("{{locks}}:id:{}", granted[place].first().lock_id().expose());
    migration.move_keys(&["{locks}:lock moves", &index(1), "{locks}:both move", &index(3)]);
    for request in &granted {
        let name = request.keys()[1].as_str();
        let undone = backend.release(&ReleaseRequest::undo(request.first())).await;
        assert_eq!(undone.expect("works"), ReleaseOutcome::Released, "{name}");
        assert!(!backend.is_locked(&key(name)).await.expect("works"), "{name}");
        let late = backend.acquire_any(request).await.expect("works");
        assert!(matches!(late, AcquireAnyOutcome::Contended { .. }), "{name}: {late:?}");
    }
    assert!(backend.is_locked(&key("held")).await.expect("works"));
    migration.finish();
}

/// Several tasks acquire one lock while its keys move one by one: there is never more than one
/// holder, and every fence is larger than the last.
#[tokio::test(flavor = "multi_thread")]
async fn fences_from_the_clock_grow_while_their_slot_moves() {
    let Some(cluster) = RedisCluster::start(0) else { return };
    let backend = connect(&cluster.url("prefix=%7Blocks%7D&fences=clock")).await;
    let mut last = [0; 3];
    for (name, last) in ["stays", "moves", "fresh"].into_iter().zip(&mut last).take(2) {
        *last = cycle(&backend, name).await.expect("works");
    }
    let migration = cluster.begin_migration("{locks}");
    migration.move_keys(&["{locks}:fence:{locks}:moves"]);
    for round in 0..4 {
        for (name, last) in ["stays", "moves", "fresh"].into_iter().zip(&mut last) {
            let fence = cycle(&backend, name).await.expect("works");
            assert!(fence > *last && fence > 17_000_000_000_000, "{name}: {fence} after {last}");
            *last = fence;
        }
        if round == 1 {
            migration.finish();
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_moving_slot_has_one_holder_at_a_time() {
    let Some(cluster) = RedisCluster::start(0) else { return };
    let url = cluster.url("prefix=%7Blocks%7D");
    let mut last = cycle(&connect(&url).await, "k").await.expect("works");
    let (inside, fences) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(Vec::new())));
    let is_over = Arc::new(AtomicBool::new(false));
    let mut tasks = Vec::new();
    for _ in 0..6 {
        let backend = connect(&url).await;
        let (inside, fences, is_over) =
            (Arc::clone(&inside), Arc::clone(&fences), Arc::clone(&is_over));
        tasks.push(tokio::spawn(async move {
            while !is_over.load(Ordering::SeqCst) {
                let request = AcquireRequest::new(key("k"), Ttl::DEFAULT).expect("randomness");
                let AcquireOutcome::Acquired(lease) =
                    backend.acquire(&request).await.expect("works")
                else {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                    continue;
                };
                assert!(!inside.swap(true, Ordering::SeqCst), "two holders");
                fences.lock().expect("no panic").push(lease.fence().get());
                tokio::task::yield_now().await;
                inside.store(false, Ordering::SeqCst);
                let hint = Hint::key(key("k"));
                let release = ReleaseRequest::new(request.lock_id()).with_hint(hint);
                let released = backend.release(&release).await.expect("works");
                assert_eq!(released, ReleaseOutcome::Released);
            }
        }));
    }
    let granted = || fences.lock().expect("no panic").len();
    let enough = async |what: &str| {
        let goal = granted() + 50;
        eventually(what, async || granted() >= goal).await;
    };
    enough("before").await;
    let migration = cluster.begin_migration("{locks}");
    enough("the counter is where the slot was").await;
    migration.move_keys(&["{locks}:k"]);
    enough("the lock may have moved").await;
    migration.move_keys(&["{locks}:fence:{locks}:k"]);
    enough("the counter has moved").await;
    migration.finish();
    enough("after").await;
    is_over.store(true, Ordering::SeqCst);
    for task in tasks {
        task.await.expect("no panic");
    }
    for fence in fences.lock().expect("no panic").iter() {
        assert!(*fence > last, "{fence} after {last}");
        last = *fence;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_failover_of_a_node_is_followed() {
    let Some(mut cluster) = RedisCluster::start(1) else { return };
    let backend = connect(&cluster.url("prefix=%7Blocks%7D")).await;
    let before = cycle(&backend, "k").await.expect("works");
    wakes(&backend, &backend, "w").await;
    let node = cluster.node_of("{locks}");
    cluster.nodes()[node].wait_until_replicated();
    cluster.nodes_mut()[node].crash();
    eventually("the replica serves", async || cycle(&backend, "k").await.is_ok()).await;
    assert!(cycle(&backend, "k").await.expect("works") > before + 1);
    wakes(&backend, &backend, "w").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lock_that_too_few_replicas_confirmed_is_undone() {
    let Some(primary) = RedisServer::start(&RedisOptions::default()) else { return };
    let replica = primary.start_replica();
    let waits = async |wait: Duration| {
        let config = config(&primary.url()).wait_for_replicas(1, wait);
        RedisBackend::connect(config).await.expect("connects")
    };
    let (careful, impatient) =
        (waits(Duration::from_secs(20)).await, waits(Duration::from_millis(300)).await);
    for fence in 1..=20 {
        assert_eq!(cycle(&careful, "k").await.expect("confirmed"), fence);
    }
    replica.pause();
    let request = AcquireRequest::new(key("k"), Ttl::DEFAULT).expect("randomness");
    let error = impatient.acquire(&request).await.expect_err("not confirmed");
    assert_eq!(error.code(), ErrorCode::ServiceUnavailable, "{error:?}");
    assert!(!error.may_have_taken_effect(), "it was undone");
    assert!(!careful.is_locked(&key("k")).await.expect("works"));
    // Contention needs no replica.
    let careless = connect(&primary.url()).await;
    let held = AcquireRequest::new(key("held"), Ttl::DEFAULT).expect("randomness");
    assert!(matches!(careless.acquire(&held).await.expect("works"), AcquireOutcome::Acquired(_)));
    let request = AcquireRequest::new(key("held"), Ttl::DEFAULT).expect("randomness");
    let outcome = impatient.acquire(&request).await.expect("works");
    assert!(matches!(outcome, AcquireOutcome::Contended { .. }), "{outcome:?}");
    replica.resume();
    eventually("confirmed again", async || cycle(&careful, "k").await.is_ok()).await;
    // Two replicas are asked for, there is one.
    let greedy = config(&primary.url()).wait_for_replicas(2, Duration::from_millis(100));
    let greedy = RedisBackend::connect(greedy).await.expect("connects");
    assert!(cycle(&greedy, "other").await.is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn findings_report_what_can_be_lost() {
    let Some(server) = RedisServer::start(&RedisOptions::default()) else { return };
    let backend = connect(&server.url()).await;
    let subjects = async |backend: &RedisBackend| -> Vec<&'static str> {
        backend.findings().await.iter().map(Finding::subject).collect()
    };
    assert_eq!(subjects(&backend).await, ["aof", "fences"]);
    for (name, value, expected) in [
        ("appendonly", "yes", vec!["appendfsync", "fences"]),
        ("appendfsync", "always", vec![]),
        ("maxmemory-policy", "allkeys-lru", vec!["maxmemory-policy", "fences"]),
    ] {
        assert!(server.cli(&["CONFIG", "SET", name, value]).contains("OK"));
        assert_eq!(subjects(&backend).await, expected, "{name}");
    }
    let replica = server.start_replica();
    assert_eq!(subjects(&backend).await, ["maxmemory-policy", "replicas", "fences"]);
    // A user who may not ask gets a finding, and can still use locks.
    let user = "on >secret ~* &* +@all -info -config";
    let set: Vec<&str> = ["ACL", "SETUSER", "app"].into_iter().chain(user.split(' ')).collect();
    assert!(server.cli(&set).contains("OK"));
    let url = server.url().replace("redis://", "redis://app:secret@");
    let backend = connect(&url).await;
    assert_eq!(subjects(&backend).await, ["unknown"]);
    assert!(cycle(&backend, "k").await.is_ok());
    // A read-only replica is an error.
    let error = cycle(&connect(&replica.url()).await, "k").await.expect_err("read-only");
    assert_eq!(error.code(), ErrorCode::ServiceUnavailable, "{error:?}");
}
