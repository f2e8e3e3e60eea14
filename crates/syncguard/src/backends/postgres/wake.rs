//! Notifications of releases: one connection per backend that listens, and a marker at awaited keys.
//!
//! The marker is a shared advisory lock that the listening connection holds. A release tries the same
//! lock for itself: only when it does not get it a waiter is there, and only then it notifies, after its
//! commit. Notifying makes commits wait for each other, so a release without waiters does not notify.
//!
//! A listener marks a bounded number of keys, because the server's lock table is shared by all its
//! applications. With more it holds one marker that stands for any key, and every release notifies.

use std::collections::HashSet;
use std::future::{Future, poll_fn};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use tokio_postgres::types::Type;
use tokio_postgres::{AsyncMessage, Client};

use super::connector::Connector;
use super::driver::Driver;
use super::error;
use super::names::Names;
use super::statements::Value;
use crate::common::error::Result;
use crate::common::hash_id::number_of;
use crate::common::key::Key;
use crate::contract::listener::{Failure, Listener, Reports, Topic, Transport};
use crate::contract::wake::WakeUps;

/// How many keys one listener marks each by itself.
const MOST_MARKED_KEYS: usize = 64;

/// Subscribes to releases, and knows how they are notified of.
pub(super) struct Waker {
    listener: Listener,
    channel: Channel,
}

/// Where releases of one lock table are notified of.
#[derive(Clone)]
pub(super) struct Channel {
    pub(super) name: String,
    /// The first number of the markers of single keys; the second is the hash of the key.
    pub(super) key_space: i32,
    /// The first number of the marker that stands for any key; the second is 0.
    pub(super) any_key: i32,
}

impl Channel {
    pub(super) fn new(name: String) -> Self {
        let key_space = number_of(&name).cast_signed();
        let any_key = number_of(&format!("{name} any key")).cast_signed();
        Self { name, key_space, any_key }
    }

    /// The payload of a notification: which key, without telling it.
    pub(super) fn payload(key: &Key) -> String {
        key.hash().as_str().to_owned()
    }
}

impl Waker {
    /// Starts the task that owns the connection. It connects when the first waiter comes and ends with
    /// the backend.
    pub(super) fn start(connector: Arc<Connector>, names: Names, timeout: Duration) -> Self {
        let channel = Channel::new(names.channel());
        let transport = ListenNotify { connector, names, channel: channel.clone(), timeout };
        Self { listener: Listener::start(transport), channel }
    }

    pub(super) fn channel(&self) -> &Channel {
        &self.channel
    }

    /// Marks a key; answers when it is marked.
    pub(super) async fn subscribe(&self, key: &Key) -> Option<WakeUps> {
        self.listener.subscribe(key).await
    }
}

/// Notifications by `LISTEN`.
struct ListenNotify {
    connector: Arc<Connector>,
    names: Names,
    channel: Channel,
    timeout: Duration,
}

/// A connection that listens.
struct Listening {
    client: Client,
    opened: Instant,
    /// The topics whose keys are marked each by itself.
    marked: HashSet<String>,
    /// The others. While there are any, the marker for any key is up.
    unmarked: HashSet<String>,
}

const MARK: &str = "SELECT pg_advisory_lock_shared($1, hashtext(key)) FROM unnest($2) AS key";
const UNMARK: &str = "SELECT pg_advisory_unlock_shared($1, hashtext(key)) FROM unnest($2) AS key";
const MARK_ANY: &str = "SELECT pg_advisory_lock_shared($1, 0)";
const UNMARK_ANY: &str = "SELECT pg_advisory_unlock_shared($1, 0)";
/// Waits for releases of these keys that have looked for markers already and are not committed yet.
const AWAIT_RELEASES: &str = "SELECT pg_advisory_lock_shared($1, hashtext(key)), \
                              pg_advisory_unlock_shared($1, hashtext(key)) FROM unnest($2) AS key";

impl ListenNotify {
    async fn ask(
        &self,
        client: &Client,
        question: &str,
        number: i32,
        keys: Option<&[String]>,
    ) -> Result<(), Failure> {
        let (number, keys) = (Value::Int4(number), keys.map(Value::Texts));
        let mut parameters: Vec<(super::statements::Parameter<'_>, Type)> =
            vec![(&number, Type::INT4)];
        if let Some(keys) = &keys {
            parameters.push((keys, Type::TEXT_ARRAY));
        }
        self.within(client.query_typed(question, &parameters)).await.map(drop)
    }

    /// A statement that the server refused leaves the connection as it was.
    async fn within<T>(
        &self,
        asking: impl Future<Output = Result<T, tokio_postgres::Error>>,
    ) -> Result<T, Failure> {
        match tokio::time::timeout(self.timeout, asking).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(cause)) if error::ends_statement_only(&cause) => Err(Failure::Refused),
            Ok(Err(_)) | Err(_) => Err(Failure::Lost),
        }
    }

    fn lock_keys(&self, topics: &[&Topic]) -> Result<Vec<String>, Failure> {
        let keys = topics.iter().map(|topic| self.names.lock_key(&topic.key));
        keys.collect::<Result<_>>().map_err(|_error| Failure::Refused)
    }
}

impl Transport for ListenNotify {
    type Connection = Listening;

    fn topic(&self, key: &Key) -> Result<String> {
        Ok(Channel::payload(key))
    }

    fn timeout(&self) -> Duration {
        self.timeout
    }

    async fn connect(&self, reports: Reports) -> Result<Listening, Failure> {
        // A pooler gives no session of one's own, so nothing can be listened to through it.
        let opened = self.connector.open(false).await;
        let Ok(Some((client, driver))) = opened else { return Err(Failure::Lost) };
        tokio::spawn(drive(driver, reports));
        let listen = format!("LISTEN \"{}\"", self.channel.name);
        if let Err(failure) = self.within(client.batch_execute(&listen)).await {
            // A standby refuses it.
            self.connector.forget_host();
            return Err(failure);
        }
        Ok(Listening {
            client,
            opened: Instant::now(),
            marked: HashSet::new(),
            unmarked: HashSet::new(),
        })
    }

    async fn subscribe(&self, connection: &mut Listening, topics: &[Topic]) -> Result<(), Failure> {
        let room = MOST_MARKED_KEYS.saturating_sub(connection.marked.len());
        let all: Vec<&Topic> = topics.iter().collect();
        let (own, others) = all.split_at(room.min(all.len()));
        if !own.is_empty() {
            let keys = self.lock_keys(own)?;
            self.ask(&connection.client, MARK, self.channel.key_space, Some(&keys)).await?;
            connection.marked.extend(own.iter().map(|topic| topic.name.clone()));
        }
        if !others.is_empty() {
            let keys = self.lock_keys(others)?;
            if connection.unmarked.is_empty() {
                self.ask(&connection.client, MARK_ANY, self.channel.any_key, None).await?;
            }
            connection.unmarked.extend(others.iter().map(|topic| topic.name.clone()));
            let number = self.channel.key_space;
            self.ask(&connection.client, AWAIT_RELEASES, number, Some(&keys)).await?;
        }
        Ok(())
    }

    async fn unsubscribe(&self, connection: &mut Listening, topic: &Topic) -> Result<(), Failure> {
        if connection.marked.remove(&topic.name) {
            let keys = self.lock_keys(&[topic])?;
            let number = self.channel.key_space;
            return self.ask(&connection.client, UNMARK, number, Some(&keys)).await;
        }
        if connection.unmarked.remove(&topic.name) && connection.unmarked.is_empty() {
            return self.ask(&connection.client, UNMARK_ANY, self.channel.any_key, None).await;
        }
        Ok(())
    }

    async fn ping(&self, connection: &mut Listening) -> Result<(), Failure> {
        if connection.opened.elapsed() >= self.connector.max_connection_age() {
            return Err(Failure::Lost);
        }
        self.within(connection.client.batch_execute("")).await
    }
}

/// Drives the connection and reports what it says, until it ends.
async fn drive(mut driver: Driver, reports: Reports) {
    while let Some(message) = poll_fn(|context| driver.poll_message(context)).await {
        match message {
            Ok(AsyncMessage::Notification(notification)) => reports.notify(notification.payload()),
            Ok(_) => {}
            Err(_cause) => break,
        }
    }
    reports.lost();
}
