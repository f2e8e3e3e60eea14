//! Listing and breaking locks, where a backend offers it.

use std::sync::Arc;
use std::time::Duration;

use super::{Fixture, acquire, dead_edge_ms, fresh_key, not_applicable, planted, ttl};
use crate::common::holder::{BreakNote, HolderInfo};
use crate::common::lost_reason::LostReason;
use crate::contract::LockBackend;
use crate::diagnostics::{self, LockInfoRaw};
use crate::lock::clock::LocalClock;
use crate::lock::locker::Locker;

/// Returns all locks that the store lists, page by page; `None` if the backend cannot list them.
pub(super) async fn listed(
    backend: &impl LockBackend<Fencing = crate::backend::Fenced>,
) -> Option<Vec<LockInfoRaw>> {
    let admin = backend.admin()?;
    let (mut found, mut next) = (Vec::new(), None);
    loop {
        let page = admin.list(next.as_ref()).await.expect("works");
        found.extend(page.locks.into_iter().map(LockInfoRaw::from));
        next = page.next;
        if next.is_none() {
            return Some(found);
        }
    }
}

/// Live locks are listed as they are; dead locks and fence counters are not.
pub async fn live_locks_are_listed_and_nothing_else<F: Fixture>(fixture: &F) {
    let backend = fixture.backend().await;
    let (held, freed, dead) = (fresh_key("listed"), fresh_key("freed"), fresh_key("dead"));
    let mut keys = vec![held.clone()];
    keys.extend((0..250).map(|number| fresh_key(&format!("listed-{number}"))));
    for key in &keys {
        acquire(&backend, key).await;
    }
    fixture.set_fence_counter(&freed, 7).await;
    fixture.plant(&planted(&dead, 1, dead_edge_ms())).await;
    let Some(found) = listed(&backend).await else { return };
    for key in &keys {
        assert!(found.iter().any(|lock| lock.key == *key), "a live lock is missing");
    }
    assert!(!found.iter().any(|lock| lock.key == freed || lock.key == dead), "not a lock");
    let shown = found.iter().find(|lock| lock.key == held).expect("checked");
    let by_key = diagnostics::get_by_key_raw(&backend, &held).await.expect("works").expect("held");
    assert_eq!(*shown, by_key);
}

/// A break deletes the lock that was shown, and never the next one on the same key.
pub async fn a_break_deletes_only_the_lock_that_was_shown<F: Fixture>(fixture: &F) {
    let backend = fixture.backend().await;
    let key = fresh_key("broken");
    let (_lock_id, fence) = acquire(&backend, &key).await;
    let shown = diagnostics::get_by_key_raw(&backend, &key).await.expect("works").expect("held");
    assert!(diagnostics::break_lock(&backend, &shown).await.expect("works"));
    let (next_id, next_fence) = acquire(&backend, &key).await;
    assert!(next_fence > fence);
    assert!(!diagnostics::break_lock(&backend, &shown).await.expect("works"));
    assert!(diagnostics::owns(&backend, &next_id).await.expect("works"), "the next one stays");
}

/// A guard with renewal learns that its lock was broken, by whom and why, long before it would
/// renew the lock.
pub async fn a_broken_lock_is_lost_at_once_with_who_and_why<F: Fixture>(fixture: &F) {
    const SOON: Duration = Duration::from_secs(10);
    let (backend, other) = (Arc::new(fixture.backend().await), fixture.backend().await);
    let key = fresh_key("victim");
    if backend.watch(&key).await.is_none() {
        return not_applicable("the backend sends no notifications to holders");
    }
    let builder = Locker::builder(Arc::clone(&backend)).clock(LocalClock::Tokio);
    let locker = builder.ttl(ttl(120_000)).renew().build().expect("inside a runtime");
    let guard = locker.lock(&key).await.expect("free");
    // Longer than a guard waits before it watches.
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert!(guard.is_valid());
    let shown = diagnostics::get_by_key_raw(&other, &key).await.expect("works").expect("held");
    let note = BreakNote::new(Some(HolderInfo::of_this_process(Some("ops"))), Some("stuck"));
    assert!(diagnostics::break_lock_with(&other, &shown, note.clone()).await.expect("works"));
    let lost = tokio::time::timeout(SOON, guard.lost()).await.expect("not at the next renewal");
    if fixture.passes_break_notes_on() {
        assert_eq!(lost, LostReason::from(note));
    } else {
        assert_eq!(lost, LostReason::NotHeld);
    }
    let stranger = super::fresh_id();
    assert_eq!(backend.break_note(&stranger).await, None);
}
