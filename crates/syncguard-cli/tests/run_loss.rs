//! `syncguard run` when the lock is lost, or when `syncguard` or its watcher is killed.

mod support;

use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use support::{Store, end_of, eventually, is_alive, send, stderr};
use test_support::{Fault, Proxy};

#[test]
fn a_lost_lock_ends_the_command() {
    for store in Store::all() {
        // One command exits on SIGTERM, the other must be killed.
        for (script, grace) in [
            (
                "trap 'echo x >$FOLDER/asked; exit 0' TERM; echo $$ >$FOLDER/pid; \
                 while :; do sleep 0.1; done",
                "1s",
            ),
            ("trap '' TERM; echo $$ >$FOLDER/pid; while :; do sleep 0.1; done", "300ms"),
        ] {
            let options = ["--key", "k", "--ttl", "2s", "--grace", grace];
            let mut child = store.background(&options, script);
            let pid = store.wait_for("pid");
            assert_eq!(store.code(&["break", "k", "--yes", "-q"]), 0);
            assert_eq!(end_of(&mut child).code(), Some(123));
            let output = child.wait_with_output().expect("it has ended");
            let printed = stderr(&output);
            // The shell may report that its own `sleep` was terminated.
            let last = printed.lines().last().unwrap_or_default();
            assert!(last.ends_with("; the command was terminated"), "{printed}");
            // Firestore has no place for a note of who broke it.
            let why = if store.emulator.is_some() { ", or no longer" } else { " by " };
            let why = format!("syncguard: lock lost: broken{why}");
            assert!(last.starts_with(&why), "{printed}");
            assert!(!is_alive(&pid), "the command does not continue without the lock");
            assert_eq!(store.path("asked").exists(), grace == "1s");
            std::fs::remove_file(store.path("pid")).expect("written");
            drop(std::fs::remove_file(store.path("asked")));
        }
    }
}

#[test]
fn an_unreachable_store_ends_the_command() {
    let mut stores = Store::all();
    let Some(store) = stores.iter_mut().find(|store| store.redis.is_some()) else { return };
    let options = ["--key", "k", "--ttl", "2s", "--grace", "1s"];
    let mut child = store.background(&options, "echo $$ >$FOLDER/pid; sleep 60");
    let pid = store.wait_for("pid");
    store.redis.take().expect("it runs").crash();
    assert_eq!(end_of(&mut child).code(), Some(123));
    let output = child.wait_with_output().expect("it has ended");
    assert!(stderr(&output).contains("lock lost: it could not be renewed"), "{}", stderr(&output));
    assert!(!is_alive(&pid));
}

#[test]
fn the_group_does_not_survive_a_kill_of_syncguard() {
    for store in Store::all() {
        let script = "trap '' TERM; sleep 60 & echo $! >$FOLDER/grandchild; \
                      echo $$ >$FOLDER/child; while :; do sleep 0.1; done";
        let mut child = store.background(&["--key", "k", "--grace", "300ms"], script);
        let processes = [store.wait_for("grandchild"), store.wait_for("child")];
        assert!(processes.iter().all(|pid| is_alive(pid)));
        send("KILL", child.id());
        end_of(&mut child);
        eventually("the group has ended", || !processes.iter().any(|pid| is_alive(pid)));
    }
}

#[test]
fn a_broken_lock_is_reported_when_the_command_ends() {
    for store in Store::all() {
        // A command too short to subscribe to notifications, without and with --hold-at-least.
        for hold in [&[][..], &["--hold-at-least", "30s"]] {
            let options = [&["--key", "k"], hold].concat();
            let script = "echo x >$FOLDER/held; while [ ! -e $FOLDER/go ]; do sleep 0.02; done";
            let mut child = store.background(&options, script);
            store.wait_for("held");
            assert_eq!(store.code(&["break", "k", "--yes", "-q"]), 0);
            std::fs::write(store.path("go"), "").expect("written");
            assert_eq!(end_of(&mut child).code(), Some(123));
            let output = child.wait_with_output().expect("it has ended");
            assert!(stderr(&output).contains("syncguard: lock lost: "), "{}", stderr(&output));
            for file in ["held", "go"] {
                std::fs::remove_file(store.path(file)).expect("written");
            }
        }
    }
}

#[test]
fn a_broken_lock_ends_the_command_before_the_next_renewal() {
    for store in Store::all() {
        let options = ["--key", "k", "--ttl", "10m"];
        let mut child = store.background(&options, "echo $$ >$FOLDER/pid; exec sleep 60");
        let pid = store.wait_for("pid");
        // The guard watches its lock from 100 ms on.
        std::thread::sleep(Duration::from_millis(1500));
        assert_eq!(store.code(&["break", "k", "--yes", "-q"]), 0);
        assert_eq!(end_of(&mut child).code(), Some(123));
        assert!(!is_alive(&pid));
    }
}

#[test]
fn on_lost_runs_when_the_lock_is_lost() {
    let store = Store::sqlite();
    let hook = "echo $SYNCGUARD_KEY $SYNCGUARD_LOST_REASON >$FOLDER/lost";
    let options = ["--key", "k", "--ttl", "3s", "--on-lost", hook];
    let mut child = store.background(&options, "echo x >$FOLDER/held; sleep 60");
    store.wait_for("held");
    assert_eq!(store.code(&["break", "k", "--yes", "-q"]), 0);
    assert_eq!(end_of(&mut child).code(), Some(123));
    assert_eq!(store.wait_for("lost"), "k broken");
    // It does not run if the lock is not lost.
    std::fs::remove_file(store.path("lost")).expect("written");
    assert_eq!(store.code(&["run", "-q", "--key", "k", "--on-lost", hook, "--", "true"]), 0);
    assert!(!store.path("lost").exists());
}

/// The end of the command is noticed although its sibling runs on: a script continued as
/// `syncguard`, which has inherited the children of the script.
#[test]
fn a_job_of_the_calling_script_does_not_keep_the_lock() {
    let store = Store::sqlite();
    let script = "sleep 60 & exec $SYNCGUARD run -q --key k --max-hold 300ms --ttl 3s \
                  --grace 100ms -- sleep 60";
    let mut child = Command::new("sh")
        .args(["-c", script])
        .env("SYNCGUARD", env!("CARGO_BIN_EXE_syncguard"))
        .env("SYNCGUARD_URL", &store.url)
        .stderr(Stdio::null())
        .spawn()
        .expect("runs");
    assert_eq!(end_of(&mut child).code(), Some(122));
    assert_eq!(store.code(&["status", "k"]), 1, "it is free");
}

#[test]
fn a_command_that_stops_itself_again_and_again_is_killed() {
    let store = Store::sqlite();
    let script = "trap 'while :; do kill -STOP $$; done' TERM; echo x >$FOLDER/held; \
                  while :; do sleep 0.05; done";
    for _ in 0..5 {
        drop(std::fs::remove_file(store.path("held")));
        let options = ["--key", "k", "--ttl", "3s", "--grace", "200ms"];
        let mut child = store.background(&options, script);
        store.wait_for("held");
        assert_eq!(store.code(&["break", "k", "--yes", "-q"]), 0);
        assert_eq!(end_of(&mut child).code(), Some(123));
    }
}

#[test]
fn an_on_lost_command_that_hangs_is_killed() {
    let store = Store::sqlite();
    let hook = "echo $$ >$FOLDER/hook; exec sleep 60";
    let options = ["--key", "k", "--ttl", "3s", "--on-lost", hook];
    let mut child = store.background(&options, "echo x >$FOLDER/held; sleep 60");
    store.wait_for("held");
    assert_eq!(store.code(&["break", "k", "--yes", "-q"]), 0);
    assert_eq!(end_of(&mut child).code(), Some(123));
    assert!(!is_alive(&store.wait_for("hook")));
}

#[test]
fn the_locks_that_are_not_lost_are_released() {
    for store in Store::all() {
        let options = ["--key", "a", "--key", "b", "--ttl", "10m", "--grace", "100ms"];
        let mut child = store.background(&options, "echo x >$FOLDER/held; sleep 60");
        store.wait_for("held");
        assert_eq!(store.code(&["break", "a", "--yes", "-q"]), 0);
        assert_eq!(end_of(&mut child).code(), Some(123));
        assert_eq!(store.code(&["status", "b"]), 1, "it is free");
    }
}

#[test]
fn the_command_ends_before_its_lock_expires_if_the_store_crashes() {
    let mut stores = Store::all();
    let Some(store) = stores.iter_mut().find(|store| store.redis.is_some()) else { return };
    let options = ["--key", "k", "--ttl", "6s", "--grace", "2s"];
    let script = "trap 'echo x >$FOLDER/asked' TERM; echo $$ >$FOLDER/pid; \
                  while :; do sleep 0.05; done";
    let mut child = store.background(&options, script);
    let pid = store.wait_for("pid");
    let cut_off = Instant::now();
    store.redis.take().expect("it runs").crash();
    eventually("it has ended", || !is_alive(&pid));
    assert!(cut_off.elapsed() < Duration::from_secs(6), "{:?}", cut_off.elapsed());
    assert_eq!(end_of(&mut child).code(), Some(123));
    assert!(cut_off.elapsed() < Duration::from_secs(8), "{:?}", cut_off.elapsed());
    assert!(store.path("asked").exists(), "SIGTERM comes first");
}

#[test]
fn a_command_does_not_outlive_its_lock_when_syncguard_is_stopped() {
    for store in Store::all() {
        let options = ["--key", "k", "--ttl", "3s", "--grace", "1s"];
        let script = "trap '' TERM; echo $$ >$FOLDER/pid; while :; do sleep 0.05; done";
        let mut child = store.background(&options, script);
        let pid = store.wait_for("pid");
        send("STOP", child.id());
        let stopped = Instant::now();
        eventually("it has ended", || !is_alive(&pid));
        assert!(stopped.elapsed() < Duration::from_secs(4), "{:?}", stopped.elapsed());
        send("CONT", child.id());
        assert_eq!(end_of(&mut child).code(), Some(123));
    }
}

#[test]
fn a_command_does_not_outlive_its_grace_when_syncguard_is_stopped() {
    let store = Store::sqlite();
    let options = ["--key", "k", "--ttl", "9s", "--grace", "2s"];
    let script = "trap 'echo x >$FOLDER/asked' TERM; echo $$ >$FOLDER/pid; \
                  while :; do sleep 0.05; done";
    let mut child = store.background(&options, script);
    let pid = store.wait_for("pid");
    assert_eq!(store.code(&["break", "k", "--yes", "-q"]), 0);
    store.wait_for("asked");
    send("STOP", child.id());
    eventually("it has ended", || !is_alive(&pid));
    send("CONT", child.id());
    assert_eq!(end_of(&mut child).code(), Some(123));
}

#[test]
fn contradictory_durations_are_refused() {
    let store = Store::sqlite();
    for options in [
        ["--ttl", "3s", "--grace", "3s"],
        ["--ttl", "3s", "--grace", "2500ms"],
        ["--hold-at-least", "10s", "--max-hold", "1s"],
    ] {
        let arguments = [&["run", "--key", "k"], &options[..], &["--", "true"]].concat();
        let output = store.run(&arguments);
        assert_eq!(output.status.code(), Some(2), "{options:?}");
        assert!(stderr(&output).contains(options[2]), "{options:?}: {}", stderr(&output));
    }
    // The longest duration that can be parsed.
    let huge = "580000000000years";
    assert_eq!(store.code(&["run", "-q", "--key", "k", "--grace", huge, "--", "true"]), 2);
    assert_eq!(store.code(&["run", "-q", "--key", "k", "--max-hold", huge, "--", "true"]), 0);
    // The default grace depends on the TTL.
    assert_eq!(store.code(&["run", "-q", "--key", "k", "--ttl", "300ms", "--", "true"]), 0);
}

#[test]
fn the_command_does_not_start_if_the_lock_is_already_lost() {
    let stores = Store::all();
    let Some(store) = stores.iter().find(|store| store.redis.is_some()) else { return };
    // Responses are late, so that the lock is broken before its holder knows that it has it.
    let port = store.url.rsplit(':').next().and_then(|rest| rest.split('/').next());
    let port: u16 = port.and_then(|port| port.parse().ok()).expect("a URL with a port");
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.expect("a runtime").block_on(async {
            let proxy = Proxy::start(port).await;
            proxy.set(Fault::Delay(Duration::from_millis(700)));
            sender.send(proxy.port()).expect("the test waits");
            std::future::pending::<()>().await;
        });
    });
    let proxied = receiver.recv().expect("it starts").to_string();
    let url = store.url.replace(&port.to_string(), &proxied);
    let options = ["--url", &url, "--key", "k", "--ttl", "1m", "--wait", "20s"];
    let mut child = store.background(&options, "echo x >$FOLDER/started");
    eventually("it is locked", || store.code(&["status", "k"]) == 0);
    assert_eq!(store.code(&["break", "k", "--yes", "-q"]), 0);
    assert_eq!(end_of(&mut child).code(), Some(123));
    assert!(!store.path("started").exists());
}

/// Returns the children of a process.
fn children(process: u32) -> Vec<String> {
    let path = format!("/proc/{process}/task/{process}/children");
    let children = std::fs::read_to_string(path).unwrap_or_default();
    children.split_whitespace().map(str::to_owned).collect()
}

/// Returns the watcher of a running `syncguard`, unless it has died.
fn watcher(syncguard: &Child) -> Option<String> {
    let is_watcher = |pid: &String| {
        let line = std::fs::read_to_string(format!("/proc/{pid}/cmdline"));
        line.is_ok_and(|line| line.contains("__watch")) && is_alive(pid)
    };
    children(syncguard.id()).into_iter().find(is_watcher)
}

#[test]
fn a_killed_watcher_is_replaced() {
    for store in Store::all() {
        let script = "trap '' TERM; sleep 60 & echo $! >$FOLDER/grandchild; \
                      echo $$ >$FOLDER/child; while :; do sleep 0.1; done";
        let mut child = store.background(&["--key", "k", "--grace", "300ms"], script);
        let processes = [store.wait_for("grandchild"), store.wait_for("child")];
        let first = watcher(&child).expect("there is one");
        send("KILL", first.parse().expect("a number"));
        eventually("there is another", || watcher(&child).is_some_and(|pid| pid != first));
        assert!(!children(child.id()).contains(&first), "no zombie");
        assert!(processes.iter().all(|pid| is_alive(pid)), "the command continues");
        // The new watcher needs a moment until it blocks signals.
        std::thread::sleep(Duration::from_millis(300));
        send("KILL", child.id());
        end_of(&mut child);
        eventually("the group has ended", || !processes.iter().any(|pid| is_alive(pid)));
    }
}

/// A command that kills its whole group also kills the watcher, which is found out first.
#[test]
fn the_end_of_a_command_is_known_although_its_watcher_ends_too() {
    let store = Store::sqlite();
    for round in 0..40 {
        let mut child = store.background(&["--key", "k"], "kill -KILL 0");
        assert_eq!(end_of(&mut child).signal(), Some(9), "round {round}");
    }
}

#[test]
fn the_watcher_ends_with_its_group() {
    let store = Store::sqlite();
    let mut child =
        store.background(&["--key", "k", "--ttl", "10m"], "echo $$ >$FOLDER/pid; sleep 60");
    let pid = store.wait_for("pid");
    let watcher = watcher(&child).expect("there is one");
    let killed = Instant::now();
    send("KILL", child.id());
    end_of(&mut child);
    eventually("both have ended", || !is_alive(&pid) && !is_alive(&watcher));
    assert!(killed.elapsed() < Duration::from_secs(10), "it does not wait for the grace");
}
