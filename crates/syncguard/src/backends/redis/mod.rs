//! Locks on a Redis or Valkey server, shared by every client of that server.
//!
//! * Every operation is one script and one round trip; the server's clock decides.
//! * All locks share one multiplexed connection. A second one receives notifications once a task
//!   waits. Both reconnect by themselves; a call in progress is never repeated.
//! * The records are those of the TypeScript implementation: both exclude each other, and each can
//!   release, extend and look up the other's locks.
//! * It needs Redis 7.0 or Valkey 7.2 or newer: one server, Sentinel or Cluster, over TCP, TLS or a
//!   Unix socket.
//! * With [`shards`](RedisConfig::shards), the locks are distributed over all nodes of a Cluster,
//!   each with connections of its own.
//!
//! [The guide](https://github.com/syncguard/syncguard/blob/main/docs/guide/redis.md)
//! describes connection URLs, permissions, and what can make fences go backwards.

mod acquire_any;
mod admin;
mod batches;
mod cluster;
mod config;
mod connection;
mod dial;
mod error;
mod fenced;
mod layout;
mod listener;
mod names;
mod nodes;
mod record;
mod replicas;
mod reply;
mod route;
mod scattered;
mod scripts;
mod sentinel;
mod settings;
mod shard;
mod shards;
mod subscriber;
mod survey;
mod topology;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

pub use redis;
pub use redis::{Client, ClientTlsConfig, TlsCertificates};

use crate::common::cleanup::CleanupGate;
use crate::common::error::Result;
use crate::common::fence::Fenced;
use crate::common::holder::BreakNote;
use crate::common::key::Key;
use crate::common::lock_id::LockId;
use crate::contract::LockBackend;
use crate::contract::acquire_any::look_then_acquire;
use crate::contract::admin::Admin;
use crate::contract::capabilities::Capabilities;
use crate::contract::finding::Finding;
use crate::contract::notifier::Subscription;
use crate::contract::outcome::{AcquireAnyOutcome, AcquireOutcome, ExtendOutcome, ReleaseOutcome};
use crate::contract::request::{AcquireAnyRequest, AcquireRequest, ExtendRequest, ReleaseRequest};
use crate::contract::stored_lock::StoredLock;
use batches::Batches;
pub use config::RedisConfig;
use config::{ConnectionSource, Fences};
use connection::{Multiplexed, SharedConnection};
pub use fenced::{FencedKeys, FencedScript};
use layout::{Layout, count_name, slot_of};
use listener::{Channels, PushSource};
use names::Names;
use nodes::Nodes;
use replicas::{ReplicaRoute, Replicas};
use route::{OwnedRoute, Route};
use shard::{LazyListener, Shard, ShardInner};
use topology::{Resolver, Timeouts};

/// A backend that keeps locks on a Redis server, or on the nodes of a Cluster. Clones share the
/// connections.
///
/// ```no_run
/// use syncguard::redis::RedisConfig;
/// use syncguard::{Locker, RedisBackend};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> syncguard::Result<()> {
/// let config = RedisConfig::from_url("redis://localhost/0")?;
/// let locker = Locker::new(RedisBackend::connect(config).await?)?;
/// let guard = locker.lock("invoice:42").await?;
/// # drop(guard); locker.shutdown().await
/// # }
/// ```
#[derive(Clone)]
pub struct RedisBackend {
    shared: Arc<RedisInner>,
}

struct RedisInner {
    /// The prefix as it was configured.
    prefix: String,
    layout: Layout,
    /// In the order of the layout; one, if the store has no shards.
    shards: Vec<Shard>,
    /// The nodes that serve the shards, if the store has shards.
    nodes: Option<Arc<Nodes>>,
    fences: Fences,
    waits_for_replicas: bool,
}

impl RedisBackend {
    /// Connects to a server. Fails if the server is too old, or if the store has another number of
    /// shards.
    ///
    /// # Cancel safety
    ///
    /// If you drop the future before it completes, it leaves nothing behind, except the number of
    /// shards in the store.
    pub async fn connect(config: RedisConfig) -> Result<Self> {
        config.validate()?;
        let layout = config.layout()?;
        let parts = Parts {
            cleanup: Arc::new(CleanupGate::new(config.network.cleanup_in_is_locked)),
            fences: config.fences,
            replicas: config.replicas,
            timeouts: Timeouts {
                connect: config.network.connect_timeout,
                response: config.network.response_timeout,
            },
        };
        let prefix = config.base_prefix().to_owned();
        let (shards, nodes) = match config.source {
            ConnectionSource::External(connection) => {
                (vec![parts.external(connection, &layout)], None)
            }
            ConnectionSource::Owned(topology) => {
                let name = layout.shards()[0].space.prefix().to_owned();
                let (database, certificates) = (topology.database(), config.certificates);
                let resolver =
                    Resolver::new(*topology, certificates.as_ref(), parts.timeouts, name)?;
                let opened =
                    parts.open(Arc::new(resolver), database, &layout, &prefix, config.shards);
                opened.await.map_err(error::in_operation(error::CONNECT))?
            }
        };
        let (fences, waits_for_replicas) = (parts.fences, parts.replicas.is_some());
        let inner = RedisInner { prefix, layout, shards, nodes, fences, waits_for_replicas };
        let backend = Self { shared: Arc::new(inner) };
        backend.check_servers().await?;
        Ok(backend)
    }

    /// Returns what about this server can make locks vanish or fences go backwards. It asks the
    /// server now; [`connect`](Self::connect) has logged the same. A missing permission is not an
    /// error: a finding reports what is unknown.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: it only reads.
    pub async fn findings(&self) -> Vec<Finding> {
        self.ask_for_findings().await
    }

    /// Returns the shard of a key.
    fn shard(&self, key: &Key) -> &Shard {
        &self.shared.shards[self.shared.layout.place_of(key)]
    }
}

/// What all shards share.
struct Parts {
    cleanup: Arc<CleanupGate>,
    fences: Fences,
    replicas: Option<(u32, Duration)>,
    timeouts: Timeouts,
}

impl Parts {
    /// Creates the only shard of a store that is used through the caller's own connection.
    fn external(&self, connection: SharedConnection, layout: &Layout) -> Shard {
        let channels = Channels::new(layout.shards()[0].clone(), connection.database());
        let inspection_timeout = self.timeouts.response;
        self.shard(Route::External { connection, inspection_timeout }, channels, None, None)
    }

    /// Connects to a store, with or without shards.
    async fn open(
        &self,
        resolver: Arc<Resolver>,
        database: i64,
        layout: &Layout,
        prefix: &str,
        shards: Option<u16>,
    ) -> Result<(Vec<Shard>, Option<Arc<Nodes>>)> {
        let Some(count) = shards else {
            return Ok((vec![self.whole(resolver, layout, database).await?], None));
        };
        let nodes = self.find_nodes(resolver, layout, prefix).await?;
        self.check_count(&nodes, prefix, count).await?;
        Ok((self.sharded(&nodes, layout), Some(nodes)))
    }

    /// Connects to the only shard of a store.
    async fn whole(
        &self,
        resolver: Arc<Resolver>,
        layout: &Layout,
        database: i64,
    ) -> Result<Shard> {
        let server = Multiplexed::open(Arc::clone(&resolver)).await?;
        let replicas = self.replicas.map(|wanted| Replicas::new(Arc::clone(&resolver), wanted));
        let channels = Channels::new(layout.shards()[0].clone(), database);
        let listener = LazyListener::new(PushSource::Server(resolver));
        listener.started(&channels);
        let replicas = replicas.map(ReplicaRoute::Server);
        Ok(self.shard(Route::Owned(OwnedRoute::Server(server)), channels, Some(listener), replicas))
    }

    /// Finds the nodes that serve the shards, and after these the record of their number.
    async fn find_nodes(
        &self,
        resolver: Arc<Resolver>,
        layout: &Layout,
        prefix: &str,
    ) -> Result<Arc<Nodes>> {
        let slots = layout.shards().iter().map(|names| slot_of(names.space.prefix()));
        let slots = slots.chain([slot_of(&count_name(prefix))]).collect();
        let nodes = Nodes::find(resolver, slots, self.replicas).await;
        nodes.map_err(|cause| error::refused(&cause))
    }

    /// Creates the shards of a store. They connect when they are used.
    fn sharded(&self, nodes: &Arc<Nodes>, layout: &Layout) -> Vec<Shard> {
        let shard = |(shard, names): (usize, &Names)| {
            let nodes = || Arc::clone(nodes);
            let timeout = self.timeouts.response;
            let listener = LazyListener::new(PushSource::Shard { nodes: nodes(), shard, timeout });
            let route = Route::Owned(OwnedRoute::Shard { nodes: nodes(), shard });
            let replicas = self.replicas.map(|_| ReplicaRoute::Shard { nodes: nodes(), shard });
            self.shard(route, Channels::new(names.clone(), 0), Some(listener), replicas)
        };
        layout.shards().iter().enumerate().map(shard).collect()
    }

    fn shard(
        &self,
        route: Route,
        channels: Channels,
        listener: Option<LazyListener>,
        replicas: Option<ReplicaRoute>,
    ) -> Shard {
        Shard {
            shared: Arc::new(ShardInner {
                is_cluster: route.is_cluster(),
                route,
                names: channels.names().clone(),
                listener,
                replicas,
                fences: self.fences,
                channels,
                cleanup: Arc::clone(&self.cleanup),
                batches: Batches::new(),
            }),
        }
    }
}

impl fmt::Debug for RedisBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisBackend")
            .field("prefix", &self.shared.prefix)
            .field("shards", &self.shared.shards.len())
            .finish_non_exhaustive()
    }
}

impl LockBackend for RedisBackend {
    type Fencing = Fenced;

    fn capabilities(&self) -> Capabilities {
        let capabilities = self.shared.shards[0].capabilities();
        match (&self.shared.nodes, u16::try_from(self.shared.shards.len())) {
            (Some(_), Ok(count)) => capabilities.with_shards(count),
            _ => capabilities,
        }
    }

    fn acquire(
        &self,
        request: &AcquireRequest,
    ) -> impl Future<Output = Result<AcquireOutcome>> + Send {
        self.shard(request.key()).acquire(request)
    }

    async fn acquire_any(&self, request: &AcquireAnyRequest) -> Result<AcquireAnyOutcome> {
        let place = |key| self.shared.layout.place_of(key);
        let first = place(request.first().key());
        if request.keys().iter().all(|key| place(key) == first) {
            return self.shared.shards[first].acquire_any(request).await;
        }
        Box::pin(look_then_acquire(self, request)).await
    }

    async fn release(&self, request: &ReleaseRequest) -> Result<ReleaseOutcome> {
        match self.shard_of_id(&request.lock_id()) {
            Some(shard) => shard.release(request).await,
            None => Box::pin(self.release_anywhere(request)).await,
        }
    }

    async fn extend(&self, request: &ExtendRequest) -> Result<ExtendOutcome> {
        match self.shard_of_id(&request.lock_id()) {
            Some(shard) => shard.extend(request).await,
            None => Box::pin(self.extend_anywhere(request)).await,
        }
    }

    async fn is_locked(&self, key: &Key) -> Result<bool> {
        self.shard(key).is_locked(key).await
    }

    async fn lookup_key(&self, key: &Key) -> Result<Option<StoredLock>> {
        self.shard(key).lookup_key(key).await
    }

    async fn lookup_id(&self, lock_id: &LockId) -> Result<Option<StoredLock>> {
        match self.shard_of_id(lock_id) {
            Some(shard) => shard.lookup_id(lock_id).await,
            None => Box::pin(self.lookup_anywhere(lock_id)).await,
        }
    }

    async fn subscribe(&self, key: &Key) -> Option<Subscription> {
        self.shard(key).subscribe(key).await
    }

    async fn watch(&self, key: &Key) -> Option<Subscription> {
        self.shard(key).watch(key).await
    }

    async fn waiters(&self, key: &Key) -> Option<u32> {
        self.shard(key).waiters(key).await
    }

    async fn break_note(&self, lock_id: &LockId) -> Option<BreakNote> {
        match self.shard_of_id(lock_id) {
            Some(shard) => shard.break_note(lock_id).await,
            None => Box::pin(self.break_note_anywhere(lock_id)).await,
        }
    }

    fn admin(&self) -> Option<Arc<dyn Admin>> {
        Some(Arc::new(self.clone()))
    }
}
