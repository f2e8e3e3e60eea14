//! Real losses of fence counters, each with both sources of fences: fences of a counter go
//! backwards, fences from the clock do not.
#![cfg(all(feature = "redis", feature = "postgres", feature = "sqlite"))]

mod servers;

use std::io::Write as _;
use std::process::{Command, Stdio};
use std::time::Duration;

use servers::{cycle, eventually, key};
use syncguard::backend::Fenced;
use syncguard::postgres::PostgresConfig;
use syncguard::redis::RedisConfig;
use syncguard::sqlite::SqliteConfig;
use syncguard::{FenceSource, LockBackend, PostgresBackend, RedisBackend, SqliteBackend};
use test_support::{PostgresOptions, PostgresServer, RedisOptions, RedisServer, TempDir};

/// A backend for each source of fences, on the same store.
struct Both<B> {
    counter: B,
    clock: B,
}

impl<B: LockBackend<Fencing = Fenced>> Both<B> {
    /// Grants each of the two keys a few times, and returns the last fences.
    async fn grant(&self, times: u32) -> [u64; 2] {
        let mut last = [0, 0];
        for _ in 0..times {
            for (place, backend) in [&self.counter, &self.clock].into_iter().enumerate() {
                let fence = cycle(backend, ["counted", "timed"][place]).await.expect("works");
                assert!(fence > last[place], "fences grow while the counter exists");
                last[place] = fence;
            }
        }
        last
    }

    /// Checks the fences after a loss.
    async fn check_after_loss(&self, [counted, timed]: [u64; 2]) {
        let [counted_again, timed_again] = self.grant(1).await;
        assert!(counted_again <= counted, "the loss is real: {counted_again} after {counted}");
        assert!(timed_again > timed, "{timed_again} after {timed}");
    }
}

async fn redis(url: &str) -> Both<RedisBackend> {
    let config = RedisConfig::from_url(url).expect("a URL");
    Both {
        counter: RedisBackend::connect(config.clone()).await.expect("connects"),
        clock: RedisBackend::connect(config.fences(FenceSource::Clock)).await.expect("connects"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn fences_from_the_clock_survive_a_redis_killed_without_aof() {
    let Some(mut server) = RedisServer::start(&RedisOptions::default()) else { return };
    let both = redis(&server.url()).await;
    let before = both.grant(5).await;
    server.crash_and_restart();
    for backend in [&both.counter, &both.clock] {
        eventually("the backend is back", async || backend.is_locked(&key("k")).await.is_ok())
            .await;
    }
    both.check_after_loss(before).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn fences_from_the_clock_survive_a_flush_of_redis() {
    let Some(server) = RedisServer::start(&RedisOptions::default().with_aof()) else { return };
    let both = redis(&server.url()).await;
    let before = both.grant(5).await;
    assert!(server.cli(&["FLUSHALL"]).contains("OK"));
    both.check_after_loss(before).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn fences_from_the_clock_survive_an_eviction_by_redis() {
    let options = RedisOptions::default().with_aof().with([
        "--maxmemory",
        "4mb",
        "--maxmemory-policy",
        "allkeys-lru",
    ]);
    let Some(server) = RedisServer::start(&options) else { return };
    let both = redis(&server.url()).await;
    let before = both.grant(5).await;
    let client = redis::Client::open(server.url()).expect("a URL");
    let mut raw = client.get_multiplexed_async_connection().await.expect("connects");
    let counters = ["syncguard:fence:syncguard:counted", "syncguard:fence:syncguard:timed"];
    let mut number = 0_u32;
    loop {
        let mut load = redis::pipe();
        for _ in 0..200 {
            number += 1;
            load.set(format!("page:{number}"), "x".repeat(2000)).ignore();
        }
        load.query_async::<()>(&mut raw).await.expect("works");
        let left: u32 =
            redis::cmd("EXISTS").arg(&counters).query_async(&mut raw).await.expect("works");
        if left == 0 {
            break;
        }
        assert!(number < 200_000, "the counters are not evicted");
    }
    both.check_after_loss(before).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn fences_from_the_clock_survive_a_failover_to_a_replica_that_was_cut_off() {
    let Some(primary) = RedisServer::start(&RedisOptions::default().with_aof()) else { return };
    let replica = primary.start_replica();
    let on_primary = redis(&primary.url()).await;
    on_primary.grant(1).await;
    let synced = || replica.cli(&["GET", "syncguard:fence:syncguard:counted"]).contains('1');
    eventually("the first fence is replicated", async || synced()).await;
    assert!(replica.cli(&["REPLICAOF", "NO", "ONE"]).contains("OK"));
    let before = on_primary.grant(5).await;
    drop(primary);
    redis(&replica.url()).await.check_after_loss(before).await;
}

/// Runs a program of PostgreSQL with an input, and returns its output.
fn run(server: &PostgresServer, program: &str, arguments: &[&str], input: &str) -> String {
    let mut child = Command::new(server.programs().join(program))
        .args(arguments)
        .arg(server.url())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("starts");
    let mut stdin = child.stdin.take().expect("piped");
    stdin.write_all(input.as_bytes()).expect("written");
    drop(stdin);
    let output = child.wait_with_output().expect("ends");
    assert!(output.status.success(), "{program} failed");
    String::from_utf8(output.stdout).expect("UTF-8")
}

#[tokio::test(flavor = "multi_thread")]
async fn fences_from_the_clock_survive_an_older_dump_of_postgres() {
    let Some(server) = PostgresServer::start(&PostgresOptions::default()) else { return };
    let config = PostgresConfig::from_url(&server.url()).expect("a URL").pool_size(2);
    let counter = PostgresBackend::connect(config.clone()).await.expect("connects");
    counter.setup_schema().await.expect("works");
    let clock = config.fences(FenceSource::Clock);
    let clock = PostgresBackend::connect(clock).await.expect("connects");
    let both = Both { counter, clock };
    both.grant(1).await;
    let dump = run(&server, "pg_dump", &["--data-only", "--table", "syncguard_*"], "");
    let before = both.grant(5).await;
    let empty = "TRUNCATE syncguard_locks, syncguard_fence_counters;\n";
    run(&server, "psql", &["-X", "-q", "-v", "ON_ERROR_STOP=1"], &format!("{empty}{dump}"));
    both.check_after_loss(before).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn fences_from_the_clock_survive_a_deleted_sqlite_file() {
    let folder = TempDir::new();
    let path = folder.path().join("locks.db");
    let config = SqliteConfig::new(&path);
    let both = Both {
        counter: SqliteBackend::open(config.clone()).await.expect("opens"),
        clock: SqliteBackend::open(config.fences(FenceSource::Clock)).await.expect("opens"),
    };
    let before = both.grant(5).await;
    for suffix in ["", "-wal", "-shm"] {
        let mut file = path.clone().into_os_string();
        file.push(suffix);
        drop(std::fs::remove_file(file));
    }
    assert!(!path.exists());
    both.check_after_loss(before).await;
}

/// The counter expires a week after its last grant; a backend that counts keeps it for good.
#[tokio::test(flavor = "multi_thread")]
async fn redis_counters_from_the_clock_expire_and_others_do_not() {
    const COUNTER: &str = "syncguard:fence:syncguard:k";
    const DAY_MS: i64 = 86_400_000;
    let Some(server) = RedisServer::start(&RedisOptions::default()) else { return };
    let both = redis(&server.url()).await;
    let left_ms = || server.cli(&["PTTL", COUNTER]).trim().parse::<i64>().expect("a number");
    cycle(&both.counter, "k").await.expect("works");
    assert_eq!(left_ms(), -1, "a counter is kept");
    cycle(&both.clock, "k").await.expect("works");
    assert!((7 * DAY_MS - 60_000..=7 * DAY_MS).contains(&left_ms()), "{}", left_ms());
    assert!(server.cli(&["PEXPIRE", COUNTER, "60000"]).contains('1'));
    cycle(&both.clock, "k").await.expect("works");
    assert!(left_ms() > 6 * DAY_MS, "every grant starts the time again");
    cycle(&both.counter, "k").await.expect("works");
    assert_eq!(left_ms(), -1, "a program that counts must not lose the counter");
    let config = RedisConfig::from_url(&format!(
        "{}?fences=clock&fence_expiry_ms={}",
        server.url(),
        3 * DAY_MS
    ));
    let three_days = RedisBackend::connect(config.expect("a URL")).await.expect("connects");
    cycle(&three_days, "k").await.expect("works");
    assert!((2 * DAY_MS..=3 * DAY_MS).contains(&left_ms()), "{}", left_ms());
}

#[tokio::test]
async fn an_expiry_without_a_clock_or_below_two_days_is_refused_before_connecting() {
    let day = Duration::from_hours(24);
    let config = || RedisConfig::from_url("redis://127.0.0.1:1").expect("a URL");
    let refused = [
        config().fence_expiry(7 * day),
        config().fences(FenceSource::Clock).fence_expiry(Duration::from_secs(2 * 86_400 - 1)),
        config().fences(FenceSource::Clock).fence_expiry(Duration::ZERO),
        config().fences(FenceSource::Clock).fence_expiry(Duration::MAX),
    ];
    for config in refused {
        let error = RedisBackend::connect(config).await.expect_err("refused");
        assert_eq!(error.code(), syncguard::ErrorCode::InvalidArgument, "{error}");
    }
    assert!(RedisConfig::from_url("redis://h?fences=wall").is_err());
    let known = config().fences(FenceSource::Clock).fence_expiry(2 * day);
    let error = RedisBackend::connect(known).await.expect_err("no server");
    assert_eq!(error.code(), syncguard::ErrorCode::ServiceUnavailable, "{error}");
}
