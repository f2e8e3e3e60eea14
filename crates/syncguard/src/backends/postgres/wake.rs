//! Wake-ups: one connection per backend that listens, and a sign at every awaited key.
//!
//! The sign is a shared advisory lock that the listening connection holds. A release tries the same
//! lock for itself: only when it does not get it somebody waits, and only then it notifies, after its
//! commit. Notifying makes commits wait for each other, so nobody pays for it when nobody waits.

use std::collections::HashMap;
use std::future::poll_fn;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, mpsc};
use tokio_postgres::types::Type;
use tokio_postgres::{AsyncMessage, Client};

use super::driver::Driver;
use super::pool::{Connector, Parameter};
use crate::common::backoff::reconnect_delay;
use crate::common::hash_id::number_of;
use crate::common::key::Key;
use crate::contract::wake::{WakeHub, WakeUps};
use crate::contract::wake_desk::{Order, WakeDesk};

/// Subscribes, and hears.
pub(super) struct Waker {
    desk: WakeDesk,
    channel: String,
    table: i32,
}

struct Shared {
    hub: WakeHub,
    /// Which key a payload is about. Only the connection's own task changes it.
    keys: Mutex<HashMap<String, Key>>,
    /// Which connection is listened to.
    generation: AtomicU64,
    /// It does not work any more.
    broken: Notify,
}

/// What a payload says: which key, without telling it.
fn payload(key: &Key) -> String {
    key.hash().as_str().to_owned()
}

impl Shared {
    fn keys(&self) -> MutexGuard<'_, HashMap<String, Key>> {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn hear(&self, payload: &str) {
        let key = self.keys().get(payload).cloned();
        if let Some(key) = key {
            self.hub.wake(&key);
        }
    }
}

impl Waker {
    /// Starts the task that owns the connection. It connects when somebody waits for the first time
    /// and ends with the backend.
    pub(super) fn start(connector: Arc<Connector>, channel: String, patience: Duration) -> Self {
        let (desk, orders) = WakeDesk::open();
        let shared = Arc::new(Shared {
            hub: desk.hub().clone(),
            keys: Mutex::default(),
            generation: AtomicU64::new(0),
            broken: Notify::new(),
        });
        let table = number_of(&channel).cast_signed();
        let listener =
            Listener { shared, connector, channel: channel.clone(), table, patience, client: None };
        tokio::spawn(listener.serve(orders));
        Self { desk, channel, table }
    }

    /// The number of the table, by which signs at different tables are told apart.
    pub(super) fn table(&self) -> i32 {
        self.table
    }

    /// Where and what is told when this key is free.
    pub(super) fn news(&self, key: &Key) -> (String, String) {
        (self.channel.clone(), payload(key))
    }

    /// Puts up the sign of a key; answers when it is up.
    pub(super) async fn subscribe(&self, key: &Key) -> Option<WakeUps> {
        self.desk.subscribe(key).await
    }
}

/// The task that owns the connection.
struct Listener {
    shared: Arc<Shared>,
    connector: Arc<Connector>,
    channel: String,
    table: i32,
    patience: Duration,
    client: Option<Client>,
}

impl Listener {
    async fn serve(mut self, mut orders: mpsc::UnboundedReceiver<Order>) {
        const PING_INTERVAL: Duration = Duration::from_secs(5);
        let mut failures = 0;
        loop {
            let is_awaited = !self.shared.keys().is_empty();
            let pause = match &self.client {
                None if is_awaited => reconnect_delay(failures),
                _ => PING_INTERVAL,
            };
            let order = tokio::select! {
                order = orders.recv() => order,
                () = self.shared.broken.notified() => {
                    self.shared.hub.set_working(false);
                    self.client = None;
                    continue;
                }
                () = tokio::time::sleep(pause) => {
                    if is_awaited && !self.is_alive().await {
                        self.shared.hub.set_working(false);
                        failures = if self.listen().await { 0 } else { failures + 1 };
                    }
                    continue;
                }
            };
            match order {
                None => return,
                Some(Order::Subscribe { key, confirmed }) => {
                    let known = self.shared.keys().insert(payload(&key), key.clone());
                    // A sign that is up must not be put up twice: it would stay after its end.
                    let is_up = (known.is_some() && self.client.is_some())
                        || self.put_up(&key).await
                        || self.listen().await;
                    // A waiter that has gone needs no confirmation.
                    confirmed.send(is_up).unwrap_or_default();
                }
                Some(Order::Idle { key }) => {
                    if self.shared.hub.is_awaited(&key) {
                        continue;
                    }
                    if self.shared.keys().remove(&payload(&key)).is_some() {
                        self.take_down(&key).await;
                    }
                }
            }
        }
    }

    /// Connects, listens, and puts up the signs of all keys that are awaited.
    async fn listen(&mut self) -> bool {
        self.client = None;
        // A pooler gives no session of one's own, so nothing can be heard through it.
        let Ok(Some((client, driver))) = self.connector.open(false).await else { return false };
        let generation = self.shared.generation.fetch_add(1, Ordering::Relaxed) + 1;
        tokio::spawn(drive(driver, Arc::clone(&self.shared), generation));
        let listen = format!("LISTEN \"{}\"", self.channel);
        if !matches!(self.within(client.batch_execute(&listen)).await, Some(Ok(()))) {
            return false;
        }
        self.client = Some(client);
        let keys: Vec<Key> = self.shared.keys().values().cloned().collect();
        for key in keys {
            if !self.put_up(&key).await {
                self.client = None;
                return false;
            }
        }
        self.shared.hub.set_working(true);
        true
    }

    async fn put_up(&self, key: &Key) -> bool {
        self.ask("SELECT pg_advisory_lock_shared($1, hashtext($2))", key).await
    }

    async fn take_down(&self, key: &Key) {
        // A sign too many costs a message, nothing else.
        self.ask("SELECT pg_advisory_unlock_shared($1, hashtext($2))", key).await;
    }

    async fn ask(&self, question: &str, key: &Key) -> bool {
        let Some(client) = &self.client else { return false };
        let text = key.as_str();
        let parameters: [(Parameter<'_>, Type); 2] =
            [(&self.table, Type::INT4), (&text, Type::TEXT)];
        matches!(self.within(client.query_typed(question, &parameters)).await, Some(Ok(_)))
    }

    async fn is_alive(&self) -> bool {
        let Some(client) = &self.client else { return false };
        matches!(self.within(client.batch_execute("")).await, Some(Ok(())))
    }

    async fn within<T>(&self, asking: impl Future<Output = T>) -> Option<T> {
        tokio::time::timeout(self.patience, asking).await.ok()
    }
}

/// Drives the connection and hears what it says, until it ends.
async fn drive(mut driver: Driver, shared: Arc<Shared>, generation: u64) {
    while let Some(message) = poll_fn(|context| driver.poll_message(context)).await {
        let is_current = generation == shared.generation.load(Ordering::Relaxed);
        match message {
            Ok(AsyncMessage::Notification(news)) if is_current => shared.hear(news.payload()),
            Ok(_) => {}
            Err(_cause) => break,
        }
    }
    if generation == shared.generation.load(Ordering::Relaxed) {
        // What was told meanwhile nobody knows; until it is back, polling serves.
        shared.broken.notify_one();
    }
}
