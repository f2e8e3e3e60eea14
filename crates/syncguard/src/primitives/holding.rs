//! Locks that are held while others are waited for.

use std::future::pending;
use std::time::Duration;

use crate::common::error::{Error, ErrorCode, Result};
use crate::common::join::{first_of, join_all};
use crate::contract::LockBackend;
use crate::contract::outcome::ExtendOutcome;
use crate::lock::clock::LocalInstant;
use crate::lock::guard::LockGuard;
use crate::lock::locker::Locker;

/// Keeps locks while another one is waited for. Returns when one of them is lost.
pub(super) async fn keep<B: LockBackend>(locker: &Locker<B>, held: &[LockGuard<B>]) {
    let ttl = locker.options().ttl.as_duration();
    // Before the loss is signaled, but not in a loop without a pause.
    let pause = (ttl / 3).min(ttl.saturating_sub(locker.options().stop_margin) / 2);
    let pause = pause.max(Duration::from_millis(1));
    let due_with = ttl.saturating_sub(pause);
    let renewed = async {
        let mut least = Duration::ZERO;
        // Otherwise they renew themselves.
        while !locker.options().renew {
            // Some may have been held since the wait before this one.
            let Some(left) = held.iter().map(LockGuard::remaining).min() else { break };
            locker.sleep(left.saturating_sub(due_with).max(least)).await;
            if !extend(locker, held).await {
                return;
            }
            // After an error, the store is not asked again at once.
            least = pause / 4;
        }
        pending::<()>().await;
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

/// Makes attempts at the same time. If one of them gets nothing, or gets its lock only after that
/// of another is over, gives back what the others got.
pub(super) async fn all_or_none<B: LockBackend>(
    attempts: impl IntoIterator<Item = impl Future<Output = Result<Option<LockGuard<B>>>>>,
) -> Result<Option<Vec<LockGuard<B>>>> {
    let tried = join_all(attempts).await;
    let count = tried.len();
    let (mut taken, mut refusal) = (Vec::new(), None);
    for attempt in tried {
        match attempt {
            Ok(got) => taken.extend(got),
            Err(error) => refusal = Some(error),
        }
    }
    if taken.len() == count {
        if taken.iter().all(LockGuard::is_valid) {
            return Ok(Some(taken));
        }
        let message = "the store granted all locks, but the TTL of one was over by then";
        refusal = Some(Error::new(ErrorCode::NetworkTimeout, message));
    }
    give_back(taken).await;
    refusal.map_or(Ok(None), Err)
}

/// Limits a call that takes several locks, with everything that it does between its waits. Returns
/// `None` when its time is over. What it holds then is released in the background.
pub(super) async fn bounded<B: LockBackend, T>(
    locker: &Locker<B>,
    deadline: Option<LocalInstant>,
    call: impl Future<Output = Result<T>>,
) -> Result<Option<T>> {
    /// The waits of the call end in time by themselves, and then ask who holds the lock.
    const GRACE: Duration = Duration::from_millis(300);
    let late = async {
        match deadline {
            Some(deadline) => {
                locker.sleep(deadline.since(locker.now())).await;
                locker.sleep(GRACE).await;
            }
            None => pending().await,
        }
    };
    tokio::select! {
        biased;
        outcome = call => outcome.map(Some),
        () = late => Ok(None),
        () = locker.stopped() => {
            locker.check_usable()?;
            Err(Error::canceled("the wait for the locks was canceled"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lock::options::LockOptions;
    use crate::testing::paused_locker;

    #[tokio::test(start_paused = true)]
    async fn locks_that_are_over_before_the_last_is_granted_are_not_all_held() {
        const TTL: Duration = Duration::from_secs(1);
        let (locker, _faults) = paused_locker(LockOptions::default().ttl(TTL)).expect("a runtime");
        let tried = all_or_none([Duration::ZERO, TTL].map(async |late| {
            locker.sleep(late).await;
            locker.try_lock(format!("after {late:?}")).await
        }));
        assert_eq!(tried.await.expect_err("one is over").code(), ErrorCode::NetworkTimeout);
        assert!(locker.try_lock("after 1s").await.expect("works").is_some(), "it was given back");
    }
}
