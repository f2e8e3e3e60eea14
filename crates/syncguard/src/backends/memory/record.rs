//! The maps of the memory backend, split into shards so that distinct keys rarely contend.

use std::collections::HashMap;

use crate::common::fence::Fence;
use crate::common::holder::HolderInfo;
use crate::common::key::Key;
use crate::common::lock_id::LockId;
use crate::common::sharded::Sharded;
use crate::common::sync::MutexGuard;
use crate::common::time::{Timestamp, is_live};
use crate::contract::stored_lock::StoredLock;

/// The lock and the fence counter of a key. It is removed only with an idle counter, because a
/// counter that is only counted must stay.
#[derive(Debug, Default)]
pub(super) struct Slot {
    pub(super) fence_counter: u64,
    pub(super) record: Option<Record>,
    /// Who holds the lock in the record.
    pub(super) holder: Option<HolderInfo>,
}

impl Slot {
    /// Returns the lock, live or expired.
    pub(super) fn stored(&self, key: &Key) -> Option<StoredLock> {
        Some(self.record?.into_stored(key, self.holder.clone()))
    }
}

/// A stored lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) lock_id: LockId,
    pub(crate) fence: Fence,
    pub(crate) acquired_at: Timestamp,
    pub(crate) expires_at: Timestamp,
}

impl Record {
    fn into_stored(self, key: &Key, holder: Option<HolderInfo>) -> StoredLock {
        StoredLock::new(key.clone(), self.lock_id, self.fence)
            .acquired_at(self.acquired_at)
            .expires_at(self.expires_at)
            .held_by(holder)
    }
}

/// The slots by key, and an index from lock ids to keys.
///
/// Lock order: a key's shard first, then an index shard; never the reverse.
#[derive(Debug)]
pub(super) struct Shards {
    by_key: Sharded<Key, Slot>,
    by_id: Sharded<LockId, Key>,
}

impl Shards {
    pub(super) fn new() -> Self {
        Self { by_key: Sharded::new(), by_id: Sharded::new() }
    }

    pub(super) fn of_key(&self, key: &Key) -> MutexGuard<'_, HashMap<Key, Slot>> {
        self.by_key.shard_of(key)
    }

    /// Returns every lock, live or expired.
    pub(super) fn locks(&self) -> Vec<StoredLock> {
        let locks = |shard: MutexGuard<'_, HashMap<Key, Slot>>| -> Vec<StoredLock> {
            let locks = shard.iter().filter_map(|(key, slot)| slot.stored(key));
            locks.collect()
        };
        self.by_key.shards().flat_map(locks).collect()
    }

    /// Removes the slots whose counter is below `limit` and whose lock is not live, one shard at a
    /// time. Returns how many.
    pub(super) fn collect(&self, limit: u64, now: Timestamp) -> u64 {
        let mut removed = 0;
        for mut shard in self.by_key.shards() {
            shard.retain(|_key, slot| {
                let is_held = slot.record.is_some_and(|record| is_live(record.expires_at, now));
                if slot.fence_counter >= limit || is_held {
                    return true;
                }
                if let Some(dead) = slot.record {
                    self.index(&dead.lock_id).remove(&dead.lock_id);
                }
                removed += 1;
                false
            });
        }
        removed
    }

    pub(super) fn index(&self, lock_id: &LockId) -> MutexGuard<'_, HashMap<LockId, Key>> {
        self.by_id.shard_of(lock_id)
    }
}
