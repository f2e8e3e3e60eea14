//! Faults of the Redis backend: crashes, pauses, cut connections, flushed scripts and wrong
//! configurations.
#![cfg(feature = "redis")]

mod servers;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use redis::{AsyncCommands, Client};
use servers::{
    a_dead_path_costs_no_renewed_lock, cycle, eventually, grant, key, resets, shown, woken,
};
use syncguard::backend::{AcquireOutcome, AcquireRequest, ExtendRequest, Hint, ReleaseRequest};
use syncguard::redis::RedisConfig;
use syncguard::{
    ErrorCode, ExtendOutcome, LockBackend, LockOptions, Locker, LostReason, RedisBackend,
    ReleaseOutcome, RetryPolicy, Ttl,
};
use test_support::{Fault, Proxy, RedisOptions, RedisServer};

fn ttl(ms: u64) -> Ttl {
    Ttl::new(Duration::from_millis(ms)).expect("valid")
}

fn config(url: &str) -> RedisConfig {
    RedisConfig::from_url(url).expect("a URL").response_timeout(Duration::from_millis(500))
}

async fn connect(url: &str) -> RedisBackend {
    RedisBackend::connect(config(url)).await.expect("connects")
}

#[tokio::test(flavor = "multi_thread")]
async fn no_fence_repeats_after_a_crash_with_aof() {
    let Some(mut server) = RedisServer::start(&RedisOptions::default().with_aof()) else { return };
    let backend = connect(&server.url()).await;
    let mut last = 0;
    for _ in 0..3 {
        for _ in 0..20 {
            let request = AcquireRequest::new(key("k"), Ttl::DEFAULT).expect("randomness");
            let outcome = backend.acquire(&request).await.expect("works");
            let AcquireOutcome::Acquired(lease) = outcome else { panic!("{outcome:?}") };
            assert!(lease.fence().get() > last);
            last = lease.fence().get();
            let release = ReleaseRequest::new(request.lock_id());
            assert_eq!(backend.release(&release).await.expect("works"), ReleaseOutcome::Released);
        }
        server.crash_and_restart();
        // The backend reconnects by itself.
        eventually("the backend is back", async || backend.is_locked(&key("k")).await.is_ok())
            .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lock_survives_a_crash_with_aof_and_its_holder_can_release_it() {
    let Some(mut server) = RedisServer::start(&RedisOptions::default().with_aof()) else { return };
    let options = LockOptions::default().ttl(ttl(20_000)).renew();
    let locker = Locker::builder(connect(&server.url()).await).options(options).build();
    let locker = locker.expect("in a runtime");
    let guard = locker.lock("k").await.expect("free");
    server.crash_and_restart();
    eventually("released", async || matches!(guard.release().await, Ok(ReleaseOutcome::Released)))
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_paused_server_is_a_timeout_and_the_lock_applied_meanwhile_is_undone() {
    let Some(server) = RedisServer::start(&RedisOptions::default()) else { return };
    let backend = connect(&server.url()).await;
    let options = LockOptions::default().timeout(Duration::from_secs(10));
    let locker = Locker::builder(backend.clone()).options(options).build().expect("in a runtime");
    server.pause();
    let started = Instant::now();
    let error = locker.lock("k").await.expect_err("no answer");
    assert_eq!(error.code(), ErrorCode::NetworkTimeout);
    assert!(started.elapsed() < Duration::from_secs(6), "it does not hang");
    tokio::time::sleep(Duration::from_secs(2)).await;
    server.resume();
    eventually("the undo has come through", async || {
        let request = AcquireRequest::new(key("k"), ttl(1000)).expect("randomness");
        matches!(backend.acquire(&request).await, Ok(AcquireOutcome::Acquired(_)))
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_undo_that_overtakes_its_acquire_is_final() {
    let Some(server) = RedisServer::start(&RedisOptions::default()) else { return };
    let backend = connect(&server.url()).await;
    let request = AcquireRequest::new(key("k"), Ttl::DEFAULT).expect("randomness");
    let undone = backend.release(&ReleaseRequest::undo(&request)).await.expect("works");
    assert!(matches!(undone, ReleaseOutcome::NotHeld(_)), "{undone:?}");
    let late = backend.acquire(&request).await.expect("works");
    assert!(matches!(late, AcquireOutcome::AlreadyUsed), "{late:?}");
    assert!(!backend.is_locked(&key("k")).await.expect("works"));
}

#[tokio::test(flavor = "multi_thread")]
async fn five_hundred_resets_leave_no_orphan_and_mix_up_no_reply() {
    let Some(server) = RedisServer::start(&RedisOptions::default()) else { return };
    let proxy = Proxy::start(server.port()).await;
    let direct = connect(&server.url()).await;
    let through = connect(&format!("redis://127.0.0.1:{}/0", proxy.port())).await;
    resets(through, &direct, &proxy, 500, 120).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_black_hole_is_a_typed_timeout_and_heals() {
    let Some(server) = RedisServer::start(&RedisOptions::default()) else { return };
    let proxy = Proxy::start(server.port()).await;
    let backend = connect(&format!("redis://127.0.0.1:{}/0", proxy.port())).await;
    for fault in [Fault::BlackHole, Fault::SwallowReplies, Fault::HalfClose] {
        proxy.set(fault);
        let started = Instant::now();
        let request = AcquireRequest::new(key("k"), ttl(1000)).expect("randomness");
        let error = backend.acquire(&request).await.expect_err("no answer");
        assert!(error.is_retryable(), "{fault:?}: {error:?}");
        assert!(started.elapsed() < Duration::from_secs(6), "{fault:?} does not hang");
        proxy.set(Fault::None);
        eventually("healed", async || backend.is_locked(&key("other")).await.is_ok()).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn flushed_scripts_are_sent_again_and_grant_once() {
    let Some(server) = RedisServer::start(&RedisOptions::default()) else { return };
    let backend = connect(&server.url()).await;
    let stop = Arc::new(AtomicBool::new(false));
    let flushing = tokio::spawn({
        let (stop, client) = (Arc::clone(&stop), Client::open(server.url()).expect("a URL"));
        async move {
            let mut raw = client.get_multiplexed_async_connection().await.expect("connects");
            while !stop.load(Ordering::Relaxed) {
                redis::cmd("SCRIPT").arg("FLUSH").query_async::<()>(&mut raw).await.expect("works");
            }
        }
    });
    let tasks: Vec<_> = (0..8)
        .map(|task| {
            let backend = backend.clone();
            tokio::spawn(async move {
                let key = key(&format!("k{task}"));
                for fence in 1..=100 {
                    let request =
                        AcquireRequest::new(key.clone(), Ttl::DEFAULT).expect("randomness");
                    let outcome = backend.acquire(&request).await.expect("works");
                    let AcquireOutcome::Acquired(lease) = outcome else { panic!("{outcome:?}") };
                    assert_eq!(lease.fence().get(), fence, "granted exactly once each");
                    let release = ReleaseRequest::new(request.lock_id());
                    let released = backend.release(&release).await.expect("works");
                    assert_eq!(released, ReleaseOutcome::Released);
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.expect("no panic");
    }
    stop.store(true, Ordering::Relaxed);
    flushing.await.expect("no panic");
}

/// The paused holder of the fencing guide: a script that compares fences refuses its write.
#[tokio::test(flavor = "multi_thread")]
async fn the_write_of_a_paused_holder_is_refused_by_the_fence() {
    let Some(server) = RedisServer::start(&RedisOptions::default()) else { return };
    let options = LockOptions::default().ttl(ttl(200));
    let locker = Locker::builder(connect(&server.url()).await).options(options).build();
    let locker = locker.expect("in a runtime");
    let write = redis::Script::new(
        "local seen = tonumber(redis.call('HGET', KEYS[1], 'fence') or '0')
         if tonumber(ARGV[1]) < seen then return 0 end
         redis.call('HSET', KEYS[1], 'fence', ARGV[1], 'text', ARGV[2])
         return 1",
    );
    let client = Client::open(server.url()).expect("a URL");
    let mut raw = client.get_multiplexed_async_connection().await.expect("connects");
    let paused = locker.lock("document").await.expect("free");
    assert_eq!(paused.lost().await, LostReason::Expired);
    let current = locker.lock("document").await.expect("taken over");
    let mut accepted = Vec::new();
    for (holder, text) in [(&current, "current"), (&paused, "paused")] {
        let mut call = write.key("the document");
        let call = call.arg(holder.fence().get()).arg(text);
        accepted.push(call.invoke_async::<i64>(&mut raw).await.expect("works"));
    }
    assert_eq!(accepted, [1, 0]);
    let text: String = raw.hget("the document", "text").await.expect("works");
    assert_eq!(text, "current");
}

/// A restart ends the subscription too; waiters are notified again afterwards.
#[tokio::test(flavor = "multi_thread")]
async fn notifications_resume_after_a_restart() {
    let Some(mut server) = RedisServer::start(&RedisOptions::default().with_aof()) else { return };
    let backend = connect(&server.url()).await;
    let much_later = Duration::from_hours(1);
    let retry = RetryPolicy::default().delay(much_later);
    let options = LockOptions::default().timeout(Duration::from_secs(30)).retry(retry);
    let options = options.retry_on_error(true);
    let waiter = Locker::builder(backend.clone()).options(options.clone());
    let waiter = waiter.poll_interval(much_later).build().expect("in a runtime");
    let holder = Locker::builder(backend).options(options).build().expect("in a runtime");
    let guard = holder.lock("k").await.expect("free");
    let waiting = tokio::spawn(async move { waiter.lock("k").await.map(drop) });
    tokio::time::sleep(Duration::from_millis(200)).await;
    server.crash_and_restart();
    eventually("released", async || guard.release().await.is_ok()).await;
    woken(waiting).await;
}

async fn refused(url: &str) -> syncguard::Error {
    match RedisConfig::from_url(url) {
        Ok(config) => {
            let config = config.connect_timeout(Duration::from_millis(1500));
            let started = Instant::now();
            let error = RedisBackend::connect(config).await.expect_err("it must be refused");
            assert!(started.elapsed() < Duration::from_secs(5), "it does not hang");
            error
        }
        Err(error) => error,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn configuration_errors_have_a_code_and_contain_no_password() {
    let password = "canary-password";
    let options = RedisOptions::default().with(["--requirepass", "right"]);
    let Some(server) = RedisServer::start(&options) else { return };
    let port = server.port();
    let closed = RedisServer::start(&RedisOptions::default()).expect("installed");
    let closed_port = closed.port();
    drop(closed);
    let cases = [
        (format!("redis://:{password}@127.0.0.1:{port}/0"), ErrorCode::AuthFailed),
        (format!("redis://127.0.0.1:{port}/0"), ErrorCode::AuthFailed),
        (format!("redis://:{password}@127.0.0.1:{closed_port}/0"), ErrorCode::ServiceUnavailable),
        (format!("http://:{password}@127.0.0.1:{port}/0"), ErrorCode::InvalidArgument),
        (format!("redis://:{password}@127.0.0.1:{port}/x"), ErrorCode::InvalidArgument),
        (format!("redis://:{password}@"), ErrorCode::InvalidArgument),
        (String::new(), ErrorCode::InvalidArgument),
    ];
    for (url, expected) in cases {
        let error = refused(&url).await;
        assert_eq!(error.code(), expected, "{url}: {error:?}");
        let shown = shown(&error);
        assert!(!shown.contains("canary"), "{shown}");
    }
    for prefix in ["fence", "my-fence", "a:fence:b", &"p".repeat(952)] {
        let config = config(&format!("redis://:right@127.0.0.1:{port}/0")).prefix(prefix);
        let shown = format!("{config:?}");
        assert!(!shown.contains("right"), "{shown}");
        let error = RedisBackend::connect(config).await.expect_err("a bad prefix");
        assert_eq!(error.code(), ErrorCode::InvalidArgument, "{prefix}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn refusals_of_the_server_have_the_codes_of_the_table() {
    let Some(server) = RedisServer::start(&RedisOptions::default()) else { return };
    let backend = connect(&server.url()).await;
    let client = Client::open(server.url()).expect("a URL");
    let mut raw = client.get_multiplexed_async_connection().await.expect("connects");
    let acquire = |text: &str| AcquireRequest::new(key(text), Ttl::DEFAULT).expect("randomness");
    let set = |name: &str, value: &str| {
        let mut set = redis::cmd("CONFIG");
        set.arg("SET").arg(name).arg(value);
        set
    };
    // Another type of data where the lock belongs.
    raw.lpush::<_, _, ()>("syncguard:list", "x").await.expect("works");
    let error = backend.acquire(&acquire("list")).await.expect_err("a list is there");
    assert_eq!(error.code(), ErrorCode::InvalidArgument, "{error:?}");
    // Out of memory.
    let held = acquire("held");
    drop(backend.acquire(&held).await.expect("works"));
    set("maxmemory", "1").query_async::<()>(&mut raw).await.expect("works");
    let error = backend.acquire(&acquire("k")).await.expect_err("no memory");
    assert_eq!(error.code(), ErrorCode::RateLimited, "{error:?}");
    let released = backend.release(&ReleaseRequest::new(held.lock_id())).await.expect("works");
    assert_eq!(released, ReleaseOutcome::Released, "a release needs no memory");
    set("maxmemory", "0").query_async::<()>(&mut raw).await.expect("works");
    // Too few replicas.
    set("min-replicas-to-write", "1").query_async::<()>(&mut raw).await.expect("works");
    let error = backend.acquire(&acquire("k")).await.expect_err("no replica");
    assert_eq!(error.code(), ErrorCode::ServiceUnavailable, "{error:?}");
    set("min-replicas-to-write", "0").query_async::<()>(&mut raw).await.expect("works");
    // A read-only replica.
    let replica = RedisOptions::default().with(["--replicaof", "127.0.0.1", "1"]);
    let replica = RedisServer::start(&replica).expect("installed");
    let on_replica = connect(&replica.url()).await;
    let error = on_replica.acquire(&acquire("k")).await.expect_err("read-only");
    assert_eq!(error.code(), ErrorCode::ServiceUnavailable, "{error:?}");
    // maxclients reached.
    set("maxclients", "1").query_async::<()>(&mut raw).await.expect("works");
    let error = RedisBackend::connect(config(&server.url())).await.expect_err("full");
    assert_eq!(error.code(), ErrorCode::RateLimited, "{error:?}");
    // The same for a connection that is replaced.
    let mut kill = redis::cmd("CLIENT");
    kill.arg("KILL").arg("TYPE").arg("normal").query_async::<()>(&mut raw).await.expect("works");
    let error = backend.acquire(&acquire("k")).await.expect_err("full");
    assert_eq!(error.code(), ErrorCode::RateLimited, "{error:?}");
    assert!(!error.may_have_taken_effect(), "{error:?}");
}

/// The documented rights of a user, except for the channels.
const RIGHTS: &str = "resetchannels -@all +evalsha +eval +get +mget +set +del +incr +decr +persist \
                      +time +publish +subscribe +unsubscribe +pubsub|numsub +ping +hello";

/// A user with exactly the documented ACL rules can do everything. Without access to the channels,
/// waiters poll; without `MGET`, locks do not travel together.
#[tokio::test(flavor = "multi_thread")]
async fn the_documented_acl_rules_are_sufficient() {
    let Some(server) = RedisServer::start(&RedisOptions::default()) else { return };
    let client = Client::open(server.url()).expect("a URL");
    let mut raw = client.get_multiplexed_async_connection().await.expect("connects");
    for (user, more) in
        [("full", "&syncguard:wake:*"), ("mute", ""), ("alone", "&syncguard:wake:* -mget")]
    {
        let mut acl = redis::cmd("ACL");
        acl.arg("SETUSER").arg(user).arg("on").arg(">secret").arg("~syncguard:*");
        for right in RIGHTS.split_whitespace().chain(more.split_whitespace()) {
            acl.arg(right);
        }
        acl.query_async::<()>(&mut raw).await.expect("works");
        let url = format!("redis://{user}:secret@127.0.0.1:{}/0", server.port());
        let options = LockOptions::default().timeout(Duration::from_secs(10));
        let backend = connect(&url).await;
        let here = Locker::builder(backend.clone()).options(options.clone()).build();
        let here = here.expect("in a runtime");
        let there = Locker::builder(backend).options(options).build().expect("in a runtime");
        let guard = here.lock(user).await.expect("free");
        let waiting = tokio::spawn(async move { there.lock(user).await.map(drop) });
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert_eq!(guard.release().await.expect("works"), ReleaseOutcome::Released);
        waiting.await.expect("no panic").expect("acquired");
        let all = here.lock_all(["a", "b", "c"]).await.expect("free");
        all.release().await.expect("works");
        assert!(!here.is_locked("b").await.expect("works"));
    }
    let url = format!("redis://full:secret@127.0.0.1:{}/0", server.port());
    // Listing needs one more permission.
    let backend = connect(&url).await;
    let admin = backend.admin().expect("Redis has one");
    let error = admin.list(None).await.expect_err("no permission to scan");
    assert_eq!(error.code(), ErrorCode::AuthFailed, "{error:?}");
    redis::cmd("ACL")
        .arg(&["SETUSER", "full", "+scan"])
        .query_async::<()>(&mut raw)
        .await
        .expect("works");
    assert!(admin.list(None).await.is_ok());
    let config = config(&url).prefix("elsewhere");
    let backend = RedisBackend::connect(config).await.expect("connects");
    let error = backend.is_locked(&key("k")).await.expect_err("no permission for these names");
    assert_eq!(error.code(), ErrorCode::AuthFailed, "{error:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_renewed_lock_survives_a_path_that_dies() {
    let Some(server) = RedisServer::start(&RedisOptions::default()) else { return };
    let proxy = Proxy::start(server.port()).await;
    let config = config(&format!("redis://127.0.0.1:{}", proxy.port()));
    let config = config.response_timeout(Duration::from_secs(30));
    let backend = RedisBackend::connect(config).await.expect("connects");
    Box::pin(a_dead_path_costs_no_renewed_lock(backend, &proxy)).await;
}

/// A lock is renewed over another connection if connecting takes too long. The attempt that was
/// given up must not end that one.
#[tokio::test(flavor = "multi_thread")]
async fn an_attempt_to_connect_that_fails_late_does_not_end_a_newer_connection() {
    const CONNECT: Duration = Duration::from_millis(1_500);
    let Some(server) = RedisServer::start(&RedisOptions::default()) else { return };
    let proxy = Proxy::start(server.port()).await;
    let config = config(&format!("redis://127.0.0.1:{}", proxy.port())).connect_timeout(CONNECT);
    let backend = RedisBackend::connect(config).await.expect("connects");
    let (request, _lease) = grant(&backend, "k").await;
    proxy.set(Fault::BlackHole);
    proxy.cut();
    let began = Instant::now();
    let extend = ExtendRequest::new(request.lock_id(), ttl(30_000))
        .with_hint(Hint::key(key("k")))
        .answer_within(Duration::from_millis(300));
    for _ in 0..2 {
        backend.extend(&extend).await.expect_err("nothing is answered");
    }
    proxy.strand();
    proxy.set(Fault::None);
    let extended = backend.extend(&extend).await.expect("a new connection works");
    assert!(matches!(extended, ExtendOutcome::Extended(_)), "{extended:?}");
    assert!(began.elapsed() < CONNECT, "the first attempt has not ended");
    let connections = || {
        let stats = server.cli(&["INFO", "stats"]);
        let total = stats.lines().find_map(|line| line.strip_prefix("total_connections_received:"));
        total.expect("a number").trim().parse::<u32>().expect("a number")
    };
    let before = connections();
    tokio::time::sleep(CONNECT).await;
    drop(backend.extend(&extend).await.expect("works"));
    assert_eq!(connections(), before + 1, "only the one that counts");
}

/// Servers and managed services close idle connections.
#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_was_closed_while_idle_is_not_used() {
    let Some(server) = RedisServer::start(&RedisOptions::default()) else { return };
    let replica = server.start_replica();
    server.wait_for_a_replica();
    for url in [server.url(), format!("{}?wait_for_replicas=1", server.url())] {
        let backend = connect(&url).await;
        for round in 0..3 {
            cycle(&backend, "k").await.unwrap_or_else(|error| panic!("round {round}: {error}"));
            drop(server.cli(&["CLIENT", "KILL", "TYPE", "normal"]));
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }
    drop(replica);
}

/// Fences from the clock leave counters that expire. Without the clock, they must not.
#[tokio::test(flavor = "multi_thread")]
async fn counters_of_clock_fences_can_be_used_with_the_documented_acl_rules() {
    let Some(server) = RedisServer::start(&RedisOptions::default()) else { return };
    let with_clock = connect(&format!("{}?fences=clock", server.url())).await;
    cycle(&with_clock, "k").await.expect("works");
    let mut acl = vec!["ACL", "SETUSER", "app", "on", ">secret", "~syncguard:*"];
    acl.extend(RIGHTS.split_whitespace());
    drop(server.cli(&acl));
    let url = format!("redis://app:secret@127.0.0.1:{}/0", server.port());
    cycle(&connect(&url).await, "k").await.expect("the rights suffice");
    assert_eq!(server.cli(&["TTL", "syncguard:fence:syncguard:k"]).trim(), "-1");
}
