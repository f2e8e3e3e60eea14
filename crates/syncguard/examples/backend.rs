//! A complete backend: one map behind one mutex. It is slow and keeps nothing after exit, but
//! follows every rule of the contract.
//! Run it with `cargo run --example backend`.

use std::collections::HashMap;
use std::sync::Mutex;

use syncguard::backend::{
    AcquireOutcome, AcquireRequest, Capabilities, Clock, ExtendRequest, Extension, Fenced, Lease,
    ReleaseRequest, StoredLock, SystemClock, TimeAuthority, is_live,
};
use syncguard::{
    ExtendOutcome, Fence, Key, LockBackend, LockId, Locker, NotHeldReason, ReleaseOutcome, Result,
    Timestamp,
};

#[derive(Debug, Default)]
struct OneMap(Mutex<HashMap<Key, Slot>>);

/// The counter outlives the lock.
#[derive(Debug, Default)]
struct Slot {
    counter: u64,
    record: Option<Record>,
}

#[derive(Clone, Copy, Debug)]
struct Record {
    lock_id: LockId,
    fence: Fence,
    acquired_at: Timestamp,
    expires_at: Timestamp,
}

impl Record {
    fn stored(self, key: &Key) -> StoredLock {
        StoredLock::new(key.clone(), self.lock_id, self.fence)
            .acquired_at(self.acquired_at)
            .expires_at(self.expires_at)
    }
}

/// The slot whose record this id holds, dead or alive.
fn owned(slots: &mut HashMap<Key, Slot>, id: LockId) -> Option<(&Key, &mut Slot, Record)> {
    slots.iter_mut().find_map(|(key, slot)| {
        let record = slot.record.filter(|record| record.lock_id == id)?;
        Some((key, slot, record))
    })
}

impl LockBackend for OneMap {
    type Fencing = Fenced;

    fn capabilities(&self) -> Capabilities {
        // An acquire happens in one poll, so an answered undo is final.
        Capabilities::new::<Fenced>("one-map", TimeAuthority::Server).with_final_undo()
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<AcquireOutcome> {
        let mut slots = self.0.lock().expect("not poisoned");
        let slot = slots.entry(request.key().clone()).or_default();
        let now = SystemClock.now(); // after any waiting
        if let Some(held) = slot.record {
            match (held.lock_id == request.lock_id(), is_live(held.expires_at, now)) {
                // A replay gets what it got before, and nothing is written.
                (true, true) => {
                    return Ok(AcquireOutcome::Acquired(Lease::new(held.fence, held.expires_at)));
                }
                (true, false) => return Ok(AcquireOutcome::AlreadyUsed),
                (false, true) => {
                    return Ok(AcquireOutcome::Contended {
                        expires_in: Some(held.expires_at.dead_in(now)),
                    });
                }
                (false, false) => {}
            }
        }
        let fence =
            Fence::after(slot.counter) // fails before anything is written
                .map_err(|error| {
                    error.with_key(request.key()).with_operation("one-map", "acquire")
                })?;
        fence.warn_near_the_end(request.key());
        let expires_at = now.expiry(request.ttl());
        slot.counter = fence.get();
        slot.record =
            Some(Record { lock_id: request.lock_id(), fence, acquired_at: now, expires_at });
        Ok(AcquireOutcome::Acquired(Lease::new(fence, expires_at)))
    }

    async fn release(&self, request: &ReleaseRequest) -> Result<ReleaseOutcome> {
        let mut slots = self.0.lock().expect("not poisoned");
        let Some((_key, slot, record)) = owned(&mut slots, request.lock_id()) else {
            return Ok(ReleaseOutcome::NotHeld(NotHeldReason::NotFound));
        };
        if !is_live(record.expires_at, SystemClock.now()) {
            return Ok(ReleaseOutcome::NotHeld(NotHeldReason::Expired));
        }
        slot.record = None; // the counter stays
        Ok(ReleaseOutcome::Released)
    }

    async fn extend(&self, request: &ExtendRequest) -> Result<ExtendOutcome> {
        let mut slots = self.0.lock().expect("not poisoned");
        let Some((_key, slot, record)) = owned(&mut slots, request.lock_id()) else {
            return Ok(ExtendOutcome::NotHeld(NotHeldReason::NotFound));
        };
        let now = SystemClock.now();
        if !is_live(record.expires_at, now) {
            return Ok(ExtendOutcome::NotHeld(NotHeldReason::Expired));
        }
        let expires_at = now.expiry(request.ttl());
        slot.record = Some(Record { expires_at, ..record });
        Ok(ExtendOutcome::Extended(Extension::new(expires_at)))
    }

    async fn is_locked(&self, key: &Key) -> Result<bool> {
        Ok(self.lookup_key(key).await?.is_some())
    }

    async fn lookup_key(&self, key: &Key) -> Result<Option<StoredLock>> {
        let slots = self.0.lock().expect("not poisoned");
        let record = slots.get(key).and_then(|slot| slot.record);
        let now = SystemClock.now();
        Ok(record.filter(|record| is_live(record.expires_at, now)).map(|record| record.stored(key)))
    }

    async fn lookup_id(&self, lock_id: &LockId) -> Result<Option<StoredLock>> {
        let mut slots = self.0.lock().expect("not poisoned");
        let now = SystemClock.now();
        Ok(owned(&mut slots, *lock_id)
            .filter(|(_key, _slot, record)| is_live(record.expires_at, now))
            .map(|(key, _slot, record)| record.stored(key)))
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let locker = Locker::new(OneMap::default())?;
    let guard = locker.lock("job").await?;
    assert_eq!(guard.fence(), Fence::FIRST);
    println!("granted with fence {}", guard.fence());
    guard.release().await?;
    locker.shutdown().await
}
