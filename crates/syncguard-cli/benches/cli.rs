//! What `syncguard run` adds to a command, on the embedded backend, and in which order queued runs
//! are served on each store that has a server here.
//!
//! `cargo xtask bench cli`

#![allow(clippy::unwrap_used, clippy::cast_precision_loss, reason = "a program, not a library")]

#[path = "../../syncguard/benches/support/mod.rs"]
#[allow(dead_code, reason = "it is shared with other benchmarks")]
mod support;

use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use support::{Demand, Report, median};
use test_support::{PostgresOptions, PostgresServer, RedisOptions, RedisServer, TempDir};

/// Milliseconds that a command takes.
fn time(command: &mut Command) -> f64 {
    let started = Instant::now();
    let status = command.stdin(Stdio::null()).stderr(Stdio::null()).status().unwrap();
    assert!(status.success());
    started.elapsed().as_secs_f64() * 1000.0
}

/// The command, on this store.
fn syncguard(url: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_syncguard"));
    command.env("SYNCGUARD_URL", url);
    command
}

/// How many runs queue for one lock.
const RUNS: usize = 50;

/// Queues runs one after the other; how many pairs of them are served the other way round.
fn inversions(url: &str) -> f64 {
    const GAP: Duration = Duration::from_millis(50);
    let folder = TempDir::new();
    let served = folder.path().join("served");
    let queue = |script: &str| -> Child {
        let mut run = syncguard(url);
        run.args(["run", "-q", "--key", "order", "--wait", "5m", "--", "sh", "-c", script]);
        run.stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap()
    };
    let mut runs = vec![queue("sleep 4")];
    sleep(Duration::from_millis(500));
    for place in 0..RUNS {
        runs.push(queue(&format!("echo {place} >>{}; sleep 0.05", served.display())));
        sleep(GAP);
    }
    for run in &mut runs {
        assert!(run.wait().unwrap().success());
    }
    let served = std::fs::read_to_string(served).unwrap();
    let served: Vec<usize> = served.lines().map(|place| place.parse().unwrap()).collect();
    assert_eq!(served.len(), RUNS);
    let later = |at: usize| served[at + 1..].iter().filter(|&&place| place < served[at]).count();
    (0..RUNS).map(later).sum::<usize>() as f64
}

fn main() {
    const ROUNDS: usize = 200;
    let folder = TempDir::new();
    let url = format!("sqlite:{}", folder.path().join("locks.db").display());
    let (mut alone, mut locked, mut flocked) = (Vec::new(), Vec::new(), Vec::new());
    let has_flock = Command::new("flock").arg("--version").stdout(Stdio::null()).status().is_ok();
    for _ in 0..ROUNDS {
        alone.push(time(&mut Command::new("true")));
        if has_flock {
            let file = folder.path().join("flock");
            flocked.push(time(Command::new("flock").arg(file).arg("true")));
        }
        locked.push(time(syncguard(&url).args(["run", "--key", "k", "--", "true"])));
    }
    let (alone, locked) = (median(alone), median(locked));
    let mut report = Report::default();
    report.info("true", alone, "ms");
    report.info("syncguard run --key k -- true", locked, "ms");
    if has_flock {
        report.info("what flock adds", median(flocked) - alone, "ms");
    }
    report.check("what syncguard adds", locked - alone, "ms", Demand::AtMost(6.0));
    let mut check_order = |store: &str, url: &str| {
        let name = format!("{store}: pairs of {RUNS} queued runs that were served out of order");
        report.check(name, inversions(url), "pairs", Demand::AtMost(150.0));
    };
    check_order("SQLite", &url);
    if let Some(redis) = RedisServer::start(&RedisOptions::default()) {
        check_order("Redis", &redis.url());
    }
    let options = PostgresOptions::default().with(["max_connections = 200"]);
    if let Some(postgres) = PostgresServer::start(&options) {
        time(syncguard(&postgres.url()).arg("setup"));
        check_order("PostgreSQL", &postgres.url());
    }
    report.finish("cli");
}
