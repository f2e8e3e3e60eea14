//! Compares syncguard with other lock libraries on the same server, in one run. What each of them
//! does not do stands beside its name.
//!
//! `cargo xtask bench rivals`

#[path = "../../syncguard/benches/contention/mod.rs"]
mod contention;
#[path = "../../syncguard/benches/support/mod.rs"]
mod support;

use std::sync::Arc;
use std::time::{Duration, Instant};

use distributed_lock_core::{DistributedLock, LockHandle, LockProvider};
use distributed_lock_postgres::PostgresLockProvider;
use distributed_lock_redis::RedisLockProvider;
use support::{Demand, Report, median};
use syncguard::{AnyBackend, Locker};
use test_support::{PostgresOptions, PostgresServer, RedisOptions, RedisServer};

const ROUNDS: usize = 5;
const SLICE: Duration = Duration::from_millis(700);
const CONTENTION: Duration = Duration::from_secs(3);
const TTL: Duration = Duration::from_secs(30);

fn main() {
    let mut report = Report::default();
    let runtime = contention::runtime();
    if let Some(server) = RedisServer::start(&RedisOptions::default()) {
        runtime.block_on(on_redis(&mut report, &server.url()));
    }
    if let Some(server) = PostgresServer::start(&PostgresOptions::default()) {
        runtime.block_on(on_postgres(&mut report, &server.url()));
    }
    report.finish("rivals");
}

/// A library, ready to acquire and release a lock by its key.
#[derive(Clone)]
enum Library {
    Ours(Locker<AnyBackend>),
    Rslock(rslock::LockManager),
    AsyncRedisLock(async_redis_lock::Locker),
    DistributedRedis(Arc<RedisLockProvider>),
    DistributedPostgres(Arc<PostgresLockProvider>),
}

impl Library {
    fn name(&self) -> &'static str {
        match self {
            Self::Ours(_) => "syncguard",
            Self::Rslock(_) => "rslock (no fence or notification)",
            Self::AsyncRedisLock(_) => "async-redis-lock (no fence or notification)",
            Self::DistributedRedis(_) => "distributed-lock-redis (no fence or notification)",
            Self::DistributedPostgres(_) => "distributed-lock-postgres (no fence or TTL)",
        }
    }

    /// Acquires and releases a lock. A library that gives up waits no longer than ours would.
    async fn cycle(&self, key: String) {
        match self {
            Self::Ours(locker) => {
                let guard = locker.lock(key).await.expect("acquired");
                guard.release().await.expect("released");
            }
            Self::Rslock(manager) => loop {
                if let Ok(lock) = manager.lock(key.as_bytes(), TTL).await {
                    return manager.unlock(&lock).await;
                }
            },
            Self::AsyncRedisLock(locker) => {
                let options = async_redis_lock::options::Options::new().ttl(TTL);
                let lock = locker.acquire_with_options(&options.timeout(None), key.as_str()).await;
                lock.expect("acquired").release().await.expect("released");
            }
            Self::DistributedRedis(provider) => repeat(&**provider, &key).await,
            Self::DistributedPostgres(provider) => repeat(&**provider, &key).await,
        }
    }

    /// Measures cycles per second of tasks that use distinct keys.
    async fn distinct(&self, tasks: usize) -> f64 {
        contention::cycles(tasks, SLICE, |_task| {
            let library = self.clone();
            move |key: String| {
                let library = library.clone();
                async move { library.cycle(key).await }
            }
        })
        .await
    }

    /// Measures cycles per second of tasks that use one key, and the longest cycle in ms.
    async fn contended(&self, tasks: usize) -> (f64, f64) {
        let started = Instant::now();
        let working: Vec<_> = (0..tasks)
            .map(|_| {
                let library = self.clone();
                tokio::spawn(async move {
                    let (mut count, mut longest) = (0_u32, Duration::ZERO);
                    while started.elapsed() < CONTENTION {
                        let begun = Instant::now();
                        library.cycle("one".to_owned()).await;
                        (count, longest) = (count + 1, longest.max(begun.elapsed()));
                    }
                    (count, longest)
                })
            })
            .collect();
        let (mut count, mut longest) = (0.0, Duration::ZERO);
        for task in working {
            let (counted, waited) = task.await.expect("no panic");
            (count, longest) = (count + f64::from(counted), longest.max(waited));
        }
        (count / started.elapsed().as_secs_f64(), longest.as_secs_f64() * 1e3)
    }
}

async fn repeat<P: LockProvider>(provider: &P, key: &str) {
    let lock = provider.create_lock(key);
    loop {
        if let Ok(handle) = lock.acquire(Some(TTL)).await {
            return handle.release().await.expect("released");
        }
    }
}

/// Measures libraries in turn, ours first. `demands` are what ours must reach of the next one, per
/// number of tasks.
async fn compare(report: &mut Report, libraries: &[Library], demands: &[(usize, Option<Demand>)]) {
    for (tasks, demand) in demands {
        let mut figures: Vec<Vec<f64>> = libraries.iter().map(|_| Vec::new()).collect();
        for _ in 0..ROUNDS {
            for (library, figures) in libraries.iter().zip(&mut figures) {
                figures.push(library.distinct(*tasks).await);
            }
        }
        for (library, rates) in libraries.iter().zip(&figures) {
            let name = format!("{tasks} tasks, distinct keys, {}", library.name());
            report.info(name, median(rates.clone()), "cycles/s");
        }
        for (library, rates) in libraries.iter().zip(&figures).skip(1) {
            let ratios = figures[0].iter().zip(rates).map(|(ours, theirs)| ours / theirs);
            let name = format!("{tasks} tasks, distinct keys, ours / {}", library.name());
            match demand {
                Some(demand) if matches!(library, Library::Rslock(_)) => {
                    report.check(name, median(ratios.collect()), "x", *demand);
                }
                _ => report.info(name, median(ratios.collect()), "x"),
            }
        }
    }
    for library in libraries {
        let (rate, longest) = library.contended(16).await;
        report.info(format!("16 tasks, one key, {}", library.name()), rate, "cycles/s");
        report.info(format!("16 tasks, one key, longest, {}", library.name()), longest, "ms");
    }
}

async fn on_redis(report: &mut Report, url: &str) {
    report.section("Redis");
    let libraries = [
        Library::Ours(contention::locker(url).await),
        Library::Rslock(rslock::LockManager::new(vec![url])),
        Library::AsyncRedisLock(
            async_redis_lock::Locker::from_redis_url(url).await.expect("connects"),
        ),
        Library::DistributedRedis(Arc::new(RedisLockProvider::new(url).await.expect("connects"))),
    ];
    let demands = [(16, None), (64, Some(Demand::AtLeast(0.7)))];
    compare(report, &libraries, &demands).await;
}

async fn on_postgres(report: &mut Report, url: &str) {
    report.section("PostgreSQL");
    let ours = contention::locker(url).await;
    ours.setup().await.expect("creates tables");
    let theirs = PostgresLockProvider::new(url).await.expect("connects");
    let libraries = [Library::Ours(ours), Library::DistributedPostgres(Arc::new(theirs))];
    compare(report, &libraries, &[(1, None), (16, None)]).await;
}
