//! Finds the server in charge: the one in the URL, the primary that Sentinel names, or the node of
//! a Cluster that owns the slot of our prefix.
//!
//! All names of a shard are in one slot, and a backend without shards is one shard. So even on a
//! Cluster one server is in charge of a shard at a time. `nodes.rs` finds those of several shards.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{
    AsyncConnectionConfig, ConnectionAddr, ConnectionInfo, ErrorKind, RedisResult, TlsCertificates,
};

use super::cluster::{self, SlotMap};
use super::dial::{self, Dialed, Dialer};
use super::layout::slot_of;
use super::sentinel::{self, Sentinel};
use super::survey;
use crate::common::crypto;
use crate::common::error::Result;

/// Where to find the server in charge.
#[derive(Clone)]
pub(super) enum Topology {
    /// One server.
    Single(ConnectionInfo),
    /// The primary of a service that Sentinel watches.
    Sentinel(Sentinel),
    /// The node of a Cluster that owns our slot.
    Cluster(Vec<ConnectionInfo>),
    /// This node of a Cluster.
    Node(ConnectionInfo),
}

impl Topology {
    pub(super) fn is_cluster(&self) -> bool {
        matches!(self, Self::Cluster(_) | Self::Node(_))
    }

    /// Returns the database number.
    pub(super) fn database(&self) -> i64 {
        match self {
            Self::Single(info) => info.redis_settings().db(),
            Self::Sentinel(sentinel) => sentinel.primary.db(),
            Self::Cluster(_) | Self::Node(_) => 0,
        }
    }

    fn is_tls(&self) -> bool {
        let is_tls = |info: &ConnectionInfo| matches!(info.addr(), ConnectionAddr::TcpTls { .. });
        match self {
            Self::Single(info) | Self::Node(info) => is_tls(info),
            Self::Sentinel(sentinel) => sentinel.is_tls(),
            Self::Cluster(nodes) => nodes.iter().any(is_tls),
        }
    }
}

/// Finds the server in charge and connects to it.
pub(super) struct Resolver {
    topology: Topology,
    dialer: Arc<Dialer>,
    timeouts: Timeouts,
    /// A name in the slot of our prefix; only its slot matters.
    name: String,
    /// The nodes of the Cluster, as last reported.
    known: Mutex<Vec<ConnectionInfo>>,
}

/// How long connecting and responses may take.
#[derive(Clone, Copy, Debug)]
pub(super) struct Timeouts {
    pub(super) connect: Duration,
    pub(super) response: Duration,
}

impl Resolver {
    pub(super) fn new(
        topology: Topology,
        certificates: Option<&TlsCertificates>,
        timeouts: Timeouts,
        name: String,
    ) -> Result<Self> {
        let topology = match topology {
            // Configured certificates take precedence over those of the caller's client.
            Topology::Single(info) if certificates.is_some() => {
                Topology::Single(dial::without_own_tls(info))
            }
            topology => topology,
        };
        if matches!(&topology, Topology::Single(info) if dial::has_own_tls(info)) {
            crypto::install();
        }
        let dialer = Arc::new(Dialer::new(topology.is_tls(), certificates)?);
        Ok(Self { topology, dialer, timeouts, name, known: Mutex::default() })
    }

    /// Creates a resolver that always leads to one node of the same Cluster.
    pub(super) fn for_node(&self, node: ConnectionInfo) -> Self {
        Self {
            topology: Topology::Node(node),
            dialer: Arc::clone(&self.dialer),
            timeouts: self.timeouts,
            name: self.name.clone(),
            known: Mutex::default(),
        }
    }

    /// Asks the nodes of the Cluster which of them serve which slots, within the connect timeout.
    pub(super) async fn slot_map(self: &Arc<Self>) -> RedisResult<SlotMap> {
        let Topology::Cluster(nodes) = &self.topology else {
            return Err((ErrorKind::InvalidClientConfig, "only a Cluster has slots").into());
        };
        self.in_time(cluster::find(self, nodes, None)).await
    }

    pub(super) fn response_timeout(&self) -> Duration {
        self.timeouts.response
    }

    /// Returns how long to wait for the other nodes after the first usable answer.
    pub(super) fn node_timeout(&self) -> Duration {
        self.timeouts.connect / 4
    }

    /// Returns the nodes of the Cluster, as last reported.
    pub(super) fn known(&self) -> Vec<ConnectionInfo> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn remember(&self, nodes: Vec<ConnectionInfo>) {
        *self.known.lock().unwrap_or_else(PoisonError::into_inner) = nodes;
    }

    /// Returns the settings for new connections.
    pub(super) fn connection_config(&self) -> AsyncConnectionConfig {
        /// How many calls may be queued for the socket. A release should not wait for a place.
        const QUEUE: usize = 1024;
        AsyncConnectionConfig::new()
            .set_connection_timeout(Some(self.timeouts.connect))
            .set_response_timeout(Some(self.timeouts.response))
            .set_pipeline_buffer_size(QUEUE)
    }

    /// Finds the server in charge and connects to it, within the connect timeout.
    pub(super) async fn connect(
        self: &Arc<Self>,
        config: AsyncConnectionConfig,
    ) -> RedisResult<Dialed> {
        self.in_time(async {
            match &self.topology {
                Topology::Single(server) => self.open(server, config).await,
                Topology::Sentinel(service) => {
                    let primary = service.find(self).await?;
                    let mut connection = self.open(&primary, config).await?;
                    sentinel::refuse_a_replica(&mut connection.connection).await?;
                    Ok(connection)
                }
                Topology::Cluster(nodes) => {
                    let slot = slot_of(&self.name);
                    let map = cluster::find(self, nodes, Some(slot)).await?;
                    let no_owner = || redis::make_extension_error(survey::DOWN.to_owned(), None);
                    self.open(map.owner(slot).ok_or_else(no_owner)?, config).await
                }
                Topology::Node(node) => self.open(node, config).await,
            }
        })
        .await
    }

    /// Connects to the node of the Cluster that another node has named as `host:port`.
    pub(super) async fn connect_to(&self, address: &str) -> RedisResult<MultiplexedConnection> {
        let like = match &self.topology {
            Topology::Cluster(nodes) => nodes.first(),
            Topology::Node(node) => Some(node),
            Topology::Single(_) | Topology::Sentinel(_) => {
                return Err((ErrorKind::InvalidClientConfig, "only a Cluster has nodes").into());
            }
        };
        let named =
            address.rsplit_once(':').and_then(|(host, port)| Some((host, port.parse().ok()?)));
        let (Some((host, port)), Some(like)) = (named, like) else {
            return Err((ErrorKind::Parse, "not the address of a node").into());
        };
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let node = at(like, host, port);
        let dialed = self.in_time(self.open(&node, self.connection_config())).await?;
        Ok(dialed.connection)
    }

    /// Connects to the given server.
    pub(super) async fn open(
        &self,
        server: &ConnectionInfo,
        config: AsyncConnectionConfig,
    ) -> RedisResult<Dialed> {
        self.dialer.open(server, config).await
    }

    async fn in_time<T>(&self, work: impl Future<Output = RedisResult<T>>) -> RedisResult<T> {
        match tokio::time::timeout(self.timeouts.connect, work).await {
            Ok(done) => done,
            Err(_elapsed) => Err(io::Error::from(io::ErrorKind::TimedOut).into()),
        }
    }

    pub(super) fn is_cluster(&self) -> bool {
        self.topology.is_cluster()
    }

    /// Returns whether another server may be in charge if this one is not.
    pub(super) fn has_others(&self) -> bool {
        !matches!(self.topology, Topology::Single(_))
    }

    /// Returns what a single server sends before it is asked anything: nothing, unless it refuses
    /// the connection. Takes at most the connect timeout.
    pub(super) async fn greeting(&self) -> Option<String> {
        use tokio::io::AsyncReadExt;
        /// How long to wait, because a server that accepts the connection sends nothing.
        const TIMEOUT: Duration = Duration::from_millis(200);
        let Topology::Single(server) = &self.topology else { return None };
        let ConnectionAddr::Tcp(..) = server.addr() else { return None };
        let stream = self.in_time(self.dialer.stream(server.addr())).await.ok()?;
        let mut text = String::new();
        let mut stream = stream.take(64);
        let read = stream.read_to_string(&mut text);
        tokio::time::timeout(TIMEOUT, read).await.ok()?.ok()?;
        Some(text)
    }
}

/// Returns another address, reached in the same way as `node`.
pub(super) fn at(node: &ConnectionInfo, host: &str, port: u16) -> ConnectionInfo {
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
