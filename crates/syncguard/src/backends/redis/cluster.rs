//! Finds out which nodes of a Cluster serve which slots.

use std::sync::Arc;

use redis::{ConnectionInfo, FromRedisValue, RedisResult, Value};

use super::error;
use super::layout::tag_of;
use super::survey::{NodeAnswer, survey};
use super::topology::{Resolver, at};
use crate::common::error::{Error, Result};

/// Which primary serves which slots.
pub(super) struct SlotMap {
    ranges: Vec<(u16, u16, ConnectionInfo)>,
}

impl SlotMap {
    /// Returns the primary that serves a slot, if there is one.
    pub(super) fn owner(&self, slot: u16) -> Option<&ConnectionInfo> {
        let is_there = |(first, last, _): &&(u16, u16, _)| (*first..=*last).contains(&slot);
        self.ranges.iter().find(is_there).map(|(.., owner)| owner)
    }
}

/// Asks the nodes which of them serve which slots. A node that is isolated from the majority
/// reports that the Cluster is down, and its epoch stays behind, so another node outranks it.
///
/// If a `slot` is given, only an answer that names its owner counts.
pub(super) async fn find(
    resolver: &Arc<Resolver>,
    nodes: &[ConnectionInfo],
    slot: Option<u16>,
) -> RedisResult<SlotMap> {
    let mut all = nodes.to_vec();
    all.extend(resolver.known());
    let mut seen = std::collections::HashSet::new();
    all.retain(|node| seen.insert(node.addr().to_string()));
    let ask = |node: ConnectionInfo| {
        let resolver = Arc::clone(resolver);
        async move { ask_node(&resolver, &node, slot).await }
    };
    survey(all, resolver.node_timeout(), ask).await
}

async fn ask_node(
    resolver: &Resolver,
    node: &ConnectionInfo,
    slot: Option<u16>,
) -> RedisResult<NodeAnswer<SlotMap>> {
    let mut asked = resolver.open(node, resolver.connection_config()).await?.connection;
    let slots: Vec<Slots> = redis::cmd("CLUSTER").arg("SLOTS").query_async(&mut asked).await?;
    let info = redis::cmd("CLUSTER").arg("INFO").query_async::<String>(&mut asked).await;
    let info = match info {
        Ok(info) => info,
        // If the user may not ask for the state, every node is trusted.
        Err(cause) if cause.code().is_some() => String::new(),
        Err(cause) => return Err(cause),
    };
    let field = |name: &str| {
        info.lines().find_map(|line| line.trim_end().strip_prefix(name)?.strip_prefix(':'))
    };
    let is_up = field("cluster_state").is_none_or(|state| state == "ok");
    let epoch = field("cluster_current_epoch").and_then(|epoch| epoch.parse().ok()).unwrap_or(0);
    let address = |(host, port): &(String, u16)| at(node, host, *port);
    let ranges = slots.iter().filter_map(|slots| {
        let primary = slots.nodes.first()?;
        Some((slots.first, slots.last, address(primary)))
    });
    let found = SlotMap { ranges: ranges.collect() };
    let is_served = match slot {
        Some(slot) => found.owner(slot).is_some(),
        None => !found.ranges.is_empty(),
    };
    let is_usable = is_up && is_served;
    if is_usable {
        let nodes = slots.iter().flat_map(|slots| &slots.nodes);
        resolver.remember(nodes.map(address).collect());
    }
    Ok(NodeAnswer { found, rank: (u64::from(is_usable), epoch), is_usable })
}

/// A range of slots and the nodes that serve it, the primary first.
struct Slots {
    first: u16,
    last: u16,
    /// Host and port. The host is empty if the node does not know its own name; it is then the node
    /// that was asked.
    nodes: Vec<(String, u16)>,
}

impl FromRedisValue for Slots {
    fn from_redis_value(value: Value) -> std::result::Result<Self, redis::ParsingError> {
        type Node = (Option<String>, u16);
        let mut parts = Vec::<Value>::from_redis_value(value)?.into_iter();
        let mut next = || parts.next().unwrap_or(Value::Nil);
        let (first, last) = (u16::from_redis_value(next())?, u16::from_redis_value(next())?);
        let node = |value| {
            let mut node = Vec::<Value>::from_redis_value(value)?;
            // The fields after host and port are not needed and differ between versions.
            node.truncate(2);
            let (host, port) = Node::from_redis_value(Value::Array(node))?;
            Ok((host.unwrap_or_default(), port))
        };
        let nodes: std::result::Result<_, redis::ParsingError> = parts.map(node).collect();
        Ok(Self { first, last, nodes: nodes? })
    }
}

/// Returns an error if names with this prefix would be in different slots.
pub(super) fn refuse_without_tag(prefix: &str) -> Result<()> {
    if tag_of(prefix).is_some() {
        return Ok(());
    }
    Err(Error::invalid(
        "on a Redis Cluster the prefix needs a tag in braces, such as \"{locks}\", so that all \
         records of a lock are in one slot; or set shards, to use all of the Cluster",
    )
    .with_operation("redis", error::CONNECT))
}
