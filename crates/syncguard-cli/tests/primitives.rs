//! `run` with several keys or slots, and `elect`, tested with the real binary.

mod support;

use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use support::{Store, end_of, eventually, is_alive, send, stderr, stdout};

/// Starts `syncguard elect` with a shell script in the background.
fn elect(store: &Store, options: &[&str], script: &str) -> Child {
    let arguments = [&["elect", "-q"], options, &["--", "sh", "-c", script]].concat();
    store
        .command(&arguments)
        .env("FOLDER", store.folder.path())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary runs")
}

#[test]
fn several_keys_are_held_together() {
    for store in Store::all() {
        let script = "echo \"$SYNCGUARD_KEY $SYNCGUARD_FENCE\"; echo \"$SYNCGUARD_FENCES\"";
        let output = store.run(&["run", "-q", "-k", "b", "-k", "a", "--", "sh", "-c", script]);
        let fence = "000000000000001";
        let expected = format!("a {fence}\n{fence} a\n{fence} b\n");
        assert_eq!(stdout(&output), expected, "{}", stderr(&output));

        let mut holder = store.background(&["-k", "a", "-k", "b"], "echo x >$FOLDER/held; sleep 2");
        store.wait_for("held");
        for key in ["a", "b"] {
            assert_eq!(store.code(&["status", "-q", key]), 0);
            assert_eq!(store.code(&["run", "-q", "--no-wait", key, "--", "true"]), 124);
        }
        // All or none: it waits for b, and c is free again afterwards.
        let busy = ["run", "-q", "--wait", "300ms", "-k", "c", "-k", "b", "--", "true"];
        assert_eq!(store.code(&busy), 124);
        assert_eq!(store.code(&["run", "-q", "--no-wait", "c", "--", "true"]), 0);
        assert!(end_of(&mut holder).success());
        assert_eq!(store.code(&["status", "a"]), 1);
        assert_eq!(store.code(&["status", "b"]), 1);
    }
}

#[test]
fn losing_one_of_several_keys_ends_the_command() {
    for store in Store::all() {
        let options = ["-k", "a", "-k", "b", "--ttl", "2s", "--grace", "1s"];
        let mut child = store.background(&options, "echo $$ >$FOLDER/pid; sleep 60");
        let pid = store.wait_for("pid");
        assert_eq!(store.code(&["break", "b", "--yes", "-q"]), 0);
        assert_eq!(end_of(&mut child).code(), Some(123));
        assert!(!is_alive(&pid), "the command does not continue without one of its locks");
    }
}

#[test]
fn slots_limit_how_many_commands_run() {
    for store in Store::all() {
        let script = "echo $SYNCGUARD_SLOT >>$FOLDER/slots; echo $SYNCGUARD_KEY >>$FOLDER/keys; \
                      sleep 2";
        let mut holders: Vec<_> =
            (0..2).map(|_| store.background(&["gpu", "--slots", "2"], script)).collect();
        // Written last.
        eventually("both run", || store.wait_for("keys").lines().count() == 2);
        let mut slots: Vec<_> = store.wait_for("slots").lines().map(str::to_owned).collect();
        slots.sort();
        assert_eq!(slots, ["0", "1"]);
        assert!(store.wait_for("keys").contains("gpu:slot:1"));
        let third = ["run", "gpu", "--slots", "2", "--no-wait", "--", "true"];
        let output = store.run(&third);
        assert_eq!(output.status.code(), Some(124), "{}", stderr(&output));
        let status = stdout(&store.run(&["status", "gpu", "--slots", "2"]));
        assert!(status.starts_with("2 of 2 slots held\nslot 0 held "), "{status}");
        assert!(stdout(&store.run(&["ls"])).contains("gpu:slot:0"));
        let waiting = ["run", "-q", "gpu", "--slots", "2", "--wait", "forever", "--", "true"];
        assert_eq!(store.code(&waiting), 0, "a slot is handed over");
        for holder in &mut holders {
            assert!(end_of(holder).success());
        }
        let status = store.run(&["status", "gpu", "--slots", "2"]);
        assert_eq!(
            (stdout(&status).as_str(), status.status.code()),
            ("0 of 2 slots held\n", Some(1))
        );
    }
}

#[test]
fn a_killed_holder_of_a_slot_is_replaced_after_its_ttl() {
    let store = Store::sqlite();
    let options = ["gpu", "--slots", "1", "--ttl", "1s", "--grace", "100ms"];
    let mut holder = store.background(&options, "echo $$ >$FOLDER/pid; sleep 60");
    let pid = store.wait_for("pid");
    send("KILL", holder.id());
    end_of(&mut holder);
    let waiting = ["run", "-q", "gpu", "--slots", "1", "--wait", "20s", "--", "true"];
    assert_eq!(store.code(&waiting), 0);
    assert!(!is_alive(&pid), "the command of the killed holder does not continue");
}

#[test]
fn one_leads_and_another_takes_over_at_once() {
    for store in Store::all() {
        let script = "echo \"$SYNCGUARD_FENCE $$\" >>$FOLDER/terms; sleep 60";
        let terms = || store.wait_for("terms").lines().map(str::to_owned).collect::<Vec<_>>();
        let mut first = elect(&store, &["x"], script);
        eventually("the first leads", || terms().len() == 1);
        let mut second = elect(&store, &["x"], script);
        let status = stdout(&store.run(&["status", "x", "--election"]));
        assert!(status.starts_with("led by "), "{status}");
        assert!(stdout(&store.run(&["ls"])).contains("x:leader"));
        std::thread::sleep(Duration::from_millis(300));
        assert_eq!(terms().len(), 1, "only one leads");
        let started = Instant::now();
        send("TERM", first.id());
        eventually("the second leads", || terms().len() == 2);
        assert!(started.elapsed() < Duration::from_secs(5), "it does not wait for the TTL");
        assert!(end_of(&mut first).code().is_none_or(|code| code >= 128), "SIGTERM ends it");
        let pid = terms()[0].split(' ').nth(1).expect("a pid").to_owned();
        assert!(!is_alive(&pid), "the command of the first has ended");
        assert!(terms()[1].starts_with("000000000000002 "), "{:?}", terms());
        send("TERM", second.id());
        end_of(&mut second);
        assert_eq!(store.code(&["status", "x", "--election"]), 1);
    }
}

#[test]
fn a_command_that_ends_is_run_again_unless_once() {
    let store = Store::sqlite();
    let mut child = elect(&store, &["x"], "echo $SYNCGUARD_FENCE >>$FOLDER/terms; exit 3");
    eventually("it leads again", || store.wait_for("terms").lines().count() >= 2);
    send("TERM", child.id());
    end_of(&mut child);
    let output = child.wait_with_output().expect("it has ended");
    assert_eq!(stderr(&output), "", "-q prints errors only");
    assert_eq!(store.code(&["elect", "y", "--once", "--", "sh", "-c", "exit 3"]), 3);
    assert_eq!(store.code(&["elect", "y", "--once", "--", "/no/such/command"]), 127);
}

#[test]
fn a_lost_lead_ends_the_command_and_campaigns_again() {
    let store = Store::sqlite();
    let script = "echo $$ >>$FOLDER/pids; sleep 60";
    let mut child = elect(&store, &["x", "--ttl", "2s", "--grace", "200ms"], script);
    let pid = store.wait_for("pids");
    assert_eq!(store.code(&["break", "x:leader", "--yes", "-q"]), 0);
    eventually("it leads again", || store.wait_for("pids").lines().count() == 2);
    assert!(!is_alive(&pid), "the command does not continue without the lead");
    send("TERM", child.id());
    end_of(&mut child);
}

#[test]
fn a_leader_that_is_stopped_is_replaced_and_its_command_ends() {
    let store = Store::sqlite();
    let script = "echo $$ >>$FOLDER/pids; sleep 60";
    let options = ["x", "--ttl", "2s", "--grace", "200ms"];
    let mut first = elect(&store, &options, script);
    let pid = store.wait_for("pids");
    let mut second = elect(&store, &options, script);
    send("STOP", first.id());
    // The watcher ends the command before the lock expires.
    eventually("the command of the first ends", || !is_alive(&pid));
    eventually("the second leads", || store.wait_for("pids").lines().count() == 2);
    send("CONT", first.id());
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(store.wait_for("pids").lines().count(), 2, "the first does not lead meanwhile");
    for child in [&mut second, &mut first] {
        send("TERM", child.id());
        end_of(child);
    }
}

#[test]
fn usage_errors_name_the_option() {
    let store = Store::sqlite();
    for (arguments, message) in [
        (
            &["run", "k", "--slots", "0", "--", "true"][..],
            "a semaphore has 1 to 1000 permits, not 0",
        ),
        (
            &["run", "-k", "a", "-k", "b", "--slots", "2", "--", "true"],
            "--slots works with one key only",
        ),
        (
            &["run", "-k", "a", "-k", "b", "--hold-at-least", "1s", "--", "true"],
            "--hold-at-least works with one key only",
        ),
        (&["status", "k", "--slots", "1001"], "--slots must be from 1 to 1000"),
    ] {
        let output = store.run(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {}", stderr(&output));
        assert_eq!(stderr(&output), format!("syncguard: {message}\n"));
    }
}
