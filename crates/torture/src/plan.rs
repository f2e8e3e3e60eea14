//! Everything that the seed decides: the seeds of the clients, and which fault strikes when.

use std::fmt;
use std::time::Duration;

use crate::random::Random;

/// A store, as it is deployed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deployment {
    /// Memory, in one process.
    Memory,
    /// A SQLite file.
    Sqlite,
    /// A SQLite file that is replaced while it is used, with fences from the clock.
    SqliteReplaced,
    /// A Redis server that writes every change to disk.
    Redis,
    /// A Redis primary and its replica, watched by Sentinel.
    RedisSentinel,
    /// A Redis Cluster with replicas, all locks in one slot.
    RedisCluster,
    /// A Redis Cluster with replicas, the locks in shards on all nodes.
    RedisShards,
    /// A PostgreSQL server.
    Postgres,
    /// A PostgreSQL server behind PgBouncer.
    PgBouncer,
    /// A PostgreSQL server with a synchronous standby, which is promoted.
    PostgresStandby,
    /// The Firestore emulator.
    Firestore,
}

impl Deployment {
    /// All of them.
    pub const ALL: [Self; 11] = [
        Self::Memory,
        Self::Sqlite,
        Self::SqliteReplaced,
        Self::Redis,
        Self::RedisSentinel,
        Self::RedisCluster,
        Self::RedisShards,
        Self::Postgres,
        Self::PgBouncer,
        Self::PostgresStandby,
        Self::Firestore,
    ];

    /// Returns the name on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Sqlite => "sqlite",
            Self::SqliteReplaced => "sqlite-replaced",
            Self::Redis => "redis",
            Self::RedisSentinel => "redis-sentinel",
            Self::RedisCluster => "redis-cluster",
            Self::RedisShards => "redis-shards",
            Self::Postgres => "postgres",
            Self::PgBouncer => "postgres-pgbouncer",
            Self::PostgresStandby => "postgres-standby",
            Self::Firestore => "firestore",
        }
    }

    /// Returns how many client processes there are.
    #[must_use]
    pub const fn clients(self) -> usize {
        if matches!(self, Self::Memory) { 1 } else { 3 }
    }

    /// Returns whether the clients reach the store through a proxy.
    #[must_use]
    pub const fn has_proxies(self) -> bool {
        matches!(self, Self::Redis | Self::Postgres | Self::PgBouncer | Self::Firestore)
    }

    /// Returns whether the store also has a fenced resource.
    #[must_use]
    pub const fn has_resource(self) -> bool {
        matches!(self, Self::Redis | Self::Postgres)
    }

    /// Returns whether waiters are notified of a release. A pooler in transaction mode passes no
    /// notifications on.
    #[must_use]
    pub const fn has_notifications(self) -> bool {
        !matches!(self, Self::PgBouncer)
    }

    /// Returns the kinds of faults that this store can suffer; a frequent one is repeated.
    fn faults(self) -> Vec<Kind> {
        let mut kinds = match self {
            Self::Memory => return vec![Kind::StopClient],
            _ => vec![Kind::KillClient, Kind::KillClient, Kind::StopClient, Kind::StopClient],
        };
        if self.has_proxies() {
            kinds.extend([
                Kind::CutStorm,
                Kind::CutStorm,
                Kind::CutStorm,
                Kind::BlackHole,
                Kind::LoseReplies,
                Kind::LoseRequests,
                Kind::Delay,
                Kind::Duplicate,
                Kind::Reset,
            ]);
        }
        kinds.extend(match self {
            Self::Memory => &[][..],
            Self::Sqlite => &[Kind::FullDisk],
            Self::SqliteReplaced => &[Kind::FullDisk, Kind::ReplaceFile, Kind::ReplaceFile],
            Self::Redis => &[
                Kind::KillServer,
                Kind::StopServer,
                Kind::EndSessions,
                Kind::FlushScripts,
                Kind::OutOfMemory,
                Kind::Evict,
                Kind::JumpClock,
            ],
            Self::Postgres => {
                &[Kind::KillServer, Kind::StopServer, Kind::EndSessions, Kind::JumpClock]
            }
            Self::PgBouncer => &[Kind::RestartPooler, Kind::StopServer, Kind::EndSessions],
            Self::RedisSentinel
            | Self::RedisCluster
            | Self::RedisShards
            | Self::PostgresStandby => &[],
            Self::Firestore => &[Kind::StopServer, Kind::SkewClock, Kind::SkewClock],
        });
        kinds
    }
}

/// A kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// `kill -9` of a client, which is started again.
    KillClient,
    /// `SIGSTOP` of a client, often for longer than its locks live.
    StopClient,
    /// The connections of a client are reset many times.
    CutStorm,
    /// A client's data is lost in both directions.
    BlackHole,
    /// Replies to a client are lost.
    LoseReplies,
    /// Requests of a client are lost.
    LoseRequests,
    /// A client's data is delayed.
    Delay,
    /// A client's requests reach the server twice.
    Duplicate,
    /// A client's connection is reset within a reply.
    Reset,
    /// `kill -9` of the server, which is started again.
    KillServer,
    /// `SIGSTOP` of the server.
    StopServer,
    /// The server ends all sessions.
    EndSessions,
    /// `SCRIPT FLUSH`, repeatedly.
    FlushScripts,
    /// The server has no memory for writes.
    OutOfMemory,
    /// The server evicts locks, because its memory is limited and its policy is `volatile-random`.
    Evict,
    /// The wall clock of the server jumps, and back again.
    JumpClock,
    /// A client can write no files.
    FullDisk,
    /// The directory of the lock file is exchanged for one with a copy of the file, or for an empty
    /// one.
    ReplaceFile,
    /// The wall clock of a client is wrong.
    SkewClock,
    /// The connection pooler is restarted.
    RestartPooler,
    /// Another server takes over.
    Failover,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::KillClient => "kill -9 of a client",
            Self::StopClient => "SIGSTOP of a client",
            Self::CutStorm => "connections cut",
            Self::BlackHole => "black hole",
            Self::LoseReplies => "replies lost",
            Self::LoseRequests => "requests lost",
            Self::Delay => "data delayed",
            Self::Duplicate => "requests sent twice",
            Self::Reset => "reset within a reply",
            Self::KillServer => "kill -9 of the server",
            Self::StopServer => "SIGSTOP of the server",
            Self::EndSessions => "sessions ended",
            Self::FlushScripts => "SCRIPT FLUSH",
            Self::OutOfMemory => "out of memory",
            Self::Evict => "eviction",
            Self::JumpClock => "clock of the server jumps",
            Self::FullDisk => "full disk",
            Self::ReplaceFile => "file replaced",
            Self::SkewClock => "wrong clock of a client",
            Self::RestartPooler => "pooler restarted",
            Self::Failover => "failover",
        })
    }
}

/// A fault that is planned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Planned {
    /// When it strikes, from the begin of the run.
    pub at: Duration,
    /// What happens.
    pub kind: Kind,
    /// The client that it hits, if it hits one.
    pub client: usize,
    /// How long it lasts.
    pub lasts: Duration,
    /// A number whose meaning depends on the kind: bytes, or milliseconds.
    pub amount: u64,
}

/// The plan of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The seed.
    pub seed: u64,
    /// The store.
    pub deployment: Deployment,
    /// How long faults strike.
    pub noisy: Duration,
    /// How long the clients continue without faults.
    pub quiet: Duration,
    /// The faults, by time.
    pub faults: Vec<Planned>,
}

impl Plan {
    /// Draws a plan.
    #[must_use]
    pub fn draw(seed: u64, deployment: Deployment, length: Duration) -> Self {
        let quiet = Duration::from_secs(9).min(length / 2);
        let noisy = length.saturating_sub(quiet);
        let mut random = Random::of(seed, deployment.name().len() as u64 + 17);
        let kinds = deployment.faults();
        let mut faults = Vec::new();
        let mut at = random.millis(300..700);
        while at < noisy {
            let kind = random.one_of(&kinds);
            let client = random.below(deployment.clients() as u64);
            let client = usize::try_from(client).unwrap_or(0);
            let lasts = match kind {
                // Longer than the lease of a lock and the tolerance, most of the time.
                Kind::StopClient if deployment == Deployment::Memory => random.millis(200..1_500),
                Kind::StopClient => random.millis(300..3_600),
                Kind::KillClient | Kind::KillServer => random.millis(50..600),
                Kind::SkewClock => random.millis(1_000..4_000),
                _ => random.millis(200..1_800),
            };
            let amount = match kind {
                // Within what the backend accepts, 500 ms, and with a rest for the comparison.
                Kind::SkewClock => random.below(600),
                // Ahead by up to four seconds, or behind by up to two.
                Kind::JumpClock => random.below(6_000),
                Kind::Delay => random.within(5..400),
                // By how much the second request is later.
                Kind::Duplicate => random.one_of(&[0, 0, 5, 50, 400]),
                _ => random.below(400),
            };
            faults.push(Planned { at, kind, client, lasts, amount });
            at += random.millis(150..900);
        }
        // Besides those that were drawn: short ones, after which connections come back quickly.
        let mut at = random.millis(500..1_500);
        while deployment.has_proxies() && at < noisy {
            let client = usize::try_from(random.below(deployment.clients() as u64)).unwrap_or(0);
            let (kind, lasts) = (Kind::CutStorm, random.millis(100..500));
            faults.push(Planned { at, kind, client, lasts, amount: 0 });
            at += random.millis(1_000..2_500);
        }
        let failovers = match deployment {
            Deployment::RedisSentinel | Deployment::RedisCluster | Deployment::RedisShards => {
                noisy.as_secs() / 6
            }
            Deployment::PostgresStandby => 1,
            _ => 0,
        };
        for number in 0..failovers {
            let share = noisy / u32::try_from(failovers).unwrap_or(1);
            let at = share * u32::try_from(number).unwrap_or(0) + share / 3;
            // For so long, two Redis servers are primaries.
            let (kind, lasts) = (Kind::Failover, random.millis(0..1_500));
            faults.push(Planned { at, kind, client: 0, lasts, amount: random.below(2) });
        }
        faults.sort_by_key(|fault| fault.at);
        Self { seed, deployment, noisy, quiet, faults }
    }

    /// Returns the seed of a client.
    #[must_use]
    pub fn client_seed(&self, client: usize, start: usize) -> u64 {
        Random::of(self.seed, (client * 1_000 + start) as u64 + 1).draw()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{Deployment, Plan};

    #[test]
    fn the_seed_decides_the_plan() {
        let length = Duration::from_mins(1);
        for deployment in Deployment::ALL {
            let plan = Plan::draw(7, deployment, length);
            assert_eq!(plan, Plan::draw(7, deployment, length));
            assert_ne!(plan.faults, Plan::draw(8, deployment, length).faults);
            assert!(plan.faults.len() > 40, "{deployment:?}: {}", plan.faults.len());
        }
    }

    #[test]
    fn faults_overlap() {
        let plan = Plan::draw(1, Deployment::Redis, Duration::from_mins(1));
        let overlap = |(index, fault): (usize, &super::Planned)| {
            plan.faults[index + 1..].iter().any(|later| later.at < fault.at + fault.lasts)
        };
        assert!(plan.faults.iter().enumerate().filter(|fault| overlap(*fault)).count() > 20);
    }
}
