//! `cargo xtask bench`.

use std::fs;
use std::process::Command;

use crate::shell::{Outcome, cargo, root, step, target};
use crate::{report, tools};

/// The benchmarks, by file name: the backends, the command (`cli`), fence counters, how cost grows
/// with the number of locks and waiters, what is made of several locks, and other libraries.
const BACKENDS: [&str; 10] = [
    "cli",
    "fences",
    "firestore",
    "growth",
    "memory",
    "postgres",
    "primitives",
    "redis",
    "rivals",
    "sqlite",
];

/// Runs the benchmarks and collects their results.
pub(crate) fn run(backends: &[String]) -> Outcome {
    let known = |backend: &String| BACKENDS.contains(&backend.as_str());
    if let Some(unknown) = backends.iter().find(|backend| !known(backend)) {
        return Err(format!(
            "unknown benchmark {unknown}; expected one of: {}",
            BACKENDS.join(", ")
        ));
    }
    let directory = root().join("target/bench");
    fs::create_dir_all(&directory).map_err(|cause| format!("{}: {cause}", directory.display()))?;
    let mut results = Vec::new();
    let mut missed = Vec::new();
    for backend in BACKENDS {
        if !backends.is_empty() && !backends.iter().any(|named| named == backend) {
            continue;
        }
        let out = directory.join(format!("{backend}.json"));
        let mut bench = command(backend)?;
        bench.env("SYNCGUARD_BENCH_OUT", &out);
        let outcome = step(&format!("benchmark {backend}"), &mut bench);
        if let Err(message) = outcome {
            missed.push(message);
        }
        if let Ok(figures) = fs::read_to_string(&out) {
            results.push(format!("\"{backend}\": {}", figures.trim_end()));
        }
    }
    let all = directory.join("results.json");
    let results = format!("{{\n{}\n}}\n", results.join(",\n"));
    fs::write(&all, &results).map_err(|cause| format!("{}: {cause}", all.display()))?;
    let page = directory.join("report.html");
    report::write(&page, &results)?;
    println!("\nresults: {}\npage: {}", all.display(), page.display());
    if missed.is_empty() { Ok(()) } else { Err(missed.join("; ")) }
}

/// Returns the command of a benchmark, and installs what it needs.
fn command(backend: &str) -> Outcome<Command> {
    if backend == "rivals" {
        // One of the other libraries is built with OpenSSL.
        tools::from_debian("pkg-config", "pkg-config")?;
        tools::from_debian("/usr/include/openssl/ssl.h", "libssl-dev")?;
        let mut rivals =
            cargo(&["run", "--release", "--manifest-path", "crates/rivals/Cargo.toml"]);
        rivals.arg("--target-dir").arg(target().join("rivals"));
        return Ok(rivals);
    }
    let package = if backend == "cli" { "syncguard-cli" } else { "syncguard" };
    let mut bench = cargo(&["bench", "--package", package, "--all-features", "--bench", backend]);
    if backend == "firestore" {
        bench.env("PATH", tools::firestore_emulator()?);
    }
    Ok(bench)
}
