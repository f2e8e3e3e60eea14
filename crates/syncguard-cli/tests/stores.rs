//! Which store a command uses (named, default, missing or mistyped), and what `doctor` reports.

mod support;

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use support::{Store, json, stderr, stdout, syncguard};
use test_support::{
    PostgresOptions, PostgresServer, RedisCluster, RedisOptions, RedisServer, TempDir,
};

const NOTICE: &str = "no --url, --url-file or SYNCGUARD_URL";

/// Returns a `syncguard` command with the default store in this directory.
fn by_default(state: &Path, arguments: &[&str]) -> Command {
    let mut command = syncguard(arguments);
    command.env("XDG_STATE_HOME", state);
    command
}

#[test]
fn inside_a_run_the_default_store_is_refused() {
    let store = Store::sqlite();
    for nested in ["acquire -q -k b", "status b", "run -q -k b -- true", "break b --yes", "ls"] {
        let script = format!("$SYNCGUARD {nested}; echo \"code $?\"");
        let mut command = store.command(&["run", "-q", "-k", "a", "--", "sh", "-c", &script]);
        command.env("SYNCGUARD", env!("CARGO_BIN_EXE_syncguard"));
        let output = command.env("XDG_STATE_HOME", store.folder.path()).output().expect("runs");
        assert_eq!(stdout(&output), "code 2\n", "{nested}: {}", stderr(&output));
        assert!(stderr(&output).contains("--url"), "{nested}: {}", stderr(&output));
        assert!(!store.path("syncguard").exists(), "{nested}");
    }
    let nested = format!("$SYNCGUARD acquire -q -k b --url {}", store.url);
    let mut command = store.command(&["run", "-q", "-k", "a", "--", "sh", "-c", &nested]);
    let output = command.env("SYNCGUARD", env!("CARGO_BIN_EXE_syncguard")).output().expect("runs");
    assert_eq!(output.status.code(), Some(0), "with --url: {}", stderr(&output));
}

#[test]
fn a_url_can_be_required() {
    let state = TempDir::new();
    let output = by_default(state.path(), &["status", "k", "--require-url"]).output();
    let output = output.expect("runs");
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("SYNCGUARD_URL"), "{}", stderr(&output));
    let by_variable = |value: &str| {
        let mut command = by_default(state.path(), &["acquire", "-k", "k", "--no-wait", "-q"]);
        command.env("SYNCGUARD_REQUIRE_URL", value).output().expect("runs").status.code()
    };
    assert_eq!(by_variable("1"), Some(2));
    assert!(!state.path().join("syncguard").exists(), "nothing was created");
    assert_eq!(by_variable(""), Some(0), "empty counts as unset");
    assert_eq!(by_variable("0"), Some(124), "and so does 0");
}

#[test]
fn every_command_notes_the_default_store() {
    let state = TempDir::new();
    let id = "AAAAAAAAAAAAAAAAAAAAAA";
    for arguments in [
        vec!["acquire", "-k", "k"],
        vec!["run", "-k", "r", "--", "true"],
        vec!["status", "k"],
        vec!["ls"],
        vec!["owns", id],
        vec!["extend", id],
        vec!["release", id],
        vec!["break", "k", "--yes"],
        vec!["setup"],
        vec!["doctor"],
    ] {
        let output = by_default(state.path(), &arguments).output().expect("runs");
        assert!(stderr(&output).contains(NOTICE), "{arguments:?}: {}", stderr(&output));
        let quiet = [&arguments[..1], &["-q"], &arguments[1..]].concat();
        let output = by_default(state.path(), &quiet).output().expect("runs");
        assert!(!stderr(&output).contains(NOTICE), "{quiet:?}: {}", stderr(&output));
    }
}

#[test]
fn url_prints_the_store_without_passwords() {
    let state = TempDir::new();
    let output = by_default(state.path(), &["url"]).output().expect("runs");
    let expected = format!("sqlite:{}/syncguard/locks.db\n", state.path().display());
    assert_eq!(stdout(&output), expected, "{}", stderr(&output));
    let mut command = syncguard(&["url", "--format", "json"]);
    command.env("SYNCGUARD_URL", "redis://user:canary@host:7/0?sentinel_password=canary");
    let output = command.output().expect("runs");
    let shown = json(&output);
    assert_eq!(shown["source"], "SYNCGUARD_URL");
    assert!(!stdout(&output).contains("canary"), "{}", stdout(&output));
    assert!(shown["url"].as_str().expect("a text").contains("host:7"), "{shown}");
}

#[test]
fn errors_name_the_store_but_never_the_password() {
    for (url, place) in [
        ("redis://user:canary@127.0.0.1:1/0", "127.0.0.1:1"),
        ("redis://:canary@no-such-host.invalid/0", "no-such-host.invalid"),
        ("postgres://user:canary@127.0.0.1:1/db", "127.0.0.1:1"),
        ("postgres://user:canary@no-such-host.invalid/db", "no-such-host.invalid"),
        ("sqlite:/no/such/folder/locks.db", "/no/such/folder/locks.db"),
    ] {
        for arguments in [vec!["ls"], vec!["acquire", "-k", "k", "--no-wait"]] {
            let output =
                syncguard(&[&arguments[..], &["--url", url]].concat()).output().expect("runs");
            assert_eq!(output.status.code(), Some(125), "{url}");
            let printed = stderr(&output);
            assert!(printed.contains(place) && !printed.contains("canary"), "{printed}");
        }
    }
    let unknown = "redis://:canary@no-such-host.invalid:7/0";
    let output = syncguard(&["ls", "--url", unknown]).output().expect("runs");
    let expected = "syncguard: cannot resolve Redis host no-such-host.invalid\n";
    assert_eq!(stderr(&output), expected);
    // A slash in a password makes the user name look like the host.
    for url in ["redis://canary:canary/x@127.0.0.1:1/0", "redis://canary:1/canary@127.0.0.1:1/0"] {
        let output = syncguard(&["ls", "--url", url]).output().expect("runs");
        assert!(!stderr(&output).contains("canary"), "{}", stderr(&output));
    }
    let output = syncguard(&["ls", "--url-file", "/no/such/file"]).output().expect("runs");
    assert_eq!(output.status.code(), Some(125));
    assert!(stderr(&output).contains("cannot read URL file /no/such/file"), "{}", stderr(&output));
}

#[test]
fn a_readable_url_file_with_a_password_causes_a_warning() {
    let folder = TempDir::new();
    let file = folder.path().join("url");
    let path = file.display().to_string();
    let printed = |url: &str, mode: u32| {
        std::fs::write(&file, url).expect("writable");
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(mode))
            .expect("owned by this user");
        let output = syncguard(&["url", "--url-file", &path]).output().expect("runs");
        assert!(!stderr(&output).contains("canary"), "{}", stderr(&output));
        stderr(&output)
    };
    let with_password = "redis://:canary@127.0.0.1:1/0";
    let warning = printed(with_password, 0o644);
    assert!(warning.contains(&path) && warning.contains("chmod 600"), "{warning}");
    assert_eq!(printed(with_password, 0o600), "");
    assert_eq!(printed("redis://127.0.0.1:1/0", 0o644), "", "there is nothing to hide");
}

#[test]
fn an_empty_url_file_is_an_error() {
    let folder = TempDir::new();
    let file = folder.path().join("url");
    std::fs::write(&file, "\n").expect("writable");
    let path = file.display().to_string();
    let output = by_default(folder.path(), &["status", "k", "--url-file", &path]).output();
    let output = output.expect("runs");
    assert_eq!(output.status.code(), Some(125));
    assert_eq!(stderr(&output), format!("syncguard: URL file {path} is empty\n"));
}

#[test]
fn missing_tables_point_to_setup() {
    let Some(server) = PostgresServer::start(&PostgresOptions::default()) else { return };
    let arguments = ["run", "k", "--wait", "30s", "--url", &server.url(), "--", "true"];
    let output = syncguard(&arguments).output().expect("runs");
    assert_eq!(output.status.code(), Some(125));
    assert!(stderr(&output).contains("run `syncguard setup`"), "{}", stderr(&output));
    let output = syncguard(&["doctor", "--url", &server.url()]).output().expect("runs");
    assert_eq!(output.status.code(), Some(1));
    assert!(stdout(&output).contains("run `syncguard setup`"), "{}", stdout(&output));
}

#[test]
fn only_setup_and_commands_that_acquire_create_a_file() {
    let folder = TempDir::new();
    let file = folder.path().join("locks.db");
    let url = format!("sqlite:{}", file.display());
    let id = "AAAAAAAAAAAAAAAAAAAAAA";
    for arguments in [
        vec!["status", "k"],
        vec!["ls"],
        vec!["owns", id],
        vec!["release", id],
        vec!["extend", id],
        vec!["break", "k", "--yes"],
        vec!["wait", "k"],
    ] {
        let output =
            syncguard(&[&arguments[..], &["--url", &url]].concat()).output().expect("runs");
        assert_eq!(output.status.code(), Some(125), "{arguments:?}");
        assert!(stderr(&output).contains(&file.display().to_string()), "{}", stderr(&output));
        assert!(!file.exists(), "{arguments:?}");
    }
    let output = syncguard(&["doctor", "--url", &url]).output().expect("runs");
    assert_eq!(output.status.code(), Some(1));
    assert!(!file.exists(), "doctor");
    // A missing default store counts as empty.
    let output = by_default(folder.path(), &["status", "k"]).output().expect("runs");
    assert_eq!((output.status.code(), stdout(&output).as_str()), (Some(1), "free\n"));
    assert!(!folder.path().join("syncguard").exists());
    assert!(syncguard(&["setup", "--url", &url]).status().expect("runs").success());
    assert!(file.exists());
}

#[test]
fn a_missing_home_directory_is_not_created() {
    let folder = TempDir::new();
    let home = folder.path().join("nonexistent");
    let mut command = syncguard(&["acquire", "-k", "k"]);
    let output = command.env("HOME", &home).env_remove("XDG_STATE_HOME").output().expect("runs");
    assert_eq!(output.status.code(), Some(125));
    assert!(stderr(&output).contains(&home.display().to_string()), "{}", stderr(&output));
    assert!(!home.exists());
}

#[test]
fn doctor_fails_on_errors_and_with_strict_on_warnings() {
    let store = Store::sqlite();
    assert_eq!(store.code(&["setup", "-q"]), 0);
    let diagnosis = json(&store.run(&["doctor", "--format", "json"]));
    assert_eq!(diagnosis["healthy"], true, "{diagnosis}");
    let place = diagnosis["store"].as_str().expect("the store");
    assert!(place.contains(&store.path("locks.db").display().to_string()), "{place}");
    assert_eq!(diagnosis["checks"][0]["severity"], "ok");
    let Some(store) = Store::redis() else { return };
    // The test server keeps nothing on disk.
    assert_eq!(store.code(&["doctor"]), 0, "warnings are not errors");
    assert_eq!(store.code(&["doctor", "--strict"]), 1);
    let shown = stdout(&store.run(&["doctor"]));
    assert!(shown.contains("warning aof: "), "{shown}");
    assert!(shown.contains("127.0.0.1:"), "{shown}");
    assert!(shown.contains("warning fences: a lost fence counter starts at 1 again"), "{shown}");
    // With fences from the clock, only locks are lost, and doctor says what the clock cannot do.
    let url = format!("{}?fences=clock", store.url);
    let shown = stdout(&syncguard(&["doctor", "--url", &url]).output().expect("runs"));
    assert!(shown.contains("ok fences: they come from the clock"), "{shown}");
    assert!(shown.contains("after a restart, locks are lost; set"), "{shown}");
    let output = syncguard(&["doctor", "--url", "redis://127.0.0.1:1/0"]).output().expect("runs");
    assert_eq!(output.status.code(), Some(1));
    assert!(stdout(&output).contains("error reachable: "), "{}", stdout(&output));
}

#[test]
fn doctor_reports_a_full_store_as_capacity() {
    let full = RedisOptions::default().with(["--maxmemory", "1"]);
    let Some(redis) = RedisServer::start(&full) else { return };
    let mut command = syncguard(&["doctor", "--format", "json"]);
    let output = command.env("SYNCGUARD_URL", redis.url()).output().expect("runs");
    assert_eq!(output.status.code(), Some(1));
    let diagnosis = json(&output);
    let checks = diagnosis["checks"].as_array().expect("a list");
    let failed = checks.iter().find(|check| check["severity"] == "error").expect("a failure");
    assert_eq!(failed["subject"], "capacity", "{diagnosis}");
}

#[test]
fn a_cluster_with_shards_is_used_by_all_commands() {
    let Some(cluster) = RedisCluster::start(0) else { return };
    let url = cluster.url("shards=16");
    let run = |arguments: &[&str]| {
        let arguments = [arguments, &["--url", &url]].concat();
        let output = syncguard(&arguments).output().expect("runs");
        assert_eq!(output.status.code(), Some(0), "{arguments:?}: {}", stderr(&output));
        stdout(&output)
    };
    let diagnosis = run(&["doctor"]);
    assert!(
        diagnosis.contains("ok shards: the locks are distributed over 16 shards"),
        "{diagnosis}"
    );
    assert!(diagnosis.contains("warning full-coverage: "), "{diagnosis}");
    assert_eq!(run(&["setup"]), "ready\n");
    let ids: Vec<String> = ["a", "b", "c", "d"]
        .iter()
        .map(|key| run(&["acquire", "-q", "-k", key]).trim().to_owned())
        .collect();
    let listed = run(&["ls"]);
    assert!(["a", "b", "c", "d"].iter().all(|key| listed.contains(key)), "{listed}");
    for id in &ids {
        run(&["release", id]);
    }
    let other = cluster.url("shards=32");
    let output = syncguard(&["ls", "--url", &other]).output().expect("runs");
    assert_eq!(output.status.code(), Some(125), "{}", stderr(&output));
    assert!(stderr(&output).contains("this store has 16 shards, not 32"), "{}", stderr(&output));
}
