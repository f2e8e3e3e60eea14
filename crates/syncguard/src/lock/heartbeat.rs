//! Renewal: one task per guard that extends its lock at every third of the TTL.

use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use super::hold::Hold;
use crate::contract::LockBackend;
use crate::contract::outcome::Extend;

/// Starts renewing a lock. The task ends when the guard lets go or the lock is lost.
pub(super) fn start<B: LockBackend>(hold: &Arc<Hold<B>>) {
    let hold = Arc::clone(hold);
    let context = Arc::clone(&hold.context);
    context.reaper.spawn_untracked(async move {
        tokio::select! {
            biased;
            () = hold.ended() => {}
            // An extend that is under way goes on in the background: if it succeeds, it is undone.
            _reason = hold.lost() => {}
            () = renew(&hold) => {}
        }
    });
}

/// Extends whenever it is time to. Whether the lock is lost meanwhile, others watch.
async fn renew<B: LockBackend>(hold: &Arc<Hold<B>>) {
    let ticker = &hold.context.ticker;
    let ttl = hold.context.options.ttl;
    let end = hold.context.options.max_hold.map(|max_hold| hold.since + max_hold);
    loop {
        hold.time_to_renew().await;
        let ttl = match end {
            // Kept as long as it may be; what is left runs out.
            Some(end) if hold.deadline() >= end => return pending().await,
            Some(end) => ttl.at_most(end.since(ticker.now())),
            None => ttl,
        };
        hold.set_out_of_touch(true);
        match hold.extend(ttl).await {
            Ok(Extend::Extended(_)) => hold.set_out_of_touch(false),
            Ok(Extend::NotHeld(_)) => return,
            // One failed renewal is no loss: the lock is ours until its deadline.
            Err(error) => {
                tracing::debug!(
                    key_hash = %hold.key.hash(),
                    code = error.code().as_str(),
                    "could not renew a lock, trying again: {error}"
                );
                tokio::time::sleep(pause_after_error(ttl.as_duration())).await;
            }
        }
    }
}

/// Often enough for several tries before the deadline, seldom enough not to press a sick store.
fn pause_after_error(ttl: Duration) -> Duration {
    (ttl / 12).clamp(Duration::from_millis(1), Duration::from_secs(1))
}
