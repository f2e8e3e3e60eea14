//! Asking the store for a lock, until every request that was sent has an answer or is undone.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use super::carried::Carried;
use super::clock::LocalInstant;
use super::guard::LockGuard;
use super::hold::Grant;
use super::lanes::Visit;
use super::locker::Context;
use super::reaper::OrphanAcquire;
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
/// A request that got no answer is *in doubt*: it may have taken the lock. It is sent again as it
/// was, so that it can be granted only once, or it is undone; at the latest when this is dropped.
pub(super) struct Attempts<'a, B: LockBackend> {
    context: &'a Arc<Context<B>>,
    key: &'a Key,
    count: &'a AtomicU32,
    /// The lane that a grant is to be noted in; without one, it is looked up.
    visit: Option<&'a Visit<'a>>,
    in_doubt: Option<Sent>,
}

/// A request, and when it was sent for the first time.
struct Sent {
    request: AcquireRequest,
    at: LocalInstant,
}

impl<'a, B: LockBackend> Attempts<'a, B> {
    pub(super) fn new(
        context: &'a Arc<Context<B>>,
        key: &'a Key,
        count: &'a AtomicU32,
        visit: Option<&'a Visit<'a>>,
    ) -> Self {
        Self { context, key, count, visit, in_doubt: None }
    }

    /// Asks the store once.
    pub(super) async fn ask(&mut self) -> Result<Found<B>> {
        let is_replay = self.in_doubt.as_ref().is_some_and(|sent| self.is_worth_repeating(sent));
        let sent = match self.in_doubt.take() {
            Some(sent) if is_replay => sent,
            too_old => {
                self.in_doubt = too_old;
                self.undo_what_is_in_doubt();
                let request = AcquireRequest::new(self.key.clone(), self.context.options.ttl)?;
                Sent { request, at: self.context.ticker.now() }
            }
        };
        self.count.fetch_add(1, Ordering::Relaxed);
        let (context, request) = (Arc::clone(self.context), sent.request.clone());
        // The context comes back with the answer, to be the guard's.
        let call = async move {
            let answer = context.backend.acquire(&request).await;
            (answer, context)
        };
        let adopt = |rest| orphan(self.context, &sent, is_replay).undo_later(rest);
        let (answer, context) = Carried::new(call, adopt).await;
        let in_doubt = match &answer {
            Ok(Acquire::Acquired(_) | Acquire::Spent) => false,
            // An answer about this copy says nothing about an earlier one.
            Ok(Acquire::Contended { .. }) => is_replay,
            Err(error) => is_replay || error.may_have_taken_effect(),
        };
        if in_doubt {
            self.in_doubt = Some(Sent { request: sent.request.clone(), at: sent.at });
        }
        match answer {
            Ok(Acquire::Acquired(lease)) => {
                Ok(Found::Ours(self.guard(context, &sent, is_replay, &lease)))
            }
            Ok(Acquire::Contended { free_in }) => Ok(Found::Taken { free_in }),
            // The copy that was granted is over; the next attempt makes a new request.
            Ok(Acquire::Spent) if is_replay => Ok(Found::Taken { free_in: Some(Duration::ZERO) }),
            Ok(Acquire::Spent) => Err(Error::new(
                ErrorCode::Internal,
                "the backend says that a new request was used before",
            )
            .with_key(self.key)),
            Err(error) => Err(error.with_key(self.key)),
        }
    }

    fn guard(
        &self,
        context: Arc<Context<B>>,
        sent: &Sent,
        is_replay: bool,
        lease: &Lease<B::Fencing>,
    ) -> LockGuard<B> {
        let grant = Grant {
            lock_id: sent.request.lock_id(),
            token: lease.token(),
            expires_at: lease.expires_at(),
            receipt: lease.receipt().cloned(),
            sent: sent.at,
            ttl: sent.request.ttl(),
            in_doubt: is_replay.then(|| sent.request.clone()),
        };
        let until = grant.deadline();
        match self.visit {
            Some(visit) => visit.hold(until),
            None => context.lanes.hold(self.key, until),
        }
        LockGuard::new(context, self.key.clone(), grant)
    }

    /// A grant to a copy of an old request is valid from its *first* sending, so an old one is not
    /// worth much.
    fn is_worth_repeating(&self, sent: &Sent) -> bool {
        let age = self.context.ticker.now().since(sent.at);
        age < sent.request.ttl().as_duration() / 2
    }

    fn undo_what_is_in_doubt(&mut self) {
        if let Some(sent) = self.in_doubt.take() {
            orphan(self.context, &sent, true).undo_later(None);
        }
    }
}

impl<B: LockBackend> Drop for Attempts<'_, B> {
    fn drop(&mut self) {
        self.undo_what_is_in_doubt();
    }
}

fn orphan<B: LockBackend>(
    context: &Arc<Context<B>>,
    sent: &Sent,
    is_replay: bool,
) -> OrphanAcquire<B> {
    OrphanAcquire {
        context: Arc::clone(context),
        request: sent.request.clone(),
        sent: sent.at,
        is_replay,
    }
}
