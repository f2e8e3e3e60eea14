//! The task that keeps one connection open on which a server notifies of releases, for every backend
//! whose server has such connections.
//!
//! A backend brings a [`Transport`]: how to connect, subscribe and ping. Everything else is here:
//! connecting when the first waiter comes and again when the connection was lost, the back-off in
//! between, and which connection may still report.

use std::collections::HashMap;
use std::future::Future;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

use super::wake::{WakeHub, WakeUps};
use super::wake_desk::{Order, WakeDesk};
use crate::common::backoff::reconnect_delay;
use crate::common::error::Result;
use crate::common::key::Key;

/// How often a connection that says nothing is asked whether it still works.
const PING_INTERVAL: Duration = Duration::from_secs(5);

/// A connection that lived for so long worked: the next one need not wait. One that is lost sooner
/// counts as a failure, however well it began.
const LASTED: Duration = Duration::from_secs(10);

/// A server's way of notifying of releases.
pub(crate) trait Transport: Send + Sync + 'static {
    /// A connection that is listened to. Dropped, it is closed.
    type Connection: Send;

    /// The name under which the server notifies of a key.
    fn topic(&self, key: &Key) -> Result<String>;

    /// How long each of the calls below may take, [`connect`](Self::connect) excepted, which has limits
    /// of its own.
    fn timeout(&self) -> Duration;

    /// Opens a connection. It tells `reports` what it hears and when it ends.
    fn connect(
        &self,
        reports: Reports,
    ) -> impl Future<Output = Result<Self::Connection, Failure>> + Send;

    /// Subscribes to topics that this connection has not; answers when every later
    /// notification of them is received.
    fn subscribe(
        &self,
        connection: &mut Self::Connection,
        topics: &[Topic],
    ) -> impl Future<Output = Result<(), Failure>> + Send;

    /// Ends a subscription.
    fn unsubscribe(
        &self,
        connection: &mut Self::Connection,
        topic: &Topic,
    ) -> impl Future<Output = Result<(), Failure>> + Send;

    /// Asks whether the connection still works, and should still be used.
    fn ping(
        &self,
        connection: &mut Self::Connection,
    ) -> impl Future<Output = Result<(), Failure>> + Send;
}

/// What is subscribed to.
#[derive(Clone, Debug)]
pub(crate) struct Topic {
    pub(crate) name: String,
    #[cfg_attr(
        not(feature = "postgres"),
        expect(dead_code, reason = "a channel of Redis says it all by its name")
    )]
    pub(crate) key: Key,
}

/// Why a call of a [`Transport`] failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    /// The server refuses this one thing. The connection is as good as before.
    Refused,
    /// The connection must be replaced.
    Lost,
}

/// Subscribes to notifications, for the waiters of one backend.
#[derive(Debug)]
pub(crate) struct Listener {
    desk: WakeDesk,
    timeout: Duration,
}

impl Listener {
    /// Starts the task that owns the connection. It connects when the first waiter comes and ends with
    /// this value.
    pub(crate) fn start<T: Transport>(transport: T) -> Self {
        let (desk, commands) = WakeDesk::open();
        let (lost, losses) = mpsc::unbounded_channel();
        let timeout = transport.timeout();
        let shared = Arc::new(Shared {
            hub: desk.hub().clone(),
            keys: Mutex::default(),
            current: AtomicU64::new(NONE),
        });
        let task = Task {
            transport,
            shared,
            lost,
            connection: None,
            generation: NONE,
            failures: 0,
            next_at: Instant::now(),
            waiting: Vec::new(),
        };
        tokio::spawn(task.serve(commands, losses));
        Self { desk, timeout }
    }

    /// Subscribes to the notifications of a key; answers when every later one is received.
    /// `None` when that is not possible, or not in time.
    ///
    /// # Cancel safety
    ///
    /// Dropped, no subscription is left behind.
    pub(crate) async fn subscribe(&self, key: &Key) -> Option<WakeUps> {
        tokio::time::timeout(self.timeout, self.desk.subscribe(key)).await.ok().flatten()
    }
}

/// No connection has this number.
const NONE: u64 = 0;

#[derive(Debug)]
struct Shared {
    hub: WakeHub,
    /// The key of each topic. Only the task changes it.
    keys: Mutex<HashMap<String, Key>>,
    /// The connection that may report.
    current: AtomicU64,
}

impl Shared {
    fn keys(&self) -> MutexGuard<'_, HashMap<String, Key>> {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Where a connection reports to. What a connection says after it was given up is ignored.
#[derive(Clone, Debug)]
pub(crate) struct Reports {
    shared: Arc<Shared>,
    lost: mpsc::UnboundedSender<u64>,
    generation: u64,
}

impl Reports {
    /// The lock of a topic may be free.
    pub(crate) fn notify(&self, topic: &str) {
        if let Some(key) = self.key(topic) {
            self.shared.hub.wake(&key);
        }
    }

    /// The connection has ended, or no longer receives notifications.
    pub(crate) fn lost(&self) {
        // The task outlives the backend; after that the loss does not matter.
        self.lost.send(self.generation).unwrap_or_default();
    }

    /// Whether a topic is subscribed to.
    #[cfg(feature = "redis")]
    pub(crate) fn is_awaited(&self, topic: &str) -> bool {
        self.key(topic).is_some()
    }

    fn key(&self, topic: &str) -> Option<Key> {
        if self.generation != self.shared.current.load(Ordering::SeqCst) {
            return None;
        }
        self.shared.keys().get(topic).cloned()
    }
}

/// The task that owns the connection.
struct Task<T: Transport> {
    transport: T,
    shared: Arc<Shared>,
    lost: mpsc::UnboundedSender<u64>,
    connection: Option<Open<T::Connection>>,
    /// The number of the latest connection.
    generation: u64,
    /// How many connections in a row could not be had or did not last.
    failures: u32,
    /// When to ping, or without a connection when to connect.
    next_at: Instant,
    /// Who waits for the next connection.
    waiting: Vec<oneshot::Sender<bool>>,
}

struct Open<C> {
    inner: C,
    since: Instant,
}

impl<T: Transport> Task<T> {
    async fn serve(
        mut self,
        mut commands: mpsc::UnboundedReceiver<Order>,
        mut losses: mpsc::UnboundedReceiver<u64>,
    ) {
        loop {
            let is_awaited = !self.shared.keys().is_empty();
            tokio::select! {
                command = commands.recv() => match command {
                    None => return,
                    Some(Order::Subscribe { key, confirmed }) => {
                        self.subscribe(key, confirmed).await;
                    }
                    Some(Order::Idle { key }) => self.unsubscribe(&key).await,
                },
                // A connection that was given up may end at any later time.
                Some(generation) = losses.recv() => {
                    if self.connection.is_some() && generation == self.generation {
                        self.lose();
                    }
                }
                () = tokio::time::sleep_until(self.next_at), if is_awaited => {
                    match self.connection {
                        Some(_) => self.ping().await,
                        None => self.connect().await,
                    }
                }
            }
        }
    }

    async fn subscribe(&mut self, key: Key, confirmed: oneshot::Sender<bool>) {
        // No lock can have this key; the acquire reports it.
        let Ok(name) = self.transport.topic(&key) else { return };
        let is_known = self.shared.keys().insert(name.clone(), key.clone()).is_some();
        let Some(open) = &mut self.connection else {
            self.waiting.push(confirmed);
            return;
        };
        let subscribed = if is_known {
            Ok(())
        } else {
            let topics = [Topic { name: name.clone(), key }];
            let subscribing = self.transport.subscribe(&mut open.inner, &topics);
            within(self.transport.timeout(), subscribing).await
        };
        match subscribed {
            // A waiter that has gone needs no confirmation.
            Ok(()) => confirmed.send(true).unwrap_or_default(),
            Err(Failure::Refused) => {
                self.shared.keys().remove(&name);
                confirmed.send(false).unwrap_or_default();
            }
            Err(Failure::Lost) => {
                self.lose();
                self.waiting.push(confirmed);
            }
        }
    }

    async fn unsubscribe(&mut self, key: &Key) {
        if self.shared.hub.is_awaited(key) {
            return;
        }
        let Ok(name) = self.transport.topic(key) else { return };
        if self.shared.keys().remove(&name).is_none() {
            return;
        }
        if let Some(open) = &mut self.connection {
            let topic = Topic { name, key: key.clone() };
            let unsubscribing = self.transport.unsubscribe(&mut open.inner, &topic);
            // A subscription too many costs a message, nothing else.
            if within(self.transport.timeout(), unsubscribing).await == Err(Failure::Lost) {
                self.lose();
            }
        }
    }

    async fn ping(&mut self) {
        let Some(open) = &mut self.connection else { return };
        let ping = self.transport.ping(&mut open.inner);
        if within(self.transport.timeout(), ping).await.is_ok() {
            self.next_at = Instant::now() + PING_INTERVAL;
        } else {
            self.lose();
        }
    }

    /// Connects, with all subscriptions that are awaited.
    async fn connect(&mut self) {
        self.generation += 1;
        // From now on this connection may report, and no other.
        self.shared.current.store(self.generation, Ordering::SeqCst);
        let reports = Reports {
            shared: Arc::clone(&self.shared),
            lost: self.lost.clone(),
            generation: self.generation,
        };
        let connected = self.connect_and_subscribe(reports).await;
        let is_connected = connected.is_ok();
        match connected {
            Ok(inner) => {
                let since = Instant::now();
                self.connection = Some(Open { inner, since });
                self.next_at = since + PING_INTERVAL;
                self.shared.hub.set_working(true);
            }
            Err(_failure) => self.lose(),
        }
        for confirmed in self.waiting.drain(..) {
            confirmed.send(is_connected).unwrap_or_default();
        }
    }

    async fn connect_and_subscribe(&mut self, reports: Reports) -> Result<T::Connection, Failure> {
        let mut connection = self.transport.connect(reports).await?;
        let topics: Vec<Topic> = {
            let keys = self.shared.keys();
            let topic =
                |(name, key): (&String, &Key)| Topic { name: name.clone(), key: key.clone() };
            keys.iter().map(topic).collect()
        };
        self.transport.subscribe(&mut connection, &topics).await?;
        Ok(connection)
    }

    /// Gives the connection up. What is notified meanwhile is missed; until there is another one,
    /// polling serves.
    fn lose(&mut self) {
        // First of all: the end of this connection must not be taken for that of the next.
        self.shared.current.store(NONE, Ordering::SeqCst);
        self.shared.hub.set_working(false);
        let has_lasted = self.connection.take().is_some_and(|open| open.since.elapsed() >= LASTED);
        self.failures = if has_lasted { 0 } else { self.failures.saturating_add(1) };
        self.next_at = Instant::now() + reconnect_delay(self.failures);
    }
}

/// A call that takes too long counts as a lost connection: its answer may still arrive.
async fn within<T>(
    limit: Duration,
    call: impl Future<Output = Result<T, Failure>>,
) -> Result<T, Failure> {
    tokio::time::timeout(limit, call).await.unwrap_or(Err(Failure::Lost))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicUsize};

    use super::*;

    fn key(text: &str) -> Key {
        Key::new(text).expect("valid")
    }

    /// A server whose connections can be made to fail.
    #[derive(Default)]
    struct Server {
        opened: AtomicUsize,
        /// Every connection is lost as soon as it is there.
        hangs_up: AtomicBool,
        /// The next subscription loses its connection.
        loses_next: AtomicBool,
        /// The next subscription is refused.
        refuses_next: AtomicBool,
        reports: Mutex<Vec<Reports>>,
    }

    struct FakeTransport(Arc<Server>);

    impl Server {
        fn opened(&self) -> usize {
            self.opened.load(Ordering::SeqCst)
        }

        fn reports(&self, connection: usize) -> Reports {
            self.reports.lock().expect("no panic")[connection].clone()
        }
    }

    impl Transport for FakeTransport {
        type Connection = ();

        fn topic(&self, key: &Key) -> Result<String> {
            Ok(key.as_str().to_owned())
        }

        fn timeout(&self) -> Duration {
            Duration::from_secs(2)
        }

        async fn connect(&self, reports: Reports) -> Result<(), Failure> {
            // The virtual clock advances only while tasks sleep.
            tokio::time::sleep(Duration::from_millis(1)).await;
            self.0.opened.fetch_add(1, Ordering::SeqCst);
            if self.0.hangs_up.load(Ordering::SeqCst) {
                reports.lost();
            }
            self.0.reports.lock().expect("no panic").push(reports);
            Ok(())
        }

        async fn subscribe(&self, _open: &mut (), _topics: &[Topic]) -> Result<(), Failure> {
            if self.0.loses_next.swap(false, Ordering::SeqCst) {
                return Err(Failure::Lost);
            }
            if self.0.refuses_next.swap(false, Ordering::SeqCst) {
                return Err(Failure::Refused);
            }
            Ok(())
        }

        async fn unsubscribe(&self, _open: &mut (), _topic: &Topic) -> Result<(), Failure> {
            Ok(())
        }

        async fn ping(&self, _open: &mut ()) -> Result<(), Failure> {
            Ok(())
        }
    }

    fn start() -> (Listener, Arc<Server>) {
        let server = Arc::new(Server::default());
        (Listener::start(FakeTransport(Arc::clone(&server))), server)
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_that_was_given_up_cannot_end_the_next_one() {
        let (listener, server) = start();
        let first = listener.subscribe(&key("first")).await.expect("works");
        server.loses_next.store(true, Ordering::SeqCst);
        let mut second = listener.subscribe(&key("second")).await.expect("connected again");
        assert_eq!(server.opened(), 2);
        // The driver of the old connection notices its end only now.
        server.reports(0).lost();
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(server.opened(), 2, "the new connection was ended");
        assert!(first.are_working() && second.are_working());
        // Nor does the old one wake anybody.
        second.mark_seen();
        server.reports(0).notify("second");
        let woken = tokio::time::timeout(Duration::from_secs(1), second.woken()).await;
        assert!(woken.is_err(), "an old connection was believed");
        server.reports(1).notify("second");
        second.woken().await;
    }

    #[tokio::test(start_paused = true)]
    async fn connections_that_do_not_last_are_opened_less_and_less_often() {
        let (listener, server) = start();
        server.hangs_up.store(true, Ordering::SeqCst);
        let _waiting = listener.subscribe(&key("k")).await;
        tokio::time::sleep(Duration::from_mins(1)).await;
        let opened = server.opened();
        assert!((20..400).contains(&opened), "{opened} connections in a minute");
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_that_lasted_is_replaced_at_once() {
        let (listener, server) = start();
        let waiting = listener.subscribe(&key("k")).await.expect("works");
        for round in 1..20 {
            tokio::time::sleep(LASTED + Duration::from_secs(1)).await;
            server.reports(round - 1).lost();
            tokio::time::sleep(Duration::from_millis(5)).await;
            assert_eq!(server.opened(), round + 1);
            assert!(waiting.are_working());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_refused_subscription_leaves_the_connection_to_others() {
        let (listener, server) = start();
        let first = listener.subscribe(&key("first")).await.expect("works");
        server.refuses_next.store(true, Ordering::SeqCst);
        assert!(listener.subscribe(&key("second")).await.is_none());
        assert!(first.are_working());
        assert!(listener.subscribe(&key("second")).await.is_some(), "it may be tried again");
        assert_eq!(server.opened(), 1);
    }
}
