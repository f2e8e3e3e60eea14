//! The stores under test, and the faults that hit their servers.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use test_support::{
    FirestoreEmulator, PgBouncer, PostgresOptions, PostgresServer, Proxy, RedisCluster,
    RedisOptions, RedisSentinel, RedisServer, TempDir,
};

use crate::plan::{Deployment, Kind, Planned};
use crate::register::Accepted;
use crate::resource;

/// The servers of a store.
#[derive(Debug)]
enum Servers {
    Memory,
    Sqlite(TempDir),
    SqliteReplaced(ReplacedFile),
    Redis(RedisServer),
    RedisSentinel(Box<RedisSentinel>),
    RedisCluster(RedisCluster),
    RedisShards(RedisCluster),
    Postgres(PostgresServer),
    PgBouncer(PostgresServer, PgBouncer),
    PostgresStandby { primary: PostgresServer, standby: PostgresServer },
    Firestore(FirestoreEmulator),
}

/// A store under test.
#[derive(Debug)]
pub struct Store {
    servers: Servers,
}

/// What a fault did.
#[derive(Clone, Copy, Debug, Default)]
pub struct Effect {
    /// How many processes were killed.
    pub kills: u64,
    /// How many times processes were stopped.
    pub stops: u64,
    /// How many failovers there were.
    pub failovers: u64,
    /// How many connections were reset.
    pub cuts: u64,
    /// How many times data of requests was sent twice.
    pub duplicates: u64,
}

/// Timeouts of the clients.
const TIMEOUTS: &str = "connect_timeout_ms=1000&response_timeout_ms=1000";

impl Store {
    /// Starts the servers of a store, and a proxy for each client that uses one.
    ///
    /// # Panics
    ///
    /// Panics if a server is not installed or does not start.
    pub async fn start(deployment: Deployment) -> (Self, Vec<Proxy>) {
        let servers = tokio::task::spawn_blocking(move || Servers::start(deployment)).await;
        let servers = servers.expect("the servers start");
        let mut proxies = Vec::new();
        if deployment.has_proxies() {
            for _ in 0..deployment.clients() {
                proxies.push(Proxy::start(servers.port()).await);
            }
        }
        let store = Self { servers };
        if let Servers::Postgres(_) | Servers::PgBouncer(..) | Servers::PostgresStandby { .. } =
            &store.servers
        {
            let backend = syncguard::connect(&store.url()).await.expect("connected");
            let locker = syncguard::Locker::new(backend).expect("a runtime");
            locker.setup().await.expect("tables");
        }
        if let Servers::Postgres(server) = &store.servers {
            drop(server.sql(&resource::schema_sql()));
        }
        (store, proxies)
    }

    /// Returns the URL of the store, without a proxy.
    #[must_use]
    pub fn url(&self) -> String {
        self.servers.url(self.servers.port())
    }

    /// Returns the URL for a client.
    #[must_use]
    pub fn client_url(&self, proxy: Option<&Proxy>) -> String {
        self.servers.url(proxy.map_or_else(|| self.servers.port(), Proxy::port))
    }

    /// Returns the server of the store and its version.
    #[must_use]
    pub fn version(&self) -> String {
        let (program, argument) = match &self.servers {
            Servers::Memory => return "in the process".to_owned(),
            Servers::Sqlite(_) | Servers::SqliteReplaced(_) => {
                return format!("SQLite {}, bundled", rusqlite::version());
            }
            Servers::Redis(_)
            | Servers::RedisSentinel(_)
            | Servers::RedisCluster(_)
            | Servers::RedisShards(_) => ("redis-server", "--version"),
            Servers::Postgres(_) | Servers::PostgresStandby { .. } => ("psql", "--version"),
            Servers::PgBouncer(..) => ("pgbouncer", "--version"),
            Servers::Firestore(_) => return "hidane 0.6.0, an emulator".to_owned(),
        };
        let path = format!("{}:/usr/sbin", std::env::var("PATH").unwrap_or_default());
        let output = Command::new(program).arg(argument).env("PATH", path).output();
        let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
        text.unwrap_or_default().lines().next().unwrap_or_default().to_owned()
    }

    /// Returns the writes that the fenced resource in the store accepted, in order.
    #[must_use]
    pub fn accepted_writes(&self) -> Vec<Accepted> {
        match &self.servers {
            Servers::Redis(server) => {
                resource::parse(&server.cli(&["LRANGE", resource::LOG, "0", "-1"]))
            }
            Servers::Postgres(server) => resource::parse(&server.sql(resource::READ_SQL)),
            _ => Vec::new(),
        }
    }

    /// Lets a fault hit the servers until it is over.
    pub fn hit(&mut self, fault: &Planned) -> Effect {
        let nothing = Effect::default();
        match (&mut self.servers, fault.kind) {
            (Servers::Redis(server), Kind::KillServer) => {
                server.crash();
                std::thread::sleep(fault.lasts);
                server.run();
                Effect { kills: 1, ..nothing }
            }
            (Servers::Redis(server), Kind::StopServer) => {
                server.pause();
                std::thread::sleep(fault.lasts);
                server.resume();
                Effect { stops: 1, ..nothing }
            }
            (Servers::Redis(server), Kind::EndSessions) => {
                for kind in ["normal", "pubsub"] {
                    drop(server.cli(&["CLIENT", "KILL", "TYPE", kind]));
                }
                nothing
            }
            (Servers::Redis(server), Kind::FlushScripts) => {
                let end = std::time::Instant::now() + fault.lasts;
                while std::time::Instant::now() < end {
                    drop(server.cli(&["SCRIPT", "FLUSH"]));
                    std::thread::sleep(Duration::from_millis(10));
                }
                nothing
            }
            (Servers::Redis(server), Kind::OutOfMemory) => {
                drop(server.cli(&["CONFIG", "SET", "maxmemory", "1"]));
                std::thread::sleep(fault.lasts);
                drop(server.cli(&["CONFIG", "SET", "maxmemory", "0"]));
                nothing
            }
            (Servers::Redis(server), Kind::JumpClock) => {
                server.set_clock(i64::try_from(fault.amount).unwrap_or(0) - 2_000);
                std::thread::sleep(fault.lasts);
                server.set_clock(0);
                nothing
            }
            (Servers::Redis(server), Kind::Evict) => {
                let set = |name, value: &str| drop(server.cli(&["CONFIG", "SET", name, value]));
                set("maxmemory-policy", "volatile-random");
                let end = std::time::Instant::now() + fault.lasts;
                while std::time::Instant::now() < end {
                    // Less than it uses, so that every write evicts something.
                    let memory = server.cli(&["INFO", "memory"]);
                    let used = memory.lines().find_map(|line| line.strip_prefix("used_memory:"));
                    let used = used.and_then(|used| used.trim().parse::<u64>().ok());
                    set("maxmemory", &used.unwrap_or(0).saturating_sub(20_000).to_string());
                    std::thread::sleep(Duration::from_millis(20));
                }
                set("maxmemory", "0");
                set("maxmemory-policy", "noeviction");
                nothing
            }
            (Servers::Postgres(server), Kind::JumpClock) => {
                server.set_clock(i64::try_from(fault.amount).unwrap_or(0) - 2_000);
                std::thread::sleep(fault.lasts);
                server.set_clock(0);
                nothing
            }
            (Servers::Postgres(server), Kind::KillServer) => {
                server.crash();
                std::thread::sleep(fault.lasts);
                server.run();
                Effect { kills: 1, ..nothing }
            }
            (Servers::Postgres(server) | Servers::PgBouncer(server, _), Kind::StopServer) => {
                server.pause();
                std::thread::sleep(fault.lasts);
                server.resume();
                Effect { stops: 1, ..nothing }
            }
            (Servers::Postgres(server) | Servers::PgBouncer(server, _), Kind::EndSessions) => {
                drop(server.sql(
                    "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity \
                     WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()",
                ));
                nothing
            }
            (Servers::PgBouncer(_, pooler), Kind::RestartPooler) => {
                pooler.crash();
                std::thread::sleep(fault.lasts);
                pooler.run();
                Effect { kills: 1, ..nothing }
            }
            (Servers::Firestore(emulator), Kind::StopServer) => {
                emulator.pause();
                std::thread::sleep(fault.lasts);
                emulator.resume();
                Effect { stops: 1, ..nothing }
            }
            (Servers::SqliteReplaced(file), Kind::ReplaceFile) => {
                file.replace(fault.amount.is_multiple_of(2));
                std::thread::sleep(fault.lasts);
                nothing
            }
            (servers, Kind::Failover) => servers.fail_over(fault),
            _ => nothing,
        }
    }
}

impl Servers {
    fn start(deployment: Deployment) -> Self {
        const INSTALLED: &str = "the server is installed";
        match deployment {
            Deployment::Memory => Self::Memory,
            Deployment::Sqlite => Self::Sqlite(TempDir::new()),
            Deployment::SqliteReplaced => Self::SqliteReplaced(ReplacedFile::new()),
            Deployment::Redis => {
                let options = RedisOptions::default().with_aof().with_clock();
                Self::Redis(RedisServer::start(&options).expect(INSTALLED))
            }
            Deployment::RedisSentinel => {
                let sentinel = RedisSentinel::start().expect(INSTALLED);
                sentinel.disable_automatic_failover();
                Self::RedisSentinel(Box::new(sentinel))
            }
            Deployment::RedisCluster | Deployment::RedisShards => {
                let cluster = RedisCluster::start(1).expect(INSTALLED);
                cluster.disable_automatic_failover();
                match deployment {
                    Deployment::RedisShards => Self::RedisShards(cluster),
                    _ => Self::RedisCluster(cluster),
                }
            }
            Deployment::Postgres => {
                let options = PostgresOptions::default().with_clock();
                Self::Postgres(PostgresServer::start(&options).expect(INSTALLED))
            }
            Deployment::PgBouncer => {
                let server = PostgresServer::start(&PostgresOptions::default()).expect(INSTALLED);
                let pooler = PgBouncer::start(&server).expect(INSTALLED);
                Self::PgBouncer(server, pooler)
            }
            Deployment::PostgresStandby => {
                let options = PostgresOptions::default();
                let primary = PostgresServer::start(&options).expect(INSTALLED);
                let standby = primary.start_standby();
                // Otherwise a promotion would lose what the standby has not received.
                drop(primary.sql("ALTER SYSTEM SET synchronous_standby_names = '*'"));
                drop(primary.sql("SELECT pg_reload_conf()"));
                Self::PostgresStandby { primary, standby }
            }
            Deployment::Firestore => Self::Firestore(FirestoreEmulator::start().expect(INSTALLED)),
        }
    }

    fn port(&self) -> u16 {
        match self {
            Self::Memory
            | Self::Sqlite(_)
            | Self::SqliteReplaced(_)
            | Self::RedisSentinel(_)
            | Self::RedisCluster(_)
            | Self::RedisShards(_) => 0,
            Self::Redis(server) => server.port(),
            Self::Postgres(server) => server.port(),
            Self::PostgresStandby { primary, .. } => primary.port(),
            Self::PgBouncer(_, pooler) => pooler.port(),
            Self::Firestore(emulator) => emulator.port(),
        }
    }

    fn url(&self, port: u16) -> String {
        match self {
            Self::Memory => "memory:".to_owned(),
            Self::Sqlite(directory) => {
                let path = directory.path().join("locks.db");
                format!("sqlite:{}?busy_timeout_ms=1500", path.display())
            }
            Self::SqliteReplaced(file) => {
                format!("sqlite:{}?busy_timeout_ms=1500&fences=clock", file.path().display())
            }
            Self::Redis(_) => format!("redis://127.0.0.1:{port}/0?{TIMEOUTS}"),
            Self::RedisSentinel(sentinel) => {
                format!("{}?{TIMEOUTS}&wait_for_replicas=1", sentinel.url())
            }
            Self::RedisCluster(cluster) => {
                cluster.url(&format!("prefix=%7Btorture%7D&{TIMEOUTS}&wait_for_replicas=1"))
            }
            Self::RedisShards(cluster) => {
                cluster.url(&format!("prefix=torture&shards=16&{TIMEOUTS}&wait_for_replicas=1"))
            }
            Self::Postgres(_) | Self::PgBouncer(..) => {
                format!("postgres://postgres@127.0.0.1:{port}/postgres?{TIMEOUTS}")
            }
            Self::PostgresStandby { primary, standby } => {
                let hosts = [primary, standby].map(|server| format!("127.0.0.1:{}", server.port()));
                format!("postgres://postgres@{}/postgres?{TIMEOUTS}", hosts.join(","))
            }
            Self::Firestore(_) => {
                format!("firestore://test?emulator=127.0.0.1:{port}&{TIMEOUTS}")
            }
        }
    }

    fn fail_over(&mut self, fault: &Planned) -> Effect {
        match self {
            Self::RedisSentinel(sentinel) => {
                let with_a_crash = fault.amount == 1;
                sentinel.fail_over(with_a_crash, fault.lasts);
                Effect { kills: with_a_crash.into(), failovers: 1, ..Effect::default() }
            }
            Self::RedisCluster(cluster) => {
                cluster.fail_over("{torture}");
                Effect { failovers: 1, ..Effect::default() }
            }
            Self::RedisShards(cluster) => {
                // Each is in a slot of another node.
                cluster.fail_over(if fault.amount == 1 { "{a}" } else { "{b}" });
                Effect { failovers: 1, ..Effect::default() }
            }
            Self::PostgresStandby { primary, standby } => {
                primary.crash();
                drop(standby.sql("SELECT pg_promote()"));
                Effect { kills: 1, failovers: 1, ..Effect::default() }
            }
            _ => Effect::default(),
        }
    }
}

/// A SQLite file in a directory that is exchanged for another one.
///
/// Only the file could not be: its log has a fixed name beside it, and SQLite would read the log of
/// one file into another.
#[derive(Debug)]
struct ReplacedFile {
    directory: TempDir,
    replaced: u32,
}

impl ReplacedFile {
    const NAME: &str = "locks.db";

    fn new() -> Self {
        let file = Self { directory: TempDir::new(), replaced: 0 };
        fs::create_dir(file.current()).expect("created");
        file
    }

    fn current(&self) -> PathBuf {
        self.directory.path().join("current")
    }

    fn path(&self) -> PathBuf {
        self.current().join(Self::NAME)
    }

    /// Exchanges the directory for one with a copy of the file, or for an empty one.
    fn replace(&mut self, with_a_copy: bool) {
        use rustix::fs::{CWD, RenameFlags, renameat_with};
        self.replaced += 1;
        let other = self.directory.path().join(format!("other-{}", self.replaced));
        fs::create_dir(&other).expect("created");
        if with_a_copy {
            let copy = || {
                let db = rusqlite::Connection::open(self.path())?;
                db.execute("VACUUM INTO ?1", [other.join(Self::NAME).to_string_lossy()])
            };
            // The file may not be there yet. Then the other one is empty too.
            drop(copy());
        }
        renameat_with(CWD, &other, CWD, self.current(), RenameFlags::EXCHANGE).expect("exchanged");
    }
}
