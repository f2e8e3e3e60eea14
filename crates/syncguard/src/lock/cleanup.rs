//! Work that no caller waits for: undoing abandoned acquires, and retrying and reporting failed
//! releases.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use super::acquisition::Acquisition;
use super::clock::LocalInstant;
use super::context::Context;
use super::release_errors::{ReleaseContext, ReleaseSource};
use crate::common::error::{Error, ErrorCode, Result};
use crate::common::key::Key;
use crate::contract::outcome::{AcquireOutcome, ReleaseOutcome};
use crate::contract::request::ReleaseRequest;
use crate::contract::{BoxFuture, LockBackend};

/// The result of an acquire.
pub(super) struct AcquireReply<B: LockBackend> {
    pub(super) answer: Result<AcquireOutcome<B::Fencing>>,
    /// The key of the granted lock, if any of several would do.
    pub(super) key: Option<Key>,
    /// The context of the call.
    pub(super) context: Arc<Context<B>>,
}

/// Undoes an abandoned acquisition in the background, and wakes the first waiter of `queue`. `rest`
/// is the copy that is still in progress, if there is one.
pub(super) fn undo_later<B: LockBackend>(
    context: &Arc<Context<B>>,
    queue: Key,
    mut acquisition: Acquisition,
    rest: Option<BoxFuture<'static, AcquireReply<B>>>,
) {
    let which = ReleaseContext {
        key: acquisition.request().key().clone(),
        lock_id: acquisition.request().lock_id(),
        source: ReleaseSource::Undo,
    };
    let report = ReleaseReport::new(Arc::clone(context), which);
    let context = Arc::clone(context);
    let background = Arc::clone(&context.engine);
    background.background.spawn(async move {
        report.settle(undo(&context, &mut acquisition, rest).await);
        context.engine.wait_queues.wake_head(&queue);
    });
}

/// Waits for the copy in progress, then undoes the request until no copy can leave a lock behind.
async fn undo<B: LockBackend>(
    context: &Context<B>,
    acquisition: &mut Acquisition,
    rest: Option<BoxFuture<'static, AcquireReply<B>>>,
) -> Result<()> {
    let ticker = &context.engine.ticker;
    let dead_at = acquisition.dead_at();
    if let Some(rest) = rest {
        tokio::select! {
            biased;
            reply = rest => {
                acquisition.answered(&reply.answer);
            }
            () = ticker.sleep_until(dead_at) => return Ok(()),
        }
    }
    let backend = &context.engine.backend;
    let undo_is_final = backend.capabilities().undo_is_final;
    let request = ReleaseRequest::undo(acquisition.request());
    let mut pause = Pause::default();
    while acquisition.needs_undo() && ticker.now() < dead_at {
        let answer = tokio::select! {
            biased;
            answer = context.engine.recorder.release(backend, &request) => answer,
            () = ticker.sleep_until(dead_at) => return Err(unanswered()),
        };
        match answer {
            Ok(answer) => acquisition.undone(answer, undo_is_final),
            Err(error) if !error.is_retryable() || ticker.now() + pause.next >= dead_at => {
                return Err(error);
            }
            Err(_) => {}
        }
        if acquisition.needs_undo() {
            ticker.sleep_until((ticker.now() + pause.grow()).min(dead_at)).await;
        }
    }
    Ok(())
}

/// Tries a release until it is answered or `limit` has passed, with growing pauses. `begun` is a
/// call that is already in progress. An error that is not retryable ends it at once.
pub(super) async fn release_until<B, Answering>(
    context: &Context<B>,
    limit: LocalInstant,
    mut begun: Option<BoxFuture<'static, Result<ReleaseOutcome>>>,
    ask: impl Fn() -> Answering + Send + Sync,
) -> Result<ReleaseOutcome>
where
    B: LockBackend,
    Answering: Future<Output = Result<ReleaseOutcome>> + Send,
{
    let ticker = &context.engine.ticker;
    let mut pause = Pause::default();
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
            () = ticker.sleep_until(limit) => return Err(unanswered()),
        };
        match answer {
            Err(error) if error.is_retryable() && ticker.now() + pause.next < limit => {
                ticker.sleep(pause.grow()).await;
            }
            answer => return answer,
        }
    }
}

fn unanswered() -> Error {
    Error::new(ErrorCode::NetworkTimeout, "the store did not answer the release in time")
}

/// The pause between two tries, which doubles each time.
struct Pause {
    next: Duration,
}

impl Pause {
    const LONGEST: Duration = Duration::from_secs(2);

    fn grow(&mut self) -> Duration {
        let pause = self.next;
        self.next = (pause * 2).min(Self::LONGEST);
        pause
    }
}

impl Default for Pause {
    fn default() -> Self {
        Self { next: Duration::from_millis(50) }
    }
}

/// Reports a background release to `on_release_error` if it fails. If this is dropped unsettled, it
/// reports that the release never completed.
pub(super) struct ReleaseReport<B: LockBackend> {
    context: Arc<Context<B>>,
    which: ReleaseContext,
    is_settled: bool,
}

impl<B: LockBackend> ReleaseReport<B> {
    pub(super) fn new(context: Arc<Context<B>>, which: ReleaseContext) -> Self {
        Self { context, which, is_settled: false }
    }

    pub(super) fn settle(mut self, outcome: Result<()>) {
        self.is_settled = true;
        if let Err(error) = outcome {
            self.report(error);
        }
    }

    fn report(&self, error: Error) {
        let ReleaseContext { key, lock_id, source } = &self.which;
        let error = error.with_key(key).with_lock_id(*lock_id);
        let is_reported = match &self.context.options.on_release_error {
            Some(errors) => {
                let token = self.context.engine.background.token();
                errors.report(error.clone(), self.which.clone(), token)
            }
            None => false,
        };
        if !is_reported {
            tracing::error!(
                key_hash = %key.hash_id(),
                ?source,
                code = error.code().as_str(),
                "a lock was not released and stays held until its TTL expires: {}",
                error.message()
            );
        }
    }
}

impl<B: LockBackend> Drop for ReleaseReport<B> {
    fn drop(&mut self) {
        if !self.is_settled {
            self.report(Error::aborted("the runtime ended before the lock was released"));
        }
    }
}
