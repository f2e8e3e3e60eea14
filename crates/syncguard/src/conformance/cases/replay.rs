//! Requests that are sent twice, and requests that are undone.

use std::time::Duration;

use super::cancellation::{MOST_POLLS, poll_then_drop};
use super::{
    Fixture, acquire, assert_unchanged, dead_edge_ms, fresh_key, granted, not_applicable, request,
    ttl,
};
use crate::contract::LockBackend;
use crate::contract::outcome::{AcquireOutcome, ExtendOutcome, ReleaseOutcome};
use crate::contract::request::{ExtendRequest, Hint, ReleaseRequest};

/// A replay gets the same lease as the first request, and nothing is written.
pub async fn the_same_request_gets_the_same_lease<F: Fixture>(fixture: &F) {
    let backend = fixture.backend().await;
    let key = fresh_key("replay");
    let request = request(&key);
    let first = granted(backend.acquire(&request).await.expect("works"));
    let before = fixture.peek(&key).await;
    let second = granted(backend.acquire(&request.clone()).await.expect("works"));
    assert_eq!(first.fence(), second.fence());
    assert_eq!(first.expires_at(), second.expires_at());
    assert_unchanged(before.as_ref(), fixture.peek(&key).await.as_ref());
    assert_eq!(fixture.fence_counter(&key).await, first.fence().get());
}

/// A replay never revives a dead lease.
pub async fn a_request_whose_lease_is_over_is_already_used<F: Fixture>(fixture: &F) {
    let backend = fixture.backend().await;
    let key = fresh_key("spent");
    let request = request(&key);
    let lease = granted(backend.acquire(&request).await.expect("works"));
    let mut over = fixture.peek(&key).await.expect("a record is stored");
    over.expires_in_ms = dead_edge_ms();
    fixture.plant(&over).await;
    let outcome = backend.acquire(&request).await.expect("works");
    assert!(matches!(outcome, AcquireOutcome::AlreadyUsed), "{outcome:?}");
    assert!(!backend.is_locked(&key).await.expect("works"));
    assert_eq!(fixture.fence_counter(&key).await, lease.fence().get());
    // The key itself is free for other requests.
    acquire(&backend, &key).await;
}

/// A replay after an extend returns the expiry that is stored now, not that of the first grant.
pub async fn a_replay_gets_the_lease_as_it_is_now<F: Fixture>(fixture: &F) {
    let backend = fixture.backend().await;
    let key = fresh_key("replay-extended");
    let request = request(&key);
    let first = granted(backend.acquire(&request).await.expect("works"));
    for ttl_ms in [5_000, 90_000] {
        let extend = ExtendRequest::new(request.lock_id(), ttl(ttl_ms));
        let ExtendOutcome::Extended(extension) = backend.extend(&extend).await.expect("works")
        else {
            panic!("the lock is held")
        };
        let replay = granted(backend.acquire(&request).await.expect("works"));
        assert_eq!(replay.expires_at(), extension.expires_at());
        assert_eq!(replay.fence(), first.fence());
    }
}

/// However often a request was sent, its lock is held once and released once.
pub async fn a_replayed_request_is_released_once<F: Fixture>(fixture: &F) {
    let backend = fixture.backend().await;
    let key = fresh_key("replay-release");
    let request = request(&key);
    for _ in 0..3 {
        granted(backend.acquire(&request).await.expect("works"));
    }
    let release = ReleaseRequest::new(request.lock_id()).with_hint(Hint::key(key.clone()));
    assert_eq!(backend.release(&release).await.expect("works"), ReleaseOutcome::Released);
    assert!(!backend.is_locked(&key).await.expect("works"), "a copy is still held");
    assert_eq!(fixture.peek(&key).await, None);
    let again = backend.release(&release).await.expect("works");
    assert!(matches!(again, ReleaseOutcome::NotHeld(_)), "{again:?}");
    let extend =
        ExtendRequest::new(request.lock_id(), ttl(5_000)).with_hint(Hint::key(key.clone()));
    let late = backend.extend(&extend).await.expect("works");
    assert!(matches!(late, ExtendOutcome::NotHeld(_)), "{late:?}");
    acquire(&backend, &key).await;
}

/// An undo releases a lock whose acquire was never answered; if there is none, it is not held.
pub async fn an_undo_frees_the_lock<F: Fixture>(fixture: &F) {
    let backend = fixture.backend().await;
    let key = fresh_key("undo");
    let taken = request(&key);
    granted(backend.acquire(&taken).await.expect("works"));
    let undo = ReleaseRequest::undo(&taken);
    assert_eq!(backend.release(&undo).await.expect("works"), ReleaseOutcome::Released);
    assert!(!backend.is_locked(&key).await.expect("works"));
    let again = backend.release(&undo).await.expect("works");
    assert!(matches!(again, ReleaseOutcome::NotHeld(_)), "{again:?}");

    let never_sent = request(&key);
    let answer = backend.release(&ReleaseRequest::undo(&never_sent)).await.expect("works");
    assert!(matches!(answer, ReleaseOutcome::NotHeld(_)), "{answer:?}");
    acquire(&backend, &key).await;
}

/// An undo also frees a lock whose request was sent more than once, or extended.
pub async fn an_undo_after_a_replay_frees_the_lock<F: Fixture>(fixture: &F) {
    let backend = fixture.backend().await;
    let key = fresh_key("undo-replay");
    let taken = request(&key);
    granted(backend.acquire(&taken).await.expect("works"));
    granted(backend.acquire(&taken).await.expect("works"));
    let extend = ExtendRequest::new(taken.lock_id(), ttl(90_000));
    let answer = backend.extend(&extend).await.expect("works");
    assert!(matches!(answer, ExtendOutcome::Extended(_)), "{answer:?}");
    let undo = ReleaseRequest::undo(&taken);
    assert_eq!(backend.release(&undo).await.expect("works"), ReleaseOutcome::Released);
    assert!(!backend.is_locked(&key).await.expect("works"), "a copy is still held");
    assert_eq!(fixture.peek(&key).await, None);
    acquire(&backend, &key).await;
}

/// If an answered undo is final, an acquire that was dropped before it takes no lock after it,
/// wherever it was dropped.
pub async fn nothing_is_acquired_after_a_final_undo<F: Fixture>(fixture: &F) {
    let backend = fixture.backend().await;
    if !backend.capabilities().undo_is_final {
        return not_applicable("an undo is not final here");
    }
    for polls in 1..MOST_POLLS {
        let key = fresh_key("undo-final");
        let request = request(&key);
        let has_ended = poll_then_drop(backend.acquire(&request), polls).await;
        backend.release(&ReleaseRequest::undo(&request)).await.expect("works");
        // Time for a copy that is still in flight.
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(!backend.is_locked(&key).await.expect("works"), "taken after {polls} polls");
        acquire(&backend, &key).await;
        if has_ended {
            return;
        }
    }
    panic!("the acquire did not end within {MOST_POLLS} polls");
}
