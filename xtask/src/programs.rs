//! Builds the test programs of the workspace, and runs several at once: most of the time, they wait
//! for servers and timers. Unit tests do not, so those of a package run alone.

use std::collections::VecDeque;
use std::ffi::OsStr;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::Instant;

use crate::shell::{Outcome, cargo};

/// A program with tests, as cargo has built it.
#[derive(Debug, PartialEq)]
pub(crate) struct TestProgram {
    path: PathBuf,
    /// The package, in whose directory it runs.
    package: PathBuf,
    /// Whether it has the unit tests of a library or command, which compute most of the time.
    is_unit: bool,
}

impl TestProgram {
    /// Reads a line in which cargo reports what it has built.
    fn from_message(line: &str) -> Option<Self> {
        // There are only a few fields to find, so this crate needs no JSON parser.
        let field = |name: &str| {
            let (_, rest) = line.split_once(&format!("\"{name}\":\""))?;
            rest.split('"').next()
        };
        let (_, profile) = line.split_once("\"profile\":{")?;
        if !profile.split('}').next()?.contains("\"test\":true") {
            return None;
        }
        let package = Path::new(field("manifest_path")?).parent()?.to_owned();
        let is_unit = !line.contains("\"kind\":[\"test\"]");
        Some(Self { path: field("executable")?.into(), package, is_unit })
    }

    /// Returns the names of the package and of the program, without the hash that cargo adds.
    fn name(&self) -> String {
        let text = |name: Option<&OsStr>| name.unwrap_or_default().display().to_string();
        let program = text(self.path.file_name());
        let program = program.rsplit_once('-').map_or(program.as_str(), |(name, _hash)| name);
        format!("{}: {program}", text(self.package.file_name()))
    }

    fn size(&self) -> u64 {
        fs::metadata(&self.path).map_or(0, |metadata| metadata.len())
    }
}

/// Builds all test programs and examples.
pub(crate) fn build() -> Outcome<Vec<TestProgram>> {
    println!("\n== test programs");
    let started = Instant::now();
    let mut build = cargo(&["test", "--workspace", "--all-features", "--no-run"]);
    build.arg("--message-format=json-render-diagnostics").stderr(Stdio::inherit());
    let output = build.output().map_err(|cause| format!("cannot start cargo: {cause}"))?;
    println!("== test programs: {:.0} s", started.elapsed().as_secs_f64());
    if !output.status.success() {
        return Err(format!("the tests do not build ({})", output.status));
    }
    let messages = String::from_utf8_lossy(&output.stdout);
    let programs: Vec<_> = messages.lines().filter_map(TestProgram::from_message).collect();
    if programs.is_empty() {
        return Err("cargo reported no test programs".to_owned());
    }
    Ok(programs)
}

/// Runs the programs, `jobs` at a time but unit tests alone, and prints the output of each when it
/// ends. One that fails does not keep the others from running.
pub(crate) fn run(
    programs: Vec<TestProgram>,
    jobs: usize,
    environment: &[(&str, &OsStr)],
) -> Outcome {
    println!("\n== tests");
    let started = Instant::now();
    let (units, mut others): (Vec<_>, Vec<_>) =
        programs.into_iter().partition(|program| program.is_unit);
    // The largest run for the longest, so they are begun first.
    others.sort_by_key(|program| std::cmp::Reverse(program.size()));
    let mut failed = run_at_once(units, 1, environment);
    failed.extend(run_at_once(others, jobs, environment));
    println!("== tests: {:.0} s", started.elapsed().as_secs_f64());
    if failed.is_empty() { Ok(()) } else { Err(failed.join("\n")) }
}

/// Returns a message for each program that failed.
fn run_at_once(
    programs: Vec<TestProgram>,
    jobs: usize,
    environment: &[(&str, &OsStr)],
) -> Vec<String> {
    let waiting = Mutex::new(VecDeque::from(programs));
    let failed = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..jobs {
            scope.spawn(|| {
                while let Some(program) = next(&waiting) {
                    if let Err(message) = run_one(&program, environment) {
                        failed.lock().expect("no panic").push(message);
                    }
                }
            });
        }
    });
    failed.into_inner().expect("no panic")
}

fn next(waiting: &Mutex<VecDeque<TestProgram>>) -> Option<TestProgram> {
    waiting.lock().expect("no panic").pop_front()
}

fn run_one(program: &TestProgram, environment: &[(&str, &OsStr)]) -> Outcome {
    let (name, started) = (program.name(), Instant::now());
    let mut run = Command::new(&program.path);
    run.current_dir(&program.package).envs(environment.iter().copied()).stdin(Stdio::null());
    let output = run.output().map_err(|cause| format!("cannot start {name}: {cause}"))?;
    let mut stdout = std::io::stdout().lock();
    let duration = started.elapsed().as_secs_f64();
    let shown = writeln!(stdout, "\n-- {name}: {duration:.0} s")
        .and_then(|()| stdout.write_all(&output.stdout))
        .and_then(|()| stdout.write_all(&output.stderr));
    shown.map_err(|cause| format!("cannot print: {cause}"))?;
    if output.status.success() {
        Ok(())
    } else {
        Err(format!("tests failed in {name} ({})", output.status))
    }
}

#[cfg(test)]
mod tests {
    use super::TestProgram;

    #[test]
    fn only_test_programs_are_found_in_the_messages_of_cargo() {
        let message = |kind: &str, is_test: bool, executable: &str| {
            format!(
                r#"{{"reason":"compiler-artifact","manifest_path":"/w/crates/a/Cargo.toml",
                "target":{{"kind":["{kind}"],"name":"b","test":true}},"profile":{{"opt_level":"0","test":{is_test}}},
                "executable":{executable},"fresh":true}}"#
            )
        };
        let read = |kind, is_test, executable| {
            TestProgram::from_message(&message(kind, is_test, executable))
        };
        let program = read("test", true, r#""/w/target/deps/b-c-0f""#).expect("a test program");
        assert!(!program.is_unit);
        let unit_tests = read("lib", true, r#""/w/target/deps/a-0f""#).expect("a test program");
        assert!(unit_tests.is_unit);
        assert_eq!(program.name(), "a: b-c");
        assert_eq!(program.path.to_str(), Some("/w/target/deps/b-c-0f"));
        assert_eq!(program.package.to_str(), Some("/w/crates/a"));
        assert_eq!(read("bin", false, r#""/w/target/b""#), None);
        assert_eq!(read("test", true, "null"), None);
        assert_eq!(TestProgram::from_message(r#"{"reason":"build-finished"}"#), None);
    }
}
