//! The attempts of one wait. Every request that is sent is answered or undone.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use super::acquisition::{Acquisition, Verdict};
use super::cleanup::undo_later;
use super::clock::LocalInstant;
use super::context::Context;
use super::detach::DetachOnDrop;
use super::guard::LockGuard;
use super::shared_lease::Grant;
use super::wait_queue::Ticket;
use crate::common::error::{Error, ErrorCode, Result};
use crate::common::key::Key;
use crate::contract::LockBackend;
use crate::contract::outcome::{AcquireOutcome, Lease};
use crate::contract::request::AcquireRequest;

/// The result of an attempt.
pub(super) enum Attempted<B: LockBackend> {
    Acquired(LockGuard<B>),
    Contended { expires_in: Option<Duration> },
}

/// One call of `lock` or `try_lock`, as its attempts need to know it.
pub(super) struct LockCall<'a, B> {
    pub(super) context: &'a Arc<Context<B>>,
    pub(super) key: &'a Key,
    pub(super) started: LocalInstant,
    /// How often the store was asked.
    pub(super) attempts: AtomicU32,
    /// The time from the notification of a release to the grant, in microseconds; 0 for none.
    pub(super) hand_over_us: AtomicU32,
}

/// The attempts of one wait.
///
/// An acquisition with an open copy may have taken the lock. Its request is either sent again
/// unchanged, so that it can be granted only once, or undone, at the latest when this is dropped.
pub(super) struct Attempts<'a, B: LockBackend> {
    call: &'a LockCall<'a, B>,
    /// The queue that a grant is noted in; without one, it is looked up.
    ticket: Option<&'a Ticket<'a>>,
    /// Whether the call began a moment ago: then the first attempt counts from there.
    is_new: bool,
    /// Boxed, because it is rare and a parked waiter is small.
    unsettled: Option<Box<Acquisition>>,
}

impl<'a, B: LockBackend> Attempts<'a, B> {
    pub(super) fn new(
        call: &'a LockCall<'a, B>,
        ticket: Option<&'a Ticket<'a>>,
        is_new: bool,
    ) -> Self {
        Self { call, ticket, is_new, unsettled: None }
    }

    /// Asks the store once.
    pub(super) async fn ask(&mut self) -> Result<Attempted<B>> {
        let mut acquisition = self.begin()?;
        self.call.attempts.fetch_add(1, Ordering::Relaxed);
        let (context, request) = (Arc::clone(self.call.context), acquisition.request().clone());
        // The context is returned with the answer, for the guard.
        let call = async move {
            let engine = &context.engine;
            let answer = engine.recorder.acquire(&engine.backend, &request).await;
            (answer, context)
        };
        let detach = |rest| undo_later(self.call.context, acquisition.clone(), rest);
        let (answer, context) = DetachOnDrop::new(call, detach).await;
        let verdict = acquisition.answered(&answer);
        let found = match (verdict, answer) {
            (Verdict::Granted, Ok(AcquireOutcome::Acquired(lease))) => {
                return Ok(Attempted::Acquired(self.guard(context, acquisition, &lease)));
            }
            (Verdict::NotGranted, Ok(AcquireOutcome::Contended { expires_in })) => {
                Ok(Attempted::Contended { expires_in })
            }
            (Verdict::Impossible, _) => Err(Error::new(
                ErrorCode::Internal,
                "the backend reported a new request as already used; this is a bug in the backend",
            )
            .with_key(self.call.key)),
            (_, Err(error)) => Err(error.with_key(self.call.key)),
            // The lease of the granted copy is over; the next attempt makes a new request.
            (_, Ok(_)) => Ok(Attempted::Contended { expires_in: Some(Duration::ZERO) }),
        };
        self.unsettled = acquisition.needs_undo().then(|| Box::new(acquisition));
        found
    }

    /// Returns the request to send: the one with an open copy while repeating it is worthwhile, or
    /// a new one.
    fn begin(&mut self) -> Result<Acquisition> {
        let is_new = std::mem::take(&mut self.is_new);
        let now = if is_new { self.call.started } else { self.call.context.engine.ticker.now() };
        if let Some(unsettled) = &mut self.unsettled
            && unsettled.is_worth_repeating(now)
        {
            unsettled.sent_again(now);
            return Ok(*self.unsettled.take().expect("BUG: checked above"));
        }
        self.undo_unsettled();
        let context = self.call.context;
        let request = AcquireRequest::new(self.call.key.clone(), context.options.ttl)?;
        Ok(Acquisition::new(request.with_holder(context.holder.clone()), now))
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
            wanted_since: self.call.started,
            sent: acquisition.first_sent(),
            ttl: acquisition.request().ttl(),
            unsettled: acquisition.is_open().then(|| Box::new(acquisition)),
        };
        LockGuard::new(context, self.call.key.clone(), grant, self.ticket)
    }

    fn undo_unsettled(&mut self) {
        if let Some(acquisition) = self.unsettled.take() {
            undo_later(self.call.context, *acquisition, None);
        }
    }
}

impl<B: LockBackend> Drop for Attempts<'_, B> {
    fn drop(&mut self) {
        self.undo_unsettled();
    }
}
