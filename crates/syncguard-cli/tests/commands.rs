//! The commands other than `run`, tested with the real binary on SQLite, Redis and Firestore, and
//! usage errors.

mod support;

use std::fmt::Write as _;
use std::io::{BufRead as _, Write as _};
use std::path::Path;
use std::process::Stdio;

use serde_json::Value;
use support::{Store, json, stderr, stdout, syncguard};

#[test]
fn scripts_can_acquire_extend_and_release_a_lock() {
    for store in Store::all() {
        let output = store.run(&["acquire", "--key", "k", "--ttl", "1m"]);
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        let lock_id = stdout(&output).trim().to_owned();
        assert_eq!(lock_id.len(), 22);
        assert!(!stderr(&output).contains(&lock_id), "the lock id is data, not a message");
        assert_eq!(store.code(&["acquire", "--key", "k", "--no-wait"]), 124);
        assert_eq!(store.code(&["status", "k"]), 0);
        assert_eq!(store.code(&["owns", &lock_id]), 0);
        assert_eq!(store.code(&["extend", &lock_id, "--ttl", "2m"]), 0);
        // From standard input, which hides it from `ps`.
        let mut owns = store.command(&["owns", "-"]);
        let mut owns = owns.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().expect("runs");
        let mut stdin = owns.stdin.take().expect("piped");
        writeln!(stdin, "{lock_id}").expect("it reads");
        drop(stdin);
        assert_eq!(owns.wait().expect("ends").code(), Some(0));
        assert_eq!(store.code(&["release", &lock_id]), 0);
        for again in ["release", "extend", "owns"] {
            assert_eq!(store.code(&[again, &lock_id]), 1, "{again}");
        }
        assert_eq!(store.code(&["status", "k"]), 1);
    }
}

#[test]
fn json_output_has_the_documented_fields() {
    for store in Store::all() {
        let receipt = json(&store.run(&["acquire", "--key", "k", "--format", "json"]));
        assert_eq!(receipt["fence"], "000000000000001");
        assert!(receipt["expiresAtMs"].is_u64());
        let lock_id = receipt["lockId"].as_str().expect("a text").to_owned();
        let status = json(&store.run(&["status", "k", "--format", "json"]));
        assert_eq!(status["locked"], true);
        assert_eq!(status["lock"]["fence"], "000000000000001");
        assert!(status["lock"]["holder"]["pid"].is_u64(), "{status}");
        let list = store.run(&["ls", "--format", "json"]);
        assert!(!stdout(&list).contains(&lock_id), "ls shows no lock ids");
        let list = json(&list);
        assert_eq!(list["locks"].as_array().expect("a list").len(), 1);
        assert_eq!(list["locks"][0]["key"], "k");
        assert!(list["locks"][0]["keyHash"].is_string());
        let list = json(&store.run(&["ls", "--hashed", "--format", "json"]));
        assert!(list["locks"][0].get("key").is_none(), "hashed");
        let extended = json(&store.run(&["extend", &lock_id, "--format", "json"]));
        assert_eq!(extended["extended"], true);
        let broken = json(&store.run(&["break", "k", "--yes", "--format", "json"]));
        assert_eq!(broken["broken"], true);
        let released = json(&store.run(&["release", &lock_id, "--format", "json"]));
        assert_eq!(released["released"], false);
        let explained = json(&store.run(&["explain-key", "k", "--format", "json"]));
        assert_eq!(explained["records"][0]["what"], "lock");
        let free = json(&store.run(&["status", "k", "--format", "json"]));
        assert_eq!(free["locked"], false);
        assert_eq!(json(&store.run(&["setup", "--format", "json"]))["ready"], true);
    }
}

#[test]
fn ls_lists_only_held_locks() {
    for store in Store::all() {
        assert_eq!(store.code(&["setup"]), 0);
        assert_eq!(stdout(&store.run(&["ls"])), "");
        for number in 0..5 {
            assert_eq!(
                store.code(&["acquire", "-q", "--key", &format!("key\u{1b}[2J {number}")]),
                0
            );
            // A released lock leaves its fence counter behind, which must not be listed.
            assert_eq!(
                store.code(&["run", "-q", "--key", &format!("free {number}"), "--", "true"]),
                0
            );
        }
        let shown = stdout(&store.run(&["ls"]));
        let (header, rows) = shown.split_once('\n').expect("a header");
        let columns: Vec<&str> =
            header.split("  ").map(str::trim).filter(|c| !c.is_empty()).collect();
        assert_eq!(columns, ["KEY", "HOLDER", "HELD FOR", "EXPIRES IN", "FENCE"]);
        assert_eq!(rows.lines().count(), 5, "{shown}");
        assert!(rows.lines().is_sorted(), "{shown}");
        let is_escaped = |line: &str| line.starts_with("key\\u{1b}[2J") && !line.contains('\u{1b}');
        assert!(rows.lines().all(is_escaped), "{shown}");
        assert!(rows.lines().all(|line| line.contains(", pid ")), "{shown}");
        let hashed = stdout(&store.run(&["ls", "--hashed"]));
        assert!(!hashed.contains("key"), "{hashed}");
    }
}

#[test]
fn ls_selects_by_prefix_holder_age_and_count() {
    for store in Store::all() {
        for (key, label) in [("a:1", "web"), ("a:2", "worker"), ("b:1", "worker")] {
            assert_eq!(store.code(&["acquire", "-q", "-k", key, "--label", label]), 0);
        }
        let keys = |options: &[&str]| {
            let output = store.run(&[&["ls", "--format", "json"], options].concat());
            let list = json(&output);
            let keys = list["locks"].as_array().expect("a list").iter();
            keys.map(|lock| lock["key"].as_str().expect("a key").to_owned()).collect::<Vec<_>>()
        };
        assert_eq!(keys(&[]), ["a:1", "a:2", "b:1"]);
        assert_eq!(keys(&["--prefix", "a:"]), ["a:1", "a:2"]);
        assert_eq!(keys(&["--holder", "worker"]), ["a:2", "b:1"]);
        assert_eq!(keys(&["--older-than", "1h"]), [""; 0]);
        assert_eq!(keys(&["--older-than", "0ms", "--prefix", "b"]), ["b:1"]);
        assert_eq!(keys(&["--limit", "2"]), ["a:1", "a:2"]);
        let output = store.run(&["ls", "--limit", "2"]);
        assert!(stderr(&output).contains("1 more locks are not shown"), "{}", stderr(&output));
        let no_holder = ["acquire", "-q", "-k", "c", "--no-holder"];
        assert_eq!(store.code(&no_holder), 0);
        let status = stdout(&store.run(&["status", "c"]));
        assert!(status.starts_with("held for "), "{status}");
    }
}

#[test]
fn ls_and_status_count_waiting_processes() {
    for store in Store::all().into_iter().filter(|store| store.emulator.is_none()) {
        assert_eq!(store.code(&["acquire", "-q", "-k", "k"]), 0);
        let waiters =
            || json(&store.run(&["status", "k", "--format", "json"]))["lock"]["waiters"].clone();
        assert_eq!(waiters(), 0);
        let mut waiting = ["1", "2"].map(|_| {
            let mut command =
                store.command(&["run", "-q", "-k", "k", "--wait", "20s", "--", "true"]);
            command.spawn().expect("runs")
        });
        support::eventually("both wait", || waiters() == 2);
        let listed = json(&store.run(&["ls", "--waiters", "--format", "json"]));
        assert_eq!(listed["locks"][0]["waiters"], 2);
        let status = stdout(&store.run(&["status", "k"]));
        assert!(status.contains(", 2 processes wait"), "{status}");
        assert_eq!(store.code(&["break", "-q", "k", "--yes"]), 0);
        for child in &mut waiting {
            assert!(support::end_of(child).success());
        }
    }
}

/// Reads lines of a child until one of them fits.
fn line_with(lines: &mut impl Iterator<Item = std::io::Result<String>>, event: &str) -> Value {
    for line in lines {
        let line: Value = serde_json::from_str(&line.expect("text")).expect("JSON");
        if line["event"] == event {
            return line;
        }
    }
    panic!("no {event}")
}

#[test]
fn watch_prints_a_line_for_every_change() {
    for store in Store::all() {
        assert_eq!(store.code(&["setup"]), 0);
        for keys in [&["k"][..], &[]] {
            let arguments = [&["watch", "--format", "json", "--interval", "100ms"], keys].concat();
            let mut watching = store.command(&arguments);
            let mut watching = watching.stdout(Stdio::piped()).spawn().expect("runs");
            let mut lines = std::io::BufReader::new(watching.stdout.take().expect("piped")).lines();
            // It has looked once before the lock is taken.
            std::thread::sleep(std::time::Duration::from_millis(1500));
            let taken =
                json(&store.run(&["acquire", "-k", "k", "--label", "me", "--format", "json"]));
            let acquired = line_with(&mut lines, "acquired");
            assert_eq!((&acquired["key"], &acquired["fence"]), (&"k".into(), &taken["fence"]));
            assert_eq!(acquired["holder"]["label"], "me");
            let lock_id = taken["lockId"].as_str().expect("a text");
            assert_eq!(store.code(&["release", lock_id]), 0);
            let released = line_with(&mut lines, "released");
            assert!(released["durationMs"].is_u64(), "{released}");
            assert_eq!(store.code(&["acquire", "-q", "-k", "k", "--ttl", "200ms"]), 0);
            line_with(&mut lines, "acquired");
            line_with(&mut lines, "expired");
            assert_eq!(store.code(&["acquire", "-q", "-k", "k"]), 0);
            line_with(&mut lines, "acquired");
            assert_eq!(store.code(&["break", "-q", "k", "--yes", "--reason", "a test"]), 0);
            // Firestore has no place for the note.
            if store.emulator.is_none() {
                let broken = line_with(&mut lines, "broken");
                assert_eq!(broken["reason"], "a test");
                assert!(broken["by"]["pid"].is_u64(), "{broken}");
            } else {
                line_with(&mut lines, "released");
            }
            watching.kill().expect("runs");
            watching.wait().expect("ends");
        }
    }
}

#[test]
fn a_watch_goes_on_after_the_store_was_away_and_says_so() {
    let Some(mut store) = Store::redis() else { return };
    let mut watching = store.command(&["watch", "k", "--format", "json", "--interval", "100ms"]);
    let mut watching = watching.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("runs");
    let mut lines = std::io::BufReader::new(watching.stdout.take().expect("piped")).lines();
    std::thread::sleep(std::time::Duration::from_millis(1500));
    let redis = store.redis.as_mut().expect("Redis");
    redis.crash();
    // Longer than the interval, or the watch does not notice.
    std::thread::sleep(std::time::Duration::from_millis(500));
    redis.run();
    assert!(line_with(&mut lines, "gap")["durationMs"].is_u64());
    assert_eq!(store.code(&["acquire", "-q", "-k", "k"]), 0);
    assert_eq!(line_with(&mut lines, "acquired")["key"], "k");
    watching.kill().expect("runs");
    watching.wait().expect("ends");
}

/// A store may list a lock twice.
#[test]
fn a_watch_reports_a_change_once() {
    let store = Store::sqlite();
    assert_eq!(store.code(&["setup"]), 0);
    let mut watching =
        store.command(&["watch", "k", "k", "--format", "json", "--interval", "100ms"]);
    let mut watching = watching.stdout(Stdio::piped()).spawn().expect("runs");
    let mut lines = std::io::BufReader::new(watching.stdout.take().expect("piped")).lines();
    assert_eq!(store.code(&["acquire", "-q", "-k", "k"]), 0);
    lines.next().expect("a line").expect("readable");
    std::thread::sleep(std::time::Duration::from_millis(500));
    watching.kill().expect("runs");
    let more: Vec<String> = lines.map_while(Result::ok).collect();
    assert!(more.is_empty(), "{more:?}");
    watching.wait().expect("ends");
}

#[test]
fn break_asks_for_confirmation_and_needs_a_terminal() {
    for store in Store::all() {
        assert_eq!(store.code(&["setup"]), 0);
        assert_eq!(store.code(&["break", "k", "--yes"]), 1, "there is nothing to break");
        assert_eq!(store.code(&["acquire", "-q", "--key", "k"]), 0);
        let output = store.command(&["break", "k"]).stdin(Stdio::null()).output().expect("runs");
        assert_eq!(output.status.code(), Some(2));
        assert!(stderr(&output).contains("use --yes"), "{}", stderr(&output));
        assert_eq!(store.code(&["status", "k"]), 0, "nothing was changed");
        assert_eq!(store.code(&["break", "k", "--yes"]), 0);
        assert_eq!(store.code(&["status", "k"]), 1);
    }
}

#[test]
fn doctor_reports_problems() {
    for store in Store::all() {
        assert_eq!(store.code(&["setup"]), 0);
        let diagnosis = json(&store.run(&["doctor", "--format", "json"]));
        let checks = diagnosis["checks"].as_array().expect("a list");
        let subjects: Vec<_> = checks.iter().map(|check| check["subject"].as_str()).collect();
        let is_ok = |subject: &str| {
            let check = checks.iter().find(|check| check["subject"] == subject);
            check.is_some_and(|check| check["severity"] == "ok")
        };
        assert!(is_ok("reachable") && is_ok("rights") && is_ok("clock"), "{subjects:?}");
        // The test servers keep nothing on disk, which doctor reports.
        assert_eq!(subjects.contains(&Some("aof")), store.redis.is_some());
        assert_eq!(subjects.contains(&Some("emulator")), store.emulator.is_some());
        let is_lasting = store.redis.is_none() && store.emulator.is_none();
        assert_eq!(store.code(&["doctor"]), 0, "warnings are not errors");
        assert_eq!(store.code(&["doctor", "--strict"]), i32::from(!is_lasting));
        assert_eq!(store.code(&["status", "syncguard-doctor"]), 1, "it leaves no lock behind");
    }
    let output = syncguard(&["doctor", "--url", "redis://127.0.0.1:1/0"]).output().expect("runs");
    assert_eq!(output.status.code(), Some(1));
    assert!(stdout(&output).contains("error reachable"), "{}", stdout(&output));
}

#[test]
fn the_url_comes_from_an_option_a_file_or_the_environment() {
    let store = Store::sqlite();
    std::fs::write(store.path("url"), format!("{}\n", store.url)).expect("written");
    let file = store.path("url").display().to_string();
    assert_eq!(store.code(&["acquire", "-q", "--key", "k"]), 0);
    let code = |arguments: &[&str]| syncguard(arguments).output().expect("runs").status.code();
    assert_eq!(code(&["status", "k", "--url-file", &file]), Some(0));
    assert_eq!(code(&["status", "k", "--url", &store.url]), Some(0));
    assert_eq!(code(&["status", "k", "--url", "memory:"]), Some(1));
    // An option takes precedence over the environment.
    assert_eq!(store.code(&["status", "k", "--url", "memory:"]), 1);
    assert_eq!(code(&["status", "k", "--url-file", "/no/such/file"]), Some(125));
}

#[test]
fn missing_firestore_credentials_are_explained() {
    let broken = test_support::TempDir::new();
    let nonsense = broken.path().join("credentials.json");
    std::fs::write(&nonsense, r#"{"type": "canary"}"#).expect("writable");
    let missing = broken.path().join("canary.json");
    for (variable, value) in [
        // No metadata server, and no credentials file.
        ("GCE_METADATA_HOST", Path::new("127.0.0.1:9")),
        ("GOOGLE_APPLICATION_CREDENTIALS", &nonsense),
        ("GOOGLE_APPLICATION_CREDENTIALS", &missing),
    ] {
        let mut command = syncguard(&["status", "k", "--url", "firestore://project"]);
        let output = command.env("HOME", broken.path()).env(variable, value).output();
        let output = output.expect("the binary runs");
        assert_eq!(output.status.code(), Some(125));
        let printed = stderr(&output);
        assert!(printed.contains("GOOGLE_APPLICATION_CREDENTIALS"), "{printed}");
        assert!(!printed.contains("canary"), "{printed}");
    }
}

#[test]
fn completions_and_manual_pages_are_generated() {
    for shell in ["bash", "zsh", "fish"] {
        let output = syncguard(&["completions", shell]).output().expect("runs");
        assert!(stdout(&output).contains("explain-key"), "{shell}");
    }
    let page = stdout(&syncguard(&["man"]).output().expect("runs"));
    assert!(page.contains(".TH syncguard 1"), "{page}");
    let folder = test_support::TempDir::new();
    let path = folder.path().display().to_string();
    assert!(syncguard(&["man", &path]).status().expect("runs").success());
    assert!(folder.path().join("syncguard-run.1").exists());
    assert!(folder.path().join("syncguard-fence-check.1").exists());
}

/// Compares a text with a snapshot file. `SYNCGUARD_UPDATE_SNAPSHOTS=1` writes the file first.
fn matches_snapshot(name: &str, text: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/snapshots").join(name);
    if std::env::var_os("SYNCGUARD_UPDATE_SNAPSHOTS").is_some() {
        std::fs::write(&path, text).expect("written");
    }
    let expected = std::fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(text, expected, "{name}; to update it, set SYNCGUARD_UPDATE_SNAPSHOTS=1");
}

#[test]
fn help_matches_the_snapshots() {
    for command in [
        "",
        "run",
        "elect",
        "acquire",
        "release",
        "extend",
        "status",
        "wait",
        "owns",
        "ls",
        "watch",
        "break",
        "explain-key",
        "url",
        "setup",
        "fence",
        "fence check",
        "gc",
        "doctor",
        "ui",
        "completions",
        "man",
    ] {
        let arguments: Vec<&str> = command.split_whitespace().chain(["--help"]).collect();
        let output = syncguard(&arguments).env("COLUMNS", "100").output().expect("runs");
        assert!(output.status.success());
        let name = if command.is_empty() { "syncguard" } else { command };
        let file = format!("help-{}.txt", name.replace(' ', "-"));
        matches_snapshot(&file, &stdout(&output));
    }
    let version = stdout(&syncguard(&["--version"]).output().expect("runs"));
    assert_eq!(version, format!("syncguard {}\n", env!("CARGO_PKG_VERSION")));
}

#[test]
fn errors_match_the_snapshot() {
    let long = "k".repeat(600);
    let password = "redis://user:canary@127.0.0.1:1/0";
    let mut shown = String::new();
    for (arguments, code) in [
        (vec!["run", "--key", "k"], 2),
        (vec!["run", "--", "true"], 2),
        (vec!["run", "--key", "", "--", "true"], 2),
        (vec!["run", "--key", &long, "--", "true"], 2),
        (vec!["run", "--key", "k", "--ttl", "soon", "--", "true"], 2),
        (vec!["run", "--key", "k", "--ttl", "0s", "--", "true"], 2),
        (vec!["run", "--key", "k", "--wait", "never", "--", "true"], 2),
        (vec!["run", "--key", "k", "--wait", "1s", "--no-wait", "--", "true"], 2),
        (vec!["run", "--key", "k", "--max-hold", "-1s", "--", "true"], 2),
        (vec!["run", "--key", "k", "--hold-at-least", "25h", "--", "true"], 2),
        (vec!["release", "no-lock-id"], 2),
        (vec!["release", "-no-lock-id"], 2),
        (vec!["doctor", "--url", "ftp://host"], 2),
        (vec!["status", "k", "--url", "ftp://host"], 2),
        (vec!["status", "k", "--url", "redis://h/0?colour=red"], 2),
        (vec!["status", "k", "--url", password], 125),
        (vec!["status", "k", "--url", "sqlite:/no/such/folder/locks.db"], 125),
        (vec!["status", "k", "--url", "sqlite:/no-such-locks.db"], 125),
        (vec!["status", "k", "--quiet", "--verbose"], 2),
        (vec!["nonsense"], 2),
        (vec![], 2),
    ] {
        let output = syncguard(&arguments).env("COLUMNS", "100").output().expect("runs");
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {}", stderr(&output));
        assert_eq!(stdout(&output), "", "{arguments:?}");
        assert!(!stderr(&output).contains("canary"), "{}", stderr(&output));
        if !arguments.is_empty() {
            let typed = arguments.join(" ").replace(&long, "kkk…");
            writeln!(shown, "$ syncguard {typed}\n{}", stderr(&output)).expect("a text");
        }
    }
    matches_snapshot("errors.txt", &shown);
}
