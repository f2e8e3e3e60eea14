//! Telling the user of releases in the background that did not happen.

use std::fmt;
use std::sync::{Arc, OnceLock};

use tokio_util::task::task_tracker::TaskTrackerToken;

use crate::common::error::Error;
use crate::common::key::Key;
use crate::common::lock_id::LockId;
use crate::contract::callback_queue::CallbackQueue;

/// Which release did not happen.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ReleaseContext {
    /// The key. Sensitive: do not log it.
    pub key: Key,
    /// The id that holds the lock. A secret.
    pub lock_id: LockId,
    /// What asked for the release.
    pub source: ReleaseSource,
}

/// What asked for a release in the background.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ReleaseSource {
    /// A guard was dropped, or a call of its `release` was.
    Guard,
    /// An acquire was dropped, cancelled or timed out, and may have taken the lock.
    Undo,
    /// An extend succeeded after the lock had been given up as lost.
    LateExtend,
}

type Callback = dyn Fn(&Error, &ReleaseContext) + Send + Sync;

/// A release that did not happen, on its way to the callback.
struct FailedRelease {
    error: Error,
    context: ReleaseContext,
    /// A shutdown waits until the callback has returned.
    _token: TaskTrackerToken,
}

/// The user's callback, behind a queue. Its thread starts with the first report.
#[derive(Clone)]
pub(crate) struct ReleaseErrors {
    callback: Arc<Callback>,
    queue: Arc<OnceLock<Option<CallbackQueue<FailedRelease>>>>,
}

impl ReleaseErrors {
    pub(super) fn new(callback: impl Fn(&Error, &ReleaseContext) + Send + Sync + 'static) -> Self {
        Self { callback: Arc::new(callback), queue: Arc::default() }
    }

    /// Reports a release that did not happen. Answers whether there is a thread to tell it.
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
        queue.put(FailedRelease { error, context, _token: token });
        true
    }
}

impl fmt::Debug for ReleaseErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReleaseErrors").finish_non_exhaustive()
    }
}
