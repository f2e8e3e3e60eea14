//! Completions and manual pages, as shells and `man` use them.

mod support;

use std::process::Command;

use support::{stdout, syncguard};

/// Returns the completions that bash offers after these words.
fn bash_offers(words: &[&str]) -> Vec<String> {
    let script = stdout(&syncguard(&["completions", "bash"]).output().expect("runs"));
    let typed = words.iter().map(|word| format!("'{word}'")).collect::<Vec<_>>().join(" ");
    let ask = format!(
        "{script}\nCOMP_WORDS=({typed}); COMP_CWORD={}; COMP_LINE=\"${{COMP_WORDS[*]}}\"; \
         COMP_POINT=${{#COMP_LINE}}\n\
         _syncguard syncguard \"${{COMP_WORDS[COMP_CWORD]}}\" \"${{COMP_WORDS[COMP_CWORD-1]}}\"\n\
         printf '%s\\n' \"${{COMPREPLY[@]}}\"",
        words.len() - 1
    );
    let folder = test_support::TempDir::new();
    std::fs::write(folder.path().join("some-file"), "").expect("writable");
    let output = Command::new("bash")
        .args(["--norc", "-c", &ask])
        .current_dir(folder.path())
        .output()
        .expect("bash runs");
    stdout(&output).lines().filter(|line| !line.is_empty()).map(str::to_owned).collect()
}

#[test]
fn bash_completes_commands_and_nothing_internal() {
    let offered = bash_offers(&["syncguard", ""]);
    assert!(offered.contains(&"acquire".to_owned()), "{offered:?}");
    assert!(!offered.iter().any(|word| word.starts_with("__")), "{offered:?}");
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = stdout(&syncguard(&["completions", shell]).output().expect("runs"));
        assert!(script.contains("explain-key"), "{shell}");
        let mut words = script.split(|letter: char| !letter.is_alphanumeric() && letter != '_');
        assert!(!words.any(|word| word == "__watch"), "{shell}");
    }
}

#[test]
fn keys_and_durations_are_not_completed_as_files() {
    for words in [
        vec!["syncguard", "run", "--key", ""],
        vec!["syncguard", "run", "-k", "k", "--ttl", ""],
        vec!["syncguard", "run", "-k", "k", "--wait", "some"],
        vec!["syncguard", "status", "some"],
        vec!["syncguard", "run", "some"],
    ] {
        let offered = bash_offers(&words);
        assert!(!offered.contains(&"some-file".to_owned()), "{words:?}: {offered:?}");
    }
    let offered = bash_offers(&["syncguard", "ls", "--url-file", "some"]);
    assert_eq!(offered, ["some-file"]);
}

#[test]
fn after_the_dashes_the_shell_completes_the_command() {
    let offered = bash_offers(&["syncguard", "run", "-k", "k", "--", "flo"]);
    assert!(offered.contains(&"flock".to_owned()), "{offered:?}");
    assert!(!offered.iter().any(|word| word.starts_with("--")), "{offered:?}");
    let offered = bash_offers(&["syncguard", "run", "-k", "k", "--", "cat", "some"]);
    assert!(offered.contains(&"some-file".to_owned()), "{offered:?}");
}

#[test]
fn fish_completes_the_same() {
    // Only if fish is installed; no other test needs it.
    if Command::new("fish").arg("--version").output().is_err() {
        return println!("skipped: fish is not installed");
    }
    let script = stdout(&syncguard(&["completions", "fish"]).output().expect("runs"));
    let folder = test_support::TempDir::new();
    std::fs::write(folder.path().join("some-file"), "").expect("writable");
    let offers = |typed: &str| {
        let ask = format!("{script}\ncomplete -C '{typed}'");
        let mut fish = Command::new("fish");
        fish.args(["--no-config", "-c", &ask]).env("HOME", folder.path());
        stdout(&fish.current_dir(folder.path()).output().expect("fish runs"))
    };
    assert!(offers("syncguard run -k k -- flo").contains("flock"));
    assert!(offers("syncguard run -k k -- cat some").contains("some-file"));
    assert!(!offers("syncguard run -k some").contains("some-file"));
    assert!(!offers("syncguard status some").contains("some-file"));
    assert!(offers("syncguard ls --url-file some").contains("some-file"));
}

#[test]
fn the_manual_lists_exit_codes_and_refers_to_pages_that_exist() {
    let folder = test_support::TempDir::new();
    let path = folder.path().display().to_string();
    assert!(syncguard(&["man", &path]).status().expect("runs").success());
    let pages: Vec<_> = std::fs::read_dir(folder.path()).expect("there").collect();
    assert!(pages.len() > 10, "{pages:?}");
    for page in pages {
        let page = page.expect("readable");
        let text = std::fs::read_to_string(page.path()).expect("a page");
        let text = text.replace("\\-", "-");
        for word in
            text.split(|letter: char| !(letter.is_alphanumeric() || "-()_".contains(letter)))
        {
            if let Some(name) =
                word.strip_suffix("(1)").filter(|name| name.starts_with("syncguard"))
            {
                let file = folder.path().join(format!("{name}.1"));
                assert!(file.exists(), "{:?} refers to {name}(1)", page.file_name());
            }
        }
        assert!(!text.contains("__watch"), "{:?}", page.file_name());
    }
    let run = std::fs::read_to_string(folder.path().join("syncguard-run.1")).expect("a page");
    let run = run.replace("\\-", "-");
    let synopsis = run.split(".SH").find(|section| section.trim_start().starts_with("SYNOPSIS"));
    assert!(
        synopsis.expect("a synopsis").contains("--\\fR") || synopsis.expect("one").contains(" -- "),
        "{synopsis:?}"
    );
    let page = stdout(&syncguard(&["man"]).output().expect("runs"));
    let codes = page.split(".SH").find(|section| section.contains("EXIT STATUS"));
    let codes = codes.expect("a section of its own");
    assert!(codes.matches(".TP").count() >= 9, "{codes}");
    assert!(codes.contains("\n\\fB122\\fR\n") && codes.contains("\n\\fB123\\fR\n"), "{codes}");
}
