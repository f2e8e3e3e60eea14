//! The store of the small backend, for the kit.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use syncguard::backend::{Clock, ManualClock, Notifier};
use syncguard::conformance::{Fixture, RawLock};
use syncguard::{Fence, FenceSource, Key, LockId};

use super::{Bug, RawRecord, Sloppy, Store};

/// The store of the small backend.
#[derive(Debug)]
pub(crate) struct SloppyFixture {
    bug: Bug,
    store: Arc<Mutex<Store>>,
    clock: Arc<ManualClock>,
    notifier: Notifier,
    changes: Notifier,
}

impl SloppyFixture {
    pub(crate) fn new(bug: Bug) -> Self {
        Self {
            bug,
            store: Arc::default(),
            clock: Arc::default(),
            notifier: Notifier::in_process(),
            changes: Notifier::in_process(),
        }
    }

    fn make(&self, cleans_up: bool, fences: FenceSource) -> Sloppy {
        Sloppy {
            bug: self.bug,
            cleans_up,
            fences,
            store: Arc::clone(&self.store),
            clock: Arc::clone(&self.clock),
            made_ms: self.clock.now().as_millis(),
            notifier: self.notifier.clone(),
            changes: self.changes.clone(),
            under_way: Arc::default(),
        }
    }

    fn counter_key(&self, key: &Key) -> Key {
        self.make(false, FenceSource::Counter).counter_key(key)
    }
}

impl Fixture for SloppyFixture {
    type Backend = Sloppy;

    async fn backend(&self) -> Sloppy {
        self.make(false, FenceSource::Counter)
    }

    async fn backend_with_cleanup(&self) -> Sloppy {
        self.make(true, FenceSource::Counter)
    }

    async fn backend_with_clock_fences(&self) -> Option<Sloppy> {
        Some(self.make(false, FenceSource::Clock))
    }

    async fn plant(&self, lock: &RawLock) {
        let mut store = self.store.lock().expect("no panic inside");
        let now = self.clock.now().as_millis();
        let record = RawRecord {
            lock_id: lock.lock_id,
            fence: lock.fence.get(),
            acquired_ms: now.saturating_add_signed(-lock.acquired_ms_ago),
            expires_ms: now.saturating_add_signed(lock.expires_in_ms),
            first_expires_ms: now.saturating_add_signed(lock.expires_in_ms),
            grants: 1,
        };
        if let Some(old) = store.locks.insert(lock.key.clone(), record) {
            store.index.remove(&old.lock_id);
        }
        store.index.insert(lock.lock_id, lock.key.clone());
        store.counters.insert(self.counter_key(&lock.key), lock.fence.get());
    }

    async fn peek(&self, key: &Key) -> Option<RawLock> {
        let store = self.store.lock().expect("no panic inside");
        let now = self.clock.now().as_millis().cast_signed();
        store.locks.get(key).map(|record| RawLock {
            key: key.clone(),
            lock_id: record.lock_id,
            fence: Fence::new(record.fence).expect("valid"),
            acquired_ms_ago: now - record.acquired_ms.cast_signed(),
            expires_in_ms: record.expires_ms.cast_signed() - now,
        })
    }

    async fn knows_id(&self, lock_id: &LockId) -> bool {
        self.store.lock().expect("no panic inside").index.contains_key(lock_id)
    }

    async fn fence_counter(&self, key: &Key) -> u64 {
        let store = self.store.lock().expect("no panic inside");
        store.counters.get(&self.counter_key(key)).copied().unwrap_or_default()
    }

    async fn set_fence_counter(&self, key: &Key, counter: u64) {
        let mut store = self.store.lock().expect("no panic inside");
        store.counters.insert(self.counter_key(key), counter);
    }

    async fn advance(&self, by: Duration) {
        self.clock.advance(by);
    }

    async fn restart(&self) -> bool {
        if self.bug == Bug::RestartForgetsTheCounters {
            self.store.lock().expect("no panic inside").counters.clear();
        }
        true
    }

    async fn corrupt(&self, key: &Key) -> bool {
        self.store.lock().expect("no panic inside").malformed.insert(key.clone())
    }

    fn clock_margin(&self) -> Duration {
        Duration::ZERO
    }
}
