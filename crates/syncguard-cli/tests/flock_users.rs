//! Habits of users of `flock` and similar tools, and common typing errors.

mod support;

use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, Instant};

use support::{Store, stderr, stdout, syncguard};

#[test]
fn a_key_can_be_an_argument_an_option_or_a_variable() {
    let store = Store::sqlite();
    let shown = ["sh", "-c", "echo $SYNCGUARD_KEY"];
    for arguments in [vec!["run", "a"], vec!["run", "-k", "a"], vec!["run", "--key=a", "-w", "1"]] {
        let output = store.run(&[&arguments[..], &["--"], &shown[..]].concat());
        assert_eq!(stdout(&output), "a\n", "{arguments:?}: {}", stderr(&output));
    }
    let mut command = store.command(&[&["run", "--"], &shown[..]].concat());
    let output = command.env("SYNCGUARD_KEY", "a").output().expect("runs");
    assert_eq!(stdout(&output), "a\n", "{}", stderr(&output));
    assert_eq!(store.code(&["acquire", "-q", "a"]), 0);
    for arguments in [vec!["status", "a"], vec!["status", "-k", "a"], vec!["status", "--key", "a"]]
    {
        assert_eq!(store.code(&arguments), 0, "{arguments:?}");
    }
    let status = |key: &str| {
        let mut command = store.command(&["status"]);
        command.env("SYNCGUARD_KEY", key).output().expect("runs").status.code()
    };
    assert_eq!(status("a"), Some(0));
    assert_eq!(status("b"), Some(1));
    assert_eq!(store.code(&["explain-key", "-k", "a"]), 0);
    assert_eq!(store.code(&["break", "-k", "a", "--yes"]), 0);
    for arguments in [vec!["run", "--", "true"], vec!["status"], vec!["status", "a", "-k", "b"]] {
        assert_eq!(store.code(&arguments), 2, "{arguments:?}");
    }
}

#[test]
fn a_nested_run_does_not_wait_for_itself() {
    let store = Store::sqlite();
    let nested = "$SYNCGUARD run -- true; echo \"code $?\"";
    let mut command = store.command(&["run", "-q", "a", "--", "sh", "-c", nested]);
    command.env("SYNCGUARD", env!("CARGO_BIN_EXE_syncguard"));
    let started = Instant::now();
    let output = command.output().expect("runs");
    assert_eq!(stdout(&output), "code 2\n", "{}", stderr(&output));
    assert!(started.elapsed() < Duration::from_secs(4), "no wait");
}

#[test]
fn seconds_need_no_unit() {
    let store = Store::sqlite();
    assert_eq!(store.code(&["acquire", "-q", "-k", "k", "--ttl", "60"]), 0);
    let started = Instant::now();
    assert_eq!(store.code(&["run", "-w", "0.5", "-k", "k", "--", "true"]), 124);
    assert!(started.elapsed() >= Duration::from_millis(500));
    assert_eq!(store.code(&["run", "-n", "-k", "k", "--", "true"]), 124);
    assert_eq!(store.code(&["run", "-w", "0", "-k", "k", "--", "true"]), 124);
    for wrong in ["-1", "1.", ".5", "1e3", "inf", "nan", "1 x", "99999999999999999999"] {
        let wait = format!("--wait={wrong}");
        assert_eq!(store.code(&["run", &wait, "-k", "k", "--", "true"]), 2, "{wrong}");
    }
}

#[test]
fn a_shell_command_is_one_argument() {
    let store = Store::sqlite();
    let output = store.run(&["run", "k", "-c", "echo \"$SYNCGUARD_KEY\" | tr k K; exit 3"]);
    assert_eq!((stdout(&output).as_str(), output.status.code()), ("K\n", Some(3)));
    assert_eq!(store.code(&["run", "k", "-c", "true", "--", "true"]), 2);
    assert_eq!(store.code(&["run", "k"]), 2);
}

#[test]
fn common_mistakes_get_a_hint() {
    for (arguments, hint) in [
        (vec!["run", "k", "true"], "`--` before the command"),
        (vec!["run", "-k", "k", "sleep", "5"], "`--` before the command"),
        (vec!["run", "-k", "k", "sleep", "-x"], "`--` before the command"),
        (vec!["run", "-k", "k"], "`--`"),
        (vec!["lock", "k"], "acquire"),
        (vec!["unlock", "k"], "release"),
        (vec!["list"], "ls"),
        (vec!["run", "-k", "k", "--timeout", "5", "--", "true"], "--wait"),
        (vec!["run", "-k", "k", "--nonblock", "--", "true"], "--no-wait"),
    ] {
        let output = syncguard(&arguments).output().expect("runs");
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(stderr(&output).contains(hint), "{arguments:?}: {}", stderr(&output));
    }
}

#[test]
fn contradictory_limits_are_refused() {
    let store = Store::sqlite();
    let limits = ["--hold-at-least", "10s", "--max-hold", "1s"];
    let output = store.run(&[&["run", "-k", "k"], &limits[..], &["--", "true"]].concat());
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    assert!(stderr(&output).contains("--hold-at-least"), "{}", stderr(&output));
}

#[test]
fn a_script_runs_as_in_a_shell() {
    let store = Store::sqlite();
    let write = |name: &str, text: &str| {
        let path = store.path(name);
        std::fs::write(&path, text).expect("writable");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755))
            .expect("owned by this user");
        path.display().to_string()
    };
    let plain = write("plain", "echo \"no shebang: $1\"\n");
    let output = store.run(&["run", "-k", "k", "--", &plain, "x"]);
    assert_eq!(stdout(&output), "no shebang: x\n", "{}", stderr(&output));
    // Found in PATH, as in a shell.
    let mut command = store.command(&["run", "-k", "k", "--", "plain", "x"]);
    let path = format!("{}:{}", store.folder.path().display(), env!("PATH"));
    let output = command.env("PATH", path).output().expect("runs");
    assert_eq!(stdout(&output), "no shebang: x\n", "{}", stderr(&output));
    let lost = write("lost", "#!/no/such/interpreter -x\ntrue\n");
    let output = store.run(&["run", "-k", "k", "--", &lost]);
    assert_eq!(output.status.code(), Some(126));
    assert!(stderr(&output).contains("/no/such/interpreter"), "{}", stderr(&output));
    let windows = write("windows", "#!/bin/sh\r\ntrue\r\n");
    let output = store.run(&["run", "-k", "k", "--", &windows]);
    assert_eq!(output.status.code(), Some(126));
    assert!(stderr(&output).contains("/bin/sh\\r"), "{}", stderr(&output));
    // A program for another machine is not a script.
    let foreign = write("foreign", "\u{7f}NOT AN ELF\0\necho ran\n");
    let output = store.run(&["run", "-k", "k", "--", &foreign]);
    assert_eq!((output.status.code(), stdout(&output).as_str()), (Some(126), ""));
    assert_eq!(store.code(&["run", "-k", "k", "--", "/no/such/command"]), 127);
    assert_eq!(store.code(&["run", "-k", "k", "--", "/etc"]), 126);
}
