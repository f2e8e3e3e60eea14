//! Several locks at once, elections and semaphores on real servers, while connections are cut,
//! while a server hangs, and between lockers that share nothing else.
#![cfg(all(feature = "redis", feature = "postgres", feature = "firestore"))]

mod servers;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use servers::{eventually, key};
use syncguard::primitives::{Role, slot_key};
use syncguard::{AnyBackend, LockBackend, LockOptions, Locker};
use test_support::{
    Fault, FirestoreEmulator, PostgresOptions, PostgresServer, Proxy, RedisOptions, RedisServer,
};

/// Shorter than the test, so that leases end while their holders cannot reach the store.
const TTL: Duration = Duration::from_millis(1500);
const TEST: Duration = Duration::from_secs(5);

/// A server that can hang, and can be reached through a proxy.
trait Store: Send + Sync + 'static {
    fn port(&self) -> u16;

    /// Returns the URL of the server, or of a proxy to it.
    fn url(&self, port: u16) -> String;

    fn pause(&self);

    fn resume(&self);
}

macro_rules! store {
    ($server:ident, $before:literal, $after:literal) => {
        impl Store for $server {
            fn port(&self) -> u16 {
                self.port()
            }

            fn url(&self, port: u16) -> String {
                format!(concat!($before, "{}", $after), port)
            }

            fn pause(&self) {
                self.pause();
            }

            fn resume(&self) {
                self.resume();
            }
        }
    };
}

store!(RedisServer, "redis://127.0.0.1:", "/0?connect_timeout_ms=300&response_timeout_ms=300");
store!(
    PostgresServer,
    "postgres://postgres@127.0.0.1:",
    "/postgres?connect_timeout_ms=300&response_timeout_ms=300"
);
store!(
    FirestoreEmulator,
    "firestore://test?emulator=127.0.0.1:",
    "&connect_timeout_ms=300&response_timeout_ms=300"
);

async fn connect(server: &impl Store, port: u16) -> AnyBackend {
    let backend = syncguard::connect(&server.url(port)).await.expect("connects");
    let locker = Locker::builder(backend.clone()).build().expect("in a runtime");
    locker.setup().await.expect("creates tables");
    backend
}

async fn locker(server: &impl Store, port: u16) -> Locker<AnyBackend> {
    let options = LockOptions::default().ttl(TTL).renew().timeout(Duration::from_secs(4));
    let options = options.retry_on_error(true);
    Locker::builder(connect(server, port).await).options(options).build().expect("in a runtime")
}

/// Injects faults one after another until it is told to stop.
async fn disturb(proxy: &Proxy, stop: &AtomicBool) {
    let faults = [
        Fault::ResetAfter(7),
        Fault::None,
        Fault::SwallowReplies,
        Fault::ResetAfter(60),
        Fault::None,
        Fault::BlackHole,
        Fault::None,
        Fault::HalfClose,
    ];
    for fault in faults.into_iter().cycle() {
        if stop.load(Ordering::SeqCst) {
            break;
        }
        proxy.set(fault);
        let pause = match fault {
            // Longer than the TTL.
            Fault::BlackHole => 1800,
            // Enough to connect and to lead.
            Fault::None => 500,
            _ => 250,
        };
        tokio::time::sleep(Duration::from_millis(pause)).await;
    }
    proxy.set(Fault::None);
}

/// Counts something that must not exceed a limit, while a lease is certain to be held.
struct Count<'a>(&'a AtomicU32);

impl<'a> Count<'a> {
    fn up(count: &'a AtomicU32, limit: u32) -> Self {
        let now = count.fetch_add(1, Ordering::SeqCst) + 1;
        assert!(now <= limit, "{now} are valid at once, not {limit}");
        Self(count)
    }
}

impl Drop for Count<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

async fn never_two_leaders(server: impl Store) {
    let mut proxies = Vec::new();
    for _ in 0..3 {
        proxies.push(Arc::new(Proxy::start(server.port()).await));
    }
    let leads = Arc::new(AtomicU32::new(0));
    let (last, terms) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU32::new(0)));
    let stop = Arc::new(AtomicBool::new(false));
    let (mut candidates, mut disturbances) = (Vec::new(), Vec::new());
    for proxy in &proxies {
        let candidate = locker(&server, proxy.port()).await;
        let election = candidate.election("leader").expect("valid");
        let (leads, last, terms) = (Arc::clone(&leads), Arc::clone(&last), Arc::clone(&terms));
        let serving = tokio::spawn(async move {
            election
                .run(|lead| {
                    let (leads, last, terms) =
                        (Arc::clone(&leads), Arc::clone(&last), Arc::clone(&terms));
                    async move {
                        let term = lead.fence().get();
                        assert!(last.swap(term, Ordering::SeqCst) < term, "terms must grow");
                        terms.fetch_add(1, Ordering::SeqCst);
                        let until = Instant::now() + Duration::from_millis(400);
                        while Instant::now() < until && lead.is_valid() {
                            // Counted only while it is certain, without an await in between.
                            let counted = Count::up(&leads, 1);
                            std::thread::sleep(Duration::from_millis(1));
                            drop(counted);
                            tokio::time::sleep(Duration::from_millis(1)).await;
                        }
                    }
                })
                .await
        });
        candidates.push((candidate, serving));
        let (proxy, stop) = (Arc::clone(proxy), Arc::clone(&stop));
        disturbances.push(tokio::spawn(async move { disturb(&proxy, &stop).await }));
        // So that not all have the same fault at the same time.
        tokio::time::sleep(Duration::from_millis(170)).await;
    }
    tokio::time::sleep(TEST).await;
    eventually("five terms", async || terms.load(Ordering::SeqCst) >= 5).await;
    stop.store(true, Ordering::SeqCst);
    for disturbance in disturbances {
        disturbance.await.expect("no panic");
    }
    for (candidate, serving) in candidates {
        // The lead is handed over, or has expired.
        let t0 = Instant::now();
        let d = candidate.shutdown_within(Duration::from_secs(20)).await;
        eprintln!("shutdown {:?} {d:?}", t0.elapsed());
        serving.await.expect("no panic").expect("only the shutdown ends it");
    }
    let direct = connect(&server, server.port()).await;
    eventually("no process leads", async || {
        !direct.is_locked(&key("leader:leader")).await.expect("works")
    })
    .await;
}

async fn never_too_many_permits(server: impl Store) {
    const PERMITS: u32 = 2;
    let held = Arc::new(AtomicU32::new(0));
    let stop = Arc::new(AtomicBool::new(false));
    let acquired = Arc::new(AtomicU32::new(0));
    let (mut tasks, mut lockers) = (Vec::new(), Vec::new());
    for _ in 0..3 {
        let proxy = Proxy::start(server.port()).await;
        let locker = locker(&server, proxy.port()).await;
        for _ in 0..2 {
            let semaphore = locker.semaphore("gpu", PERMITS).expect("valid");
            let (held, stop) = (Arc::clone(&held), Arc::clone(&stop));
            let acquired = Arc::clone(&acquired);
            tasks.push(tokio::spawn(async move {
                while !stop.load(Ordering::SeqCst) {
                    // A store that fails until the timeout is tried again.
                    let Ok(permit) = semaphore.acquire().await else { continue };
                    acquired.fetch_add(1, Ordering::SeqCst);
                    for _ in 0..20 {
                        if permit.is_valid() {
                            let _held = Count::up(&held, PERMITS);
                            std::thread::sleep(Duration::from_millis(1));
                        }
                        tokio::time::sleep(Duration::from_millis(1)).await;
                    }
                }
            }));
        }
        let stop = Arc::clone(&stop);
        tasks.push(tokio::spawn(async move { disturb(&proxy, &stop).await }));
        lockers.push(locker);
        tokio::time::sleep(Duration::from_millis(170)).await;
    }
    tokio::time::sleep(TEST).await;
    eventually("five permits", async || acquired.load(Ordering::SeqCst) >= 5).await;
    stop.store(true, Ordering::SeqCst);
    for task in tasks {
        task.await.expect("no panic");
    }
    let direct = connect(&server, server.port()).await;
    for slot in 0..PERMITS {
        let slot = slot_key(&key("gpu"), slot).expect("valid");
        eventually("the slot is free", async || !direct.is_locked(&slot).await.expect("works"))
            .await;
    }
}

async fn lost_answers_of_a_set(server: impl Store) {
    let proxy = Proxy::start(server.port()).await;
    // Longer than the test waits, so that no lock is free because it has expired.
    let options = LockOptions::default().ttl(Duration::from_mins(10));
    let locker = Locker::builder(connect(&server, proxy.port()).await).options(options).build();
    let locker = locker.expect("in a runtime");
    let direct = connect(&server, server.port()).await;
    let keys = ["a", "b", "c", "d"];
    for place in [1, 20, 45, 80, 120, 300, 600] {
        eventually("connected", async || locker.is_locked("x").await.is_ok()).await;
        proxy.set(Fault::ResetAfter(place));
        let taken = locker.try_lock_all(keys).await;
        proxy.set(Fault::None);
        if let Ok(Some(guard)) = taken {
            drop(guard);
        }
    }
    for name in keys {
        eventually("undone", async || !direct.is_locked(&key(name)).await.expect("works")).await;
    }
}

async fn a_server_that_hangs(server: impl Store) {
    let (one, other) = (locker(&server, server.port()).await, locker(&server, server.port()).await);
    let (leader, follower) =
        (one.election("x").expect("valid"), other.election("x").expect("valid"));
    let leadership = leader.campaign().await.expect("free");
    let campaign = {
        let follower = follower.clone();
        tokio::spawn(async move { follower.campaign().await })
    };
    eventually("it follows", async || follower.role() == Role::Following).await;
    server.pause();
    leadership.lost().await;
    assert_eq!(leader.role(), Role::Unknown);
    eventually("it does not know", async || follower.role() == Role::Unknown).await;
    server.resume();
    let next = campaign.await.expect("no panic").expect("leads");
    assert!(next.term() > leadership.term());
    assert_eq!(follower.role(), Role::Leading);
}

/// Four lockers with connections of their own share nothing but the store, like four processes.
async fn equal_shares(server: impl Store) {
    let end = Instant::now() + Duration::from_secs(4);
    let mut tasks = Vec::new();
    for _ in 0..4 {
        let options = LockOptions::default().timeout(Duration::from_secs(20));
        let locker =
            Locker::builder(connect(&server, server.port()).await).options(options).build();
        let semaphore = locker.expect("in a runtime").semaphore("gpu", 4).expect("valid");
        for _ in 0..4 {
            let semaphore = semaphore.clone();
            tasks.push(tokio::spawn(async move {
                let mut count = 0_u32;
                while Instant::now() < end {
                    let permit = semaphore.acquire().await.expect("in time");
                    tokio::time::sleep(Duration::from_millis(2)).await;
                    permit.release().await.expect("works");
                    count += 1;
                }
                count
            }));
        }
    }
    let mut shares = Vec::new();
    for task in tasks {
        shares.push(task.await.expect("no panic"));
    }
    let average = shares.iter().sum::<u32>() / 16;
    let is_fair = |share: &u32| (average / 2..=average * 2).contains(share);
    assert!(average > 10 && shares.iter().all(is_fair), "{average} on average: {shares:?}");
}

macro_rules! on {
    ($name:ident, $start:expr) => {
        mod $name {
            use super::*;

            on!($start, never_two_leaders_while_connections_are_cut, never_two_leaders);
            on!($start, never_too_many_permits_while_connections_are_cut, never_too_many_permits);
            on!($start, a_set_of_locks_is_undone_when_its_answers_are_lost, lost_answers_of_a_set);
            on!(
                $start,
                a_server_that_hangs_makes_roles_unknown_and_comes_back,
                a_server_that_hangs
            );
        }
    };
    ($start:expr, $test:ident, $body:ident) => {
        #[tokio::test(flavor = "multi_thread")]
        async fn $test() {
            let Some(server) = $start else { return };
            $body(server).await;
        }
    };
}

on!(redis, RedisServer::start(&RedisOptions::default()));
on!(postgres, PostgresServer::start(&PostgresOptions::default()));
on!(firestore, FirestoreEmulator::start());
on!(
    RedisServer::start(&RedisOptions::default()),
    four_lockers_of_four_tasks_get_about_equal_shares,
    equal_shares
);
