//! Work that outlives its caller, on the runtime that the locker was built in.

use std::future::Future;

use tokio::runtime::Handle;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;

/// Starts and counts background work.
#[derive(Debug)]
pub(super) struct Background {
    runtime: Handle,
    jobs: TaskTracker,
}

impl Background {
    pub(super) fn new(runtime: Handle) -> Self {
        Self { runtime, jobs: TaskTracker::new() }
    }

    /// Starts a job that [`Self::drain`] waits for. The caller may be outside a runtime. If the
    /// locker's runtime has shut down, the job is dropped at once; jobs report that in their own
    /// `Drop`.
    pub(super) fn spawn(&self, job: impl Future<Output = ()> + Send + 'static) {
        #[cfg(test)]
        if super::schedules::is_running() {
            return super::schedules::spawn(self.jobs.track_future(job));
        }
        self.jobs.spawn_on(job, &self.runtime);
    }

    /// Starts a task that ends with its guard, so that nothing has to wait for it.
    pub(super) fn spawn_untracked(&self, task: impl Future<Output = ()> + Send + 'static) {
        #[cfg(test)]
        if super::schedules::is_running() {
            return super::schedules::spawn(task);
        }
        drop(self.runtime.spawn(task));
    }

    /// Makes [`Self::drain`] wait until the token is dropped.
    pub(super) fn token(&self) -> TaskTrackerToken {
        self.jobs.token()
    }

    pub(super) fn runtime(&self) -> &Handle {
        &self.runtime
    }

    /// Waits until all jobs are done.
    pub(super) async fn drain(&self) {
        self.jobs.close();
        self.jobs.wait().await;
    }

    pub(super) fn jobs(&self) -> usize {
        self.jobs.len()
    }
}
