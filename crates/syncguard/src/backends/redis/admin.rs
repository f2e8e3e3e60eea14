//! Listing, and findings about settings of the server that can lose locks or repeat fences.

use std::time::Duration;

use redis::{FromRedisValue, Value};

use super::connection::Connection;
use super::reply::text;
use super::scripts::Argument::{Number, Text};
use super::{RedisBackend, error, fenced, record};
use crate::common::error::{Error, Result};
use crate::common::fence::Fence;
use crate::common::fence_source::FenceSource;
use crate::common::key::Key;
use crate::common::time::TIME_TOLERANCE_MS;
use crate::contract::BoxFuture;
use crate::contract::admin::{Admin, Cursor, Page};
use crate::contract::finding::Finding;

/// The settings of a server, as far as the user may read them.
#[derive(Debug, Default)]
pub(super) struct ServerSettings {
    info: String,
    appendfsync: Option<String>,
}

impl ServerSettings {
    /// Asks the server. What the user may not read stays unknown.
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

    /// Returns an error for a server older than 7.0, the first version in which errors of commands
    /// in scripts keep their code. If the user may not ask for the version, the server is accepted.
    /// Valkey reports the version of Redis that it is compatible with.
    pub(super) fn refuse_an_old_server(&self) -> Result<()> {
        const OLDEST: u32 = 7;
        let version = self.field("redis_version");
        let major = version.and_then(|version| version.split('.').next()?.parse::<u32>().ok());
        match major {
            Some(major) if major < OLDEST => Err(Error::invalid(format!(
                "this Redis server is too old; use version {OLDEST}.0 or newer"
            ))),
            _ => Ok(()),
        }
    }

    /// Returns an error for a node of a Cluster: it serves only its own slots.
    pub(super) fn refuse_a_lone_node(&self) -> Result<()> {
        match self.field("redis_mode") {
            Some("cluster") => Err(Error::invalid(
                "this Redis server is a node of a Cluster; use a redis+cluster:// URL and a prefix \
                 with a tag in braces, such as \"{locks}\"",
            )),
            _ => Ok(()),
        }
    }

    pub(super) fn findings(&self, waits_for_replicas: bool, fences: FenceSource) -> Vec<Finding> {
        let (mut found, mut loses_counters) = (Vec::new(), false);
        // With a clock, only locks are lost.
        let is_counted = fences == FenceSource::Counter;
        let repeats = if is_counted { " and repeat their fences" } else { "" };
        if self.info.is_empty() {
            found.push(Finding::new(
                "unknown",
                "this Redis user may not run INFO, so it is unknown whether locks and fences \
                 survive a restart; grant +info",
            ));
        }
        if self.field("aof_enabled") == Some("0") {
            let restart = if is_counted { " and fences start again" } else { "" };
            loses_counters = true;
            found.push(Finding::new(
                "aof",
                format!(
                    "Redis keeps no append-only file: after a restart, locks are lost{restart}; \
                     set \"appendonly yes\""
                ),
            ));
        } else if let Some(policy @ ("everysec" | "no")) = self.appendfsync.as_deref() {
            loses_counters = true;
            found.push(Finding::new(
                "appendfsync",
                format!(
                    "Redis does not flush every write to disk (\"appendfsync {policy}\"): a power \
                     loss can lose the last locks{repeats}; set \"appendfsync always\""
                ),
            ));
        }
        if let Some(policy) =
            self.field("maxmemory_policy").filter(|policy| *policy != "noeviction")
        {
            let evicts_counters = is_counted && policy.starts_with("allkeys");
            loses_counters |= evicts_counters;
            let what = if evicts_counters { "locks and fence counters" } else { "locks" };
            found.push(Finding::new(
                "maxmemory-policy",
                format!(
                    "Redis may evict {what} when its memory is full (\"maxmemory-policy \
                     {policy}\"); set \"maxmemory-policy noeviction\""
                ),
            ));
        }
        let has_replicas = self.field("connected_slaves").is_some_and(|count| count != "0");
        if has_replicas && !waits_for_replicas {
            loses_counters = true;
            found.push(Finding::new(
                "replicas",
                format!(
                    "Redis replicates asynchronously: a failover can lose the last locks{repeats}; \
                     set wait_for_replicas to reduce the risk"
                ),
            ));
        }
        if is_counted && loses_counters {
            found.push(Finding::lost_counters());
        }
        found
    }

    /// Logs the findings.
    pub(super) fn warn(&self, waits_for_replicas: bool, fences: FenceSource) {
        for finding in self.findings(waits_for_replicas, fences) {
            if finding.subject() == "unknown" {
                tracing::debug!("{finding}");
            } else {
                tracing::warn!(subject = finding.subject(), "{finding}");
            }
        }
    }
}

impl Admin for RedisBackend {
    fn list<'a>(&'a self, after: Option<&'a Cursor>) -> BoxFuture<'a, Result<Page>> {
        const OPERATION: &str = "list";
        Box::pin(async move {
            let cursor = after.map_or("0", Cursor::place);
            let pattern = self.shared.names.pattern();
            let arguments = [Text(cursor), Text(&pattern), Number(TIME_TOLERANCE_MS)];
            let (script, connection) = (&self.shared.scripts.list, &self.shared.connection);
            // A name with the prefix routes the script on a Cluster.
            let name = format!("{}:", self.shared.names.space.prefix());
            let answer = connection.inspect(OPERATION, script, &[&name], &arguments).await?;
            let Value::Array(items) = &answer else {
                return Err(error::unexpected_response(OPERATION));
            };
            let (next, records) =
                items.split_first().ok_or_else(|| error::unexpected_response(OPERATION))?;
            let next = text(next).ok_or_else(|| error::unexpected_response(OPERATION))?;
            // An invalid record is not a lock; operations on its key report it.
            let parse = |item: &Value| match item {
                Value::BulkString(json) => record::parse(json, OPERATION).ok(),
                _ => None,
            };
            let next = (next != "0").then(|| Cursor::new(next));
            Ok(Page::new(records.iter().filter_map(parse).collect(), next))
        })
    }

    fn findings(&self) -> BoxFuture<'_, Result<Vec<Finding>>> {
        Box::pin(async move { Ok(Self::findings(self).await) })
    }

    fn collect_fences(&self, idle: Duration) -> BoxFuture<'_, Result<u64>> {
        const OPERATION: &str = "collect_fences";
        Box::pin(async move {
            let fences = self.shared.fences.source;
            let age_ms = fences.collectable_age_ms(idle)?;
            let pattern = self.shared.names.counter_pattern()?;
            let (script, connection) =
                (&self.shared.scripts.collect_fences, &self.shared.connection);
            let name = format!("{}:", self.shared.names.space.prefix());
            let (mut deleted, mut cursor) = (0, "0".to_owned());
            loop {
                let per_ms = Number(fences.per_millisecond());
                let arguments = [Text(&cursor), Text(&pattern), Number(age_ms), per_ms];
                let answer = connection.inspect(OPERATION, script, &[&name], &arguments).await?;
                let Value::Array(items) = &answer else {
                    return Err(error::unexpected_response(OPERATION));
                };
                let [next, Value::Int(count)] = items.as_slice() else {
                    return Err(error::unexpected_response(OPERATION));
                };
                deleted += u64::try_from(*count).unwrap_or(0);
                text(next)
                    .ok_or_else(|| error::unexpected_response(OPERATION))?
                    .clone_into(&mut cursor);
                if cursor == "0" {
                    return Ok(deleted);
                }
            }
        })
    }

    fn check_fence<'a>(
        &'a self,
        resource: &'a Key,
        fence: Fence,
        key: Option<&'a Key>,
    ) -> BoxFuture<'a, Result<()>> {
        const OPERATION: &str = "check_fence";
        Box::pin(async move {
            let record = self.shared.names.resource(resource)?;
            let lock = key.map_or_else(String::new, fenced::lock_hash);
            let arguments = [Number(fence.get()), Text(&lock), Number(0)];
            let (script, connection) = (&self.shared.scripts.check_fence, &self.shared.connection);
            match connection.inspect(OPERATION, script, &[&record], &arguments).await? {
                Value::Int(1) => Ok(()),
                _ => Err(error::unexpected_response(OPERATION)),
            }
        })
    }

    fn fence_source(&self) -> FenceSource {
        self.shared.fences.source
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(info: &str, appendfsync: &str, waits: bool, fences: FenceSource) -> Vec<Finding> {
        let report =
            ServerSettings { info: info.to_owned(), appendfsync: Some(appendfsync.to_owned()) };
        report.findings(waits, fences)
    }

    #[test]
    fn safe_settings_have_no_findings_and_others_do() {
        let subjects = |info: &str, appendfsync: &str, waits| -> Vec<&str> {
            let found = findings(info, appendfsync, waits, FenceSource::Counter);
            found.iter().map(Finding::subject).collect()
        };
        let safe = "aof_enabled:1\r\nmaxmemory_policy:noeviction\r\nconnected_slaves:0\r\n";
        assert_eq!(subjects(safe, "always", false), [] as [&str; 0]);
        assert_eq!(subjects(safe, "everysec", false), ["appendfsync", "fences"]);
        let no_aof = safe.replace("aof_enabled:1", "aof_enabled:0");
        assert_eq!(subjects(&no_aof, "x", false), ["aof", "fences"]);
        let evicts = safe.replace("noeviction", "volatile-lru");
        assert_eq!(subjects(&evicts, "always", false), ["maxmemory-policy"]);
        let evicts = safe.replace("noeviction", "allkeys-lru");
        assert_eq!(subjects(&evicts, "always", false), ["maxmemory-policy", "fences"]);
        let replicates = safe.replace("slaves:0", "slaves:1");
        assert_eq!(subjects(&replicates, "always", false), ["replicas", "fences"]);
        assert_eq!(subjects(&replicates, "always", true), [] as [&str; 0]);
        assert_eq!(subjects("", "", false), ["unknown"]);
    }

    #[test]
    fn with_a_clock_only_locks_are_lost() {
        let info = "aof_enabled:0\r\nmaxmemory_policy:allkeys-lru\r\nconnected_slaves:1\r\n";
        for (info, count) in [(info, 3), (&info.replace("enabled:0", "enabled:1"), 3)] {
            let found = findings(info, "everysec", false, FenceSource::Clock);
            assert_eq!(found.len(), count);
            for finding in found {
                assert!(!finding.text().contains("fence"), "{finding}");
                assert!(finding.text().contains("locks"), "{finding}");
            }
        }
    }

    #[test]
    fn old_servers_and_lone_nodes_are_refused() {
        let report = |info: &str| ServerSettings { info: info.to_owned(), appendfsync: None };
        assert!(report("redis_version:6.2.14\r\n").refuse_an_old_server().is_err());
        assert!(report("redis_version:7.0.0\r\n").refuse_an_old_server().is_ok());
        assert!(report("redis_version:10.1\r\n").refuse_an_old_server().is_ok());
        assert!(report("").refuse_an_old_server().is_ok());
        assert!(report("redis_mode:cluster\r\n").refuse_a_lone_node().is_err());
        assert!(report("redis_mode:standalone\r\n").refuse_a_lone_node().is_ok());
    }
}
