//! Finds the node of a Cluster that owns our slot.

use std::sync::Arc;

use redis::{ConnectionInfo, FromRedisValue, RedisResult, Value};

use super::survey::{Answer, survey};
use super::topology::{Resolver, at};
use crate::common::error::{Error, Result};

use super::error;

/// Asks the nodes which one owns our slot. A node that is isolated from the majority reports that
/// the Cluster is down, and its epoch stays behind, so another node outranks it.
pub(super) async fn find(
    resolver: &Arc<Resolver>,
    nodes: &[ConnectionInfo],
) -> RedisResult<ConnectionInfo> {
    let mut all = nodes.to_vec();
    all.extend(resolver.known());
    let mut seen = std::collections::HashSet::new();
    all.retain(|node| seen.insert(node.addr().to_string()));
    let ask = |node: ConnectionInfo| {
        let resolver = Arc::clone(resolver);
        async move { ask_node(&resolver, &node).await }
    };
    let found = survey(all, resolver.node_timeout(), ask).await?;
    Ok(found.server)
}

/// Asks one node which node owns our slot.
async fn ask_node(resolver: &Resolver, node: &ConnectionInfo) -> RedisResult<Answer> {
    let mut asked = resolver.open(node, resolver.connection_config()).await?;
    let mut cluster = redis::cmd("CLUSTER");
    let slot: u16 = cluster.arg("KEYSLOT").arg(resolver.name()).query_async(&mut asked).await?;
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
    let in_charge = slots.iter().find(|slots| (slots.first..=slots.last).contains(&slot));
    let server = in_charge.and_then(|slots| slots.nodes.first());
    let is_usable = is_up && server.is_some();
    if is_usable {
        let nodes = slots.iter().flat_map(|slots| &slots.nodes);
        resolver.remember(nodes.map(|(host, port)| at(node, host, *port)).collect());
    }
    let server = server.map_or_else(|| node.clone(), |(host, port)| at(node, host, *port));
    Ok(Answer { server, rank: (u64::from(is_usable), epoch), is_usable })
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

/// Returns whether all names with this prefix are in one slot of a Cluster, because it contains a
/// tag in braces.
pub(super) fn has_tag(prefix: &str) -> bool {
    let tag = prefix.split_once('{').and_then(|(_, rest)| rest.split_once('}'));
    tag.is_some_and(|(tag, _)| !tag.is_empty())
}

/// Returns an error if names with this prefix would be in different slots.
pub(super) fn refuse_without_tag(prefix: &str) -> Result<()> {
    if has_tag(prefix) {
        return Ok(());
    }
    Err(Error::invalid(
        "on a Redis Cluster the prefix needs a tag in braces, such as \"{locks}\", so that all \
         records of a lock are in one slot",
    )
    .with_operation("redis", error::CONNECT))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_text_in_the_first_braces_is_a_tag() {
        for prefix in ["{a}", "shop:{a}", "{a}:shop", "x{}y{a}z}"] {
            // The first pair of braces counts; an empty one is not a tag.
            assert_eq!(has_tag(prefix), !prefix.contains("{}"), "{prefix}");
        }
        for prefix in ["", "shop", "{", "}", "{}", "}{", "{}{a}"] {
            assert!(!has_tag(prefix), "{prefix}");
            assert!(refuse_without_tag(prefix).is_err());
        }
    }
}
