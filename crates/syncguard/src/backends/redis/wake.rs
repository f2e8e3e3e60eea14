//! Wake-ups: one connection per backend that hears of releases, one channel per awaited key.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{PushInfo, PushKind, RedisError, RedisResult, Value};
use sha1_smol::Sha1;
use tokio::sync::{Notify, mpsc};

use super::config::Names;
use super::error;
use super::topology::Finder;
use crate::common::backoff::reconnect_delay;
use crate::common::error::{ErrorCode, Result};
use crate::common::key::Key;
use crate::contract::wake::{WakeHub, WakeUps};
use crate::contract::wake_desk::{Order, WakeDesk};

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

/// Subscribes, and hears.
#[derive(Debug)]
pub(super) struct Waker {
    desk: WakeDesk,
}

#[derive(Debug)]
struct Shared {
    hub: WakeHub,
    /// Which key a channel is about. Only the connection's own task changes it.
    keys: Mutex<HashMap<String, Key>>,
    has_warned: AtomicBool,
    /// Which connection is listened to.
    generation: AtomicU64,
    /// It does not work any more.
    broken: Notify,
}

impl Shared {
    fn keys(&self) -> MutexGuard<'_, HashMap<String, Key>> {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hears what the server pushes. Called by the connection, so it must not block.
    fn hear(&self, generation: u64, push: &PushInfo) {
        if generation != self.generation.load(Ordering::Relaxed) {
            return;
        }
        match (&push.kind, push.data.first()) {
            (PushKind::Message | PushKind::SMessage, Some(Value::BulkString(channel))) => {
                if let Some(key) = self.key_of(channel) {
                    self.hub.wake(&key);
                }
            }
            // What was published meanwhile nobody knows; until it is back, polling serves.
            (PushKind::Disconnection, _) => self.broken.notify_one(),
            // A channel that is still awaited was taken away: its slot has moved to another node.
            (PushKind::SUnsubscribe, Some(Value::BulkString(channel)))
                if self.key_of(channel).is_some() =>
            {
                self.broken.notify_one();
            }
            _ => {}
        }
    }

    fn key_of(&self, channel: &[u8]) -> Option<Key> {
        str::from_utf8(channel).ok().and_then(|name| self.keys().get(name).cloned())
    }

    fn warn_once(&self) {
        if !self.has_warned.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                "redis does not let this client subscribe; waiters poll instead of being woken"
            );
        }
    }
}

impl Waker {
    /// Starts the task that owns the connection. It connects when somebody waits for the first time
    /// and ends with the backend.
    pub(super) fn start(finder: Arc<Finder>, channels: Channels) -> Self {
        let (desk, orders) = WakeDesk::open();
        let shared = Arc::new(Shared {
            hub: desk.hub().clone(),
            keys: Mutex::default(),
            has_warned: AtomicBool::new(false),
            generation: AtomicU64::new(0),
            broken: Notify::new(),
        });
        tokio::spawn(serve(shared, finder, channels, orders));
        Self { desk }
    }

    /// Subscribes to the channel of a key; answers when the server has confirmed it.
    pub(super) async fn subscribe(&self, key: &Key) -> Option<WakeUps> {
        self.desk.subscribe(key).await
    }
}

/// Follows orders, pings against a connection that is half open, and connects again while somebody
/// waits.
async fn serve(
    shared: Arc<Shared>,
    finder: Arc<Finder>,
    channels: Channels,
    mut orders: mpsc::UnboundedReceiver<Order>,
) {
    const PING_INTERVAL: Duration = Duration::from_secs(5);
    let mut connection: Option<Subscriber> = None;
    let mut failures = 0;
    loop {
        let is_awaited = !shared.keys().is_empty();
        let pause = match connection {
            None if is_awaited => reconnect_delay(failures),
            _ => PING_INTERVAL,
        };
        let order = tokio::select! {
            order = orders.recv() => order,
            () = shared.broken.notified() => {
                shared.hub.set_working(false);
                connection = None;
                continue;
            }
            () = tokio::time::sleep(pause) => {
                if is_awaited && !is_alive(connection.as_mut()).await {
                    // The driver keeps a connection that only does not answer. Begin anew.
                    shared.hub.set_working(false);
                    connection = connect_again(&shared, &finder).await.ok();
                    failures = if connection.is_some() { 0 } else { failures + 1 };
                }
                continue;
            }
        };
        match order {
            None => return,
            Some(Order::Subscribe { key, confirmed }) => {
                // A key that no lock can have needs no wake-ups: who waits for it is told.
                let Ok(channel) = channels.of_key(&key) else { continue };
                shared.keys().insert(channel.clone(), key);
                let mut subscribed = match &mut connection {
                    Some(connection) => connection.subscribe(&channel).await,
                    None => Err(io::Error::from(io::ErrorKind::NotConnected).into()),
                };
                if subscribed.as_ref().is_err_and(|cause| !is_forbidden(cause)) {
                    // With this channel among the others; perhaps to another server.
                    let connected = connect_again(&shared, &finder).await;
                    subscribed = connected.map(|connected| connection = Some(connected));
                }
                if let Err(cause) = &subscribed {
                    if is_forbidden(cause) {
                        shared.warn_once();
                    } else {
                        connection = None;
                    }
                }
                // A waiter that has gone needs no confirmation.
                confirmed.send(subscribed.is_ok()).unwrap_or_default();
            }
            Some(Order::Idle { key }) => {
                let Ok(channel) = channels.of_key(&key) else { continue };
                if shared.hub.is_awaited(&key) || shared.keys().remove(&channel).is_none() {
                    continue;
                }
                if let Some(connected) = &mut connection {
                    // A subscription too many costs a message, nothing else.
                    drop(connected.unsubscribe(&channel).await);
                }
            }
        }
    }
}

/// A connection that subscribes. On a Cluster the channels are sharded: they live on the node that
/// has the slot of our prefix, which is the one we are connected to.
struct Subscriber {
    connection: MultiplexedConnection,
    is_sharded: bool,
}

impl Subscriber {
    async fn subscribe(&mut self, channel: &str) -> RedisResult<()> {
        self.send(if self.is_sharded { "SSUBSCRIBE" } else { "SUBSCRIBE" }, channel).await
    }

    async fn unsubscribe(&mut self, channel: &str) -> RedisResult<()> {
        self.send(if self.is_sharded { "SUNSUBSCRIBE" } else { "UNSUBSCRIBE" }, channel).await
    }

    /// One channel at a time, because every channel has an answer of its own.
    async fn send(&mut self, command: &str, channel: &str) -> RedisResult<()> {
        let mut call = redis::cmd(command);
        call.arg(channel).query_async::<Value>(&mut self.connection).await.map(drop)
    }
}

/// Whether the user may not subscribe.
fn is_forbidden(cause: &RedisError) -> bool {
    error::map(cause, "subscribe").code() == ErrorCode::AuthFailed
}

async fn is_alive(connection: Option<&mut Subscriber>) -> bool {
    match connection {
        Some(subscriber) => {
            let ping = redis::cmd("PING").query_async::<Value>(&mut subscriber.connection).await;
            ping.is_ok()
        }
        None => false,
    }
}

/// A new connection with all subscriptions that are awaited.
async fn connect_again(shared: &Arc<Shared>, finder: &Arc<Finder>) -> RedisResult<Subscriber> {
    let hears = Arc::clone(shared);
    // What an old connection has to say is of no interest any more.
    let generation = shared.generation.fetch_add(1, Ordering::Relaxed) + 1;
    let config = finder.connection_config().set_push_sender(move |push: PushInfo| {
        hears.hear(generation, &push);
        Ok::<(), redis::aio::SendError>(())
    });
    let connection = finder.connect(config).await?;
    let mut subscriber = Subscriber { connection, is_sharded: finder.is_cluster() };
    let channels: Vec<String> = shared.keys().keys().cloned().collect();
    for channel in channels {
        subscriber.subscribe(&channel).await?;
    }
    shared.hub.set_working(true);
    Ok(subscriber)
}
