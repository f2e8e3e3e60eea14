//! cargo-mutants, which changes one expression at a time: a change that no test notices is a gap in
//! the tests. The settings, and why some mutants survive, are in `.cargo/mutants.toml`.

use std::fs;
use std::process::Command;

use crate::shell::{Outcome, root, step, target};
use crate::tools;

/// Tests of the library that need no server, for mutants that the unit tests miss.
const TESTS: [&str; 15] = [
    "blocking",
    "cancellable",
    "errors",
    "guards",
    "memory",
    "metrics",
    "primitives",
    "properties",
    "renewal",
    "requests",
    "serde",
    "sqlite",
    "telemetry",
    "vectors*",
    "waiting",
];

/// Runs all mutants with the unit tests, and those that survive with the other tests too. It takes
/// about three hours on two cores.
pub(crate) fn run() -> Outcome {
    let output = target().join("cargo-mutants");
    drop(fs::remove_dir_all(&output));
    fs::create_dir_all(&output).map_err(|cause| format!("{}: {cause}", output.display()))?;
    let mut unit_tests = command()?;
    unit_tests.arg("--output").arg(&output).arg("--cargo-arg=--lib");
    // They take as long as all others together.
    unit_tests.args(["--", "--", "--skip", "protocol", "--skip", "schedules"]);
    // Those that survive are not the last word.
    drop(step("cargo-mutants, unit tests", &mut unit_tests));
    let mut all_tests = command()?;
    all_tests.arg("--output").arg(&output).args(["--iterate", "--cargo-arg=--lib"]);
    all_tests.args(TESTS.map(|test| format!("--cargo-arg=--test={test}")));
    step("cargo-mutants, all tests that need no server", &mut all_tests)
}

fn command() -> Outcome<Command> {
    let mut mutants = Command::new(tools::from_crates_io("cargo-mutants", "27.1.0", "dev")?);
    mutants.current_dir(root()).args(["mutants", "--package", "syncguard", "--jobs", "2"]);
    mutants.env("CARGO_INCREMENTAL", "1");
    mutants.env("SYNCGUARD_SCHEDULES", "1000").env("SYNCGUARD_FUZZ_RUNS", "2000");
    Ok(mutants)
}
