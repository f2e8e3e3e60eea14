//! The waiters of this process, one lane per key: in order, and only the first talks to the store.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use tokio::sync::Notify;

use super::clock::LocalInstant;
use crate::common::fence::Fence;
use crate::common::key::Key;
use crate::common::sharded::Sharded;
use crate::contract::wake::WakeUps;

/// All lanes of a locker. A lane exists while somebody waits in it, or holds its lock.
pub(super) struct Lanes {
    by_key: Sharded<Key, Entry>,
}

struct Entry {
    lane: Arc<Lane>,
    visitors: usize,
}

/// The waiters for one key.
#[derive(Default)]
pub(super) struct Lane {
    /// Whoever holds this is the first. The mutex is fair, so it is the queue.
    pub(super) turn: tokio::sync::Mutex<Turn>,
    /// Tells the first that this process has given the lock back.
    pub(super) given_back: Notify,
    /// What this process knows of its own lock.
    local: Mutex<Option<LocalHold>>,
}

/// A lock that this process holds itself.
struct LocalHold {
    /// Until about this time.
    until: LocalInstant,
    holder: Weak<dyn LocalHolder>,
}

/// What holds a lock in this process.
pub(super) trait LocalHolder: Send + Sync {
    /// Gives the lock back in the background, although its guard is still there.
    fn release_now(self: Arc<Self>);
}

impl Lane {
    pub(super) fn held_until(&self) -> Option<LocalInstant> {
        self.local().as_ref().map(|hold| hold.until)
    }

    /// Forgets that this process holds the lock.
    pub(super) fn set_not_held(&self) {
        *self.local() = None;
    }

    fn set_held(&self, until: LocalInstant, holder: Weak<dyn LocalHolder>) {
        *self.local() = Some(LocalHold { until, holder });
    }

    fn local(&self) -> MutexGuard<'_, Option<LocalHold>> {
        self.local.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What the first waiter hands on to the next.
#[derive(Debug, Default)]
pub(super) struct Turn {
    /// The subscription, kept from waiter to waiter.
    pub(super) wake_ups: Option<WakeUps>,
    /// Without a subscription: when to ask for one again.
    pub(super) subscribe_after: Option<LocalInstant>,
    pub(super) courtesy: Courtesy,
}

/// When this process lets others go first.
///
/// After [`Self::LEAST`] hand-overs in a row within this process it sits out one round of
/// wake-ups. When nobody used the chance it may keep the lock twice as long the next time; as soon
/// as somebody did, it starts from the least again.
#[derive(Debug)]
pub(super) struct Courtesy {
    in_a_row: u32,
    allowed: u32,
    /// The fence of the last grant to this process.
    last: Option<Fence>,
}

impl Courtesy {
    const LEAST: u32 = 4;
    const MOST: u32 = 64;

    /// Notes a hand-over within this process; whether to let others go first this time.
    pub(super) fn is_due(&mut self) -> bool {
        self.in_a_row += 1;
        if self.in_a_row <= self.allowed {
            return false;
        }
        self.in_a_row = 0;
        self.allowed = (self.allowed * 2).min(Self::MOST);
        true
    }

    /// Notes a grant to this process. A gap in the fences means that somebody else was in between.
    pub(super) fn granted(&mut self, fence: Option<Fence>) {
        let next = self.last.map(|last| last.get() + 1);
        if next.is_some() && next != fence.map(Fence::get) {
            self.met_others();
        }
        self.last = fence;
    }

    /// Notes that somebody else has, or had, the lock.
    pub(super) fn met_others(&mut self) {
        *self = Self::default();
    }
}

impl Default for Courtesy {
    fn default() -> Self {
        Self { in_a_row: 0, allowed: Self::LEAST, last: None }
    }
}

impl Lanes {
    pub(super) fn new() -> Self {
        Self { by_key: Sharded::new() }
    }

    /// Enters the lane of a key; the visit ends when the answer is dropped.
    pub(super) fn enter<'a>(&'a self, key: &'a Key) -> Visit<'a> {
        let lane = self.add_visitor(key, |_lane| {});
        Visit { lanes: self, key, lane, has_become_a_hold: AtomicBool::new(false) }
    }

    /// Notes that this process holds the lock of a key, until [`Self::give_back`].
    pub(super) fn hold(&self, key: &Key, until: LocalInstant, holder: Weak<dyn LocalHolder>) {
        self.add_visitor(key, |lane| lane.set_held(until, holder));
    }

    /// Everything that holds a lock in this process now.
    pub(super) fn holders(&self) -> Vec<Arc<dyn LocalHolder>> {
        let holder = |entry: &Entry| entry.lane.local().as_ref()?.holder.upgrade();
        self.by_key
            .shards()
            .flat_map(|shard| shard.values().filter_map(holder).collect::<Vec<_>>())
            .collect()
    }

    /// Notes that this process does not hold the lock any more, and tells the first waiter.
    pub(super) fn give_back(&self, key: &Key) {
        self.remove_visitor(key, |lane| {
            lane.set_not_held();
            lane.given_back.notify_one();
        });
    }

    /// Tells the first waiter, if there is one, that the lock may be free.
    pub(super) fn nudge(&self, key: &Key) {
        if let Some(entry) = self.by_key.shard_of(key).get(key) {
            entry.lane.given_back.notify_one();
        }
    }

    fn add_visitor(&self, key: &Key, note: impl FnOnce(&Lane)) -> Arc<Lane> {
        let mut shard = self.by_key.shard_of(key);
        if let Some(entry) = shard.get_mut(key) {
            entry.visitors += 1;
            note(&entry.lane);
            return Arc::clone(&entry.lane);
        }
        let lane = Arc::<Lane>::default();
        note(&lane);
        shard.insert(key.clone(), Entry { lane: Arc::clone(&lane), visitors: 1 });
        lane
    }

    fn remove_visitor(&self, key: &Key, note: impl FnOnce(&Lane)) {
        let mut shard = self.by_key.shard_of(key);
        if let Some(entry) = shard.get_mut(key) {
            note(&entry.lane);
            entry.visitors -= 1;
            if entry.visitors == 0 {
                shard.remove(key);
            }
        }
    }

    /// How many keys somebody waits for or holds.
    pub(super) fn len(&self) -> usize {
        self.by_key.len()
    }
}

impl fmt::Debug for Lanes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lanes").field("keys", &self.len()).finish()
    }
}

/// A stay in a lane.
pub(super) struct Visit<'a> {
    lanes: &'a Lanes,
    key: &'a Key,
    pub(super) lane: Arc<Lane>,
    has_become_a_hold: AtomicBool,
}

impl Visit<'_> {
    /// Notes that the visitor has got the lock, until [`Lanes::give_back`].
    pub(super) fn hold(&self, until: LocalInstant, holder: Weak<dyn LocalHolder>) {
        self.lane.set_held(until, holder);
        self.has_become_a_hold.store(true, Ordering::Relaxed);
    }
}

impl Drop for Visit<'_> {
    fn drop(&mut self) {
        if !*self.has_become_a_hold.get_mut() {
            self.lanes.remove_visitor(self.key, |_lane| {});
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lock::clock::{LocalClock, Ticker};

    struct Nobody;

    impl LocalHolder for Nobody {
        fn release_now(self: Arc<Self>) {}
    }

    #[test]
    fn a_lane_disappears_with_its_last_visitor() {
        let lanes = Lanes::new();
        let key = Key::new("k").expect("valid");
        let (first, second) = (lanes.enter(&key), lanes.enter(&key));
        assert_eq!(lanes.len(), 1);
        drop(first);
        assert_eq!(lanes.len(), 1);
        drop(second);
        assert_eq!(lanes.len(), 0);
    }

    #[tokio::test]
    async fn a_lane_lives_as_long_as_its_lock_is_held_here() {
        let lanes = Lanes::new();
        let key = Key::new("k").expect("valid");
        let until = Ticker::new(LocalClock::Tokio, tokio::runtime::Handle::current()).now();
        let holder = Arc::downgrade(&(Arc::new(Nobody) as Arc<dyn LocalHolder>));
        lanes.hold(&key, until, holder);
        assert_eq!(lanes.enter(&key).lane.held_until(), Some(until));
        lanes.give_back(&key);
        assert_eq!(lanes.len(), 0);
        lanes.give_back(&key);
        lanes.nudge(&key);
    }

    #[test]
    fn a_gap_in_the_fences_means_others() {
        let fence = |number| Fence::new(number).ok();
        let mut courtesy = Courtesy { allowed: 64, ..Courtesy::default() };
        courtesy.granted(fence(7));
        courtesy.granted(fence(8));
        assert_eq!(courtesy.allowed, 64);
        courtesy.granted(fence(10));
        assert_eq!(courtesy.allowed, Courtesy::LEAST);
    }

    #[test]
    fn courtesy_comes_after_four_hand_overs_and_grows_rarer_while_nobody_uses_it() {
        let mut courtesy = Courtesy::default();
        let gap = |courtesy: &mut Courtesy| {
            let mut hand_overs = 0;
            while !courtesy.is_due() {
                hand_overs += 1;
            }
            hand_overs
        };
        assert_eq!([4, 8, 16, 32, 64, 64], [(); 6].map(|()| gap(&mut courtesy)));
        courtesy.met_others();
        assert_eq!(gap(&mut courtesy), 4);
    }
}
