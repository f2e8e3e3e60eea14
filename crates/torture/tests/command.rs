//! The command itself: a short run without faults of the library, and one with a planted bug.

use std::path::PathBuf;
use std::process::{Command, Output};

use test_support::TempDir;

fn torture(arguments: &[&str]) -> (Output, String) {
    let directory = TempDir::new();
    let out = directory.path().display().to_string();
    let mut command = Command::new(env!("CARGO_BIN_EXE_torture"));
    // The table of figures is about the stores, not about this test.
    command.args(arguments).args(["--out", &out]).env_remove("SYNCGUARD_FIGURES");
    let output = command.output().expect("it starts");
    let report = PathBuf::from(out).join("report.html");
    (output, std::fs::read_to_string(report).unwrap_or_default())
}

#[test]
fn a_correct_backend_keeps_its_promises_and_the_report_is_self_contained() {
    let (output, report) = torture(&["memory", "--seconds", "6", "--seed", "1"]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}");
    assert!(text.contains("seed: 1\n") && text.contains("; 0 violations"), "{text}");
    assert!(report.contains(r#""name":"memory""#), "the report has the run");
    for foreign in ["http://", "https://", "src=", "href=", "@import", "torture-canary"] {
        assert!(!report.contains(foreign), "the report contains {foreign}");
    }
}

#[test]
fn a_planted_bug_is_found_and_the_report_says_how_to_repeat_it() {
    let arguments = ["memory", "--seconds", "20", "--seed", "3", "--bug", "release-ignores-owner"];
    let (output, report) = torture(&arguments);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}");
    assert!(text.contains(" violations") && !text.contains("; 0 violations"), "{text}");
    let command = "torture memory --seconds 20 --seed 3 --bug release-ignores-owner";
    assert!(report.contains(command), "the report has the command");
}

#[test]
fn wrong_arguments_are_refused_before_anything_starts() {
    for arguments in [&["oracle"][..], &["--bug", "none"], &["--seconds", "0"], &["--seed"]] {
        let (output, report) = torture(arguments);
        assert!(!output.status.success() && report.is_empty(), "{arguments:?}");
    }
}
