//! A map cut into shards, so that threads that want distinct keys seldom meet.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hash, RandomState};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A map behind many small locks instead of one large one.
#[derive(Debug)]
pub(crate) struct Sharded<K, V> {
    hasher: RandomState,
    shards: Box<[Shard<K, V>]>,
}

/// Two cache lines to itself, so that neighbours do not slow each other down.
#[derive(Debug)]
#[repr(align(128))]
struct Shard<K, V>(Mutex<HashMap<K, V>>);

impl<K: Hash, V> Sharded<K, V> {
    /// Enough that a few dozen threads seldom meet.
    const COUNT: usize = 64;

    pub(crate) fn new() -> Self {
        let shard = || Shard(Mutex::default());
        Self { hasher: RandomState::new(), shards: (0..Self::COUNT).map(|_| shard()).collect() }
    }

    /// Locks the shard that holds `key`.
    pub(crate) fn shard_of(&self, key: &K) -> MutexGuard<'_, HashMap<K, V>> {
        let shard = usize::try_from(self.hasher.hash_one(key) % Self::COUNT as u64);
        self.shards[shard.expect("BUG: a shard number is small")].lock()
    }

    /// How many entries there are, shard by shard.
    pub(crate) fn len(&self) -> usize {
        self.shards.iter().map(|shard| shard.lock().len()).sum()
    }
}

impl<K, V> Shard<K, V> {
    fn lock(&self) -> MutexGuard<'_, HashMap<K, V>> {
        // A panic under the lock cannot leave the map half changed: nothing that can panic runs
        // between two changes that belong together.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
