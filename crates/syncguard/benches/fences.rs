//! What fence counters cost in the store: a million keys that are locked once each, with counters
//! that stay, and with counters from the clock, which go away.

#![allow(clippy::unwrap_used, clippy::cast_precision_loss, reason = "a program, not a library")]

#[allow(dead_code, reason = "this benchmark uses a part of it")]
mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use redis::aio::MultiplexedConnection;
use support::{Demand, Report};
use syncguard::backend::{AcquireOutcome, AcquireRequest, Hint, ReleaseRequest};
use syncguard::postgres::PostgresConfig;
use syncguard::redis::RedisConfig;
use syncguard::{FenceSource, Key, LockBackend, PostgresBackend, RedisBackend, Ttl};
use test_support::{PostgresOptions, PostgresServer, RedisOptions, RedisServer};

const KEYS: u64 = 1_000_000;

fn main() {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let mut report = Report::default();
    runtime.block_on(on_redis(&mut report));
    runtime.block_on(on_postgres(&mut report));
    report.finish("fences");
}

/// A key as programs use them: `order:` and a UUID.
fn uuid_key(number: u64) -> Key {
    let mix = |seed: u64| {
        let mut z = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(0x1234_5678);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z ^ (z >> 27)
    };
    let (high, low) = (mix(number), mix(number ^ u64::MAX));
    let uuid = format!("{high:016x}{low:016x}");
    let parts = [&uuid[..8], &uuid[8..12], &uuid[12..16], &uuid[16..20], &uuid[20..]];
    Key::new(format!("order:{}", parts.join("-"))).unwrap()
}

/// Locks and releases every key once.
async fn lock_all(backend: &RedisBackend) {
    const TASKS: u64 = 128;
    let next = Arc::new(AtomicU64::new(0));
    let tasks = (0..TASKS).map(|_| {
        let (backend, next) = (backend.clone(), Arc::clone(&next));
        tokio::spawn(async move {
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= KEYS {
                    return;
                }
                let key = uuid_key(number);
                let request = AcquireRequest::new(key.clone(), Ttl::DEFAULT).unwrap();
                let outcome = backend.acquire(&request).await.unwrap();
                assert!(matches!(outcome, AcquireOutcome::Acquired(_)));
                let release = ReleaseRequest::new(request.lock_id()).with_hint(Hint::key(key));
                backend.release(&release).await.unwrap();
            }
        })
    });
    for task in tasks.collect::<Vec<_>>() {
        task.await.unwrap();
    }
}

async fn used_memory(raw: &mut MultiplexedConnection) -> f64 {
    let info: String = redis::cmd("INFO").arg("memory").query_async(raw).await.unwrap();
    let used = info.lines().find_map(|line| line.strip_prefix("used_memory:")).unwrap();
    used.trim().parse().unwrap()
}

async fn keys(raw: &mut MultiplexedConnection) -> u64 {
    redis::cmd("DBSIZE").query_async(raw).await.unwrap()
}

/// Deletes everything, and waits until the server has shrunk its tables.
async fn flush(raw: &mut MultiplexedConnection) {
    redis::cmd("FLUSHALL").query_async::<()>(raw).await.unwrap();
    tokio::time::sleep(Duration::from_secs(2)).await;
}

async fn on_redis(report: &mut Report) {
    let Some(server) = RedisServer::start(&RedisOptions::default()) else { return };
    let client = redis::Client::open(server.url()).unwrap();
    let mut raw = client.get_multiplexed_async_connection().await.unwrap();
    let config =
        RedisConfig::from_url(&server.url()).unwrap().response_timeout(Duration::from_secs(30));
    let counting = RedisBackend::connect(config.clone()).await.unwrap();
    let timed = RedisBackend::connect(config.fences(FenceSource::Clock)).await.unwrap();

    let started = Instant::now();
    flush(&mut raw).await;
    let empty = used_memory(&mut raw).await;
    lock_all(&counting).await;
    assert_eq!(keys(&mut raw).await, KEYS, "one counter per key");
    let counted = used_memory(&mut raw).await;
    let per_key = (counted - empty) / KEYS as f64;
    report.info("redis, fences=counter: stays for good, per key", per_key, "bytes");

    flush(&mut raw).await;
    let empty = used_memory(&mut raw).await;
    lock_all(&timed).await;
    assert_eq!(keys(&mut raw).await, KEYS, "one counter per key");
    let full = used_memory(&mut raw).await;
    let per_key = (full - empty) / KEYS as f64;
    report.info(
        "redis, fences=clock: until a week after the last grant, per key",
        per_key,
        "bytes",
    );

    // A week passes: every counter has an expiry of a week, which is shortened to now.
    let week_passes = "local page = redis.call('SCAN', ARGV[1], 'COUNT', 10000)
        for _, name in ipairs(page[2]) do
          assert(redis.call('PTTL', name) > 6.9 * 86400000, 'a week')
          redis.call('PEXPIRE', name, 1000)
        end
        return page[1]";
    let mut cursor = "0".to_owned();
    loop {
        let mut page = redis::cmd("EVAL");
        page.arg(week_passes).arg(0).arg(&cursor);
        cursor = page.query_async(&mut raw).await.unwrap();
        if cursor == "0" {
            break;
        }
    }
    let expired = Instant::now();
    while keys(&mut raw).await > 0 && expired.elapsed() < Duration::from_mins(1) {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(keys(&mut raw).await, 0, "all counters are gone");
    let after = used_memory(&mut raw).await;
    report.info("redis, empty server", empty / 1e6, "MB");
    report.info("redis, fences=clock: after the last grant", full / 1e6, "MB");
    report.info("redis, fences=clock: after the expiry", after / 1e6, "MB");
    report.check("redis, after the expiry / empty server", after / empty, "", Demand::AtMost(1.1));
    report.info("redis, duration of this benchmark", started.elapsed().as_secs_f64(), "s");
}

async fn on_postgres(report: &mut Report) {
    let options = PostgresOptions::default().with(["fsync = off", "autovacuum = off"]);
    let Some(server) = PostgresServer::start(&options) else { return };
    let config = PostgresConfig::from_url(&server.url()).unwrap();
    let config = config.fences(FenceSource::Clock).response_timeout(Duration::from_mins(1));
    let backend = PostgresBackend::connect(config).await.unwrap();
    backend.setup_schema().await.unwrap();
    let size = || -> f64 {
        let size = "SELECT pg_total_relation_size('syncguard_fence_counters')";
        server.sql(size).parse().unwrap()
    };
    let empty = size();
    // What as many grants leave behind, eight days ago.
    let made = server.sql(&format!(
        "INSERT INTO syncguard_fence_counters (fence_key, fence, key_debug)
         SELECT 'fence:order:' || id, (extract(epoch FROM now()) - 8 * 86400)::bigint * 10000, \
         'order:' || id
         FROM (SELECT gen_random_uuid() AS id FROM generate_series(1, {KEYS})) AS ids"
    ));
    assert!(made.contains("INSERT"));
    report.info(
        "postgres, stays until it is collected, per key",
        (size() - empty) / KEYS as f64,
        "bytes",
    );
    let started = Instant::now();
    let deleted = backend.admin().unwrap().collect_fences(Duration::from_hours(7 * 24)).await;
    assert_eq!(deleted.unwrap(), KEYS);
    let took = started.elapsed().as_secs_f64();
    report.info("postgres, counters collected per second", KEYS as f64 / took, "1/s");
    assert!(server.sql("VACUUM syncguard_fence_counters").contains("VACUUM"));
    let after = (size() - empty) / KEYS as f64;
    report.info("postgres, after collection and VACUUM, per key", after, "bytes");
}
