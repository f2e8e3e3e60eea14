//! Notifications: one connection per server, with one channel per awaited key for releases. Every
//! shard has a listener of its own; those of a node share its connection.
//!
//! Those who hold or watch a lock need no publisher: the server tracks the records that this
//! connection reads, as for a client with a cache, and reports that one was changed, deleted,
//! expired or flushed by anyone.

use std::collections::HashSet;
use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use redis::{RedisError, RedisResult};
use sha1_smol::Sha1;

use super::error;
use super::names::Names;
use super::nodes::{Nodes, Serving};
use super::subscriber::{PushConnection, record_of_topic, topic_of_record};
use super::topology::Resolver;
use crate::common::error::{ErrorCode, Result};
use crate::common::key::Key;
use crate::contract::listener::{Failure, Listener, Reports, Topic, Transport};
use crate::contract::listener_handle::Interest;
use crate::contract::notifier::Subscription;

/// The channels on which releases are published. Their names contain no key.
#[derive(Clone, Debug)]
pub(super) struct Channels {
    names: Names,
    prefix: String,
}

impl Channels {
    /// Creates the channels of one database. Its number is in the names, because all databases of a
    /// server share its channels.
    pub(super) fn new(names: Names, database: i64) -> Self {
        let prefix = format!("{}:wake:{database}:", names.space.prefix());
        Self { names, prefix }
    }

    /// Returns the names of the records that the channels are for.
    pub(super) fn names(&self) -> &Names {
        &self.names
    }

    /// Returns the prefix of the names; the hash of the lock's key follows.
    pub(super) fn prefix(&self) -> &str {
        &self.prefix
    }

    /// Returns the channel of a lock, by its storage key.
    pub(super) fn of_lock(&self, lock_key: &str) -> String {
        // SHA-1, because scripts can compute it too.
        let hash = Sha1::from(lock_key).digest();
        let mut channel = String::with_capacity(self.prefix.len() + 2 * hash.bytes().len());
        write!(channel, "{}{hash}", self.prefix).expect("BUG: a string takes any text");
        channel
    }

    fn of_key(&self, key: &Key) -> Result<String> {
        Ok(self.of_lock(&self.names.lock_key(key)?))
    }
}

/// Where to subscribe.
#[derive(Clone)]
pub(super) enum PushSource {
    /// The server in charge of all keys.
    Server(Arc<Resolver>),
    /// The node that serves a shard.
    Shard { nodes: Arc<Nodes>, shard: usize, timeout: Duration },
}

impl PushSource {
    fn timeout(&self) -> Duration {
        match self {
            Self::Server(resolver) => resolver.response_timeout(),
            Self::Shard { timeout, .. } => *timeout,
        }
    }

    /// Returns a connection, and the version of the map of shards to nodes.
    async fn connect(&self) -> RedisResult<(Arc<PushConnection>, u64)> {
        match self {
            Self::Server(resolver) => Ok((PushConnection::open(resolver).await?, 0)),
            Self::Shard { nodes, shard, .. } => {
                let serving = nodes.serving(*shard);
                match connect_to(&serving).await {
                    Err(cause) => match nodes.other_than(&serving, *shard).await {
                        Some(other) => connect_to(&other).await,
                        None => Err(cause),
                    },
                    connected => connected,
                }
            }
        }
    }
}

async fn connect_to(serving: &Serving) -> RedisResult<(Arc<PushConnection>, u64)> {
    Ok((serving.node()?.push_connection().await?, serving.version))
}

/// Subscribes to releases.
#[derive(Debug)]
pub(super) struct RedisListener {
    listener: Listener,
}

impl RedisListener {
    /// Starts the task that owns the connection. It connects when the first waiter comes and ends
    /// with the backend.
    pub(super) fn start(source: PushSource, channels: Channels) -> Self {
        let transport = PubSub { source, channels, has_warned: AtomicBool::new(false) };
        Self { listener: Listener::start(transport) }
    }

    /// Subscribes to the channel of a key. Returns when the server has confirmed it.
    pub(super) async fn subscribe(&self, key: &Key) -> Option<Subscription> {
        self.listener.subscribe(key, Interest::Release).await
    }

    /// Subscribes to changes of the record of a key. Returns when the server tracks it.
    pub(super) async fn watch(&self, key: &Key) -> Option<Subscription> {
        self.listener.subscribe(key, Interest::Change).await
    }
}

/// Notifications through channels.
struct PubSub {
    source: PushSource,
    channels: Channels,
    has_warned: AtomicBool,
}

/// One shard's use of a connection.
struct Subscriber {
    connection: Arc<PushConnection>,
    /// The version of the map of shards to nodes.
    version: u64,
    reports: Reports,
    /// The topics that the connection reports here.
    topics: HashSet<String>,
}

impl Subscriber {
    /// Fails if the connection has ended: that is reported only to topics that it had then.
    fn check(&self) -> Result<(), Failure> {
        if self.connection.is_alive() { Ok(()) } else { Err(Failure::Lost) }
    }
}

impl Drop for Subscriber {
    fn drop(&mut self) {
        for topic in &self.topics {
            self.connection.forget(topic);
        }
    }
}

impl PubSub {
    fn failure(&self, cause: &RedisError) -> Failure {
        if error::map(cause).code() != ErrorCode::AuthFailed {
            return Failure::Lost;
        }
        if !self.has_warned.swap(true, Ordering::Relaxed) {
            tracing::warn!("the Redis user may not subscribe to channels; waiters poll instead");
        }
        Failure::Refused
    }

    /// Finds the node again if this one no longer serves the shard.
    async fn follow(&self, connection: &Subscriber, cause: &RedisError) {
        if let (PushSource::Shard { nodes, .. }, Some("MOVED")) = (&self.source, cause.code()) {
            nodes.refresh(connection.version).await;
        }
    }
}

impl Transport for PubSub {
    type Connection = Subscriber;

    fn topic(&self, key: &Key, interest: Interest) -> Result<String> {
        match interest {
            Interest::Release => self.channels.of_key(key),
            Interest::Change => Ok(topic_of_record(&self.channels.names.lock_key(key)?)),
        }
    }

    fn timeout(&self) -> Duration {
        self.source.timeout()
    }

    async fn connect(&self, reports: Reports) -> Result<Subscriber, Failure> {
        let connected = self.source.connect().await;
        let (connection, version) = connected.map_err(|cause| self.failure(&cause))?;
        Ok(Subscriber { connection, version, reports, topics: HashSet::new() })
    }

    async fn subscribe(
        &self,
        connection: &mut Subscriber,
        topics: &[Topic],
    ) -> Result<(), Failure> {
        connection.check()?;
        for topic in topics {
            let (name, reports) = (topic.name.as_str(), &connection.reports);
            let subscribed = match topic.interest {
                Interest::Release => connection.connection.subscribe(name, reports).await,
                Interest::Change => {
                    connection.connection.track(record_of_topic(name), reports).await
                }
            };
            if let Err(cause) = subscribed {
                self.follow(connection, &cause).await;
                return Err(match (topic.interest, cause.code()) {
                    // A user without this permission notices a loss at the next renewal.
                    (Interest::Change, Some(code)) if code != "MOVED" => Failure::Refused,
                    (Interest::Change, _) => Failure::Lost,
                    (Interest::Release, _) => self.failure(&cause),
                });
            }
            connection.topics.insert(topic.name.clone());
        }
        Ok(())
    }

    async fn unsubscribe(&self, connection: &mut Subscriber, topic: &Topic) -> Result<(), Failure> {
        connection.topics.remove(&topic.name);
        if topic.interest == Interest::Change {
            connection.connection.forget(&topic.name);
            return Ok(());
        }
        match connection.connection.unsubscribe(&topic.name).await {
            Ok(()) => Ok(()),
            // The shard has moved, and with it the subscriptions that are left.
            Err(cause) if cause.code() == Some("MOVED") => Err(Failure::Lost),
            Err(cause) => Err(self.failure(&cause)),
        }
    }

    async fn ping(&self, connection: &mut Subscriber) -> Result<(), Failure> {
        connection.check()?;
        connection.connection.ping().await.map_err(|_cause| Failure::Lost)
    }
}
