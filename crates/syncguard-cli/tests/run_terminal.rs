//! `syncguard run` at a terminal, which `script` creates. It forwards its input to the terminal.

mod support;

use std::io::Write;
use std::process::{Child, Command, Output, Stdio};
use std::thread::sleep;
use std::time::Duration;

use support::{Store, end_of, eventually, stdout};

fn script(store: &Store, command: &str) -> Child {
    // A command that hangs must not hang the tests.
    Command::new("timeout")
        .args(["--kill-after=1", "30", "script", "-qec", command, "/dev/null"])
        .env("SYNCGUARD_URL", &store.url)
        .env("SYNCGUARD", env!("CARGO_BIN_EXE_syncguard"))
        .env("FOLDER", store.folder.path())
        .env("NO_COLOR", "1")
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
fn the_command_is_in_the_foreground_and_reads_the_terminal() {
    let store = Store::sqlite();
    let command = "$SYNCGUARD run -q --key k -- sh -c 'read -r line; echo \"read: $line\"; \
                   ps -o stat= -p $$'; echo back; read -r line; echo \"shell: $line\"";
    let output = type_and_end(script(&store, command), &[("one\n", 700), ("two\n", 700)]);
    let shown = stdout(&output);
    assert!(shown.contains("read: one"), "{shown}");
    assert!(shown.contains('+'), "in the foreground: {shown}");
    assert!(shown.contains("shell: two"), "the shell gets the terminal back: {shown}");
}

/// With `stty tostop`, a process in the background is stopped when it writes. While the command is
/// in the foreground, `syncguard` is in the background.
#[test]
fn a_message_does_not_stop_syncguard() {
    let store = Store::sqlite();
    let command = "stty tostop; set -m; $SYNCGUARD run --key k --ttl 9s --grace 1s -- \
                   sh -c 'echo x >$FOLDER/held; exec sleep 20'; echo code $?";
    let child = script(&store, command);
    store.wait_for("held");
    assert_eq!(store.code(&["break", "k", "--yes", "-q"]), 0);
    let shown = stdout(&type_and_end(child, &[]));
    assert!(shown.contains("code 123"), "{shown}");
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
fn ctrl_z_stops_both_and_the_shell_continues() {
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
fn ctrl_c_also_ends_the_calling_script() {
    let store = Store::sqlite();
    std::fs::write(store.path("script"), "$SYNCGUARD run -q --key k -- sleep 5\necho went on\n")
        .expect("written");
    let command = "sh $FOLDER/script; echo \"code $?\"";
    let shown = stdout(&type_and_end(script(&store, command), &[("\x03", 900)]));
    assert!(!shown.contains("went on"), "{shown}");
    assert_eq!(store.code(&["status", "k"]), 1);
}

#[test]
fn a_background_command_can_be_brought_to_the_foreground() {
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
fn waiting_shows_a_progress_line() {
    let store = Store::sqlite();
    let mut holder = store.background(&["--key", "k"], "echo x >$FOLDER/held; sleep 3");
    store.wait_for("held");
    let command = "$SYNCGUARD run --key k --wait 1500ms -- true; echo \"code $?\"";
    let shown = stdout(&script(&store, command).wait_with_output().expect("it ends"));
    assert!(shown.contains("waiting for k: held by "), "{shown}");
    assert!(shown.contains(", sh, for 0s, Ctrl-C to cancel"), "{shown}");
    assert!(shown.contains("code 124"), "{shown}");
    holder.wait().expect("it ends");
}

#[test]
fn a_stopped_command_continues_only_with_its_lock() {
    let store = Store::sqlite();
    let run = "$SYNCGUARD run -q --key k --ttl 1500ms -- sh -c \
               'while :; do echo x >>$FOLDER/log; done'\n";
    let mut child = script(&store, "bash --norc -i");
    let mut keyboard = child.stdin.take().expect("piped");
    let mut type_in = |text: &str| {
        keyboard.write_all(text.as_bytes()).expect("it reads");
        keyboard.flush().expect("it reads");
    };
    let written = || std::fs::metadata(store.path("log")).map_or(0, |file| file.len());
    sleep(Duration::from_millis(500));
    type_in(run);
    eventually("it works", || written() > 0);
    type_in("\x1a");
    sleep(Duration::from_millis(500));
    let before = written();
    eventually("its lock expires", || {
        store.code(&["acquire", "-q", "--key", "k", "--ttl", "1m"]) == 0
    });
    type_in("fg\n");
    sleep(Duration::from_millis(1500));
    assert_eq!(written(), before, "it does not work without its lock");
    type_in("echo \"code $?\"; exit\n");
    let shown = stdout(&child.wait_with_output().expect("it ends"));
    assert!(shown.contains("code 123"), "{shown}");
}

#[test]
fn ctrl_c_stops_a_shell_loop() {
    let store = Store::sqlite();
    let typed = [
        ("while :; do $SYNCGUARD run -q --key k -- sleep 3; done\n", 500),
        ("\x03", 900),
        ("echo \"after $((1 + 1))\"; exit\n", 900),
    ];
    let shown = stdout(&type_and_end(script(&store, "bash --norc -i"), &typed));
    assert!(shown.contains("after 2"), "{shown}");
    // The same while it waits for the lock.
    let mut holder = store.background(&["--key", "k"], "echo x >$FOLDER/held; sleep 30");
    store.wait_for("held");
    let wait = ("while :; do $SYNCGUARD run -q --key k --wait 20s -- true; done\n", 500);
    let shown =
        stdout(&type_and_end(script(&store, "bash --norc -i"), &[wait, typed[1], typed[2]]));
    assert!(shown.contains("after 2"), "{shown}");
    end_holder(&mut holder);
}

fn end_holder(holder: &mut Child) {
    support::send("TERM", holder.id());
    end_of(holder);
}

#[test]
fn a_free_lock_is_acquired_if_ctrl_z_outlasts_the_wait() {
    let store = Store::sqlite();
    let mut holder = store.background(&["--key", "k"], "echo x >$FOLDER/held; sleep 2");
    store.wait_for("held");
    let typed = [
        ("$SYNCGUARD run -q --key k --wait 1500ms -- echo \"got $((1 + 1))\"\n", 300),
        ("\x1a", 500),
        ("fg\n", 2500),
        ("exit\n", 700),
    ];
    let shown = stdout(&type_and_end(script(&store, "bash --norc -i"), &typed));
    assert!(shown.contains("Stopped"), "{shown}");
    assert!(shown.contains("got 2"), "{shown}");
    end_of(&mut holder);
}

#[test]
fn ctrl_z_does_not_stop_a_command_that_no_shell_can_continue() {
    let store = Store::sqlite();
    let command = "exec $SYNCGUARD run -q --key k -- sh -c \
                   'echo started; sleep 0.6; sleep 0.6; echo \"finished $((1 + 1))\"'";
    let shown = stdout(&type_and_end(script(&store, command), &[("\x1a", 500)]));
    assert!(shown.contains("finished 2"), "{shown}");
}

#[test]
fn the_terminal_is_restored_after_a_kill() {
    let store = Store::sqlite();
    let command = "$SYNCGUARD run -q --key k --ttl 3s -- sh -c 'kill -9 $PPID; sleep 0.3'; \
                   sleep 0.7; read -r line; echo \"shell: $line\"";
    let shown = stdout(&type_and_end(script(&store, command), &[("two\n", 1500)]));
    assert!(shown.contains("shell: two"), "{shown}");
}

#[test]
fn a_command_substitution_can_read_from_the_terminal() {
    let store = Store::sqlite();
    let typed = [
        ("x=$($SYNCGUARD run -q --key k -- head -n 1 /dev/tty)\n", 500),
        ("hello\n", 900),
        ("echo \"read: $x\"; exit\n", 500),
    ];
    let shown = stdout(&type_and_end(script(&store, "bash --norc -i"), &typed));
    assert!(shown.contains("read: hello"), "{shown}");
}
