//! How cost grows: with the number of locks that are held, with the number of keys that one process
//! waits for, and with the number of locks that came and went.

#![allow(clippy::unwrap_used, clippy::cast_precision_loss, reason = "a program, not a library")]

#[allow(dead_code, reason = "this benchmark uses a part of it")]
mod support;

use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use support::{Report, median};
use syncguard::backend::{AcquireOutcome, AcquireRequest, Fenced, Hint, ReleaseRequest};
use syncguard::{
    Key, LockBackend, LockOptions, Locker, PostgresBackend, RedisBackend, SqliteBackend, Ttl,
};
use test_support::{
    PostgresOptions, PostgresServer, RedisCluster, RedisOptions, RedisServer, TempDir,
};
use tokio::task::JoinSet;

const HELD: [u64; 3] = [1_000, 100_000, 1_000_000];
const AWAITED: [u64; 3] = [10, 1_000, 10_000];

fn main() {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [first, store, url, awaited] = arguments.as_slice()
        && first == WAITER
    {
        return runtime.block_on(wait_for_keys(store, url, awaited.parse().unwrap()));
    }
    let mut report = Report::default();
    runtime.block_on(async {
        report.section("Redis");
        on_redis(&mut report).await;
        report.section("PostgreSQL");
        on_postgres(&mut report).await;
        report.section("SQLite");
        on_sqlite(&mut report).await;
        report.section("Redis: what a lock costs the server");
        cost(&mut report).await;
        report.section("PostgreSQL: locks that came and went");
        churn(&mut report).await;
    });
    report.finish("growth");
}

/// A day from now, in milliseconds since 1970.
fn tomorrow_ms() -> u128 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    now.as_millis() + 86_400_000
}

/// Measures acquire and release of another lock, in microseconds, and the first page of a list, in
/// milliseconds.
async fn measure<B: LockBackend<Fencing = Fenced>>(backend: &B, held: u64) -> (f64, f64) {
    const ROUNDS: u64 = 1000;
    let mut times = Vec::new();
    for round in 0..ROUNDS {
        let key = Key::new(format!("free:{held}:{round}")).unwrap();
        let request = AcquireRequest::new(key.clone(), Ttl::DEFAULT).unwrap();
        let started = Instant::now();
        let outcome = backend.acquire(&request).await.unwrap();
        times.push(started.elapsed().as_secs_f64() * 1e6);
        assert!(matches!(outcome, AcquireOutcome::Acquired(_)));
        let release = ReleaseRequest::new(request.lock_id()).with_hint(Hint::key(key));
        backend.release(&release).await.unwrap();
    }
    let mut pages = Vec::new();
    for _ in 0..11 {
        let started = Instant::now();
        backend.admin().unwrap().list(None).await.unwrap();
        pages.push(started.elapsed().as_secs_f64() * 1e3);
    }
    (median(times), median(pages))
}

/// Measures with more and more locks that others hold, which `plant` creates from one number on.
async fn with_held<B: LockBackend<Fencing = Fenced>>(
    report: &mut Report,
    backend: &B,
    mut plant: impl AsyncFnMut(u64, u64),
) {
    let (mut acquires, mut pages, mut planted) = (Vec::new(), Vec::new(), 0);
    for held in HELD {
        plant(planted, held).await;
        planted = held;
        let (acquire, page) = measure(backend, held).await;
        acquires.push((held as f64, acquire));
        pages.push((held as f64, page));
    }
    report.growth("locks held: acquire", "µs", &acquires, true);
    report.growth("locks held: first page of ls", "ms", &pages, true);
}

/// Returns the resident memory of this process, in MB.
fn memory_mb() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<f64>().unwrap() / 1e3
}

/// Returns the processor time of a process, in seconds.
fn cpu_s(process: &str) -> f64 {
    const TICKS_PER_SECOND: f64 = 100.0;
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    (fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap()) / TICKS_PER_SECOND
}

/// Waits for more and more of the locks that others hold, each time in a process of its own.
fn with_awaited(report: &mut Report, store: &str, url: &str, connections: impl Fn() -> f64) {
    let (mut memory, mut cpu, mut connected) = (Vec::new(), Vec::new(), Vec::new());
    for awaited in AWAITED {
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args([WAITER, store, url, &awaited.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let figures: Vec<f64> = line.split_whitespace().map(|one| one.parse().unwrap()).collect();
        connected.push((awaited as f64, connections()));
        memory.push((awaited as f64, figures[0]));
        cpu.push((awaited as f64, figures[1]));
        // It ends when this is closed.
        drop(process.stdin.take());
        process.wait().unwrap();
    }
    report.growth("keys waited for: memory", "MB", &memory, false);
    report.growth("keys waited for: idle processor time", "% of a core", &cpu, false);
    report.growth("keys waited for: connections", "", &connected, true);
}

/// The first argument of a process that waits.
const WAITER: &str = "wait-for-keys";

/// Waits for keys, prints the memory that it took and the processor time that it takes, and waits
/// until the standard input ends.
async fn wait_for_keys(store: &str, url: &str, awaited: u64) {
    if store == "redis" {
        let config = syncguard::redis::RedisConfig::from_url(url).unwrap();
        wait_with(RedisBackend::connect(config).await.unwrap(), awaited).await;
    } else {
        let config = syncguard::postgres::PostgresConfig::from_url(url).unwrap();
        wait_with(PostgresBackend::connect(config).await.unwrap(), awaited).await;
    }
}

async fn wait_with<B: LockBackend<Fencing = Fenced>>(backend: B, awaited: u64) {
    let locker = Locker::builder(backend);
    let locker = locker.options(LockOptions::default().wait_forever()).build().unwrap();
    let before = memory_mb();
    let mut waiting = JoinSet::new();
    for number in 0..awaited {
        let locker = locker.clone();
        waiting.spawn(async move { locker.lock(format!("held:{number}")).await.map(drop) });
    }
    // Until all have subscribed.
    tokio::time::sleep(Duration::from_secs(5)).await;
    let memory = memory_mb() - before;
    let (began, used) = (Instant::now(), cpu_s("self"));
    tokio::time::sleep(Duration::from_secs(5)).await;
    let cpu = 100.0 * (cpu_s("self") - used) / began.elapsed().as_secs_f64();
    assert_eq!(waiting.len() as u64, awaited, "all of them wait");
    println!("{memory} {cpu}");
    tokio::task::spawn_blocking(|| std::io::stdin().read_to_string(&mut String::new()))
        .await
        .unwrap()
        .unwrap();
    std::process::exit(0);
}

async fn on_redis(report: &mut Report) {
    let Some(server) = RedisServer::start(&RedisOptions::default()) else { return };
    let client = redis::Client::open(server.url()).unwrap();
    let raw = client.get_multiplexed_async_connection().await.unwrap();
    let config = syncguard::redis::RedisConfig::from_url(&server.url()).unwrap();
    let config = config.response_timeout(Duration::from_secs(30));
    let backend = RedisBackend::connect(config).await.unwrap();
    let script = "for n = ARGV[1], ARGV[2] - 1 do
        local lock, id = 'syncguard:held:' .. n, string.format('%022d', n)
        redis.call('SET', lock, '{\"lockId\":\"' .. id .. '\",\"expiresAtMs\":' .. ARGV[3] ..
          ',\"acquiredAtMs\":1,\"key\":\"held:' .. n .. '\",\"fence\":\"000000000000001\"}', 'PXAT', ARGV[3])
        redis.call('SET', 'syncguard:id:' .. id, lock, 'PXAT', ARGV[3])
        redis.call('SET', 'syncguard:fence:' .. lock, 1)
      end";
    with_held(report, &backend, async |from, to| {
        for start in (from..to).step_by(10_000) {
            let mut plant = redis::cmd("EVAL");
            plant.arg(script).arg(0).arg(start).arg((start + 10_000).min(to));
            plant.arg(tomorrow_ms().to_string());
            plant.query_async::<()>(&mut raw.clone()).await.unwrap();
        }
    })
    .await;
    let count = || server.cli(&["CLIENT", "LIST"]).lines().count() as f64;
    let before = count();
    with_awaited(report, "redis", &server.url(), || count() - before);
}

async fn postgres(server: &PostgresServer) -> PostgresBackend {
    let config = syncguard::postgres::PostgresConfig::from_url(&server.url()).unwrap();
    let backend = PostgresBackend::connect(config.response_timeout(Duration::from_secs(30)));
    let backend = backend.await.unwrap();
    backend.setup_schema().await.unwrap();
    backend
}

async fn on_postgres(report: &mut Report) {
    let options = PostgresOptions::default().with(["fsync = off"]);
    let Some(server) = PostgresServer::start(&options) else { return };
    let backend = postgres(&server).await;
    with_held(report, &backend, async |from, to| {
        let to = to - 1;
        let planted = server.sql(&format!(
            "INSERT INTO syncguard_locks
               SELECT 'held:' || n, lpad(n::text, 22, '0'), {expires}, 1, '000000000000001', \
             'held:' || n FROM generate_series({from}, {to}) AS n;
             INSERT INTO syncguard_fence_counters
               SELECT 'fence:held:' || n, 1, 'held:' || n FROM generate_series({from}, {to}) AS n;
             ANALYZE",
            expires = tomorrow_ms()
        ));
        assert!(planted.contains("ANALYZE"), "{planted}");
    })
    .await;
    let count = || -> f64 {
        let count = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'";
        server.sql(count).trim().parse().unwrap()
    };
    let before = count();
    with_awaited(report, "postgres", &server.url(), || count() - before);
}

async fn on_sqlite(report: &mut Report) {
    let directory = TempDir::new();
    let path = directory.path().join("locks.db");
    let config = syncguard::sqlite::SqliteConfig::new(&path);
    let backend = SqliteBackend::open(config).await.unwrap();
    with_held(report, &backend, async |from, to| {
        let database = rusqlite::Connection::open(&path).unwrap();
        let expires = tomorrow_ms();
        let plant = format!(
            "WITH RECURSIVE numbers(n) AS
               (SELECT {from} UNION ALL SELECT n + 1 FROM numbers WHERE n + 1 < {to})
             INSERT INTO syncguard_locks
               SELECT 'held:' || n, printf('%022d', n), 1, 1, {expires}, NULL FROM numbers;
             WITH RECURSIVE numbers(n) AS
               (SELECT {from} UNION ALL SELECT n + 1 FROM numbers WHERE n + 1 < {to})
             INSERT INTO syncguard_fences SELECT 'held:' || n, 1 FROM numbers;"
        );
        database.execute_batch(&plant).unwrap();
    })
    .await;
}

/// Acquires and releases locks of some keys in turn, in 64 tasks.
async fn cycles<B: LockBackend<Fencing = Fenced> + Clone>(backend: &B, cycles: u64, keys: u64) {
    const TASKS: usize = 64;
    let next = Arc::new(AtomicU64::new(0));
    let mut tasks = JoinSet::new();
    for _ in 0..TASKS {
        let (backend, next) = (backend.clone(), Arc::clone(&next));
        tasks.spawn(async move {
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= cycles {
                    return;
                }
                let key = Key::new(format!("job:{}", number % keys)).unwrap();
                let capabilities = backend.capabilities();
                let request = AcquireRequest::for_backend(capabilities, key.clone(), Ttl::DEFAULT);
                let request = request.unwrap();
                let outcome = backend.acquire(&request).await.unwrap();
                assert!(matches!(outcome, AcquireOutcome::Acquired(_)));
                let release = ReleaseRequest::new(request.lock_id()).with_hint(Hint::key(key));
                backend.release(&release).await.unwrap();
            }
        });
    }
    while let Some(done) = tasks.join_next().await {
        done.unwrap();
    }
}

/// Measures the processor time of the servers for an acquire and a release: of one server, and of
/// all nodes of a Cluster with shards.
async fn cost(report: &mut Report) {
    const CYCLES: u64 = 200_000;
    const KEYS: u64 = 100_000;
    let Some(server) = RedisServer::start(&RedisOptions::default()) else { return };
    let Some(cluster) = RedisCluster::start(0) else { return };
    let nodes: Vec<&RedisServer> = cluster.nodes().iter().collect();
    for (name, url, servers) in [
        ("one server", server.url(), vec![&server]),
        ("three nodes, one slot", cluster.url("prefix=%7Blocks%7D"), nodes.clone()),
        ("three nodes, 12 shards", cluster.url("shards=12&prefix=few"), nodes.clone()),
        ("three nodes, 256 shards", cluster.url("shards=256"), nodes),
    ] {
        let config = syncguard::redis::RedisConfig::from_url(&url).unwrap();
        let backend = RedisBackend::connect(config).await.unwrap();
        cycles(&backend, CYCLES / 10, KEYS).await;
        let field = |server: &RedisServer, name: &str| -> f64 {
            let info = server.cli(&["INFO", "everything"]);
            let line = info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            line.unwrap().trim().parse().unwrap()
        };
        let processor_time =
            |server: &&RedisServer| cpu_s(&field(server, "process_id").to_string());
        let bytes = |name: &str| servers.iter().map(|server| field(server, name)).sum::<f64>();
        let traffic = || bytes("total_net_input_bytes") + bytes("total_net_output_bytes");
        let used = || servers.iter().map(processor_time).collect::<Vec<f64>>();
        let (before, sent, own) = (used(), traffic(), cpu_s("self"));
        let started = Instant::now();
        cycles(&backend, CYCLES, KEYS).await;
        let took = started.elapsed().as_secs_f64();
        let own = cpu_s("self") - own;
        let used: Vec<f64> =
            used().iter().zip(&before).map(|(after, before)| after - before).collect();
        let sent = traffic() - sent;
        let total = used.iter().sum::<f64>();
        let per_lock = total * 1e6 / CYCLES as f64;
        report.info(format!("{name}: locks"), CYCLES as f64 / took, "1/s");
        report.info(format!("{name}: servers' processor time per lock"), per_lock, "µs");
        report.info(format!("{name}: client's"), own * 1e6 / CYCLES as f64, "µs");
        report.info(format!("{name}: bytes both ways per lock"), sent / CYCLES as f64, "bytes");
        let busiest = used.iter().fold(0.0_f64, |most, one| most.max(*one));
        report.info(format!("{name}: share of the busiest server"), busiest / total, "");
    }
}

/// As many locks as come and go in an hour at 100 per second, of 1,000 keys in turn.
async fn churn(report: &mut Report) {
    const CYCLES: u64 = 360_000;
    const KEYS: u64 = 1_000;
    // Compared with the settings that a table can have for many updates and deletions.
    let tuned = "ALTER TABLE syncguard_fence_counters SET (fillfactor = 50);
        ALTER TABLE syncguard_locks SET (autovacuum_vacuum_scale_factor = 0, \
        autovacuum_vacuum_threshold = 10000);
        ALTER TABLE syncguard_fence_counters SET (autovacuum_vacuum_scale_factor = 0, \
        autovacuum_vacuum_threshold = 10000);";
    for (name, settings) in [("as created", ""), ("tuned", tuned)] {
        // An hour in which the server looks for dead rows 60 times, in a minute.
        let options = PostgresOptions::default().with(["fsync = off", "autovacuum_naptime = 1s"]);
        let Some(server) = PostgresServer::start(&options) else { return };
        let backend = postgres(&server).await;
        if !settings.is_empty() {
            assert!(server.sql(settings).contains("ALTER TABLE"));
        }
        let started = Instant::now();
        cycles(&backend, CYCLES, KEYS).await;
        let rate = CYCLES as f64 / started.elapsed().as_secs_f64();
        report.info(format!("{name}: cycles"), rate, "1/s");
        let (acquire, _) = measure(&backend, 0).await;
        report.info(format!("{name}: acquire afterwards"), acquire, "µs");
        for (what, table) in
            [("locks", "syncguard_locks"), ("counters", "syncguard_fence_counters")]
        {
            let number = |sql: &str| -> f64 { server.sql(sql).trim().parse().unwrap_or(0.0) };
            let dead =
                format!("SELECT n_dead_tup FROM pg_stat_user_tables WHERE relname = '{table}'");
            report.info(format!("{name}: dead rows of {what}"), number(&dead), "");
            let size = format!("SELECT pg_table_size('{table}')");
            report.info(format!("{name}: table of {what}"), number(&size) / 1e6, "MB");
            let size = format!("SELECT pg_indexes_size('{table}')");
            report.info(format!("{name}: indexes of {what}"), number(&size) / 1e6, "MB");
        }
    }
}
