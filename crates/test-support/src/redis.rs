//! A Redis server.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::process::{Server, TempDir, find_program, free_port};

/// How a Redis server is to be started.
#[derive(Clone, Debug, Default)]
pub struct RedisOptions {
    arguments: Vec<String>,
}

impl RedisOptions {
    /// Keeps every write in an append-only file, flushed at once.
    #[must_use]
    pub fn with_aof(self) -> Self {
        self.with(["--appendonly", "yes", "--appendfsync", "always"])
    }

    /// Adds arguments of its command line.
    #[must_use]
    pub fn with<const N: usize>(mut self, arguments: [&str; N]) -> Self {
        self.arguments.extend(arguments.map(str::to_owned));
        self
    }
}

/// A Redis server on a free port, with its data in a directory of its own.
#[derive(Debug)]
pub struct RedisServer {
    program: PathBuf,
    arguments: Vec<String>,
    port: u16,
    folder: TempDir,
    server: Option<Server>,
}

impl RedisServer {
    /// Starts a server; `None`, and a line that says so, when Redis is not installed.
    ///
    /// # Panics
    ///
    /// When it does not start.
    #[must_use]
    pub fn start(options: &RedisOptions) -> Option<Self> {
        let program = find_program("redis-server")?;
        let port = free_port();
        let mut arguments: Vec<String> =
            ["--save", "", "--bind", "127.0.0.1", "--port"].map(str::to_owned).to_vec();
        arguments.push(port.to_string());
        arguments.extend(options.arguments.iter().cloned());
        let mut server = Self { program, arguments, port, folder: TempDir::new(), server: None };
        server.run();
        Some(server)
    }

    /// The port on 127.0.0.1.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The URL of database 0.
    #[must_use]
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}/0", self.port)
    }

    /// Kills the server without warning and starts it again on the same port and data.
    ///
    /// # Panics
    ///
    /// When it does not start.
    pub fn crash_and_restart(&mut self) {
        self.crash();
        self.run();
    }

    /// Kills the server without warning.
    pub fn crash(&mut self) {
        self.server = None;
    }

    /// Starts the server again after [`Self::crash`].
    ///
    /// # Panics
    ///
    /// When it does not start.
    pub fn run(&mut self) {
        self.server = Some(Server::start(&self.program, &self.arguments, self.folder.path()));
        let started = Instant::now();
        while !self.answers() {
            let log = self.folder.path().join("server.log");
            let log = std::fs::read_to_string(log).unwrap_or_default();
            assert!(started.elapsed() < Duration::from_secs(20), "redis does not start:\n{log}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Stops the server's process in its tracks.
    ///
    /// # Panics
    ///
    /// When the server is gone.
    pub fn pause(&self) {
        self.server.as_ref().expect("running").signal("STOP");
    }

    /// Lets a paused server go on.
    ///
    /// # Panics
    ///
    /// When the server is gone.
    pub fn resume(&self) {
        self.server.as_ref().expect("running").signal("CONT");
    }

    /// Whether it answers at all: `PONG`, or that a password is missing.
    fn answers(&self) -> bool {
        let Ok(mut stream) = TcpStream::connect(("127.0.0.1", self.port)) else { return false };
        let mut answer = [0; 7];
        let timeout = Some(Duration::from_millis(500));
        let asked = stream.set_read_timeout(timeout).and_then(|()| stream.write_all(b"PING\r\n"));
        asked.and_then(|()| stream.read_exact(&mut answer)).is_ok()
            && (answer.starts_with(b"+PONG") || answer.starts_with(b"-NOAUTH"))
    }
}
