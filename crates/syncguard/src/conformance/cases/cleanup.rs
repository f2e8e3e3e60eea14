//! Opportunistic cleanup in `is_locked`: only if it is enabled, and never of a counter.

use std::time::Duration;

use super::{Fixture, fresh_key, planted};
use crate::common::time::{CLEANUP_GUARD_MS, TIME_TOLERANCE_MS};
use crate::contract::LockBackend;

/// By default, a dead record stays where it is.
pub async fn nothing_is_cleaned_up_by_default<F: Fixture>(fixture: &F) {
    let backend = fixture.backend().await;
    let key = fresh_key("no-cleanup");
    fixture.plant(&planted(&key, 3, -600_000)).await;
    let before = fixture.peek(&key).await;
    assert!(!backend.is_locked(&key).await.expect("works"));
    tokio::time::sleep(Duration::from_millis(20)).await;
    assert_eq!(fixture.peek(&key).await.is_some(), before.is_some());
}

/// A record that has been dead for long is deleted, and its counter stays.
pub async fn an_old_record_is_cleaned_up_and_its_counter_is_kept<F: Fixture>(fixture: &F) {
    let backend = fixture.backend_with_cleanup().await;
    let key = fresh_key("cleanup");
    let old = planted(&key, 3, -600_000);
    fixture.plant(&old).await;
    // Cleanup runs in the background and at a limited rate, so it may take a few calls.
    for _ in 0..100 {
        assert!(!backend.is_locked(&key).await.expect("works"));
        if fixture.peek(&key).await.is_none() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(fixture.peek(&key).await, None);
    assert!(!fixture.knows_id(&old.lock_id).await, "an index entry was left behind");
    assert_eq!(fixture.fence_counter(&key).await, 3);
}

/// A record that is live, or was until a moment ago, is not deleted.
pub async fn a_recent_record_is_not_cleaned_up<F: Fixture>(fixture: &F) {
    let margin_ms = i64::try_from(fixture.clock_margin().as_millis()).expect("small");
    let guard_edge_ms = margin_ms - CLEANUP_GUARD_MS.cast_signed();
    for expires_in_ms in [10_000, 1 - TIME_TOLERANCE_MS.cast_signed(), guard_edge_ms] {
        let backend = fixture.backend_with_cleanup().await;
        let key = fresh_key("no-cleanup-yet");
        fixture.plant(&planted(&key, 3, expires_in_ms)).await;
        let before = fixture.peek(&key).await;
        backend.is_locked(&key).await.expect("works");
        tokio::time::sleep(Duration::from_millis(20)).await;
        assert_eq!(fixture.peek(&key).await.is_some(), before.is_some());
    }
}
