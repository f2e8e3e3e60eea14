//! The figures that tests write, in one table: how much was tried, and what must have been tried.

use std::fs;
use std::path::PathBuf;

use crate::shell::{Outcome, root, target};

/// The variable that names the file to which tests append their figures.
pub(crate) const VARIABLE: &str = "SYNCGUARD_FIGURES";

/// The least value of every figure whose name begins with a text. There must be one such figure.
pub(crate) const OF_TESTS: [(&str, u64); 4] = [
    ("fuzz runs: ", 100_000),
    ("histories that match the model: ", 20_000),
    ("protocol model: states", 100_000),
    ("schedules: ", 20_000),
];

/// The same for a brief torture.
pub(crate) const OF_TORTURE: [(&str, u64); 7] = [
    ("concurrent histories: ", 200),
    ("torture: SIGSTOP", 30),
    ("torture: connections cut", 1_000),
    ("torture: dropped futures", 5_000),
    ("torture: failovers", 5),
    ("torture: kill -9", 30),
    ("torture: planted bugs found", 50),
];

/// Deletes the figures of an earlier run, and returns the file for those of this one.
pub(crate) fn file() -> Outcome<PathBuf> {
    let path = root().join(target()).join("figures.tsv");
    match fs::remove_file(&path) {
        Err(cause) if cause.kind() != std::io::ErrorKind::NotFound => {
            Err(format!("{}: {cause}", path.display()))
        }
        _ => Ok(path),
    }
}

/// Prints the figures, sorted by name. Fails if one is missing or too small.
pub(crate) fn print(path: &PathBuf, least: &[(&str, u64)]) -> Outcome {
    let text = fs::read_to_string(path).map_err(|cause| format!("{}: {cause}", path.display()))?;
    let mut figures: Vec<(&str, &str)> =
        text.lines().filter_map(|line| line.split_once('\t')).collect();
    figures.sort_unstable();
    println!("\n== figures");
    for (name, value) in &figures {
        println!("{name:60} {value:>14}");
    }
    for &(prefix, least) in least {
        let mut values = figures.iter().filter(|(name, _)| name.starts_with(prefix)).peekable();
        if values.peek().is_none() {
            return Err(format!("no test wrote a figure \"{prefix}…\""));
        }
        let is_small = |value: &str| value.parse::<u64>().is_ok_and(|value| value < least);
        if let Some((name, value)) = values.find(|(_, value)| is_small(value)) {
            return Err(format!("{name} is {value}; at least {least} are required"));
        }
    }
    Ok(())
}
