//! A map split into shards, so that threads that use distinct keys rarely contend.

use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::sync::{LazyLock, PoisonError};

use super::key::Key;
use super::lock_id::LockId;
use super::sync::{Mutex, MutexGuard};

/// A map behind many mutexes instead of one.
pub(crate) struct Sharded<K, V> {
    shards: Box<[Shard<K, V>]>,
}

/// A map key that can be distributed over shards.
pub(crate) trait Spread {
    /// Returns a hash that a caller who chooses the key cannot predict.
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
        // A lock id is random, so it needs no hasher.
        self.expose().bytes().take(4).fold(0, |number, byte| number * 31 + u64::from(byte))
    }
}

/// One shard, on two cache lines of its own to avoid false sharing: processors fetch lines in
/// pairs.
#[repr(align(128))]
struct Shard<K, V>(Mutex<HashMap<K, V>>);

impl<K: Spread, V> Sharded<K, V> {
    /// The number of shards. More shards bring no gain in the benchmark.
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

    /// Iterates over the shards, locking one at a time.
    pub(crate) fn shards(&self) -> impl Iterator<Item = MutexGuard<'_, HashMap<K, V>>> {
        self.shards.iter().map(Shard::lock)
    }

    /// Counts the entries, shard by shard.
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
        // A panic while the mutex is held cannot leave the map inconsistent: nothing that can panic
        // runs between two changes that belong together.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    /// Returns how many shards a hundred names use.
    fn shards_used<K: Spread>(names: impl Iterator<Item = K>) -> usize {
        let shards = names.take(100).map(|name| name.spread() % Sharded::<K, ()>::COUNT as u64);
        shards.collect::<HashSet<u64>>().len()
    }

    #[test]
    fn keys_and_lock_ids_spread_over_the_shards() {
        let keys = (0..).map(|number| Key::new(format!("order:{number}")).expect("valid"));
        assert!(shards_used(keys) > 32);
        let ids = std::iter::repeat_with(|| LockId::random().expect("randomness"));
        assert!(shards_used(ids) > 32);
        // Every one of the first characters counts.
        let known = LockId::parse("abcdAAAAAAAAAAAAAAAAAA").expect("valid");
        assert_eq!(known.spread(), ((97 * 31 + 98) * 31 + 99) * 31 + 100);
    }

    #[test]
    fn debug_shows_how_many_entries_there_are_and_no_entry() {
        let map = Sharded::<Key, ()>::new();
        let key = Key::new("canary").expect("valid");
        map.shard_of(&key).insert(key.clone(), ());
        assert_eq!(format!("{map:?}"), "Sharded { len: 1 }");
    }
}
