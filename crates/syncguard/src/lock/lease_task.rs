//! The task of a lease: renews it and detects its loss.

use std::pin::pin;
use std::sync::Arc;

use super::lease_state::Step;
use super::shared_lease::SharedLease;
use crate::common::lost_reason::LostReason;
use crate::contract::LockBackend;

/// Starts the task of a lease, if it has none.
///
/// The task runs on the locker's runtime, so that a handle can wait for the end of the lease
/// anywhere. It ends with the lease.
pub(super) fn start<B: LockBackend>(lease: &Arc<SharedLease<B>>) {
    if lease.end().is_none() && lease.claim_task() {
        let task = LeaseTask(Arc::clone(lease));
        lease.context.engine.background.spawn_untracked(async move { task.run().await });
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

/// If the task ends before the lease, its runtime has shut down: nothing would renew the lock or
/// detect its end.
impl<B: LockBackend> Drop for LeaseTask<B> {
    fn drop(&mut self) {
        self.0.lose(LostReason::Unreachable);
    }
}
