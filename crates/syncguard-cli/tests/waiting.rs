//! Waiting for a lock: how long, during store errors, and without leaving locks behind.

mod support;

use std::process::Stdio;
use std::time::{Duration, Instant};

use support::{Store, end_of, stderr, stdout};
use test_support::{Fault, PostgresOptions, Proxy};

#[test]
fn a_wait_lasts_until_its_limit() {
    // Longer than ten retries, after which waits ended in an earlier version.
    let store = Store::sqlite();
    let mut holder = store.background(&["-k", "k"], "echo x >$FOLDER/held; sleep 14");
    store.wait_for("held");
    let started = Instant::now();
    assert_eq!(store.code(&["run", "-k", "k", "--wait", "10m", "--", "true"]), 0);
    assert!(started.elapsed() > Duration::from_secs(10), "the lock was held");
    assert!(end_of(&mut holder).success());
}

#[test]
fn a_wait_continues_while_the_store_restarts() {
    let Some(mut store) = Store::redis() else { return };
    assert_eq!(store.code(&["acquire", "-q", "-k", "k", "--ttl", "1m"]), 0);
    let mut waiter = store.background(&["-k", "k", "--wait", "1m"], "echo x >$FOLDER/ran");
    let mut fail_fast =
        store.background(&["-k", "k", "--wait", "1m", "--fail-fast"], "echo x >$FOLDER/ran");
    std::thread::sleep(Duration::from_millis(800));
    store.redis.as_mut().expect("it runs").crash();
    assert_eq!(end_of(&mut fail_fast).code(), Some(125), "it fails on the first error");
    std::thread::sleep(Duration::from_secs(2));
    assert!(waiter.try_wait().expect("a child").is_none(), "it waits");
    store.redis.as_mut().expect("it was there").run();
    assert_eq!(end_of(&mut waiter).code(), Some(0));
    store.wait_for("ran");
}

#[test]
fn a_wait_includes_the_start_of_the_store() {
    let Some(mut store) = Store::redis() else { return };
    store.redis.as_mut().expect("it runs").crash();
    for command in ["run", "acquire"] {
        let mut arguments = vec![command, "-q", "-k", command, "--wait", "1m"];
        if command == "run" {
            arguments.extend(["--", "true"]);
        }
        let mut waiter = store.command(&arguments);
        let waiter = waiter.stdout(Stdio::null()).stderr(Stdio::piped());
        let mut waiter = waiter.spawn().expect("runs");
        std::thread::sleep(Duration::from_millis(1500));
        assert!(waiter.try_wait().expect("a child").is_none(), "{command} waits");
        store.redis.as_mut().expect("it was there").run();
        assert_eq!(end_of(&mut waiter).code(), Some(0), "{command}");
        store.redis.as_mut().expect("it was there").crash();
    }
    let started = Instant::now();
    let fast = store.run(&["run", "-k", "k", "--wait", "1m", "--fail-fast", "--", "true"]);
    assert_eq!(fast.status.code(), Some(125));
    assert!(started.elapsed() < Duration::from_secs(20));
    // A store that never starts is not a conflict.
    let never = store.run(&["run", "-k", "k", "--wait", "1s", "--", "true"]);
    assert_eq!(never.status.code(), Some(125), "{}", stderr(&never));
    assert!(stderr(&never).contains("127.0.0.1:"), "{}", stderr(&never));
}

#[test]
fn a_store_that_crashes_during_the_wait_is_not_a_conflict() {
    let Some(mut store) = Store::redis() else { return };
    assert_eq!(store.code(&["acquire", "-q", "-k", "k", "--ttl", "1m"]), 0);
    let mut waiter = store.background(&["-k", "k", "--wait", "4s", "-E", "7"], "true");
    std::thread::sleep(Duration::from_millis(800));
    store.redis.as_mut().expect("it runs").crash();
    assert_eq!(end_of(&mut waiter).code(), Some(125));
    let output = waiter.wait_with_output().expect("ended");
    assert!(stderr(&output).contains("127.0.0.1:"), "{}", stderr(&output));
}

#[test]
fn postgres_hands_a_lock_over_immediately() {
    let Some((store, _server)) = Store::postgres(&PostgresOptions::default()) else { return };
    let mut took = Vec::new();
    for round in 0..5 {
        let (held, go) = (format!("held{round}"), format!("go{round}"));
        let script = format!(
            "echo x >$FOLDER/{held}; while [ ! -e $FOLDER/{go} ]; do sleep 0.02; done; \
             date +%s%N >$FOLDER/ended{round}"
        );
        let mut holder = store.background(&["-k", "k"], &script);
        store.wait_for(&held);
        let script = format!("date +%s%N >$FOLDER/began{round}");
        let mut waiter = store.background(&["-k", "k", "--wait", "1m"], &script);
        std::thread::sleep(Duration::from_millis(1200));
        std::fs::write(store.path(&go), "").expect("writable");
        assert!(end_of(&mut holder).success() && end_of(&mut waiter).success());
        let at = |name: &str| -> u128 {
            store.wait_for(&format!("{name}{round}")).parse().expect("a number")
        };
        took.push(Duration::from_nanos(
            u64::try_from(at("began").saturating_sub(at("ended"))).expect("a moment"),
        ));
    }
    took.sort();
    // The median, because the machine may be busy; a lost notification costs up to a second.
    assert!(took[2] < Duration::from_millis(250), "{took:?}");
}

#[test]
fn a_waiting_run_works_with_one_connection() {
    let Some((mut store, server)) = Store::postgres(&PostgresOptions::default()) else { return };
    // One for the holder, one for the waiter, and none just for notifications.
    drop(server.sql("CREATE ROLE poor LOGIN CONNECTION LIMIT 2"));
    drop(server.sql("GRANT ALL ON ALL TABLES IN SCHEMA public TO poor"));
    store.url = store.url.replace("postgres://postgres@", "postgres://poor@");
    let mut holder = store.background(&["-k", "k"], "echo x >$FOLDER/held; sleep 2");
    store.wait_for("held");
    let mut waiter = store.background(&["-k", "k", "--wait", "1m"], "true");
    assert!(end_of(&mut holder).success());
    assert!(end_of(&mut waiter).success());
}

#[test]
fn a_waiting_run_opens_one_connection() {
    let Some((store, server)) = Store::postgres(&PostgresOptions::default()) else { return };
    let mut holder = store.background(&["-k", "k"], "echo x >$FOLDER/held; sleep 3");
    store.wait_for("held");
    let mut waiters: Vec<_> = (0..5)
        .map(|_| store.background(&["-k", "k", "--wait", "1m"], "date +%s%N >>$FOLDER/ran"))
        .collect();
    std::thread::sleep(Duration::from_millis(1500));
    let count = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'syncguard'";
    assert_eq!(server.sql(count), "6");
    let markers =
        "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ShareLock'";
    assert_eq!(server.sql(markers), "5", "one per waiter; the holder listens without one");
    for child in waiters.iter_mut().chain([&mut holder]) {
        assert!(end_of(child).success());
    }
    assert_eq!(std::fs::read_to_string(store.path("ran")).expect("written").lines().count(), 5);
}

#[test]
fn a_connection_limit_is_retried() {
    let few = PostgresOptions::default().with(["max_connections = 12"]);
    let Some((store, _server)) = Store::postgres(&few) else { return };
    let options = ["-k", "k", "--wait", "2m"];
    let mut all: Vec<_> =
        (0..30).map(|_| store.background(&options, "echo x >>$FOLDER/ran")).collect();
    let started = Instant::now();
    while all.iter_mut().any(|child| child.try_wait().expect("a child").is_none()) {
        assert!(started.elapsed() < Duration::from_secs(90), "every run gets the lock");
        std::thread::sleep(Duration::from_millis(20));
    }
    for child in all {
        let output = child.wait_with_output().expect("ended");
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    }
    let ran = std::fs::read_to_string(store.path("ran")).expect("written");
    assert_eq!(ran.lines().count(), 30);
}

#[test]
fn a_lock_id_that_cannot_be_written_leaves_no_lock() {
    for store in Store::all() {
        for format in ["text", "json"] {
            let full = std::fs::File::options().write(true).open("/dev/full").expect("Linux");
            let mut command = store.command(&["acquire", "-k", "k", "--ttl", "1m"]);
            let output = command.args(["--format", format]).stdout(full).output().expect("runs");
            assert_eq!(output.status.code(), Some(125));
            assert!(stderr(&output).contains("standard output"), "{}", stderr(&output));
            assert_eq!(store.code(&["status", "k"]), 1, "nothing is held");
        }
    }
}

#[test]
fn a_closed_pipe_or_output_leaves_no_lock() {
    // The pipe is closed before `acquire` writes; `>&-` closes standard output itself.
    for output in ["| true", ">&-"] {
        let store = Store::sqlite();
        let acquire = "$SYNCGUARD acquire -k k --ttl 1m 2>$FOLDER/printed";
        let script = format!("({acquire}; echo \"code $?\" >$FOLDER/code) {output}; sleep 0.1");
        let mut shell = std::process::Command::new("sh");
        shell.args(["-c", &script]);
        shell.env("SYNCGUARD", env!("CARGO_BIN_EXE_syncguard")).env("SYNCGUARD_URL", &store.url);
        assert!(shell.env("FOLDER", store.folder.path()).status().expect("runs").success());
        assert_eq!(store.wait_for("code"), "code 125", "{output}");
        assert!(store.wait_for("printed").contains("standard output"), "{output}");
        assert_eq!(store.code(&["setup"]), 0, "the file may not exist yet");
        assert_eq!(store.code(&["status", "k"]), 1, "nothing is held");
    }
}

#[test]
fn a_lock_id_may_be_discarded_on_purpose() {
    let store = Store::sqlite();
    let mut command = store.command(&["acquire", "-q", "-k", "k", "--ttl", "1m"]);
    assert!(command.stdout(Stdio::null()).status().expect("runs").success());
    assert_eq!(store.code(&["status", "k"]), 0, "it is held");
}

#[tokio::test]
async fn an_acquire_that_times_out_leaves_no_lock() {
    let Some(store) = Store::redis() else { return };
    let proxy = Proxy::start(store.redis.as_ref().expect("it runs").port()).await;
    let url = format!("redis://127.0.0.1:{}/0", proxy.port());
    let holder = store.run(&["acquire", "-q", "-k", "k", "--ttl", "1m"]);
    let mut waiter = store.command(&["acquire", "-q", "-k", "k", "--ttl", "1m", "--wait", "4s"]);
    let waiter = waiter.env("SYNCGUARD_URL", url).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut waiter = waiter.spawn().expect("runs");
    tokio::time::sleep(Duration::from_millis(1500)).await;
    // From now on, its requests are executed, but it gets no replies.
    proxy.set(Fault::SwallowReplies);
    let lock_id = stdout(&holder).trim().to_owned();
    let released = tokio::task::spawn_blocking(move || {
        assert_eq!(store.code(&["release", "-q", &lock_id]), 0);
        let status = end_of(&mut waiter);
        (store, status, waiter.wait_with_output().expect("ended"))
    });
    // Until its wait is over.
    tokio::time::sleep(Duration::from_secs(3)).await;
    proxy.set(Fault::None);
    let (store, status, output) = released.await.expect("no panic");
    assert_ne!(status.code(), Some(0), "{}", stdout(&output));
    assert_eq!(store.code(&["status", "k"]), 1, "no lock is left: {}", stderr(&output));
}

#[test]
fn wait_ends_in_time_although_the_store_does_not_answer() {
    let silent = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = silent.local_addr().expect("an address");
    for options in
        ["connect_timeout_ms=60000", "connect_timeout_ms=60000&response_timeout_ms=60000"]
    {
        let url = format!("redis://{address}?{options}");
        let mut waiting = support::syncguard(&["--url", &url, "wait", "k", "--wait", "300ms"]);
        let mut waiting = waiting.stderr(Stdio::null()).spawn().expect("runs");
        assert_eq!(end_of(&mut waiting).code(), Some(125), "{options}");
    }
}

#[test]
fn wait_returns_when_the_lock_is_free() {
    for store in Store::all() {
        assert_eq!(store.code(&["setup", "-q"]), 0);
        assert_eq!(store.code(&["wait", "k"]), 0, "free already");
        let mut holder = store.background(&["-k", "k"], "echo x >$FOLDER/held; sleep 4");
        store.wait_for("held");
        assert_eq!(store.code(&["wait", "k", "--wait", "300ms"]), 124);
        assert_eq!(store.code(&["wait", "k", "-w", "0", "-E", "9"]), 9);
        let started = Instant::now();
        assert_eq!(store.code(&["wait", "-k", "k"]), 0);
        assert!(started.elapsed() < Duration::from_secs(10));
        assert_eq!(store.code(&["status", "k"]), 1);
        assert!(end_of(&mut holder).success());
    }
}
