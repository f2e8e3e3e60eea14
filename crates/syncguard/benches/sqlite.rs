//! Compares the SQLite backend with the same two transactions on bare rusqlite, and measures
//! contention between processes.
//!
//! `cargo xtask bench sqlite`

#![allow(clippy::unwrap_used, clippy::cast_precision_loss, reason = "a program, not a library")]

mod contention;
mod support;

use std::path::Path;
use std::time::{Duration, Instant};

use rusqlite::{Connection, TransactionBehavior, params};
use support::{Demand, Report, median};
use test_support::TempDir;

const ROUNDS: usize = 5;
const SLICE: Duration = Duration::from_millis(1500);

fn main() {
    if contention::is_child() {
        return;
    }
    let folder = TempDir::new();
    let url = format!("sqlite:{}", folder.path().join("locks.db").display());
    let mut report = Report::default();
    let runtime = contention::runtime();
    runtime.block_on(uncontended(&mut report, &url, &folder.path().join("bare.db")));
    let demands = [Demand::AtLeast(500.0), Demand::AtMost(300.0)];
    runtime.block_on(contention::tasks(&mut report, &url, 16, demands));
    let demands = [Demand::AtLeast(200.0), Demand::AtMost(5.0), Demand::AtMost(300.0)];
    contention::processes(&mut report, &url, 4, 1, demands);
    contention::processes(&mut report, &url, 8, 1, demands);
    runtime.block_on(contention::time_to_detection(&mut report, &url));
    hammering(&mut report, &url);
    report.finish("sqlite");
}

/// Measures eight processes on distinct keys, so that only the file is contended.
fn hammering(report: &mut Report, url: &str) {
    let children: Vec<_> =
        (0..8).map(|child| contention::start_child(url, &format!("own-{child}"), 1)).collect();
    let waits: Vec<f64> = children.into_iter().flat_map(contention::waits).collect();
    let rate = waits.len() as f64 / contention::RUN.as_secs_f64();
    report.info("8 processes on their own keys", rate, "cycles/s");
    let longest = waits.iter().copied().fold(0.0, f64::max);
    report.check(
        "8 processes on their own keys, longest wait",
        longest,
        "ms",
        Demand::AtMost(300.0),
    );
}

/// Measures cycles per second of the two transactions on one connection.
fn bare_cycles(path: &Path) -> f64 {
    let mut db = Connection::open(path).unwrap();
    db.pragma_update(None, "journal_mode", "WAL").unwrap();
    db.pragma_update(None, "synchronous", "FULL").unwrap();
    db.execute_batch(
        "CREATE TABLE IF NOT EXISTS locks (key TEXT PRIMARY KEY, id TEXT UNIQUE, fence INTEGER, at
           INTEGER, expires INTEGER) STRICT, WITHOUT ROWID;
         CREATE TABLE IF NOT EXISTS fences (key TEXT PRIMARY KEY, fence INTEGER) STRICT,
           WITHOUT ROWID;",
    )
    .unwrap();
    let started = Instant::now();
    let mut count = 0_u32;
    while started.elapsed() < SLICE {
        let key = format!("key{:04}", count % 256);
        let id = format!("id{count:020}");
        let acquire = db.transaction_with_behavior(TransactionBehavior::Immediate).unwrap();
        let held: Option<i64> = acquire
            .prepare_cached("SELECT expires FROM locks WHERE key = ?1")
            .unwrap()
            .query_row([&key], |row| row.get(0))
            .ok();
        assert_eq!(held, None);
        let fence: i64 = acquire
            .prepare_cached(
                "INSERT INTO fences VALUES (?1, 1)
                 ON CONFLICT (key) DO UPDATE SET fence = fence + 1 RETURNING fence",
            )
            .unwrap()
            .query_row([&key], |row| row.get(0))
            .unwrap();
        acquire
            .prepare_cached("INSERT INTO locks VALUES (?1, ?2, ?3, 0, 30000)")
            .unwrap()
            .execute(params![key, id, fence])
            .unwrap();
        acquire.commit().unwrap();
        let release = db.transaction_with_behavior(TransactionBehavior::Immediate).unwrap();
        release.prepare_cached("DELETE FROM locks WHERE id = ?1").unwrap().execute([id]).unwrap();
        release.commit().unwrap();
        count += 1;
    }
    f64::from(count) / started.elapsed().as_secs_f64()
}

async fn uncontended(report: &mut Report, url: &str, bare: &Path) {
    let locker = contention::locker(url).await;
    for tasks in [1, 16] {
        let (mut limits, mut figures) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            let bare = bare.to_owned();
            limits.push(tokio::task::spawn_blocking(move || bare_cycles(&bare)).await.unwrap());
            figures.push(contention::lock_cycles(&locker, tasks, SLICE).await);
        }
        let ratios = limits.iter().zip(&figures).map(|(limit, figure)| figure / limit).collect();
        report.info("bare rusqlite, one connection", median(limits), "cycles/s");
        report.info(format!("{tasks} tasks, ours"), median(figures), "cycles/s");
        let name = format!("{tasks} tasks, ours / bare rusqlite");
        match tasks {
            16 => report.check(name, median(ratios), "x", Demand::AtLeast(0.8)),
            _ => report.info(name, median(ratios), "x"),
        }
    }
}
