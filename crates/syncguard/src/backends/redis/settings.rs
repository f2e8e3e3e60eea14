//! Settings of a server that can lose locks or repeat fences.

use redis::FromRedisValue;

use super::route::Route;
use crate::common::error::{Error, Result};
use crate::common::fence_source::FenceSource;
use crate::contract::finding::Finding;

/// The settings of a server, as far as the user may read them.
#[derive(Debug, Default)]
pub(super) struct ServerSettings {
    info: String,
    appendfsync: Option<String>,
    requires_full_coverage: bool,
}

impl ServerSettings {
    /// Asks the server. What the user may not read stays unknown.
    pub(super) async fn ask(route: &Route) -> Self {
        let mut info = redis::cmd("INFO");
        info.arg(&["server", "persistence", "memory", "replication"]);
        let info = route.ask(&info).await.and_then(|answer| Ok(String::from_redis_value(answer)?));
        let appendfsync = setting(route, "appendfsync").await;
        let info = info.unwrap_or_default();
        let is_node = info.contains("redis_mode:cluster");
        let requires_full_coverage = is_node
            && setting(route, "cluster-require-full-coverage").await.as_deref() == Some("yes");
        Self { info, appendfsync, requires_full_coverage }
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

    /// Returns a finding if the failure of one node stops the shards of all others.
    pub(super) fn coverage(&self) -> Option<Finding> {
        self.requires_full_coverage.then(|| {
            Finding::new(
                "full-coverage",
                "the Cluster serves no shard while one of its primaries is down and not replaced \
                 (\"cluster-require-full-coverage yes\"); set \"cluster-require-full-coverage no\"",
            )
        })
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
        } else {
            match self.appendfsync.as_deref() {
                Some(policy @ ("everysec" | "no")) => {
                    loses_counters = true;
                    found.push(Finding::new(
                        "appendfsync",
                        format!(
                            "Redis does not flush every write to disk (\"appendfsync {policy}\"): \
                             a power loss can lose the last locks{repeats}; set \"appendfsync \
                             always\""
                        ),
                    ));
                }
                None if !self.info.is_empty() => found.push(Finding::new(
                    "unknown",
                    "this Redis user may not run CONFIG GET, so it is unknown whether a power loss \
                     can lose locks and fences; grant +config|get",
                )),
                _ => {}
            }
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
}

/// Returns a setting of the server, unless the user may not read it.
async fn setting(route: &Route, name: &str) -> Option<String> {
    let mut get = redis::cmd("CONFIG");
    get.arg("GET").arg(name);
    let pairs = Vec::<(String, String)>::from_redis_value(route.ask(&get).await.ok()?).ok()?;
    pairs.into_iter().next().map(|(_, value)| value)
}

/// Logs findings.
pub(super) fn warn(findings: &[Finding]) {
    for finding in findings {
        if finding.subject() == "unknown" {
            tracing::debug!("{finding}");
        } else {
            tracing::warn!(subject = finding.subject(), "{finding}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(info: &str, appendfsync: &str, waits: bool, fences: FenceSource) -> Vec<Finding> {
        let report = ServerSettings {
            info: info.to_owned(),
            appendfsync: (!appendfsync.is_empty()).then(|| appendfsync.to_owned()),
            requires_full_coverage: false,
        };
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
        assert_eq!(subjects(safe, "", false), ["unknown"], "CONFIG GET was refused");
        assert_eq!(subjects(&no_aof, "", false), ["aof", "fences"], "nothing is flushed anyway");
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
        let report =
            |info: &str| ServerSettings { info: info.to_owned(), ..ServerSettings::default() };
        assert!(report("redis_version:6.2.14\r\n").refuse_an_old_server().is_err());
        assert!(report("redis_version:7.0.0\r\n").refuse_an_old_server().is_ok());
        assert!(report("redis_version:10.1\r\n").refuse_an_old_server().is_ok());
        assert!(report("").refuse_an_old_server().is_ok());
        assert!(report("redis_mode:cluster\r\n").refuse_a_lone_node().is_err());
        assert!(report("redis_mode:standalone\r\n").refuse_a_lone_node().is_ok());
    }
}
