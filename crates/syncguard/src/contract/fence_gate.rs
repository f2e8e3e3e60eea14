//! A fence check for services that keep their own data.

use std::sync::{Arc, PoisonError};

use super::fenced_lock::FencedLock;
use crate::common::error::{Error, Result};
use crate::common::fence::Fence;
use crate::common::key::Key;
use crate::common::sharded::Sharded;
use crate::common::sync::Mutex;

/// The largest fence that a service has seen for each key, in memory: the check at the resource,
/// for a service that owns its data and receives writes of others with a key and a fence.
///
/// * A smaller fence is refused. The same fence passes again: a holder may write several times.
/// * [`write`](Self::write) checks the fence and writes in one step, so that no later holder can
///   write in between. [`check`](Self::check) alone does not ensure that.
/// * It lives as long as the process. Store the fence with your data, and
///   [`check`](Self::check) the stored fences when the service starts.
/// * It keeps one small entry per key, until you [`forget`](Self::forget) it.
///
/// Clones share the fences.
///
/// ```
/// use syncguard::{Fence, FenceGate, Key};
///
/// let (gate, key) = (FenceGate::new(), Key::new("document")?);
/// let mut text = String::new();
/// gate.write(&(&key, Fence::new(34)?), || text.push_str("by the current holder"))?;
/// let refused = gate.write(&(&key, Fence::new(33)?), || text.push_str("by a paused holder"));
/// assert!(refused.is_err_and(|error| error.is_stale_fence()));
/// assert_eq!(text, "by the current holder");
/// # Ok::<(), syncguard::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct FenceGate {
    marks: Arc<Sharded<Key, Arc<Mutex<Option<Fence>>>>>,
}

impl FenceGate {
    /// Creates a gate that has seen no fence.
    #[must_use]
    pub fn new() -> Self {
        Self { marks: Arc::new(Sharded::new()) }
    }

    /// Checks that no later holder has been here, and remembers the fence. If one has, it fails
    /// with [`Aborted`](crate::ErrorCode::Aborted), and
    /// [`is_stale_fence`](Error::is_stale_fence) is true.
    pub fn check(&self, lock: &impl FencedLock) -> Result<()> {
        self.write(lock, || ())
    }

    /// Checks the fence like [`check`](Self::check), and calls `write` if it is not stale. Other
    /// writes under the same key wait until it returns, so `write` must not write under that key
    /// again.
    pub fn write<T>(&self, lock: &impl FencedLock, write: impl FnOnce() -> T) -> Result<T> {
        let (key, fence) = (lock.key(), lock.fence());
        let mark = Arc::clone(self.marks.shard_of(key).entry(key.clone()).or_default());
        let mut largest = mark.lock().unwrap_or_else(PoisonError::into_inner);
        if largest.is_some_and(|largest| fence < largest) {
            return Err(Error::stale_fence().with_key(key));
        }
        *largest = Some(fence);
        Ok(write())
    }

    /// Returns the largest fence that was seen for a key.
    #[must_use]
    pub fn largest(&self, key: &Key) -> Option<Fence> {
        let mark = self.marks.shard_of(key).get(key).cloned()?;
        *mark.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets a key, for example after its data was deleted for good. A paused holder of the key
    /// can then pass again.
    pub fn forget(&self, key: &Key) {
        self.marks.shard_of(key).remove(key);
    }
}

impl Default for FenceGate {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    fn lock(key: &str, fence: u64) -> (Key, Fence) {
        (Key::new(key).expect("valid"), Fence::new(fence).expect("valid"))
    }

    #[test]
    fn smaller_fences_of_the_same_key_are_refused() {
        let gate = FenceGate::new();
        gate.check(&lock("a", 7)).expect("the first");
        gate.check(&lock("a", 7)).expect("the same again");
        gate.check(&lock("a", 9)).expect("a later one");
        let error = gate.check(&lock("a", 8)).expect_err("stale");
        assert!(error.is_stale_fence() && !error.may_have_taken_effect());
        assert_eq!(gate.largest(&lock("a", 0).0), Some(lock("a", 9).1));
        gate.check(&lock("b", 1)).expect("another key");
        gate.forget(&lock("a", 0).0);
        assert_eq!(gate.largest(&lock("a", 0).0), None);
        gate.check(&lock("a", 1)).expect("forgotten");
    }

    #[test]
    fn a_refused_write_does_not_run_and_a_panic_does_not_close_the_gate() {
        let gate = FenceGate::new();
        assert_eq!(gate.write(&lock("a", 5), || 42).expect("passes"), 42);
        let refused = gate.write(&lock("a", 4), || panic!("it must not run"));
        assert!(refused.is_err());
        let clone = gate.clone();
        let panics = std::thread::spawn(move || clone.write(&lock("a", 6), || panic!("a bug")));
        assert!(panics.join().is_err());
        gate.check(&lock("a", 6)).expect("still open");
        assert!(gate.check(&lock("a", 5)).is_err());
    }

    #[test]
    fn concurrent_writes_are_in_the_order_of_their_fences() {
        let (gate, last) = (FenceGate::new(), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for offset in 0..4 {
                let (gate, last) = (&gate, &last);
                scope.spawn(move || {
                    for step in 0..1000 {
                        let fence = step * 4 + offset;
                        let write = || last.swap(fence, Ordering::Relaxed);
                        if let Ok(before) = gate.write(&lock("a", fence), write) {
                            assert!(before <= fence, "{fence} after {before}");
                        }
                    }
                });
            }
        });
    }
}
