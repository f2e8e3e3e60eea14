//! Finds the primary of a service by asking its sentinels.

use std::collections::HashMap;
use std::sync::Arc;

use redis::aio::MultiplexedConnection;
use redis::{
    ConnectionAddr, ConnectionInfo, ErrorKind, RedisConnectionInfo, RedisError, RedisResult, Value,
};

use super::survey::{self, NodeAnswer, survey};
use super::topology::{Resolver, at};

/// A service that sentinels watch.
#[derive(Clone)]
pub(super) struct Sentinel {
    /// The sentinels, with the login for them.
    pub(super) nodes: Vec<ConnectionInfo>,
    pub(super) service: String,
    /// The login for the primary.
    pub(super) primary: RedisConnectionInfo,
}

impl Sentinel {
    pub(super) fn is_tls(&self) -> bool {
        let is_tls = |node: &ConnectionInfo| matches!(node.addr(), ConnectionAddr::TcpTls { .. });
        self.nodes.iter().any(is_tls)
    }

    /// Asks the sentinels for the primary. The highest epoch wins: it is that of the last failover
    /// that a majority agreed on, and an isolated sentinel does not know it.
    pub(super) async fn find(&self, resolver: &Arc<Resolver>) -> RedisResult<ConnectionInfo> {
        let ask = |node: ConnectionInfo| {
            let (resolver, sentinel) = (Arc::clone(resolver), self.clone());
            async move { sentinel.ask(&resolver, &node).await }
        };
        match survey(self.nodes.clone(), resolver.node_timeout(), ask).await {
            Ok(found) => Ok(found),
            // They answered, but none of them knows a primary that is up.
            Err(cause) if cause.code() == Some(survey::DOWN) => Err(no_primary()),
            Err(cause) => Err(cause),
        }
    }

    async fn ask(
        &self,
        resolver: &Resolver,
        node: &ConnectionInfo,
    ) -> RedisResult<NodeAnswer<ConnectionInfo>> {
        let mut asked = resolver.open(node, resolver.connection_config()).await?.connection;
        let mut question = redis::cmd("SENTINEL");
        let services: Vec<HashMap<String, String>> =
            question.arg("MASTERS").query_async(&mut asked).await?;
        let field = |service: &HashMap<String, String>, name: &str| {
            service.get(name).cloned().unwrap_or_default()
        };
        let service = services.iter().find(|service| field(service, "name") == self.service);
        let service = service.ok_or_else(no_primary)?;
        let port = field(service, "port").parse().map_err(|_cause| no_primary())?;
        let epoch = field(service, "config-epoch").parse().unwrap_or(0);
        // A quorum agrees that it is down: there is no primary until a new one is elected.
        let is_usable = !field(service, "flags").contains("o_down");
        let found = at(node, &field(service, "ip"), port).set_redis_settings(self.primary.clone());
        Ok(NodeAnswer { found, rank: (epoch, u64::from(!is_usable)), is_usable })
    }
}

fn no_primary() -> RedisError {
    (ErrorKind::MasterNameNotFoundBySentinel, "no primary").into()
}

/// Returns an error if the server reports that it is not the primary. If the user may not ask, the
/// server is accepted: a replica refuses writes by itself.
pub(super) async fn refuse_a_replica(connection: &mut MultiplexedConnection) -> RedisResult<()> {
    let role = redis::cmd("ROLE").query_async::<Vec<Value>>(connection).await;
    match role {
        Ok(role) if role.first() == Some(&Value::BulkString(b"master".to_vec())) => Ok(()),
        Ok(_) => Err(redis::make_extension_error("READONLY".to_owned(), None)),
        Err(cause) if cause.code().is_some() => Ok(()),
        Err(cause) => Err(cause),
    }
}
