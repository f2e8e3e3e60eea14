//! The figures that tests write, in one table: how much was tried, and what must have been tried.

use std::fs;
use std::path::PathBuf;

use crate::shell::{Outcome, root, target};

/// The variable that names the file to which tests append their figures.
pub(crate) const VARIABLE: &str = "SYNCGUARD_FIGURES";

/// What the figures whose names begin with a text must be. There must be at least one such figure.
pub(crate) type Required = (&'static str, std::ops::RangeInclusive<u64>);

/// For the tests.
pub(crate) const OF_TESTS: [Required; 4] = [
    ("fuzz runs: ", at_least(100_000)),
    ("histories that match the model: ", at_least(20_000)),
    ("protocol model: states", at_least(100_000)),
    ("schedules: ", at_least(20_000)),
];

/// For a brief torture.
pub(crate) const OF_TORTURE: [Required; 12] = [
    ("concurrent histories: ", at_least(200)),
    ("faults: ", at_least(1)),
    ("torture: SIGSTOP", at_least(30)),
    ("torture: connections cut", at_least(1_000)),
    ("torture: dropped futures", at_least(5_000)),
    ("torture: failovers", at_least(5)),
    ("torture: kill -9", at_least(30)),
    ("torture: planted bugs found", at_least(70)),
    ("torture: planted bugs missed", 0..=0),
    ("torture: stale writes accepted", 0..=0),
    ("torture: violations", 0..=0),
    ("torture: wrong releases", 0..=0),
];

const fn at_least(least: u64) -> std::ops::RangeInclusive<u64> {
    least..=u64::MAX
}

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

/// Prints the figures, sorted by name. Fails if one is missing, too small or too large.
pub(crate) fn print(path: &PathBuf, required: &[&[Required]]) -> Outcome {
    let text = fs::read_to_string(path).map_err(|cause| format!("{}: {cause}", path.display()))?;
    let mut figures: Vec<(&str, &str)> =
        text.lines().filter_map(|line| line.split_once('\t')).collect();
    figures.sort_unstable();
    println!("\n== figures");
    for (name, value) in &figures {
        println!("{name:60} {value:>14}");
    }
    check(&figures, required)
}

fn check(figures: &[(&str, &str)], required: &[&[Required]]) -> Outcome {
    for (prefix, range) in required.iter().copied().flatten() {
        let mut values = figures.iter().filter(|(name, _)| name.starts_with(prefix)).peekable();
        if values.peek().is_none() {
            return Err(format!("no test wrote a figure \"{prefix}…\""));
        }
        let is_in_range = |value: &str| value.parse().is_ok_and(|value| range.contains(&value));
        if let Some((name, value)) = values.find(|(_, value)| !is_in_range(value)) {
            let (least, most) = (range.start(), range.end());
            return Err(match *most {
                u64::MAX => format!("{name} is {value}; at least {least} are required"),
                most => format!("{name} is {value}; at most {most} are allowed"),
            });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::check;

    #[test]
    fn a_figure_that_is_missing_or_out_of_range_fails() {
        let required: &[&[super::Required]] = &[&[("runs: ", 5..=u64::MAX)], &[("bad", 0..=0)]];
        let figures = |runs, bad| [("runs: a", "9"), ("runs: b", runs), ("bad", bad)];
        assert!(check(&figures("5", "0"), required).is_ok());
        for (runs, bad) in [("4", "0"), ("5", "1"), ("5", "many")] {
            assert!(check(&figures(runs, bad), required).is_err(), "{runs} {bad}");
        }
        assert!(check(&figures("5", "0")[..2], required).is_err());
    }
}
