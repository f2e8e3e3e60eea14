//! Fences, which grow with every acquisition.

use std::sync::Arc;
use std::time::Duration;

use super::{
    Fixture, LONG, acquire, assert_unchanged, fresh_key, granted, not_applicable, planted, request,
};
use crate::common::error::ErrorCode;
use crate::common::fence::Fence;
use crate::common::fence_source::FenceSource;
use crate::common::key::Key;
use crate::conformance::log::warnings_of;
use crate::contract::LockBackend;
use crate::contract::outcome::{AcquireAnyOutcome, Lease, ReleaseOutcome};
use crate::contract::request::{AcquireAnyRequest, ReleaseRequest};

/// The first fence of a key is 1, and every acquisition gets the next.
pub async fn the_first_fence_is_one_and_fences_grow<F: Fixture>(fixture: &F) {
    let backend = fixture.backend().await;
    let (key, other) = (fresh_key("fence"), fresh_key("other"));
    for expected in 1..=5 {
        let (lock_id, fence) = acquire(&backend, &key).await;
        assert_eq!(fence.get(), expected);
        let release = ReleaseRequest::new(lock_id);
        assert_eq!(backend.release(&release).await.expect("works"), ReleaseOutcome::Released);
    }
    let (_lock_id, fence) = acquire(&backend, &other).await;
    assert_eq!(fence, Fence::FIRST, "every key has its own counter");
}

/// A takeover gets a larger fence than the dead holder had.
pub async fn fences_grow_across_expiry<F: Fixture>(fixture: &F) {
    let backend = fixture.backend().await;
    let key = fresh_key("fence-expiry");
    let mut last = 0;
    for _ in 0..3 {
        let (lock_id, fence) = acquire(&backend, &key).await;
        assert!(fence.get() > last);
        last = fence.get();
        let mut dead = planted(&key, last, -60_000);
        dead.lock_id = lock_id;
        fixture.plant(&dead).await;
    }
}

/// Counters survive a restart of the store, if the store promises that anything does.
pub async fn fences_survive_a_restart<F: Fixture>(fixture: &F) {
    let backend = fixture.backend().await;
    let key = fresh_key("fence-restart");
    let (lock_id, before) = acquire(&backend, &key).await;
    backend.release(&ReleaseRequest::new(lock_id)).await.expect("works");
    if !fixture.restart().await {
        return not_applicable("nothing is meant to survive a restart");
    }
    let backend = fixture.backend().await;
    let (_lock_id, after) = acquire(&backend, &key).await;
    assert!(after > before);
}

/// The last fence is granted; after it, an acquire fails and leaves the store unchanged.
pub async fn the_largest_fence_is_granted_and_no_larger_one<F: Fixture>(fixture: &F) {
    check_the_end(fixture, &fixture.backend().await).await;
}

async fn check_the_end<F: Fixture>(fixture: &F, backend: &F::Backend) {
    let key = fresh_key("fence-limit");
    fixture.set_fence_counter(&key, Fence::MAX.get() - 1).await;
    let first = request(&key);
    let lease = granted(backend.acquire(&first).await.expect("works"));
    assert_eq!(lease.fence(), Fence::MAX);
    backend.release(&ReleaseRequest::new(first.lock_id())).await.expect("works");

    let before = fixture.peek(&key).await;
    let second = request(&key);
    let error = backend.acquire(&second).await.expect_err("the counter is exhausted");
    assert_eq!(error.code(), ErrorCode::Internal);
    assert!(!error.may_have_taken_effect(), "the error must report that nothing was written");
    assert_unchanged(before.as_ref(), fixture.peek(&key).await.as_ref());
    assert_eq!(fixture.fence_counter(&key).await, Fence::MAX.get());
    assert!(!fixture.knows_id(&second.lock_id()).await);
    assert!(!backend.is_locked(&key).await.expect("works"));
}

/// A grant above [`Fence::WARN`] logs a warning that shows the key's hash, but neither key nor lock
/// id.
pub async fn fences_near_the_end_log_a_warning_without_the_key<F: Fixture>(fixture: &F) {
    let backend = fixture.backend().await;
    let key = fresh_key("canary-warn");
    fixture.set_fence_counter(&key, Fence::WARN.get() - 1).await;
    for (fence, is_warned) in [(Fence::WARN.get(), false), (Fence::WARN.get() + 1, true)] {
        let request = request(&key);
        let (outcome, warnings) = warnings_of(backend.acquire(&request)).await;
        assert_eq!(granted(outcome.expect("works")).fence().get(), fence);
        let hash = key.hash_id();
        let about_this_key = warnings.iter().filter(|line| line.contains(hash.as_str())).count();
        assert_eq!(about_this_key, usize::from(is_warned), "fence {fence}: {warnings:?}");
        for line in &warnings {
            assert!(!line.contains("canary"), "a key was logged: {line}");
            assert!(!line.contains(request.lock_id().expose()), "a lock id was logged");
        }
        backend.release(&ReleaseRequest::new(request.lock_id())).await.expect("works");
    }
}

/// Why the cases of fences from the clock do not apply.
const ONLY_COUNTS: &str = "the backend only counts";

/// Acquires and releases a lock, and returns its lease.
async fn cycle<F: Fixture>(backend: &F::Backend, key: &Key) -> Lease {
    let request = request(key);
    let lease = granted(backend.acquire(&request).await.expect("works"));
    let release = ReleaseRequest::new(request.lock_id());
    assert_eq!(backend.release(&release).await.expect("works"), ReleaseOutcome::Released);
    lease
}

/// Returns the smallest fence of a lease whose time authority's clock moved by at most a second
/// during the operation.
fn floor(lease: &Lease) -> u64 {
    (lease.expires_at().as_millis() - LONG.as_millis() - 1000)
        * FenceSource::Clock.per_millisecond()
}

/// A fence from the clock is at least the clock, and larger than the fence before it, also if the
/// clock stands still and after a grant without the clock.
pub async fn fences_from_the_clock_grow_with_every_grant<F: Fixture>(fixture: &F) {
    let Some(backend) = fixture.backend_with_clock_fences().await else {
        return not_applicable(ONLY_COUNTS);
    };
    let counting = fixture.backend().await;
    let key = fresh_key("fence-clock");
    let mut last = cycle::<F>(&counting, &key).await.fence();
    assert_eq!(last, Fence::FIRST);
    for _ in 0..20 {
        let lease = cycle::<F>(&backend, &key).await;
        assert!(lease.fence() > last, "{} after {last}", lease.fence());
        assert!(lease.fence().get() >= floor(&lease), "{} is below the clock", lease.fence());
        last = lease.fence();
        assert_eq!(fixture.fence_counter(&key).await, last.get(), "the counter is the last fence");
    }
    // A request for several locks grants by the same rule.
    let keys = Arc::from([key.clone(), fresh_key("fence-clock-any")]);
    let any = AcquireAnyRequest::new(keys, LONG).expect("randomness");
    match backend.acquire_any(&any).await.expect("works") {
        AcquireAnyOutcome::Acquired { lease, .. } => {
            assert!(lease.fence() > last, "{} after {last}", lease.fence());
            assert!(lease.fence().get() >= floor(&lease), "{} is below the clock", lease.fence());
            last = lease.fence();
        }
        other @ AcquireAnyOutcome::Contended { .. } => {
            panic!("a lock should have been granted, not {other:?}")
        }
    }
    backend.release(&ReleaseRequest::new(any.first().lock_id())).await.expect("works");
    let counted = cycle::<F>(&counting, &key).await.fence();
    assert_eq!(counted.get(), last.get() + 1, "a backend that counts continues from there");
    assert!(cycle::<F>(&backend, &key).await.fence() > counted);
}

/// After the counter is deleted, the next fence from the clock is larger than every one before.
pub async fn fences_from_the_clock_survive_the_loss_of_their_counter<F: Fixture>(fixture: &F) {
    let Some(backend) = fixture.backend_with_clock_fences().await else {
        return not_applicable(ONLY_COUNTS);
    };
    let key = fresh_key("fence-lost");
    let mut largest = 0;
    for _ in 0..3 {
        for _ in 0..5 {
            let fence = cycle::<F>(&backend, &key).await.fence().get();
            assert!(fence > largest, "{fence} after {largest}");
            largest = fence;
        }
        // Data is not lost and replaced within a millisecond.
        fixture.advance(Duration::from_millis(10)).await;
        fixture.delete_fence_counter(&key).await;
        assert_eq!(fixture.fence_counter(&key).await, 0);
    }
    let (_lock_id, fence) = acquire(&backend, &key).await;
    assert!(fence.get() > largest, "{fence} after {largest}");
}

/// A counter that is ahead of the clock, because the clock was set back, continues by one.
pub async fn a_clock_that_is_behind_its_counter_never_lowers_a_fence<F: Fixture>(fixture: &F) {
    let Some(backend) = fixture.backend_with_clock_fences().await else {
        return not_applicable(ONLY_COUNTS);
    };
    let key = fresh_key("fence-ahead");
    let lease = cycle::<F>(&backend, &key).await;
    let ahead = lease.fence().get() + 86_400_000 * FenceSource::Clock.per_millisecond();
    fixture.set_fence_counter(&key, ahead).await;
    for expected in ahead + 1..ahead + 4 {
        assert_eq!(cycle::<F>(&backend, &key).await.fence().get(), expected);
    }
}

/// The last fence is granted from the clock too; after it, an acquire fails and leaves the store
/// unchanged.
pub async fn fences_from_the_clock_end_with_the_largest_one<F: Fixture>(fixture: &F) {
    let Some(backend) = fixture.backend_with_clock_fences().await else {
        return not_applicable(ONLY_COUNTS);
    };
    check_the_end(fixture, &backend).await;
}
