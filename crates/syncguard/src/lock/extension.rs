//! The engine's interface for the primitives, which are made of ordinary locks.

use std::any::Any;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio_util::task::task_tracker::TaskTrackerToken;

use super::clock::LocalInstant;
use super::lock_request::LockRequest;
use super::locker::Locker;
use crate::common::error::Result;
use crate::common::key::Key;
use crate::contract::LockBackend;

impl<B: LockBackend> Locker<B> {
    /// Takes one of several locks, whichever is free. Waiters that give the same queue are served
    /// in order within this process.
    pub(crate) fn lock_any(&self, queue: &Key, keys: Arc<[Key]>) -> LockRequest<'_, B> {
        LockRequest::any_of(self.context(), queue.clone(), keys)
    }

    /// Returns the state that callers in this process share under a name, while one of them keeps
    /// it.
    pub(crate) fn shared_state<T: Any + Send + Sync>(
        &self,
        name: &Key,
        new: impl FnOnce() -> T,
    ) -> Arc<T> {
        let mut states = self.context().engine.shared_states.shard_of(name);
        let known = states.get(name).and_then(Weak::upgrade);
        if let Some(known) = known.and_then(|known| known.downcast().ok()) {
            return known;
        }
        states.retain(|_name, state| state.strong_count() > 0);
        let state = Arc::new(new());
        let erased: Weak<dyn Any + Send + Sync> = Arc::<T>::downgrade(&state);
        states.insert(name.clone(), erased);
        state
    }

    /// Fails outside the locker's runtime and after a shutdown.
    pub(crate) fn check_usable(&self) -> Result<()> {
        self.context().engine.check_for_a_runtime()?;
        self.check_not_shut_down()
    }

    /// Returns whether a task of this process waits for the lock of a key or holds it.
    pub(crate) fn is_wanted_here(&self, key: &Key) -> bool {
        self.context().engine.wait_queues.is_wanted(key)
    }

    /// Waits until the locker is shut down or the token of its options is canceled.
    pub(crate) async fn stopped(&self) {
        let shut_down = self.context().engine.shut_down.cancelled();
        match &self.context().options.cancel {
            None => shut_down.await,
            Some(token) => tokio::select! {
                () = token.cancelled() => {}
                () = shut_down => {}
            },
        }
    }

    /// Makes a shutdown wait until the token is dropped.
    pub(crate) fn delay_shutdown(&self) -> TaskTrackerToken {
        self.context().engine.background.token()
    }

    /// Returns the time of the clock for validity and timeouts.
    pub(crate) fn now(&self) -> LocalInstant {
        self.context().engine.ticker.now()
    }

    /// Returns how often to ask the store although notifications work.
    pub(crate) fn poll_interval(&self) -> Duration {
        self.context().engine.poll_interval
    }

    /// Sleeps by that clock.
    pub(crate) async fn sleep(&self, duration: Duration) {
        let ticker = &self.context().engine.ticker;
        ticker.sleep_until(ticker.now() + duration).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backends::memory::MemoryBackend;

    #[tokio::test]
    async fn names_that_nothing_uses_are_forgotten() {
        let locker = Locker::new(MemoryBackend::new()).expect("a runtime");
        for number in 0..10_000 {
            let name = Key::new(format!("name {number}")).expect("valid");
            assert_eq!(*locker.shared_state(&name, || number), number);
        }
        let known = locker.context().engine.shared_states.len();
        assert!(known < 1_000, "{known}");
    }
}
