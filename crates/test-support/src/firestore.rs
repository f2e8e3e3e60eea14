//! An emulator of Firestore.

use std::net::TcpStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::process::{Server, TempDir, find_program, free_port};

/// An emulator on a free port. Its data is in its memory.
#[derive(Debug)]
pub struct FirestoreEmulator {
    program: PathBuf,
    port: u16,
    folder: TempDir,
    server: Option<Server>,
}

impl FirestoreEmulator {
    /// Starts an emulator; `None`, and a line that says so, when there is none.
    ///
    /// # Panics
    ///
    /// When it does not start.
    #[must_use]
    pub fn start() -> Option<Self> {
        let program = find_program("hidane")?;
        let (port, folder) = (free_port(), TempDir::new());
        let mut emulator = Self { program, port, folder, server: None };
        emulator.run();
        Some(emulator)
    }

    fn run(&mut self) {
        let port = self.port.to_string();
        let arguments = ["--host", "127.0.0.1", "--port", &port].map(str::to_owned);
        self.server = Some(Server::start(&self.program, &arguments, self.folder.path()));
        let started = Instant::now();
        while TcpStream::connect(("127.0.0.1", self.port)).is_err() {
            assert!(started.elapsed() < Duration::from_secs(10), "the emulator does not start");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// The port on 127.0.0.1.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// What `FIRESTORE_EMULATOR_HOST` would be.
    #[must_use]
    pub fn host(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// The URL of a project of its own.
    #[must_use]
    pub fn url(&self) -> String {
        format!("firestore://test?emulator={}", self.host())
    }

    /// Kills it as a crash would.
    pub fn kill(&mut self) {
        self.server = None;
    }

    /// Starts it again on the same port, empty.
    ///
    /// # Panics
    ///
    /// When it does not start.
    pub fn restart(&mut self) {
        self.server = None;
        self.run();
    }
}
