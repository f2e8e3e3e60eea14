//! Locks in this process: the reference implementation, and the backend for tests.
//!
//! * Nothing is shared with other processes, and **fences live only as long as the process**: after
//!   a restart they start at 1 again, unless they come from the clock
//!   ([`FenceSource::Clock`]). Do not compare them with fences that are stored elsewhere.
//! * The clock is a [`MonotonicClock`](crate::backend::MonotonicClock), so setting the wall clock
//!   neither frees nor extends a lock. [`MemoryConfig::clock`] replaces it.
//! * Notifications reach every [`Locker`](crate::Locker) on the same backend.
//! * Every key that was ever locked keeps one small entry with its fence counter. With
//!   [`FenceSource::Clock`], [`Admin::collect_fences`] deletes those of idle keys.

mod admin;
mod config;
mod record;

use std::collections::HashMap;
use std::sync::Arc;

use crate::common::cleanup::CleanupGate;
use crate::common::clock::Clock;
use crate::common::error::Result;
use crate::common::fence::{Fence, Fenced};
use crate::common::fence_source::FenceSource;
use crate::common::holder::BreakNote;
use crate::common::key::Key;
use crate::common::lock_id::LockId;
use crate::common::sync::Mutex;
use crate::common::time::{Timestamp, is_live};
use crate::contract::LockBackend;
use crate::contract::acquire_any::Soonest;
use crate::contract::admin::Admin;
use crate::contract::break_notes::BreakNotes;
use crate::contract::capabilities::{Capabilities, TimeAuthority};
use crate::contract::notifier::{Notifier, Subscription};
use crate::contract::outcome::{
    AcquireAnyOutcome, AcquireOutcome, ExtendOutcome, Extension, Lease, NotHeldReason,
    ReleaseOutcome,
};
use crate::contract::request::{
    AcquireAnyRequest, AcquireRequest, ExtendRequest, Hint, ReleaseRequest,
};
use crate::contract::stored_lock::StoredLock;
pub use config::MemoryConfig;
pub(crate) use record::Record;
use record::{Shards, Slot};

/// A backend that keeps locks in this process. Clones share the locks.
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
    fences: FenceSource,
}

#[derive(Debug)]
struct Store {
    shards: Shards,
    clock: Arc<dyn Clock>,
    notifier: Notifier,
    /// Notified when a lock is released or taken over.
    changes: Notifier,
    break_notes: BreakNotes,
    /// The largest fences of resources.
    resources: Mutex<HashMap<Key, (Fence, Option<Key>)>>,
}

impl MemoryBackend {
    /// Creates a backend with the default configuration: no locks, and a clock that never jumps.
    #[must_use]
    pub fn new() -> Self {
        Self::with_config(MemoryConfig::default())
    }

    /// Creates a backend with a configuration.
    #[must_use]
    pub fn with_config(config: MemoryConfig) -> Self {
        Self {
            store: Arc::new(Store {
                shards: Shards::new(),
                clock: config.clock,
                notifier: Notifier::in_process(),
                changes: Notifier::in_process(),
                break_notes: BreakNotes::default(),
                resources: Mutex::default(),
            }),
            cleanup: Arc::new(CleanupGate::new(config.cleanup_in_is_locked)),
            fences: config.fences,
        }
    }

    fn now(&self) -> Timestamp {
        self.store.clock.now()
    }

    /// Finds the record with `lock_id`, live or expired, and calls `act` with its slot.
    ///
    /// It tries the key in the hint first, and otherwise takes the key from the index. It checks
    /// the id in the record under the mutex of the record's shard.
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

/// Direct access to the store, for the conformance kit.
#[cfg(feature = "conformance")]
impl MemoryBackend {
    /// Returns a backend on the same store that cleans up in `is_locked`.
    pub(crate) fn with_cleanup(&self) -> Self {
        Self { cleanup: Arc::new(CleanupGate::new(true)), ..self.clone() }
    }

    /// Returns a backend on the same store whose fences come from the clock.
    pub(crate) fn with_clock_fences(&self) -> Self {
        Self { fences: FenceSource::Clock, ..self.clone() }
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
        // An acquire completes in one poll, so nothing is in progress once its future is dropped.
        Capabilities::new::<Fenced>("memory", TimeAuthority::Server).with_final_undo()
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<AcquireOutcome> {
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
                    AcquireOutcome::Acquired(Lease::new(held.fence, held.expires_at))
                } else {
                    AcquireOutcome::AlreadyUsed
                });
            }
            Some(held) if is_live(held.expires_at, now) => {
                return Ok(AcquireOutcome::Contended {
                    expires_in: Some(held.expires_at.dead_in(now)),
                });
            }
            _ => {}
        }
        let fence = self
            .fences
            .next(slot.fence_counter, now)
            .map_err(|error| error.with_key(key).with_operation("memory", "acquire"))?;
        let is_takeover = slot.record.is_some();
        if let Some(dead) = slot.record {
            shards.index(&dead.lock_id).remove(&dead.lock_id);
        }
        let expires_at = now.expiry(request.ttl());
        slot.fence_counter = fence.get();
        slot.record = Some(Record { lock_id, fence, acquired_at: now, expires_at });
        slot.holder = request.holder().cloned();
        shards.index(&lock_id).insert(lock_id, key.clone());
        drop(shard);
        if is_takeover {
            self.store.changes.notify(key, None);
        }
        fence.warn_near_the_end(key);
        Ok(AcquireOutcome::Acquired(Lease::new(fence, expires_at)))
    }

    async fn acquire_any(&self, request: &AcquireAnyRequest) -> Result<AcquireAnyOutcome> {
        let mut soonest = Soonest::default();
        for key in request.keys() {
            match self.acquire(&request.for_key(key)).await? {
                AcquireOutcome::Acquired(lease) => {
                    return Ok(AcquireAnyOutcome::Acquired { key: key.clone(), lease });
                }
                AcquireOutcome::Contended { expires_in } => soonest.add(expires_in),
                AcquireOutcome::AlreadyUsed => soonest.add(None),
            }
        }
        Ok(soonest.contended())
    }

    async fn release(&self, request: &ReleaseRequest) -> Result<ReleaseOutcome> {
        let lock_id = request.lock_id();
        let outcome = self.with_record_of(lock_id, Some(request.hint()), |key, slot, record| {
            if !is_live(record.expires_at, self.now()) {
                return (ReleaseOutcome::NotHeld(NotHeldReason::Expired), None);
            }
            slot.record = None;
            self.store.shards.index(&lock_id).remove(&lock_id);
            if let Some(note) = request.break_note() {
                self.store.break_notes.add(lock_id.hash_id(), note.clone());
            }
            let is_watched = [&self.store.notifier, &self.store.changes]
                .into_iter()
                .any(|notifier| notifier.awaited_keys() > 0);
            (ReleaseOutcome::Released, is_watched.then(|| key.clone()))
        });
        let Some((outcome, freed)) = outcome else {
            return Ok(ReleaseOutcome::NotHeld(NotHeldReason::NotFound));
        };
        if let Some(key) = freed {
            self.store.notifier.notify(&key, request.holder_age());
            self.store.changes.notify(&key, None);
        }
        Ok(outcome)
    }

    async fn extend(&self, request: &ExtendRequest) -> Result<ExtendOutcome> {
        let outcome =
            self.with_record_of(request.lock_id(), Some(request.hint()), |_key, slot, record| {
                let now = self.now();
                if !is_live(record.expires_at, now) {
                    return ExtendOutcome::NotHeld(NotHeldReason::Expired);
                }
                let expires_at = now.expiry(request.ttl());
                slot.record = Some(Record { expires_at, ..record });
                ExtendOutcome::Extended(Extension::new(expires_at))
            });
        Ok(outcome.unwrap_or(ExtendOutcome::NotHeld(NotHeldReason::NotFound)))
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
        let found = self.store.shards.of_key(key).get(key).and_then(|slot| slot.stored(key));
        let now = self.now();
        Ok(found.filter(|lock| is_live(lock.expires_at, now)))
    }

    async fn lookup_id(&self, lock_id: &LockId) -> Result<Option<StoredLock>> {
        let found = self.with_record_of(*lock_id, None, |key, slot, _record| slot.stored(key));
        let now = self.now();
        Ok(found.flatten().filter(|lock| is_live(lock.expires_at, now)))
    }

    async fn subscribe(&self, key: &Key) -> Option<Subscription> {
        Some(self.store.notifier.subscribe(key))
    }

    async fn watch(&self, key: &Key) -> Option<Subscription> {
        Some(self.store.changes.subscribe(key))
    }

    async fn waiters(&self, key: &Key) -> Option<u32> {
        Some(self.store.notifier.subscribers(key))
    }

    async fn break_note(&self, lock_id: &LockId) -> Option<BreakNote> {
        self.store.break_notes.of(lock_id.hash_id())
    }

    fn admin(&self) -> Option<Arc<dyn Admin>> {
        Some(Arc::new(self.clone()))
    }
}
