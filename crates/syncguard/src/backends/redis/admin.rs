//! Listing, findings, and the deletion of idle fence counters: on all servers that have records.

use std::time::Duration;

use redis::Value;

use super::reply::text;
use super::route::{OwnedRoute, Route};
use super::scripts::Argument::{Number, Text};
use super::scripts::SCRIPTS;
use super::settings::{self, ServerSettings};
use super::{RedisBackend, error, fenced, names, record};
use crate::common::error::Result;
use crate::common::fence::Fence;
use crate::common::fence_source::FenceSource;
use crate::common::key::Key;
use crate::common::time::TIME_TOLERANCE_MS;
use crate::contract::BoxFuture;
use crate::contract::admin::{Admin, Cursor, Page};
use crate::contract::finding::Finding;

/// A server that has records of ours.
struct AdminTarget<'a> {
    /// The address of a node; empty if there is only one server.
    address: String,
    connection: AdminConnection<'a>,
}

enum AdminConnection<'a> {
    /// The connection of the locks, and a name that routes scripts on a Cluster.
    Shared(&'a Route, String),
    /// A node, whose scripts are not routed.
    Node(Route),
}

impl AdminTarget<'_> {
    fn route(&self) -> &Route {
        match &self.connection {
            AdminConnection::Shared(connection, _) => connection,
            AdminConnection::Node(connection) => connection,
        }
    }

    /// Returns the keys of a script that works on all records of the server.
    fn keys(&self) -> Vec<&str> {
        match &self.connection {
            AdminConnection::Shared(_, name) => vec![name],
            AdminConnection::Node(_) => Vec::new(),
        }
    }
}

impl RedisBackend {
    /// Returns all servers that have records, ordered by address.
    fn targets(&self) -> Vec<AdminTarget<'_>> {
        let Some(nodes) = &self.shared.nodes else {
            let shard = &self.shared.shards[0].shared;
            let name = format!("{}:", shard.names.space.prefix());
            let connection = AdminConnection::Shared(&shard.route, name);
            return vec![AdminTarget { address: String::new(), connection }];
        };
        let target = |node: std::sync::Arc<super::nodes::Node>| AdminTarget {
            address: node.address.clone(),
            connection: AdminConnection::Node(Route::Owned(OwnedRoute::Server(
                node.connection.clone(),
            ))),
        };
        nodes.all().into_iter().map(target).collect()
    }

    /// Returns the name that a pattern of names begins with.
    fn name_pattern(&self) -> String {
        match &self.shared.nodes {
            Some(_) => names::pattern_of_shards(&self.shared.prefix),
            None => self.shared.shards[0].shared.names.pattern(),
        }
    }

    /// Fails if a server cannot be used, and logs what is risky about the others.
    pub(super) async fn check_servers(&self) -> Result<()> {
        for target in self.targets() {
            let settings = ServerSettings::ask(target.route()).await;
            settings.refuse_an_old_server()?;
            if !self.shared.shards[0].shared.is_cluster {
                settings.refuse_a_lone_node()?;
            }
        }
        settings::warn(&self.ask_for_findings().await);
        Ok(())
    }

    /// Asks all servers. What several of them have in common is reported once.
    pub(super) async fn ask_for_findings(&self) -> Vec<Finding> {
        let (waits, fences) = (self.shared.waits_for_replicas, self.shared.fences.source);
        let mut found: Vec<Finding> = Vec::new();
        for target in self.targets() {
            let settings = ServerSettings::ask(target.route()).await;
            let coverage = settings.coverage().filter(|_| self.shared.nodes.is_some());
            for finding in settings.findings(waits, fences).into_iter().chain(coverage) {
                if found.iter().all(|known| known.subject() != finding.subject()) {
                    found.push(finding);
                }
            }
        }
        found
    }

    /// Returns a page of the live locks.
    async fn page(&self, after: Option<&Cursor>) -> Result<Page> {
        // The address of a node, if there are several, and the cursor of SCAN there.
        let place = after.map_or("0", Cursor::place);
        let (address, cursor) = place.rsplit_once(' ').unwrap_or(("", place));
        let targets = self.targets();
        // If the node is gone, the next one follows.
        let is_due = |target: &AdminTarget<'_>| target.address.as_str() >= address;
        let Some(at) = targets.iter().position(is_due) else { return Ok(Page::default()) };
        let target = &targets[at];
        let cursor = if target.address == address { cursor } else { "0" };
        let pattern = self.name_pattern();
        let arguments = [Text(cursor), Text(&pattern), Number(TIME_TOLERANCE_MS)];
        let call = SCRIPTS.list.call(&target.keys(), &arguments);
        let answer = target.route().inspect(&call).await?;
        let Value::Array(items) = &answer else { return Err(error::unexpected_response()) };
        let (next, records) = items.split_first().ok_or_else(error::unexpected_response)?;
        let next = text(next).ok_or_else(error::unexpected_response)?;
        // An invalid record is not a lock; operations on its key report it.
        let parse = |item: &Value| match item {
            Value::BulkString(json) => record::parse(json).ok(),
            _ => None,
        };
        let next = match (next, targets.get(at + 1)) {
            ("0", None) => None,
            ("0", Some(other)) => Some(format!("{} 0", other.address)),
            (next, _) if target.address.is_empty() => Some(next.to_owned()),
            (next, _) => Some(format!("{} {next}", target.address)),
        };
        let locks = records.iter().filter_map(parse).collect();
        Ok(Page::new(locks, next.map(Cursor::new)))
    }

    /// Deletes the counters of a server that match a pattern and are older than an age. Returns how
    /// many there were.
    async fn delete_counters(
        &self,
        target: &AdminTarget<'_>,
        pattern: &str,
        age_ms: u64,
    ) -> Result<u64> {
        let per_ms = Number(self.shared.fences.source.per_millisecond());
        let (mut deleted, mut cursor) = (0, "0".to_owned());
        loop {
            let arguments = [Text(&cursor), Text(pattern), Number(age_ms), per_ms];
            let call = SCRIPTS.collect_fences.call(&target.keys(), &arguments);
            let answer = target.route().inspect(&call).await?;
            let Value::Array(items) = &answer else { return Err(error::unexpected_response()) };
            let [next, Value::Int(count)] = items.as_slice() else {
                return Err(error::unexpected_response());
            };
            deleted += u64::try_from(*count).unwrap_or(0);
            text(next).ok_or_else(error::unexpected_response)?.clone_into(&mut cursor);
            if cursor == "0" {
                return Ok(deleted);
            }
        }
    }
}

impl Admin for RedisBackend {
    fn list<'a>(&'a self, after: Option<&'a Cursor>) -> BoxFuture<'a, Result<Page>> {
        Box::pin(async move { self.page(after).await.map_err(error::in_operation("list")) })
    }

    fn findings(&self) -> BoxFuture<'_, Result<Vec<Finding>>> {
        Box::pin(async move { Ok(self.ask_for_findings().await) })
    }

    fn collect_fences(&self, idle: Duration) -> BoxFuture<'_, Result<u64>> {
        Box::pin(async move {
            let age_ms = self.shared.fences.source.collectable_age_ms(idle)?;
            let pattern = match &self.shared.nodes {
                Some(_) => names::counter_pattern_of_shards(&self.shared.prefix),
                None => self.shared.shards[0].shared.names.counter_pattern()?,
            };
            let mut deleted = 0;
            for target in self.targets() {
                let counted = self.delete_counters(&target, &pattern, age_ms).await;
                deleted += counted.map_err(error::in_operation("collect_fences"))?;
            }
            Ok(deleted)
        })
    }

    fn check_fence<'a>(
        &'a self,
        resource: &'a Key,
        fence: Fence,
        key: Option<&'a Key>,
    ) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move {
            let shard = &self.shard(resource).shared;
            let record = shard.names.resource(resource)?;
            let lock = key.map_or_else(String::new, fenced::lock_hash);
            let arguments = [Number(fence.get()), Text(&lock), Number(0)];
            let call = SCRIPTS.check_fence.call(&[&record], &arguments);
            let checked = match shard.route.inspect(&call).await {
                Ok(Value::Int(1)) => Ok(()),
                Ok(_) => Err(error::unexpected_response()),
                Err(error) => Err(error),
            };
            checked.map_err(error::in_operation("check_fence"))
        })
    }

    fn fence_source(&self) -> FenceSource {
        self.shared.fences.source
    }
}
