//! `fence check` and `gc`: fences of resources, and idle fence counters.

mod support;

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};

use support::{Store, json, send, stderr, stdout, syncguard};
use syncguard::sqlite::rusqlite::{Connection, params};

#[test]
fn a_stale_fence_exits_with_1_and_bad_input_with_2() {
    for store in Store::all() {
        let check = |arguments: &[&str]| {
            store.run(&[&["fence", "check", "--resource", "site"], arguments].concat())
        };
        let code = |arguments: &[&str]| check(arguments).status.code();
        assert_eq!(code(&["34"]), Some(0), "{}", stderr(&check(&["34"])));
        assert_eq!(stdout(&check(&["000000000000034"])), "current\n");
        assert_eq!(stdout(&check(&["33"])), "stale: a later holder has been there\n");
        assert_eq!(code(&["33"]), Some(1));
        assert_eq!(json(&check(&["33", "--format", "json"]))["stale"], true);
        assert_eq!(code(&["35", "--key", "deploy"]), Some(0));
        let other = check(&["36", "--key", "nightly"]);
        assert_ne!(other.status.code(), Some(0));
        assert!(stderr(&other).contains("another lock"), "{}", stderr(&other));
        assert_eq!(code(&["35"]), Some(0), "36 was not remembered");
        for bad in ["1234567890123456", "-1", "x", "", "1.5"] {
            assert_eq!(code(&["--", bad]), Some(2), "{bad:?}");
        }
        let none = check(&[]);
        assert_eq!(none.status.code(), Some(2));
        assert!(stderr(&none).contains("no fence"), "{}", stderr(&none));
        for bad in ["", &"r".repeat(513)] {
            let output = store.run(&["fence", "check", "--resource", bad, "1"]);
            assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
        }
    }
}

/// A script checks its fence before it writes. It is paused past its TTL, a later run writes, and
/// the check refuses the paused script.
#[test]
fn a_paused_script_is_refused() {
    let store = Store::sqlite();
    let file = store.path("site.txt");
    let script = format!(
        "read line; {} fence check --url {} --resource site && echo $1 >> {}; echo \"code $?\"",
        env!("CARGO_BIN_EXE_syncguard"),
        store.url,
        file.display()
    );
    // The lock is acquired by another process, so that the script outlives it, as a script does
    // that was started with the fence of a lock that its starter lost.
    let run = |name: &str, fence: &str| {
        Command::new("sh")
            .args(["-c", &script, "sh", name])
            .env("SYNCGUARD_FENCE", fence)
            .env("SYNCGUARD_KEY", "site")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("starts")
    };
    let acquire = || {
        let output = store.run(&["acquire", "site", "--ttl", "500ms", "--format", "json"]);
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        json(&output)["fence"].as_str().expect("a fence").to_owned()
    };
    let finish = |mut child: std::process::Child| {
        child.stdin.take().expect("piped").write_all(b"\n").expect("written");
        let lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        let last = lines.map_while(Result::ok).last().expect("a line");
        child.wait().expect("ends");
        last
    };
    let paused = run("paused", &acquire());
    send("STOP", paused.id());
    let later = acquire(); // waits until the lock of the paused script has expired
    assert_eq!(finish(run("later", &later)), "code 0");
    send("CONT", paused.id());
    assert_eq!(finish(paused), "code 1");
    assert_eq!(std::fs::read_to_string(&file).expect("written"), "later\n");
}

#[test]
fn gc_deletes_idle_counters_and_refuses_while_fences_only_count() {
    let store = Store::sqlite();
    assert_eq!(store.code(&["setup", "-q"]), 0);
    let db = Connection::open(store.path("locks.db")).expect("opens");
    let insert = "INSERT INTO syncguard_fences VALUES (?1, ?2)";
    for number in 0..3 {
        db.execute(insert, params![format!("order:{number}"), 5]).expect("works");
    }
    let refused = store.run(&["gc"]);
    assert_eq!(refused.status.code(), Some(2), "{}", stderr(&refused));
    assert!(stderr(&refused).contains("starts at 1 again"), "{}", stderr(&refused));
    let url = format!("{}?fences=clock", store.url);
    let gc = |arguments: &[&str]| {
        syncguard(&[&["gc", "--url", &url], arguments].concat()).output().expect("runs")
    };
    for short in ["47h", "0", "1s"] {
        assert_eq!(gc(&["--older-than", short]).status.code(), Some(2), "{short}");
    }
    assert_eq!(json(&gc(&["--format", "json"]))["deleted"], 3);
    assert_eq!(stdout(&gc(&["--older-than", "48h"])), "0 fence counters deleted\n");
}
