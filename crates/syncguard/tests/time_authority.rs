//! The server's clock decides, not the client's: a client whose wall clock is wrong takes, extends
//! and sees locks like any other.
#![cfg(all(target_os = "linux", feature = "postgres", feature = "redis"))]

mod wall_clock;

use std::time::{Duration, SystemTime};

use syncguard::backend::{
    AcquireOutcome, AcquireRequest, ExtendRequest, ReleaseRequest, TimeAuthority,
};
use syncguard::{
    AnyBackend, ExtendOutcome, Key, LockBackend, ReleaseOutcome, Timestamp, Ttl, connect,
    diagnostics,
};
use test_support::{PostgresOptions, PostgresServer, RedisOptions, RedisServer};
use wall_clock::{MovableClock, with_a_movable_clock};

const MOST_OFF: Duration = Duration::from_mins(5);

/// Checks that an expiry is one TTL after the true time, with a margin for slow machines.
#[track_caller]
fn assert_is_true(expires_at: Timestamp, taken: SystemTime, ttl: Ttl) {
    let (ours, expected) = (SystemTime::from(expires_at), taken + ttl.as_duration());
    let off = ours.duration_since(expected).unwrap_or_else(|before| before.duration());
    assert!(off < MOST_OFF, "the expiry is off by {off:?}");
}

/// Runs the whole life of a lock, with a clock that is set in the middle.
async fn live(backend: AnyBackend, clock: &MovableClock, set: impl Fn(&MovableClock)) {
    assert_eq!(backend.capabilities().time_authority, TimeAuthority::Server);
    let truth = SystemTime::now();
    let before = request("before");
    assert!(matches!(backend.acquire(&before).await, Ok(AcquireOutcome::Acquired(_))));
    set(clock);
    // A lock that was taken by the true clock is held by the wrong one.
    assert!(backend.is_locked(before.key()).await.expect("works"), "a client's clock decides");
    let rival = backend.acquire(&request("before")).await.expect("works");
    assert!(matches!(rival, AcquireOutcome::Contended { .. }), "two hold one lock: {rival:?}");
    // A lock that is taken and extended by the wrong clock expires by the true one.
    let after = request("after");
    let Ok(AcquireOutcome::Acquired(lease)) = backend.acquire(&after).await else { panic!("free") };
    assert_is_true(lease.expires_at(), truth, Ttl::DEFAULT);
    let stored = diagnostics::get_by_key(&backend, after.key()).await.expect("works");
    assert_eq!(stored.expect("held").expires_at, lease.expires_at());
    for request in [before, after] {
        let extend = ExtendRequest::new(request.lock_id(), Ttl::DEFAULT);
        let Ok(ExtendOutcome::Extended(extension)) = backend.extend(&extend).await else {
            panic!("held")
        };
        assert_is_true(extension.expires_at(), truth, Ttl::DEFAULT);
        let release = ReleaseRequest::new(request.lock_id());
        assert_eq!(backend.release(&release).await.expect("works"), ReleaseOutcome::Released);
    }
}

fn request(key: &str) -> AcquireRequest {
    AcquireRequest::new(Key::new(key).expect("valid"), Ttl::DEFAULT).expect("randomness")
}

/// Runs it twice: with the clock set ahead, and with the clock set back.
async fn live_with_a_wrong_clock(url: &str, clock: MovableClock) {
    let backend = connect(url).await.expect("a server");
    if let Some(admin) = backend.admin() {
        admin.setup().await.expect("works");
    }
    live(backend.clone(), &clock, MovableClock::set_ahead).await;
    clock.set_true();
    live(backend, &clock, MovableClock::set_back).await;
}

fn run(test: impl Future<Output = ()>) {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    runtime.expect("a runtime").block_on(test);
}

#[test]
fn redis_computes_the_expiry() {
    with_a_movable_clock("redis_computes_the_expiry", |clock| {
        let Some(server) = RedisServer::start(&RedisOptions::default()) else { return };
        run(live_with_a_wrong_clock(&server.url(), clock));
    });
}

#[test]
fn postgres_computes_the_expiry() {
    with_a_movable_clock("postgres_computes_the_expiry", |clock| {
        let Some(server) = PostgresServer::start(&PostgresOptions::default()) else { return };
        run(live_with_a_wrong_clock(&server.url(), clock));
    });
}
