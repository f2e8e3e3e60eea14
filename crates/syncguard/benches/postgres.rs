//! Compares the PostgreSQL backend with pgbench running two statements for the same work, and
//! measures contention between processes.
//!
//! `cargo xtask bench postgres`

#![allow(clippy::unwrap_used, clippy::cast_precision_loss, reason = "a program, not a library")]

mod contention;
mod support;

use std::process::Command;
use std::time::Duration;

use support::{Demand, Report, median};
use syncguard::postgres::PostgresConfig;
use syncguard::{LockBackend, LockOptions, Locker, PostgresBackend};
use test_support::{PostgresOptions, PostgresServer};

/// Many short rounds, because the speed of a disk changes from one second to the next.
const ROUNDS: usize = 13;
const SLICE: Duration = Duration::from_secs(1);

fn main() {
    if contention::is_child() {
        return;
    }
    let Some(server) = PostgresServer::start(&PostgresOptions::default()) else { return };
    let mut report = Report::default();
    let runtime = contention::runtime();
    runtime.block_on(async {
        let backend = syncguard::connect(&server.url()).await.unwrap();
        backend.admin().unwrap().setup().await.unwrap();
    });
    for tasks in [1, 16, 64] {
        runtime.block_on(uncontended(&mut report, &server, tasks));
    }
    let demands = [Demand::AtLeast(500.0), Demand::AtMost(300.0)];
    runtime.block_on(contention::tasks(&mut report, &server.url(), 16, demands));
    let demands = [Demand::AtMost(5.0), Demand::AtMost(1000.0)];
    contention::processes(&mut report, &server.url(), 4, 4, demands);
    runtime.block_on(contention::time_to_detection(&mut report, &server.url()));
    runtime.block_on(quiet(&mut report, &server));
    report.finish("postgres");
}

/// Measures cycles per second of pgbench.
fn pgbench(server: &PostgresServer, clients: usize) -> f64 {
    let script = server.socket_folder().join("cycle.sql");
    std::fs::write(&script, CYCLE).unwrap();
    let (clients, seconds) = (clients.to_string(), SLICE.as_secs().to_string());
    let output = Command::new(server.programs().join("pgbench"))
        .args(["-n", "-M", "prepared", "-c", &clients, "-j", "2", "-T", &seconds, "-f"])
        .arg(&script)
        .args(["-h", "127.0.0.1", "-U", "postgres", "-p", &server.port().to_string(), "postgres"])
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let line = text.lines().find(|line| line.starts_with("tps")).unwrap_or_else(|| {
        panic!("{text}\n{}", String::from_utf8_lossy(&output.stderr));
    });
    line.split_whitespace().nth(2).unwrap().parse().unwrap()
}

/// One statement that checks, counts the fence and upserts the lock, and one that deletes it.
const CYCLE: &str = "\\set task random(1, 100000000)
\\set slot :task % 256
WITH counted AS (
  INSERT INTO syncguard_fence_counters AS f (fence_key, fence, key_debug)
  SELECT 'fence.bench' || :client_id::text || ':' || :slot::text, 1, 'bench'
  WHERE NOT EXISTS (
    SELECT FROM syncguard_locks WHERE key = 'bench' || :client_id::text || ':' || :slot::text
      AND expires_at_ms > floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint - 1000)
  ON CONFLICT (fence_key) DO UPDATE SET fence = f.fence + 1 RETURNING fence)
INSERT INTO syncguard_locks (key, lock_id, expires_at_ms, acquired_at_ms, fence, user_key)
SELECT 'bench' || :client_id::text || ':' || :slot::text,
  'id' || :client_id::text || ':' || :task::text,
  floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint + 30000,
  floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint, lpad(fence::text, 15, '0'), 'bench'
FROM counted
ON CONFLICT (key) DO UPDATE SET lock_id = excluded.lock_id, expires_at_ms = excluded.expires_at_ms;
DELETE FROM syncguard_locks WHERE lock_id = 'id' || :client_id::text || ':' || :task::text;
";

async fn uncontended(report: &mut Report, server: &PostgresServer, tasks: usize) {
    let config = PostgresConfig::from_url(&server.url()).unwrap().pool_size(tasks);
    let backend = PostgresBackend::connect(config).await.unwrap();
    let options = LockOptions::default().wait_forever();
    let locker = Locker::builder(backend).options(options).build().unwrap();
    let (mut limits, mut figures) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        limits.push(pgbench(server, tasks));
        figures.push(contention::lock_cycles(&locker, tasks, SLICE).await);
    }
    let ratios = limits.iter().zip(&figures).map(|(limit, figure)| figure / limit).collect();
    report.info(format!("{tasks} clients, pgbench"), median(limits), "cycles/s");
    report.info(format!("{tasks} tasks, ours"), median(figures), "cycles/s");
    let name = format!("{tasks} tasks, ours / pgbench");
    report.check(name, median(ratios), "x", Demand::AtLeast(0.7));
}

/// Checks that a thousand waiting tasks hold no connection and send nothing, except for polling.
async fn quiet(report: &mut Report, server: &PostgresServer) {
    let config = PostgresConfig::from_url(&server.url()).unwrap().pool_size(8);
    let backend = PostgresBackend::connect(config).await.unwrap();
    let options = LockOptions::default().wait_forever();
    let hours = Duration::from_hours(1);
    let locker = Locker::builder(backend).options(options).poll_interval(hours).build().unwrap();
    let guard = locker.lock("quiet").await.unwrap();
    let waiters: Vec<_> = (0..1000)
        .map(|_| {
            let locker = locker.clone();
            tokio::spawn(async move { drop(locker.lock("quiet").await) })
        })
        .collect();
    tokio::time::sleep(Duration::from_secs(3)).await;
    let count = || -> f64 {
        let asked = "SELECT pg_stat_clear_snapshot(), xact_commit + xact_rollback FROM \
                     pg_stat_database WHERE datname = 'postgres'";
        server.sql(asked).trim_start_matches('|').parse().unwrap()
    };
    let connections = server.sql(
        "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'syncguard' AND state <> \
         'idle'",
    );
    let before = count();
    tokio::time::sleep(Duration::from_secs(3)).await;
    let after = count();
    // The queries for the count are counted too.
    report.check("1,000 waiters, transactions in 3 s", after - before, "", Demand::AtMost(5.0));
    let busy = connections.parse().unwrap();
    report.check("1,000 waiters, busy connections", busy, "", Demand::AtMost(0.0));
    for waiter in waiters {
        waiter.abort();
    }
    drop(guard);
    locker.shutdown().await.unwrap();
}
