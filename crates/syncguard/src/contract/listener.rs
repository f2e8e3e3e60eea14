//! A task that keeps one connection open on which a server sends notifications of releases.
//!
//! A backend provides a [`Transport`]: how to connect, subscribe and ping. This module does the
//! rest: it connects when the first waiter subscribes, reconnects with back-off when the connection
//! is lost, and ignores reports of connections that it has replaced.

use std::collections::{HashMap, HashSet};
use std::future::Future;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

use super::listener_handle::{Command, Interest, ListenerHandle, Notifiers};
use super::notifier::Subscription;
use crate::common::backoff::reconnect_delay;
use crate::common::error::Result;
use crate::common::key::Key;

/// How often to ping a connection.
const PING_INTERVAL: Duration = Duration::from_secs(5);

/// How long a connection must last to count as a success, so that the next one is opened without
/// delay. A connection that is lost sooner counts as a failure.
const LASTED: Duration = Duration::from_secs(10);

/// How a server sends notifications of releases.
pub(crate) trait Transport: Send + Sync + 'static {
    /// A connection that receives notifications. Dropping it closes it.
    type Connection: Send;

    /// Returns the name under which the server notifies of a key. It differs between interests.
    fn topic(&self, key: &Key, interest: Interest) -> Result<String>;

    /// Returns how long each of the calls below may take, except [`connect`](Self::connect), which
    /// has its own limits.
    fn timeout(&self) -> Duration;

    /// Opens a connection. It reports notifications and its end to `reports`.
    fn connect(
        &self,
        reports: Reports,
    ) -> impl Future<Output = Result<Self::Connection, Failure>> + Send;

    /// Subscribes to topics that this connection is not yet subscribed to. When it returns, no
    /// later notification is missed.
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

    /// Checks that the connection still works and should still be used.
    fn ping(
        &self,
        connection: &mut Self::Connection,
    ) -> impl Future<Output = Result<(), Failure>> + Send;
}

/// A topic to subscribe to.
#[derive(Clone, Debug)]
pub(crate) struct Topic {
    pub(crate) name: String,
    #[cfg_attr(
        not(feature = "postgres"),
        expect(dead_code, reason = "the Redis transport needs only the name")
    )]
    pub(crate) key: Key,
    pub(crate) interest: Interest,
}

/// Why a call of a [`Transport`] failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    /// The server refused this one request. The connection still works.
    Refused,
    /// The connection must be replaced.
    Lost,
}

/// Subscribes the waiters of one backend to notifications.
#[derive(Debug)]
pub(crate) struct Listener {
    handle: ListenerHandle,
    timeout: Duration,
}

impl Listener {
    /// Starts the task that owns the connection. It connects when the first waiter subscribes and
    /// ends when this value is dropped.
    pub(crate) fn start<T: Transport>(transport: T) -> Self {
        let (handle, commands) = ListenerHandle::open();
        let (lost, losses) = mpsc::unbounded_channel();
        let timeout = transport.timeout();
        let shared = Arc::new(ListenerShared {
            notifiers: handle.notifiers().clone(),
            keys: Mutex::default(),
            current: AtomicU64::new(NONE),
        });
        let task = ListenerTask {
            transport,
            shared,
            lost,
            connection: None,
            generation: NONE,
            failures: 0,
            next_at: Instant::now(),
            waiting: Vec::new(),
            unconfirmed: HashSet::new(),
        };
        tokio::spawn(task.serve(commands, losses));
        Self { handle, timeout }
    }

    /// Subscribes to the notifications of a key. When it returns, no later notification is missed.
    /// Returns `None` if that is not possible, or not in time.
    ///
    /// # Cancel safety
    ///
    /// If you drop this future, no subscription is left behind.
    pub(crate) async fn subscribe(&self, key: &Key, interest: Interest) -> Option<Subscription> {
        let subscribing = self.handle.subscribe(key, interest);
        tokio::time::timeout(self.timeout, subscribing).await.ok().flatten()
    }

    /// Whether a waiter is subscribed to a key.
    #[cfg(feature = "postgres")]
    pub(crate) fn is_awaited(&self, key: &Key) -> bool {
        self.handle.notifiers().releases.is_awaited(key)
    }
}

/// A generation that no connection has.
const NONE: u64 = 0;

#[derive(Debug)]
struct ListenerShared {
    notifiers: Notifiers,
    /// The key and the interest of each topic. Only the task changes it.
    keys: Mutex<HashMap<String, (Key, Interest)>>,
    /// The generation of the connection that may report.
    current: AtomicU64,
}

impl ListenerShared {
    fn keys(&self) -> MutexGuard<'_, HashMap<String, (Key, Interest)>> {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Receives the reports of one connection. Reports of a connection that was replaced are ignored.
#[derive(Clone, Debug)]
pub(crate) struct Reports {
    shared: Arc<ListenerShared>,
    lost: mpsc::UnboundedSender<u64>,
    generation: u64,
}

impl Reports {
    /// Reports a release, whose holder began to wait `holder_age` ago, or another change of the
    /// lock of a topic.
    pub(crate) fn notify(&self, topic: &str, holder_age: Option<Duration>) {
        if let Some((key, interest)) = self.key(topic) {
            self.shared.notifiers.of(interest).notify(&key, holder_age);
        }
    }

    /// Reports that the connection has ended, or no longer receives notifications.
    pub(crate) fn lost(&self) {
        // This fails only if the task has ended; then the loss does not matter.
        self.lost.send(self.generation).unwrap_or_default();
    }

    /// Returns whether a topic has a subscription.
    #[cfg(feature = "redis")]
    pub(crate) fn is_awaited(&self, topic: &str) -> bool {
        self.key(topic).is_some()
    }

    fn key(&self, topic: &str) -> Option<(Key, Interest)> {
        if self.generation != self.shared.current.load(Ordering::SeqCst) {
            return None;
        }
        self.shared.keys().get(topic).cloned()
    }
}

/// The task that owns the connection.
struct ListenerTask<T: Transport> {
    transport: T,
    shared: Arc<ListenerShared>,
    lost: mpsc::UnboundedSender<u64>,
    connection: Option<Open<T::Connection>>,
    /// The generation of the latest connection.
    generation: u64,
    /// How many connections in a row could not be opened or did not last.
    failures: u32,
    /// When to ping, or to connect if there is no connection.
    next_at: Instant,
    /// The subscribers that wait for the next connection, with their topics.
    waiting: Vec<(String, oneshot::Sender<bool>)>,
    /// The topics that no connection has confirmed yet.
    unconfirmed: HashSet<String>,
}

struct Open<C> {
    inner: C,
    since: Instant,
}

impl<T: Transport> ListenerTask<T> {
    async fn serve(
        mut self,
        mut commands: mpsc::UnboundedReceiver<Command>,
        mut losses: mpsc::UnboundedReceiver<u64>,
    ) {
        loop {
            let is_awaited = !self.shared.keys().is_empty();
            tokio::select! {
                command = commands.recv() => match command {
                    None => return,
                    Some(Command::Subscribe { key, interest, confirmed }) => {
                        self.subscribe(key, interest, confirmed).await;
                    }
                    Some(Command::Idle { key, interest }) => self.unsubscribe(&key, interest).await,
                },
                // A replaced connection may report its end at any later time.
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

    async fn subscribe(&mut self, key: Key, interest: Interest, confirmed: oneshot::Sender<bool>) {
        // The key is invalid for this backend; the acquire reports the error.
        let Ok(name) = self.transport.topic(&key, interest) else { return };
        let is_known = self.shared.keys().insert(name.clone(), (key.clone(), interest)).is_some();
        if !is_known {
            self.unconfirmed.insert(name.clone());
        }
        let Some(open) = &mut self.connection else {
            self.waiting.push((name, confirmed));
            return;
        };
        let subscribed = if is_known {
            Ok(())
        } else {
            let topics = [Topic { name: name.clone(), key, interest }];
            let subscribing = self.transport.subscribe(&mut open.inner, &topics);
            within(self.transport.timeout(), subscribing).await
        };
        match subscribed {
            Ok(()) => {
                self.unconfirmed.remove(&name);
                // This fails if the waiter is gone; then it needs no confirmation.
                confirmed.send(true).unwrap_or_default();
            }
            Err(Failure::Refused) => {
                self.forget(&name);
                confirmed.send(false).unwrap_or_default();
            }
            Err(Failure::Lost) => {
                self.lose();
                self.waiting.push((name, confirmed));
            }
        }
    }

    async fn unsubscribe(&mut self, key: &Key, interest: Interest) {
        if self.shared.notifiers.of(interest).is_awaited(key) {
            return;
        }
        let Ok(name) = self.transport.topic(key, interest) else { return };
        if !self.forget(&name) {
            return;
        }
        if let Some(open) = &mut self.connection {
            let topic = Topic { name, key: key.clone(), interest };
            let unsubscribing = self.transport.unsubscribe(&mut open.inner, &topic);
            // If this is refused, the extra subscription only costs messages.
            if within(self.transport.timeout(), unsubscribing).await == Err(Failure::Lost) {
                self.lose();
            }
        }
    }

    /// Removes a topic. Returns whether it was there.
    fn forget(&mut self, name: &str) -> bool {
        self.unconfirmed.remove(name);
        self.shared.keys().remove(name).is_some()
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

    /// Connects and subscribes to all awaited topics.
    async fn connect(&mut self) {
        self.generation += 1;
        // From now on only this connection may report.
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
                self.unconfirmed.clear();
                self.shared.notifiers.set_working(true);
            }
            Err(_failure) => self.lose(),
        }
        for (name, confirmed) in self.waiting.drain(..) {
            let is_subscribed = is_connected && self.shared.keys().contains_key(&name);
            confirmed.send(is_subscribed).unwrap_or_default();
        }
    }

    async fn connect_and_subscribe(&mut self, reports: Reports) -> Result<T::Connection, Failure> {
        let mut connection = self.transport.connect(reports).await?;
        let topics: Vec<Topic> = {
            let keys = self.shared.keys();
            let topic = |(name, (key, interest)): (&String, &(Key, Interest))| Topic {
                name: name.clone(),
                key: key.clone(),
                interest: *interest,
            };
            keys.iter().map(topic).collect()
        };
        match self.transport.subscribe(&mut connection, &topics).await {
            Err(Failure::Refused) => self.subscribe_each(&mut connection, &topics).await?,
            subscribed => subscribed?,
        }
        Ok(connection)
    }

    /// Subscribes to each topic by itself, because one of them was refused. Its subscribers get no
    /// confirmation. One that was confirmed before relies on notifications, so the refusal of its
    /// topic is an error.
    async fn subscribe_each(
        &mut self,
        connection: &mut T::Connection,
        topics: &[Topic],
    ) -> Result<(), Failure> {
        for topic in topics {
            match self.transport.subscribe(connection, std::slice::from_ref(topic)).await {
                Err(Failure::Refused) if self.unconfirmed.contains(&topic.name) => {
                    self.forget(&topic.name);
                }
                subscribed => subscribed?,
            }
        }
        Ok(())
    }

    /// Drops the connection. Waiters poll until there is another one, because notifications in
    /// between are missed.
    fn lose(&mut self) {
        // First, so that the end of this connection is not taken for the end of the next one.
        self.shared.current.store(NONE, Ordering::SeqCst);
        self.shared.notifiers.set_working(false);
        let has_lasted = self.connection.take().is_some_and(|open| open.since.elapsed() >= LASTED);
        self.failures = if has_lasted { 0 } else { self.failures.saturating_add(1) };
        self.next_at = Instant::now() + reconnect_delay(self.failures);
    }
}

/// Formats a holder's age for a Redis notification: whole milliseconds, or an empty text.
#[cfg(feature = "redis")]
pub(crate) fn holder_age_text(age: Option<Duration>) -> String {
    age.map_or_else(String::new, |age| age.as_millis().to_string())
}

/// Parses the holder's age in a notification. Returns `None` for any other text, because any client
/// may send a notification.
pub(crate) fn parse_holder_age(text: &str) -> Option<Duration> {
    text.parse().ok().map(Duration::from_millis)
}

/// Limits the time of a call. A timeout counts as a lost connection, because the response may still
/// arrive later.
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
        /// Every connection is lost as soon as it is open.
        hangs_up: AtomicBool,
        /// The next subscription loses its connection.
        loses_next: AtomicBool,
        /// The next subscription is refused.
        refuses_next: AtomicBool,
        /// The topics that are refused.
        refused: Mutex<Vec<String>>,
        /// The topics that were unsubscribed.
        unsubscribed: Mutex<Vec<String>>,
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

        fn topic(&self, key: &Key, _interest: Interest) -> Result<String> {
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

        async fn subscribe(&self, _open: &mut (), topics: &[Topic]) -> Result<(), Failure> {
            let refused = self.0.refused.lock().expect("no panic").clone();
            if topics.iter().any(|topic| refused.contains(&topic.name)) {
                return Err(Failure::Refused);
            }
            if self.0.loses_next.swap(false, Ordering::SeqCst) {
                return Err(Failure::Lost);
            }
            if self.0.refuses_next.swap(false, Ordering::SeqCst) {
                return Err(Failure::Refused);
            }
            Ok(())
        }

        async fn unsubscribe(&self, _open: &mut (), topic: &Topic) -> Result<(), Failure> {
            self.0.unsubscribed.lock().expect("no panic").push(topic.name.clone());
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
    async fn a_topic_that_is_refused_while_connecting_keeps_no_other_from_it() {
        let (listener, server) = start();
        let refuse = |names: &[&str]| {
            let names = names.iter().map(|name| (*name).to_owned()).collect();
            *server.refused.lock().expect("no panic") = names;
        };
        let (a, b, c) = (key("a"), key("b"), key("c"));
        refuse(&["b"]);
        let (first, refused, other) = tokio::join!(
            listener.subscribe(&a, Interest::Release),
            listener.subscribe(&b, Interest::Release),
            listener.subscribe(&c, Interest::Release),
        );
        let (first, other) = (first.expect("works"), other.expect("works"));
        assert!(refused.is_none());
        assert_eq!(server.opened(), 1);
        // The same after the connection is lost.
        let lose = async |connection: usize| {
            server.reports(connection).lost();
            while first.is_working() {
                tokio::task::yield_now().await;
            }
        };
        lose(0).await;
        assert!(listener.subscribe(&b, Interest::Release).await.is_none());
        assert!(first.is_working() && other.is_working());
        assert_eq!(server.opened(), 2);
        // A topic that was confirmed is not given up: the connection counts as lost.
        refuse(&["a"]);
        lose(1).await;
        assert!(listener.subscribe(&b, Interest::Release).await.is_none());
        assert!(!first.is_working());
        refuse(&[]);
        tokio::time::sleep(Duration::from_secs(5)).await;
        assert!(first.is_working());
    }

    #[tokio::test(start_paused = true)]
    async fn a_replaced_connection_cannot_end_the_next_one() {
        let (listener, server) = start();
        let first = listener.subscribe(&key("first"), Interest::Release).await.expect("works");
        server.loses_next.store(true, Ordering::SeqCst);
        let mut second =
            listener.subscribe(&key("second"), Interest::Release).await.expect("connected again");
        assert_eq!(server.opened(), 2);
        // The driver of the old connection notices its end only now.
        server.reports(0).lost();
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(server.opened(), 2, "the new connection was ended");
        assert!(first.is_working() && second.is_working());
        // The old connection does not wake a waiter either.
        second.mark_seen();
        server.reports(0).notify("second", None);
        let woken = tokio::time::timeout(Duration::from_secs(1), second.notified()).await;
        assert!(woken.is_err(), "an old connection woke a waiter");
        server.reports(1).notify("second", None);
        second.notified().await;
    }

    #[tokio::test(start_paused = true)]
    async fn connections_that_do_not_last_are_reopened_with_back_off() {
        let (listener, server) = start();
        server.hangs_up.store(true, Ordering::SeqCst);
        let _waiting = listener.subscribe(&key("k"), Interest::Release).await;
        tokio::time::sleep(Duration::from_mins(1)).await;
        let opened = server.opened();
        assert!((20..400).contains(&opened), "{opened} connections in a minute");
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_that_lasted_is_replaced_at_once() {
        let (listener, server) = start();
        let waiting = listener.subscribe(&key("k"), Interest::Release).await.expect("works");
        for round in 1..20 {
            tokio::time::sleep(LASTED + Duration::from_secs(1)).await;
            server.reports(round - 1).lost();
            tokio::time::sleep(Duration::from_millis(5)).await;
            assert_eq!(server.opened(), round + 1);
            assert!(waiting.is_working());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_topic_is_unsubscribed_when_its_last_waiter_is_gone() {
        let (listener, server) = start();
        let one = listener.subscribe(&key("k"), Interest::Release).await.expect("works");
        let other = listener.subscribe(&key("k"), Interest::Release).await.expect("works");
        let unsubscribed = async || {
            tokio::time::sleep(Duration::from_secs(1)).await;
            server.unsubscribed.lock().expect("no panic").clone()
        };
        #[cfg(feature = "redis")]
        assert!(server.reports(0).is_awaited("k") && !server.reports(0).is_awaited("other"));
        drop(one);
        assert_eq!(unsubscribed().await, Vec::<String>::new());
        #[cfg(feature = "postgres")]
        assert!(listener.is_awaited(&key("k")));
        drop(other);
        assert_eq!(unsubscribed().await, ["k"]);
        #[cfg(feature = "redis")]
        assert!(!server.reports(0).is_awaited("k"));
        #[cfg(feature = "postgres")]
        assert!(!listener.is_awaited(&key("k")));
        assert_eq!(server.opened(), 1, "the connection is kept");
    }

    #[cfg(feature = "redis")]
    #[test]
    fn the_age_of_a_holder_is_written_as_it_is_read() {
        let age = Some(Duration::from_millis(1_500));
        assert_eq!(holder_age_text(age), "1500");
        assert_eq!(parse_holder_age(&holder_age_text(age)), age);
        assert_eq!(holder_age_text(None), "");
    }

    #[test]
    fn the_age_of_a_holder_is_a_number_of_milliseconds() {
        assert_eq!(parse_holder_age("1500"), Some(Duration::from_millis(1_500)));
        for foreign in ["", "-1", "1.5", "soon"] {
            assert_eq!(parse_holder_age(foreign), None, "{foreign}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_refused_subscription_keeps_the_connection_open_for_others() {
        let (listener, server) = start();
        let first = listener.subscribe(&key("first"), Interest::Release).await.expect("works");
        server.refuses_next.store(true, Ordering::SeqCst);
        assert!(listener.subscribe(&key("second"), Interest::Release).await.is_none());
        assert!(first.is_working());
        assert!(
            listener.subscribe(&key("second"), Interest::Release).await.is_some(),
            "it may be tried again"
        );
        assert_eq!(server.opened(), 1);
    }
}
