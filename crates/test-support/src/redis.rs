//! Redis servers: a single one, a Cluster, and Sentinel.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::certificates::Certificates;
use crate::clock::ServerClock;
use crate::process::{Server, TempDir, find_program, free_port};

/// Options of a Redis server.
#[derive(Clone, Debug, Default)]
pub struct RedisOptions {
    arguments: Vec<String>,
    tls_port: Option<u16>,
    has_clock: bool,
}

impl RedisOptions {
    /// Keeps every write in an append-only file, flushed immediately.
    #[must_use]
    pub fn with_aof(self) -> Self {
        self.with(["--appendonly", "yes", "--appendfsync", "always"])
    }

    /// Enables TLS on an additional port.
    #[must_use]
    pub fn with_tls(mut self, certificates: &Certificates) -> Self {
        let port = free_port();
        self.tls_port = Some(port);
        self.with(["--tls-port", &port.to_string(), "--tls-auth-clients", "optional"])
            .with(["--tls-cert-file", &certificates.path("server.pem")])
            .with(["--tls-key-file", &certificates.path("server.key")])
            .with(["--tls-ca-cert-file", &certificates.path("ca.pem")])
    }

    /// Gives the server a wall clock of its own; see [`RedisServer::set_clock`].
    #[must_use]
    pub fn with_clock(mut self) -> Self {
        self.has_clock = true;
        self
    }

    /// Adds command-line arguments.
    #[must_use]
    pub fn with<const N: usize>(mut self, arguments: [&str; N]) -> Self {
        self.arguments.extend(arguments.map(str::to_owned));
        self
    }
}

/// A Redis server on a free port, with its data in a temporary directory.
#[derive(Debug)]
pub struct RedisServer {
    program: PathBuf,
    arguments: Vec<String>,
    port: u16,
    tls_port: Option<u16>,
    folder: TempDir,
    clock: Option<ServerClock>,
    server: Option<Server>,
}

impl RedisServer {
    /// Starts a server. If Redis is not installed, prints that and returns `None`.
    ///
    /// # Panics
    ///
    /// Panics if the server does not start.
    #[must_use]
    pub fn start(options: &RedisOptions) -> Option<Self> {
        let program = find_program("redis-server")?;
        let port = free_port();
        let mut arguments =
            ["--save", "", "--repl-diskless-sync-delay", "0", "--bind", "127.0.0.1", "--port"]
                .map(str::to_owned)
                .to_vec();
        arguments.push(port.to_string());
        arguments.extend(options.arguments.iter().cloned());
        let (tls_port, folder) = (options.tls_port, TempDir::new());
        let clock = options.has_clock.then(|| ServerClock::new(folder.path()));
        let mut server = Self { program, arguments, port, tls_port, folder, clock, server: None };
        server.run();
        Some(server)
    }

    fn start_sentinel(config: &str) -> Option<Self> {
        let program = find_program("redis-server")?;
        let (port, folder) = (free_port(), TempDir::new());
        let file = folder.path().join("sentinel.conf");
        std::fs::write(&file, config).expect("writable");
        let arguments = [&file.display().to_string(), "--sentinel", "--port", &port.to_string()];
        let arguments = arguments.map(ToString::to_string).to_vec();
        let (tls_port, clock) = (None, None);
        let mut server = Self { program, arguments, port, tls_port, folder, clock, server: None };
        server.run();
        Some(server)
    }

    /// Sets how many milliseconds the server's clock is ahead of the true time; behind, if
    /// negative.
    ///
    /// # Panics
    ///
    /// Panics if the server was not started [with a clock](RedisOptions::with_clock).
    pub fn set_clock(&self, ahead_ms: i64) {
        self.clock.as_ref().expect("started with a clock").set(ahead_ms);
    }

    /// Returns the port on 127.0.0.1.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Returns the URL of database 0.
    #[must_use]
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}/0", self.port)
    }

    /// Returns the URL of database 0 with TLS.
    ///
    /// # Panics
    ///
    /// Panics if the server was not started with TLS.
    #[must_use]
    pub fn tls_url(&self) -> String {
        format!("rediss://localhost:{}/0", self.tls_port.expect("started with TLS"))
    }

    /// Runs a command with `redis-cli` and returns its output.
    ///
    /// # Panics
    ///
    /// Panics if `redis-cli` cannot be started.
    #[must_use]
    pub fn cli(&self, arguments: &[&str]) -> String {
        cli(&[&["-p", &self.port.to_string()], arguments].concat())
    }

    /// Starts a replica of this server and waits until it is in sync.
    ///
    /// # Panics
    ///
    /// Panics if the replica does not get in sync.
    #[must_use]
    pub fn start_replica(&self) -> Self {
        let port = self.port.to_string();
        let options = RedisOptions::default().with_aof().with(["--replicaof", "127.0.0.1", &port]);
        let replica = Self::start(&options).expect("installed, because this server runs");
        self.wait_for_a_replica();
        replica
    }

    /// Waits until a replica is in sync.
    ///
    /// # Panics
    ///
    /// Panics if no replica gets in sync.
    pub fn wait_for_a_replica(&self) {
        wait_until("no replica is in sync", || {
            self.cli(&["INFO", "replication"]).contains("state=online")
        });
    }

    /// Waits until a replica has everything that was written so far. Replicas report it once a
    /// second.
    ///
    /// # Panics
    ///
    /// Panics if no replica catches up.
    pub fn wait_until_replicated(&self) {
        let number = |text: &str, name: &str| {
            let (_, rest) = text.split_once(name)?;
            rest.split(|digit: char| !digit.is_ascii_digit()).next()?.parse::<u64>().ok()
        };
        let written = number(&self.cli(&["INFO", "replication"]), "master_repl_offset:");
        let written = written.expect("it has replicas");
        wait_until("no replica has caught up", || {
            let replication = self.cli(&["INFO", "replication"]);
            let replicas = replication.lines().filter(|line| line.contains("state=online"));
            let mut offsets = replicas.filter_map(|line| number(line, "offset="));
            offsets.any(|offset| offset >= written)
        });
    }

    /// Kills the server without warning and starts it again on the same port and data.
    ///
    /// # Panics
    ///
    /// Panics if the server does not start.
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
    /// Panics if the server does not start.
    pub fn run(&mut self) {
        let environment = self.clock.iter().flat_map(ServerClock::environment).collect::<Vec<_>>();
        let (arguments, folder) = (&self.arguments, self.folder.path());
        self.server = Some(Server::start_with(&environment, &self.program, arguments, folder));
        let started = Instant::now();
        while !self.answers() {
            let log = self.folder.path().join("server.log");
            let log = std::fs::read_to_string(log).unwrap_or_default();
            assert!(started.elapsed() < Duration::from_secs(20), "Redis does not start:\n{log}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Pauses the server with `SIGSTOP`.
    ///
    /// # Panics
    ///
    /// Panics if the server is not running.
    pub fn pause(&self) {
        self.server.as_ref().expect("running").signal("STOP");
    }

    /// Continues a paused server.
    ///
    /// # Panics
    ///
    /// Panics if the server is not running.
    pub fn resume(&self) {
        self.server.as_ref().expect("running").signal("CONT");
    }

    /// Returns whether the server responds, with `PONG` or an error about a missing password.
    fn answers(&self) -> bool {
        let Ok(mut stream) = TcpStream::connect(("127.0.0.1", self.port)) else { return false };
        let mut answer = [0; 7];
        let timeout = Some(Duration::from_millis(500));
        let asked = stream.set_read_timeout(timeout).and_then(|()| stream.write_all(b"PING\r\n"));
        asked.and_then(|()| stream.read_exact(&mut answer)).is_ok()
            && (answer.starts_with(b"+PONG") || answer.starts_with(b"-NOAUTH"))
    }
}

fn cli(arguments: &[&str]) -> String {
    let output = Command::new("redis-cli").args(arguments).output().expect("redis-cli runs");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Waits until a condition is true, for at most 30 seconds.
///
/// # Panics
///
/// Panics if it does not become true.
fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let started = Instant::now();
    while !holds() {
        assert!(started.elapsed() < Duration::from_secs(30), "{what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// A Redis Cluster of three primaries, each with the same number of replicas.
#[derive(Debug)]
pub struct RedisCluster {
    nodes: Vec<RedisServer>,
}

impl RedisCluster {
    /// Starts a Cluster. If Redis is not installed, prints that and returns `None`.
    ///
    /// # Panics
    ///
    /// Panics if the server does not start.
    #[must_use]
    pub fn start(replicas: usize) -> Option<Self> {
        Self::start_with(replicas, &RedisOptions::default())
    }

    /// Starts a Cluster whose nodes have these options. If Redis is not installed, prints that and
    /// returns `None`.
    ///
    /// # Panics
    ///
    /// Panics if the server does not start.
    #[must_use]
    pub fn start_with(replicas: usize, options: &RedisOptions) -> Option<Self> {
        /// A port may be taken between its choice and its use.
        const ATTEMPTS: u32 = 3;
        let mut printed = String::new();
        for _ in 0..ATTEMPTS {
            match Self::try_start(replicas, options)? {
                Ok(cluster) => return Some(cluster),
                Err(failure) => printed = failure,
            }
        }
        panic!("the cluster does not start:\n{printed}");
    }

    /// Starts a Cluster, or returns what `redis-cli` has printed.
    fn try_start(replicas: usize, options: &RedisOptions) -> Option<Result<Self, String>> {
        let mut nodes = Vec::new();
        for _ in 0..3 * (1 + replicas) {
            // Set the cluster bus port, because the default, port + 10000, may be in use.
            let options = options
                .clone()
                .with(["--cluster-enabled", "yes", "--cluster-node-timeout", "1000"])
                .with(["--cluster-port", &free_port().to_string()]);
            nodes.push(RedisServer::start(&options)?);
        }
        let addresses: Vec<_> =
            nodes.iter().map(|node| format!("127.0.0.1:{}", node.port())).collect();
        // It waits forever for a node that cannot reach the others.
        let mut create = vec!["20", "redis-cli", "--cluster", "create"];
        create.extend(addresses.iter().map(String::as_str));
        let replicas = replicas.to_string();
        create.extend(["--cluster-replicas", &replicas, "--cluster-yes"]);
        let output = Command::new("timeout").args(create).output().expect("timeout runs");
        if !output.status.success() {
            return Some(Err(String::from_utf8_lossy(&output.stdout).into_owned()));
        }
        wait_until("the cluster does not start", || {
            nodes.iter().all(|node| node.cli(&["CLUSTER", "INFO"]).contains("cluster_state:ok"))
        });
        Some(Ok(Self { nodes }))
    }

    /// Returns the nodes.
    #[must_use]
    pub fn nodes(&self) -> &[RedisServer] {
        &self.nodes
    }

    /// Returns the nodes mutably.
    pub fn nodes_mut(&mut self) -> &mut [RedisServer] {
        &mut self.nodes
    }

    /// Returns the URL of the Cluster, with an option.
    #[must_use]
    pub fn url(&self, option: &str) -> String {
        let hosts: Vec<_> =
            self.nodes.iter().map(|node| format!("127.0.0.1:{}", node.port())).collect();
        format!("redis+cluster://{}?{option}", hosts.join(","))
    }

    /// Lets only [`Self::fail_over`] begin a failover: a node that is slow to respond does not.
    pub fn disable_automatic_failover(&self) {
        for node in &self.nodes {
            drop(node.cli(&["CONFIG", "SET", "cluster-replica-no-failover", "yes"]));
        }
    }

    /// Lets a replica take over from the node that serves the slot of a name, without loss.
    ///
    /// # Panics
    ///
    /// Panics if there is no replica, or if it does not take over.
    pub fn fail_over(&self, name: &str) {
        let primary = self.nodes[self.node_of(name)].cli(&["CLUSTER", "MYID"]);
        let is_its_replica = |node: &&RedisServer| {
            let nodes = node.cli(&["CLUSTER", "NODES"]);
            let own = nodes.lines().find(|line| line.contains("myself")).unwrap_or_default();
            own.contains("slave") && own.contains(primary.trim())
        };
        let replica = self.nodes.iter().find(is_its_replica).expect("a replica");
        let mut asked = Instant::now();
        drop(replica.cli(&["CLUSTER", "FAILOVER"]));
        wait_until("the replica does not take over", || {
            // It is refused while the replica is not in sync.
            if asked.elapsed() > Duration::from_secs(2) {
                drop(replica.cli(&["CLUSTER", "FAILOVER"]));
                asked = Instant::now();
            }
            replica.cli(&["ROLE"]).starts_with("master")
        });
    }

    /// Returns the index of the node that serves the slot of a name.
    ///
    /// # Panics
    ///
    /// Panics if no node serves it.
    #[must_use]
    pub fn node_of(&self, name: &str) -> usize {
        let serves = |node: &RedisServer| !node.cli(&["GET", name]).starts_with("MOVED");
        self.nodes.iter().position(serves).expect("a node serves the slot")
    }
}

impl RedisCluster {
    /// Begins to move the slot of a name to the next of the first three nodes. Its keys stay until
    /// they are moved.
    ///
    /// # Panics
    ///
    /// Panics if a node refuses it.
    #[must_use]
    pub fn begin_migration(&self, name: &str) -> Migration<'_> {
        let slot = self.nodes[0].cli(&["CLUSTER", "KEYSLOT", name]).trim().to_owned();
        let from = self.node_of(name);
        let migration = Migration { cluster: self, from, to: (from + 1) % 3, slot };
        let (source, target) = (migration.id(from), migration.id(migration.to));
        let slot = &migration.slot;
        migration.run(migration.to, &["CLUSTER", "SETSLOT", slot, "IMPORTING", &source]);
        migration.run(from, &["CLUSTER", "SETSLOT", slot, "MIGRATING", &target]);
        migration
    }
}

/// A slot that moves from one node to another, for as long as a test wants.
#[derive(Debug)]
pub struct Migration<'a> {
    cluster: &'a RedisCluster,
    from: usize,
    to: usize,
    slot: String,
}

impl Migration<'_> {
    fn id(&self, node: usize) -> String {
        self.cluster.nodes[node].cli(&["CLUSTER", "MYID"]).trim().to_owned()
    }

    fn run(&self, node: usize, arguments: &[&str]) {
        let printed = self.cluster.nodes[node].cli(arguments);
        assert!(printed.contains("OK") || printed.contains("NOKEY"), "{arguments:?}: {printed}");
    }

    /// Moves these keys.
    ///
    /// # Panics
    ///
    /// Panics if a node refuses it.
    pub fn move_keys(&self, names: &[&str]) {
        let port = self.cluster.nodes[self.to].port().to_string();
        let mut migrate = vec!["MIGRATE", "127.0.0.1", &port, "", "0", "1000", "KEYS"];
        migrate.extend(names);
        self.run(self.from, &migrate);
    }

    /// Moves all keys that are left, and makes the other node the owner of the slot.
    ///
    /// # Panics
    ///
    /// Panics if a node refuses it.
    pub fn finish(&self) {
        loop {
            let slot = &self.slot;
            let names =
                self.cluster.nodes[self.from].cli(&["CLUSTER", "GETKEYSINSLOT", slot, "99"]);
            let names: Vec<&str> = names.lines().filter(|name| !name.is_empty()).collect();
            if names.is_empty() {
                break;
            }
            self.move_keys(&names);
        }
        let target = self.id(self.to);
        for node in [self.to, self.from, (self.from + 2) % 3] {
            self.run(node, &["CLUSTER", "SETSLOT", &self.slot, "NODE", &target]);
        }
    }
}

/// A primary, a replica, and a sentinel that monitors them under the name `shop`.
#[derive(Debug)]
pub struct RedisSentinel {
    /// The primary and the replica, as they were started.
    pub servers: [RedisServer; 2],
    sentinel: RedisServer,
}

impl RedisSentinel {
    /// Starts all three servers. If Redis is not installed, prints that and returns `None`.
    ///
    /// # Panics
    ///
    /// Panics if they do not start.
    #[must_use]
    pub fn start() -> Option<Self> {
        let primary = RedisServer::start(&RedisOptions::default().with_aof())?;
        let (port, replica) = (primary.port(), primary.start_replica());
        let sentinel = RedisServer::start_sentinel(&format!(
            "sentinel monitor shop 127.0.0.1 {port} 1\n\
             sentinel down-after-milliseconds shop 500\n\
             sentinel failover-timeout shop 3000\n"
        ))?;
        wait_until("the sentinel does not see the replica", || {
            sentinel.cli(&["SENTINEL", "MASTER", "shop"]).contains("num-slaves\n1")
        });
        Some(Self { servers: [primary, replica], sentinel })
    }

    /// Lets only [`Self::fail_over`] begin a failover: a server that is slow to respond does not.
    pub fn disable_automatic_failover(&self) {
        let set = ["SENTINEL", "SET", "shop", "down-after-milliseconds", "600000"];
        drop(self.sentinel.cli(&set));
    }

    /// Makes the replica the primary, and the primary its replica. For a time, both are primaries.
    ///
    /// If `with_a_crash`, the primary is killed first, and started again after that time.
    ///
    /// # Panics
    ///
    /// Panics if that does not happen.
    pub fn fail_over(&mut self, with_a_crash: bool, both: Duration) {
        let is_primary = |server: &RedisServer| server.cli(&["ROLE"]).starts_with("master");
        let [one, two] = &mut self.servers;
        let (primary, replica) = if is_primary(one) { (one, two) } else { (two, one) };
        if with_a_crash {
            primary.crash();
        }
        let mut asked: Option<Instant> = None;
        wait_until("the replica does not take over", || {
            // It is refused while another failover is not over.
            if asked.is_none_or(|asked| asked.elapsed() > Duration::from_secs(1)) {
                drop(self.sentinel.cli(&["SENTINEL", "FAILOVER", "shop"]));
                asked = Some(Instant::now());
            }
            is_primary(replica)
        });
        std::thread::sleep(both);
        if with_a_crash {
            primary.run();
        }
        // The sentinel does the same, but only after it has seen both for many seconds.
        drop(primary.cli(&["REPLICAOF", "127.0.0.1", &replica.port.to_string()]));
        wait_until("the old primary does not follow", || {
            let follower = replica.cli(&["INFO", "replication"]);
            !is_primary(primary) && follower.contains("state=online")
        });
    }

    /// Returns the URL of the Sentinel service.
    #[must_use]
    pub fn url(&self) -> String {
        format!("redis+sentinel://127.0.0.1:{}/shop/0", self.sentinel.port())
    }
}
