//! Which server is in charge: the one of the URL, the primary that Sentinel names, or the node of a
//! Cluster that has the slot of our prefix.
//!
//! All names of a backend are in one slot, so even on a Cluster there is one server in charge at a
//! time, and everything else in this backend talks to one server.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::sentinel::{SentinelClientBuilder, SentinelServerType};
use redis::{
    AsyncConnectionConfig, Client, ConnectionAddr, ConnectionInfo, ErrorKind, FromRedisValue,
    RedisConnectionInfo, RedisResult, TlsCertificates, TlsMode, Value,
};

use tokio::task::JoinSet;

use super::error;
use crate::common::crypto;
use crate::common::error::{Error, Result};

/// Where to find the server in charge.
#[derive(Clone)]
pub(super) enum Topology {
    /// One server.
    Single(ConnectionInfo),
    /// The primary of a service that Sentinel watches.
    Sentinel(Sentinel),
    /// The node of a Cluster that has our slot.
    Cluster(Vec<ConnectionInfo>),
}

#[derive(Clone)]
pub(super) struct Sentinel {
    pub(super) addresses: Vec<ConnectionAddr>,
    pub(super) service: String,
    /// How to log in to the sentinels themselves: user and password.
    pub(super) login: (Option<String>, Option<String>),
    /// How to log in to the primary.
    pub(super) primary: RedisConnectionInfo,
    pub(super) is_tls: bool,
}

impl Topology {
    pub(super) fn is_cluster(&self) -> bool {
        matches!(self, Self::Cluster(_))
    }

    /// The number of the database.
    pub(super) fn database(&self) -> i64 {
        match self {
            Self::Single(info) => info.redis_settings().db(),
            Self::Sentinel(sentinel) => sentinel.primary.db(),
            Self::Cluster(_) => 0,
        }
    }

    pub(super) fn is_tls(&self) -> bool {
        let is_tls = |address: &ConnectionAddr| matches!(address, ConnectionAddr::TcpTls { .. });
        match self {
            Self::Single(info) => is_tls(info.addr()),
            Self::Sentinel(sentinel) => sentinel.is_tls,
            Self::Cluster(nodes) => nodes.iter().any(|node| is_tls(node.addr())),
        }
    }
}

/// Finds the server in charge.
pub(super) struct Finder {
    topology: Topology,
    certificates: Option<TlsCertificates>,
    connect_timeout: Duration,
    response_timeout: Duration,
    /// What a name in the slot of our prefix looks like; only the slot counts.
    name: String,
    /// Nodes of the Cluster that were not in the URL.
    known: Mutex<Vec<ConnectionInfo>>,
}

impl Finder {
    pub(super) fn new(
        topology: Topology,
        certificates: Option<TlsCertificates>,
        [connect_timeout, response_timeout]: [Duration; 2],
        name: String,
    ) -> Result<Self> {
        if topology.is_tls() {
            crypto::install();
        } else if certificates.is_some() {
            return Err(Error::invalid("certificates need a rediss:// URL"));
        }
        Ok(Self {
            topology,
            certificates,
            connect_timeout,
            response_timeout,
            name,
            known: Mutex::default(),
        })
    }

    pub(super) fn connect_timeout(&self) -> Duration {
        self.connect_timeout
    }

    pub(super) fn response_timeout(&self) -> Duration {
        self.response_timeout
    }

    /// How connections are opened.
    pub(super) fn connection_config(&self) -> AsyncConnectionConfig {
        /// Calls that may be on their way to the socket; a release should not wait for a place.
        const QUEUE: usize = 1024;
        AsyncConnectionConfig::new()
            .set_connection_timeout(Some(self.connect_timeout))
            .set_response_timeout(Some(self.response_timeout))
            .set_pipeline_buffer_size(QUEUE)
    }

    /// Finds the server in charge and connects to it. Takes at most the time for connecting.
    pub(super) async fn connect(
        self: &Arc<Self>,
        config: AsyncConnectionConfig,
    ) -> RedisResult<MultiplexedConnection> {
        let connecting = async {
            let client = self.find().await?;
            client.get_multiplexed_async_connection_with_config(&config).await
        };
        match tokio::time::timeout(self.connect_timeout, connecting).await {
            Ok(connected) => connected,
            Err(_elapsed) => Err(std::io::Error::from(std::io::ErrorKind::TimedOut).into()),
        }
    }

    pub(super) fn is_cluster(&self) -> bool {
        self.topology.is_cluster()
    }

    /// Whether another server may be in charge when this one is not.
    pub(super) fn has_others(&self) -> bool {
        !matches!(self.topology, Topology::Single(_))
    }

    /// The address of a single server.
    pub(super) fn address(&self) -> Option<&ConnectionAddr> {
        match &self.topology {
            Topology::Single(info) => Some(info.addr()),
            _ => None,
        }
    }

    /// A client of the server in charge now. Several may be asked for it.
    async fn find(self: &Arc<Self>) -> RedisResult<Client> {
        match &self.topology {
            Topology::Single(info) => self.client(info.clone()),
            Topology::Sentinel(sentinel) => self.find_by_sentinel(sentinel).await,
            Topology::Cluster(nodes) => self.find_in_cluster(nodes).await,
        }
    }

    fn client(&self, info: ConnectionInfo) -> RedisResult<Client> {
        match &self.certificates {
            Some(certificates) => Client::build_with_tls(info, certificates.clone()),
            None => Client::open(info),
        }
    }

    async fn find_by_sentinel(&self, sentinel: &Sentinel) -> RedisResult<Client> {
        let service = sentinel.service.clone();
        let mut builder = SentinelClientBuilder::new(
            sentinel.addresses.iter().cloned(),
            service,
            SentinelServerType::Master,
        )?;
        let primary = &sentinel.primary;
        builder = builder
            .set_client_to_redis_protocol(primary.protocol())
            .set_client_to_redis_db(primary.db());
        if let Some(user) = primary.username() {
            builder = builder.set_client_to_redis_username(user);
        }
        if let Some(password) = primary.password() {
            builder = builder.set_client_to_redis_password(password);
        }
        if let Some(user) = &sentinel.login.0 {
            builder = builder.set_client_to_sentinel_username(user);
        }
        if let Some(password) = &sentinel.login.1 {
            builder = builder.set_client_to_sentinel_password(password);
        }
        if sentinel.is_tls {
            builder = builder
                .set_client_to_redis_tls_mode(TlsMode::Secure)
                .set_client_to_sentinel_tls_mode(TlsMode::Secure);
            if let Some(certificates) = &self.certificates {
                builder = builder
                    .set_client_to_redis_certificates(certificates.clone())
                    .set_client_to_sentinel_certificates(certificates.clone());
            }
        }
        builder.build()?.async_get_client().await
    }

    /// Asks the nodes that are known, one a little after the other, and takes the first answer: a
    /// node that does not answer must not use up the time of the others.
    async fn find_in_cluster(self: &Arc<Self>, nodes: &[ConnectionInfo]) -> RedisResult<Client> {
        const HEAD_START: Duration = Duration::from_millis(100);
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let mut asked = JoinSet::new();
        for (node, delay) in nodes.iter().chain(&known).zip((0..).map(|place| HEAD_START * place)) {
            let (finder, node) = (Arc::clone(self), node.clone());
            asked.spawn(async move {
                tokio::time::sleep(delay).await;
                finder.ask_node(&node).await
            });
        }
        let mut last = None;
        while let Some(answer) = asked.join_next().await {
            match answer {
                Ok(Ok(client)) => return Ok(client),
                Ok(Err(cause)) => last = Some(cause),
                Err(_ended) => {}
            }
        }
        Err(last.unwrap_or_else(|| (ErrorKind::InvalidClientConfig, "no node is named").into()))
    }

    /// Asks one node who has our slot.
    async fn ask_node(&self, node: &ConnectionInfo) -> RedisResult<Client> {
        let (client, config) = (self.client(node.clone())?, self.connection_config());
        let mut asked = client.get_multiplexed_async_connection_with_config(&config).await?;
        let mut question = redis::cmd("CLUSTER");
        let slot: u16 = question.arg("KEYSLOT").arg(&self.name).query_async(&mut asked).await?;
        let slots: Vec<Slots> = redis::cmd("CLUSTER").arg("SLOTS").query_async(&mut asked).await?;
        let known = slots.iter().map(|slots| at(node, &slots.host, slots.port)).collect();
        *self.known.lock().unwrap_or_else(PoisonError::into_inner) = known;
        let in_charge = slots.iter().find(|slots| (slots.first..=slots.last).contains(&slot));
        match in_charge {
            Some(slots) => self.client(at(node, &slots.host, slots.port)),
            None => Err(redis::make_extension_error("CLUSTERDOWN".to_owned(), None)),
        }
    }
}

/// A range of slots and the primary that has it.
struct Slots {
    first: u16,
    last: u16,
    /// Empty when the node does not know its own name: it is the one that was asked.
    host: String,
    port: u16,
}

impl FromRedisValue for Slots {
    fn from_redis_value(value: Value) -> std::result::Result<Self, redis::ParsingError> {
        type Primary = (Option<String>, u16);
        let mut parts = Vec::<Value>::from_redis_value(value)?.into_iter();
        let mut next = || parts.next().unwrap_or(Value::Nil);
        let (first, last) = (u16::from_redis_value(next())?, u16::from_redis_value(next())?);
        let mut primary = Vec::<Value>::from_redis_value(next())?;
        // What follows host and port is not for us, and grows from version to version.
        primary.truncate(2);
        let (host, port) = Primary::from_redis_value(Value::Array(primary))?;
        Ok(Self { first, last, host: host.unwrap_or_default(), port })
    }
}

/// Another address, reached in the same way as `node`.
fn at(node: &ConnectionInfo, host: &str, port: u16) -> ConnectionInfo {
    let pick = |old: &str| if host.is_empty() { old.to_owned() } else { host.to_owned() };
    let address = match node.addr() {
        ConnectionAddr::TcpTls { host: old, insecure, tls_params, .. } => ConnectionAddr::TcpTls {
            host: pick(old),
            port,
            insecure: *insecure,
            tls_params: tls_params.clone(),
        },
        ConnectionAddr::Tcp(old, _) => ConnectionAddr::Tcp(pick(old), port),
        _ => ConnectionAddr::Tcp(host.to_owned(), port),
    };
    node.clone().set_addr(address)
}

/// Whether all names that begin with this prefix are in one slot of a Cluster: whether it holds a
/// tag in braces.
pub(super) fn has_tag(prefix: &str) -> bool {
    let tag = prefix.split_once('{').and_then(|(_, rest)| rest.split_once('}'));
    tag.is_some_and(|(tag, _)| !tag.is_empty())
}

/// Refuses names that would be in different slots.
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
    fn tags() {
        for prefix in ["{a}", "shop:{a}", "{a}:shop", "x{}y{a}z}"] {
            // The first pair of braces counts; an empty one is no tag.
            assert_eq!(has_tag(prefix), !prefix.contains("{}"), "{prefix}");
        }
        for prefix in ["", "shop", "{", "}", "{}", "}{", "{}{a}"] {
            assert!(!has_tag(prefix), "{prefix}");
            assert!(refuse_without_tag(prefix).is_err());
        }
    }
}
