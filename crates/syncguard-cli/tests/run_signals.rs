//! `syncguard run` and signals: forwarded once, still ignored if ignored on entry, and how it ends.

mod support;

use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use support::{Store, end_of, eventually, is_alive, send, stdout};

#[test]
fn a_signal_reaches_the_whole_group() {
    for store in Store::all() {
        let script = "sleep 60 & echo $! >$FOLDER/grandchild; echo $$ >$FOLDER/child; wait";
        for (signal, number) in [("TERM", 15), ("INT", 2), ("HUP", 1)] {
            let mut child = store.background(&["--key", "k"], script);
            let processes = [store.wait_for("grandchild"), store.wait_for("child")];
            send(signal, child.id());
            assert_eq!(end_of(&mut child).signal(), Some(number), "{signal}");
            // In a shell, background processes ignore SIGINT.
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
fn a_signal_reaches_a_stopped_command() {
    for store in Store::all() {
        let mut child = store.background(&["--key", "k"], "echo $$ >$FOLDER/pid; sleep 60");
        let pid: u32 = store.wait_for("pid").parse().expect("a number");
        send("STOP", pid);
        send("TERM", child.id());
        assert_eq!(end_of(&mut child).signal(), Some(15));
    }
}

#[test]
fn a_signal_while_waiting_exits_without_starting_the_command() {
    for store in Store::all() {
        let mut holder = store.background(&["--key", "k"], "echo x >$FOLDER/held; sleep 30");
        store.wait_for("held");
        for (signal, number) in [("INT", 2), ("TERM", 15)] {
            let options = ["--key", "k", "--wait", "forever"];
            let mut waiter = store.background(&options, "echo x >$FOLDER/started");
            std::thread::sleep(Duration::from_millis(400));
            send(signal, waiter.id());
            assert_eq!(end_of(&mut waiter).signal(), Some(number));
        }
        send("TERM", holder.id());
        end_of(&mut holder);
        assert!(!store.path("started").exists());
    }
}

#[test]
fn syncguard_dies_by_the_signal_that_killed_the_command() {
    let store = Store::sqlite();
    for signal in [1, 2, 3, 6, 7, 9, 11, 15] {
        let script = format!("kill -{signal} $$");
        let status = store.run(&["run", "-k", "k", "--", "sh", "-c", &script]).status;
        assert_eq!((status.signal(), status.core_dumped()), (Some(signal), false), "{signal}");
        assert_eq!(store.code(&["status", "k"]), 1, "released");
    }
    // An exit code stays one, even if shells use it for a signal.
    assert_eq!(store.code(&["run", "-k", "k", "--", "sh", "-c", "exit 130"]), 130);
}

#[test]
fn a_signal_while_connecting_exits_immediately() {
    let store = Store::sqlite();
    // This server never responds.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let url = format!("redis://{}/0", listener.local_addr().expect("an address"));
    let options = ["--url", &url, "--key", "k", "--wait", "1m"];
    let mut child = store.background(&options, "echo x >$FOLDER/started");
    let _connection = listener.accept().expect("it connects");
    send("TERM", child.id());
    assert_eq!(end_of(&mut child).signal(), Some(15));
    assert!(!store.path("started").exists());
}

#[test]
fn a_real_time_signal_becomes_an_exit_code() {
    let store = Store::sqlite();
    let mut child = store.background(&["--key", "k"], "kill -34 $$");
    assert_eq!(end_of(&mut child).code(), Some(162));
}

/// Starts `syncguard run` in the background, from a shell that ignores signals.
fn ignoring(store: &Store, signals: &str, script: &str) -> Child {
    let shell = format!("trap '' {signals}; exec \"$@\"");
    let syncguard = env!("CARGO_BIN_EXE_syncguard");
    std::process::Command::new("sh")
        .args(["-c", &shell, "sh", syncguard, "run", "-q", "-k", "k", "--", "sh", "-c", script])
        .env("SYNCGUARD_URL", &store.url)
        .env("FOLDER", store.folder.path())
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("sh runs")
}

#[test]
fn ignored_signals_stay_ignored() {
    let store = Store::sqlite();
    for signal in ["HUP", "INT", "QUIT", "TERM", "USR1"] {
        let script = "echo x >$FOLDER/held; while [ ! -e $FOLDER/go ]; do sleep 0.02; done; \
                      kill -SIGNAL $$; exit 3";
        let mut child = ignoring(&store, signal, &script.replace("SIGNAL", signal));
        store.wait_for("held");
        send(signal, child.id());
        std::thread::sleep(Duration::from_millis(300));
        std::fs::write(store.path("go"), "").expect("written");
        assert_eq!(end_of(&mut child).code(), Some(3), "{signal}");
        for file in ["held", "go"] {
            std::fs::remove_file(store.path(file)).expect("written");
        }
    }
    // The end of the command is noticed even if SIGCHLD was ignored on entry.
    assert_eq!(end_of(&mut ignoring(&store, "CHLD", "exit 3")).code(), Some(3));
}

#[test]
fn a_signal_to_all_processes_reaches_the_command_once() {
    let store = Store::sqlite();
    // It never sleeps, so that two signals do not merge into one.
    let script = "trap 'echo x >>$FOLDER/asked' TERM; echo $$ >$FOLDER/pid; \
                  while [ ! -e $FOLDER/go ]; do :; done";
    let mut child = store.background(&["--key", "k"], script);
    let pid = store.wait_for("pid");
    let children = format!("/proc/{0}/task/{0}/children", child.id());
    let children = std::fs::read_to_string(children).expect("it runs");
    assert!(children.contains(&pid));
    for round in 1..=2 {
        let mut all: Vec<&str> = children.split_whitespace().collect();
        let syncguard = child.id().to_string();
        all.push(&syncguard);
        if round == 1 {
            all.reverse();
        }
        let sent = std::process::Command::new("kill").arg("-TERM").args(all).status();
        assert!(sent.expect("kill runs").success());
        std::thread::sleep(Duration::from_millis(600));
        let asked = std::fs::read_to_string(store.path("asked")).expect("asked");
        assert_eq!(asked.lines().count(), round, "once");
    }
    // A signal to `syncguard` alone is still forwarded.
    send("TERM", child.id());
    eventually("it is forwarded", || {
        std::fs::read_to_string(store.path("asked")).is_ok_and(|asked| asked.lines().count() == 3)
    });
    std::fs::write(store.path("go"), "").expect("written");
    assert_eq!(end_of(&mut child).code(), Some(0));
}

#[test]
fn signals_are_forwarded_during_the_grace() {
    let store = Store::sqlite();
    let script = "trap 'echo x >$FOLDER/asked' TERM; trap 'exit 0' INT; \
                  while :; do sleep 0.05; done";
    let options = ["--key", "k", "--ttl", "10m", "--max-hold", "300ms"];
    let mut child = store.background(&options, script);
    store.wait_for("asked");
    let interrupted = Instant::now();
    send("INT", child.id());
    assert_eq!(end_of(&mut child).code(), Some(122));
    assert!(interrupted.elapsed() < Duration::from_secs(10), "the grace is longer");
}

#[test]
fn orphans_are_reaped() {
    let store = Store::sqlite();
    let script = "sleep 0.5; for pid in $(cat /proc/$PPID/task/$PPID/children); do \
                  grep State /proc/$pid/status; done";
    let inherit = "sleep 0.2 & exec \"$@\"";
    let syncguard = env!("CARGO_BIN_EXE_syncguard");
    let output = std::process::Command::new("sh")
        .args(["-c", inherit, "sh", syncguard, "run", "-q", "-k", "k", "--", "sh", "-c", script])
        .env("SYNCGUARD_URL", &store.url)
        .output()
        .expect("sh runs");
    let states = stdout(&output);
    assert!(states.contains("State:"), "{states}");
    assert!(!states.contains("zombie"), "{states}");
}
