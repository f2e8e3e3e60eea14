//! Asking the store for a lock, until every request that was sent has an answer or is undone.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use super::acquisition::{Acquisition, Verdict};
use super::cleanup::undo_later;
use super::clock::LocalInstant;
use super::context::Context;
use super::detach::DetachOnDrop;
use super::guard::LockGuard;
use super::lanes::Visit;
use super::shared_lease::Grant;
use crate::common::error::{Error, ErrorCode, Result};
use crate::common::key::Key;
use crate::contract::LockBackend;
use crate::contract::outcome::{Acquire, Lease};
use crate::contract::request::AcquireRequest;

/// What an attempt found.
pub(super) enum Found<B: LockBackend> {
    Ours(LockGuard<B>),
    Taken { free_in: Option<Duration> },
}

/// The attempts of one wait.
///
/// An acquisition with an open copy may have taken the lock. Its request is sent again as it was,
/// so that it can be granted only once, or it is undone; at the latest when this is dropped.
pub(super) struct Attempts<'a, B: LockBackend> {
    context: &'a Arc<Context<B>>,
    key: &'a Key,
    count: &'a AtomicU32,
    /// The lane that a grant is to be noted in; without one, it is looked up.
    visit: Option<&'a Visit<'a>>,
    /// The time, if it was read a moment ago: the first attempt counts from there.
    now: Option<LocalInstant>,
    unsettled: Option<Acquisition>,
}

impl<'a, B: LockBackend> Attempts<'a, B> {
    pub(super) fn new(
        context: &'a Arc<Context<B>>,
        key: &'a Key,
        count: &'a AtomicU32,
        visit: Option<&'a Visit<'a>>,
        now: Option<LocalInstant>,
    ) -> Self {
        Self { context, key, count, visit, now, unsettled: None }
    }

    /// Asks the store once.
    pub(super) async fn ask(&mut self) -> Result<Found<B>> {
        let mut acquisition = self.begin()?;
        self.count.fetch_add(1, Ordering::Relaxed);
        let (context, request) = (Arc::clone(self.context), acquisition.request().clone());
        // The context comes back with the answer, to be the guard's.
        let call = async move {
            let answer = context.engine.backend.acquire(&request).await;
            (answer, context)
        };
        let detach = |rest| undo_later(self.context, acquisition.clone(), rest);
        let (answer, context) = DetachOnDrop::new(call, detach).await;
        let verdict = acquisition.answered(&answer);
        let found = match (verdict, answer) {
            (Verdict::Granted, Ok(Acquire::Acquired(lease))) => {
                return Ok(Found::Ours(self.guard(context, acquisition, &lease)));
            }
            (Verdict::NotGranted, Ok(Acquire::Contended { free_in })) => {
                Ok(Found::Taken { free_in })
            }
            (Verdict::Impossible, _) => Err(Error::new(
                ErrorCode::Internal,
                "the backend says that a new request was used before",
            )
            .with_key(self.key)),
            (_, Err(error)) => Err(error.with_key(self.key)),
            // The copy that was granted is over; the next attempt makes a new request.
            (_, Ok(_)) => Ok(Found::Taken { free_in: Some(Duration::ZERO) }),
        };
        self.unsettled = Some(acquisition).filter(Acquisition::needs_undo);
        found
    }

    /// The request to send: the one with an open copy while that is worth it, or a new one.
    fn begin(&mut self) -> Result<Acquisition> {
        let now = self.now.take().unwrap_or_else(|| self.context.engine.ticker.now());
        if let Some(unsettled) = &mut self.unsettled
            && unsettled.is_worth_repeating(now)
        {
            unsettled.sent_again(now);
            return Ok(self.unsettled.take().expect("BUG: it was there a line before"));
        }
        self.undo_unsettled();
        let request = AcquireRequest::new(self.key.clone(), self.context.options.ttl)?;
        Ok(Acquisition::new(request, now))
    }

    fn guard(
        &self,
        context: Arc<Context<B>>,
        acquisition: Acquisition,
        lease: &Lease<B::Fencing>,
    ) -> LockGuard<B> {
        let grant = Grant {
            lock_id: acquisition.request().lock_id(),
            token: lease.token(),
            expires_at: lease.expires_at(),
            receipt: lease.receipt().cloned(),
            sent: acquisition.first_sent(),
            ttl: acquisition.request().ttl(),
            unsettled: acquisition.is_open().then(|| Box::new(acquisition)),
        };
        LockGuard::new(context, self.key.clone(), grant, self.visit)
    }

    fn undo_unsettled(&mut self) {
        if let Some(acquisition) = self.unsettled.take() {
            undo_later(self.context, acquisition, None);
        }
    }
}

impl<B: LockBackend> Drop for Attempts<'_, B> {
    fn drop(&mut self) {
        self.undo_unsettled();
    }
}
