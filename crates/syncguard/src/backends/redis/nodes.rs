//! The nodes of a Cluster that serve the shards of a backend: one connection per node, however many
//! shards it serves.
//!
//! A call uses the map of shards to nodes as it is. Only a call that finds it outdated, because the
//! node is gone or names another, waits until the nodes were asked again. So a node that fails
//! delays only calls to its own shards.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use redis::{RedisResult, make_extension_error};
use tokio::sync::watch;
use tokio::time::Instant;

use super::connection::Multiplexed;
use super::replicas::Replicas;
use super::subscriber::PushConnection;
use super::survey;
use super::topology::Resolver;
use crate::common::backoff::reconnect_delay;

/// The nodes that serve the shards of a backend.
pub(super) struct Nodes {
    resolver: Arc<Resolver>,
    /// The slot of each shard.
    slots: Vec<u16>,
    /// How many replicas must confirm a lock, and how long they may take.
    wanted: Option<(u32, Duration)>,
    state: Mutex<NodesState>,
}

struct NodesState {
    /// Counts how often the nodes were asked.
    version: u64,
    /// The node of each shard; `None` if none serves it.
    owners: Vec<Option<Arc<Node>>>,
    /// How often in a row the nodes were asked in vain, and when that was last.
    in_vain: u32,
    asked_at: Instant,
    /// Open while a task asks the nodes.
    asking: Option<watch::Receiver<()>>,
}

/// One node.
pub(super) struct Node {
    pub(super) address: String,
    pub(super) connection: Multiplexed,
    pub(super) replicas: Option<Replicas>,
    resolver: Arc<Resolver>,
    push: tokio::sync::Mutex<Weak<PushConnection>>,
}

/// The node that serves a shard, according to a version of the map.
pub(super) struct Serving {
    pub(super) version: u64,
    node: Option<Arc<Node>>,
}

impl Serving {
    pub(super) fn node(&self) -> RedisResult<&Arc<Node>> {
        self.node.as_ref().ok_or_else(|| make_extension_error(survey::DOWN.to_owned(), None))
    }

    /// Returns whether this is the same node.
    fn is_same(&self, other: &Self) -> bool {
        match (&self.node, &other.node) {
            (Some(one), Some(other)) => Arc::ptr_eq(one, other),
            (one, other) => one.is_none() && other.is_none(),
        }
    }
}

impl Nodes {
    /// Asks which nodes serve these slots, one for each shard. Connects to them when they are used.
    pub(super) async fn find(
        resolver: Arc<Resolver>,
        slots: Vec<u16>,
        wanted: Option<(u32, Duration)>,
    ) -> RedisResult<Arc<Self>> {
        let owners = vec![None; slots.len()];
        let asked_at = Instant::now();
        let state = NodesState { version: 0, owners, in_vain: 0, asked_at, asking: None };
        let nodes = Arc::new(Self { resolver, slots, wanted, state: Mutex::new(state) });
        nodes.ask().await?;
        Ok(nodes)
    }

    fn state(&self) -> MutexGuard<'_, NodesState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the node that serves a shard.
    pub(super) fn serving(&self, shard: usize) -> Serving {
        let state = self.state();
        Serving { version: state.version, node: state.owners.get(shard).cloned().flatten() }
    }

    /// Returns all nodes that serve a shard, ordered by address.
    pub(super) fn all(&self) -> Vec<Arc<Node>> {
        let mut nodes: Vec<Arc<Node>> = self.state().owners.iter().flatten().cloned().collect();
        nodes.sort_by(|one, other| one.address.cmp(&other.address));
        nodes.dedup_by(|one, other| Arc::ptr_eq(one, other));
        nodes
    }

    /// Returns the node that serves a shard by now, after a call to another one has failed. Returns
    /// `None` if it is still the same.
    pub(super) async fn other_than(
        self: &Arc<Self>,
        failed: &Serving,
        shard: usize,
    ) -> Option<Serving> {
        self.refresh(failed.version).await;
        let now = self.serving(shard);
        (!now.is_same(failed)).then_some(now)
    }

    /// Asks the nodes again, unless they were asked since a version of the map. Once for all
    /// callers.
    pub(super) async fn refresh(self: &Arc<Self>, seen: u64) {
        let mut asking = {
            let mut state = self.state();
            if state.version != seen {
                return;
            }
            match &state.asking {
                Some(asking) if asking.has_changed().is_ok() => asking.clone(),
                _ => {
                    let (done, asking) = watch::channel(());
                    state.asking = Some(asking.clone());
                    let delay = state.delay();
                    let nodes = Arc::clone(self);
                    // In a task, so that a caller that is dropped does not stop it for the others.
                    tokio::spawn(async move {
                        tokio::time::sleep(delay).await;
                        // The next call that fails asks again.
                        drop(nodes.ask().await);
                        drop(done);
                    });
                    asking
                }
            }
        };
        // It fails when the task has ended, which is what this waits for.
        drop(asking.changed().await);
    }

    async fn ask(&self) -> RedisResult<()> {
        let map = self.resolver.slot_map().await;
        let mut state = self.state();
        let mut has_changed = false;
        if let Ok(map) = &map {
            let mut known: HashMap<String, Arc<Node>> = HashMap::new();
            for node in state.owners.iter().flatten() {
                known.entry(node.address.clone()).or_insert_with(|| Arc::clone(node));
            }
            let owners = self.slots.iter().map(|slot| {
                let owner = map.owner(*slot)?;
                let address = owner.addr().to_string();
                let node = known.entry(address.clone()).or_insert_with(|| {
                    Arc::new(Node::new(self.resolver.for_node(owner.clone()), address, self.wanted))
                });
                Some(Arc::clone(node))
            });
            let owners: Vec<_> = owners.collect();
            let addresses = |owners: &[Option<Arc<Node>>]| -> Vec<Option<String>> {
                owners.iter().map(|node| Some(node.as_ref()?.address.clone())).collect()
            };
            has_changed = addresses(&owners) != addresses(&state.owners);
            state.owners = owners;
        }
        state.version += 1;
        state.in_vain = if has_changed { 0 } else { state.in_vain.saturating_add(1) };
        state.asked_at = Instant::now();
        map.map(drop)
    }
}

impl NodesState {
    /// Returns how long to wait before the nodes are asked again.
    fn delay(&self) -> Duration {
        /// After this time, another failure is a new one.
        const FORGOTTEN: Duration = Duration::from_secs(10);
        if self.asked_at.elapsed() > FORGOTTEN {
            return Duration::ZERO;
        }
        reconnect_delay(self.in_vain)
    }
}

impl Node {
    fn new(resolver: Resolver, address: String, wanted: Option<(u32, Duration)>) -> Self {
        let resolver = Arc::new(resolver);
        Self {
            address,
            connection: Multiplexed::new(Arc::clone(&resolver)),
            replicas: wanted.map(|wanted| Replicas::new(Arc::clone(&resolver), wanted)),
            resolver,
            push: tokio::sync::Mutex::default(),
        }
    }

    /// Returns the connection on which this node sends notifications, to all shards that use it.
    pub(super) async fn push_connection(&self) -> RedisResult<Arc<PushConnection>> {
        let mut push = self.push.lock().await;
        if let Some(connection) = push.upgrade().filter(|connection| connection.is_alive()) {
            return Ok(connection);
        }
        let connection = PushConnection::open(&self.resolver).await?;
        *push = Arc::downgrade(&connection);
        Ok(connection)
    }
}
