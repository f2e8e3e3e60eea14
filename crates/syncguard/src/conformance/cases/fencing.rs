//! Fences, which grow with every acquisition.

use super::{
    Fixture, acquire, assert_unchanged, fresh_key, granted, not_applicable, planted, request,
};
use crate::common::error::ErrorCode;
use crate::common::fence::Fence;
use crate::conformance::log::warnings_of;
use crate::contract::LockBackend;
use crate::contract::outcome::ReleaseOutcome;
use crate::contract::request::ReleaseRequest;

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
    let backend = fixture.backend().await;
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
