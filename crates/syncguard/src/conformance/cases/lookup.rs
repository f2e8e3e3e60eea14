//! Lookups, which only read.

use std::time::Duration;

use super::admin::listed;
use super::{
    Fixture, LONG, acquire, assert_unchanged, dead_edge_ms, fresh_id, fresh_key, granted, planted,
    request, ttl,
};
use crate::common::holder::HolderInfo;
use crate::common::time::TIME_TOLERANCE_MS;
use crate::contract::LockBackend;
use crate::contract::outcome::ExtendOutcome;
use crate::contract::request::{AcquireRequest, ExtendRequest, ReleaseRequest};
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

/// Lookups and lists return the holder of the request that got the lock, through extends and
/// replays, and never that of an earlier lock.
pub async fn a_lock_names_its_holder_until_the_next_one<F: Fixture>(fixture: &F) {
    let backend = fixture.backend().await;
    let key = fresh_key("holder");
    let holder = HolderInfo::of_this_process(Some("a \"label\" of / \\ ünïcode"));
    let named = request(&key).with_holder(Some(holder.clone()));
    granted(backend.acquire(&named).await.expect("works"));
    let extend = ExtendRequest::new(named.lock_id(), LONG);
    assert!(matches!(backend.extend(&extend).await, Ok(ExtendOutcome::Extended(_))));
    granted(backend.acquire(&named).await.expect("works"));
    let by_key = diagnostics::get_by_key(&backend, &key).await.expect("works").expect("held");
    if !fixture.stores_holders() {
        assert_eq!(by_key.holder, None);
        return;
    }
    assert_eq!(by_key.holder.as_ref(), Some(&holder));
    let lock_id = named.lock_id();
    let by_id = diagnostics::get_by_id(&backend, &lock_id).await.expect("works").expect("held");
    assert_eq!(by_id.holder.as_ref(), Some(&holder));
    if let Some(listed) = listed(&backend).await {
        let listed = listed.iter().find(|lock| lock.key == key).expect("listed");
        assert_eq!(listed.info.holder.as_ref(), Some(&holder));
    }
    // A holder that is not named follows: once after a release, once after an expiry.
    backend.release(&ReleaseRequest::new(lock_id)).await.expect("works");
    let (nameless, _fence) = acquire(&backend, &key).await;
    let info = diagnostics::get_by_key(&backend, &key).await.expect("works").expect("held");
    assert_eq!(info.holder, None);
    backend.release(&ReleaseRequest::new(nameless)).await.expect("works");
    let short = AcquireRequest::new(key.clone(), ttl(1)).expect("randomness");
    let short = short.with_holder(Some(holder));
    granted(backend.acquire(&short).await.expect("works"));
    fixture.advance(Duration::from_millis(TIME_TOLERANCE_MS + 100)).await;
    acquire(&backend, &key).await;
    let info = diagnostics::get_by_key(&backend, &key).await.expect("works").expect("held");
    assert_eq!(info.holder, None, "an expired lock leaves its holder behind");
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
