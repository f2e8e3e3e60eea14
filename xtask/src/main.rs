//! The project's own commands, the same on a laptop and in CI.

mod bench;
mod cargo_mutants;
mod figures;
mod mutants;
mod programs;
mod release;
mod report;
mod shell;
mod test;
mod text;
mod tools;
mod torture;

use std::process::ExitCode;

use shell::Outcome;

const USAGE: &str = "\
usage: cargo xtask COMMAND

  test [BACKEND…]    run all checks and tests, or only the tests of the named backends
  bench [BACKEND…]   run the benchmarks, and write target/bench/report.html
  release            build packages and the stripped binary, and print its size
  torture [BACKEND…] [--minutes N] [--seed S] | --brief
                     inject faults into real stores, check what happened, and write
                     target/torture/report.html
  soak               run the long tests that are too slow for CI
  mutants [TEXT…]    plant one bug at a time, and check that the tests catch it; only those whose
                     name contains a TEXT

backends: firestore, memory, postgres, redis, sqlite
other benchmarks: cli, fences, growth, primitives, rivals (other libraries)
";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (command, rest) = match arguments.split_first() {
        Some((command, rest)) => (command.as_str(), rest),
        None => ("help", [].as_slice()),
    };
    let outcome: Outcome = match command {
        "test" => test::run(rest),
        "bench" => bench::run(rest),
        "release" => release::run(),
        "soak" => test::soak(),
        "torture" => torture::run(rest),
        "mutants" => mutants::run(rest),
        "help" | "--help" | "-h" => {
            print!("{USAGE}");
            Ok(())
        }
        unknown => Err(format!("unknown command {unknown}\n\n{USAGE}")),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("xtask: {message}");
            ExitCode::FAILURE
        }
    }
}
