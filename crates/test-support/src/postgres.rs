//! A PostgreSQL server, and PgBouncer in front of it.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::certificates::Certificates;
use crate::clock::ServerClock;
use crate::process::{Server, TempDir, find_program, free_port};

/// Options of a PostgreSQL server.
#[derive(Clone, Debug, Default)]
pub struct PostgresOptions {
    settings: Vec<String>,
    has_password: bool,
    has_clock: bool,
}

impl PostgresOptions {
    /// Adds settings, as in `postgresql.conf`.
    #[must_use]
    pub fn with<const N: usize>(mut self, settings: [&str; N]) -> Self {
        self.settings.extend(settings.map(str::to_owned));
        self
    }

    /// Enables TLS.
    ///
    /// # Panics
    ///
    /// Never panics, because the files are in a directory.
    #[must_use]
    pub fn with_tls(self, certificates: &Certificates) -> Self {
        // The server requires that only its own user can read the key.
        let key = certificates.path("server.key");
        let folder = Path::new(&key).parent().expect("files are in a folder");
        let steps: [(&str, [&str; 2]); 3] = [
            ("chmod", ["a+rX", &folder.display().to_string()]),
            ("chown", ["postgres", &key]),
            ("chmod", ["600", &key]),
        ];
        for (program, arguments) in steps {
            // Fails without root, where the server runs as the owner of the files.
            drop(Command::new(program).args(arguments).output());
        }
        self.with([
            "ssl = on",
            &format!("ssl_cert_file = '{}'", certificates.path("server.pem")),
            &format!("ssl_key_file = '{}'", certificates.path("server.key")),
            &format!("ssl_ca_file = '{}'", certificates.path("ca.pem")),
        ])
    }

    /// Requires a password. The password of the user `postgres` is `right`.
    #[must_use]
    pub fn with_password(mut self) -> Self {
        self.has_password = true;
        self
    }

    /// Gives the server a wall clock of its own; see [`PostgresServer::set_clock`].
    #[must_use]
    pub fn with_clock(mut self) -> Self {
        self.has_clock = true;
        self
    }
}

/// A PostgreSQL server on a free port, with its data in a temporary directory.
#[derive(Debug)]
pub struct PostgresServer {
    programs: PathBuf,
    port: u16,
    folder: TempDir,
    clock: Option<ServerClock>,
    server: Option<Server>,
}

/// Returns the directory of the server programs, which Debian keeps out of `PATH`.
fn programs() -> Option<PathBuf> {
    let mut versions: Vec<_> = std::fs::read_dir("/usr/lib/postgresql")
        .map(|entries| entries.filter_map(|entry| Some(entry.ok()?.path().join("bin"))).collect())
        .unwrap_or_default();
    versions.sort();
    let debian = versions.pop().filter(|programs| programs.join("postgres").is_file());
    debian.or_else(|| find_program("postgres")?.parent().map(Path::to_owned))
}

/// Returns a command that runs a program without root privileges, because the server refuses them.
/// If this process is root, the program runs as the user `postgres` of Debian's package.
fn as_nobody(program: &Path) -> Command {
    let is_root = Command::new("id").arg("-u").output().is_ok_and(|id| id.stdout == b"0\n");
    if is_root {
        let mut command = Command::new("setpriv");
        command.args(["--reuid", "postgres", "--regid", "postgres", "--clear-groups"]).arg(program);
        return command;
    }
    Command::new(program)
}

impl PostgresServer {
    /// Starts a server. If PostgreSQL is not installed, prints that and returns `None`.
    ///
    /// # Panics
    ///
    /// Panics if it does not start.
    #[must_use]
    pub fn start(options: &PostgresOptions) -> Option<Self> {
        let programs = programs()?;
        let (port, folder) = (free_port(), TempDir::new());
        let owned = Command::new("chmod").arg("777").arg(folder.path()).status();
        assert!(owned.expect("chmod runs").success());
        let data = folder.path().join("data");
        let password = folder.path().join("password");
        std::fs::write(&password, "right\n").expect("writable");
        let way = if options.has_password { "scram-sha-256" } else { "trust" };
        let made = as_nobody(&programs.join("initdb"))
            .args(["--username", "postgres", "--auth", way, "--no-sync", "--encoding", "UTF8"])
            .arg("--pwfile")
            .arg(&password)
            .arg(&data)
            .output()
            .expect("initdb runs");
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        let mut settings = format!(
            "port = {port}\nlisten_addresses = '127.0.0.1'\nunix_socket_directories = '{}'\n\
             max_connections = 200\n",
            folder.path().display()
        );
        for setting in &options.settings {
            settings = format!("{settings}{setting}\n");
        }
        let file = data.join("postgresql.conf");
        let all = std::fs::read_to_string(&file).expect("readable") + &settings;
        std::fs::write(&file, all).expect("writable");
        let clock = options.has_clock.then(|| ServerClock::new(folder.path()));
        let mut server = Self { programs, port, folder, clock, server: None };
        server.run();
        Some(server)
    }

    /// Starts a standby of this server.
    ///
    /// # Panics
    ///
    /// Panics if it does not start.
    #[must_use]
    pub fn start_standby(&self) -> Self {
        let (port, folder) = (free_port(), TempDir::new());
        let opened = Command::new("chmod").arg("777").arg(folder.path()).status();
        assert!(opened.expect("chmod runs").success());
        let data = folder.path().join("data");
        let copied = as_nobody(&self.programs.join("pg_basebackup"))
            .args(["-h", "127.0.0.1", "-p", &self.port.to_string(), "-U", "postgres", "-R", "-D"])
            .arg(&data)
            .output()
            .expect("pg_basebackup runs");
        assert!(copied.status.success(), "{}", String::from_utf8_lossy(&copied.stderr));
        let file = data.join("postgresql.conf");
        let settings = std::fs::read_to_string(&file).expect("readable")
            + &format!("port = {port}\nunix_socket_directories = '{}'\n", folder.path().display());
        std::fs::write(&file, settings).expect("writable");
        let (programs, clock) = (self.programs.clone(), None);
        let mut server = Self { programs, port, folder, clock, server: None };
        server.run();
        server
    }

    /// Starts the server again after [`Self::crash`].
    ///
    /// # Panics
    ///
    /// Panics if it does not start.
    pub fn run(&mut self) {
        let program = self.programs.join("postgres");
        let command = as_nobody(&program);
        let mut arguments: Vec<String> =
            command.get_args().map(|argument| argument.to_string_lossy().into_owned()).collect();
        arguments.extend(["-D".to_owned(), self.folder.path().join("data").display().to_string()]);
        let program = find_program(&command.get_program().to_string_lossy())
            .unwrap_or_else(|| command.get_program().into());
        let environment = self.clock.iter().flat_map(ServerClock::environment).collect::<Vec<_>>();
        let folder = self.folder.path();
        self.server = Some(Server::start_with(&environment, &program, &arguments, folder));
        let started = Instant::now();
        while !self.is_ready() {
            let log = self.folder.path().join("server.log");
            let log = std::fs::read_to_string(log).unwrap_or_default();
            assert!(
                started.elapsed() < Duration::from_secs(30),
                "PostgreSQL does not start:\n{log}"
            );
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn is_ready(&self) -> bool {
        let asked = Command::new(self.programs.join("pg_isready"))
            .args(["-q", "-h", "127.0.0.1", "-p", &self.port.to_string()])
            .status();
        asked.is_ok_and(|status| status.success())
    }

    /// Pauses the server and all its processes with `SIGSTOP`.
    ///
    /// # Panics
    ///
    /// Panics if the server is not running.
    pub fn pause(&self) {
        self.server.as_ref().expect("running").signal_all("STOP");
    }

    /// Continues a paused server.
    ///
    /// # Panics
    ///
    /// Panics if the server is not running.
    pub fn resume(&self) {
        self.server.as_ref().expect("running").signal_all("CONT");
    }

    /// Kills the server and all its processes without warning.
    pub fn crash(&mut self) {
        // A session that went on without the postmaster could write beside the next server.
        if let Some(server) = self.server.take() {
            server.kill_all();
        }
        let lock = self.folder.path().join("data/postmaster.pid");
        drop(std::fs::remove_file(lock));
    }

    /// Sets how many milliseconds the server's clock is ahead of the true time; behind, if
    /// negative.
    ///
    /// # Panics
    ///
    /// Panics if the server was not started [with a clock](PostgresOptions::with_clock).
    pub fn set_clock(&self, ahead_ms: i64) {
        self.clock.as_ref().expect("started with a clock").set(ahead_ms);
    }

    /// Returns the port on 127.0.0.1.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Returns the URL of the database `postgres`.
    #[must_use]
    pub fn url(&self) -> String {
        format!("postgres://postgres@127.0.0.1:{}/postgres", self.port)
    }

    /// Returns the directory of the Unix socket.
    #[must_use]
    pub fn socket_folder(&self) -> &Path {
        self.folder.path()
    }

    /// Returns the directory of `pgbench` and the other programs.
    #[must_use]
    pub fn programs(&self) -> &Path {
        &self.programs
    }

    /// Runs SQL with `psql` and returns its output.
    ///
    /// # Panics
    ///
    /// Panics if the SQL fails.
    #[must_use]
    pub fn sql(&self, sql: &str) -> String {
        let output = Command::new(self.programs.join("psql"))
            .args(["-X", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-c", sql, &self.url()])
            .output()
            .expect("psql runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    }
}

/// PgBouncer in transaction mode in front of a server.
#[derive(Debug)]
pub struct PgBouncer {
    port: u16,
    program: PathBuf,
    arguments: Vec<String>,
    folder: TempDir,
    server: Option<Server>,
}

impl PgBouncer {
    /// Starts PgBouncer. If it is not installed, prints that and returns `None`.
    ///
    /// # Panics
    ///
    /// Panics if it does not start.
    #[must_use]
    pub fn start(server: &PostgresServer) -> Option<Self> {
        let debian = Path::new("/usr/sbin/pgbouncer");
        let program = if debian.is_file() { debian.into() } else { find_program("pgbouncer")? };
        let (port, folder) = (free_port(), TempDir::new());
        let opened = Command::new("chmod").arg("777").arg(folder.path()).status();
        assert!(opened.expect("chmod runs").success());
        let config = folder.path().join("pgbouncer.ini");
        let users = folder.path().join("users.txt");
        std::fs::write(&users, "\"postgres\" \"\"\n").expect("writable");
        let text = format!(
            "[databases]\npostgres = host=127.0.0.1 port={} dbname=postgres user=postgres\n\
             [pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\n\
             auth_type = any\nauth_file = {}\npool_mode = transaction\ndefault_pool_size = 4\n\
             max_client_conn = 200\n",
            server.port(),
            users.display(),
        );
        std::fs::write(&config, text).expect("writable");
        let command = as_nobody(&program);
        let mut arguments: Vec<String> =
            command.get_args().map(|argument| argument.to_string_lossy().into_owned()).collect();
        arguments.push(config.display().to_string());
        let program = find_program(&command.get_program().to_string_lossy())
            .unwrap_or_else(|| command.get_program().into());
        let mut pooler = Self { port, program, arguments, folder, server: None };
        pooler.run();
        Some(pooler)
    }

    /// Starts PgBouncer again after [`Self::crash`].
    ///
    /// # Panics
    ///
    /// Panics if it does not start.
    pub fn run(&mut self) {
        self.server = Some(Server::start(&self.program, &self.arguments, self.folder.path()));
        let started = Instant::now();
        while std::net::TcpStream::connect(("127.0.0.1", self.port)).is_err() {
            let log = self.folder.path().join("server.log");
            let log = std::fs::read_to_string(log).unwrap_or_default();
            assert!(
                started.elapsed() < Duration::from_secs(20),
                "PgBouncer does not start:\n{log}"
            );
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Kills PgBouncer without warning.
    pub fn crash(&mut self) {
        self.server = None;
    }

    /// Returns the port on 127.0.0.1.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Returns the URL of the database `postgres`, through PgBouncer.
    #[must_use]
    pub fn url(&self) -> String {
        format!("postgres://postgres@127.0.0.1:{}/postgres", self.port)
    }
}
