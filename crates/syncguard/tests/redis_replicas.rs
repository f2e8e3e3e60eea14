//! Locks on Redis that replicas must confirm: what happens when they do not, and when the undo
//! fails too.
#![cfg(feature = "redis")]

mod servers;

use std::time::Duration;

use servers::{eventually, key, request};
use syncguard::backend::AcquireOutcome;
use syncguard::redis::RedisConfig;
use syncguard::{ErrorCode, LockBackend, LockOptions, Locker, RedisBackend, Ttl};
use test_support::{RedisOptions, RedisServer};

const RIGHTS: &str = "on >secret ~* &* +@all";

fn set_user(server: &RedisServer, rights: &str) {
    let words = ["ACL", "SETUSER", "app"].into_iter().chain(rights.split(' '));
    assert!(server.cli(&words.collect::<Vec<_>>()).contains("OK"));
}

/// A backend whose locks one replica must confirm, as the user `app`.
async fn careful(server: &RedisServer) -> RedisBackend {
    let url = server.url().replace("redis://", "redis://app:secret@");
    let config = RedisConfig::from_url(&url).expect("a URL");
    let config = config.wait_for_replicas(1, Duration::from_millis(100));
    RedisBackend::connect(config).await.expect("connects")
}

/// Makes the server refuse writes once the lock is stored and waits for replicas. They do not
/// confirm, and the undo is refused.
async fn refuse_writes_once_stored(server: &RedisServer) {
    eventually("stored", async || server.cli(&["EXISTS", "syncguard:k"]).contains('1')).await;
    assert!(server.cli(&["CONFIG", "SET", "min-replicas-to-write", "1"]).contains("OK"));
}

/// The refused undo alone would be an error without effect, but the lock is stored.
#[tokio::test(flavor = "multi_thread")]
async fn an_acquire_that_could_not_be_undone_may_have_taken_effect() {
    let Some(server) = RedisServer::start(&RedisOptions::default()) else { return };
    let config = RedisConfig::from_url(&server.url()).expect("a URL");
    let config = config.wait_for_replicas(1, Duration::from_secs(3));
    let backend = RedisBackend::connect(config).await.expect("connects");
    let request = request("k");
    let (answer, ()) = tokio::join!(backend.acquire(&request), refuse_writes_once_stored(&server));
    let error = answer.expect_err("no replica confirms");
    assert_eq!(error.code(), ErrorCode::ServiceUnavailable, "{error:?}");
    assert!(backend.is_locked(&key("k")).await.expect("works"), "the undo was refused");
    assert!(error.may_have_taken_effect(), "{error:?}");
    assert_eq!(error.operation(), Some("acquire"));
}

/// The command that waits is refused: the lock is undone, and the error is the refusal.
#[tokio::test(flavor = "multi_thread")]
async fn an_acquire_whose_wait_is_refused_is_undone() {
    let Some(server) = RedisServer::start(&RedisOptions::default()) else { return };
    set_user(&server, &format!("{RIGHTS} -wait"));
    let backend = careful(&server).await;
    let error = backend.acquire(&request("k")).await.expect_err("it may not wait");
    assert_eq!(error.code(), ErrorCode::AuthFailed, "{error:?}");
    assert!(!backend.is_locked(&key("k")).await.expect("works"), "nothing is left");
    assert!(!error.may_have_taken_effect(), "it was undone");
}

/// The locker undoes what the backend could not undo, as soon as that is possible.
#[tokio::test(flavor = "multi_thread")]
async fn a_locker_keeps_undoing_a_lock_that_was_not_confirmed() {
    let Some(server) = RedisServer::start(&RedisOptions::default()) else { return };
    let config = RedisConfig::from_url(&server.url()).expect("a URL");
    let config = config.wait_for_replicas(1, Duration::from_secs(3));
    let backend = RedisBackend::connect(config).await.expect("connects");
    let ttl = Ttl::new(Duration::from_mins(10)).expect("valid");
    let options = LockOptions::default().ttl(ttl).timeout(Duration::from_secs(20));
    let locker = Locker::builder(backend.clone()).options(options).build().expect("a runtime");
    let (answer, ()) = tokio::join!(locker.try_lock("k"), refuse_writes_once_stored(&server));
    answer.expect_err("no replica confirms");
    assert!(backend.is_locked(&key("k")).await.expect("works"));
    assert!(server.cli(&["CONFIG", "SET", "min-replicas-to-write", "0"]).contains("OK"));
    eventually("undone", async || !backend.is_locked(&key("k")).await.expect("works")).await;
}

/// Returns how many writes of a record a replica has received.
fn received(replica: &RedisServer) -> u64 {
    let stats = replica.cli(&["INFO", "commandstats"]);
    let line = stats.lines().find_map(|line| line.strip_prefix("cmdstat_set:calls="));
    let count = line.and_then(|line| line.split(',').next());
    count.map_or(0, |count| count.parse().expect("a number"))
}

/// From Redis 7.2 on, `WAIT` covers only the writes of its own connection, so a replay must write:
/// when it returns, the replica has received the record once more, and the stored record is
/// unchanged.
#[tokio::test(flavor = "multi_thread")]
async fn a_replay_writes_so_that_replicas_confirm_the_lock_itself() {
    let Some(primary) = RedisServer::start(&RedisOptions::default()) else { return };
    let replica = primary.start_replica();
    set_user(&primary, RIGHTS);
    let config = RedisConfig::from_url(&primary.url()).expect("a URL");
    let plain = RedisBackend::connect(config.clone()).await.expect("connects");
    let careful = config.wait_for_replicas(1, Duration::from_secs(20));
    let backend = RedisBackend::connect(careful.clone()).await.expect("connects");
    let first = request("k");
    let AcquireOutcome::Acquired(lease) = backend.acquire(&first).await.expect("confirmed") else {
        panic!("free")
    };
    let expiry = |server: &RedisServer| server.cli(&["PEXPIRETIME", "syncguard:k"]);
    let (stored, expires) = (primary.cli(&["GET", "syncguard:k"]), expiry(&primary));
    let before = received(&replica);
    // On a connection that has written nothing yet.
    let fresh = RedisBackend::connect(careful).await.expect("connects");
    let AcquireOutcome::Acquired(replay) = fresh.acquire(&first).await.expect("confirmed") else {
        panic!("a replay")
    };
    assert!(received(&replica) > before, "the replay wrote nothing that WAIT could cover");
    assert_eq!((replay.fence(), replay.expires_at()), (lease.fence(), lease.expires_at()));
    assert_eq!(primary.cli(&["GET", "syncguard:k"]), stored);
    assert_eq!(expiry(&primary), expires);
    // Without replicas to wait for, a replay only reads.
    let before = received(&replica);
    assert!(matches!(plain.acquire(&first).await.expect("works"), AcquireOutcome::Acquired(_)));
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(received(&replica), before);
}

/// A replay whose record no replica confirms is not granted.
#[tokio::test(flavor = "multi_thread")]
async fn a_replay_that_no_replica_confirms_is_undone() {
    let Some(server) = RedisServer::start(&RedisOptions::default()) else { return };
    set_user(&server, RIGHTS);
    let config = RedisConfig::from_url(&server.url()).expect("a URL");
    let plain = RedisBackend::connect(config).await.expect("connects");
    let first = request("k");
    assert!(matches!(plain.acquire(&first).await.expect("works"), AcquireOutcome::Acquired(_)));
    let error = careful(&server).await.acquire(&first).await.expect_err("not confirmed");
    assert_eq!(error.code(), ErrorCode::ServiceUnavailable, "{error:?}");
    assert!(!plain.is_locked(&key("k")).await.expect("works"));
}
