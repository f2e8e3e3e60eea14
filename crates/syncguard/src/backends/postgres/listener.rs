//! Notifications of releases: one connection per backend that listens, and markers for awaited
//! keys.
//!
//! A marker is a shared advisory lock that the listening connection holds. A release tries to take
//! the same lock exclusively. Only if that fails is there a waiter, and the release notifies after
//! its commit. Notifying makes commits wait for each other, so a release without waiters does not
//! notify.
//!
//! A listener marks a limited number of keys, because all applications of a server share its lock
//! table. For more keys it holds one marker that stands for any key, and every release notifies.

use std::collections::HashSet;
use std::future::{Future, poll_fn};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use tokio::time::Instant;
use tokio_postgres::AsyncMessage;
use tokio_postgres::types::Type;

use super::connector::Connector;
use super::driver::Driver;
use super::error;
use super::names::Names;
use super::pool::{ListeningClient, Pool};
use super::statements::Value;
use crate::common::error::Result;
use crate::common::hash_id::{HashId, number_of};
use crate::common::holder::BreakNote;
use crate::common::key::Key;
use crate::common::lock_id::LockId;
use crate::contract::break_notes::BreakNotes;
use crate::contract::listener::{Failure, Listener, Reports, Topic, Transport, parse_holder_age};
use crate::contract::listener_handle::Interest;
use crate::contract::notifier::Subscription;

/// How many keys one listener marks individually, at most.
const MOST_MARKED_KEYS: usize = 64;

/// Returns how many keys one listener marks individually: half of the locks that the server has
/// room for per connection, so that all listeners together leave half of the lock table free.
fn most_marked_keys(max_locks_per_transaction: i32) -> usize {
    let room = usize::try_from(max_locks_per_transaction).unwrap_or(0) / 2;
    room.clamp(1, MOST_MARKED_KEYS)
}

/// Subscribes to releases, and knows the channel of their notifications.
pub(super) struct PostgresListener {
    listener: Listener,
    channel: Channel,
    break_notes: Arc<BreakNotes>,
}

/// What the payload of a break, and the topic of those who watch for one, begin with.
const BROKEN: &str = "!";

/// The channel and the markers for releases of one lock table.
#[derive(Clone)]
pub(super) struct Channel {
    pub(super) name: String,
    /// The first number of the marker of a single key; the second is the hash of the key.
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

    /// Returns the payload of the notification of a break: the hash of the key, that of the lock
    /// id, and the note.
    pub(super) fn break_payload(key: &Key, lock_id: HashId, note: &BreakNote) -> String {
        format!("{BROKEN}{} {lock_id} {}", key.hash_id(), note.to_text())
    }

    /// Returns the payload of a notification: the hash of the key, and how long ago its holder
    /// began to wait.
    pub(super) fn payload(key: &Key, holder_age: Option<Duration>) -> String {
        let hash = key.hash_id();
        match holder_age {
            Some(age) => format!("{hash} {}", age.as_millis()),
            None => hash.as_str().to_owned(),
        }
    }
}

impl PostgresListener {
    /// Starts the task that owns the connection. It connects when the first waiter comes and ends
    /// with the backend.
    pub(super) fn start(pool: Arc<Pool>, connector: Arc<Connector>, names: Names) -> Self {
        let channel = Channel::new(names.channel());
        let timeout = pool.response_timeout();
        let break_notes = Arc::<BreakNotes>::default();
        let transport = ListenNotify {
            pool,
            connector,
            names,
            channel: channel.clone(),
            timeout,
            break_notes: Arc::clone(&break_notes),
        };
        Self { listener: Listener::start(transport), channel, break_notes }
    }

    pub(super) fn channel(&self) -> &Channel {
        &self.channel
    }

    /// Whether a waiter of this backend is subscribed to a key.
    pub(super) fn is_awaited(&self, key: &Key) -> bool {
        self.listener.is_awaited(key)
    }

    /// Subscribes to the releases of a key. Returns when the key is marked.
    pub(super) async fn subscribe(&self, key: &Key) -> Option<Subscription> {
        self.listener.subscribe(key, Interest::Release).await
    }

    /// Subscribes to breaks of a key. Returns when the connection listens.
    pub(super) async fn watch(&self, key: &Key) -> Option<Subscription> {
        self.listener.subscribe(key, Interest::Change).await
    }

    /// Returns the note of a break that was notified while this backend listened.
    pub(super) fn break_note(&self, lock_id: &LockId) -> Option<BreakNote> {
        self.break_notes.of(lock_id.hash_id())
    }
}

/// Notifications through `LISTEN` and `NOTIFY`.
struct ListenNotify {
    pool: Arc<Pool>,
    connector: Arc<Connector>,
    names: Names,
    channel: Channel,
    timeout: Duration,
    break_notes: Arc<BreakNotes>,
}

/// A connection that listens.
struct Listening {
    shared: Arc<ListeningClient>,
    opened: Instant,
    /// The topics whose keys are marked individually.
    marked: HashSet<String>,
    /// How many may be.
    most_marked: usize,
    /// The other topics. While there are any, the marker for any key is held.
    unmarked: HashSet<String>,
}

const ROOM: &str = "SELECT current_setting('max_locks_per_transaction')::int4";
const MARK: &str = "SELECT pg_advisory_lock_shared($1, hashtext(key)) FROM unnest($2) AS key";
const UNMARK: &str = "SELECT pg_advisory_unlock_shared($1, hashtext(key)) FROM unnest($2) AS key";
const MARK_ANY: &str = "SELECT pg_advisory_lock_shared($1, 0)";
const UNMARK_ANY: &str = "SELECT pg_advisory_unlock_shared($1, 0)";
/// Waits for releases of these keys that have already checked the markers but not committed yet.
const AWAIT_RELEASES: &str = "SELECT pg_advisory_lock_shared($1, hashtext(key)), \
                              pg_advisory_unlock_shared($1, hashtext(key)) FROM unnest($2) AS key";

impl ListenNotify {
    async fn ask(
        &self,
        connection: &Listening,
        question: &str,
        number: i32,
        keys: Option<&[String]>,
    ) -> Result<(), Failure> {
        let keys: Option<Vec<&str>> = keys.map(|keys| keys.iter().map(String::as_str).collect());
        let (number, keys) = (Value::Int4(number), keys.as_deref().map(Value::Texts));
        let mut parameters: Vec<(super::statements::Parameter<'_>, Type)> =
            vec![(&number, Type::INT4)];
        if let Some(keys) = &keys {
            parameters.push((keys, Type::TEXT_ARRAY));
        }
        self.within(async {
            let client = connection.shared.client.lock().await;
            client.query_typed(question, &parameters).await
        })
        .await
        .map(drop)
    }

    /// Limits a call by the timeout. A statement that the server refused leaves the connection
    /// usable.
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

    fn topic(&self, key: &Key, interest: Interest) -> Result<String> {
        Ok(match interest {
            Interest::Release => key.hash_id().as_str().to_owned(),
            Interest::Change => format!("{BROKEN}{}", key.hash_id()),
        })
    }

    fn timeout(&self) -> Duration {
        self.timeout
    }

    async fn connect(&self, reports: Reports) -> Result<Listening, Failure> {
        // Behind a pooler there is no dedicated session to listen on.
        let opened = self.pool.open_listening().await;
        let Ok(Some((client, driver))) = opened else { return Err(Failure::Lost) };
        let break_notes = Arc::clone(&self.break_notes);
        let driving = tokio::spawn(drive(driver, reports.clone(), break_notes)).abort_handle();
        let listen = format!("LISTEN \"{}\"", self.channel.name);
        let listening = async {
            client.batch_execute(&listen).await?;
            client.query_typed(ROOM, &[]).await
        };
        let room = match self.within(listening).await {
            Ok(rows) => rows.first().and_then(|row| row.try_get(0).ok()).unwrap_or(0),
            Err(failure) => {
                // A standby refuses LISTEN.
                self.connector.forget_host();
                return Err(failure);
            }
        };
        let lose = Box::new(move || {
            driving.abort();
            reports.lost();
        });
        let client = Arc::new(tokio::sync::Mutex::new(client));
        let shared = Arc::new(ListeningClient { client, lose, is_lost: AtomicBool::new(false) });
        self.pool.share(&shared).await;
        Ok(Listening {
            shared,
            opened: Instant::now(),
            marked: HashSet::new(),
            most_marked: most_marked_keys(room),
            unmarked: HashSet::new(),
        })
    }

    async fn subscribe(&self, connection: &mut Listening, topics: &[Topic]) -> Result<(), Failure> {
        let room = connection.most_marked.saturating_sub(connection.marked.len());
        // A break always notifies, so those who watch for one need no marker. Some may have one
        // already, from a call in which another was refused.
        let needs_marker = |topic: &&Topic| {
            topic.interest == Interest::Release
                && !connection.marked.contains(&topic.name)
                && !connection.unmarked.contains(&topic.name)
        };
        let all: Vec<&Topic> = topics.iter().filter(needs_marker).collect();
        let (own, others) = all.split_at(room.min(all.len()));
        if !own.is_empty() {
            let (number, keys) = (self.channel.key_space, self.lock_keys(own)?);
            let marked = self.ask(connection, MARK, number, Some(&keys)).await;
            if marked == Err(Failure::Refused) {
                // The markers before the one that failed outlive the statement.
                self.ask(connection, UNMARK, number, Some(&keys)).await?;
            }
            marked?;
            connection.marked.extend(own.iter().map(|topic| topic.name.clone()));
        }
        if !others.is_empty() {
            let keys = self.lock_keys(others)?;
            if connection.unmarked.is_empty() {
                self.ask(connection, MARK_ANY, self.channel.any_key, None).await?;
            }
            connection.unmarked.extend(others.iter().map(|topic| topic.name.clone()));
            let number = self.channel.key_space;
            let awaited = self.ask(connection, AWAIT_RELEASES, number, Some(&keys)).await;
            if awaited == Err(Failure::Refused) {
                for topic in others {
                    self.unsubscribe(connection, topic).await?;
                }
            }
            awaited?;
        }
        Ok(())
    }

    async fn unsubscribe(&self, connection: &mut Listening, topic: &Topic) -> Result<(), Failure> {
        if connection.marked.remove(&topic.name) {
            let keys = self.lock_keys(&[topic])?;
            let number = self.channel.key_space;
            return self.ask(connection, UNMARK, number, Some(&keys)).await;
        }
        if connection.unmarked.remove(&topic.name) && connection.unmarked.is_empty() {
            return self.ask(connection, UNMARK_ANY, self.channel.any_key, None).await;
        }
        Ok(())
    }

    async fn ping(&self, connection: &mut Listening) -> Result<(), Failure> {
        if connection.opened.elapsed() >= self.connector.max_connection_age() {
            return Err(Failure::Lost);
        }
        self.within(async { connection.shared.client.lock().await.batch_execute("").await }).await
    }
}

/// Drives the connection and reports its notifications, until it ends.
async fn drive(mut driver: Driver, reports: Reports, break_notes: Arc<BreakNotes>) {
    while let Some(message) = poll_fn(|context| driver.poll_message(context)).await {
        match message {
            Ok(AsyncMessage::Notification(notification)) => {
                let payload = notification.payload();
                let (topic, rest) = payload.split_once(' ').unwrap_or((payload, ""));
                if topic.starts_with(BROKEN)
                    && let Some((lock_id, note)) = rest.split_once(' ')
                    && let Some(lock_id) = HashId::parse(lock_id)
                {
                    // First, so that those who are notified find it.
                    break_notes.add(lock_id, BreakNote::parse(note));
                }
                reports.notify(topic, parse_holder_age(rest));
            }
            Ok(_) => {}
            Err(_cause) => break,
        }
    }
    reports.lost();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markers_take_at_most_half_of_a_connections_share_of_the_lock_table() {
        for (room, most) in [(0, 1), (-1, 1), (1, 1), (10, 5), (64, 32), (128, 64), (4096, 64)] {
            assert_eq!(most_marked_keys(room), most, "{room}");
        }
    }
}
