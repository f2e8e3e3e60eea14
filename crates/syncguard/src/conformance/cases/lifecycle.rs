//! Taking and releasing a lock.

use std::time::Duration;

use super::{Fixture, LONG, acquire, fresh_id, fresh_key, granted, key, request};
use crate::contract::LockBackend;
use crate::contract::outcome::ReleaseOutcome;
use crate::contract::request::ReleaseRequest;

/// A lock is free, then held, then free again, in every answer.
pub async fn an_acquired_lock_is_held_until_it_is_released<F: Fixture>(fixture: &F) {
    let backend = fixture.backend().await;
    let key = fresh_key("lifecycle");
    assert!(!backend.is_locked(&key).await.expect("works"));
    let (lock_id, _fence) = acquire(&backend, &key).await;
    assert!(backend.is_locked(&key).await.expect("works"));
    let released = backend.release(&ReleaseRequest::new(lock_id)).await.expect("works");
    assert_eq!(released, ReleaseOutcome::Released);
    assert!(!backend.is_locked(&key).await.expect("works"));
    acquire(&backend, &key).await;
}

/// The time authority computes the expiry, and the same expiry is stored and returned.
pub async fn the_expiry_is_now_plus_ttl_by_the_time_authority<F: Fixture>(fixture: &F) {
    let backend = fixture.backend().await;
    let key = fresh_key("expiry");
    // Time that passes before the call is not part of the lock's life.
    fixture.advance(Duration::from_millis(700)).await;
    let request = request(&key);
    let lease = granted(backend.acquire(&request).await.expect("works"));
    let stored = fixture.peek(&key).await.expect("a record is stored");
    assert_eq!(stored.lock_id, request.lock_id());
    assert_eq!(stored.fence, lease.fence());
    let ttl_ms = LONG.as_millis().cast_signed();
    assert_eq!(stored.expires_in_ms + stored.acquired_ms_ago, ttl_ms);
    let margin_ms = i64::try_from(fixture.clock_margin().as_millis()).expect("small");
    let spread = ttl_ms - margin_ms..=ttl_ms;
    assert!(spread.contains(&stored.expires_in_ms), "{} ms", stored.expires_in_ms);
    let found = backend.lookup_key(&key).await.expect("works").expect("held");
    assert_eq!(found.expires_at, lease.expires_at());
}

/// After a release the store holds the fence counter and nothing else.
pub async fn a_release_leaves_nothing_but_the_fence_counter<F: Fixture>(fixture: &F) {
    let backend = fixture.backend().await;
    let key = fresh_key("residue");
    let (lock_id, fence) = acquire(&backend, &key).await;
    assert!(fixture.knows_id(&lock_id).await);
    assert_eq!(
        backend.release(&ReleaseRequest::new(lock_id)).await.expect("works"),
        ReleaseOutcome::Released
    );
    assert_eq!(fixture.peek(&key).await, None);
    assert!(!fixture.knows_id(&lock_id).await, "an index entry was left behind");
    assert_eq!(fixture.fence_counter(&key).await, fence.get());
}

/// A lock on one key does not affect another, even if only upper and lower case differ.
pub async fn distinct_keys_are_distinct_locks<F: Fixture>(fixture: &F) {
    let backend = fixture.backend().await;
    let unique = fresh_id();
    let [upper, lower] = ["Job", "job"].map(|name| key(&format!("{name}:{}", unique.expose())));
    let (first, _fence) = acquire(&backend, &upper).await;
    acquire(&backend, &lower).await;
    assert_eq!(
        backend.release(&ReleaseRequest::new(first)).await.expect("works"),
        ReleaseOutcome::Released
    );
    assert!(backend.is_locked(&lower).await.expect("works"));
}

/// The capabilities of a backend agree with its type, and every backend on a store has the same.
pub async fn capabilities_match_the_type_and_every_handle<F: Fixture>(fixture: &F) {
    let capabilities = fixture.backend().await.capabilities();
    assert!(capabilities.fencing, "a backend whose type is fenced must report it");
    let name = capabilities.backend;
    assert!(!name.is_empty() && !name.contains(|letter: char| letter.is_whitespace()), "{name:?}");
    assert_eq!(fixture.backend().await.capabilities(), capabilities);
    assert_eq!(fixture.backend_with_cleanup().await.capabilities(), capabilities);
}
