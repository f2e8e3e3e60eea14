//! Renewal: one task per guard that extends its lock at every third of the TTL.

use std::sync::Arc;
use std::time::Duration;

use super::hold::Hold;
use crate::contract::LockBackend;
use crate::contract::event::LostReason;
use crate::contract::outcome::Extend;

/// Starts renewing a lock. The task ends when the guard lets go or the lock is lost.
pub(super) fn start<B: LockBackend>(hold: &Arc<Hold<B>>) {
    let hold = Arc::clone(hold);
    let context = Arc::clone(&hold.context);
    context.reaper.spawn_untracked(async move {
        tokio::select! {
            biased;
            // An extend that is under way goes on in the background, it is not torn apart.
            () = hold.ended() => {}
            () = renew(&hold) => {}
        }
    });
}

async fn renew<B: LockBackend>(hold: &Arc<Hold<B>>) {
    let ticker = &hold.context.ticker;
    let ttl = hold.context.options.ttl;
    let third = ttl.as_duration() / 3;
    let end = hold.context.options.max_hold.map(|max_hold| hold.since + max_hold);
    let mut next = hold.since + third;
    let mut reason = LostReason::Expired;
    loop {
        let deadline = hold.deadline();
        if end.is_some_and(|end| deadline >= end) {
            // Kept as long as it may be; what is left runs out.
            ticker.sleep_until(deadline).await;
            return hold.lose(reason);
        }
        ticker.sleep_until(next.min(deadline)).await;
        let now = ticker.now();
        let ttl = end.map_or(ttl, |end| ttl.at_most(end.since(now)));
        tokio::select! {
            biased;
            answer = hold.extend(ttl) => match answer {
                Ok(Extend::Extended(_)) => {
                    reason = LostReason::Expired;
                    next = now + third;
                }
                Ok(Extend::NotHeld(_)) => return,
                // One failed renewal is no loss: the lock is ours until its deadline.
                Err(error) => {
                    reason = LostReason::Unreachable;
                    next = ticker.now() + pause_after_error(third);
                    tracing::debug!(
                        key_hash = %hold.key.hash(),
                        code = error.code().as_str(),
                        "could not renew a lock, trying again: {error}"
                    );
                }
            },
            () = ticker.sleep_until(deadline) => return hold.lose(LostReason::Unreachable),
        }
        if ticker.now() >= hold.deadline() {
            return hold.lose(reason);
        }
    }
}

/// Often enough for several tries before the deadline, seldom enough not to press a sick store.
fn pause_after_error(third: Duration) -> Duration {
    (third / 4).clamp(Duration::from_millis(1), Duration::from_secs(1))
}
