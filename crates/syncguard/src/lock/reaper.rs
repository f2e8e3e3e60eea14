//! Background work that outlives its caller: releases of dropped guards, and undoing acquires
//! whose outcome nobody waited for.

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;

use super::carried::BoxFuture;
use super::clock::LocalInstant;
use super::hold::Hold;
use super::locker::Context;
use super::options::{ReleaseContext, ReleaseSource};
use crate::common::error::{Error, ErrorCode, Result};
use crate::common::time::TIME_TOLERANCE_MS;
use crate::contract::LockBackend;
use crate::contract::outcome::{Acquire, Release};
use crate::contract::request::{AcquireRequest, ReleaseRequest};

pub(super) const TOLERANCE: Duration = Duration::from_millis(TIME_TOLERANCE_MS);

/// Runs background work on the runtime that the locker was built in.
#[derive(Debug)]
pub(super) struct Reaper {
    runtime: Handle,
    jobs: TaskTracker,
}

impl Reaper {
    pub(super) fn new(runtime: Handle) -> Self {
        Self { runtime, jobs: TaskTracker::new() }
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

    /// Makes [`Self::drain`] wait until the answer is dropped.
    pub(super) fn under_way(&self) -> TaskTrackerToken {
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

/// Releases a held lock in the background, until it is answered or its time is over. `begun` is a
/// call that is already under way.
pub(super) fn release_later<B: LockBackend>(
    hold: Arc<Hold<B>>,
    source: ReleaseSource,
    begun: Option<BoxFuture<Result<Release>>>,
) {
    let context = Arc::clone(&hold.context);
    let which = ReleaseContext { key: hold.key.clone(), lock_id: hold.lock_id, source };
    let report = Report::new(Arc::clone(&context), which);
    context.reaper.spawn(async move {
        report.settle(release_until_answered(&hold, begun).await);
        hold.undo_what_is_in_doubt();
        hold.give_back();
    });
}

async fn release_until_answered<B: LockBackend>(
    hold: &Hold<B>,
    begun: Option<BoxFuture<Result<Release>>>,
) -> Result<()> {
    let limit = hold.release_limit();
    let request = ReleaseRequest::new(hold.lock_id).with_hint(hold.hint());
    let ask = || hold.context.backend.release(&request);
    let done = |answer: &Result<Release>| answer.is_ok();
    repeat(&hold.context, limit, begun, ask, done).await.map(|_| ())
}

/// What an acquire answers, with the context that it was called with.
pub(super) type Asked<B> = (Result<Acquire<<B as LockBackend>::Fencing>>, Arc<Context<B>>);

/// An acquire that nobody waits for any more: it is driven to its answer, and undone.
pub(super) struct OrphanAcquire<B: LockBackend> {
    pub(super) context: Arc<Context<B>>,
    pub(super) request: AcquireRequest,
    /// When the request was sent for the first time.
    pub(super) sent: LocalInstant,
    /// Whether an earlier copy of the request is still without an answer.
    pub(super) is_replay: bool,
}

impl<B: LockBackend> OrphanAcquire<B> {
    /// Undoes the acquire in the background. `rest` is the call if it is still under way; without
    /// it the call has failed and may have taken effect all the same.
    pub(super) fn undo_later(self, rest: Option<BoxFuture<Asked<B>>>) {
        let context = Arc::clone(&self.context);
        let which = ReleaseContext {
            key: self.request.key().clone(),
            lock_id: self.request.lock_id(),
            source: ReleaseSource::Undo,
        };
        let report = Report::new(Arc::clone(&context), which);
        context.reaper.spawn(async move {
            report.settle(self.run(rest).await);
            self.context.lanes.nudge(self.request.key());
        });
    }

    async fn run(&self, rest: Option<BoxFuture<Asked<B>>>) -> Result<()> {
        let ticker = &self.context.ticker;
        // After this a grant that was applied in time is dead by itself.
        let end = self.sent + self.request.ttl().as_duration() + TOLERANCE;
        let mut is_granted = false;
        if let Some(rest) = rest {
            tokio::select! {
                biased;
                (answer, _context) = rest => match answer {
                    Ok(Acquire::Acquired(_)) => is_granted = true,
                    Ok(Acquire::Spent) => return Ok(()),
                    // An answer about this copy says nothing about an earlier one.
                    Ok(Acquire::Contended { .. }) if !self.is_replay => return Ok(()),
                    Err(error) if !self.is_replay && !error.may_have_taken_effect() => {
                        return Ok(());
                    }
                    Ok(Acquire::Contended { .. }) | Err(_) => {}
                },
                () = ticker.sleep_until(end) => return Ok(()),
            }
        }
        let is_final = is_granted || self.context.backend.capabilities().undo_is_final;
        let request = ReleaseRequest::undo(&self.request);
        let ask = || self.context.backend.release(&request);
        // Where an undo is not final, "not held" proves nothing: the acquire may still arrive.
        let done = |answer: &Result<Release>| match answer {
            Ok(Release::Released) => true,
            Ok(Release::NotHeld(_)) => is_final,
            Err(_) => false,
        };
        repeat(&self.context, end, None, ask, done).await.map(|_| ())
    }
}

/// Asks for a release until the answer is `done` or the time is over, with growing pauses.
///
/// The last answer counts. An error that cannot pass ends it at once.
async fn repeat<'a, B, Ask, Answering>(
    context: &Context<B>,
    limit: LocalInstant,
    begun: Option<BoxFuture<Result<Release>>>,
    ask: Ask,
    done: impl Fn(&Result<Release>) -> bool + Send + Sync,
) -> Result<Release>
where
    B: LockBackend,
    Ask: Fn() -> Answering + Send + Sync + 'a,
    Answering: Future<Output = Result<Release>> + Send + 'a,
{
    const SHORTEST_PAUSE: Duration = Duration::from_millis(50);
    const LONGEST_PAUSE: Duration = Duration::from_secs(2);
    let ticker = &context.ticker;
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
        ticker.sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// Tells `on_release_error` how a background release ended, unless it ended well. Dropped
/// unsettled, it tells that the release never ran to its end.
struct Report<B: LockBackend> {
    context: Arc<Context<B>>,
    which: ReleaseContext,
    is_settled: bool,
}

impl<B: LockBackend> Report<B> {
    fn new(context: Arc<Context<B>>, which: ReleaseContext) -> Self {
        Self { context, which, is_settled: false }
    }

    fn settle(mut self, outcome: Result<()>) {
        self.is_settled = true;
        if let Err(error) = outcome {
            self.tell(error);
        }
    }

    fn tell(&self, error: Error) {
        let ReleaseContext { key, lock_id, source } = &self.which;
        let error = error.with_key(key).with_lock_id(*lock_id);
        if let Some(hear) = &self.context.options.on_release_error {
            // A panic in the user's callback is the user's; it must not end the job half-way.
            drop(catch_unwind(AssertUnwindSafe(|| hear(&error, &self.which))));
        } else {
            tracing::error!(
                key_hash = %key.hash(),
                ?source,
                code = error.code().as_str(),
                "a lock was not released in the background and stays until its TTL: {error}"
            );
        }
    }
}

impl<B: LockBackend> Drop for Report<B> {
    fn drop(&mut self) {
        if !self.is_settled {
            self.tell(Error::aborted("the runtime ended before the lock was released"));
        }
    }
}
