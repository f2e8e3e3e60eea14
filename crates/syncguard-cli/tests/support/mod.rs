//! Runs the real binary on stores that are started for each test.

#![allow(dead_code, reason = "each test file uses only a part of this module")]

use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

use test_support::{
    FirestoreEmulator, PostgresOptions, PostgresServer, RedisOptions, RedisServer, TempDir,
};

/// The store of a test.
pub(crate) struct Store {
    pub(crate) url: String,
    pub(crate) folder: TempDir,
    pub(crate) redis: Option<RedisServer>,
    pub(crate) emulator: Option<FirestoreEmulator>,
}

impl Store {
    pub(crate) fn sqlite() -> Self {
        let folder = TempDir::new();
        let url = format!("sqlite:{}", folder.path().join("locks.db").display());
        Self { url, folder, redis: None, emulator: None }
    }

    /// Starts all stores: SQLite, and Redis and Firestore if they are installed.
    pub(crate) fn all() -> Vec<Self> {
        let mut all = vec![Self::sqlite()];
        if let Some(redis) = RedisServer::start(&RedisOptions::default()) {
            let (url, folder) = (redis.url(), TempDir::new());
            all.push(Self { url, folder, redis: Some(redis), emulator: None });
        }
        if let Some(emulator) = FirestoreEmulator::start() {
            let (url, folder) = (emulator.url(), TempDir::new());
            all.push(Self { url, folder, redis: None, emulator: Some(emulator) });
        }
        all
    }

    /// Starts Redis, if it is installed.
    pub(crate) fn redis() -> Option<Self> {
        let redis = RedisServer::start(&RedisOptions::default())?;
        let (url, folder) = (redis.url(), TempDir::new());
        Some(Self { url, folder, redis: Some(redis), emulator: None })
    }

    /// Starts PostgreSQL and creates the tables, if it is installed.
    pub(crate) fn postgres(options: &PostgresOptions) -> Option<(Self, PostgresServer)> {
        let server = PostgresServer::start(options)?;
        let (url, folder) = (server.url(), TempDir::new());
        let store = Self { url, folder, redis: None, emulator: None };
        assert_eq!(store.code(&["setup", "-q"]), 0);
        Some((store, server))
    }

    /// Returns a `syncguard` command on this store.
    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = syncguard(arguments);
        command.env("SYNCGUARD_URL", &self.url);
        command
    }

    /// Runs `syncguard` and waits for its output.
    pub(crate) fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().expect("the binary runs")
    }

    /// Runs `syncguard` and returns its exit code.
    pub(crate) fn code(&self, arguments: &[&str]) -> i32 {
        self.run(arguments).status.code().expect("not ended by a signal")
    }

    /// Starts `syncguard run` with a shell script in the background.
    pub(crate) fn background(&self, options: &[&str], script: &str) -> Child {
        let arguments = [&["run", "-q"], options, &["--", "sh", "-c", script]].concat();
        self.command(&arguments)
            .env("FOLDER", self.folder.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the binary runs")
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Waits until a script has written a file, and returns its text.
    pub(crate) fn wait_for(&self, name: &str) -> String {
        let path = self.path(name);
        eventually(&format!("{name} is written"), || has_text(&path));
        std::fs::read_to_string(path).expect("just seen").trim().to_owned()
    }
}

fn has_text(path: &Path) -> bool {
    std::fs::read_to_string(path).is_ok_and(|text| text.ends_with('\n'))
}

/// Returns a `syncguard` command without the environment variables that it reads.
pub(crate) fn syncguard(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_syncguard"));
    command.args(arguments).env("NO_COLOR", "1");
    for variable in [
        "SYNCGUARD_URL",
        "SYNCGUARD_REQUIRE_URL",
        "SYNCGUARD_KEY",
        "SYNCGUARD_FENCE",
        "FIRESTORE_EMULATOR_HOST",
        "GOOGLE_APPLICATION_CREDENTIALS",
    ] {
        command.env_remove(variable);
    }
    command
}

/// Waits until a condition is true, for at most 20 seconds.
pub(crate) fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let started = Instant::now();
    while !holds() {
        assert!(started.elapsed() < Duration::from_secs(20), "{what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Waits until a child ends.
pub(crate) fn end_of(child: &mut Child) -> ExitStatus {
    let mut status = None;
    eventually("it ends", || {
        status = child.try_wait().expect("it was started");
        status.is_some()
    });
    status.expect("it has ended")
}

pub(crate) fn send(signal: &str, process: u32) {
    let sent = Command::new("kill").arg(format!("-{signal}")).arg(process.to_string()).status();
    assert!(sent.expect("kill runs").success());
}

/// Returns whether a process exists and is not a zombie.
pub(crate) fn is_alive(process: &str) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{process}/status"));
    status.is_ok_and(|status| !status.contains("State:\tZ"))
}

/// Parses the JSON on standard output.
pub(crate) fn json(output: &Output) -> serde_json::Value {
    serde_json::from_slice(&output.stdout).expect("JSON")
}

pub(crate) fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}
