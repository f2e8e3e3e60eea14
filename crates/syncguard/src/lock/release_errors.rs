//! Reports failed background releases to the user's callback.

use std::fmt;
use std::sync::{Arc, OnceLock};

use tokio_util::task::task_tracker::TaskTrackerToken;

use crate::common::error::Error;
use crate::common::key::Key;
use crate::common::lock_id::LockId;
use crate::contract::callback_queue::CallbackQueue;

/// Identifies a background release that failed.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ReleaseContext {
    /// The key. Sensitive: do not log it.
    pub key: Key,
    /// The id that holds the lock. A secret.
    pub lock_id: LockId,
    /// What requested the release.
    pub source: ReleaseSource,
}

/// What requested a background release.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ReleaseSource {
    /// A guard was dropped, or a call to its `release` was dropped.
    Guard,
    /// An acquire was dropped, canceled or timed out, and may have taken the lock.
    Undo,
    /// An extend succeeded after the lock was considered lost.
    LateExtend,
}

type Callback = dyn Fn(&Error, &ReleaseContext) + Send + Sync;

/// A failed release, queued for the callback.
struct FailedRelease {
    error: Error,
    context: ReleaseContext,
    /// Makes a shutdown wait until the callback has returned.
    _token: TaskTrackerToken,
}

/// The user's callback, behind a queue. Its thread starts with the first report.
#[derive(Clone)]
pub(crate) struct ReleaseErrors {
    callback: Arc<Callback>,
    queue: Arc<OnceLock<Option<CallbackQueue<FailedRelease>>>>,
}

impl ReleaseErrors {
    pub(crate) fn new(callback: impl Fn(&Error, &ReleaseContext) + Send + Sync + 'static) -> Self {
        Self { callback: Arc::new(callback), queue: Arc::default() }
    }

    /// Reports a failed release. Returns `false` if the callback cannot be called: its thread could
    /// not be started, or its queue is full.
    pub(super) fn report(
        &self,
        error: Error,
        context: ReleaseContext,
        token: TaskTrackerToken,
    ) -> bool {
        let queue = self.queue.get_or_init(|| {
            let callback = Arc::clone(&self.callback);
            let call = move |failed: &FailedRelease| callback(&failed.error, &failed.context);
            CallbackQueue::start("syncguard-release", call).ok()
        });
        let Some(queue) = queue else { return false };
        queue.put(FailedRelease { error, context, _token: token })
    }
}

impl fmt::Debug for ReleaseErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReleaseErrors").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use tokio_util::task::TaskTracker;

    use super::*;
    use crate::common::sync::Mutex;

    #[test]
    fn a_report_that_finds_the_queue_full_is_refused() {
        let capacity = CallbackQueue::<FailedRelease>::CAPACITY;
        let (finish, finished) = channel::<()>();
        let finished = Mutex::new(finished);
        let errors = ReleaseErrors::new(move |_error, _context| {
            let _ended = finished.lock().expect("no panic").recv();
        });
        let context = ReleaseContext {
            key: Key::new("k").expect("valid"),
            lock_id: LockId::random().expect("random"),
            source: ReleaseSource::Guard,
        };
        let tracker = TaskTracker::new();
        let report = || errors.report(Error::invalid("failed"), context.clone(), tracker.token());
        let queued = (0..2 * capacity).take_while(|_| report()).count();
        // The callback may have taken the first one.
        assert!((capacity..=capacity + 1).contains(&queued), "{queued}");
        drop(finish);
    }
}
