//! cargo-mutants, which changes one expression at a time: a change that no test notices is a gap in
//! the tests. The settings, and why some mutants survive, are in `.cargo/mutants.toml`.

use std::ffi::OsStr;
use std::fs;
use std::path::Path;
use std::process::Command;

use crate::shell::{Outcome, root, step, target};
use crate::test::REQUIRE_SERVERS;
use crate::tools;

/// Files that are changed together, the features that they need, and the tests that notice a
/// change. With all features, a mutant takes four times as long to build.
struct Part {
    name: &'static str,
    features: &'static str,
    /// Below `crates/syncguard/src`.
    files: &'static [&'static str],
    /// The tests for what the unit tests miss, and then for what these miss.
    passes: &'static [&'static [&'static str]],
}

const PARTS: [Part; 6] = [
    Part {
        name: "common",
        features: "conformance,full",
        files: &["common/**/*.rs", "contract/**/*.rs"],
        passes: &[&["--test=mutants"], &["--lib", "--test=memory", "--test=sqlite"]],
    },
    Part {
        name: "lock",
        features: "conformance",
        files: &["lock/**/*.rs"],
        passes: &[&["--test=mutants"], &["--lib", "--test=memory"]],
    },
    Part {
        name: "sqlite",
        features: "conformance,sqlite",
        files: &["backends/sqlite/{config,error,record}.rs"],
        passes: &[&["--test=explain_key", "--test=sqlite*"]],
    },
    Part {
        name: "redis",
        features: "conformance,redis",
        files: &["backends/redis/{config,error,layout,names,record,reply,settings}.rs"],
        passes: &[&["--test=explain_key", "--test=redis*"]],
    },
    Part {
        name: "postgres",
        features: "conformance,postgres",
        files: &["backends/postgres/{config,error,names,record}.rs"],
        passes: &[&["--test=explain_key", "--test=postgres*"]],
    },
    Part {
        name: "firestore",
        features: "conformance,firestore",
        files: &["backends/firestore/{config,error,names,record}.rs"],
        passes: &[&["--test=explain_key", "--test=firestore*"]],
    },
];

/// Runs all mutants with the unit tests, and those that survive with more and more of the other
/// tests. It takes several hours on two cores. `path` has the servers.
pub(crate) fn run(path: &OsStr) -> Outcome {
    let output = target().join("cargo-mutants");
    drop(fs::remove_dir_all(&output));
    let mut survived = Vec::new();
    for part in PARTS {
        let output = output.join(part.name);
        fs::create_dir_all(&output).map_err(|cause| format!("{}: {cause}", output.display()))?;
        let mut unit_tests = command(&part, &output, &["--lib"])?;
        // They take as long as all others together.
        unit_tests.args(["--", "--", "--skip", "protocol", "--skip", "schedules"]);
        let mut outcome =
            step(&format!("cargo-mutants, {}, unit tests", part.name), &mut unit_tests);
        for programs in part.passes {
            let mut tests = command(&part, &output, programs)?;
            tests.arg("--iterate").env(REQUIRE_SERVERS, "1").env("PATH", path);
            let name = format!("cargo-mutants, {}, {}", part.name, programs.join(" "));
            // What survives an earlier pass is not the last word.
            outcome = step(&name, &mut tests);
        }
        survived.extend(outcome.err());
    }
    if survived.is_empty() { Ok(()) } else { Err(survived.join("; ")) }
}

/// Returns a command that runs these test programs for every mutant of a part.
fn command(part: &Part, output: &Path, programs: &[&str]) -> Outcome<Command> {
    let mut mutants = Command::new(tools::from_crates_io("cargo-mutants", "27.1.0", "dev")?);
    mutants.current_dir(root()).args(["mutants", "--package", "syncguard", "--jobs", "2"]);
    mutants.args(["--features", part.features]).arg("--output").arg(output);
    mutants.args(part.files.iter().map(|file| format!("--file=crates/syncguard/src/{file}")));
    mutants.args(programs.iter().map(|program| format!("--cargo-arg={program}")));
    mutants.env("CARGO_INCREMENTAL", "1");
    mutants.env("SYNCGUARD_SCHEDULES", "1000").env("SYNCGUARD_FUZZ_RUNS", "2000");
    mutants.env("PROPTEST_CASES", "256");
    Ok(mutants)
}
