//! A map cut into shards, so that threads that want distinct keys seldom meet.

use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use super::key::Key;
use super::lock_id::LockId;

/// A map behind many small locks instead of one large one.
pub(crate) struct Sharded<K, V> {
    shards: Box<[Shard<K, V>]>,
}

/// Something that can be spread over shards.
pub(crate) trait Spread {
    /// A number that an outsider cannot steer.
    fn spread(&self) -> u64;
}

impl Spread for Key {
    fn spread(&self) -> u64 {
        static HASHER: LazyLock<RandomState> = LazyLock::new(RandomState::new);
        HASHER.hash_one(self)
    }
}

impl Spread for LockId {
    fn spread(&self) -> u64 {
        // Random as it is.
        self.expose().bytes().take(4).fold(0, |number, byte| number * 31 + u64::from(byte))
    }
}

/// A cache line to itself, so that neighbours do not slow each other down.
#[repr(align(64))]
struct Shard<K, V>(Mutex<HashMap<K, V>>);

impl<K: Spread, V> Sharded<K, V> {
    /// Enough that threads on distinct keys seldom meet; more gains nothing that the benchmark shows.
    const COUNT: usize = 64;

    pub(crate) fn new() -> Self {
        let shard = || Shard(Mutex::default());
        Self { shards: (0..Self::COUNT).map(|_| shard()).collect() }
    }

    /// Locks the shard that holds `key`.
    pub(crate) fn shard_of(&self, key: &K) -> MutexGuard<'_, HashMap<K, V>> {
        let shard = usize::try_from(key.spread() % Self::COUNT as u64);
        self.shards[shard.expect("BUG: a shard number is small")].lock()
    }

    /// Every shard, locked one after the other.
    pub(crate) fn shards(&self) -> impl Iterator<Item = MutexGuard<'_, HashMap<K, V>>> {
        self.shards.iter().map(Shard::lock)
    }

    /// How many entries there are, shard by shard.
    pub(crate) fn len(&self) -> usize {
        self.shards().map(|shard| shard.len()).sum()
    }
}

impl<K: Spread, V> fmt::Debug for Sharded<K, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sharded").field("len", &self.len()).finish()
    }
}

impl<K, V> Shard<K, V> {
    fn lock(&self) -> MutexGuard<'_, HashMap<K, V>> {
        // A panic under the lock cannot leave the map half changed: nothing that can panic runs
        // between two changes that belong together.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
