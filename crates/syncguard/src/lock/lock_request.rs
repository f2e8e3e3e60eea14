//! A request for a lock, with its own options.

use std::fmt;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Poll, ready};
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tracing::Instrument;

use super::context::Context;
use super::guard::{LockGuard, LockHandle};
use super::options::{LockOptions, option_setters};
use super::release_errors::{ReleaseContext, ReleaseErrors};
use super::retry::RetryPolicy;
use super::wait::Wait;
use crate::common::error::{Error, ErrorCode, Result};
use crate::common::key::Key;
use crate::common::ttl::Ttl;
use crate::contract::{BoxFuture, LockBackend};

/// A request for a lock, from [`Locker::lock`](crate::Locker::lock). Await it, or change its
/// options first.
///
/// ```
/// use std::time::Duration;
/// # use syncguard::{Locker, MemoryBackend};
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> syncguard::Result<()> {
/// # let locker = Locker::new(MemoryBackend::new())?;
/// let guard = locker.lock("nightly").ttl(Duration::from_secs(60)).renew().await?;
/// let busy = locker.lock("nightly").try_for(Duration::from_millis(10)).await?;
/// assert!(busy.is_none());
/// # drop(guard); locker.shutdown().await
/// # }
/// ```
///
/// # Cancel safety
///
/// Dropping the request gives up the place in the queue. An attempt in progress continues in the
/// background, and a lock that it gets is released.
#[must_use = "a lock request does nothing unless it is awaited"]
pub struct LockRequest<'a, B: LockBackend> {
    context: &'a Arc<Context<B>>,
    state: RequestState<'a, B>,
}

enum RequestState<'a, B: LockBackend> {
    New {
        /// The key, or the name of the queue if any of several locks will do.
        key: Result<Key>,
        any_of: Option<Arc<[Key]>>,
        /// `None` for the locker's own.
        options: Option<Box<LockOptions>>,
    },
    Waiting(BoxFuture<'a, Result<LockGuard<B>>>),
    Done,
}

impl<'a, B: LockBackend> LockRequest<'a, B> {
    pub(super) fn new(context: &'a Arc<Context<B>>, key: Result<Key>) -> Self {
        Self { context, state: RequestState::New { key, any_of: None, options: None } }
    }

    /// Creates a request for any of several locks, whose waiters are in one queue.
    pub(super) fn any_of(context: &'a Arc<Context<B>>, queue: Key, keys: Arc<[Key]>) -> Self {
        let (key, any_of) = (Ok(queue), Some(keys));
        Self { context, state: RequestState::New { key, any_of, options: None } }
    }

    option_setters!();

    fn options_mut(&mut self) -> &mut LockOptions {
        if !matches!(self.state, RequestState::New { .. }) {
            // Possible only if the request is polled by hand. Its wait is dropped, and leaves no
            // lock behind.
            let error = Error::invalid("options of a lock request cannot change while it waits");
            self.state = RequestState::New { key: Err(error), any_of: None, options: None };
        }
        let RequestState::New { options, .. } = &mut self.state else {
            unreachable!("BUG: it was made new above")
        };
        options.get_or_insert_with(|| Box::new((*self.context.options).clone()))
    }

    /// Makes one attempt, without waiting or queueing. Returns `None` if the lock is held.
    ///
    /// # Cancel safety
    ///
    /// If dropped before it completes, the attempt continues in the background and a lock that it
    /// gets is released.
    pub async fn try_now(mut self) -> Result<Option<LockGuard<B>>> {
        let (context, key, any_of) = self.begin()?;
        let mut wait = Wait::new(context.get(), &key, any_of.as_ref());
        let acquired = wait.bounded(pin!(wait.once())).await;
        wait.ended(acquired, Option::as_ref).await
    }

    /// Waits for at most this long. Returns `None` if the lock is still held then. A store that
    /// fails is an error, not a held lock.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future gives up the place in the queue, as with `lock`.
    pub async fn try_for(self, limit: Duration) -> Result<Option<LockGuard<B>>> {
        if limit.is_zero() {
            return self.try_now().await;
        }
        none_if_held(self.timeout(limit).await)
    }

    /// Waits for the lock, runs `work` under it, and releases it. See
    /// [`Locker::with_lock`](crate::Locker::with_lock).
    ///
    /// # Cancel safety
    ///
    /// Dropping the future drops the work and releases the lock in the background.
    pub async fn run<T, Work>(self, work: impl FnOnce(LockHandle<B>) -> Work) -> Result<T>
    where
        Work: Future<Output = T>,
    {
        run_under(self.await?, work).await
    }

    /// Runs `work` under the lock if it is free: one attempt. Returns `None` if it is held. See
    /// [`Locker::try_with_lock`](crate::Locker::try_with_lock).
    ///
    /// # Cancel safety
    ///
    /// Dropping the future drops the work and releases the lock in the background.
    pub async fn try_run<T, Work>(
        self,
        work: impl FnOnce(LockHandle<B>) -> Work,
    ) -> Result<Option<T>>
    where
        Work: Future<Output = T>,
    {
        match self.try_now().await? {
            Some(guard) => run_under(guard, work).await.map(Some),
            None => Ok(None),
        }
    }

    /// Returns the context and the key of the wait. Invalid input is reported here, before any I/O.
    #[expect(clippy::type_complexity, reason = "the parts of one request")]
    fn begin(&mut self) -> Result<(OptionsInUse<'a, B>, Key, Option<Arc<[Key]>>)> {
        let (key, any_of, options) = match std::mem::replace(&mut self.state, RequestState::Done) {
            RequestState::New { key, any_of, options } => (key, any_of, options),
            // Possible only if the request is polled by hand. Its wait is dropped, and leaves no
            // lock behind.
            RequestState::Waiting(_) => {
                return Err(Error::invalid("a lock request that waits cannot make one attempt"));
            }
            RequestState::Done => panic!("a lock request was polled after it completed"),
        };
        let key = key?;
        let engine = &self.context.engine;
        engine.check_for_a_runtime()?;
        if engine.is_shut_down() {
            return Err(Error::shut_down());
        }
        let context = match options {
            None => OptionsInUse::Default(self.context),
            Some(options) => {
                options.validate()?;
                let (engine, options) = (Arc::clone(engine), Arc::from(options));
                let holder = self.context.holder.clone();
                OptionsInUse::Own(Arc::new(Context { engine, options, holder }))
            }
        };
        Ok((context, key, any_of))
    }
}

/// Turns the error of a wait that timed out into `None`, unless the store failed.
pub(crate) fn none_if_held<T>(acquired: Result<T>) -> Result<Option<T>> {
    match acquired {
        Ok(guard) => Ok(Some(guard)),
        Err(error)
            if error.code() == ErrorCode::AcquisitionTimeout
                && std::error::Error::source(&error).is_none() =>
        {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// The context of a request: that of its locker, or one with its own options.
enum OptionsInUse<'a, B> {
    Default(&'a Arc<Context<B>>),
    Own(Arc<Context<B>>),
}

impl<B> OptionsInUse<'_, B> {
    fn get(&self) -> &Arc<Context<B>> {
        match self {
            Self::Default(context) => context,
            Self::Own(context) => context,
        }
    }
}

/// Runs work under a lock, and releases it whatever the work returned.
async fn run_under<B: LockBackend, T, Work: Future<Output = T>>(
    guard: LockGuard<B>,
    work: impl FnOnce(LockHandle<B>) -> Work,
) -> Result<T> {
    let outcome = guard.run(work(guard.handle())).await;
    guard.finish().await;
    outcome.map_err(|reason| Error::lost_lock(reason).with_key(guard.key()))
}

impl<B: LockBackend> Future for LockRequest<'_, B> {
    type Output = Result<LockGuard<B>>;

    fn poll(mut self: Pin<&mut Self>, context: &mut std::task::Context<'_>) -> Poll<Self::Output> {
        if let RequestState::New { .. } = self.state {
            let (options, key, any_of) = self.begin()?;
            let span = tracing::debug_span!(
                target: "syncguard::engine",
                "wait",
                key_hash = %key.hash_id(),
                label = options.get().options.label.as_deref(),
            );
            let wait = async move {
                let mut wait = Wait::new(options.get(), &key, any_of.as_ref());
                let acquired = match options.get().options.timeout {
                    Some(Duration::ZERO) => Err(wait.timed_out()),
                    _ => wait.bounded(pin!(wait.in_order())).await,
                };
                wait.ended(acquired, |guard| Some(guard)).await
            };
            // Without a span the future is smaller.
            self.state = RequestState::Waiting(if span.is_disabled() {
                Box::pin(wait)
            } else {
                Box::pin(wait.instrument(span))
            });
        }
        let RequestState::Waiting(wait) = &mut self.state else {
            panic!("a lock request was polled after it completed");
        };
        let acquired = ready!(wait.as_mut().poll(context));
        self.state = RequestState::Done;
        Poll::Ready(acquired)
    }
}

impl<B: LockBackend> fmt::Debug for LockRequest<'_, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockRequest").finish_non_exhaustive()
    }
}
