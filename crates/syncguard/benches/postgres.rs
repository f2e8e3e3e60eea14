//! Compares the PostgreSQL backend with pgbench running two statements for the same work, and
//! measures contention between processes.
//!
//! `cargo xtask bench postgres`. With the argument `cycles`, only the first section is measured.

#![allow(clippy::unwrap_used, clippy::cast_precision_loss, reason = "a program, not a library")]

mod contention;
mod support;

use std::process::Command;
use std::time::Duration;

use support::{Demand, Report, median};
use syncguard::backend::AcquireRequest;
use syncguard::postgres::PostgresConfig;
use syncguard::postgres::tokio_postgres::{self, Client, NoTls};
use syncguard::{Key, LockBackend, LockOptions, Locker, PostgresBackend, Ttl};
use test_support::{PostgresOptions, PostgresServer};

/// Many short rounds, because the speed of a disk changes from one second to the next.
const ROUNDS: usize = 7;
const SLICE: Duration = Duration::from_secs(1);

fn main() {
    if contention::is_child() {
        return;
    }
    let Some(server) = PostgresServer::start(&PostgresOptions::default()) else { return };
    let mut report = Report::default();
    report.section("Acquire and release");
    let runtime = contention::runtime();
    runtime.block_on(async {
        let backend = syncguard::connect(&server.url()).await.unwrap();
        backend.admin().unwrap().setup().await.unwrap();
    });
    for (tasks, ratio) in [(1, 0.85), (16, 1.2), (64, 2.0)] {
        runtime.block_on(uncontended(&mut report, &server, tasks, Demand::AtLeast(ratio)));
    }
    if std::env::args().any(|argument| argument == "cycles") {
        report.finish("postgres");
        return;
    }
    // First, because the listeners of what follows send pings.
    report.section("Resources");
    runtime.block_on(quiet(&mut report, &server));
    let demands = [Demand::AtLeast(500.0), Demand::AtMost(300.0)];
    runtime.block_on(contention::tasks(&mut report, &server.url(), 16, demands));
    let demands = [Demand::AtLeast(700.0), Demand::AtMost(5.0), Demand::AtMost(1000.0)];
    contention::processes(&mut report, &server.url(), 4, 4, demands);
    runtime.block_on(async {
        let mut pollers = Vec::new();
        for _ in 0..4 {
            pollers.push(Peer::connect(&server.url()).await);
        }
        contention::beside_pollers(&mut report, &server.url(), pollers).await;
    });
    contention::disturbed(&mut report, "killed listeners", &server.url(), || {
        // Only listeners hold shared advisory locks.
        let _killed: String = server.sql(
            "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND mode = \
             'ShareLock'",
        );
    });
    runtime.block_on(contention::take_over(&mut report, &server.url()));
    runtime.block_on(contention::time_to_detection(&mut report, &server.url()));
    report.finish("postgres");
}

/// Measures cycles per second of pgbench.
fn pgbench(server: &PostgresServer, clients: usize, cycle: &str) -> f64 {
    let script = server.socket_folder().join("cycle.sql");
    std::fs::write(&script, cycle).unwrap();
    let (clients, seconds) = (clients.to_string(), SLICE.as_secs().to_string());
    let output = Command::new(server.programs().join("pgbench"))
        // As in our own sessions: the plan for a table that was just vacuumed reads all of it, and
        // would be kept while the table grows.
        .env("PGOPTIONS", "-c enable_seqscan=off")
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

/// PostgreSQL's own session locks: nothing is written, and a lock ends with its connection.
const ADVISORY: &str = "\\set task random(1, 100000000)
SELECT pg_try_advisory_lock(:task);
SELECT pg_advisory_unlock(:task);
";

/// The plainest lock that a table can be: one statement that inserts a row unless there is a live
/// one, and one that deletes it. No fence, no advisory lock, no notification.
const PLAIN: &str = "\\set task random(1, 100000000)
\\set slot :task % 256
INSERT INTO syncguard_locks AS l (key, lock_id, expires_at_ms, acquired_at_ms, fence, user_key)
VALUES ('bench' || :client_id::text || ':' || :slot::text,
  'id' || :client_id::text || ':' || :task::text,
  floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint + 30000,
  floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint, '000000000000001', 'bench')
ON CONFLICT (key) DO UPDATE SET lock_id = excluded.lock_id, expires_at_ms = excluded.expires_at_ms
  WHERE l.expires_at_ms <= floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint - 1000;
DELETE FROM syncguard_locks WHERE lock_id = 'id' || :client_id::text || ':' || :task::text;
";

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

async fn uncontended(report: &mut Report, server: &PostgresServer, tasks: usize, demand: Demand) {
    let backend =
        PostgresBackend::connect(PostgresConfig::from_url(&server.url()).unwrap()).await.unwrap();
    let options = LockOptions::default().wait_forever();
    let locker = Locker::builder(backend).options(options).build().unwrap();
    let (mut plain, mut fenced, mut figures) = (Vec::new(), Vec::new(), Vec::new());
    let mut advisory = Vec::new();
    for _ in 0..ROUNDS {
        advisory.push(pgbench(server, tasks, ADVISORY));
        plain.push(pgbench(server, tasks, PLAIN));
        figures.push(contention::lock_cycles(&locker, tasks, SLICE).await);
        fenced.push(pgbench(server, tasks, CYCLE));
    }
    let ratio = |limits: &[f64]| {
        median(limits.iter().zip(&figures).map(|(limit, figure)| figure / limit).collect())
    };
    let name = format!("{tasks} tasks, ours / pgbench, plain");
    report.check(name, ratio(&plain), "x", demand);
    report.info(format!("{tasks} tasks, ours / pgbench, with fence"), ratio(&fenced), "x");
    report.info(
        format!("{tasks} clients, advisory locks (no fence, TTL or owner)"),
        median(advisory),
        "cycles/s",
    );
    report.info(format!("{tasks} clients, pgbench, plain"), median(plain), "cycles/s");
    report.info(format!("{tasks} clients, pgbench, with fence"), median(fenced), "cycles/s");
    report.info(format!("{tasks} tasks, ours"), median(figures), "cycles/s");
}

/// Plays the TypeScript implementation, with its statements.
struct Peer {
    client: Client,
    lock_id: String,
}

impl Peer {
    async fn connect(url: &str) -> Self {
        let (client, connection) = tokio_postgres::connect(url, NoTls).await.unwrap();
        tokio::spawn(connection);
        Self { client, lock_id: String::new() }
    }
}

impl contention::Poller for Peer {
    async fn try_lock(&mut self, key: &str) -> bool {
        let request = AcquireRequest::new(Key::new(key).unwrap(), Ttl::DEFAULT).unwrap();
        let lock_id = request.lock_id().expose().to_owned();
        let transaction = self.client.transaction().await.unwrap();
        let lock = "SELECT pg_advisory_xact_lock(hashtext($1))";
        transaction.query(lock, &[&key]).await.unwrap();
        let now = "SELECT floor(extract(epoch FROM now()) * 1000)::bigint";
        let now: i64 = transaction.query_one(now, &[]).await.unwrap().get(0);
        let read = "SELECT expires_at_ms FROM syncguard_locks WHERE key = $1";
        let held = transaction.query_opt(read, &[&key]).await.unwrap();
        if held.is_some_and(|row| row.get::<_, i64>(0) > now - 1000) {
            transaction.commit().await.unwrap();
            return false;
        }
        let fence_key = format!("fence:{key}");
        let create = "INSERT INTO syncguard_fence_counters (fence_key, fence, key_debug) VALUES \
                      ($1, 0, $2) ON CONFLICT (fence_key) DO NOTHING";
        transaction.execute(create, &[&fence_key, &key]).await.unwrap();
        let count = "UPDATE syncguard_fence_counters SET fence = fence + 1 WHERE fence_key = $1 \
                     RETURNING fence";
        let fence: i64 = transaction.query_one(count, &[&fence_key]).await.unwrap().get(0);
        let write = "INSERT INTO syncguard_locks (key, lock_id, expires_at_ms, acquired_at_ms, \
                     fence, user_key) VALUES ($1, $2, $3, $4, $5, $1) ON CONFLICT (key) DO UPDATE \
                     SET lock_id = excluded.lock_id, expires_at_ms = excluded.expires_at_ms, \
                     acquired_at_ms = excluded.acquired_at_ms, fence = excluded.fence";
        let (expires, fence) = (now + 30_000, format!("{fence:015}"));
        transaction.execute(write, &[&key, &lock_id, &expires, &now, &fence]).await.unwrap();
        transaction.commit().await.unwrap();
        self.lock_id = lock_id;
        true
    }

    async fn unlock(&mut self) {
        let delete = "DELETE FROM syncguard_locks WHERE lock_id = $1";
        assert_eq!(self.client.execute(delete, &[&self.lock_id]).await.unwrap(), 1);
    }
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
