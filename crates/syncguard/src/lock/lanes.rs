//! The waiters of this process, one lane per key: in order, and only the first talks to the store.

use std::fmt;
use std::sync::Arc;

use tokio::sync::Notify;

use super::clock::LocalInstant;
use crate::common::key::Key;
use crate::common::sharded::Sharded;
use crate::contract::wake::WakeUps;

/// All lanes of a locker. A lane exists while somebody is in it.
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
}

/// What the first waiter hands on to the next.
#[derive(Debug, Default)]
pub(super) struct Turn {
    /// The subscription, kept from waiter to waiter.
    pub(super) wake_ups: Option<WakeUps>,
    /// Whether the backend has been asked for a subscription.
    pub(super) has_subscribed: bool,
    /// This process holds the lock itself, until about this time.
    pub(super) held_until: Option<LocalInstant>,
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

    /// Notes that somebody else has the lock.
    pub(super) fn met_others(&mut self) {
        *self = Self::default();
    }
}

impl Default for Courtesy {
    fn default() -> Self {
        Self { in_a_row: 0, allowed: Self::LEAST }
    }
}

impl Lanes {
    pub(super) fn new() -> Self {
        Self { by_key: Sharded::new() }
    }

    /// Enters the lane of a key; the visit ends when the answer is dropped.
    pub(super) fn enter<'a>(&'a self, key: &'a Key) -> Visit<'a> {
        let mut shard = self.by_key.shard_of(key);
        let lane = match shard.get_mut(key) {
            Some(entry) => {
                entry.visitors += 1;
                Arc::clone(&entry.lane)
            }
            None => {
                let lane = Arc::<Lane>::default();
                shard.insert(key.clone(), Entry { lane: Arc::clone(&lane), visitors: 1 });
                lane
            }
        };
        Visit { lanes: self, key, lane }
    }

    /// Tells the first waiter, if there is one, that this process has given the lock back.
    pub(super) fn given_back(&self, key: &Key) {
        if let Some(entry) = self.by_key.shard_of(key).get(key) {
            entry.lane.given_back.notify_one();
        }
    }

    /// How many keys somebody waits for.
    pub(super) fn len(&self) -> usize {
        self.by_key.len()
    }
}

impl fmt::Debug for Lanes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lanes").field("awaited_keys", &self.len()).finish()
    }
}

/// A stay in a lane.
pub(super) struct Visit<'a> {
    lanes: &'a Lanes,
    key: &'a Key,
    pub(super) lane: Arc<Lane>,
}

impl Drop for Visit<'_> {
    fn drop(&mut self) {
        let mut shard = self.lanes.by_key.shard_of(self.key);
        if let Some(entry) = shard.get_mut(self.key) {
            entry.visitors -= 1;
            if entry.visitors == 0 {
                shard.remove(self.key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
