//! Notifications: one connection per backend, with one channel per awaited key for releases.
//!
//! Those who hold or watch a lock need no publisher: the server tracks the records that this
//! connection reads, as for a client with a cache, and reports that one was changed, deleted,
//! expired or flushed by anyone.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{PushInfo, PushKind, RedisError, RedisResult, Value};
use sha1_smol::Sha1;
use tokio::sync::mpsc;
use tokio::task::AbortHandle;

use super::names::Names;
use super::topology::Resolver;
use super::{error, record};
use crate::common::error::{ErrorCode, Result};
use crate::common::key::Key;
use crate::contract::listener::{Failure, Listener, Reports, Topic, Transport, parse_holder_age};
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
        self.listener.subscribe(key, Interest::Release).await
    }

    /// Subscribes to changes of the record of a key. Returns when the server tracks it.
    pub(super) async fn watch(&self, key: &Key) -> Option<Subscription> {
        self.listener.subscribe(key, Interest::Change).await
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

    fn topic(&self, key: &Key, interest: Interest) -> Result<String> {
        match interest {
            Interest::Release => self.channels.of_key(key),
            Interest::Change => Ok(topic_of_record(&self.channels.names.lock_key(key)?)),
        }
    }

    fn timeout(&self) -> Duration {
        self.resolver.response_timeout()
    }

    async fn connect(&self, reports: Reports) -> Result<Subscriber, Failure> {
        let (invalidated, received) = mpsc::unbounded_channel();
        let config = self.resolver.connection_config().set_push_sender({
            let reports = reports.clone();
            move |push: PushInfo| {
                on_push(&reports, &invalidated, &push);
                Ok::<(), redis::aio::SendError>(())
            }
        });
        let connection =
            self.resolver.connect(config).await.map_err(|cause| self.failure(&cause))?;
        let tracked = Arc::<Tracked>::default();
        let tracking = track(connection.clone(), Arc::clone(&tracked), received, reports);
        Ok(Subscriber {
            connection,
            is_sharded: self.resolver.is_cluster(),
            is_tracking: false,
            tracked,
            tracking: tokio::spawn(tracking).abort_handle(),
        })
    }

    async fn subscribe(
        &self,
        connection: &mut Subscriber,
        topics: &[Topic],
    ) -> Result<(), Failure> {
        let command = if connection.is_sharded { "SSUBSCRIBE" } else { "SUBSCRIBE" };
        for topic in topics {
            if topic.interest == Interest::Change {
                self.track(connection, &topic.name).await?;
                continue;
            }
            let subscribed = connection.send(command, &topic.name).await;
            subscribed.map_err(|cause| self.failure(&cause))?;
        }
        Ok(())
    }

    async fn unsubscribe(&self, connection: &mut Subscriber, topic: &Topic) -> Result<(), Failure> {
        if topic.interest == Interest::Change {
            // The server forgets the record when it changes next, or with the connection.
            connection.tracked.records().remove(record_of_topic(&topic.name));
            return Ok(());
        }
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

impl PubSub {
    /// Asks the server to report the next change of a record, by reading it.
    async fn track(&self, connection: &mut Subscriber, topic: &str) -> Result<(), Failure> {
        // A user without this permission notices a loss at the next renewal.
        let refused = |cause: RedisError| match cause.code() {
            Some(_) => Failure::Refused,
            None => Failure::Lost,
        };
        if !connection.is_tracking {
            let mut tracking = redis::cmd("CLIENT");
            tracking.arg("TRACKING").arg("ON");
            let answer = tracking.query_async::<Value>(&mut connection.connection).await;
            answer.map_err(refused)?;
            connection.is_tracking = true;
        }
        let record = record_of_topic(topic);
        let holder = read_holder(&mut connection.connection, record).await.map_err(refused)?;
        connection.tracked.records().insert(record.to_owned(), holder);
        Ok(())
    }
}

/// The topic of a record. It differs from all channels, which contain no such character.
fn topic_of_record(lock_key: &str) -> String {
    format!("={lock_key}")
}

fn record_of_topic(topic: &str) -> &str {
    topic.strip_prefix('=').unwrap_or(topic)
}

/// The records that the server tracks for a connection, and the lock id in each when it was last
/// read.
#[derive(Default)]
struct Tracked(Mutex<HashMap<String, Option<String>>>);

impl Tracked {
    fn records(&self) -> MutexGuard<'_, HashMap<String, Option<String>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A record that has changed, or all of them.
enum Invalidated {
    Record(String),
    All,
}

/// Reads every record that has changed, which makes the server track it again, and reports those
/// that have another holder now. An extend changes a record too.
async fn track(
    mut connection: MultiplexedConnection,
    tracked: Arc<Tracked>,
    mut invalidated: mpsc::UnboundedReceiver<Invalidated>,
    reports: Reports,
) {
    while let Some(changed) = invalidated.recv().await {
        let names = match changed {
            Invalidated::Record(name) => vec![name],
            Invalidated::All => tracked.records().keys().cloned().collect(),
        };
        for name in names {
            let Some(before) = tracked.records().get(&name).cloned() else { continue };
            let Ok(holder) = read_holder(&mut connection, &name).await else {
                // All records are read again on the next connection.
                return reports.lost();
            };
            if holder != before {
                if let Some(seen) = tracked.records().get_mut(&name) {
                    *seen = holder;
                }
                reports.notify(&topic_of_record(&name), None);
            }
        }
    }
}

/// Reads which lock id a record names.
async fn read_holder(
    connection: &mut MultiplexedConnection,
    name: &str,
) -> RedisResult<Option<String>> {
    let mut read = redis::cmd("GET");
    let record = read.arg(name).query_async::<Value>(connection).await?;
    Ok(match record {
        Value::BulkString(json) => record::lock_id(&json),
        _ => None,
    })
}

/// Handles a push message of the server. The connection calls it, so it must not block.
fn on_push(reports: &Reports, invalidated: &mpsc::UnboundedSender<Invalidated>, push: &PushInfo) {
    let text = |place: usize| match push.data.get(place) {
        Some(Value::BulkString(text)) => str::from_utf8(text).ok(),
        _ => None,
    };
    let (channel, age) = (text(0), text(1).and_then(parse_holder_age));
    match (&push.kind, channel) {
        (PushKind::Message | PushKind::SMessage, Some(channel)) => {
            reports.notify(channel, age);
        }
        (PushKind::Invalidate, _) => match push.data.first() {
            Some(Value::Array(names)) => {
                let names = names.iter().filter_map(super::reply::text);
                for name in names {
                    // This fails only if the connection is being replaced.
                    drop(invalidated.send(Invalidated::Record(name.to_owned())));
                }
            }
            // The database was flushed.
            _ => drop(invalidated.send(Invalidated::All)),
        },
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
    /// Whether the server tracks the records that this connection reads.
    is_tracking: bool,
    tracked: Arc<Tracked>,
    tracking: AbortHandle,
}

/// The task has a copy of the connection, which would stay open.
impl Drop for Subscriber {
    fn drop(&mut self) {
        self.tracking.abort();
    }
}

impl Subscriber {
    /// Sends one channel at a time, because every channel has its own answer.
    async fn send(&mut self, command: &str, channel: &str) -> RedisResult<()> {
        let mut call = redis::cmd(command);
        call.arg(channel).query_async::<Value>(&mut self.connection).await.map(drop)
    }
}
