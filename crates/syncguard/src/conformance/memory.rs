//! The kit's fixture for the memory backend, and an example for other fixtures.

use std::sync::Arc;
use std::time::Duration;

use super::fixture::{Fixture, RawLock};
use crate::backends::memory::{MemoryBackend, MemoryConfig, Record};
use crate::common::clock::{Clock, ManualClock};
use crate::common::key::Key;
use crate::common::lock_id::LockId;
use crate::common::time::Timestamp;

/// The memory backend on a clock that stands still, so that the edges are exact.
#[derive(Clone, Debug)]
pub struct MemoryFixture {
    clock: Arc<ManualClock>,
    backend: MemoryBackend,
    cleaning: MemoryBackend,
}

impl MemoryFixture {
    /// Creates an empty store.
    #[must_use]
    pub fn new() -> Self {
        let clock = Arc::new(ManualClock::default());
        let config = MemoryConfig::default().clock(Arc::<ManualClock>::clone(&clock));
        let backend = MemoryBackend::with_config(config);
        let cleaning = backend.with_cleanup();
        Self { clock, backend, cleaning }
    }

    /// Returns the clock that decides liveness.
    #[must_use]
    pub fn clock(&self) -> &ManualClock {
        &self.clock
    }

    fn at(&self, offset_ms: i64) -> Timestamp {
        Timestamp::from_millis(self.clock.now().as_millis().saturating_add_signed(offset_ms))
    }

    fn offset(&self, time: Timestamp) -> i64 {
        time.as_millis().cast_signed() - self.clock.now().as_millis().cast_signed()
    }
}

impl Default for MemoryFixture {
    fn default() -> Self {
        Self::new()
    }
}

impl Fixture for MemoryFixture {
    type Backend = MemoryBackend;

    async fn backend(&self) -> MemoryBackend {
        self.backend.clone()
    }

    async fn backend_with_cleanup(&self) -> MemoryBackend {
        self.cleaning.clone()
    }

    async fn plant(&self, lock: &RawLock) {
        let record = Record {
            lock_id: lock.lock_id,
            fence: lock.fence,
            acquired_at: self.at(-lock.acquired_ms_ago),
            expires_at: self.at(lock.expires_in_ms),
        };
        self.backend.plant(&lock.key, record);
    }

    async fn peek(&self, key: &Key) -> Option<RawLock> {
        self.backend.peek(key).map(|record| RawLock {
            key: key.clone(),
            lock_id: record.lock_id,
            fence: record.fence,
            acquired_ms_ago: -self.offset(record.acquired_at),
            expires_in_ms: self.offset(record.expires_at),
        })
    }

    async fn knows_id(&self, lock_id: &LockId) -> bool {
        self.backend.knows_id(lock_id)
    }

    async fn fence_counter(&self, key: &Key) -> u64 {
        self.backend.fence_counter(key)
    }

    async fn set_fence_counter(&self, key: &Key, counter: u64) {
        self.backend.set_fence_counter(key, counter);
    }

    async fn backend_with_clock_fences(&self) -> Option<MemoryBackend> {
        Some(self.backend.with_clock_fences())
    }

    async fn advance(&self, by: Duration) {
        self.clock.advance(by);
    }

    fn clock_margin(&self) -> Duration {
        Duration::ZERO
    }
}
