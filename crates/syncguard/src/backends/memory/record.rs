//! The maps of the memory backend, split into shards so that distinct keys rarely contend.

use std::collections::HashMap;
use std::sync::MutexGuard;

use crate::common::fence::Fence;
use crate::common::key::Key;
use crate::common::lock_id::LockId;
use crate::common::sharded::Sharded;
use crate::common::time::Timestamp;
use crate::contract::stored_lock::StoredLock;

/// The lock and the fence counter of a key. It is never removed, because the counter must not be.
#[derive(Debug, Default)]
pub(super) struct Slot {
    pub(super) fence_counter: u64,
    pub(super) record: Option<Record>,
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
    pub(super) fn into_stored(self, key: &Key) -> StoredLock {
        StoredLock::new(key.clone(), self.lock_id, self.fence)
            .acquired_at(self.acquired_at)
            .expires_at(self.expires_at)
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

    /// Returns every record, live or expired.
    pub(super) fn records(&self) -> Vec<(Key, Record)> {
        let records = |shard: MutexGuard<'_, HashMap<Key, Slot>>| -> Vec<(Key, Record)> {
            shard.iter().filter_map(|(key, slot)| Some((key.clone(), slot.record?))).collect()
        };
        self.by_key.shards().flat_map(records).collect()
    }

    pub(super) fn index(&self, lock_id: &LockId) -> MutexGuard<'_, HashMap<LockId, Key>> {
        self.by_id.shard_of(lock_id)
    }
}
