//! `syncguard run`: exit codes, signals, process groups, lost locks and `kill -9`, by the real binary
//! on SQLite and on Redis.

mod support;

use std::process::Stdio;
use std::time::{Duration, Instant};

use support::{Store, end_of, eventually, is_alive, send, stderr, stdout, syncguard};

#[test]
fn the_code_of_the_command_is_passed_on() {
    for store in Store::all() {
        for code in [0, 1, 2, 3, 124, 200, 255] {
            let script = format!("exit {code}");
            assert_eq!(store.code(&["run", "--key", "k", "--", "sh", "-c", &script]), code);
        }
        assert_eq!(store.code(&["run", "-k", "k", "--", "sh", "-c", "kill -9 $$"]), 128 + 9);
        assert_eq!(store.code(&["run", "-k", "k", "--", "/no/such/command"]), 127);
        assert_eq!(store.code(&["run", "-k", "k", "--", "/etc/passwd"]), 126);
        // Nothing of it is left.
        assert_eq!(store.code(&["status", "k"]), 1);
    }
}

#[test]
fn the_command_sees_key_and_fence_and_not_the_url() {
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
fn one_waits_for_the_other_or_gives_up() {
    for store in Store::all() {
        let mut holder = store.background(&["--key", "k"], "echo x >$FOLDER/held; sleep 1");
        store.wait_for("held");
        let output = store.run(&["run", "--key", "k", "--no-wait", "--", "true"]);
        assert_eq!(output.status.code(), Some(124));
        assert_eq!(stderr(&output), "syncguard: the lock is held by another process\n");
        // Quiet about what was to be expected.
        let output = store.run(&["run", "-q", "--key", "k", "--wait", "0s", "--", "true"]);
        assert_eq!((output.status.code(), stderr(&output)), (Some(124), String::new()));
        let output = store.run(&["run", "--key", "k", "--wait", "200ms", "--", "true"]);
        assert_eq!(output.status.code(), Some(124));
        assert_eq!(stderr(&output), "syncguard: the lock was not acquired within 200ms\n");
        assert_eq!(store.code(&["run", "--key", "other", "--no-wait", "--", "true"]), 0);
        assert_eq!(store.code(&["run", "--key", "other", "--wait", "0s", "--", "true"]), 0);
        let started = Instant::now();
        assert_eq!(store.code(&["run", "--key", "k", "--wait", "forever", "--", "true"]), 0);
        assert!(started.elapsed() < Duration::from_secs(10), "woken when it is free");
        assert!(end_of(&mut holder).success());
    }
}

#[test]
fn a_signal_reaches_the_whole_group() {
    for store in Store::all() {
        let script = "sleep 60 & echo $! >$FOLDER/grandchild; echo $$ >$FOLDER/child; wait";
        for (signal, number) in [("TERM", 15), ("INT", 2), ("HUP", 1)] {
            let mut child = store.background(&["--key", "k"], script);
            let processes = [store.wait_for("grandchild"), store.wait_for("child")];
            send(signal, child.id());
            assert_eq!(end_of(&mut child).code(), Some(128 + number), "{signal}");
            // A shell lets its background processes ignore SIGINT.
            if signal != "INT" {
                eventually("all have ended", || !processes.iter().any(|pid| is_alive(pid)));
            }
            assert_eq!(store.code(&["status", "k"]), 1, "released");
            for file in ["grandchild", "child"] {
                std::fs::remove_file(store.path(file)).expect("written");
            }
        }
    }
}

#[test]
fn a_signal_reaches_a_command_that_is_stopped() {
    for store in Store::all() {
        let mut child = store.background(&["--key", "k"], "echo $$ >$FOLDER/pid; sleep 60");
        let pid: u32 = store.wait_for("pid").parse().expect("a number");
        send("STOP", pid);
        send("TERM", child.id());
        assert_eq!(end_of(&mut child).code(), Some(128 + 15));
    }
}

#[test]
fn a_signal_while_waiting_ends_at_once_and_starts_nothing() {
    for store in Store::all() {
        let mut holder = store.background(&["--key", "k"], "echo x >$FOLDER/held; sleep 30");
        store.wait_for("held");
        for (signal, number) in [("INT", 2), ("TERM", 15)] {
            let options = ["--key", "k", "--wait", "forever"];
            let mut waiter = store.background(&options, "echo x >$FOLDER/started");
            std::thread::sleep(Duration::from_millis(400));
            send(signal, waiter.id());
            assert_eq!(end_of(&mut waiter).code(), Some(128 + number));
        }
        send("TERM", holder.id());
        end_of(&mut holder);
        assert!(!store.path("started").exists());
    }
}

#[test]
fn a_lost_lock_ends_the_command() {
    for store in Store::all() {
        // One that listens, and one that must be killed.
        for (script, grace) in [
            (
                "trap 'echo x >$FOLDER/asked; exit 0' TERM; echo $$ >$FOLDER/pid; while :; do sleep 0.1; done",
                "5s",
            ),
            ("trap '' TERM; echo $$ >$FOLDER/pid; while :; do sleep 0.1; done", "300ms"),
        ] {
            let options = ["--key", "k", "--ttl", "2s", "--grace", grace];
            let mut child = store.background(&options, script);
            let pid = store.wait_for("pid");
            assert_eq!(store.code(&["break", "k", "--yes", "-q"]), 0);
            assert_eq!(end_of(&mut child).code(), Some(123));
            let output = child.wait_with_output().expect("it has ended");
            let expected =
                "syncguard: the lock was lost: it was taken away; the command was ended\n";
            // The shell may say that its own `sleep` was terminated.
            assert!(stderr(&output).ends_with(expected), "{}", stderr(&output));
            assert!(!is_alive(&pid), "nothing goes on without the lock");
            assert_eq!(store.path("asked").exists(), grace == "5s");
            std::fs::remove_file(store.path("pid")).expect("written");
            drop(std::fs::remove_file(store.path("asked")));
        }
    }
}

#[test]
fn a_store_that_is_gone_ends_the_command_too() {
    let mut stores = Store::all();
    let Some(store) = stores.iter_mut().find(|store| store.redis.is_some()) else { return };
    let options = ["--key", "k", "--ttl", "2s", "--grace", "1s"];
    let mut child = store.background(&options, "echo $$ >$FOLDER/pid; sleep 60");
    let pid = store.wait_for("pid");
    store.redis.take().expect("it runs").crash();
    assert_eq!(end_of(&mut child).code(), Some(123));
    let output = child.wait_with_output().expect("it has ended");
    assert!(stderr(&output).contains("could not be reached in time"), "{}", stderr(&output));
    assert!(!is_alive(&pid));
}

#[test]
fn the_group_does_not_survive_a_kill_of_syncguard() {
    for store in Store::all() {
        let script = "trap '' TERM; sleep 60 & echo $! >$FOLDER/grandchild; echo $$ >$FOLDER/child; \
                      while :; do sleep 0.1; done";
        let mut child = store.background(&["--key", "k", "--grace", "300ms"], script);
        let processes = [store.wait_for("grandchild"), store.wait_for("child")];
        assert!(processes.iter().all(|pid| is_alive(pid)));
        send("KILL", child.id());
        end_of(&mut child);
        eventually("the group has ended", || !processes.iter().any(|pid| is_alive(pid)));
    }
}

#[test]
fn a_lock_is_held_as_long_as_asked_for() {
    for store in Store::all() {
        let started = Instant::now();
        let hold = ["run", "--key", "k", "--hold-at-least", "3s", "--", "true"];
        assert_eq!(store.code(&hold), 0);
        assert!(started.elapsed() < Duration::from_millis(2500), "it returns at once");
        assert_eq!(store.code(&["status", "k"]), 0, "still held");
        eventually("it frees itself", || store.code(&["status", "k"]) == 1);
        assert!(started.elapsed() > Duration::from_secs(3));
        let mut long = store.background(&["--key", "k", "--max-hold", "200ms"], "sleep 60");
        assert_eq!(end_of(&mut long).code(), Some(122));
        let output = long.wait_with_output().expect("it has ended");
        assert!(stderr(&output).contains("took longer than 200ms"), "{}", stderr(&output));
        // A command that fails does not keep others waiting.
        let hold = ["run", "--key", "f", "--hold-at-least", "30s", "--", "/no/such/command"];
        assert_eq!(store.code(&hold), 127);
        assert_eq!(store.code(&["status", "f"]), 1);
    }
}

#[test]
fn without_a_url_one_is_told_that_only_this_user_is_excluded() {
    let store = Store::sqlite();
    let run = |quiet: &str| {
        let mut command = syncguard(&["run", "--key", "k", quiet, "--", "true"]);
        command.env("XDG_STATE_HOME", store.folder.path()).stdin(Stdio::null());
        command.output().expect("the binary runs")
    };
    let output = run("--verbose");
    assert!(output.status.success());
    let told = "syncguard: no --url, --url-file or SYNCGUARD_URL: locks exclude only this user on this machine";
    assert!(stderr(&output).starts_with(told), "{}", stderr(&output));
    assert_eq!(stderr(&run("--quiet")), "");
    assert!(store.path("syncguard/locks.db").exists());
    let folder = std::fs::metadata(store.path("syncguard")).expect("created");
    let mode = std::os::unix::fs::PermissionsExt::mode(&folder.permissions());
    assert_eq!(mode & 0o777, 0o700, "nobody else");
}

/// A terminal: `script` makes one and passes on what is typed.
mod terminal {
    use std::io::Write;
    use std::process::{Child, Command, Output, Stdio};
    use std::thread::sleep;
    use std::time::Duration;

    use super::support::{Store, stdout};

    fn script(store: &Store, command: &str) -> Child {
        Command::new("script")
            .args(["-qec", command, "/dev/null"])
            .env("SYNCGUARD_URL", &store.url)
            .env("SYNCGUARD", env!("CARGO_BIN_EXE_syncguard"))
            .env("FOLDER", store.folder.path())
            .env("NO_COLOR", "1")
            .env("TERM", "xterm")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("script runs")
    }

    fn type_and_end(mut child: Child, typed: &[(&str, u64)]) -> Output {
        let mut keyboard = child.stdin.take().expect("piped");
        for (text, pause_ms) in typed {
            sleep(Duration::from_millis(*pause_ms));
            keyboard.write_all(text.as_bytes()).expect("it reads");
            keyboard.flush().expect("it reads");
        }
        let output = child.wait_with_output().expect("it ends");
        drop(keyboard);
        output
    }

    #[test]
    fn the_command_is_in_the_foreground_and_reads_what_is_typed() {
        let store = Store::sqlite();
        let command = "$SYNCGUARD run -q --key k -- sh -c 'read -r line; echo \"read: $line\"; \
                       ps -o stat= -p $$'; echo back; read -r line; echo \"shell: $line\"";
        let output = type_and_end(script(&store, command), &[("one\n", 700), ("two\n", 700)]);
        let shown = stdout(&output);
        assert!(shown.contains("read: one"), "{shown}");
        assert!(shown.contains('+'), "in the foreground: {shown}");
        assert!(shown.contains("shell: two"), "the terminal is given back: {shown}");
    }

    #[test]
    fn ctrl_c_reaches_the_command_once() {
        let store = Store::sqlite();
        let command = "$SYNCGUARD run -q --key k -- sh -c 'trap \"echo interrupted\" INT; sleep 2; \
                       sleep 0.2; exit 7'; echo \"code $?\"";
        let shown = stdout(&type_and_end(script(&store, command), &[("\x03", 900)]));
        assert_eq!(shown.matches("interrupted").count(), 1, "{shown}");
        assert!(shown.contains("code 7"), "{shown}");
        assert_eq!(store.code(&["status", "k"]), 1);
    }

    #[test]
    fn ctrl_z_stops_both_and_the_shell_goes_on() {
        let store = Store::sqlite();
        let typed = [
            (
                "$SYNCGUARD run -q --key k --ttl 1m -- sh -c 'echo started; sleep 1; echo finished'\n",
                500,
            ),
            ("\x1a", 700),
            ("jobs\n", 500),
            ("fg\n", 500),
            ("exit\n", 2500),
        ];
        let shown = stdout(&type_and_end(script(&store, "bash --norc -i"), &typed));
        assert!(shown.contains("Stopped"), "{shown}");
        assert!(shown.contains("\nfinished"), "{shown}");
        assert_eq!(store.code(&["status", "k"]), 1, "released");
    }

    #[test]
    fn ctrl_c_ends_a_script_too() {
        let store = Store::sqlite();
        std::fs::write(
            store.path("script"),
            "$SYNCGUARD run -q --key k -- sleep 5\necho went on\n",
        )
        .expect("written");
        let command = "sh $FOLDER/script; echo \"code $?\"";
        let shown = stdout(&type_and_end(script(&store, command), &[("\x03", 900)]));
        assert!(!shown.contains("went on"), "{shown}");
        assert_eq!(store.code(&["status", "k"]), 1);
    }

    #[test]
    fn a_command_in_the_background_can_be_fetched_to_the_foreground() {
        let store = Store::sqlite();
        let typed = [
            ("$SYNCGUARD run -q --key k -- sh -c 'read -r line; echo \"read: $line\"' &\n", 500),
            ("fg\n", 1200),
            ("hello\n", 700),
            ("exit\n", 700),
        ];
        let shown = stdout(&type_and_end(script(&store, "bash --norc -i"), &typed));
        assert!(shown.contains("read: hello"), "{shown}");
        assert_eq!(store.code(&["status", "k"]), 1, "released");
    }

    #[test]
    fn waiting_is_shown() {
        let store = Store::sqlite();
        let mut holder = store.background(&["--key", "k"], "echo x >$FOLDER/held; sleep 3");
        store.wait_for("held");
        let command = "$SYNCGUARD run --key k --wait 1500ms -- true; echo \"code $?\"";
        let shown = stdout(&script(&store, command).wait_with_output().expect("it ends"));
        assert!(shown.contains("waiting for 'k' (0s), Ctrl-C to cancel"), "{shown}");
        assert!(shown.contains("code 124"), "{shown}");
        holder.wait().expect("it ends");
    }
}
