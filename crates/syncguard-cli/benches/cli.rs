//! What `syncguard run` adds to a command, on the embedded backend.
//!
//! `cargo xtask bench cli`

#![allow(clippy::unwrap_used, clippy::cast_precision_loss, reason = "a program, not a library")]

#[path = "../../syncguard/benches/support/mod.rs"]
#[allow(dead_code, reason = "it is shared with other benchmarks")]
mod support;

use std::process::{Command, Stdio};
use std::time::Instant;

use support::{Demand, Report, median};
use test_support::TempDir;

/// Milliseconds that a command takes.
fn time(command: &mut Command) -> f64 {
    let started = Instant::now();
    let status = command.stdin(Stdio::null()).stderr(Stdio::null()).status().unwrap();
    assert!(status.success());
    started.elapsed().as_secs_f64() * 1000.0
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
        let mut run = Command::new(env!("CARGO_BIN_EXE_syncguard"));
        locked.push(time(run.env("SYNCGUARD_URL", &url).args(["run", "--key", "k", "--", "true"])));
    }
    let (alone, locked) = (median(alone), median(locked));
    let mut report = Report::default();
    report.info("true", alone, "ms");
    report.info("syncguard run --key k -- true", locked, "ms");
    if has_flock {
        report.info("what flock adds", median(flocked) - alone, "ms");
    }
    report.check("what syncguard adds", locked - alone, "ms", Demand::AtMost(6.0));
    report.finish("cli");
}
