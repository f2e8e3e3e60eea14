//! `syncguard run`: exit codes, waiting and holding, tested with the real binary on every store.

mod support;

use std::process::Stdio;
use std::time::{Duration, Instant};

use support::{Store, end_of, eventually, stderr, stdout, syncguard};

/// Part of a quoted value could be a password.
#[test]
fn an_assignment_does_not_become_the_label() {
    let store = Store::sqlite();
    let script = "TOKEN=\"abc s3cret\" sh -c 'echo x >$FOLDER/held; sleep 60'";
    let mut child = store
        .command(&["run", "-q", "--key", "k", "-c", script])
        .env("FOLDER", store.folder.path())
        .spawn()
        .expect("runs");
    store.wait_for("held");
    let shown = stdout(&store.run(&["ls"]));
    assert!(shown.contains("pid") && !shown.contains("s3cret"), "{shown}");
    child.kill().expect("runs");
    child.wait().expect("ends");
}

#[test]
fn the_exit_code_of_the_command_is_passed_on() {
    for store in Store::all() {
        for code in [0, 1, 2, 3, 124, 200, 255] {
            let script = format!("exit {code}");
            assert_eq!(store.code(&["run", "--key", "k", "--", "sh", "-c", &script]), code);
        }
        assert_eq!(store.code(&["run", "-k", "k", "--", "/no/such/command"]), 127);
        assert_eq!(store.code(&["run", "-k", "k", "--", "/etc/passwd"]), 126);
        // The lock is released.
        assert_eq!(store.code(&["status", "k"]), 1);
    }
}

#[test]
fn the_command_sees_the_key_and_the_fence_but_not_the_url() {
    for store in Store::all() {
        for fence in ["000000000000001", "000000000000002"] {
            let script = "echo $SYNCGUARD_KEY $SYNCGUARD_FENCE ${SYNCGUARD_URL:-hidden}; cat";
            let output = store.run(&["run", "-q", "--key", "a b", "--", "sh", "-c", script]);
            assert_eq!(stdout(&output), format!("a b {fence} hidden\n"), "{}", stderr(&output));
            assert_eq!(stderr(&output), "");
        }
    }
}

#[test]
fn a_second_run_waits_or_gives_up() {
    for store in Store::all() {
        let mut holder = store.background(&["--key", "k"], "echo x >$FOLDER/held; sleep 1");
        store.wait_for("held");
        let output = store.run(&["run", "--key", "k", "--no-wait", "--", "true"]);
        assert_eq!(output.status.code(), Some(124));
        assert_eq!(stderr(&output), "syncguard: the lock is held by another process\n");
        // With -q, a conflict is expected and not reported.
        let output = store.run(&["run", "-q", "--key", "k", "--wait", "0s", "--", "true"]);
        assert_eq!((output.status.code(), stderr(&output)), (Some(124), String::new()));
        let output = store.run(&["run", "--key", "k", "--wait", "200ms", "--", "true"]);
        assert_eq!(output.status.code(), Some(124));
        assert_eq!(stderr(&output), "syncguard: the lock was not acquired within 200ms\n");
        assert_eq!(store.code(&["run", "--key", "other", "--no-wait", "--", "true"]), 0);
        assert_eq!(store.code(&["run", "--key", "other", "--wait", "0s", "--", "true"]), 0);
        let started = Instant::now();
        assert_eq!(store.code(&["run", "--key", "k", "--wait", "forever", "--", "true"]), 0);
        assert!(started.elapsed() < Duration::from_secs(10), "it is notified of the release");
        assert!(end_of(&mut holder).success());
    }
}

#[test]
fn hold_at_least_and_max_hold_are_respected() {
    for store in Store::all() {
        let started = Instant::now();
        let hold = ["run", "--key", "k", "--hold-at-least", "3s", "--", "true"];
        assert_eq!(store.code(&hold), 0);
        assert!(started.elapsed() < Duration::from_millis(2500), "it returns at once");
        assert_eq!(store.code(&["status", "k"]), 0, "still held");
        eventually("it expires", || store.code(&["status", "k"]) == 1);
        assert!(started.elapsed() > Duration::from_secs(3));
        let mut long = store.background(&["--key", "k", "--max-hold", "200ms"], "sleep 60");
        assert_eq!(end_of(&mut long).code(), Some(122));
        let output = long.wait_with_output().expect("it has ended");
        assert!(stderr(&output).contains("took longer than 200ms"), "{}", stderr(&output));
        // A command that does not start does not keep the lock.
        let hold = ["run", "--key", "f", "--hold-at-least", "30s", "--", "/no/such/command"];
        assert_eq!(store.code(&hold), 127);
        assert_eq!(store.code(&["status", "f"]), 1);
    }
}

#[test]
fn without_a_url_the_default_store_is_used_and_noted() {
    let store = Store::sqlite();
    let run = |quiet: &str| {
        let mut command = syncguard(&["run", "--key", "k", quiet, "--", "true"]);
        command.env("XDG_STATE_HOME", store.folder.path()).stdin(Stdio::null());
        command.output().expect("the binary runs")
    };
    let output = run("--verbose");
    assert!(output.status.success());
    let notice = "syncguard: no --url, --url-file or SYNCGUARD_URL: using the default store, which \
                only this user on this machine shares (";
    assert!(stderr(&output).starts_with(notice), "{}", stderr(&output));
    assert_eq!(stderr(&run("--quiet")), "");
    assert!(store.path("syncguard/locks.db").exists());
    let folder = std::fs::metadata(store.path("syncguard")).expect("created");
    let mode = std::os::unix::fs::PermissionsExt::mode(&folder.permissions());
    assert_eq!(mode & 0o777, 0o700, "no access for other users");
}

#[test]
fn the_write_ahead_log_stays_small() {
    let store = Store::sqlite();
    for _ in 0..60 {
        assert_eq!(store.code(&["run", "-q", "--key", "k", "--", "true"]), 0);
    }
    // Each run adds 20 KB, and a run that is the only user of the file reads all of it at start.
    let log = std::fs::metadata(store.path("locks.db-wal")).map_or(0, |log| log.len());
    assert!(log < 700_000, "{log}");
}
