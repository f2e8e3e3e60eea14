//! Lookups, which only read.

use super::{Fixture, acquire, assert_unchanged, dead_edge_ms, fresh_id, fresh_key, planted};
use crate::contract::LockBackend;
use crate::contract::request::ReleaseRequest;
use crate::diagnostics;

/// Lookups by key and by id find the same lock.
pub async fn lookups_by_key_and_by_id_agree<F: Fixture>(fixture: &F) {
    let backend = fixture.backend().await;
    let key = fresh_key("lookup");
    let (lock_id, fence) = acquire(&backend, &key).await;
    let by_key = diagnostics::get_by_key_raw(&backend, &key).await.expect("works").expect("held");
    let by_id = diagnostics::get_by_id_raw(&backend, &lock_id).await.expect("works").expect("held");
    assert_eq!(by_key, by_id);
    assert_eq!(by_key.key, key);
    assert_eq!(by_key.lock_id, lock_id);
    assert_eq!(by_key.info.fence, Some(fence));
    assert_eq!(by_key.info.key_hash, key.hash_id());
    assert_eq!(by_key.info.lock_id_hash, lock_id.hash_id());
    let stored = fixture.peek(&key).await.expect("a record is stored");
    let life_ms = by_key.info.expires_at.since(by_key.info.acquired_at).as_millis();
    let stored_ms = stored.expires_in_ms + stored.acquired_ms_ago;
    assert_eq!(u128::from(stored_ms.unsigned_abs()), life_ms);
    assert!(diagnostics::owns(&backend, &lock_id).await.expect("works"));
}

/// A lookup finds neither a free nor a dead lock.
pub async fn free_and_dead_locks_are_not_found<F: Fixture>(fixture: &F) {
    let backend = fixture.backend().await;
    let key = fresh_key("nothing");
    assert!(backend.lookup_key(&key).await.expect("works").is_none());
    assert!(backend.lookup_id(&fresh_id()).await.expect("works").is_none());
    let dead = planted(&key, 1, dead_edge_ms());
    fixture.plant(&dead).await;
    assert!(backend.lookup_key(&key).await.expect("works").is_none());
    assert!(backend.lookup_id(&dead.lock_id).await.expect("works").is_none());
    assert!(!diagnostics::owns(&backend, &dead.lock_id).await.expect("works"));
    let (lock_id, _fence) = acquire(&backend, &key).await;
    backend.release(&ReleaseRequest::new(lock_id)).await.expect("works");
    assert!(backend.lookup_id(&lock_id).await.expect("works").is_none());
}

/// The result of a lookup shows neither key nor lock id, unless it is opened raw.
pub async fn lookup_results_are_sanitized<F: Fixture>(fixture: &F) {
    let backend = fixture.backend().await;
    let key = fresh_key("canary");
    let (lock_id, _fence) = acquire(&backend, &key).await;
    let stored = backend.lookup_key(&key).await.expect("works").expect("held");
    let info = diagnostics::get_by_id(&backend, &lock_id).await.expect("works").expect("held");
    let raw = diagnostics::get_by_key_raw(&backend, &key).await.expect("works").expect("held");
    for shown in [format!("{stored:?}"), format!("{info:?}"), format!("{raw:?}")] {
        assert!(!shown.contains("canary"), "{shown}");
        assert!(!shown.contains(lock_id.expose()), "a lock id was shown");
    }
}

/// A read extends nothing, cleans up nothing and counts nothing.
pub async fn reads_change_nothing<F: Fixture>(fixture: &F) {
    let backend = fixture.backend().await;
    for expires_in_ms in [20_000, dead_edge_ms(), -60_000] {
        let key = fresh_key("read-only");
        let lock = planted(&key, 9, expires_in_ms);
        fixture.plant(&lock).await;
        let before = fixture.peek(&key).await;
        backend.is_locked(&key).await.expect("works");
        drop(backend.lookup_key(&key).await.expect("works"));
        drop(backend.lookup_id(&lock.lock_id).await.expect("works"));
        assert_unchanged(before.as_ref(), fixture.peek(&key).await.as_ref());
        assert_eq!(fixture.knows_id(&lock.lock_id).await, before.is_some());
        assert_eq!(fixture.fence_counter(&key).await, 9);
    }
    let unused = fresh_key("unused");
    assert!(!backend.is_locked(&unused).await.expect("works"));
    assert_eq!(fixture.peek(&unused).await, None);
    assert_eq!(fixture.fence_counter(&unused).await, 0);
}
