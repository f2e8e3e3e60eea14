//! "Tell me when this key may be free": subscriptions, and the hub that backends keep them in.

use std::collections::HashMap;
use std::fmt;
use std::future::pending;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

use crate::common::key::Key;

/// A subscription to the wake-ups of one key. Dropping it ends it.
pub struct WakeUps {
    /// The value says whether wake-ups work; every change of it, or none, is a wake-up.
    ///
    /// Only empty while it is being dropped.
    receiver: Option<watch::Receiver<bool>>,
    hub: Arc<Topics>,
    key: Key,
}

impl WakeUps {
    /// Waits until the key may be free: for a wake-up since the last one that was seen.
    ///
    /// # Cancel safety
    ///
    /// No wake-up is lost when this is dropped.
    pub async fn woken(&mut self) {
        let is_woken = match &mut self.receiver {
            Some(receiver) => receiver.changed().await.is_ok(),
            None => false,
        };
        if !is_woken {
            // The hub holds the sender as long as this subscription exists.
            pending::<()>().await;
        }
    }

    /// Forgets the wake-ups so far.
    pub fn mark_seen(&mut self) {
        if let Some(receiver) = &mut self.receiver {
            receiver.mark_unchanged();
        }
    }

    /// Whether this is certainly the only subscription to its key, in any process.
    #[must_use]
    pub fn is_alone(&self) -> bool {
        let topics = self.hub.lock();
        self.hub.sees_everybody
            && topics.get(&self.key).is_none_or(|sender| sender.receiver_count() <= 1)
    }

    /// Whether wake-ups work at the moment. While they do not, only polling helps.
    #[must_use]
    pub fn are_working(&self) -> bool {
        self.receiver.as_ref().is_some_and(|receiver| *receiver.borrow())
    }
}

impl fmt::Debug for WakeUps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WakeUps").field("key", &self.key).finish_non_exhaustive()
    }
}

impl Drop for WakeUps {
    fn drop(&mut self) {
        let mut topics = self.hub.lock();
        // Under the lock, so that of two that go at once one sees that it is the last.
        drop(self.receiver.take());
        if topics.get(&self.key).is_some_and(|sender| sender.receiver_count() == 0) {
            topics.remove(&self.key);
            self.hub.count.store(topics.len(), Ordering::SeqCst);
            drop(topics);
            if let Some(on_idle) = &self.hub.on_idle {
                on_idle(&self.key);
            }
        }
    }
}

/// The subscriptions of one backend, by key. Keys that nobody waits for take no space.
#[derive(Clone)]
pub struct WakeHub {
    topics: Arc<Topics>,
}

type IdleHook = Box<dyn Fn(&Key) + Send + Sync>;

#[derive(Default)]
struct Topics {
    by_key: Mutex<HashMap<Key, watch::Sender<bool>>>,
    /// Whether every waiter of every process subscribes here.
    sees_everybody: bool,
    /// Whether wake-ups cannot come at the moment.
    are_broken: AtomicBool,
    /// Hears of keys that nobody waits for any more.
    on_idle: Option<IdleHook>,
    /// The size of the map, so that a release when nobody waits for anything takes no lock.
    count: AtomicUsize,
}

impl Topics {
    fn lock(&self) -> MutexGuard<'_, HashMap<Key, watch::Sender<bool>>> {
        self.by_key.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl WakeHub {
    /// An empty hub for a store that other processes share.
    #[must_use]
    pub fn new() -> Self {
        Self { topics: Arc::default() }
    }

    /// An empty hub for a store that lives in this process: it knows every waiter there is.
    #[must_use]
    pub fn in_process() -> Self {
        Self { topics: Arc::new(Topics { sees_everybody: true, ..Topics::default() }) }
    }

    /// An empty hub for a store that other processes share, with a hook that hears of keys that
    /// nobody waits for any more. Somebody may have come again by then: ask
    /// [`is_awaited`](Self::is_awaited).
    pub fn with_idle_hook(on_idle: impl Fn(&Key) + Send + Sync + 'static) -> Self {
        let on_idle: Option<IdleHook> = Some(Box::new(on_idle));
        Self { topics: Arc::new(Topics { on_idle, ..Topics::default() }) }
    }

    /// Whether somebody waits for `key`.
    #[must_use]
    pub fn is_awaited(&self, key: &Key) -> bool {
        self.topics.lock().contains_key(key)
    }

    /// Subscribes to the wake-ups of `key` from now on.
    #[must_use]
    pub fn subscribe(&self, key: &Key) -> WakeUps {
        let mut topics = self.topics.lock();
        let are_working = !self.topics.are_broken.load(Ordering::SeqCst);
        let sender = topics.entry(key.clone()).or_insert_with(|| watch::Sender::new(are_working));
        let receiver = sender.subscribe();
        self.topics.count.store(topics.len(), Ordering::SeqCst);
        WakeUps { receiver: Some(receiver), hub: Arc::clone(&self.topics), key: key.clone() }
    }

    /// Wakes everybody who waits for `key`.
    pub fn wake(&self, key: &Key) {
        if self.topics.count.load(Ordering::SeqCst) > 0
            && let Some(sender) = self.topics.lock().get(key)
        {
            sender.send_modify(|_working| {});
        }
    }

    /// Wakes everybody who waits for a key that matches.
    #[cfg(feature = "sqlite")]
    pub(crate) fn wake_matching(&self, matches: impl Fn(&Key) -> bool) {
        let topics = self.topics.lock();
        for (_, sender) in topics.iter().filter(|(key, _)| matches(key)) {
            sender.send_modify(|_working| {});
        }
    }

    /// Notes that wake-ups have stopped or begun to work. When they begin, everybody is woken: what
    /// happened meanwhile nobody knows. When they stop, nobody is: the store is probably out of
    /// reach, and it is no time to ask it.
    pub fn set_working(&self, are_working: bool) {
        let topics = self.topics.lock();
        self.topics.are_broken.store(!are_working, Ordering::SeqCst);
        for sender in topics.values() {
            sender.send_if_modified(|working| {
                let has_begun = are_working && !*working;
                *working = are_working;
                has_begun
            });
        }
    }

    /// How many keys somebody waits for.
    #[must_use]
    pub fn awaited_keys(&self) -> usize {
        self.topics.count.load(Ordering::SeqCst)
    }
}

impl Default for WakeHub {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for WakeHub {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WakeHub").field("awaited_keys", &self.awaited_keys()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(text: &str) -> Key {
        Key::new(text).expect("valid")
    }

    fn has_changed(wake_ups: &WakeUps) -> bool {
        let receiver = wake_ups.receiver.as_ref().expect("not dropped");
        receiver.has_changed().expect("open")
    }

    #[tokio::test]
    async fn a_wake_up_before_the_wait_is_not_lost() {
        let hub = WakeHub::new();
        let mut wake_ups = hub.subscribe(&key("a"));
        hub.wake(&key("b"));
        hub.wake(&key("a"));
        wake_ups.woken().await;
        assert!(!has_changed(&wake_ups));
    }

    #[tokio::test]
    async fn a_hub_that_works_again_wakes_everybody() {
        let hub = WakeHub::new();
        let mut wake_ups = hub.subscribe(&key("a"));
        assert!(wake_ups.are_working());
        hub.set_working(false);
        assert!(!has_changed(&wake_ups));
        assert!(!wake_ups.are_working());
        assert!(!hub.subscribe(&key("b")).are_working());
        hub.set_working(true);
        wake_ups.woken().await;
        assert!(wake_ups.are_working());
    }

    #[test]
    fn topics_disappear_with_their_last_subscriber() {
        let hub = WakeHub::new();
        let (first, second) = (hub.subscribe(&key("a")), hub.subscribe(&key("a")));
        drop(first);
        assert_eq!(hub.awaited_keys(), 1);
        drop(second);
        assert_eq!(hub.awaited_keys(), 0);
        assert!(hub.topics.lock().is_empty());
    }
}
