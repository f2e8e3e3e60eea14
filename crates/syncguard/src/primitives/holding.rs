//! Locks that are held while others are waited for.

use std::future::pending;
use std::time::Duration;

use crate::common::error::{Error, Result};
use crate::common::join::{first_of, join_all};
use crate::contract::LockBackend;
use crate::contract::outcome::ExtendOutcome;
use crate::lock::clock::LocalInstant;
use crate::lock::guard::LockGuard;
use crate::lock::locker::Locker;

/// Keeps locks while another one is waited for. Returns when one of them is lost.
pub(super) async fn keep<B: LockBackend>(locker: &Locker<B>, held: &[LockGuard<B>]) {
    let ttl = locker.options().ttl.as_duration();
    // Before the loss is signaled.
    let pause = (ttl / 3).min(ttl.saturating_sub(locker.options().stop_margin) / 2);
    let renewed = async {
        let mut least = Duration::ZERO;
        // Otherwise they renew themselves.
        while !locker.options().renew {
            // Some may have been held since the wait before this one.
            let Some(left) = held.iter().map(LockGuard::remaining).min() else { break };
            locker.sleep(left.saturating_sub(ttl - pause).max(least)).await;
            if !extend(locker, held).await {
                return;
            }
            // After an error, the store is not asked again at once.
            least = pause / 4;
        }
        pending().await
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

/// Makes attempts at the same time. If one of them gets nothing, gives back what the others got.
pub(super) async fn all_or_none<B: LockBackend, T>(
    attempts: impl IntoIterator<Item = impl Future<Output = Result<Option<T>>>>,
    into_guard: impl Fn(T) -> LockGuard<B>,
) -> Result<Option<Vec<T>>> {
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
        return Ok(Some(taken));
    }
    give_back(taken.into_iter().map(into_guard).collect()).await;
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
