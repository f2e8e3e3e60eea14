//! A small, independent backend that can have one deliberate bug.

mod fixture;

use std::collections::{HashMap, HashSet};
use std::future::{Future, ready};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

pub(crate) use fixture::SloppyFixture;
use syncguard::backend::{
    AcquireOutcome, AcquireRequest, Admin, BoxFuture, BreakNote, CLEANUP_GUARD_MS, Capabilities,
    Clock, Cursor, ExtendRequest, Extension, Fenced, Finding, Lease, ManualClock, Notifier, Page,
    ReleaseRequest, StoredLock, Subscription, SystemClock, TIME_TOLERANCE_MS, TimeAuthority,
};
use syncguard::{
    Error, ErrorCode, ExtendOutcome, Fence, FenceSource, HolderInfo, Key, LockBackend, LockId,
    NotHeldReason, ReleaseOutcome, Result, Timestamp,
};

/// One deliberate bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bug {
    None,
    HolderIsLeftBehind,
    VictimIsNotTold,
    WatchersCountAsWaiters,
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
    AgesAreMadeUp,
    CapabilitiesDenyFencing,
    ExpiryByTheClientsClock,
    ExtendNeverShortens,
    ExtendIsEager,
    ExpiredIsNotFound,
    UnknownIsExpired,
    NobodyIsWarned,
    WarningShowsTheKey,
    ReplayRemembersTheFirstExpiry,
    ReplayTakesTwice,
    UndoIsOvertaken,
    DroppedReleaseJams,
    ErrorIsAnonymous,
    KeysIgnoreCase,
    NothingIsLocked,
    RestartForgetsTheCounters,
    NonsenseIsOverwritten,
    LookupByIdTellsAnotherFence,
    ListShowsTheDead,
    UndoDoesNothing,
    DroppedReadJams,
    ClockIsForgotten,
    ClockReplacesTheCounter,
}

/// All bugs.
pub(crate) const BUGS: [Bug; 54] = [
    Bug::HolderIsLeftBehind,
    Bug::VictimIsNotTold,
    Bug::WatchersCountAsWaiters,
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
    Bug::AgesAreMadeUp,
    Bug::CapabilitiesDenyFencing,
    Bug::ExpiryByTheClientsClock,
    Bug::ExtendNeverShortens,
    Bug::ExtendIsEager,
    Bug::ExpiredIsNotFound,
    Bug::UnknownIsExpired,
    Bug::NobodyIsWarned,
    Bug::WarningShowsTheKey,
    Bug::ReplayRemembersTheFirstExpiry,
    Bug::ReplayTakesTwice,
    Bug::UndoIsOvertaken,
    Bug::DroppedReleaseJams,
    Bug::ErrorIsAnonymous,
    Bug::KeysIgnoreCase,
    Bug::NothingIsLocked,
    Bug::RestartForgetsTheCounters,
    Bug::NonsenseIsOverwritten,
    Bug::LookupByIdTellsAnotherFence,
    Bug::ListShowsTheDead,
    Bug::UndoDoesNothing,
    Bug::DroppedReadJams,
    Bug::ClockIsForgotten,
    Bug::ClockReplacesTheCounter,
];

#[derive(Debug, Default)]
struct Store {
    locks: HashMap<Key, RawRecord>,
    index: HashMap<LockId, Key>,
    counters: HashMap<Key, u64>,
    holders: HashMap<Key, HolderInfo>,
    break_notes: HashMap<LockId, BreakNote>,
    /// Keys whose record is malformed.
    malformed: HashSet<Key>,
}

#[derive(Clone, Copy, Debug)]
struct RawRecord {
    lock_id: LockId,
    fence: u64,
    acquired_ms: u64,
    expires_ms: u64,
    /// The expiry of the first grant. Only a bug needs it, as well as `grants`.
    first_expires_ms: u64,
    grants: u32,
}

/// The backend.
#[derive(Clone, Debug)]
pub(crate) struct Sloppy {
    bug: Bug,
    cleans_up: bool,
    fences: FenceSource,
    store: Arc<Mutex<Store>>,
    clock: Arc<ManualClock>,
    made_ms: u64,
    notifier: Notifier,
    changes: Notifier,
    /// How many calls have begun and not ended.
    under_way: Arc<AtomicU32>,
}

impl Sloppy {
    fn has(&self, bug: Bug) -> bool {
        self.bug == bug
    }

    fn now_ms(&self) -> u64 {
        if self.has(Bug::TimeIsStale) { self.made_ms } else { self.clock.now().as_millis() }
    }

    /// The time from which expiries are counted.
    fn base_ms(&self) -> u64 {
        let is_clients = self.has(Bug::ExpiryByTheClientsClock);
        if is_clients { SystemClock.now().as_millis() } else { self.now_ms() }
    }

    fn not_held(&self, reason: NotHeldReason) -> NotHeldReason {
        match (self.bug, reason) {
            (Bug::ExpiredIsNotFound, NotHeldReason::Expired) => NotHeldReason::NotFound,
            (Bug::UnknownIsExpired, NotHeldReason::NotFound) => NotHeldReason::Expired,
            _ => reason,
        }
    }

    fn warn(&self, fence: Fence, key: &Key) {
        match self.bug {
            Bug::NobodyIsWarned => {}
            Bug::WarningShowsTheKey if fence.is_near_the_end() => {
                tracing::warn!(
                    key = key.as_str(),
                    key_hash = %key.hash_id(),
                    "the fences of this key are nearly used up"
                );
            }
            _ => fence.warn_near_the_end(key),
        }
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

    /// Where the lock of a key is stored.
    fn place(&self, key: &Key) -> Key {
        match self.bug {
            Bug::KeysIgnoreCase => Key::new(key.as_str().to_lowercase()).expect("valid"),
            _ => key.clone(),
        }
    }

    /// Refuses a malformed record.
    fn check(&self, store: &mut Store, key: Option<&Key>) -> Result<()> {
        let Some(key) = key.filter(|key| store.malformed.contains(*key)) else { return Ok(()) };
        if self.has(Bug::NonsenseIsOverwritten) {
            store.malformed.remove(key);
            return Ok(());
        }
        Err(Error::new(ErrorCode::Internal, "the record is malformed").without_effect())
    }

    /// Waits a moment. If it is dropped in the meantime, all later calls fail.
    async fn jam_when_dropped(&self) -> Result<()> {
        if self.under_way.fetch_add(1, Ordering::SeqCst) > 0 {
            return Err(Error::new(ErrorCode::Internal, "an earlier call has not completed"));
        }
        tokio::task::yield_now().await;
        self.under_way.fetch_sub(1, Ordering::SeqCst);
        Ok(())
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

    fn acquire_now(&self, request: &AcquireRequest) -> Result<AcquireOutcome> {
        let mut store = self.store.lock().expect("no panic inside");
        let (key, lock_id, now) = (&self.place(request.key()), request.lock_id(), self.now_ms());
        self.check(&mut store, Some(key))?;
        let counter_key = self.counter_key(key);
        if let Some(held) = store.locks.get(key).copied() {
            let lease = |record: RawRecord, fence| {
                let expires_at = Timestamp::from_millis(record.expires_ms);
                AcquireOutcome::Acquired(Lease::new(Fence::new(fence).expect("valid"), expires_at))
            };
            if held.lock_id == lock_id {
                if !self.is_live(held) && !self.has(Bug::ReplayRevivesTheDead) {
                    return Ok(AcquireOutcome::AlreadyUsed);
                }
                if self.has(Bug::ReplayGetsANewFence) {
                    let counter = store.counters.entry(counter_key).or_default();
                    *counter += 1;
                    return Ok(lease(held, *counter));
                }
                if self.has(Bug::ReplayTakesTwice) {
                    let grants = held.grants + 1;
                    store.locks.insert(key.clone(), RawRecord { grants, ..held });
                }
                let expires_ms = if self.has(Bug::ReplayRemembersTheFirstExpiry) {
                    held.first_expires_ms
                } else {
                    held.expires_ms
                };
                return Ok(lease(RawRecord { expires_ms, ..held }, held.fence));
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
                let expires_in = (held.expires_ms + tolerance).saturating_sub(now);
                return Ok(AcquireOutcome::Contended {
                    expires_in: Some(Duration::from_millis(expires_in)),
                });
            }
            if !self.has(Bug::TakeoverKeepsTheOldIndex) {
                store.index.remove(&held.lock_id);
            }
        }
        let counter = store.counters.get(&counter_key).copied().unwrap_or_default();
        let step = u64::from(!(self.has(Bug::FenceStandsStill) && counter > 0));
        let expires_ms = self.base_ms() + request.ttl().as_millis();
        if self.has(Bug::FenceCheckedAfterWriting) {
            store.counters.insert(counter_key.clone(), counter + step);
        }
        let floor = now * self.fences.per_millisecond();
        let fence = match self.bug {
            Bug::ClockIsForgotten => Fence::after(counter),
            Bug::ClockReplacesTheCounter if floor > 0 => Fence::new(floor),
            _ if step == 0 => Fence::new(counter),
            _ => Fence::after(counter.max(floor.saturating_sub(1))),
        };
        let fence = fence.map_err(|error| match self.bug {
            Bug::ErrorIsAnonymous => error,
            _ => error.with_key(key).with_operation("sloppy", "acquire"),
        })?;
        let record = RawRecord {
            lock_id,
            fence: fence.get(),
            acquired_ms: now,
            expires_ms,
            first_expires_ms: expires_ms,
            grants: 1,
        };
        self.warn(fence, key);
        store.counters.insert(counter_key, fence.get());
        store.locks.insert(key.clone(), record);
        match request.holder() {
            Some(holder) => drop(store.holders.insert(key.clone(), holder.clone())),
            None if self.has(Bug::HolderIsLeftBehind) => {}
            None => drop(store.holders.remove(key)),
        }
        store.index.insert(lock_id, key.clone());
        Ok(AcquireOutcome::Acquired(Lease::new(fence, Timestamp::from_millis(expires_ms))))
    }

    fn extend_now(&self, request: &ExtendRequest) -> Result<ExtendOutcome> {
        let mut store = self.store.lock().expect("no panic inside");
        let (lock_id, now) = (request.lock_id(), self.now_ms());
        let hint = request.hint().key.as_ref();
        self.check(&mut store, hint)?;
        let careless = self.has(Bug::ExtendForgetsTheOwner);
        let found = self.find(&store, lock_id, hint, careless);
        let (key, record) = match found {
            Some((key, record)) => {
                if !self.is_live(record) && !self.has(Bug::ExtendRevivesTheDead) {
                    return Ok(ExtendOutcome::NotHeld(self.not_held(NotHeldReason::Expired)));
                }
                (key, record)
            }
            None if self.has(Bug::ExtendRevivesTheReleased) => match store.index.get(&lock_id) {
                Some(key) if !store.locks.contains_key(key) => {
                    let record = RawRecord {
                        lock_id,
                        fence: 1,
                        acquired_ms: now,
                        expires_ms: now,
                        first_expires_ms: now,
                        grants: 1,
                    };
                    (key.clone(), record)
                }
                _ => return Ok(ExtendOutcome::NotHeld(self.not_held(NotHeldReason::NotFound))),
            },
            None => return Ok(ExtendOutcome::NotHeld(self.not_held(NotHeldReason::NotFound))),
        };
        let from_ms =
            if self.has(Bug::ExtendAddsToTheTtl) { record.expires_ms } else { self.base_ms() };
        let mut expires_ms = from_ms + request.ttl().as_millis();
        if self.has(Bug::ExtendNeverShortens) {
            expires_ms = expires_ms.max(record.expires_ms);
        }
        let renewed = self.has(Bug::ExtendRenewsTheAcquisitionTime);
        let acquired_ms = if renewed { now } else { record.acquired_ms };
        store.locks.insert(key, RawRecord { acquired_ms, expires_ms, ..record });
        Ok(ExtendOutcome::Extended(Extension::new(Timestamp::from_millis(expires_ms))))
    }
}

fn stored(store: &Store, key: &Key, record: RawRecord) -> StoredLock {
    StoredLock::new(key.clone(), record.lock_id, Fence::new(record.fence).expect("valid"))
        .acquired_at(Timestamp::from_millis(record.acquired_ms))
        .expires_at(Timestamp::from_millis(record.expires_ms))
        .held_by(store.holders.get(key).cloned())
}

impl LockBackend for Sloppy {
    type Fencing = Fenced;

    fn capabilities(&self) -> Capabilities {
        let mut capabilities = Capabilities::new::<Fenced>("sloppy", TimeAuthority::Server);
        capabilities.fencing = !self.has(Bug::CapabilitiesDenyFencing);
        capabilities.with_final_undo()
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<AcquireOutcome> {
        if self.has(Bug::UndoIsOvertaken) {
            let (backend, request) = (self.clone(), request.clone());
            let slow = async move {
                tokio::time::sleep(Duration::from_millis(5)).await;
                backend.acquire_now(&request)
            };
            return tokio::spawn(slow).await.expect("no panic inside");
        }
        self.acquire_now(request)
    }

    async fn release(&self, request: &ReleaseRequest) -> Result<ReleaseOutcome> {
        if self.has(Bug::DroppedReleaseJams) {
            self.jam_when_dropped().await?;
        }
        if self.has(Bug::UndoDoesNothing) && request.is_undo() {
            return Ok(ReleaseOutcome::NotHeld(NotHeldReason::NotFound));
        }
        let mut store = self.store.lock().expect("no panic inside");
        let hint = request.hint().key.as_ref();
        self.check(&mut store, hint)?;
        let careless = self.has(Bug::ReleaseForgetsTheOwner);
        let Some((key, record)) = self.find(&store, request.lock_id(), hint, careless) else {
            return Ok(ReleaseOutcome::NotHeld(self.not_held(NotHeldReason::NotFound)));
        };
        if !self.is_live(record) && !self.has(Bug::ReleaseOfADeadLockSucceeds) {
            return Ok(ReleaseOutcome::NotHeld(self.not_held(NotHeldReason::Expired)));
        }
        if record.grants > 1 {
            store.locks.insert(key, RawRecord { grants: record.grants - 1, ..record });
            return Ok(ReleaseOutcome::Released);
        }
        store.locks.remove(&key);
        if let Some(note) = request.break_note() {
            store.break_notes.insert(record.lock_id, note.clone());
        }
        if !self.has(Bug::ReleaseLeavesTheIndex) && !self.has(Bug::ExtendRevivesTheReleased) {
            store.index.remove(&record.lock_id);
        }
        if self.has(Bug::ReleaseResetsTheCounter) {
            store.counters.remove(&key);
        }
        drop(store);
        if !self.has(Bug::VictimIsNotTold) {
            self.changes.notify(&key, None);
        }
        if !self.has(Bug::NobodyIsWoken) {
            let made_up = self.has(Bug::AgesAreMadeUp).then_some(Duration::from_secs(1));
            self.notifier.notify(&key, made_up.or(request.holder_age()));
        }
        Ok(ReleaseOutcome::Released)
    }

    fn extend(
        &self,
        request: &ExtendRequest,
    ) -> impl Future<Output = Result<ExtendOutcome>> + Send {
        let eager = self.has(Bug::ExtendIsEager).then(|| self.extend_now(request));
        async move { eager.unwrap_or_else(|| self.extend_now(request)) }
    }

    async fn is_locked(&self, key: &Key) -> Result<bool> {
        if self.has(Bug::DroppedReadJams) {
            self.jam_when_dropped().await?;
        }
        let (mut store, key) = (self.store.lock().expect("no panic inside"), &self.place(key));
        self.check(&mut store, Some(key))?;
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
        Ok(self.is_live(record) && !self.has(Bug::NothingIsLocked))
    }

    async fn lookup_key(&self, key: &Key) -> Result<Option<StoredLock>> {
        let mut store = self.store.lock().expect("no panic inside");
        self.check(&mut store, Some(key))?;
        let visible =
            |record: &RawRecord| self.is_live(*record) || self.has(Bug::LookupFindsTheDead);
        let found = store.locks.get(key).copied().filter(visible);
        Ok(found.map(|record| stored(&store, key, record)))
    }

    async fn lookup_id(&self, lock_id: &LockId) -> Result<Option<StoredLock>> {
        let store = self.store.lock().expect("no panic inside");
        let careless = self.has(Bug::TakeoverKeepsTheOldIndex);
        let found = self.find(&store, *lock_id, None, careless);
        let more = u64::from(self.has(Bug::LookupByIdTellsAnotherFence));
        Ok(found.filter(|(_key, record)| self.is_live(*record)).map(|(key, record)| {
            stored(&store, &key, RawRecord { fence: record.fence + more, ..record })
        }))
    }

    async fn subscribe(&self, key: &Key) -> Option<Subscription> {
        Some(self.notifier.subscribe(key))
    }

    async fn watch(&self, key: &Key) -> Option<Subscription> {
        let is_mixed_up = self.has(Bug::WatchersCountAsWaiters);
        Some(if is_mixed_up { &self.notifier } else { &self.changes }.subscribe(key))
    }

    async fn waiters(&self, key: &Key) -> Option<u32> {
        Some(self.notifier.subscribers(key))
    }

    async fn break_note(&self, lock_id: &LockId) -> Option<BreakNote> {
        self.store.lock().expect("no panic inside").break_notes.get(lock_id).cloned()
    }

    fn admin(&self) -> Option<Arc<dyn Admin>> {
        Some(Arc::new(self.clone()))
    }
}

impl Admin for Sloppy {
    fn list<'a>(&'a self, _after: Option<&'a Cursor>) -> BoxFuture<'a, Result<Page>> {
        let store = self.store.lock().expect("no panic inside");
        let visible = |(_, record): &(&Key, &RawRecord)| {
            self.is_live(**record) || self.has(Bug::ListShowsTheDead)
        };
        let live = store.locks.iter().filter(visible);
        let locks = live.map(|(key, record)| stored(&store, key, *record)).collect();
        Box::pin(ready(Ok(Page::new(locks, None))))
    }

    fn findings(&self) -> BoxFuture<'_, Result<Vec<Finding>>> {
        Box::pin(ready(Ok(Vec::new())))
    }
}
