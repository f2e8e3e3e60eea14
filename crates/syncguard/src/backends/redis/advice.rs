//! What can make locks vanish or fences go backwards on this server.

use redis::FromRedisValue;

use super::connection::Connection;
use crate::common::error::{Error, Result};
use crate::contract::advice::Advice;

/// What a server says about itself, as far as the user may ask.
#[derive(Debug, Default)]
pub(super) struct Report {
    info: String,
    appendfsync: Option<String>,
}

impl Report {
    /// Asks the server. Whatever may not be asked stays unknown.
    pub(super) async fn ask(connection: &Connection) -> Self {
        let mut info = redis::cmd("INFO");
        info.arg(&["server", "persistence", "memory", "replication"]);
        let mut fsync = redis::cmd("CONFIG");
        fsync.arg("GET").arg("appendfsync");
        let info =
            connection.ask(info).await.and_then(|answer| Ok(String::from_redis_value(answer)?));
        let fsync: Option<Vec<(String, String)>> =
            connection.ask(fsync).await.ok().and_then(|answer| Vec::from_redis_value(answer).ok());
        let appendfsync = fsync.and_then(|pairs| pairs.into_iter().next()).map(|(_, value)| value);
        Self { info: info.unwrap_or_default(), appendfsync }
    }

    fn field(&self, name: &str) -> Option<&str> {
        self.info.lines().find_map(|line| line.trim_end().strip_prefix(name)?.strip_prefix(':'))
    }

    /// The scripts need errors of commands to keep their code, which is new in 7.0. A user who may
    /// not ask for the version is trusted. Valkey tells the version of Redis that it is like.
    pub(super) fn refuse_an_old_server(&self) -> Result<()> {
        const OLDEST: u32 = 7;
        let version = self.field("redis_version");
        let major = version.and_then(|version| version.split('.').next()?.parse::<u32>().ok());
        match major {
            Some(major) if major < OLDEST => Err(Error::invalid(format!(
                "this redis is too old; {OLDEST}.0 is the oldest that works"
            ))),
            _ => Ok(()),
        }
    }

    /// A node of a Cluster serves only its own slots, so it is no server to connect to alone.
    pub(super) fn refuse_a_lone_node(&self) -> Result<()> {
        match self.field("redis_mode") {
            Some("cluster") => Err(Error::invalid(
                "this redis is a node of a Cluster; connect with redis+cluster:// and a prefix \
                 that has a tag in braces",
            )),
            _ => Ok(()),
        }
    }

    pub(super) fn advice(&self, waits_for_replicas: bool) -> Vec<Advice> {
        let mut found = Vec::new();
        if self.info.is_empty() {
            found.push(Advice::new(
                "unknown",
                "this user may not ask redis (INFO) how it keeps data, so whether locks and fences \
                 survive a restart is unknown",
            ));
        }
        if self.field("aof_enabled") == Some("0") {
            found.push(Advice::new(
                "aof",
                "redis keeps no append-only file: after a restart locks are gone and fences begin \
                 again; set \"appendonly yes\"",
            ));
        } else if let Some(policy @ ("everysec" | "no")) = self.appendfsync.as_deref() {
            found.push(Advice::new(
                "appendfsync",
                format!(
                    "redis flushes its append-only file by \"appendfsync {policy}\": a power loss \
                     can repeat the last fences; set \"appendfsync always\""
                ),
            ));
        }
        if let Some(policy) =
            self.field("maxmemory_policy").filter(|policy| *policy != "noeviction")
        {
            let what = match policy {
                policy if policy.starts_with("allkeys") => "locks and fence counters",
                _ => "locks",
            };
            found.push(Advice::new(
                "maxmemory-policy",
                format!(
                    "redis may evict {what} when its memory is full (\"maxmemory-policy \
                     {policy}\"); set \"noeviction\""
                ),
            ));
        }
        let has_replicas = self.field("connected_slaves").is_some_and(|count| count != "0");
        if has_replicas && !waits_for_replicas {
            found.push(Advice::new(
                "replicas",
                "redis replicates asynchronously: a failover can lose the last locks and repeat \
                 their fences; wait_for_replicas narrows it",
            ));
        }
        found
    }

    /// Says it once, in the log.
    pub(super) fn warn(&self, waits_for_replicas: bool) {
        for advice in self.advice(waits_for_replicas) {
            if advice.subject() == "unknown" {
                tracing::debug!("{advice}");
            } else {
                tracing::warn!(subject = advice.subject(), "{advice}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn subjects(info: &str, appendfsync: &str, waits: bool) -> Vec<&'static str> {
        let report = Report { info: info.to_owned(), appendfsync: Some(appendfsync.to_owned()) };
        report.advice(waits).iter().map(Advice::subject).collect()
    }

    #[test]
    fn what_is_safe_needs_no_advice() {
        let safe = "aof_enabled:1\r\nmaxmemory_policy:noeviction\r\nconnected_slaves:0\r\n";
        assert_eq!(subjects(safe, "always", false), [] as [&str; 0]);
        assert_eq!(subjects(safe, "everysec", false), ["appendfsync"]);
        assert_eq!(subjects(&safe.replace("aof_enabled:1", "aof_enabled:0"), "x", false), ["aof"]);
        let evicts = safe.replace("noeviction", "volatile-lru");
        assert_eq!(subjects(&evicts, "always", false), ["maxmemory-policy"]);
        let replicates = safe.replace("slaves:0", "slaves:1");
        assert_eq!(subjects(&replicates, "always", false), ["replicas"]);
        assert_eq!(subjects(&replicates, "always", true), [] as [&str; 0]);
        assert_eq!(subjects("", "", false), ["unknown"]);
    }

    #[test]
    fn old_servers_and_lone_nodes_are_refused() {
        let report = |info: &str| Report { info: info.to_owned(), appendfsync: None };
        assert!(report("redis_version:6.2.14\r\n").refuse_an_old_server().is_err());
        assert!(report("redis_version:7.0.0\r\n").refuse_an_old_server().is_ok());
        assert!(report("redis_version:10.1\r\n").refuse_an_old_server().is_ok());
        assert!(report("").refuse_an_old_server().is_ok());
        assert!(report("redis_mode:cluster\r\n").refuse_a_lone_node().is_err());
        assert!(report("redis_mode:standalone\r\n").refuse_a_lone_node().is_ok());
    }
}
