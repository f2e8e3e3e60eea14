//! Compares the memory backend with the simplest lock table, in one run.
//!
//! `cargo xtask bench memory`

#![allow(clippy::unwrap_used, clippy::cast_precision_loss, reason = "a program, not a library")]

mod support;

use std::collections::HashMap;
use std::hint::black_box;
use std::time::{Duration, Instant};

use support::{Demand, Report, median, percentile};
use syncguard::{Key, LockOptions, Locker, MemoryBackend};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::Mutex;

const ROUNDS: usize = 7;
const CYCLES: usize = 100_000;

fn main() {
    let mut report = Report::default();
    uncontended(&mut report);
    scaling(&mut report);
    fairness(&mut report);
    sizes(&mut report);
    report.finish("memory");
}

fn runtime(threads: usize) -> Runtime {
    Builder::new_multi_thread().worker_threads(threads).enable_all().build().unwrap()
}

fn keys(count: usize) -> Vec<Key> {
    (0..count).map(|i| Key::new(format!("resource:{i:08}")).unwrap()).collect()
}

/// Runs work on a worker thread, as users do; `block_on` would also measure the parking of its
/// thread.
fn on_worker<T: Send + 'static>(
    runtime: &Runtime,
    work: impl Future<Output = T> + Send + 'static,
) -> T {
    runtime.block_on(async { tokio::spawn(work).await.unwrap() })
}

fn uncontended(report: &mut Report) {
    let runtime = runtime(1);
    let (mut limit, mut ours) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        // Both run for about the same time, so that disturbances affect them equally.
        limit.push(on_worker(&runtime, mutex_map_cycles(keys(256), CYCLES * 8)));
        ours.push(on_worker(&runtime, async {
            let locker = Locker::new(MemoryBackend::new()).unwrap();
            locker_cycles(locker, keys(256), CYCLES).await
        }));
    }
    let ratios = limit.iter().zip(&ours).map(|(limit, ours)| ours / limit).collect();
    report.info("uncontended, tokio Mutex<HashMap>", median(limit) * 1e9, "ns/cycle");
    report.info("uncontended, Locker", median(ours) * 1e9, "ns/cycle");
    report.check("uncontended, Locker / Mutex<HashMap>", median(ratios), "x", Demand::AtMost(10.0));
}

/// Returns the seconds per acquire and release on the simplest lock table.
async fn mutex_map_cycles(keys: Vec<Key>, cycles: usize) -> f64 {
    let table = Mutex::new(HashMap::<Key, Instant>::new());
    let started = Instant::now();
    for i in 0..cycles {
        let key = &keys[i % keys.len()];
        {
            let mut table = table.lock().await;
            assert!(!table.contains_key(key));
            table.insert(key.clone(), Instant::now() + Duration::from_secs(30));
        }
        black_box(table.lock().await.remove(key));
    }
    started.elapsed().as_secs_f64() / cycles as f64
}

/// Returns the seconds per acquire and release through a locker.
async fn locker_cycles(locker: Locker<MemoryBackend>, keys: Vec<Key>, cycles: usize) -> f64 {
    let started = Instant::now();
    for i in 0..cycles {
        let guard = locker.lock(&keys[i % keys.len()]).await.unwrap();
        black_box(guard.release().await.unwrap());
    }
    started.elapsed().as_secs_f64() / cycles as f64
}

fn scaling(report: &mut Report) {
    /// Enough that the two threads really run in parallel.
    const CYCLES: usize = 400_000;
    let runtime = runtime(2);
    let run = |tasks: usize| {
        runtime.block_on(async move {
            let locker = Locker::new(MemoryBackend::new()).unwrap();
            let started = Instant::now();
            let keys = keys(256 * tasks);
            let tasks: Vec<_> = keys
                .chunks(256)
                .map(|own| tokio::spawn(locker_cycles(locker.clone(), own.to_vec(), CYCLES)))
                .collect();
            let count = tasks.len();
            for task in tasks {
                task.await.unwrap();
            }
            (count * CYCLES) as f64 / started.elapsed().as_secs_f64()
        })
    };
    let (mut ratios, mut ceilings) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let one = run(1);
        ratios.push(run(2) / one);
        ceilings.push(arithmetic_scaling());
    }
    let ratio = median(ratios);
    report.info("two threads of pure arithmetic / one", median(ceilings), "x");
    report.check("two threads on distinct keys / one", ratio, "x", Demand::AtLeast(1.5));
}

/// Returns the speedup of two threads that share nothing, on this machine at this moment.
fn arithmetic_scaling() -> f64 {
    let spin = || (0..100_000_000_u64).fold(1_u64, |x, i| black_box(x.wrapping_mul(31) ^ i));
    let started = Instant::now();
    black_box(spin());
    let one = started.elapsed();
    let started = Instant::now();
    let other = std::thread::spawn(spin);
    black_box(spin());
    black_box(other.join().unwrap());
    2.0 * one.as_secs_f64() / started.elapsed().as_secs_f64()
}

fn fairness(report: &mut Report) {
    const TASKS: usize = 16;
    const RUN: Duration = Duration::from_secs(3);
    let runtime = runtime(2);
    let waits: Vec<Vec<f64>> = runtime.block_on(async {
        let options = LockOptions::default().wait_forever();
        let backend = MemoryBackend::new();
        let locker = Locker::builder(backend).options(options).build().unwrap();
        let key = Key::new("hot").unwrap();
        let end = Instant::now() + RUN;
        let tasks: Vec<_> = (0..TASKS)
            .map(|_| {
                let (locker, key) = (locker.clone(), key.clone());
                tokio::spawn(async move {
                    let mut waits = Vec::new();
                    while Instant::now() < end {
                        let asked = Instant::now();
                        let guard = locker.lock(&key).await.unwrap();
                        waits.push(asked.elapsed().as_secs_f64());
                        black_box(guard.release().await.unwrap());
                    }
                    waits
                })
            })
            .collect();
        let mut all = Vec::new();
        for task in tasks {
            all.push(task.await.unwrap());
        }
        all
    });
    let total: usize = waits.iter().map(Vec::len).sum();
    let average = total as f64 / TASKS as f64;
    let share = |count: usize| count as f64 / average;
    let shares: Vec<f64> = waits.iter().map(|waits| share(waits.len())).collect();
    let least = shares.iter().copied().fold(f64::INFINITY, f64::min);
    let most = shares.iter().copied().fold(0.0, f64::max);
    let mut all: Vec<f64> = waits.into_iter().flatten().collect();
    let (middle, tail) = (percentile(&mut all, 50.0), percentile(&mut all, 99.9));
    report.info("16 tasks on one key", total as f64 / RUN.as_secs_f64(), "locks/s");
    report.check("16 tasks, least share / average", least, "x", Demand::AtLeast(0.5));
    report.check("16 tasks, largest share / average", most, "x", Demand::AtMost(2.0));
    report.info("16 tasks, median wait", middle * 1e6, "us");
    report.check("16 tasks, p99.9 wait / median", tail / middle, "x", Demand::AtMost(50.0));
}

/// Measures the memory per held guard and per parked `lock()`, as the growth of the resident set.
fn sizes(report: &mut Report) {
    const COUNT: usize = 20_000;
    let runtime = runtime(1);
    let (held, parked) = runtime.block_on(async {
        let backend = MemoryBackend::new();
        let keys = keys(COUNT);
        let warm_up = Locker::new(backend.clone()).unwrap();
        for key in &keys {
            // The backend's entry for a key is not part of the guard, so create it first.
            warm_up.try_lock(key).await.unwrap().unwrap().release().await.unwrap();
        }
        let locker = Locker::new(backend).unwrap();
        let mut guards = Vec::with_capacity(COUNT);
        let before = resident_bytes();
        for key in &keys {
            guards.push(locker.try_lock(key).await.unwrap().unwrap());
        }
        let held = (resident_bytes() - before) / COUNT as f64;

        let mut waiters = Vec::with_capacity(COUNT);
        let before = resident_bytes();
        for _ in 0..COUNT {
            // Box the future and poll it once by hand, to measure it without a task around it.
            let mut waiter = Box::pin(locker.lock(&keys[0]));
            std::future::poll_fn(|context| {
                assert!(waiter.as_mut().poll(context).is_pending());
                std::task::Poll::Ready(())
            })
            .await;
            waiters.push(waiter);
        }
        let parked = (resident_bytes() - before) / COUNT as f64;
        drop(waiters);
        drop(guards);
        (held, parked)
    });
    report.check("a held guard", held, "bytes", Demand::AtMost(1024.0));
    report.check("a parked lock() future", parked, "bytes", Demand::AtMost(1024.0));
}

fn resident_bytes() -> f64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: f64 = statm.split(' ').nth(1).unwrap().parse().unwrap();
    pages * 4096.0
}
