//! A Firestore emulator.

use std::net::TcpStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::process::{Server, TempDir, find_program, free_port};

/// A Firestore emulator on a free port. It keeps its data in memory.
#[derive(Debug)]
pub struct FirestoreEmulator {
    program: PathBuf,
    port: u16,
    folder: TempDir,
    server: Option<Server>,
}

impl FirestoreEmulator {
    /// Starts an emulator. If it is not installed, prints that and returns `None`.
    ///
    /// # Panics
    ///
    /// Panics if the emulator does not start.
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

    /// Returns the port on 127.0.0.1.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Returns the value for `FIRESTORE_EMULATOR_HOST`.
    #[must_use]
    pub fn host(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// Returns the URL of a test project on the emulator.
    #[must_use]
    pub fn url(&self) -> String {
        format!("firestore://test?emulator={}", self.host())
    }

    /// Pauses the emulator with `SIGSTOP`.
    ///
    /// # Panics
    ///
    /// Panics if the emulator is not running.
    pub fn pause(&self) {
        self.server.as_ref().expect("running").signal("STOP");
    }

    /// Continues a paused emulator.
    ///
    /// # Panics
    ///
    /// Panics if the emulator is not running.
    pub fn resume(&self) {
        self.server.as_ref().expect("running").signal("CONT");
    }

    /// Kills the emulator without warning.
    pub fn kill(&mut self) {
        self.server = None;
    }

    /// Restarts the emulator on the same port, without its data.
    ///
    /// # Panics
    ///
    /// Panics if the emulator does not start.
    pub fn restart(&mut self) {
        self.server = None;
        self.run();
    }
}
