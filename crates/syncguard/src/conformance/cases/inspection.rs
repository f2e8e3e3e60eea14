//! Listing and breaking locks, where a backend offers it.

use super::{Fixture, acquire, dead_edge_ms, fresh_key, planted};
use crate::contract::LockBackend;
use crate::diagnostics::{self, LockInfoRaw};

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
