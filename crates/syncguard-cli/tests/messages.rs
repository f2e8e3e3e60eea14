//! Output: escapes, events, exit codes, messages, and the progress line at a terminal.

mod support;

use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::Value;
use support::{Store, end_of, stderr, stdout, syncguard};

/// Control, bidirectional and zero-width characters.
const NASTY: &str = "a\u{7f}b\u{9b}c\u{202e}d\u{200b}e\u{2028}f\u{1b}[2Jg\u{feff}h\u{2066}i\\u";
const RAW: [char; 8] =
    ['\u{7f}', '\u{9b}', '\u{202e}', '\u{200b}', '\u{2028}', '\u{1b}', '\u{feff}', '\u{2066}'];

fn is_clean(text: &str) -> bool {
    !text.contains(RAW)
}

#[test]
fn control_characters_are_escaped_and_not_dropped() {
    for store in Store::all() {
        assert_eq!(store.code(&["acquire", "-q", "-k", NASTY]), 0);
        for arguments in [vec!["ls"], vec!["explain-key", NASTY]] {
            let json = [&arguments[..], &["--format", "json"]].concat();
            let shown = stdout(&store.run(&json));
            assert!(is_clean(&shown), "{shown:?}");
            let data: Value = serde_json::from_str(&shown).expect("JSON");
            let key =
                if data["locks"].is_array() { &data["locks"][0]["key"] } else { &data["key"] };
            assert_eq!(key, NASTY);
            let shown = stdout(&store.run(&arguments));
            assert!(is_clean(&shown), "{shown:?}");
            assert!(shown.contains("a\\u{7f}b\\u{9b}c\\u{202e}d\\u{200b}e\\u{2028}f"), "{shown:?}");
            assert!(shown.contains("i\\\\u"), "a backslash is escaped too: {shown:?}");
        }
    }
}

#[test]
fn arguments_are_escaped_in_errors() {
    let store = Store::sqlite();
    for arguments in [
        vec!["run", "-q", "-k", "k", "--", "no\u{1b}[31m\u{202e}such"],
        vec!["run", "-k", "k", "--ttl", "x\u{1b}[31m\u{202e}", "--", "true"],
        vec!["no\u{1b}[31m\u{202e}such"],
    ] {
        let shown = stderr(&store.run(&arguments));
        assert!(is_clean(&shown) && shown.contains("\\u{1b}[31m\\u{202e}"), "{shown:?}");
    }
}

fn events(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

#[test]
fn run_prints_its_events_as_json() {
    let store = Store::sqlite();
    let mut holder = store.background(&["-k", "k"], "echo x >$FOLDER/held; sleep 1");
    store.wait_for("held");
    let run = ["run", "--format", "json", "-k", "k", "--", "echo", "data"];
    let output = store.run(&run);
    assert!(end_of(&mut holder).success());
    assert_eq!(stdout(&output), "data\n", "only the output of the command");
    let events = events(&stderr(&output));
    let named = |name: &str| events.iter().find(|event| event["event"] == name);
    let acquired = named("acquired").expect("an event");
    assert_eq!(acquired["key"], "k");
    assert_eq!(acquired["fence"], "000000000000002");
    assert!(acquired["waitedMs"].is_u64(), "{acquired}");
    assert!(named("released").is_some(), "{events:?}");
}

#[test]
fn failures_are_json_with_format_json() {
    let store = Store::sqlite();
    assert_eq!(store.code(&["acquire", "-q", "-k", "k"]), 0);
    let output = store.run(&["run", "--format", "json", "-k", "k", "--no-wait", "--", "true"]);
    assert_eq!(output.status.code(), Some(124));
    let events = events(&stderr(&output));
    let failed = events.iter().find(|event| event["event"] == "error").expect("an event");
    assert_eq!(failed["exitCode"], 124, "{failed}");
    assert!(failed["message"].is_string());
}

#[test]
fn verbose_prints_events() {
    for store in Store::all() {
        let arguments = ["run", "-v", "-k", "job", "--ttl", "6s", "--", "sleep", "2.5"];
        let printed = stderr(&store.run(&arguments));
        for (word, more) in [
            ("acquired", "'job'"),
            ("acquired", "fence 000000000000001"),
            ("renewed", "'job'"),
            ("released", "'job'"),
        ] {
            let is_reported = |line: &str| {
                line.starts_with("syncguard: ") && line.contains(word) && line.contains(more)
            };
            assert!(printed.lines().any(is_reported), "{word} {more}: {printed}");
        }
        assert_eq!(stderr(&store.run(&["run", "-k", "job", "--", "true"])), "");
    }
}

#[test]
fn verbose_reports_waiting_without_a_terminal() {
    let store = Store::sqlite();
    assert_eq!(store.code(&["acquire", "-q", "-k", "k"]), 0);
    let output = store.run(&["run", "-v", "-k", "k", "--wait", "1s", "--", "true"]);
    let printed = stderr(&output);
    let line = printed.lines().find(|line| line.starts_with("syncguard: waiting for k: held by "));
    let line = line.unwrap_or_else(|| panic!("{printed}"));
    assert!(line.contains(", pid ") && line.contains(", syncguard, for "), "{line}");
    assert!(!stderr(&output).contains('\u{1b}'), "{}", stderr(&output));
}

#[test]
fn no_color_applies_to_the_log() {
    let Some(store) = Store::redis() else { return };
    let command = "$SYNCGUARD run -vv -k k -- true";
    for (variable, value) in [("NO_COLOR", "1"), ("TERM", "dumb")] {
        let output = Command::new("script")
            .args(["-qec", command, "/dev/null"])
            .env_remove("NO_COLOR")
            .env("TERM", "xterm")
            .env("SYNCGUARD_URL", &store.url)
            .env("SYNCGUARD", env!("CARGO_BIN_EXE_syncguard"))
            .env(variable, value)
            .stdin(Stdio::null())
            .output()
            .expect("script runs");
        let shown = stdout(&output);
        assert!(shown.contains("acquired"), "{shown:?}");
        assert!(!shown.contains('\u{1b}'), "{variable}: {shown:?}");
    }
}

/// Returns what a terminal of this width and kind shows while a run waits for a long key.
fn waiting_at_a_terminal(store: &Store, columns: u16, term: &str) -> String {
    let key = "a-long-name-with-\u{1b}[2J-and-日本語-".repeat(4);
    assert_eq!(store.code(&["acquire", "-q", "-k", &key, "--ttl", "1m"]), 0);
    let command = format!(
        "stty cols {columns} rows 24; $SYNCGUARD run -k \"$LONG\" --wait 3s -- true; \
         echo \"code $?\""
    );
    let output = Command::new("script")
        .args(["-qec", &command, "/dev/null"])
        .env("TERM", term)
        .env("NO_COLOR", "1")
        .env("LONG", &key)
        .env("SYNCGUARD_URL", &store.url)
        .env("SYNCGUARD", env!("CARGO_BIN_EXE_syncguard"))
        .stdin(Stdio::null())
        .output()
        .expect("script runs");
    stdout(&output)
}

#[test]
fn the_waiting_line_fits_the_terminal() {
    let shown = waiting_at_a_terminal(&Store::sqlite(), 60, "xterm");
    let lines: Vec<&str> = shown.split("\r\u{1b}[2K").filter(|line| !line.is_empty()).collect();
    let waiting = lines.iter().filter(|line| line.contains("waiting for"));
    assert!(waiting.clone().count() >= 2, "{shown:?}");
    for line in waiting {
        let width: usize = line.chars().map(|letter| if letter.is_ascii() { 1 } else { 2 }).sum();
        assert!(width < 60, "{width} columns: {line:?}");
        assert!(line.contains("Ctrl-C to cancel"), "the end is kept: {line:?}");
    }
    assert!(shown.contains("code 124"), "{shown:?}");
}

#[test]
fn a_dumb_terminal_gets_no_escape_sequences() {
    let shown = waiting_at_a_terminal(&Store::sqlite(), 80, "dumb");
    assert!(!shown.contains('\u{1b}'), "{shown:?}");
    assert!(shown.contains("code 124"), "{shown:?}");
}

#[test]
fn a_time_after_the_year_9999_is_shown() {
    let Some(store) = Store::redis() else { return };
    let redis = store.redis.as_ref().expect("it runs");
    let record = concat!(
        r#"{"lockId":"AAAAAAAAAAAAAAAAAAAAAA","expiresAtMs":9007199254740991,"#,
        r#""acquiredAtMs":1700000000000,"key":"k","fence":"000000000000001"}"#
    );
    assert_eq!(redis.cli(&["SET", "syncguard:k", record]).trim(), "OK");
    let output = Command::new("script")
        .args(["-qec", "$SYNCGUARD run -k k --wait 2s -- true; echo \"code $?\"", "/dev/null"])
        .env("TERM", "xterm")
        .env("SYNCGUARD_URL", &store.url)
        .env("SYNCGUARD", env!("CARGO_BIN_EXE_syncguard"))
        .stdin(Stdio::null())
        .output()
        .expect("script runs");
    assert!(stdout(&output).contains("code 124"), "{}", stdout(&output));
    let status = store.run(&["status", "k"]);
    assert_eq!(status.status.code(), Some(0), "{}", stderr(&status));
}

#[test]
fn a_conflict_exits_with_the_chosen_code() {
    let store = Store::sqlite();
    assert_eq!(store.code(&["acquire", "-q", "-k", "k"]), 0);
    let run = ["run", "-k", "k", "--", "true"];
    for (options, code) in [
        (vec!["-n"], 124),
        (vec!["-n", "-E", "75"], 75),
        (vec!["-w", "0.2", "--conflict-exit-code", "0"], 0),
    ] {
        let arguments = [&run[..3], &options[..], &run[3..]].concat();
        let output = store.run(&arguments);
        assert_eq!(output.status.code(), Some(code), "{}", stderr(&output));
        let quiet = [&arguments[..1], &["-q"], &arguments[1..]].concat();
        assert_eq!(stderr(&store.run(&quiet)), "", "--quiet hides the conflict, whatever its code");
    }
    assert_eq!(store.code(&["acquire", "-n", "-E", "75", "-k", "k"]), 75);
    // An exit code of the command is not replaced.
    let own = ["run", "-k", "free", "-n", "-E", "0", "--", "sh", "-c", "exit 124"];
    assert_eq!(store.code(&own), 124);
    assert_eq!(store.code(&["run", "-k", "k", "-E", "256", "--", "true"]), 2);
}

#[test]
fn the_timeout_is_reported_exactly() {
    let store = Store::sqlite();
    assert_eq!(store.code(&["acquire", "-q", "-k", "k"]), 0);
    let printed = stderr(&store.run(&["run", "-k", "k", "--wait", "1500ms", "--", "true"]));
    assert_eq!(printed, "syncguard: the lock was not acquired within 1s 500ms\n");
    let printed = stderr(&store.run(&["wait", "k", "--wait", "1.2"]));
    assert_eq!(printed, "syncguard: the lock did not become free within 1s 200ms\n");
}

#[test]
fn every_message_has_the_same_prefix() {
    let output = syncguard(&["run", "-k", "k", "--ttl", "soon", "--", "true"]).output();
    let shown = stderr(&output.expect("runs"));
    assert!(shown.starts_with("syncguard: "), "{shown}");
    let shown = stderr(&syncguard(&["nonsense"]).output().expect("runs"));
    assert!(shown.starts_with("syncguard: "), "{shown}");
}

#[test]
fn status_and_break_print_readable_text() {
    let store = Store::sqlite();
    assert_eq!(store.code(&["acquire", "-q", "-k", "k", "--ttl", "1m"]), 0);
    std::thread::sleep(Duration::from_millis(1100));
    let shown = stdout(&store.run(&["status", "k"]));
    let parts = [
        "held by ",
        ", syncguard, for ",
        "s, expires in 5",
        "s unless renewed, fence 000000000000001\n",
    ];
    assert!(
        shown.starts_with(parts[0]) && parts.iter().all(|part| shown.contains(part)),
        "{shown}"
    );
    let mut ask = store.command(&["break", "k"]);
    let shown = stderr(&ask.stdin(Stdio::null()).output().expect("runs"));
    assert!(shown.contains("not a terminal; use --yes"), "{shown}");
}
