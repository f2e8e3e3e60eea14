//! Server processes that end with the test that started them, even if the test is killed.

use std::hash::{BuildHasher, RandomState};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Returns the path of a program, if it is installed.
///
/// # Panics
///
/// Panics if the program is not installed and `SYNCGUARD_REQUIRE_SERVERS` is set, as in
/// `cargo xtask test`. If the variable is not set, prints that the test is skipped.
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

/// Returns a port that is currently unused.
///
/// The system does not give it to outgoing connections, so a server that is killed finds it free
/// when it starts again.
pub(crate) fn free_port() -> u16 {
    const PORTS: std::ops::Range<u16> = 12_000..32_000;
    let is_free = |port: &u16| TcpListener::bind(("127.0.0.1", *port)).is_ok();
    // A new state has random keys.
    let draw = || RandomState::new().hash_one(0) % u64::from(PORTS.end - PORTS.start);
    let port = || PORTS.start + u16::try_from(draw()).expect("a small number");
    std::iter::repeat_with(port).take(1_000).find(is_free).expect("a free port")
}

/// A new directory that is removed when the value is dropped.
#[derive(Debug)]
pub struct TempDir(PathBuf);

impl TempDir {
    /// Creates the directory.
    ///
    /// # Panics
    ///
    /// Panics if the directory cannot be created.
    #[must_use]
    pub fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("syncguard-test-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).expect("a temporary directory");
        Self(path)
    }

    /// Returns the path of the directory.
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
        // Leftovers in the temporary directory do no harm.
        drop(std::fs::remove_dir_all(&self.0));
    }
}

/// A running server.
///
/// A shell starts the server and waits on a pipe. When the pipe closes, because the value is
/// dropped or the test process died, the shell kills the server. So no server outlives its test,
/// not even one in a `static`.
#[derive(Debug)]
pub(crate) struct Server {
    shell: Child,
    pid: u32,
}

impl Server {
    pub(crate) fn start(program: &Path, arguments: &[String], folder: &Path) -> Self {
        Self::start_with(&[], program, arguments, folder)
    }

    /// Starts a server with additional environment variables.
    pub(crate) fn start_with(
        environment: &[(&str, &Path)],
        program: &Path,
        arguments: &[String],
        folder: &Path,
    ) -> Self {
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
            .envs(environment.iter().copied())
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

    /// Sends a signal to the server and to the processes that it has started.
    pub(crate) fn signal_all(&self, name: &str) {
        self.signal_with(&self.children(), name);
    }

    /// Kills the server and the processes that it has started, and waits until none is left.
    pub(crate) fn kill_all(self) {
        // It starts no more processes.
        self.signal("STOP");
        let children = self.children();
        self.signal_with(&children, "KILL");
        while children.iter().any(|pid| is_running(pid)) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Returns the ids of the processes that the server has started.
    fn children(&self) -> Vec<String> {
        let children = Command::new("pgrep").arg("-P").arg(self.pid.to_string()).output();
        let children = children.expect("pgrep runs").stdout;
        String::from_utf8_lossy(&children).split_whitespace().map(str::to_owned).collect()
    }

    fn signal_with(&self, children: &[String], name: &str) {
        // A process may have ended in the meantime.
        let mut kill = Command::new("kill");
        let kill = kill.arg(format!("-{name}")).arg(self.pid.to_string());
        drop(kill.args(children).stderr(Stdio::null()).status());
    }

    /// Sends a signal, given by name (`STOP`, `CONT`, `KILL`, …).
    pub(crate) fn signal(&self, name: &str) {
        let kill = Command::new("kill").arg(format!("-{name}")).arg(self.pid.to_string()).status();
        assert!(kill.expect("kill runs").success(), "the server is gone");
    }
}

fn is_running(pid: &str) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // A zombie is dead.
    status.rsplit_once(") ").is_some_and(|(_name, fields)| !fields.starts_with('Z'))
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.shell.stdin.take());
        // The shell exits by itself; waiting for it avoids a zombie.
        drop(self.shell.wait());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_is_killed_with_all_its_processes_leaves_none() {
        let folder = TempDir::new();
        let arguments = ["-c", "sleep 60 & wait"].map(str::to_owned);
        let server = Server::start(Path::new("/bin/sh"), &arguments, folder.path());
        let children = std::iter::repeat_with(|| server.children()).find(|pids| !pids.is_empty());
        let children = children.expect("endless");
        assert!(children.iter().all(|pid| is_running(pid)));
        server.kill_all();
        assert!(!children.iter().any(|pid| is_running(pid)));
    }
}
