//! The task of a lease: renews it and detects its loss.

use std::convert::Infallible;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use super::lease_state::Step;
use super::shared_lease::SharedLease;
use crate::common::lost_reason::LostReason;
use crate::contract::LockBackend;
use crate::contract::event::EngineEventKind;

/// Starts the task of a lease, if it has none.
///
/// The task runs on the locker's runtime, so that a handle can wait for the end of the lease
/// anywhere. It ends with the lease.
pub(super) fn start<B: LockBackend>(lease: &Arc<SharedLease<B>>) {
    if lease.end().is_none() && lease.claim_task() {
        let task = LeaseTask(Arc::clone(lease));
        lease.context.engine.background.spawn_untracked(async move {
            if task.0.context.options.renew {
                tokio::select! {
                    () = task.run() => {}
                    never = task.watch() => match never {},
                }
            } else {
                task.run().await;
            }
        });
    }
}

struct LeaseTask<B: LockBackend>(Arc<SharedLease<B>>);

impl<B: LockBackend> LeaseTask<B> {
    async fn run(&self) {
        let lease = &self.0;
        let ticker = &lease.context.engine.ticker;
        loop {
            let mut changed = pin!(lease.changed());
            // Registers before checking, so that no change in between is missed.
            changed.as_mut().enable();
            match lease.next() {
                Step::Over | Step::Lost(_) => return,
                Step::Wait(at) => tokio::select! {
                    biased;
                    () = changed => {}
                    () = ticker.sleep_until(at) => {}
                },
                Step::Renew(sent) => {
                    // One failed renewal is not a loss: the lock is held until its deadline.
                    if let Err(error) = lease.send_extend(sent).await {
                        lease.report(|| EngineEventKind::RenewalFailed { code: error.code() });
                        tracing::debug!(
                            key_hash = %lease.key.hash_id(),
                            code = error.code().as_str(),
                            "could not renew a lock, retrying: {}",
                            error.message()
                        );
                    }
                }
            }
        }
    }
}

impl<B: LockBackend> LeaseTask<B> {
    /// Watches the lock in the store, where that is possible, and asks for it at once when it may
    /// be lost. Without this, a lock that was taken away is noticed at the next renewal.
    async fn watch(&self) -> Infallible {
        /// Most locks are released sooner and cost no subscription.
        const AFTER: Duration = Duration::from_millis(100);
        /// The least and the longest time from one look to the next. The time doubles while nothing
        /// is found, because on some stores several keys share their notifications.
        const PAUSE: Duration = Duration::from_millis(20);
        const LONGEST_PAUSE: Duration = Duration::from_millis(500);
        /// When to look again after an error.
        const LOOK_AGAIN: Duration = Duration::from_secs(1);
        /// When to try again after a subscription that failed.
        const AGAIN: Duration = Duration::from_secs(10);
        let lease = &self.0;
        let (ticker, backend) = (&lease.context.engine.ticker, &lease.context.engine.backend);
        ticker.sleep(AFTER).await;
        loop {
            let Some(mut changes) = backend.watch(&lease.key).await else {
                ticker.sleep(AGAIN).await;
                continue;
            };
            let mut pause = PAUSE;
            loop {
                // The first look is for what happened before the subscription.
                match backend.lookup_id(&lease.lock_id).await {
                    Ok(None) => lease.suspect_loss(),
                    Ok(Some(_)) => {}
                    // What it was notified of is still unknown.
                    Err(_) => {
                        ticker.sleep(LOOK_AGAIN).await;
                        continue;
                    }
                }
                ticker.sleep(pause).await;
                // A notification that came during the pause is there at once.
                let paused_until = ticker.now();
                changes.notified().await;
                let is_quiet = ticker.now().since(paused_until) > LONGEST_PAUSE;
                pause = if is_quiet { PAUSE } else { (pause * 2).min(LONGEST_PAUSE) };
            }
        }
    }
}

/// If the task ends before the lease, its runtime has shut down: nothing would renew the lock or
/// detect its end.
impl<B: LockBackend> Drop for LeaseTask<B> {
    fn drop(&mut self) {
        self.0.lose(LostReason::Unreachable);
    }
}
