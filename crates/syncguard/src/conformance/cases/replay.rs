//! The same request sent twice, and requests that are taken back.

use super::{Fixture, acquire, assert_unchanged, dead_edge_ms, fresh_key, granted, request};
use crate::contract::LockBackend;
use crate::contract::outcome::{Acquire, Release};
use crate::contract::request::ReleaseRequest;

/// A replay gets what the first sending got, and nothing is written.
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

/// A replay never brings a dead lease back to life.
pub async fn a_request_whose_lease_is_over_is_spent<F: Fixture>(fixture: &F) {
    let backend = fixture.backend().await;
    let key = fresh_key("spent");
    let request = request(&key);
    let lease = granted(backend.acquire(&request).await.expect("works"));
    let mut over = fixture.peek(&key).await.expect("a record is stored");
    over.expires_in_ms = dead_edge_ms();
    fixture.plant(&over).await;
    let outcome = backend.acquire(&request).await.expect("works");
    assert!(matches!(outcome, Acquire::Spent), "{outcome:?}");
    assert!(!backend.is_locked(&key).await.expect("works"));
    assert_eq!(fixture.fence_counter(&key).await, lease.fence().get());
    // The key itself is free for everybody else.
    acquire(&backend, &key).await;
}

/// An undo releases a lock whose acquire was never answered; of nothing it finds nothing.
pub async fn an_undo_frees_what_was_taken<F: Fixture>(fixture: &F) {
    let backend = fixture.backend().await;
    let key = fresh_key("undo");
    let taken = request(&key);
    granted(backend.acquire(&taken).await.expect("works"));
    let undo = ReleaseRequest::undo(&taken);
    assert_eq!(backend.release(&undo).await.expect("works"), Release::Released);
    assert!(!backend.is_locked(&key).await.expect("works"));
    let again = backend.release(&undo).await.expect("works");
    assert!(matches!(again, Release::NotHeld(_)), "{again:?}");

    let never_sent = request(&key);
    let answer = backend.release(&ReleaseRequest::undo(&never_sent)).await.expect("works");
    assert!(matches!(answer, Release::NotHeld(_)), "{answer:?}");
    acquire(&backend, &key).await;
}
