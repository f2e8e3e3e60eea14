//! Background work that outlives its caller: releases of dropped guards, and undoing acquires
//! whose outcome nobody waited for.

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio_util::task::TaskTracker;

use super::attempt::{BoxFuture, Orphanage};
use super::clock::LocalInstant;
use super::hold::Hold;
use super::locker::Shared;
use super::options::{LockOptions, ReleaseContext, ReleaseSource};
use crate::common::error::{Error, ErrorCode, Result};
use crate::common::time::TIME_TOLERANCE_MS;
use crate::contract::LockBackend;
use crate::contract::outcome::{Acquire, Release};
use crate::contract::request::{AcquireRequest, ReleaseRequest};

const TOLERANCE: Duration = Duration::from_millis(TIME_TOLERANCE_MS);

/// Runs background work on the runtime that the locker was built in.
#[derive(Debug)]
pub(super) struct Reaper {
    runtime: Handle,
    jobs: TaskTracker,
}

impl Reaper {
    pub(super) fn new(runtime: Handle) -> Self {
        Self {
            runtime,
            jobs: TaskTracker::new(),
        }
    }

    /// Starts a job that [`Self::drain`] waits for. It needs no runtime around the caller. When
    /// the runtime is gone the job is dropped at once; jobs report that in their own `Drop`.
    fn spawn(&self, job: impl Future<Output = ()> + Send + 'static) {
        self.jobs.spawn_on(job, &self.runtime);
    }

    /// Starts a task that ends with its guard, so nobody has to wait for it.
    pub(super) fn spawn_untracked(&self, task: impl Future<Output = ()> + Send + 'static) {
        drop(self.runtime.spawn(task));
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

/// Releases a held lock in the background, until it is answered or its time is over.
pub(super) fn release_later<B: LockBackend>(hold: &Arc<Hold<B>>, source: ReleaseSource) {
    spawn_release(Arc::clone(hold), source, None);
}

fn spawn_release<B: LockBackend>(
    hold: Arc<Hold<B>>,
    source: ReleaseSource,
    begun: Option<BoxFuture<Result<Release>>>,
) {
    let shared = Arc::clone(&hold.shared);
    let context = ReleaseContext {
        key: hold.key.clone(),
        lock_id: hold.lock_id,
        source,
    };
    let report = Report::new(context, Arc::clone(&hold.options));
    shared.reaper.spawn(async move {
        report.settle(release_until_answered(&hold, begun).await);
        hold.given_back();
    });
}

/// A call of `release` whose caller has gone.
pub(super) struct OrphanRelease<B: LockBackend>(pub(super) Arc<Hold<B>>);

impl<B: LockBackend> Orphanage<Result<Release>> for OrphanRelease<B> {
    fn adopt(self, rest: BoxFuture<Result<Release>>) {
        spawn_release(self.0, ReleaseSource::Guard, Some(rest));
    }
}

async fn release_until_answered<B: LockBackend>(
    hold: &Hold<B>,
    begun: Option<BoxFuture<Result<Release>>>,
) -> Result<()> {
    /// A lock that is already lost is still given this long to be released.
    const AT_LEAST: Duration = Duration::from_secs(5);
    let ticker = &hold.shared.ticker;
    let now = ticker.now();
    let limit = match hold.options.release_timeout {
        Some(timeout) => now + timeout,
        None => (hold.deadline() + TOLERANCE).max(now + AT_LEAST),
    };
    let request = ReleaseRequest::new(hold.lock_id).with_hint(hold.hint());
    let ask = || hold.shared.backend.release(&request);
    let done = |answer: &Result<Release>| matches!(answer, Ok(_));
    repeat(&hold.shared, limit, begun, ask, done)
        .await
        .map(|_| ())
}

/// An acquire whose caller has gone: driven to its answer, and undone.
pub(super) struct OrphanAcquire<B: LockBackend> {
    pub(super) shared: Arc<Shared<B>>,
    pub(super) options: Arc<LockOptions>,
    pub(super) request: AcquireRequest,
    pub(super) sent: LocalInstant,
}

impl<B: LockBackend> Orphanage<Result<Acquire<B::Fencing>>> for OrphanAcquire<B> {
    fn adopt(self, rest: BoxFuture<Result<Acquire<B::Fencing>>>) {
        self.spawn_undo(Some(rest));
    }
}

impl<B: LockBackend> OrphanAcquire<B> {
    /// Undoes an acquire that failed and may have taken effect all the same.
    pub(super) fn undo(self) {
        self.spawn_undo(None);
    }

    fn spawn_undo(self, rest: Option<BoxFuture<Result<Acquire<B::Fencing>>>>) {
        let shared = Arc::clone(&self.shared);
        let context = ReleaseContext {
            key: self.request.key().clone(),
            lock_id: self.request.lock_id(),
            source: ReleaseSource::Undo,
        };
        let report = Report::new(context, Arc::clone(&self.options));
        shared.reaper.spawn(async move {
            report.settle(self.run(rest).await);
            self.shared.lanes.given_back(self.request.key());
        });
    }

    async fn run(&self, rest: Option<BoxFuture<Result<Acquire<B::Fencing>>>>) -> Result<()> {
        let ticker = &self.shared.ticker;
        // After this the store has forgotten a grant by itself, whenever it arrives.
        let end = self.sent + self.request.ttl().as_duration() + TOLERANCE;
        let mut is_granted = false;
        if let Some(rest) = rest {
            tokio::select! {
                biased;
                answer = rest => match answer {
                    Ok(Acquire::Acquired(_)) => is_granted = true,
                    Ok(Acquire::Contended { .. } | Acquire::Spent) => return Ok(()),
                    Err(error) if !error.may_have_taken_effect() => return Ok(()),
                    Err(_) => {}
                },
                () = ticker.sleep_until(end) => return Ok(()),
            }
        }
        let is_final = is_granted || self.shared.backend.capabilities().undo_is_final;
        let request = ReleaseRequest::undo(&self.request);
        let ask = || self.shared.backend.release(&request);
        // Where an undo is not final, "not held" proves nothing: the acquire may still arrive.
        let done = |answer: &Result<Release>| match answer {
            Ok(Release::Released) => true,
            Ok(Release::NotHeld(_)) => is_final,
            Err(_) => false,
        };
        repeat(&self.shared, end, None, ask, done).await.map(|_| ())
    }
}

/// Asks for a release until the answer is `done` or the time is over, with growing pauses.
///
/// The last answer counts. An error that cannot pass ends it at once.
async fn repeat<'a, B, Ask, Answering>(
    shared: &Shared<B>,
    limit: LocalInstant,
    begun: Option<BoxFuture<Result<Release>>>,
    ask: Ask,
    done: impl Fn(&Result<Release>) -> bool,
) -> Result<Release>
where
    B: LockBackend,
    Ask: Fn() -> Answering + 'a,
    Answering: Future<Output = Result<Release>> + Send + 'a,
{
    const SHORTEST_PAUSE: Duration = Duration::from_millis(50);
    const LONGEST_PAUSE: Duration = Duration::from_secs(2);
    let ticker = &shared.ticker;
    let mut begun = begun;
    let mut pause = SHORTEST_PAUSE;
    loop {
        let asking = async {
            match begun.take() {
                Some(begun) => begun.await,
                None => ask().await,
            }
        };
        let answer = tokio::select! {
            biased;
            answer = asking => answer,
            () = ticker.sleep_until(limit) => {
                return Err(Error::new(ErrorCode::NetworkTimeout, "the release was not answered in time"));
            }
        };
        let can_change = answer.as_ref().map_or_else(Error::is_retryable, |_| true);
        if done(&answer) || !can_change || ticker.now() + pause >= limit {
            return answer;
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// Tells `on_release_error` how a background release ended, unless it ended well. Dropped
/// unsettled, it tells that the release never ran to its end.
struct Report {
    context: ReleaseContext,
    options: Arc<LockOptions>,
    is_settled: bool,
}

impl Report {
    fn new(context: ReleaseContext, options: Arc<LockOptions>) -> Self {
        Self {
            context,
            options,
            is_settled: false,
        }
    }

    fn settle(mut self, outcome: Result<()>) {
        self.is_settled = true;
        if let Err(error) = outcome {
            self.tell(
                &error
                    .with_key(&self.context.key)
                    .with_lock_id(self.context.lock_id),
            );
        }
    }

    fn tell(&self, error: &Error) {
        match &self.options.on_release_error {
            // A panic in the user's callback is the user's; it must not end the job half-way.
            Some(hear) => drop(catch_unwind(AssertUnwindSafe(|| {
                hear(error, &self.context)
            }))),
            None => tracing::error!(
                key_hash = %self.context.key.hash(),
                source = ?self.context.source,
                code = error.code().as_str(),
                "a lock was not released in the background and stays until its TTL: {error}"
            ),
        }
    }
}

impl Drop for Report {
    fn drop(&mut self) {
        if !self.is_settled {
            let error = Error::aborted("the runtime ended before the lock was released");
            self.tell(
                &error
                    .with_key(&self.context.key)
                    .with_lock_id(self.context.lock_id),
            );
        }
    }
}
