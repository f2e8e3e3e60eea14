//! Deletion of idle fence counters, on every store.
#![cfg(all(
    feature = "redis",
    feature = "postgres",
    feature = "sqlite",
    feature = "firestore",
    feature = "conformance"
))]

mod firestore_raw;
mod servers;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use firestore_raw::{Raw, fields, string};
use servers::{cycle, key};
use syncguard::backend::Fenced;
use syncguard::conformance::{Fixture, MemoryFixture};
use syncguard::firestore::FirestoreConfig;
use syncguard::postgres::PostgresConfig;
use syncguard::redis::RedisConfig;
use syncguard::sqlite::SqliteConfig;
use syncguard::{
    ErrorCode, FenceSource, FirestoreBackend, Key, LockBackend, PostgresBackend, RedisBackend,
    SqliteBackend,
};
use test_support::{
    FirestoreEmulator, PostgresOptions, PostgresServer, RedisOptions, RedisServer, TempDir,
};

const DAY: Duration = Duration::from_hours(24);

/// More than two batches of any backend.
const IDLE: u32 = 1_203;

/// Returns the fence of a grant that was some time ago.
fn fence_of(ago: Duration) -> u64 {
    let since_epoch = SystemTime::UNIX_EPOCH.elapsed().expect("after 1970");
    u64::try_from(since_epoch.saturating_sub(ago).as_millis()).expect("this century") * 10
}

/// Counters that are old enough are deleted, others are not; a backend that only counts refuses.
async fn check<B>(
    counting: &B,
    timed: &B,
    set: impl AsyncFn(Vec<(Key, u64)>),
    has: impl AsyncFn(&Key) -> bool,
) where
    B: LockBackend<Fencing = Fenced>,
{
    let old = |number: u32| key(&format!("old:{number:05}"));
    let mut counters: Vec<_> =
        (0..IDLE).map(|number| (old(number), fence_of(8 * DAY) - u64::from(number))).collect();
    counters.push((key("counted"), 57));
    counters.push((key("edge"), fence_of(Duration::from_mins(7 * 24 * 60 - 5))));
    set(counters).await;
    let used = cycle(timed, "used").await.expect("works");
    let again = cycle(timed, &format!("old:{:05}", 7)).await.expect("works");

    let (admin, week) = (timed.admin().expect("an admin"), 7 * DAY);
    for (admin, idle) in [
        (counting.admin().expect("an admin"), week),
        (timed.admin().expect("an admin"), Duration::from_secs(2 * 86_400 - 1)),
        (timed.admin().expect("an admin"), Duration::MAX),
    ] {
        let error = admin.collect_fences(idle).await.expect_err("refused");
        assert_eq!(error.code(), ErrorCode::InvalidArgument, "{error}");
        assert!(has(&old(0)).await, "nothing is deleted");
    }

    // All idle ones but the one that was used again, and the one from before the clock was used.
    assert_eq!(admin.collect_fences(week).await.expect("works"), u64::from(IDLE));
    assert!(!has(&old(0)).await && !has(&old(IDLE - 1)).await && !has(&key("counted")).await);
    assert!(has(&old(7)).await && has(&key("edge")).await && has(&key("used")).await);
    assert_eq!(admin.collect_fences(week).await.expect("works"), 0);

    // What replaces a deleted counter starts above it.
    assert!(cycle(timed, "old:00000").await.expect("works") > fence_of(8 * DAY));
    assert!(cycle(timed, "used").await.expect("works") > used);
    assert!(cycle(timed, "old:00007").await.expect("works") > again);
}

/// Grants go on while counters are collected, and fences grow.
async fn check_under_load<B>(timed: B)
where
    B: LockBackend<Fencing = Fenced> + Clone,
{
    let stop = Arc::new(AtomicBool::new(false));
    let granting = tokio::spawn({
        let (stop, backend) = (Arc::clone(&stop), timed.clone());
        async move {
            let (mut last, mut grants) = ([0; 8], 0_u32);
            while !stop.load(Ordering::Relaxed) || grants < 100 {
                for (number, last) in last.iter_mut().enumerate() {
                    let fence = cycle(&backend, &format!("hot:{number}")).await.expect("works");
                    assert!(fence > *last, "{fence} after {last}");
                    *last = fence;
                    grants += 1;
                }
            }
        }
    });
    let admin = timed.admin().expect("an admin");
    for _ in 0..20 {
        admin.collect_fences(2 * DAY).await.expect("works");
    }
    stop.store(true, Ordering::Relaxed);
    granting.await.expect("no panic");
}

#[tokio::test(flavor = "multi_thread")]
async fn memory_deletes_only_idle_counters() {
    let fixture = MemoryFixture::new();
    fixture.clock().set(SystemTime::now().into());
    let timed = fixture.backend_with_clock_fences().await.expect("supported");
    let set = async |counters: Vec<(Key, u64)>| {
        for (key, counter) in counters {
            fixture.set_fence_counter(&key, counter).await;
        }
    };
    let has = async |key: &Key| fixture.fence_counter(key).await > 0;
    check(&fixture.backend().await, &timed, set, has).await;
    check_under_load(timed).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn sqlite_deletes_only_idle_counters() {
    let folder = TempDir::new();
    let config = SqliteConfig::new(folder.path().join("locks.db"));
    let counting = SqliteBackend::open(config.clone()).await.expect("opens");
    let timed = config.clone().fences(FenceSource::Clock);
    let timed = SqliteBackend::open(timed).await.expect("opens");
    let open = || {
        let raw = rusqlite::Connection::open(config.path()).expect("opens");
        raw.busy_timeout(Duration::from_secs(5)).expect("works");
        raw
    };
    let set = async |counters: Vec<(Key, u64)>| {
        let mut raw = open();
        let transaction = raw.transaction().expect("works");
        for (key, counter) in counters {
            let insert = "INSERT INTO syncguard_fences VALUES (?1, ?2)";
            let counter = i64::try_from(counter).expect("small");
            transaction.execute(insert, rusqlite::params![key.as_str(), counter]).expect("works");
        }
        transaction.commit().expect("works");
    };
    let has = async |key: &Key| {
        let query = "SELECT count(*) FROM syncguard_fences WHERE key = ?1";
        open().query_row(query, [key.as_str()], |row| row.get::<_, bool>(0)).expect("works")
    };
    check(&counting, &timed, set, has).await;
    check_under_load(timed).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn postgres_deletes_only_idle_counters() {
    let options = PostgresOptions::default().with(["fsync = off"]);
    let Some(server) = PostgresServer::start(&options) else { return };
    let config = PostgresConfig::from_url(&server.url()).expect("a URL").pool_size(4);
    let counting = PostgresBackend::connect(config.clone()).await.expect("connects");
    counting.setup_schema().await.expect("works");
    let timed = config.fences(FenceSource::Clock);
    let timed = PostgresBackend::connect(timed).await.expect("connects");
    let set = async |counters: Vec<(Key, u64)>| {
        let rows: Vec<_> = counters
            .iter()
            .map(|(key, counter)| format!("('fence:{}', {counter})", key.as_str()))
            .collect();
        let insert = "INSERT INTO syncguard_fence_counters (fence_key, fence) VALUES";
        assert!(server.sql(&format!("{insert} {}", rows.join(", "))).contains("INSERT"));
    };
    let has = async |key: &Key| {
        let count = "SELECT count(*) FROM syncguard_fence_counters WHERE fence_key =";
        server.sql(&format!("{count} 'fence:{}'", key.as_str())) == "1"
    };
    check(&counting, &timed, set, has).await;
    // A counter in use is skipped, and the collection does not wait for it.
    let old = fence_of(9 * DAY);
    let busy = "INSERT INTO syncguard_fence_counters (fence_key, fence) VALUES ('fence:busy',";
    assert!(server.sql(&format!("{busy} {old})")).contains("INSERT"));
    let (mut raw, connection) =
        tokio_postgres::connect(&server.url(), tokio_postgres::NoTls).await.expect("connects");
    tokio::spawn(connection);
    let holding = raw.transaction().await.expect("begins");
    let lock = "SELECT FROM syncguard_fence_counters WHERE fence_key = 'fence:busy' FOR UPDATE";
    holding.execute(lock, &[]).await.expect("locked");
    let admin = timed.admin().expect("an admin");
    assert_eq!(admin.collect_fences(7 * DAY).await.expect("does not wait"), 0);
    drop(holding);
    check_under_load(timed).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn redis_deletes_only_idle_counters() {
    let Some(server) = RedisServer::start(&RedisOptions::default()) else { return };
    let config = RedisConfig::from_url(&server.url()).expect("a URL");
    let counting = RedisBackend::connect(config.clone()).await.expect("connects");
    let timed = config.clone().fences(FenceSource::Clock);
    let timed = RedisBackend::connect(timed).await.expect("connects");
    let client = redis::Client::open(server.url()).expect("a URL");
    let raw = client.get_multiplexed_async_connection().await.expect("connects");
    let name = |key: &Key| format!("syncguard:fence:syncguard:{}", key.as_str());
    let set = async |counters: Vec<(Key, u64)>| {
        let mut pipe = redis::pipe();
        for (key, counter) in counters {
            pipe.set(name(&key), counter).ignore();
        }
        // Data of others, which must stay.
        pipe.set("syncguard:fence:syncguard:other", "data").ignore();
        pipe.set("syncguard:visits", 5).ignore();
        pipe.query_async::<()>(&mut raw.clone()).await.expect("works");
    };
    let has = async |key: &Key| {
        let exists: u32 =
            redis::cmd("EXISTS").arg(name(key)).query_async(&mut raw.clone()).await.expect("works");
        exists == 1
    };
    check(&counting, &timed, set, has).await;
    assert!(server.cli(&["GET", "syncguard:fence:syncguard:other"]).contains("data"));
    assert!(server.cli(&["GET", "syncguard:visits"]).contains('5'));
    check_under_load(timed).await;
    // Without a prefix, counters cannot be told from other data.
    let bare = config.prefix("").fences(FenceSource::Clock);
    let bare = RedisBackend::connect(bare).await.expect("connects");
    let error = bare.admin().expect("an admin").collect_fences(7 * DAY).await.expect_err("refused");
    assert_eq!(error.code(), ErrorCode::InvalidArgument, "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn firestore_deletes_only_idle_counters() {
    let Some(emulator) = FirestoreEmulator::start() else { return };
    let config = FirestoreConfig::new("test").emulator(emulator.host());
    let counting = FirestoreBackend::connect(config.clone()).await.expect("connects");
    let timed = config.fences(FenceSource::Clock);
    let timed = FirestoreBackend::connect(timed).await.expect("connects");
    let raw = Raw::new(emulator.port());
    let path = |key: &Key| format!("fence_counters/fence:{}", key.as_str());
    let set = async |counters: Vec<(Key, u64)>| {
        for page in counters.chunks(400) {
            let writes = page.iter().map(|(key, counter)| {
                let counter = string(&format!("{counter:015}"));
                let debug = string(key.as_str());
                let counter = fields([("fence", counter), ("keyDebug", debug)]);
                firestore_raw::set(&path(key), counter)
            });
            raw.commit(writes.collect(), Vec::new()).await.expect("works");
        }
    };
    let has = async |key: &Key| raw.get(&path(key)).await.is_some();
    check(&counting, &timed, set, has).await;
    check_under_load(timed).await;
}
