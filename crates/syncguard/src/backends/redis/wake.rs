//! Wake-ups: one connection per backend that hears of releases, one channel per awaited key.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{PushInfo, PushKind, RedisError, RedisResult, Value};
use sha1_smol::Sha1;

use super::config::Names;
use super::error;
use super::topology::Finder;
use crate::common::error::{ErrorCode, Result};
use crate::common::key::Key;
use crate::contract::listener::{Failure, Listener, Reports, Topic, Transport};
use crate::contract::wake::WakeUps;

/// The channels on which releases are told. They name no key.
#[derive(Clone, Debug)]
pub(super) struct Channels {
    names: Names,
    prefix: String,
}

impl Channels {
    /// Those of one database: channels know no databases.
    pub(super) fn new(names: Names, database: i64) -> Self {
        let prefix = format!("{}:wake:{database}:", names.space.prefix());
        Self { names, prefix }
    }

    /// What they begin with; the hash of the lock's key follows.
    pub(super) fn prefix(&self) -> &str {
        &self.prefix
    }

    /// By the storage key of a lock.
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
pub(super) struct Waker {
    listener: Listener,
}

impl Waker {
    /// Starts the task that owns the connection. It connects when the first waiter comes and ends with
    /// the backend.
    pub(super) fn start(finder: Arc<Finder>, channels: Channels) -> Self {
        let transport = PubSub { finder, channels, has_warned: AtomicBool::new(false) };
        Self { listener: Listener::start(transport) }
    }

    /// Subscribes to the channel of a key; answers when the server has confirmed it.
    pub(super) async fn subscribe(&self, key: &Key) -> Option<WakeUps> {
        self.listener.subscribe(key).await
    }
}

/// Notifications by channels.
struct PubSub {
    finder: Arc<Finder>,
    channels: Channels,
    has_warned: AtomicBool,
}

impl PubSub {
    fn failure(&self, cause: &RedisError) -> Failure {
        if error::map(cause, "subscribe").code() != ErrorCode::AuthFailed {
            return Failure::Lost;
        }
        if !self.has_warned.swap(true, Ordering::Relaxed) {
            tracing::warn!("Redis does not let this user subscribe; waiters poll instead");
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
        self.finder.response_timeout()
    }

    async fn connect(&self, reports: Reports) -> Result<Subscriber, Failure> {
        let config = self.finder.connection_config().set_push_sender(move |push: PushInfo| {
            on_push(&reports, &push);
            Ok::<(), redis::aio::SendError>(())
        });
        let connection = self.finder.connect(config).await.map_err(|cause| self.failure(&cause))?;
        Ok(Subscriber { connection, is_sharded: self.finder.is_cluster() })
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

    /// The driver keeps a connection that only does not answer.
    async fn ping(&self, connection: &mut Subscriber) -> Result<(), Failure> {
        let ping = redis::cmd("PING").query_async::<Value>(&mut connection.connection).await;
        ping.map(drop).map_err(|_cause| Failure::Lost)
    }
}

/// Takes what the server pushes. Called by the connection, so it must not block.
fn on_push(reports: &Reports, push: &PushInfo) {
    let channel = match push.data.first() {
        Some(Value::BulkString(channel)) => str::from_utf8(channel).ok(),
        _ => None,
    };
    match (&push.kind, channel) {
        (PushKind::Message | PushKind::SMessage, Some(channel)) => reports.notify(channel),
        (PushKind::Disconnection, _) => reports.lost(),
        // A channel that is still awaited was taken away: its slot has moved to another node.
        (PushKind::SUnsubscribe, Some(channel)) if reports.is_awaited(channel) => reports.lost(),
        _ => {}
    }
}

/// A connection that subscribes. On a Cluster the channels are sharded: they live on the node that
/// has the slot of our prefix, which is the one we are connected to.
struct Subscriber {
    connection: MultiplexedConnection,
    is_sharded: bool,
}

impl Subscriber {
    /// One channel at a time, because every channel has an answer of its own.
    async fn send(&mut self, command: &str, channel: &str) -> RedisResult<()> {
        let mut call = redis::cmd(command);
        call.arg(channel).query_async::<Value>(&mut self.connection).await.map(drop)
    }
}
