//! Measures several locks at once, elections and semaphores, on Redis and PostgreSQL.
//!
//! `cargo xtask bench primitives`

#![allow(clippy::unwrap_used, clippy::cast_precision_loss, reason = "a program, not a library")]

mod contention;
mod support;

use std::time::{Duration, Instant};

use syncguard::backend::{AcquireOutcome, AcquireRequest};
use syncguard::primitives::{Role, leader_key};
use syncguard::{AnyBackend, Key, LockBackend, Locker, Ttl};

use contention::locker;
use support::{Demand, Report, median, percentile};
use test_support::{PostgresOptions, PostgresServer, RedisOptions, RedisServer};

fn main() {
    let runtime = contention::runtime();
    let mut report = Report::default();
    if let Some(server) = RedisServer::start(&RedisOptions::default()) {
        runtime.block_on(measure(&mut report, "redis", &server.url(), Demand::AtMost(10.0)));
    }
    if let Some(server) = PostgresServer::start(&PostgresOptions::default()) {
        runtime.block_on(async {
            let backend = syncguard::connect(&server.url()).await.unwrap();
            backend.admin().unwrap().setup().await.unwrap();
            measure(&mut report, "postgres", &server.url(), Demand::AtMost(50.0)).await;
        });
    }
    report.finish("primitives");
}

async fn measure(report: &mut Report, store: &str, url: &str, failover: Demand) {
    hand_over(report, store, url, failover).await;
    crashed_leader(report, store, url).await;
    permits(report, store, url).await;
    large(report, store, url).await;
    several_locks(report, store, url).await;
}

/// Measures the time from the resignation of a leader to the lead of the next, in two lockers with
/// connections of their own.
async fn hand_over(report: &mut Report, store: &str, url: &str, demand: Demand) {
    const COUNT: usize = 30;
    let lockers = [locker(url).await, locker(url).await];
    let mut times = Vec::new();
    for round in 0..COUNT {
        let name = format!("bench:lead:{round}");
        let [first, second] = [&lockers[round % 2], &lockers[(round + 1) % 2]];
        let leadership = first.election(&*name).unwrap().campaign().await.unwrap();
        let follower = second.election(&*name).unwrap();
        let campaign = {
            let follower = follower.clone();
            tokio::spawn(async move { (follower.campaign().await.unwrap(), Instant::now()) })
        };
        while follower.role() != Role::Following {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        // Long enough to subscribe, and for the order of arrival to matter to other locks.
        tokio::time::sleep(Duration::from_millis(250)).await;
        let started = Instant::now();
        leadership.resign().await.unwrap();
        let (next, led_at) = campaign.await.unwrap();
        times.push(led_at.duration_since(started).as_secs_f64() * 1e3);
        next.resign().await.unwrap();
    }
    let most = percentile(&mut times, 95.0);
    report.info(
        format!("{store}: hand-over of the lead, median"),
        percentile(&mut times, 50.0),
        "ms",
    );
    report.check(format!("{store}: hand-over of the lead, 95 of 100"), most, "ms", demand);
}

/// Measures how long a leader that crashed blocks the next one, beyond its TTL and the tolerance.
async fn crashed_leader(report: &mut Report, store: &str, url: &str) {
    const TTL: Duration = Duration::from_secs(1);
    const TOLERANCE: Duration = Duration::from_secs(1);
    let locker = locker(url).await;
    let mut times = Vec::new();
    for round in 0..3 {
        let name = Key::new(format!("bench:crash:{round}")).unwrap();
        let ttl = Ttl::new(TTL).unwrap();
        let request = AcquireRequest::new(leader_key(&name).unwrap(), ttl).unwrap();
        let started = Instant::now();
        let outcome = locker.backend().acquire(&request).await.unwrap();
        assert!(matches!(outcome, AcquireOutcome::Acquired(_)));
        let next = locker.election(&name).unwrap().campaign().await.unwrap();
        times.push((started.elapsed().as_secs_f64() - (TTL + TOLERANCE).as_secs_f64()) * 1e3);
        next.resign().await.unwrap();
    }
    let most = percentile(&mut times, 100.0);
    report.check(
        format!("{store}: after a crash, beyond TTL + 1 s, longest"),
        most,
        "ms",
        Demand::AtMost(50.0),
    );
}

/// Compares a semaphore of 4 with a single lock, each used by 16 tasks that hold it for 1 ms.
async fn permits(report: &mut Report, store: &str, url: &str) {
    const ROUNDS: usize = 3;
    let locker = locker(url).await;
    let (mut single, mut several) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        single.push(rate(&locker, 1).await);
        several.push(rate(&locker, 4).await);
    }
    let (single, several) = (median(single), median(several));
    report.info(format!("{store}: one lock, 16 tasks, held 1 ms"), single, "hand-overs/s");
    report.info(format!("{store}: semaphore of 4, 16 tasks, held 1 ms"), several, "hand-overs/s");
    let (name, ratio) = (format!("{store}: semaphore of 4 to one lock"), several / single);
    report.check(name, ratio, "times", Demand::AtLeast(3.0));
}

/// Returns how often per second one of `permits` permits changes hands; 1 is an ordinary lock.
async fn rate(locker: &Locker<AnyBackend>, permits: u32) -> f64 {
    const SLICE: Duration = Duration::from_millis(1500);
    const HELD: Duration = Duration::from_millis(1);
    let started = Instant::now();
    let tasks: Vec<_> = (0..16)
        .map(|_| {
            let locker = locker.clone();
            tokio::spawn(async move {
                let semaphore = locker.semaphore("bench:permits", permits.max(2)).unwrap();
                let mut count = 0_u32;
                while started.elapsed() < SLICE {
                    if permits == 1 {
                        let guard = locker.lock("bench:one").await.unwrap();
                        tokio::time::sleep(HELD).await;
                        guard.release().await.unwrap();
                    } else {
                        let permit = semaphore.acquire().await.unwrap();
                        tokio::time::sleep(HELD).await;
                        permit.release().await.unwrap();
                    }
                    count += 1;
                }
                count
            })
        })
        .collect();
    let mut total = 0;
    for task in tasks {
        total += task.await.unwrap();
    }
    f64::from(total) / started.elapsed().as_secs_f64()
}

/// Measures how long it takes until another locker has a permit of a semaphore of 64 that was full.
async fn large(report: &mut Report, store: &str, url: &str) {
    const COUNT: usize = 9;
    let [holder, waiter] = [locker(url).await, locker(url).await]
        .map(|locker| locker.semaphore("bench:large", 64).unwrap());
    let mut permits = holder.acquire_many(64).await.unwrap();
    let mut times = Vec::new();
    for _ in 0..COUNT {
        let waiting = {
            let waiter = waiter.clone();
            tokio::spawn(async move { (waiter.acquire().await.unwrap(), Instant::now()) })
        };
        // Long enough to subscribe to all slots.
        tokio::time::sleep(Duration::from_millis(700)).await;
        let started = Instant::now();
        permits.remove(0).release().await.unwrap();
        let (got, at) = waiting.await.unwrap();
        times.push(at.duration_since(started).as_secs_f64() * 1e3);
        got.release().await.unwrap();
        permits.push(holder.acquire().await.unwrap());
    }
    let half = percentile(&mut times, 50.0);
    report.info(format!("{store}: hand-over of one of 64 permits, median"), half, "ms");
}

/// Compares taking and releasing eight locks at once with taking and releasing one.
async fn several_locks(report: &mut Report, store: &str, url: &str) {
    const COUNT: usize = 300;
    let locker = locker(url).await;
    let (mut one, mut eight) = (Vec::new(), Vec::new());
    for round in 0..COUNT {
        let started = Instant::now();
        locker.lock(format!("bench:single:{round}")).await.unwrap().release().await.unwrap();
        one.push(started.elapsed().as_secs_f64() * 1e6);
        let keys = (0..8).map(|key| format!("bench:all:{round}:{key}"));
        let started = Instant::now();
        locker.lock_all(keys).await.unwrap().release().await.unwrap();
        eight.push(started.elapsed().as_secs_f64() * 1e6);
    }
    let (one, eight) = (median(one), median(eight));
    report.info(format!("{store}: one lock, taken and released"), one, "µs");
    report.info(format!("{store}: lock_all of 8, taken and released"), eight, "µs");
    let demand = Demand::AtMost(2.0);
    report.check(format!("{store}: lock_all of 8 to one lock"), eight / one, "times", demand);
}
