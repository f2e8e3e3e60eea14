//! `cargo xtask test` and `cargo xtask soak`.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::process::Command;

use crate::shell::{Outcome, cargo, root, step, target};
use crate::{cargo_mutants, figures, programs, release, text, tools, torture};

/// The features of the library that must also compile on their own.
const FEATURES: [&str; 8] =
    ["blocking", "conformance", "firestore", "metrics", "postgres", "redis", "serde", "sqlite"];

/// The backends, by the name of their test files.
const BACKENDS: [&str; 5] = ["firestore", "memory", "postgres", "redis", "sqlite"];

/// How many test programs run at once.
const JOBS: usize = 3;

/// The variable that makes a missing server a failure instead of a skipped test.
pub(crate) const REQUIRE_SERVERS: &str = "SYNCGUARD_REQUIRE_SERVERS";

/// Runs all checks and tests, or only the tests of the named backends.
pub(crate) fn run(backends: &[String]) -> Outcome {
    if backends.is_empty() {
        return everything();
    }
    for backend in backends {
        let known = BACKENDS.contains(&backend.as_str());
        known.then_some(()).ok_or_else(|| {
            format!("unknown backend {backend}; expected one of: {}", BACKENDS.join(", "))
        })?;
        let path = install_servers(&[backend.as_str()])?;
        // The names of a backend's test files begin with its name.
        let pattern = format!("{backend}*");
        let arguments = ["test", "--package", "syncguard", "--all-features", "--test", &pattern];
        let mut tests = cargo(&arguments);
        step(&format!("tests of {backend}"), tests.env(REQUIRE_SERVERS, "1").env("PATH", path))?;
    }
    Ok(())
}

/// Installs the servers for the tests of these backends, and returns a `PATH` with them.
pub(crate) fn install_servers(backends: &[&str]) -> Outcome<OsString> {
    if backends.contains(&"redis") {
        tools::from_debian("redis-server", "redis-server")?;
    }
    if backends.contains(&"postgres") {
        // Debian keeps the server out of `PATH`, so look for `psql`, which comes with it.
        tools::from_debian("psql", "postgresql")?;
        tools::from_debian("pgbouncer", "pgbouncer")?;
    }
    if backends.contains(&"firestore") {
        return tools::firestore_emulator();
    }
    Ok(std::env::var_os("PATH").unwrap_or_default())
}

fn everything() -> Outcome {
    let path = install_servers(&BACKENDS)?;
    // The tests of the command create terminals with one, and open its page with the other.
    tools::from_debian("script", "bsdutils")?;
    tools::from_debian("chromium", "chromium")?;
    step("formatting", &mut cargo(&["fmt", "--all", "--check"]))?;
    text::check()?;
    release::rust_version()?;
    let lint = ["clippy", "--workspace", "--all-targets", "--all-features", "--", "-D", "warnings"];
    step("lints", &mut cargo(&lint))?;
    for features in [""].into_iter().chain(FEATURES) {
        let name = if features.is_empty() { "none" } else { features };
        let lint =
            ["clippy", "--package", "syncguard", "--features", features, "--", "-D", "warnings"];
        step(&format!("lints with features: {name}"), &mut cargo(&lint))?;
        if BACKENDS.contains(&features) {
            let mut tests = cargo(&lint[..5]);
            tests.args(["--lib", "--profile", "test", "--", "-D", "warnings"]);
            step(&format!("lints of unit tests with features: {name}"), &mut tests)?;
        }
    }
    let document = ["doc", "--workspace", "--no-deps", "--all-features"];
    step("documentation", cargo(&document).env("RUSTDOCFLAGS", "-D warnings"))?;
    let figures = figures::file()?;
    let environment = [
        (REQUIRE_SERVERS, OsStr::new("1")),
        ("PATH", path.as_os_str()),
        (figures::VARIABLE, figures.as_os_str()),
    ];
    programs::run(programs::build()?, JOBS, &environment)?;
    let mut tests = cargo(&["test", "--workspace", "--all-features", "--doc"]);
    step("tests in the documentation", tests.envs(environment))?;
    for example in ["prometheus", "opentelemetry"] {
        step(
            &format!("example {example}"),
            &mut Command::new(target().join("debug").join(example)),
        )?;
    }
    for example in examples()? {
        // The tests have built it. `cargo run` would build its dependencies again, because it
        // selects other features of them.
        let mut run = Command::new(target().join("debug/examples").join(&example));
        step(&format!("example {example}"), run.current_dir(root()))?;
    }
    torture::briefly(&path, &figures)?;
    release::packages()?;
    // The check for advisories is left out, because not every machine can download the database.
    let mut deny = Command::new(tools::from_crates_io("cargo-deny", "0.20.2", "dev")?);
    deny.current_dir(root()).args(["check", "licenses", "bans", "sources"]);
    step("licenses, bans and sources of the dependencies", &mut deny)?;
    figures::print(&figures, &[&figures::OF_TESTS, &figures::OF_TORTURE])
}

fn examples() -> Outcome<Vec<String>> {
    let directory = root().join("crates/syncguard/examples");
    let entries =
        fs::read_dir(&directory).map_err(|cause| format!("cannot list the examples: {cause}"))?;
    let mut names: Vec<String> = entries
        .filter_map(|entry| entry.ok()?.path().file_stem()?.to_str().map(str::to_owned))
        .collect();
    names.sort();
    Ok(names)
}

/// Runs the long tests that are too slow for CI.
pub(crate) fn soak() -> Outcome {
    let soak = ["test", "--release", "--package", "syncguard", "--all-features", "--test", "soak"];
    step("soak", cargo(&soak).args(["--", "--ignored", "--nocapture"]))?;
    torture::soak()?;
    below_the_store()
}

/// Runs the schedules and the fuzzers for longer, with another seed each time, and cargo-mutants.
fn below_the_store() -> Outcome {
    const SCHEDULES: &str = "1000000";
    const FUZZ_RUNS: &str = "2000000";
    let seed = std::time::UNIX_EPOCH.elapsed().map_or(1, |elapsed| elapsed.as_secs()).to_string();
    println!("\nseed: {seed}; repeat with SYNCGUARD_SEED={seed}");
    let figures = figures::file()?;
    for (name, which) in [
        ("schedules", ["--package", "syncguard", "--lib", "schedules"]),
        ("protocol", ["--package", "syncguard", "--lib", "protocol"]),
        ("fuzzing of the library", ["--package", "syncguard", "--lib", "panics"]),
        ("fuzzing of public functions", ["--package", "syncguard", "--test", "fuzz"]),
        ("fuzzing of the command", ["--package", "syncguard-cli", "--bins", "no_arguments"]),
    ] {
        let mut tests = cargo(&["test", "--release", "--all-features"]);
        tests.args(which).args(["--", "--include-ignored"]).env(figures::VARIABLE, &figures);
        tests.env("SYNCGUARD_SCHEDULES", SCHEDULES).env("SYNCGUARD_FUZZ_RUNS", FUZZ_RUNS);
        tests.env("SYNCGUARD_SEED", &seed);
        step(name, &mut tests)?;
    }
    cargo_mutants::run(&install_servers(&BACKENDS)?)
}
