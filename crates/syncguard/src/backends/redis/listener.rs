//! Notifications of releases: one connection per backend, one channel per awaited key.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{PushInfo, PushKind, RedisError, RedisResult, Value};
use sha1_smol::Sha1;

use super::error;
use super::names::Names;
use super::topology::Resolver;
use crate::common::error::{ErrorCode, Result};
use crate::common::key::Key;
use crate::contract::listener::{Failure, Listener, Reports, Topic, Transport, parse_holder_age};
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

    /// Returns the prefix of the names; the hash of the lock's key follows.
    pub(super) fn prefix(&self) -> &str {
        &self.prefix
    }

    /// Returns the channel of a lock, by its storage key.
    pub(super) fn of_lock(&self, lock_key: &str) -> String {
        // SHA-1, because scripts can compute it too.
        format!("{}{}", self.prefix, Sha1::from(lock_key).digest())
    }

    fn of_key(&self, key: &Key) -> Result<String> {
        Ok(self.of_lock(&self.names.lock_key(key)?))
    }
}

/// Subscribes to releases.
#[derive(Debug)]
pub(super) struct RedisListener {
    listener: Listener,
}

impl RedisListener {
    /// Starts the task that owns the connection. It connects when the first waiter comes and ends
    /// with the backend.
    pub(super) fn start(resolver: Arc<Resolver>, channels: Channels) -> Self {
        let transport = PubSub { resolver, channels, has_warned: AtomicBool::new(false) };
        Self { listener: Listener::start(transport) }
    }

    /// Subscribes to the channel of a key. Returns when the server has confirmed it.
    pub(super) async fn subscribe(&self, key: &Key) -> Option<Subscription> {
        self.listener.subscribe(key).await
    }
}

/// Notifications through channels.
struct PubSub {
    resolver: Arc<Resolver>,
    channels: Channels,
    has_warned: AtomicBool,
}

impl PubSub {
    fn failure(&self, cause: &RedisError) -> Failure {
        if error::map(cause, "subscribe").code() != ErrorCode::AuthFailed {
            return Failure::Lost;
        }
        if !self.has_warned.swap(true, Ordering::Relaxed) {
            tracing::warn!("the Redis user may not subscribe to channels; waiters poll instead");
        }
        Failure::Refused
    }
}

impl Transport for PubSub {
    type Connection = Subscriber;

    fn topic(&self, key: &Key) -> Result<String> {
        self.channels.of_key(key)
    }

    fn timeout(&self) -> Duration {
        self.resolver.response_timeout()
    }

    async fn connect(&self, reports: Reports) -> Result<Subscriber, Failure> {
        let config = self.resolver.connection_config().set_push_sender(move |push: PushInfo| {
            on_push(&reports, &push);
            Ok::<(), redis::aio::SendError>(())
        });
        let connection =
            self.resolver.connect(config).await.map_err(|cause| self.failure(&cause))?;
        Ok(Subscriber { connection, is_sharded: self.resolver.is_cluster() })
    }

    async fn subscribe(
        &self,
        connection: &mut Subscriber,
        topics: &[Topic],
    ) -> Result<(), Failure> {
        let command = if connection.is_sharded { "SSUBSCRIBE" } else { "SUBSCRIBE" };
        for topic in topics {
            let subscribed = connection.send(command, &topic.name).await;
            subscribed.map_err(|cause| self.failure(&cause))?;
        }
        Ok(())
    }

    async fn unsubscribe(&self, connection: &mut Subscriber, topic: &Topic) -> Result<(), Failure> {
        let command = if connection.is_sharded { "SUNSUBSCRIBE" } else { "UNSUBSCRIBE" };
        let unsubscribed = connection.send(command, &topic.name).await;
        unsubscribed.map_err(|cause| self.failure(&cause))
    }

    /// Needed because the driver keeps a connection that has stopped answering.
    async fn ping(&self, connection: &mut Subscriber) -> Result<(), Failure> {
        let ping = redis::cmd("PING").query_async::<Value>(&mut connection.connection).await;
        ping.map(drop).map_err(|_cause| Failure::Lost)
    }
}

/// Handles a push message of the server. The connection calls it, so it must not block.
fn on_push(reports: &Reports, push: &PushInfo) {
    let text = |place: usize| match push.data.get(place) {
        Some(Value::BulkString(text)) => str::from_utf8(text).ok(),
        _ => None,
    };
    let (channel, age) = (text(0), text(1).and_then(parse_holder_age));
    match (&push.kind, channel) {
        (PushKind::Message | PushKind::SMessage, Some(channel)) => {
            reports.notify(channel, age);
        }
        (PushKind::Disconnection, _) => reports.lost(),
        // The server ended a subscription that is still needed: the slot has moved to another node.
        (PushKind::SUnsubscribe, Some(channel)) if reports.is_awaited(channel) => reports.lost(),
        _ => {}
    }
}

/// A connection that subscribes. On a Cluster the channels are sharded: they are on the node that
/// owns the slot of our prefix, which is the one that this connection leads to.
struct Subscriber {
    connection: MultiplexedConnection,
    is_sharded: bool,
}

impl Subscriber {
    /// Sends one channel at a time, because every channel has its own answer.
    async fn send(&mut self, command: &str, channel: &str) -> RedisResult<()> {
        let mut call = redis::cmd(command);
        call.arg(channel).query_async::<Value>(&mut self.connection).await.map(drop)
    }
}
