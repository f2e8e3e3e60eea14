//! A connection on which a server sends notifications. The shards of a node share one.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{Cmd, PushInfo, PushKind, RedisResult, Value};
use tokio::sync::mpsc;
use tokio::task::AbortHandle;
use tokio::time::Instant;

use super::record;
use super::topology::Resolver;
use crate::contract::listener::{Reports, parse_holder_age};

/// A connection that subscribes. On a Cluster the channels are sharded: they are on the node that
/// owns their slot, which is the one that this connection leads to.
pub(super) struct PushConnection {
    connection: MultiplexedConnection,
    is_sharded: bool,
    /// Whether the server tracks the records that this connection reads.
    is_tracking: AtomicBool,
    topics: Arc<PushTopics>,
    answered_at: Mutex<Instant>,
    tracking: AbortHandle,
}

/// The topics of a connection.
#[derive(Default)]
struct PushTopics {
    is_dead: AtomicBool,
    by_name: Mutex<HashMap<String, TopicState>>,
}

struct TopicState {
    reports: Reports,
    /// The lock id in a tracked record when it was last read.
    holder: Option<String>,
}

impl PushTopics {
    fn topics(&self) -> MutexGuard<'_, HashMap<String, TopicState>> {
        self.by_name.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn reports(&self, topic: &str) -> Option<Reports> {
        Some(self.topics().get(topic)?.reports.clone())
    }

    /// Reports to everyone who uses the connection that it no longer works.
    fn die(&self) {
        self.is_dead.store(true, Ordering::SeqCst);
        for topic in self.topics().values() {
            topic.reports.lost();
        }
    }
}

/// Ends the connection unless the call that it was made for is answered.
struct Unanswered<'a>(Option<&'a PushTopics>);

impl Drop for Unanswered<'_> {
    fn drop(&mut self) {
        if let Some(topics) = self.0 {
            topics.die();
        }
    }
}

/// A record that has changed, or all of them.
enum Invalidated {
    Record(String),
    All,
}

impl PushConnection {
    /// Connects to the server in charge.
    pub(super) async fn open(resolver: &Arc<Resolver>) -> RedisResult<Arc<Self>> {
        let topics = Arc::<PushTopics>::default();
        let (invalidated, received) = mpsc::unbounded_channel();
        let config = resolver.connection_config().set_push_sender({
            let topics = Arc::clone(&topics);
            move |push: PushInfo| {
                on_push(&topics, &invalidated, &push);
                Ok::<(), redis::aio::SendError>(())
            }
        });
        let connection = resolver.connect(config).await?.connection;
        let tracking = track(connection.clone(), Arc::clone(&topics), received);
        Ok(Arc::new(Self {
            connection,
            is_sharded: resolver.is_cluster(),
            is_tracking: AtomicBool::new(false),
            topics,
            answered_at: Mutex::new(Instant::now()),
            tracking: tokio::spawn(tracking).abort_handle(),
        }))
    }

    pub(super) fn is_alive(&self) -> bool {
        !self.topics.is_dead.load(Ordering::SeqCst)
    }

    /// Subscribes to a channel. One at a time, because every channel has its own answer.
    pub(super) async fn subscribe(&self, channel: &str, reports: &Reports) -> RedisResult<()> {
        self.add(channel, reports, None);
        let command = if self.is_sharded { "SSUBSCRIBE" } else { "SUBSCRIBE" };
        let answer = self.call(redis::cmd(command).arg(channel)).await;
        if answer.is_err() {
            self.forget(channel);
        }
        answer.map(drop)
    }

    pub(super) async fn unsubscribe(&self, channel: &str) -> RedisResult<()> {
        self.forget(channel);
        let command = if self.is_sharded { "SUNSUBSCRIBE" } else { "UNSUBSCRIBE" };
        self.call(redis::cmd(command).arg(channel)).await.map(drop)
    }

    /// Asks the server to report the next change of a record, by reading it.
    pub(super) async fn track(&self, record: &str, reports: &Reports) -> RedisResult<()> {
        if !self.is_tracking.load(Ordering::SeqCst) {
            self.call(redis::cmd("CLIENT").arg("TRACKING").arg("ON")).await?;
            self.is_tracking.store(true, Ordering::SeqCst);
        }
        // Added first, so that no change after the read is missed.
        let topic = topic_of_record(record);
        self.add(&topic, reports, None);
        match self.call(redis::cmd("GET").arg(record)).await {
            Ok(value) => {
                if let Some(state) = self.topics.topics().get_mut(&topic) {
                    // A change in the meantime has set a newer one.
                    state.holder = state.holder.take().or_else(|| holder_in(value));
                }
                Ok(())
            }
            Err(cause) => {
                self.forget(&topic);
                Err(cause)
            }
        }
    }

    /// Stops reporting a topic. The server forgets a record when it changes next.
    pub(super) fn forget(&self, topic: &str) {
        self.topics.topics().remove(topic);
    }

    /// Checks that the server still answers, unless it has just done so. The driver keeps a
    /// connection that has stopped answering.
    pub(super) async fn ping(&self) -> RedisResult<()> {
        const RECENT: Duration = Duration::from_secs(2);
        let answered_at = *self.answered_at.lock().unwrap_or_else(PoisonError::into_inner);
        if answered_at.elapsed() < RECENT {
            return Ok(());
        }
        self.call(&redis::cmd("PING")).await.map(drop)
    }

    fn add(&self, topic: &str, reports: &Reports, holder: Option<String>) {
        let state = TopicState { reports: reports.clone(), holder };
        self.topics.topics().insert(topic.to_owned(), state);
    }

    /// Sends a command. If it is not answered, or not in the caller's time, the connection ends for
    /// everyone.
    async fn call(&self, command: &Cmd) -> RedisResult<Value> {
        let mut unanswered = Unanswered(Some(&self.topics));
        let answer = command.query_async::<Value>(&mut self.connection.clone()).await;
        if answer.as_ref().err().is_none_or(|cause| cause.code().is_some()) {
            unanswered.0 = None;
            *self.answered_at.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
        }
        answer
    }
}

/// The task has a copy of the connection, which would stay open.
impl Drop for PushConnection {
    fn drop(&mut self) {
        self.tracking.abort();
    }
}

/// The topic of a record. It differs from all channels, which contain no such character.
pub(super) fn topic_of_record(lock_key: &str) -> String {
    format!("={lock_key}")
}

pub(super) fn record_of_topic(topic: &str) -> &str {
    topic.strip_prefix('=').unwrap_or(topic)
}

/// Reads every record that has changed, which makes the server track it again, and reports those
/// that have another holder now. An extend changes a record too.
async fn track(
    mut connection: MultiplexedConnection,
    topics: Arc<PushTopics>,
    mut invalidated: mpsc::UnboundedReceiver<Invalidated>,
) {
    while let Some(changed) = invalidated.recv().await {
        let names = match changed {
            Invalidated::Record(name) => vec![topic_of_record(&name)],
            Invalidated::All => {
                let topics = topics.topics();
                topics.keys().filter(|topic| topic.starts_with('=')).cloned().collect()
            }
        };
        for topic in names {
            let before = match topics.topics().get(&topic) {
                Some(state) => state.holder.clone(),
                None => continue,
            };
            let mut read = redis::cmd("GET");
            let answer = read.arg(record_of_topic(&topic)).query_async::<Value>(&mut connection);
            let holder = match answer.await {
                Ok(record) => holder_in(record),
                // The shard of the record may have moved to another node, which it is then read
                // on. The other shards stay.
                Err(cause) if cause.code().is_some() => {
                    if let Some(reports) = topics.reports(&topic) {
                        reports.lost();
                    }
                    continue;
                }
                // All records are read again on the next connection.
                Err(_lost) => return topics.die(),
            };
            if holder != before
                && let Some(state) = topics.topics().get_mut(&topic)
            {
                state.holder = holder;
                state.reports.notify(&topic, None);
            }
        }
    }
}

/// Returns which lock id a record names.
fn holder_in(record: Value) -> Option<String> {
    match record {
        Value::BulkString(json) => record::lock_id(&json),
        _ => None,
    }
}

/// Handles a push message of the server. The connection calls it, so it must not block.
fn on_push(topics: &PushTopics, invalidated: &mpsc::UnboundedSender<Invalidated>, push: &PushInfo) {
    let text = |place: usize| match push.data.get(place) {
        Some(Value::BulkString(text)) => str::from_utf8(text).ok(),
        _ => None,
    };
    let (channel, age) = (text(0), text(1).and_then(parse_holder_age));
    match (&push.kind, channel) {
        (PushKind::Message | PushKind::SMessage, Some(channel)) => {
            if let Some(reports) = topics.reports(channel) {
                reports.notify(channel, age);
            }
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
        (PushKind::Disconnection, _) => topics.die(),
        // The server ended a subscription that is still needed: the slot has moved to another node.
        (PushKind::SUnsubscribe, Some(channel)) => {
            if let Some(reports) = topics.reports(channel)
                && reports.is_awaited(channel)
            {
                reports.lost();
            }
        }
        _ => {}
    }
}
