//! The kit itself under test: a small backend written apart from ours, once correct and then with
//! one deliberate bug after the other. The kit must pass the first and catch every other.
#![cfg(feature = "conformance")]

use std::collections::HashMap;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use syncguard::conformance::{Case, Fixture, RawLock};
use syncguard::{
    Absence, Acquire, AcquireRequest, CLEANUP_GUARD_MS, Capabilities, Clock, Extend, ExtendRequest,
    Extension, Fence, Fenced, Key, Lease, LockBackend, LockId, ManualClock, Release,
    ReleaseRequest, Result, StoredLock, TIME_TOLERANCE_MS, TimeAuthority, Timestamp, WakeHub,
    WakeUps,
};
use tokio::runtime::Builder;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bug {
    None,
    ReleaseForgetsTheOwner,
    ExtendForgetsTheOwner,
    ReleaseOfADeadLockSucceeds,
    ReleaseLeavesTheIndex,
    ReleaseResetsTheCounter,
    ExtendRevivesTheDead,
    ExtendRevivesTheReleased,
    ExtendAddsToTheTtl,
    ExtendRenewsTheAcquisitionTime,
    FenceStandsStill,
    FenceSharedBetweenKeys,
    FenceCheckedAfterWriting,
    ContentionBurnsAFence,
    ContentionForgetsTheTolerance,
    ToleranceHasTheWrongSign,
    ToleranceIsMissing,
    ToleranceIsLonger,
    TimeIsStale,
    ReplayGetsANewFence,
    ReplayRevivesTheDead,
    HintDecides,
    IsLockedCleansUpUnasked,
    CleanupTakesTheCounter,
    CleanupIsTooEager,
    LookupFindsTheDead,
    TakeoverKeepsTheOldIndex,
    NobodyIsWoken,
}

const BUGS: [Bug; 27] = [
    Bug::ReleaseForgetsTheOwner,
    Bug::ExtendForgetsTheOwner,
    Bug::ReleaseOfADeadLockSucceeds,
    Bug::ReleaseLeavesTheIndex,
    Bug::ReleaseResetsTheCounter,
    Bug::ExtendRevivesTheDead,
    Bug::ExtendRevivesTheReleased,
    Bug::ExtendAddsToTheTtl,
    Bug::ExtendRenewsTheAcquisitionTime,
    Bug::FenceStandsStill,
    Bug::FenceSharedBetweenKeys,
    Bug::FenceCheckedAfterWriting,
    Bug::ContentionBurnsAFence,
    Bug::ContentionForgetsTheTolerance,
    Bug::ToleranceHasTheWrongSign,
    Bug::ToleranceIsMissing,
    Bug::ToleranceIsLonger,
    Bug::TimeIsStale,
    Bug::ReplayGetsANewFence,
    Bug::ReplayRevivesTheDead,
    Bug::HintDecides,
    Bug::IsLockedCleansUpUnasked,
    Bug::CleanupTakesTheCounter,
    Bug::CleanupIsTooEager,
    Bug::LookupFindsTheDead,
    Bug::TakeoverKeepsTheOldIndex,
    Bug::NobodyIsWoken,
];

#[derive(Debug, Default)]
struct Store {
    locks: HashMap<Key, RawRecord>,
    index: HashMap<LockId, Key>,
    counters: HashMap<Key, u64>,
}

#[derive(Clone, Copy, Debug)]
struct RawRecord {
    lock_id: LockId,
    fence: u64,
    acquired_ms: u64,
    expires_ms: u64,
}

#[derive(Clone, Debug)]
struct Sloppy {
    bug: Bug,
    cleans_up: bool,
    store: Arc<Mutex<Store>>,
    clock: Arc<ManualClock>,
    made_ms: u64,
    hub: WakeHub,
}

impl Sloppy {
    fn has(&self, bug: Bug) -> bool {
        self.bug == bug
    }

    fn now_ms(&self) -> u64 {
        if self.has(Bug::TimeIsStale) { self.made_ms } else { self.clock.now().as_millis() }
    }

    fn is_live(&self, record: RawRecord) -> bool {
        let (expires, now) = (record.expires_ms, self.now_ms());
        match self.bug {
            Bug::ToleranceHasTheWrongSign => expires > now + TIME_TOLERANCE_MS,
            Bug::ToleranceIsMissing => expires > now,
            Bug::ToleranceIsLonger => expires + TIME_TOLERANCE_MS + 1 > now,
            _ => expires + TIME_TOLERANCE_MS > now,
        }
    }

    fn counter_key(&self, key: &Key) -> Key {
        let shared = || Key::new("the one counter").expect("valid");
        if self.has(Bug::FenceSharedBetweenKeys) { shared() } else { key.clone() }
    }

    /// The key and record that a lock id holds, dead or alive.
    fn find(
        &self,
        store: &Store,
        lock_id: LockId,
        hint: Option<&Key>,
        trust_the_hint: bool,
    ) -> Option<(Key, RawRecord)> {
        if let Some(key) = hint {
            let record = store.locks.get(key).copied();
            match record {
                Some(record) if record.lock_id == lock_id || trust_the_hint => {
                    return Some((key.clone(), record));
                }
                _ if self.has(Bug::HintDecides) => return None,
                _ => {}
            }
        }
        let key = store.index.get(&lock_id)?;
        let record = *store.locks.get(key)?;
        (record.lock_id == lock_id || trust_the_hint).then(|| (key.clone(), record))
    }
}

fn stored(key: &Key, record: RawRecord) -> StoredLock {
    StoredLock::new(
        key.clone(),
        record.lock_id,
        Fence::new(record.fence).expect("valid"),
        Timestamp::from_millis(record.acquired_ms),
        Timestamp::from_millis(record.expires_ms),
    )
}

impl LockBackend for Sloppy {
    type Fencing = Fenced;

    fn capabilities(&self) -> Capabilities {
        Capabilities::new::<Fenced>("sloppy", TimeAuthority::Server).with_final_undo()
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Acquire> {
        let mut store = self.store.lock().expect("no panic inside");
        let (key, lock_id, now) = (request.key(), request.lock_id(), self.now_ms());
        let counter_key = self.counter_key(key);
        if let Some(held) = store.locks.get(key).copied() {
            let lease = |record: RawRecord, fence| {
                let expires_at = Timestamp::from_millis(record.expires_ms);
                Acquire::Acquired(Lease::new(Fence::new(fence).expect("valid"), expires_at))
            };
            if held.lock_id == lock_id {
                if !self.is_live(held) && !self.has(Bug::ReplayRevivesTheDead) {
                    return Ok(Acquire::Spent);
                }
                if self.has(Bug::ReplayGetsANewFence) {
                    let counter = store.counters.entry(counter_key).or_default();
                    *counter += 1;
                    return Ok(lease(held, *counter));
                }
                return Ok(lease(held, held.fence));
            }
            if self.is_live(held) {
                if self.has(Bug::ContentionBurnsAFence) {
                    *store.counters.entry(counter_key).or_default() += 1;
                }
                let tolerance = if self.has(Bug::ContentionForgetsTheTolerance) {
                    0
                } else {
                    TIME_TOLERANCE_MS
                };
                let free_in = (held.expires_ms + tolerance).saturating_sub(now);
                return Ok(Acquire::Contended { free_in: Some(Duration::from_millis(free_in)) });
            }
            if !self.has(Bug::TakeoverKeepsTheOldIndex) {
                store.index.remove(&held.lock_id);
            }
        }
        let counter = store.counters.get(&counter_key).copied().unwrap_or_default();
        let step = u64::from(!(self.has(Bug::FenceStandsStill) && counter > 0));
        let expires_ms = now + request.ttl().as_millis();
        if self.has(Bug::FenceCheckedAfterWriting) {
            store.counters.insert(counter_key.clone(), counter + step);
        }
        let fence = match step {
            0 => Fence::new(counter)?,
            _ => Fence::after(counter)?,
        };
        let record = RawRecord { lock_id, fence: fence.get(), acquired_ms: now, expires_ms };
        store.counters.insert(counter_key, fence.get());
        store.locks.insert(key.clone(), record);
        store.index.insert(lock_id, key.clone());
        Ok(Acquire::Acquired(Lease::new(fence, Timestamp::from_millis(expires_ms))))
    }

    async fn release(&self, request: &ReleaseRequest) -> Result<Release> {
        let mut store = self.store.lock().expect("no panic inside");
        let hint = request.hint().key.as_ref();
        let careless = self.has(Bug::ReleaseForgetsTheOwner);
        let Some((key, record)) = self.find(&store, request.lock_id(), hint, careless) else {
            return Ok(Release::NotHeld(Absence::NotFound));
        };
        if !self.is_live(record) && !self.has(Bug::ReleaseOfADeadLockSucceeds) {
            return Ok(Release::NotHeld(Absence::Expired));
        }
        store.locks.remove(&key);
        if !self.has(Bug::ReleaseLeavesTheIndex) && !self.has(Bug::ExtendRevivesTheReleased) {
            store.index.remove(&record.lock_id);
        }
        if self.has(Bug::ReleaseResetsTheCounter) {
            store.counters.remove(&key);
        }
        drop(store);
        if !self.has(Bug::NobodyIsWoken) {
            self.hub.wake(&key);
        }
        Ok(Release::Released)
    }

    async fn extend(&self, request: &ExtendRequest) -> Result<Extend> {
        let mut store = self.store.lock().expect("no panic inside");
        let (lock_id, now) = (request.lock_id(), self.now_ms());
        let hint = request.hint().key.as_ref();
        let careless = self.has(Bug::ExtendForgetsTheOwner);
        let found = self.find(&store, lock_id, hint, careless);
        let (key, record) = match found {
            Some((key, record)) => {
                if !self.is_live(record) && !self.has(Bug::ExtendRevivesTheDead) {
                    return Ok(Extend::NotHeld(Absence::Expired));
                }
                (key, record)
            }
            None if self.has(Bug::ExtendRevivesTheReleased) => match store.index.get(&lock_id) {
                Some(key) if !store.locks.contains_key(key) => {
                    let record = RawRecord { lock_id, fence: 1, acquired_ms: now, expires_ms: now };
                    (key.clone(), record)
                }
                _ => return Ok(Extend::NotHeld(Absence::NotFound)),
            },
            None => return Ok(Extend::NotHeld(Absence::NotFound)),
        };
        let from_ms = if self.has(Bug::ExtendAddsToTheTtl) { record.expires_ms } else { now };
        let expires_ms = from_ms + request.ttl().as_millis();
        let renewed = self.has(Bug::ExtendRenewsTheAcquisitionTime);
        let acquired_ms = if renewed { now } else { record.acquired_ms };
        store.locks.insert(key, RawRecord { acquired_ms, expires_ms, ..record });
        Ok(Extend::Extended(Extension::new(Timestamp::from_millis(expires_ms))))
    }

    async fn is_locked(&self, key: &Key) -> Result<bool> {
        let mut store = self.store.lock().expect("no panic inside");
        let Some(record) = store.locks.get(key).copied() else { return Ok(false) };
        let guard_ms = if self.has(Bug::CleanupIsTooEager) { 0 } else { CLEANUP_GUARD_MS };
        let is_old = self.now_ms() > record.expires_ms + guard_ms;
        if is_old && (self.cleans_up || self.has(Bug::IsLockedCleansUpUnasked)) {
            store.locks.remove(key);
            store.index.remove(&record.lock_id);
            if self.has(Bug::CleanupTakesTheCounter) {
                store.counters.remove(key);
            }
        }
        Ok(self.is_live(record))
    }

    async fn lookup_key(&self, key: &Key) -> Result<Option<StoredLock>> {
        let store = self.store.lock().expect("no panic inside");
        let visible =
            |record: &RawRecord| self.is_live(*record) || self.has(Bug::LookupFindsTheDead);
        let found = store.locks.get(key).copied().filter(visible);
        Ok(found.map(|record| stored(key, record)))
    }

    async fn lookup_id(&self, lock_id: &LockId) -> Result<Option<StoredLock>> {
        let store = self.store.lock().expect("no panic inside");
        let careless = self.has(Bug::TakeoverKeepsTheOldIndex);
        let found = self.find(&store, *lock_id, None, careless);
        Ok(found
            .filter(|(_key, record)| self.is_live(*record))
            .map(|(key, record)| stored(&key, record)))
    }

    async fn wake_ups(&self, key: &Key) -> Option<WakeUps> {
        Some(self.hub.subscribe(key))
    }
}

#[derive(Debug)]
struct SloppyFixture {
    bug: Bug,
    store: Arc<Mutex<Store>>,
    clock: Arc<ManualClock>,
    hub: WakeHub,
}

impl SloppyFixture {
    fn new(bug: Bug) -> Self {
        Self { bug, store: Arc::default(), clock: Arc::default(), hub: WakeHub::in_process() }
    }

    fn make(&self, cleans_up: bool) -> Sloppy {
        Sloppy {
            bug: self.bug,
            cleans_up,
            store: Arc::clone(&self.store),
            clock: Arc::clone(&self.clock),
            made_ms: self.clock.now().as_millis(),
            hub: self.hub.clone(),
        }
    }

    fn counter_key(&self, key: &Key) -> Key {
        self.make(false).counter_key(key)
    }
}

impl Fixture for SloppyFixture {
    type Backend = Sloppy;

    async fn backend(&self) -> Sloppy {
        self.make(false)
    }

    async fn backend_with_cleanup(&self) -> Sloppy {
        self.make(true)
    }

    async fn plant(&self, lock: &RawLock) {
        let mut store = self.store.lock().expect("no panic inside");
        let now = self.clock.now().as_millis();
        let record = RawRecord {
            lock_id: lock.lock_id,
            fence: lock.fence.get(),
            acquired_ms: now.saturating_add_signed(-lock.acquired_ms_ago),
            expires_ms: now.saturating_add_signed(lock.expires_in_ms),
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

    fn clock_margin(&self) -> Duration {
        Duration::ZERO
    }
}

/// The names of the cases that fail on a backend with this bug.
///
/// On virtual time: a case that waits in vain for a wake-up takes no time.
fn failures(bug: Bug) -> Vec<&'static str> {
    let cases: Vec<Case<SloppyFixture>> =
        Vec::from(syncguard::conformance_tests!(@each list SloppyFixture));
    let fails = |case: &&Case<SloppyFixture>| {
        let runtime = Builder::new_current_thread().enable_all().start_paused(true).build();
        let run = AssertUnwindSafe(|| {
            runtime
                .expect("a runtime can be started")
                .block_on(async { (case.run)(&SloppyFixture::new(bug)).await });
        });
        std::panic::catch_unwind(run).is_err()
    };
    cases.iter().filter(fails).map(|case| case.name).collect()
}

#[test]
fn a_correct_backend_passes_and_every_bug_is_caught() {
    assert_eq!(failures(Bug::None), [""; 0]);
    // What follows is meant to panic; its messages would only confuse.
    std::panic::set_hook(Box::new(|_| {}));
    let caught: Vec<_> = BUGS.iter().map(|bug| (bug, failures(*bug))).collect();
    drop(std::panic::take_hook());
    for (bug, failures) in &caught {
        println!("{bug:?}: caught by {failures:?}");
    }
    let missed: Vec<_> = caught.iter().filter(|(_, failures)| failures.is_empty()).collect();
    assert!(missed.is_empty(), "the kit does not catch {missed:?}");
}
