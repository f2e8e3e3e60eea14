//! Locks in this process: the reference implementation, and the backend for tests.
//!
//! * Nothing is shared with other processes, and **fences live as long as the process**: after a
//!   restart they begin at 1 again. Do not compare them with fences that a store has remembered.
//! * The clock is a [`MonotonicClock`](crate::MonotonicClock), so setting the wall clock neither
//!   frees nor prolongs a lock. [`MemoryConfig::clock`] replaces it.
//! * Wake-ups reach every [`Locker`](crate::Locker) on the same backend.
//! * A key that was ever locked costs one small entry for ever, because fence counters are never
//!   deleted.

mod config;
mod shards;

use std::future::ready;
use std::sync::Arc;

use crate::common::cleanup::CleanupGate;
use crate::common::clock::Clock;
use crate::common::error::Result;
use crate::common::fence::{Fence, Fenced};
use crate::common::key::Key;
use crate::common::lock_id::LockId;
use crate::common::time::{Timestamp, is_live};
use crate::contract::LockBackend;
use crate::contract::advice::Advice;
use crate::contract::capabilities::{Capabilities, TimeAuthority};
use crate::contract::inspect::{Cursor, Inspection, Inspector, Page};
use crate::contract::outcome::{Absence, Acquire, Extend, Extension, Lease, Release};
use crate::contract::request::{AcquireRequest, ExtendRequest, Hint, ReleaseRequest};
use crate::contract::stored_lock::StoredLock;
use crate::contract::wake::{WakeHub, WakeUps};
pub use config::MemoryConfig;
pub(crate) use shards::Record;
use shards::{Shards, Slot};

/// Locks in this process. Clones share them.
///
/// ```
/// use syncguard::{Locker, MemoryBackend};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> syncguard::Result<()> {
/// let locker = Locker::new(MemoryBackend::new())?;
/// let guard = locker.lock("job").await?;
/// assert!(locker.try_lock("job").await?.is_none());
/// # drop(guard); locker.shutdown().await
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct MemoryBackend {
    store: Arc<Store>,
    cleanup: Arc<CleanupGate>,
}

#[derive(Debug)]
struct Store {
    shards: Shards,
    clock: Arc<dyn Clock>,
    wake_hub: WakeHub,
}

impl MemoryBackend {
    /// A backend without locks, on a clock that never jumps.
    #[must_use]
    pub fn new() -> Self {
        Self::with_config(MemoryConfig::default())
    }

    /// A backend without locks, configured otherwise.
    #[must_use]
    pub fn with_config(config: MemoryConfig) -> Self {
        Self {
            store: Arc::new(Store {
                shards: Shards::new(),
                clock: config.clock,
                wake_hub: WakeHub::in_process(),
            }),
            cleanup: Arc::new(CleanupGate::new(config.cleanup_in_is_locked)),
        }
    }

    fn now(&self) -> Timestamp {
        self.store.clock.now()
    }

    /// Finds the record that `lock_id` holds, dead or alive, and lets `act` change its slot.
    ///
    /// The hint's key is only tried first. By id alone the key is read from the index, and the
    /// record is checked again under the lock of its own shard.
    fn with_record_of<T>(
        &self,
        lock_id: LockId,
        hint: Option<&Hint>,
        act: impl FnOnce(&Key, &mut Slot, Record) -> T,
    ) -> Option<T> {
        let shards = &self.store.shards;
        let owned = |slot: &Slot| slot.record.filter(|record| record.lock_id == lock_id);
        if let Some(key) = hint.and_then(|hint| hint.key.as_ref()) {
            let mut shard = shards.of_key(key);
            if let Some(slot) = shard.get_mut(key)
                && let Some(record) = owned(slot)
            {
                return Some(act(key, slot, record));
            }
        }
        let key = shards.index(&lock_id).get(&lock_id).cloned()?;
        let mut shard = shards.of_key(&key);
        let slot = shard.get_mut(&key)?;
        let record = owned(slot)?;
        Some(act(&key, slot, record))
    }
}

/// The kit's eyes and hands in the store.
#[cfg(feature = "conformance")]
impl MemoryBackend {
    /// The same store behind a backend that cleans up in `is_locked`.
    pub(crate) fn with_cleanup(&self) -> Self {
        Self { cleanup: Arc::new(CleanupGate::new(true)), ..self.clone() }
    }

    pub(crate) fn peek(&self, key: &Key) -> Option<Record> {
        self.store.shards.of_key(key).get(key).and_then(|slot| slot.record)
    }

    pub(crate) fn plant(&self, key: &Key, record: Record) {
        let shards = &self.store.shards;
        let mut shard = shards.of_key(key);
        let slot = shard.entry(key.clone()).or_default();
        if let Some(old) = slot.record.replace(record) {
            shards.index(&old.lock_id).remove(&old.lock_id);
        }
        shards.index(&record.lock_id).insert(record.lock_id, key.clone());
        slot.fence_counter = record.fence.get();
    }

    pub(crate) fn knows_id(&self, lock_id: &LockId) -> bool {
        self.store.shards.index(lock_id).contains_key(lock_id)
    }

    pub(crate) fn fence_counter(&self, key: &Key) -> u64 {
        self.store.shards.of_key(key).get(key).map_or(0, |slot| slot.fence_counter)
    }

    pub(crate) fn set_fence_counter(&self, key: &Key, counter: u64) {
        self.store.shards.of_key(key).entry(key.clone()).or_default().fence_counter = counter;
    }
}

impl Default for MemoryBackend {
    fn default() -> Self {
        Self::new()
    }
}

impl LockBackend for MemoryBackend {
    type Fencing = Fenced;

    fn capabilities(&self) -> Capabilities {
        // An acquire happens in one poll, so nothing is under way once its future is dropped.
        Capabilities::new::<Fenced>("memory", TimeAuthority::Server).with_final_undo()
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Acquire> {
        let shards = &self.store.shards;
        let (key, lock_id) = (request.key(), request.lock_id());
        let mut shard = shards.of_key(key);
        let now = self.now();
        let slot = match shard.get_mut(key) {
            Some(slot) => slot,
            None => shard.entry(key.clone()).or_default(),
        };
        match slot.record {
            Some(held) if held.lock_id == lock_id => {
                return Ok(if is_live(held.expires_at, now) {
                    Acquire::Acquired(Lease::new(held.fence, held.expires_at))
                } else {
                    Acquire::Spent
                });
            }
            Some(held) if is_live(held.expires_at, now) => {
                return Ok(Acquire::Contended { free_in: Some(held.expires_at.dead_in(now)) });
            }
            _ => {}
        }
        let fence = Fence::after(slot.fence_counter)
            .map_err(|error| error.with_key(key).with_operation("memory", "acquire"))?;
        if let Some(dead) = slot.record {
            shards.index(&dead.lock_id).remove(&dead.lock_id);
        }
        let expires_at = now.expiry(request.ttl());
        slot.fence_counter = fence.get();
        slot.record = Some(Record { lock_id, fence, acquired_at: now, expires_at });
        shards.index(&lock_id).insert(lock_id, key.clone());
        drop(shard);
        fence.warn_near_the_end(key);
        Ok(Acquire::Acquired(Lease::new(fence, expires_at)))
    }

    async fn release(&self, request: &ReleaseRequest) -> Result<Release> {
        let lock_id = request.lock_id();
        let outcome = self.with_record_of(lock_id, Some(request.hint()), |key, slot, record| {
            if !is_live(record.expires_at, self.now()) {
                return (Release::NotHeld(Absence::Expired), None);
            }
            slot.record = None;
            self.store.shards.index(&lock_id).remove(&lock_id);
            (Release::Released, (self.store.wake_hub.awaited_keys() > 0).then(|| key.clone()))
        });
        let Some((outcome, freed)) = outcome else {
            return Ok(Release::NotHeld(Absence::NotFound));
        };
        if let Some(key) = freed {
            self.store.wake_hub.wake(&key);
        }
        Ok(outcome)
    }

    async fn extend(&self, request: &ExtendRequest) -> Result<Extend> {
        let outcome =
            self.with_record_of(request.lock_id(), Some(request.hint()), |_key, slot, record| {
                let now = self.now();
                if !is_live(record.expires_at, now) {
                    return Extend::NotHeld(Absence::Expired);
                }
                let expires_at = now.expiry(request.ttl());
                slot.record = Some(Record { expires_at, ..record });
                Extend::Extended(Extension::new(expires_at))
            });
        Ok(outcome.unwrap_or(Extend::NotHeld(Absence::NotFound)))
    }

    async fn is_locked(&self, key: &Key) -> Result<bool> {
        let shards = &self.store.shards;
        let mut shard = shards.of_key(key);
        let Some(slot) = shard.get_mut(key) else {
            return Ok(false);
        };
        let Some(record) = slot.record else {
            return Ok(false);
        };
        let now = self.now();
        if self.cleanup.admits(record.expires_at, now) {
            slot.record = None;
            shards.index(&record.lock_id).remove(&record.lock_id);
        }
        Ok(is_live(record.expires_at, now))
    }

    async fn lookup_key(&self, key: &Key) -> Result<Option<StoredLock>> {
        let record = self.store.shards.of_key(key).get(key).and_then(|slot| slot.record);
        let now = self.now();
        Ok(record
            .filter(|record| is_live(record.expires_at, now))
            .map(|record| record.into_stored(key)))
    }

    async fn lookup_id(&self, lock_id: &LockId) -> Result<Option<StoredLock>> {
        let found = self.with_record_of(*lock_id, None, |key, _slot, record| {
            is_live(record.expires_at, self.now()).then(|| record.into_stored(key))
        });
        Ok(found.flatten())
    }

    async fn wake_ups(&self, key: &Key) -> Option<WakeUps> {
        Some(self.store.wake_hub.subscribe(key))
    }

    fn inspector(&self) -> Option<Arc<dyn Inspector>> {
        Some(Arc::new(self.clone()))
    }
}

impl Inspector for MemoryBackend {
    fn list<'a>(&'a self, _after: Option<&'a Cursor>) -> Inspection<'a, Page> {
        let now = self.now();
        let records = self.store.shards.records().into_iter();
        let live = records.filter(|(_, record)| is_live(record.expires_at, now));
        let locks = live.map(|(key, record)| record.into_stored(&key)).collect();
        Box::pin(ready(Ok(Page::new(locks, None))))
    }

    fn advice(&self) -> Inspection<'_, Vec<Advice>> {
        Box::pin(ready(Ok(vec![Advice::new(
            "memory",
            "locks in memory exclude nobody outside this process, and its fences begin again with it",
        )])))
    }
}
