//! The attempts of one wait. Every request that is sent is answered or undone.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use super::acquisition::{Acquisition, Verdict};
use super::cleanup::{AcquireReply, undo_later};
use super::clock::LocalInstant;
use super::context::{Context, Engine};
use super::guard::LockGuard;
use super::shared_lease::Grant;
use super::wait_queue::Ticket;
use crate::common::error::{Error, ErrorCode, Result};
use crate::common::key::Key;
use crate::contract::LockBackend;
use crate::contract::acquire_any::Soonest;
use crate::contract::detach::DetachOnDrop;
use crate::contract::outcome::{AcquireAnyOutcome, AcquireOutcome, Lease};
use crate::contract::request::{AcquireAnyRequest, AcquireRequest};

/// The result of an attempt.
pub(super) enum Attempted<B: LockBackend> {
    Acquired(LockGuard<B>),
    Contended { expires_in: Option<Duration> },
}

/// One call of `lock` or `try_lock`, as its attempts need to know it.
pub(super) struct LockCall<'a, B> {
    pub(super) context: &'a Arc<Context<B>>,
    /// The key, or the name of the queue if any of several locks will do.
    pub(super) key: &'a Key,
    pub(super) any_of: Option<&'a Arc<[Key]>>,
    pub(super) started: LocalInstant,
    /// How often the store was asked.
    pub(super) attempts: AtomicU32,
    /// The time from the notification of a release to the grant, in microseconds; 0 for none.
    pub(super) hand_over_us: AtomicU32,
}

impl<B> LockCall<'_, B> {
    /// Returns the key for errors and events: the first, if any of several locks will do.
    pub(super) fn shown_key(&self) -> &Key {
        self.any_of.and_then(|keys| keys.first()).unwrap_or(self.key)
    }
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

    /// Asks the store once: for the lock of the key, or for any of several.
    pub(super) async fn ask(&mut self) -> Result<Attempted<B>> {
        let mut acquisition = self.begin()?;
        self.call.attempts.fetch_add(1, Ordering::Relaxed);
        let (context, request) = (Arc::clone(self.call.context), acquisition.request().clone());
        let any_of = self.call.any_of.cloned();
        // The context is returned with the answer, for the guard.
        let call = async move {
            let Engine { recorder, backend, .. } = &*context.engine;
            let (answer, key) = match any_of {
                // Without a sink the future is smaller.
                None if recorder.is_off() => (backend.acquire(&request).await, None),
                None => (Box::pin(recorder.acquire(backend, &request)).await, None),
                // Boxed, so that ordinary waiters are smaller.
                Some(keys) => Box::pin(acquire_any(&context.engine, &keys, request)).await,
            };
            AcquireReply { answer, key, context }
        };
        let queue = self.call.key;
        let detach = |rest| undo_later(self.call.context, queue.clone(), acquisition.clone(), rest);
        let AcquireReply { answer, key, context } = DetachOnDrop::new(call, detach).await;
        let verdict = acquisition.answered(&answer);
        let found = match (verdict, answer) {
            (Verdict::Granted, Ok(AcquireOutcome::Acquired(lease))) => {
                let guard = self.guard(context, key, acquisition, &lease);
                if !guard.is_valid() {
                    guard.discard();
                    return Err(Error::new(
                        ErrorCode::NetworkTimeout,
                        "the store granted the lock, but its TTL was over when the answer came",
                    )
                    .with_key(self.call.shown_key()));
                }
                return Ok(Attempted::Acquired(guard));
            }
            (Verdict::NotGranted, Ok(AcquireOutcome::Contended { expires_in })) => {
                Ok(Attempted::Contended { expires_in })
            }
            (Verdict::Impossible, _) => Err(Error::new(
                ErrorCode::Internal,
                "the backend reported a new request as already used; this is a bug in the backend",
            )
            .with_key(self.call.shown_key())),
            (_, Err(error)) => Err(error.with_key(self.call.shown_key())),
            // The lease of the granted copy is over; the next attempt makes a new request.
            (_, Ok(_)) => Ok(Attempted::Contended { expires_in: Some(Duration::ZERO) }),
        };
        self.unsettled = acquisition.needs_undo().then(|| Box::new(acquisition));
        found
    }

    /// Returns the request to send: the one with an open copy while repeating it is worthwhile, or
    /// a new one.
    fn begin(&mut self) -> Result<Acquisition> {
        let any_of = self.call.any_of;
        let is_new = std::mem::take(&mut self.is_new);
        let now = if is_new { self.call.started } else { self.call.context.engine.ticker.now() };
        if any_of.is_none()
            && let Some(unsettled) = &mut self.unsettled
            && unsettled.is_worth_repeating(now)
        {
            unsettled.sent_again(now);
            return Ok(*self.unsettled.take().expect("BUG: checked above"));
        }
        self.undo_unsettled();
        let context = self.call.context;
        let ttl = context.options.ttl;
        let request = if let Some(first) = any_of.and_then(|keys| keys.first()) {
            // It is not known yet whose shard the lock id would have to name.
            AcquireRequest::new(first.clone(), ttl)?
        } else {
            let capabilities = context.engine.backend.capabilities();
            AcquireRequest::for_backend(capabilities, self.call.key.clone(), ttl)?
        };
        Ok(Acquisition::new(request.with_holder(context.holder.clone()), now))
    }

    fn guard(
        &self,
        context: Arc<Context<B>>,
        key: Option<Key>,
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
            also_wakes: key.is_some().then(|| self.call.key.clone()),
        };
        match key {
            None => LockGuard::new(context, self.call.key.clone(), grant, self.ticket),
            // The queue is not that of the lock.
            Some(key) => LockGuard::new(context, key, grant, None),
        }
    }

    fn undo_unsettled(&mut self) {
        if let Some(acquisition) = self.unsettled.take() {
            undo_later(self.call.context, self.call.key.clone(), *acquisition, None);
        }
    }
}

impl<B: LockBackend> Drop for Attempts<'_, B> {
    fn drop(&mut self) {
        self.undo_unsettled();
    }
}

/// Asks for some of the locks and, if there are more, for the others: a large request is needed
/// only if most locks are held. Returns the outcome, and the key of a lock that was acquired.
async fn acquire_any<B: LockBackend>(
    engine: &Engine<B>,
    keys: &[Key],
    request: AcquireRequest,
) -> (Result<AcquireOutcome<B::Fencing>>, Option<Key>) {
    const FIRST: usize = 64;
    let (first, others) = keys.split_at(keys.len().min(FIRST));
    let mut soonest = Soonest::default();
    for part in [first, others].into_iter().filter(|part| !part.is_empty()) {
        let request = AcquireAnyRequest::of(part, &request);
        match engine.recorder.acquire_any(&engine.backend, &request).await {
            Ok(AcquireAnyOutcome::Acquired { key, lease }) => {
                return (Ok(AcquireOutcome::Acquired(lease)), Some(key));
            }
            Ok(AcquireAnyOutcome::Contended { expires_in }) => soonest.add(expires_in),
            Err(error) => return (Err(error), None),
        }
    }
    (Ok(AcquireOutcome::Contended { expires_in: soonest.expires_in() }), None)
}
