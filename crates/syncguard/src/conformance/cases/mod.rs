//! The rules, one function each. A function returns if the rule holds and panics if it does not.

pub mod admin;
pub mod cancellation;
pub mod cleanup;
pub mod contention;
pub mod election;
pub mod errors;
pub mod expiry;
pub mod fencing;
pub mod history;
pub mod keys;
pub mod lifecycle;
pub mod lock_all;
pub mod lookup;
pub mod notifications;
pub mod ownership;
pub mod replay;
pub mod semaphore;

use std::time::Duration;

use super::fixture::{Fixture, RawLock};
use crate::common::fence::Fence;
use crate::common::key::Key;
use crate::common::lock_id::LockId;
use crate::common::time::TIME_TOLERANCE_MS;
use crate::common::ttl::Ttl;
use crate::contract::LockBackend;
use crate::contract::outcome::{AcquireOutcome, Lease};
use crate::contract::request::AcquireRequest;

/// A TTL that does not expire during a test.
const LONG: Ttl = Ttl::DEFAULT;

/// A key that no other test uses.
pub(super) fn fresh_key(name: &str) -> Key {
    key(&format!("{name}:{}", fresh_id().expose()))
}

fn key(text: &str) -> Key {
    Key::new(text).expect("a valid key")
}

fn fresh_id() -> LockId {
    LockId::random().expect("randomness")
}

fn ttl(ms: u64) -> Ttl {
    Ttl::new(Duration::from_millis(ms)).expect("a valid TTL")
}

fn request(key: &Key) -> AcquireRequest {
    AcquireRequest::new(key.clone(), LONG).expect("randomness")
}

/// Prints that a rule does not apply to this store, so that it is not mistaken for tested.
fn not_applicable(why: &str) {
    println!("not applicable here: {why}");
}

/// Acquires a lock that must be free.
async fn acquire(
    backend: &impl LockBackend<Fencing = crate::backend::Fenced>,
    key: &Key,
) -> (LockId, Fence) {
    let request = request(key);
    let lease = granted(backend.acquire(&request).await.expect("the store works"));
    (request.lock_id(), lease.fence())
}

fn granted(outcome: AcquireOutcome) -> Lease {
    match outcome {
        AcquireOutcome::Acquired(lease) => lease,
        other => panic!("the lock should have been granted, not {other:?}"),
    }
}

/// Returns a record of another holder that expires in `expires_in_ms`.
fn planted(key: &Key, fence: u64, expires_in_ms: i64) -> RawLock {
    RawLock {
        key: key.clone(),
        lock_id: fresh_id(),
        fence: Fence::new(fence).expect("a valid fence"),
        acquired_ms_ago: 60_000,
        expires_in_ms,
    }
}

/// Returns the oldest expiry that still counts as held, within the margin of the fixture's clock.
pub(super) fn live_edge_ms(fixture: &impl Fixture) -> i64 {
    let margin = i64::try_from(fixture.clock_margin().as_millis()).expect("a small margin");
    1 - TIME_TOLERANCE_MS.cast_signed() + margin
}

/// Returns the newest expiry that no longer counts as held.
pub(super) fn dead_edge_ms() -> i64 {
    -TIME_TOLERANCE_MS.cast_signed()
}

/// Checks that two records are the same, on a clock that may have moved a little in between.
#[track_caller]
fn assert_unchanged(before: Option<&RawLock>, after: Option<&RawLock>) {
    match (before, after) {
        (None, None) => {}
        (Some(before), Some(after)) => {
            assert_eq!(before.key, after.key);
            assert_eq!(before.lock_id, after.lock_id);
            assert_eq!(before.fence, after.fence);
            // Read at two times, but both are relative to the time of reading.
            let life = |lock: &RawLock| lock.expires_in_ms + lock.acquired_ms_ago;
            assert_eq!(life(before), life(after), "expiry or acquisition time has changed");
        }
        (before, after) => panic!("the record has changed: {before:?} became {after:?}"),
    }
}
