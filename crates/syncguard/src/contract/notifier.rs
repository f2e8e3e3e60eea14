//! Subscriptions to releases of a key, and the notifier in which a backend keeps them.

use std::collections::HashMap;
use std::fmt;
use std::future::pending;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use tokio::sync::watch;

use crate::common::key::Key;
use crate::common::sync::{Mutex, MutexGuard};

/// A subscription to notifications that one key may be free. Drop it to unsubscribe.
pub struct Subscription {
    /// Every change of the value is a notification.
    ///
    /// `None` only while the subscription is being dropped.
    receiver: Option<watch::Receiver<Latest>>,
    notifier: Arc<Topics>,
    key: Key,
}

/// The latest state of a key's notifications.
#[derive(Clone, Copy, Debug)]
struct Latest {
    /// Whether notifications arrive.
    is_working: bool,
    /// The holder's age in the latest notification.
    holder_age: Option<Duration>,
    /// How many notifications of releases there were.
    count: u64,
}

impl Latest {
    fn add(&mut self, holder_age: Option<Duration>) {
        self.holder_age = holder_age;
        self.count += 1;
    }
}

impl Subscription {
    /// Waits for a notification that the key may be free, since the last one that was seen.
    ///
    /// Returns how long ago the holder that released the lock began to wait for it, if that is
    /// known. Waiters that began later try later.
    ///
    /// # Cancel safety
    ///
    /// No notification is lost if you drop this future.
    pub async fn notified(&mut self) -> Option<Duration> {
        if let Some(receiver) = &mut self.receiver
            && receiver.changed().await.is_ok()
        {
            return receiver.borrow().holder_age;
        }
        // The notifier keeps the sender as long as this subscription exists.
        pending().await
    }

    /// Returns how many notifications of releases there were, seen or not. Only differences matter.
    pub(crate) fn count(&self) -> u64 {
        self.receiver.as_ref().map_or(0, |receiver| receiver.borrow().count)
    }

    /// Marks all notifications so far as seen.
    pub fn mark_seen(&mut self) {
        if let Some(receiver) = &mut self.receiver {
            receiver.mark_unchanged();
        }
    }

    /// Returns whether this is certainly the only subscription to its key, in any process.
    #[must_use]
    pub fn is_alone(&self) -> bool {
        let topics = self.notifier.lock();
        self.notifier.sees_everybody
            && topics.get(&self.key).is_none_or(|sender| sender.receiver_count() <= 1)
    }

    /// Returns whether notifications arrive at the moment. While they do not, a waiter must poll.
    #[must_use]
    pub fn is_working(&self) -> bool {
        self.receiver.as_ref().is_some_and(|receiver| receiver.borrow().is_working)
    }
}

impl fmt::Debug for Subscription {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Subscription").field("key", &self.key).finish_non_exhaustive()
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        let mut topics = self.notifier.lock();
        // Under the mutex, so that of two concurrent drops one sees that it is the last.
        drop(self.receiver.take());
        if topics.get(&self.key).is_some_and(|sender| sender.receiver_count() == 0) {
            topics.remove(&self.key);
            self.notifier.count.store(topics.len(), Ordering::SeqCst);
            drop(topics);
            if let Some(on_idle) = &self.notifier.on_idle {
                on_idle(&self.key);
            }
        }
    }
}

/// The subscriptions of one backend, by key. Keys without a waiter take no space.
///
/// A backend calls [`notify`](Self::notify) after a release has become visible.
#[derive(Clone)]
pub struct Notifier {
    topics: Arc<Topics>,
}

type IdleHook = Box<dyn Fn(&Key) + Send + Sync>;

#[derive(Default)]
struct Topics {
    by_key: Mutex<HashMap<Key, watch::Sender<Latest>>>,
    /// Whether every waiter of every process subscribes here.
    sees_everybody: bool,
    /// Whether notifications do not arrive at the moment.
    are_broken: AtomicBool,
    /// Called with each key that no longer has a waiter.
    on_idle: Option<IdleHook>,
    /// The size of the map, so that a release takes no mutex while there is no waiter.
    count: AtomicUsize,
}

impl Topics {
    fn lock(&self) -> MutexGuard<'_, HashMap<Key, watch::Sender<Latest>>> {
        self.by_key.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Notifier {
    /// Creates an empty notifier for a store that other processes share.
    #[must_use]
    pub fn new() -> Self {
        Self { topics: Arc::default() }
    }

    /// Creates an empty notifier for a store that lives in this process, so that every waiter
    /// subscribes here.
    #[must_use]
    pub fn in_process() -> Self {
        Self { topics: Arc::new(Topics { sees_everybody: true, ..Topics::default() }) }
    }

    /// Creates an empty notifier for a store that other processes share, with a hook that is called
    /// with each key that no longer has a waiter.
    ///
    /// A new waiter may have subscribed by the time the hook runs: check
    /// [`is_awaited`](Self::is_awaited).
    pub fn with_idle_hook(on_idle: impl Fn(&Key) + Send + Sync + 'static) -> Self {
        let on_idle: Option<IdleHook> = Some(Box::new(on_idle));
        Self { topics: Arc::new(Topics { on_idle, ..Topics::default() }) }
    }

    /// Returns how many subscriptions to `key` there are.
    #[must_use]
    pub fn subscribers(&self, key: &Key) -> u32 {
        let count = self.topics.lock().get(key).map_or(0, watch::Sender::receiver_count);
        u32::try_from(count).unwrap_or(u32::MAX)
    }

    /// Returns whether `key` has a waiter.
    #[must_use]
    pub fn is_awaited(&self, key: &Key) -> bool {
        self.topics.lock().contains_key(key)
    }

    /// Subscribes to the notifications of `key` from now on.
    #[must_use]
    pub fn subscribe(&self, key: &Key) -> Subscription {
        let mut topics = self.topics.lock();
        let is_working = !self.topics.are_broken.load(Ordering::SeqCst);
        let latest = Latest { is_working, holder_age: None, count: 0 };
        let sender = topics.entry(key.clone()).or_insert_with(|| watch::Sender::new(latest));
        let receiver = sender.subscribe();
        self.topics.count.store(topics.len(), Ordering::SeqCst);
        Subscription {
            receiver: Some(receiver),
            notifier: Arc::clone(&self.topics),
            key: key.clone(),
        }
    }

    /// Wakes every waiter of `key`, and passes on the
    /// [`holder_age`](crate::backend::ReleaseRequest::holder_age) of the release.
    pub fn notify(&self, key: &Key, holder_age: Option<Duration>) {
        if self.topics.count.load(Ordering::SeqCst) > 0
            && let Some(sender) = self.topics.lock().get(key)
        {
            sender.send_modify(|latest| latest.add(holder_age));
        }
    }

    /// Wakes every waiter of each key for which the closure returns `Some` with the holder's age,
    /// if that is known.
    #[cfg(feature = "sqlite")]
    pub(crate) fn notify_matching(&self, holder_age_of: impl Fn(&Key) -> Option<Option<Duration>>) {
        for (key, sender) in self.topics.lock().iter() {
            if let Some(holder_age) = holder_age_of(key) {
                sender.send_modify(|latest| latest.add(holder_age));
            }
        }
    }

    /// Sets whether notifications arrive.
    ///
    /// When they begin to arrive, every waiter wakes, because releases may have been missed. When
    /// they stop, no waiter wakes: the store is probably unreachable, so a try would fail.
    pub fn set_working(&self, is_working: bool) {
        let topics = self.topics.lock();
        self.topics.are_broken.store(!is_working, Ordering::SeqCst);
        for sender in topics.values() {
            sender.send_if_modified(|latest| {
                let has_begun = is_working && !latest.is_working;
                *latest = Latest { is_working, holder_age: None, ..*latest };
                has_begun
            });
        }
    }

    /// Returns the number of keys with a waiter.
    #[must_use]
    pub fn awaited_keys(&self) -> usize {
        self.topics.count.load(Ordering::SeqCst)
    }
}

impl Default for Notifier {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for Notifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Notifier").field("awaited_keys", &self.awaited_keys()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(text: &str) -> Key {
        Key::new(text).expect("valid")
    }

    fn has_changed(subscription: &Subscription) -> bool {
        let receiver = subscription.receiver.as_ref().expect("not dropped");
        receiver.has_changed().expect("open")
    }

    #[tokio::test]
    async fn a_notification_before_the_wait_is_not_lost() {
        let notifier = Notifier::new();
        let mut subscription = notifier.subscribe(&key("a"));
        notifier.notify(&key("b"), None);
        notifier.notify(&key("a"), Some(Duration::from_secs(3)));
        assert_eq!(subscription.notified().await, Some(Duration::from_secs(3)));
        assert!(!has_changed(&subscription));
    }

    #[tokio::test]
    async fn a_notifier_that_works_again_wakes_every_waiter() {
        let notifier = Notifier::new();
        let mut subscription = notifier.subscribe(&key("a"));
        assert!(subscription.is_working());
        notifier.set_working(false);
        assert!(!has_changed(&subscription));
        assert!(!subscription.is_working());
        assert!(!notifier.subscribe(&key("b")).is_working());
        notifier.set_working(true);
        subscription.notified().await;
        assert!(subscription.is_working());
    }

    #[test]
    fn a_subscription_counts_notifications_and_knows_whether_it_is_alone() {
        let notifier = Notifier::in_process();
        assert_eq!((notifier.is_awaited(&key("a")), notifier.subscribers(&key("a"))), (false, 0));
        let first = notifier.subscribe(&key("a"));
        assert_eq!((notifier.is_awaited(&key("a")), notifier.subscribers(&key("a"))), (true, 1));
        assert!(first.is_alone());
        let second = notifier.subscribe(&key("a"));
        assert_eq!(notifier.subscribers(&key("a")), 2);
        assert!(!first.is_alone());
        notifier.notify(&key("a"), None);
        notifier.notify(&key("a"), None);
        assert_eq!((first.count(), second.count()), (2, 2));
        // Other processes may wait for the same key.
        assert!(!Notifier::new().subscribe(&key("a")).is_alone());
    }

    #[tokio::test]
    async fn an_age_of_before_an_interruption_is_forgotten() {
        let notifier = Notifier::new();
        let mut subscription = notifier.subscribe(&key("a"));
        notifier.notify(&key("a"), Some(Duration::from_secs(3)));
        subscription.mark_seen();
        // A notifier that still works wakes no waiter.
        notifier.set_working(true);
        assert!(!has_changed(&subscription));
        notifier.notify(&key("a"), Some(Duration::from_secs(3)));
        subscription.mark_seen();
        notifier.set_working(false);
        notifier.set_working(true);
        assert_eq!(subscription.notified().await, None);
    }

    #[test]
    fn the_hook_learns_each_key_without_waiters() {
        let (sender, idle) = std::sync::mpsc::channel();
        let notifier = Notifier::with_idle_hook(move |key| sender.send(key.clone()).expect("open"));
        let (one, other) = (notifier.subscribe(&key("a")), notifier.subscribe(&key("a")));
        drop(one);
        assert!(idle.try_recv().is_err());
        drop(other);
        assert_eq!(idle.try_recv().expect("called"), key("a"));
    }

    #[test]
    fn topics_disappear_with_their_last_subscriber() {
        let notifier = Notifier::new();
        let (first, second) = (notifier.subscribe(&key("a")), notifier.subscribe(&key("a")));
        drop(first);
        assert_eq!(notifier.awaited_keys(), 1);
        drop(second);
        assert_eq!(notifier.awaited_keys(), 0);
        assert!(notifier.topics.lock().is_empty());
    }
}
