//! A server process that ends with the test that started it, however that ends.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

/// Where a program is, if it is installed.
///
/// # Panics
///
/// When it is not and `SYNCGUARD_REQUIRE_SERVERS` is set, as the project's own test command does:
/// there a missing server is a failure, elsewhere it is a visible skip.
#[must_use]
pub fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).map(|folder| folder.join(name)).find(|p| p.is_file());
    if found.is_none() {
        let is_required = std::env::var_os("SYNCGUARD_REQUIRE_SERVERS").is_some();
        assert!(!is_required, "{name} is not installed");
        println!("skipped: {name} is not installed; `cargo xtask test` installs it");
    }
    found
}

/// A port that nobody listens on at the moment.
pub(crate) fn free_port() -> u16 {
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
    listener.local_addr().expect("an address").port()
}

/// A fresh directory that goes with the value.
#[derive(Debug)]
pub struct TempDir(PathBuf);

impl TempDir {
    /// Makes one.
    ///
    /// # Panics
    ///
    /// When there is no room for it.
    #[must_use]
    pub fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("syncguard-test-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).expect("a temporary directory");
        Self(path)
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Default for TempDir {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        // What is left in the temporary directory harms nobody.
        drop(std::fs::remove_dir_all(&self.0));
    }
}

/// A running server.
///
/// A small shell stands between us and it: when our end of its pipe closes, because the value is
/// dropped or because the test process died, it kills the server. So no server outlives its test,
/// not even one that a `static` holds.
#[derive(Debug)]
pub(crate) struct Server {
    shell: Child,
    pid: u32,
}

impl Server {
    pub(crate) fn start(program: &Path, arguments: &[String], folder: &Path) -> Self {
        const WATCH: &str = r#"
            "$@" >"$0" 2>&1 </dev/null & server=$!
            echo "$server"
            read -r _ignored
            kill -CONT "$server" 2>/dev/null
            kill -KILL "$server" 2>/dev/null
            wait "$server" 2>/dev/null
        "#;
        let mut shell = Command::new("sh")
            .arg("-c")
            .arg(WATCH)
            .arg(folder.join("server.log"))
            .arg(program)
            .args(arguments)
            .current_dir(folder)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a shell");
        let mut line = String::new();
        let stdout = shell.stdout.take().expect("piped");
        let mut stdout = std::io::BufReader::new(stdout);
        std::io::BufRead::read_line(&mut stdout, &mut line).expect("the server's process id");
        let pid = line.trim().parse().expect("a process id");
        Self { shell, pid }
    }

    /// Sends a signal by its name (`STOP`, `CONT`, `KILL`, …).
    pub(crate) fn signal(&self, name: &str) {
        let kill = Command::new("kill").arg(format!("-{name}")).arg(self.pid.to_string()).status();
        assert!(kill.expect("kill runs").success(), "the server is gone");
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.shell.stdin.take());
        // The shell ends by itself; waiting leaves no zombie.
        drop(self.shell.wait());
    }
}
