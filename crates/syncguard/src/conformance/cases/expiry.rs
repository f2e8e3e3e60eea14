//! When a lock is dead: the same tolerance in every operation.

use std::time::{Duration, Instant};

use super::{
    Fixture, LONG, RawLock, acquire, assert_unchanged, dead_edge_ms, fresh_id, fresh_key, granted,
    not_applicable, planted, request, ttl,
};
use crate::common::lock_id::LockId;
use crate::common::time::TIME_TOLERANCE_MS;
use crate::contract::LockBackend;
use crate::contract::outcome::{AcquireOutcome, ExtendOutcome, NotHeldReason, ReleaseOutcome};
use crate::contract::request::{ExtendRequest, Hint, ReleaseRequest};

/// Plants a lock at the very edge of its life and checks that it counts as held. On a clock that
/// moves, an answer that came too late proves nothing, and the check is repeated.
async fn is_live_at_the_edge<F: Fixture>(
    fixture: &F,
    name: &str,
    is_live: impl AsyncFn(&RawLock) -> bool,
) {
    let is_exact = fixture.clock_margin().is_zero();
    for _ in 0..100 {
        let room_ms = if is_exact { 0 } else { 30 };
        let edge = planted(&fresh_key(name), 3, 1 - TIME_TOLERANCE_MS.cast_signed() + room_ms);
        let planting = Instant::now();
        fixture.plant(&edge).await;
        if is_live(&edge).await {
            return;
        }
        let room = Duration::from_millis(room_ms.unsigned_abs());
        assert!(!is_exact && planting.elapsed() > room, "{name}: the lock must be live");
    }
    panic!("{name}: the store is too slow to be asked at the edge");
}

/// Until the tolerance has passed, every operation treats the lock as held.
pub async fn a_lock_is_live_up_to_the_edge<F: Fixture>(fixture: &F) {
    let backend = fixture.backend().await;
    is_live_at_the_edge(fixture, "acquire", async |edge| {
        let outcome = backend.acquire(&request(&edge.key)).await.expect("works");
        matches!(outcome, AcquireOutcome::Contended { .. })
    })
    .await;
    is_live_at_the_edge(fixture, "is_locked", async |edge| {
        backend.is_locked(&edge.key).await.expect("works")
    })
    .await;
    is_live_at_the_edge(fixture, "lookup by key", async |edge| {
        backend.lookup_key(&edge.key).await.expect("works").is_some()
    })
    .await;
    is_live_at_the_edge(fixture, "lookup by id", async |edge| {
        backend.lookup_id(&edge.lock_id).await.expect("works").is_some()
    })
    .await;
    is_live_at_the_edge(fixture, "extend", async |edge| {
        let extend = ExtendRequest::new(edge.lock_id, LONG);
        matches!(backend.extend(&extend).await.expect("works"), ExtendOutcome::Extended(_))
    })
    .await;
    is_live_at_the_edge(fixture, "release", async |edge| {
        let release = ReleaseRequest::new(edge.lock_id);
        backend.release(&release).await.expect("works") == ReleaseOutcome::Released
    })
    .await;
}

/// From the tolerance on, no operation treats the lock as held.
pub async fn a_lock_is_dead_from_the_edge_on<F: Fixture>(fixture: &F) {
    let backend = fixture.backend().await;
    let key = fresh_key("dead-edge");
    let edge = planted(&key, 3, dead_edge_ms());
    fixture.plant(&edge).await;
    assert!(!backend.is_locked(&key).await.expect("works"));
    assert!(backend.lookup_key(&key).await.expect("works").is_none());
    assert!(backend.lookup_id(&edge.lock_id).await.expect("works").is_none());
    let answer = backend.extend(&ExtendRequest::new(edge.lock_id, LONG)).await.expect("works");
    assert!(matches!(answer, ExtendOutcome::NotHeld(_)), "{answer:?}");
    fixture.plant(&edge).await;
    let answer = backend.release(&ReleaseRequest::new(edge.lock_id)).await.expect("works");
    assert!(matches!(answer, ReleaseOutcome::NotHeld(_)), "{answer:?}");
    fixture.plant(&edge).await;
    let lease = granted(backend.acquire(&request(&key)).await.expect("works"));
    assert_eq!(lease.fence().get(), 4);
}

/// A dead lock does not prevent an acquire, which leaves nothing of it.
pub async fn a_dead_lock_is_taken_over<F: Fixture>(fixture: &F) {
    let backend = fixture.backend().await;
    let key = fresh_key("takeover");
    let dead = planted(&key, 41, -60_000);
    fixture.plant(&dead).await;
    let (lock_id, fence) = acquire(&backend, &key).await;
    assert_eq!(fence.get(), 42);
    let stored = fixture.peek(&key).await.expect("a record is stored");
    assert_eq!(stored.lock_id, lock_id);
    assert!(backend.lookup_id(&dead.lock_id).await.expect("works").is_none());
}

/// The new TTL replaces what was left; it does not add to it, and it may be shorter.
pub async fn an_extend_replaces_the_ttl<F: Fixture>(fixture: &F) {
    let backend = fixture.backend().await;
    let key = fresh_key("extend");
    let (lock_id, _fence) = acquire(&backend, &key).await;
    for ttl_ms in [5_000, 90_000, 20_000] {
        fixture.advance(Duration::from_millis(700)).await;
        let extend = ExtendRequest::new(lock_id, ttl(ttl_ms)).with_hint(Hint::key(key.clone()));
        let ExtendOutcome::Extended(extension) = backend.extend(&extend).await.expect("works")
        else {
            panic!("the lock is held")
        };
        let stored = fixture.peek(&key).await.expect("a record is stored");
        let margin_ms = i64::try_from(fixture.clock_margin().as_millis()).expect("small");
        let spread = ttl_ms.cast_signed() - margin_ms..=ttl_ms.cast_signed();
        assert!(spread.contains(&stored.expires_in_ms), "{} ms", stored.expires_in_ms);
        let found = backend.lookup_id(&lock_id).await.expect("works").expect("held");
        assert_eq!(found.expires_at, extension.expires_at());
    }
}

/// After a shorter extend, the lock is dead when the shorter TTL is over, and a longer extend after
/// that revives nothing.
pub async fn a_shorter_extend_ends_the_lock_earlier<F: Fixture>(fixture: &F) {
    let backend = fixture.backend().await;
    let key = fresh_key("shorter");
    let (lock_id, _fence) = acquire(&backend, &key).await;
    let hint = Hint::key(key.clone());
    let extend = |ms| ExtendRequest::new(lock_id, ttl(ms)).with_hint(hint.clone());
    let answer = backend.extend(&extend(100)).await.expect("works");
    assert!(matches!(answer, ExtendOutcome::Extended(_)), "{answer:?}");
    fixture.advance(Duration::from_millis(100 + TIME_TOLERANCE_MS)).await;
    assert!(!backend.is_locked(&key).await.expect("works"), "the longer TTL still counts");
    let answer = backend.extend(&extend(90_000)).await.expect("works");
    assert!(matches!(answer, ExtendOutcome::NotHeld(_)), "{answer:?}");
    acquire(&backend, &key).await;
}

/// An extend moves the expiry and nothing else.
pub async fn an_extend_keeps_fence_and_acquisition_time<F: Fixture>(fixture: &F) {
    let backend = fixture.backend().await;
    let key = fresh_key("keeps");
    let (lock_id, fence) = acquire(&backend, &key).await;
    let before = backend.lookup_key(&key).await.expect("works").expect("held");
    fixture.advance(Duration::from_millis(50)).await;
    let extend = ExtendRequest::new(lock_id, ttl(77_000));
    let answer = backend.extend(&extend).await.expect("works");
    assert!(matches!(answer, ExtendOutcome::Extended(_)), "{answer:?}");
    let after = backend.lookup_key(&key).await.expect("works").expect("held");
    assert_eq!(after.acquired_at, before.acquired_at);
    assert_eq!(after.token, fence);
    assert_eq!(after.lock_id, lock_id);
    assert_eq!(after.key, key);
    assert_eq!(fixture.fence_counter(&key).await, fence.get());
}

/// A dead lock stays dead when it is extended, with or without a hint.
pub async fn a_dead_lock_is_never_revived<F: Fixture>(fixture: &F) {
    let backend = fixture.backend().await;
    let key = fresh_key("revive");
    let dead = planted(&key, 5, dead_edge_ms());
    for hint in [Hint::default(), Hint::key(key.clone())] {
        fixture.plant(&dead).await;
        let extend = ExtendRequest::new(dead.lock_id, LONG).with_hint(hint);
        let answer = backend.extend(&extend).await.expect("works");
        assert!(matches!(answer, ExtendOutcome::NotHeld(_)), "{answer:?}");
        assert!(!backend.is_locked(&key).await.expect("works"));
        if let Some(stored) = fixture.peek(&key).await {
            assert!(stored.expires_in_ms <= dead_edge_ms());
        }
    }
}

/// A released lock stays released when it is extended.
pub async fn a_released_lock_is_never_revived<F: Fixture>(fixture: &F) {
    let backend = fixture.backend().await;
    let key = fresh_key("released");
    let (lock_id, _fence) = acquire(&backend, &key).await;
    let hint = Hint::key(key.clone());
    let release = ReleaseRequest::new(lock_id).with_hint(hint.clone());
    assert_eq!(backend.release(&release).await.expect("works"), ReleaseOutcome::Released);
    let extend = ExtendRequest::new(lock_id, LONG).with_hint(hint);
    let answer = backend.extend(&extend).await.expect("works");
    assert!(matches!(answer, ExtendOutcome::NotHeld(_)), "{answer:?}");
    assert_unchanged(None, fixture.peek(&key).await.as_ref());
    assert!(!backend.is_locked(&key).await.expect("works"));
}

/// A lock whose record exists but is dead has expired; one without a record is not found.
pub async fn expired_and_not_found_are_distinguished<F: Fixture>(fixture: &F) {
    if !fixture.tells_expired_from_not_found() {
        return not_applicable("the backend cannot distinguish them without another request");
    }
    let backend = fixture.backend().await;
    let key = fresh_key("reason");
    let dead = planted(&key, 5, dead_edge_ms());
    fixture.plant(&dead).await;
    if fixture.peek(&key).await.is_none() {
        return not_applicable("the store has deleted the record by itself");
    }
    for hint in [Hint::default(), Hint::key(key.clone())] {
        let of_the_dead = not_held_reasons(&backend, dead.lock_id, &hint).await;
        assert_eq!(of_the_dead, [NotHeldReason::Expired; 2], "the record is dead, {hint:?}");
        let of_nothing = not_held_reasons(&backend, fresh_id(), &hint).await;
        assert_eq!(of_nothing, [NotHeldReason::NotFound; 2], "nothing has this id, {hint:?}");
    }
    let (released, _fence) = acquire(&backend, &key).await;
    backend.release(&ReleaseRequest::new(released)).await.expect("works");
    let of_the_released = not_held_reasons(&backend, released, &Hint::key(key)).await;
    assert_eq!(of_the_released, [NotHeldReason::NotFound; 2], "the lock was released");
}

/// Returns why an extend and a release find nothing held.
async fn not_held_reasons(
    backend: &impl LockBackend<Fencing = crate::backend::Fenced>,
    lock_id: LockId,
    hint: &Hint,
) -> [NotHeldReason; 2] {
    let extend = ExtendRequest::new(lock_id, LONG).with_hint(hint.clone());
    let release = ReleaseRequest::new(lock_id).with_hint(hint.clone());
    let extend = backend.extend(&extend).await.expect("works");
    let release = backend.release(&release).await.expect("works");
    match (extend, release) {
        (ExtendOutcome::NotHeld(extend), ReleaseOutcome::NotHeld(release)) => [extend, release],
        held => panic!("nothing is held: {held:?}"),
    }
}
