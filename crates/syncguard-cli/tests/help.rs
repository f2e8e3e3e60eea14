//! The binary as a person meets it first.

use std::process::{Command, Output};

fn syncguard(arguments: &[&str]) -> Output {
    let binary = env!("CARGO_BIN_EXE_syncguard");
    Command::new(binary).args(arguments).output().expect("the binary runs")
}

#[test]
fn version_names_the_command_and_its_version() {
    let output = syncguard(&["--version"]);
    assert!(output.status.success());
    let expected = format!("syncguard {}\n", env!("CARGO_PKG_VERSION"));
    assert_eq!(String::from_utf8_lossy(&output.stdout), expected);
}

#[test]
fn help_says_what_it_is_for() {
    let output = syncguard(&["--help"]);
    assert!(output.status.success());
    let help = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(help.starts_with("Run commands while holding a distributed lock\n"), "{help}");
}

#[test]
fn nonsense_is_a_usage_error() {
    assert_eq!(syncguard(&[]).status.code(), Some(2));
    assert_eq!(syncguard(&["--nonsense"]).status.code(), Some(2));
}
