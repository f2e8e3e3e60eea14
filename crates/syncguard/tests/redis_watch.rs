//! A holder on Redis learns at once that its lock is gone, for every way to remove the record.
#![cfg(feature = "redis")]

mod servers;

use std::time::{Duration, Instant};

use redis::{AsyncCommands, Client, Script};
use servers::{eventually, key};
use syncguard::backend::KeySpace;
use syncguard::redis::RedisConfig;
use syncguard::{ExtendOutcome, LockBackend, LockGuard, Locker, LostReason, RedisBackend};
use test_support::{RedisOptions, RedisServer};

/// Renewed only after 40 seconds.
const TTL: Duration = Duration::from_mins(2);
/// Much sooner than that, and much later than a notification on a loaded machine.
const SOON: Duration = Duration::from_secs(10);

async fn backend(url: &str) -> RedisBackend {
    let config = RedisConfig::from_url(url).expect("a URL");
    RedisBackend::connect(config).await.expect("connects")
}

/// Takes a lock, and waits until its guard has had the time to watch it.
async fn watched(url: &str, name: &str) -> LockGuard<RedisBackend> {
    let locker = Locker::builder(backend(url).await).ttl(TTL).renew().build().expect("valid");
    let guard = locker.lock(name).await.expect("free");
    tokio::time::sleep(Duration::from_millis(600)).await;
    assert_eq!(guard.ended(), None);
    guard
}

async fn lost(guard: &LockGuard<RedisBackend>) -> LostReason {
    tokio::time::timeout(SOON, guard.lost()).await.expect("not at the next renewal")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flushed_deleted_or_released_lock_is_lost_at_once() {
    let Some(server) = RedisServer::start(&RedisOptions::default()) else { return };
    let client = Client::open(server.url()).expect("a URL");
    let mut raw = client.get_multiplexed_async_connection().await.expect("connects");
    let flushed = watched(&server.url(), "flushed").await;
    redis::cmd("FLUSHALL").query_async::<()>(&mut raw).await.expect("works");
    assert_eq!(lost(&flushed).await, LostReason::NotHeld);
    let deleted = watched(&server.url(), "deleted").await;
    raw.del::<_, ()>("syncguard:deleted").await.expect("works");
    assert_eq!(lost(&deleted).await, LostReason::NotHeld);
    // The TypeScript implementation publishes nothing.
    let released = watched(&server.url(), "released").await;
    let space = KeySpace::new("syncguard", 1000, 26).expect("valid");
    let script = Script::new(include_str!("typescript/release.lua"));
    let mut call = script.key(space.index_key(&released.lock_id()).expect("fits"));
    let call = call.arg(released.lock_id().expose()).arg(1000);
    let answer: i64 = call.invoke_async(&mut raw).await.expect("works");
    assert_eq!(answer, 1);
    assert_eq!(lost(&released).await, LostReason::NotHeld);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_extend_by_anyone_is_no_loss_and_the_watch_goes_on() {
    let Some(server) = RedisServer::start(&RedisOptions::default()) else { return };
    let client = Client::open(server.url()).expect("a URL");
    let mut raw = client.get_multiplexed_async_connection().await.expect("connects");
    let guard = watched(&server.url(), "extended").await;
    for _ in 0..3 {
        let extended = guard.extend(TTL).await.expect("works");
        assert!(matches!(extended, ExtendOutcome::Extended(_)));
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(guard.ended(), None);
    raw.del::<_, ()>("syncguard:extended").await.expect("works");
    assert_eq!(lost(&guard).await, LostReason::NotHeld);
}

/// The connection that watches is cut, and the lock is taken away before it is back.
#[tokio::test(flavor = "multi_thread")]
async fn a_loss_while_the_connection_was_cut_is_noticed_when_it_is_back() {
    let Some(server) = RedisServer::start(&RedisOptions::default()) else { return };
    let client = Client::open(server.url()).expect("a URL");
    let mut raw = client.get_multiplexed_async_connection().await.expect("connects");
    let guard = watched(&server.url(), "cut").await;
    let mut cut = redis::pipe();
    cut.atomic().cmd("CLIENT").arg("KILL").arg("TYPE").arg("normal").arg("SKIPME").arg("yes");
    cut.cmd("DEL").arg("syncguard:cut");
    cut.query_async::<()>(&mut raw).await.expect("works");
    assert_eq!(lost(&guard).await, LostReason::NotHeld);
}

/// A server that does not let the user track records costs a holder the push and nothing else.
#[tokio::test(flavor = "multi_thread")]
async fn without_the_right_to_track_waiters_are_still_notified() {
    let Some(server) = RedisServer::start(&RedisOptions::default()) else { return };
    let client = Client::open(server.url()).expect("a URL");
    let mut raw = client.get_multiplexed_async_connection().await.expect("connects");
    let mut acl = redis::cmd("ACL");
    acl.arg("SETUSER").arg("app").arg(&["on", ">pw", "~*", "&*", "+@all", "-client|tracking"]);
    acl.query_async::<()>(&mut raw).await.expect("works");
    let backend = backend(&server.url().replace("redis://", "redis://app:pw@")).await;
    assert!(backend.watch(&key("k")).await.is_none());
    let mut waiting = backend.subscribe(&key("k")).await.expect("subscribes");
    let locker = Locker::builder(backend).ttl(TTL).renew().build().expect("valid");
    let guard = locker.lock("k").await.expect("free");
    tokio::time::sleep(Duration::from_millis(300)).await;
    let started = Instant::now();
    guard.release().await.expect("works");
    tokio::time::timeout(SOON, waiting.notified()).await.expect("notified");
    assert!(started.elapsed() < SOON && waiting.is_working());
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_tracked_after_a_guard_is_gone() {
    let Some(server) = RedisServer::start(&RedisOptions::default()) else { return };
    let client = Client::open(server.url()).expect("a URL");
    let mut raw = client.get_multiplexed_async_connection().await.expect("connects");
    let guard = watched(&server.url(), "gone").await;
    let tracked = async |raw: &mut redis::aio::MultiplexedConnection| {
        let info: String = redis::cmd("INFO").arg("stats").query_async(raw).await.expect("works");
        let line = info.lines().find_map(|line| line.strip_prefix("tracking_total_keys:"));
        line.expect("reported").trim().parse::<u32>().expect("a number")
    };
    assert_eq!(tracked(&mut raw).await, 1);
    guard.release().await.expect("works");
    eventually("nothing is tracked", async || {
        let mut raw = client.get_multiplexed_async_connection().await.expect("connects");
        tracked(&mut raw).await == 0
    })
    .await;
}
