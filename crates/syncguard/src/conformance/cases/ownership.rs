//! Only the owner can release and extend a lock.

use std::sync::Arc;

use super::{Fixture, LONG, acquire, assert_unchanged, fresh_id, fresh_key, planted};
use crate::contract::LockBackend;
use crate::contract::outcome::{ExtendOutcome, ReleaseOutcome};
use crate::contract::request::{ExtendRequest, Hint, ReleaseRequest};

/// An id that holds nothing releases and extends nothing, with or without a hint.
pub async fn another_id_can_neither_release_nor_extend<F: Fixture>(fixture: &F) {
    let backend = fixture.backend().await;
    let key = fresh_key("stranger");
    acquire(&backend, &key).await;
    let before = fixture.peek(&key).await;
    let stranger = fresh_id();
    for hint in [Hint::default(), Hint::key(key.clone())] {
        let release = ReleaseRequest::new(stranger).with_hint(hint.clone());
        let answer = backend.release(&release).await.expect("no error");
        assert!(matches!(answer, ReleaseOutcome::NotHeld(_)), "{answer:?}");
        let extend = ExtendRequest::new(stranger, LONG).with_hint(hint);
        let answer = backend.extend(&extend).await.expect("no error");
        assert!(matches!(answer, ExtendOutcome::NotHeld(_)), "{answer:?}");
    }
    assert_unchanged(before.as_ref(), fixture.peek(&key).await.as_ref());
}

/// However many releases of a lock run in parallel, exactly one succeeds.
pub async fn only_one_of_many_releases_succeeds<F: Fixture>(fixture: &F) {
    let backend = Arc::new(fixture.backend().await);
    let key = fresh_key("once");
    let (lock_id, _fence) = acquire(&*backend, &key).await;
    let releases: Vec<_> = (0..8)
        .map(|_| {
            let backend = Arc::clone(&backend);
            let request = ReleaseRequest::new(lock_id);
            tokio::spawn(async move { backend.release(&request).await.expect("works") })
        })
        .collect();
    let mut successes = 0;
    for release in releases {
        successes += usize::from(release.await.expect("no panic") == ReleaseOutcome::Released);
    }
    assert_eq!(successes, 1);
    let again = backend.release(&ReleaseRequest::new(lock_id)).await.expect("works");
    assert!(matches!(again, ReleaseOutcome::NotHeld(_)), "{again:?}");
}

/// A holder that returns late cannot affect the one that took over.
pub async fn an_old_id_cannot_touch_the_next_holder<F: Fixture>(fixture: &F) {
    let backend = fixture.backend().await;
    let key = fresh_key("late");
    let old = planted(&key, 7, -60_000);
    fixture.plant(&old).await;
    acquire(&backend, &key).await;
    let before = fixture.peek(&key).await;
    for hint in [Hint::default(), Hint::key(key.clone())] {
        let release = ReleaseRequest::new(old.lock_id).with_hint(hint.clone());
        let answer = backend.release(&release).await.expect("no error");
        assert!(matches!(answer, ReleaseOutcome::NotHeld(_)), "{answer:?}");
        let extend = ExtendRequest::new(old.lock_id, LONG).with_hint(hint);
        let answer = backend.extend(&extend).await.expect("no error");
        assert!(matches!(answer, ExtendOutcome::NotHeld(_)), "{answer:?}");
    }
    assert!(backend.lookup_id(&old.lock_id).await.expect("works").is_none());
    assert_unchanged(before.as_ref(), fixture.peek(&key).await.as_ref());
}

/// A hint that names a free key, or one that another holder has, changes no answer.
pub async fn a_wrong_hint_changes_no_answer<F: Fixture>(fixture: &F) {
    let backend = fixture.backend().await;
    let (key, held, free) = (fresh_key("mine"), fresh_key("theirs"), fresh_key("free"));
    acquire(&backend, &held).await;
    let others = fixture.peek(&held).await;
    for wrong in [&held, &free] {
        let (lock_id, _fence) = acquire(&backend, &key).await;
        let hint = Hint::key(wrong.clone());
        let extend = ExtendRequest::new(lock_id, LONG).with_hint(hint.clone());
        let answer = backend.extend(&extend).await.expect("works");
        assert!(matches!(answer, ExtendOutcome::Extended(_)), "{answer:?}");
        let release = ReleaseRequest::new(lock_id).with_hint(hint);
        let answer = backend.release(&release).await.expect("works");
        assert_eq!(answer, ReleaseOutcome::Released);
    }
    assert_unchanged(others.as_ref(), fixture.peek(&held).await.as_ref());
    assert_eq!(fixture.peek(&free).await, None);
}
