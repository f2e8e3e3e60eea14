//! Wake-ups: one connection per backend that hears of releases, one channel per awaited key.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use redis::aio::{ConnectionManager, ConnectionManagerConfig};
use redis::{Client, PushInfo, PushKind, RedisResult, Value};
use tokio::sync::{mpsc, oneshot};

use super::error;
use crate::common::error::ErrorCode;
use crate::common::key::Key;
use crate::contract::wake::{WakeHub, WakeUps};

/// Subscribes, and hears.
#[derive(Debug)]
pub(super) struct Waker {
    shared: Arc<Shared>,
    orders: mpsc::UnboundedSender<Order>,
}

#[derive(Debug)]
struct Shared {
    hub: WakeHub,
    /// Which key a channel is about. Only the connection's own task changes it.
    keys: Mutex<HashMap<String, Key>>,
    has_warned: AtomicBool,
}

/// What the connection's own task is told, in order.
#[derive(Debug)]
enum Order {
    /// Subscribe, and say when it is confirmed.
    Subscribe { key: Key, channel: String, confirmed: oneshot::Sender<bool> },
    /// Nobody waits for this key any more, unless somebody has come since.
    Idle { key: Key },
}

impl Shared {
    fn keys(&self) -> MutexGuard<'_, HashMap<String, Key>> {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hears what the server pushes. Called by the connection, so it must not block.
    fn hear(&self, push: &PushInfo) {
        match (&push.kind, push.data.first()) {
            (PushKind::Message, Some(Value::BulkString(channel))) => {
                let key =
                    str::from_utf8(channel).ok().and_then(|name| self.keys().get(name).cloned());
                if let Some(key) = key {
                    self.hub.wake(&key);
                }
            }
            // What was published meanwhile nobody knows; until it is back, polling serves.
            (PushKind::Disconnection, _) => self.hub.set_working(false),
            (PushKind::Subscribe, _) => self.hub.set_working(true),
            _ => {}
        }
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
    pub(super) fn start(client: Client, timeout: Duration) -> Self {
        let (orders, received) = mpsc::unbounded_channel();
        let idle = orders.downgrade();
        let hub = WakeHub::with_idle_hook(move |key: &Key| {
            if let Some(orders) = idle.upgrade() {
                // The task ends only after the backend.
                drop(orders.send(Order::Idle { key: key.clone() }));
            }
        });
        let shared =
            Arc::new(Shared { hub, keys: Mutex::default(), has_warned: AtomicBool::new(false) });
        tokio::spawn(serve(Arc::clone(&shared), client, timeout, received));
        Self { shared, orders }
    }

    /// Subscribes to the channel of a key; answers when the server has confirmed it.
    pub(super) async fn subscribe(&self, key: &Key, channel: String) -> Option<WakeUps> {
        let wake_ups = self.shared.hub.subscribe(key);
        let (confirmed, confirmation) = oneshot::channel();
        let key = key.clone();
        self.orders.send(Order::Subscribe { key, channel, confirmed }).ok()?;
        confirmation.await.unwrap_or(false).then_some(wake_ups)
    }
}

/// Follows orders one after the other, so that a subscription and its end cannot overtake each
/// other, and pings against a connection that is half open.
async fn serve(
    shared: Arc<Shared>,
    client: Client,
    timeout: Duration,
    mut orders: mpsc::UnboundedReceiver<Order>,
) {
    const PING_INTERVAL: Duration = Duration::from_secs(5);
    let mut connection: Option<ConnectionManager> = None;
    loop {
        let order = match tokio::time::timeout(PING_INTERVAL, orders.recv()).await {
            Ok(None) => return,
            Ok(Some(order)) => order,
            Err(_quiet) => {
                let is_awaited = !shared.keys().is_empty();
                if is_awaited && !is_alive(connection.as_mut()).await {
                    // The driver keeps a connection that only does not answer. Begin anew.
                    shared.hub.set_working(false);
                    connection = connect_again(&shared, &client, timeout).await;
                }
                continue;
            }
        };
        match order {
            Order::Subscribe { key, channel, confirmed } => {
                shared.keys().insert(channel.clone(), key);
                let subscribed = async {
                    if connection.is_none() {
                        connection = Some(connect(&shared, &client, timeout).await?);
                    }
                    let connected = connection.as_mut().expect("BUG: just connected");
                    connected.subscribe(channel).await
                };
                let subscribed: RedisResult<()> = subscribed.await;
                if let Err(cause) = &subscribed {
                    match error::map(cause, "subscribe").code() {
                        ErrorCode::AuthFailed => shared.warn_once(),
                        _ => connection = None,
                    }
                }
                // A waiter that has gone needs no confirmation.
                confirmed.send(subscribed.is_ok()).unwrap_or_default();
            }
            Order::Idle { key } => {
                let channel = {
                    let mut keys = shared.keys();
                    let of_key =
                        |(channel, of): (&String, &Key)| (*of == key).then(|| channel.clone());
                    let channel = keys.iter().find_map(of_key);
                    if shared.hub.is_awaited(&key) {
                        continue;
                    }
                    channel.inspect(|channel| drop(keys.remove(channel)))
                };
                if let (Some(connected), Some(channel)) = (&mut connection, channel) {
                    // A subscription too many costs a message, nothing else.
                    drop(connected.unsubscribe(channel).await);
                }
            }
        }
    }
}

async fn is_alive(connection: Option<&mut ConnectionManager>) -> bool {
    match connection {
        Some(connection) => redis::cmd("PING").query_async::<Value>(connection).await.is_ok(),
        None => false,
    }
}

/// A new connection with all subscriptions that are awaited, if the server can be reached.
async fn connect_again(
    shared: &Arc<Shared>,
    client: &Client,
    timeout: Duration,
) -> Option<ConnectionManager> {
    let channels: Vec<String> = shared.keys().keys().cloned().collect();
    let mut connection = connect(shared, client, timeout).await.ok()?;
    connection.subscribe(channels).await.ok()?;
    Some(connection)
}

async fn connect(
    shared: &Arc<Shared>,
    client: &Client,
    timeout: Duration,
) -> RedisResult<ConnectionManager> {
    let hears = Arc::clone(shared);
    let config = ConnectionManagerConfig::new()
        .set_connection_timeout(Some(timeout))
        .set_response_timeout(Some(timeout))
        .set_min_delay(Duration::from_millis(20))
        .set_max_delay(Duration::from_secs(1))
        .set_automatic_resubscription()
        .set_push_sender(move |push: PushInfo| {
            hears.hear(&push);
            Ok::<(), redis::aio::SendError>(())
        });
    let connecting = ConnectionManager::new_with_config(client.clone(), config);
    // The driver tries again a few times; a waiter must not wait for all of them.
    match tokio::time::timeout(timeout, connecting).await {
        Ok(connected) => connected,
        Err(_elapsed) => Err(std::io::Error::from(std::io::ErrorKind::TimedOut).into()),
    }
}
