//! Locks that are held while others are waited for.

use crate::common::join::{first_of, join_all};
use crate::contract::LockBackend;
use crate::contract::outcome::ExtendOutcome;
use crate::lock::guard::LockGuard;
use crate::lock::locker::Locker;

/// Keeps locks while another one is waited for. Returns when one of them is lost.
pub(super) async fn keep<B: LockBackend>(locker: &Locker<B>, held: &[LockGuard<B>]) {
    let pause = locker.options().ttl.as_duration() / 3;
    let renewed = async {
        loop {
            locker.sleep(pause).await;
            // Otherwise they renew themselves.
            if !locker.options().renew && !extend(locker, held).await {
                return;
            }
        }
    };
    tokio::select! {
        biased;
        _reason = first_of(held.iter().map(LockGuard::lost)) => {}
        () = renewed => {}
    }
}

/// Extends locks to their whole TTL. Returns `false` if one is lost.
pub(super) async fn extend<B: LockBackend>(locker: &Locker<B>, held: &[LockGuard<B>]) -> bool {
    let ttl = locker.options().ttl;
    let extended = join_all(held.iter().map(|guard| guard.extend(ttl))).await;
    // After an error, the guard itself knows how long it is held.
    !extended.iter().any(|outcome| matches!(outcome, Ok(ExtendOutcome::NotHeld(_))))
}

/// Releases locks that are not needed, within the time that their options allow.
pub(super) async fn give_back<B: LockBackend>(guards: Vec<LockGuard<B>>) {
    join_all(guards.iter().map(LockGuard::finish)).await;
}
