//! The shared state of a held lock: how long it is ours, and whether it still is.

use std::future::{pending, poll_fn};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::Duration;

use tokio::sync::Notify;

use super::attempt::{BoxFuture, Carried};
use super::clock::LocalInstant;
use super::locker::Context;
use super::options::ReleaseSource;
use super::reaper::release_later;
use crate::common::error::Result;
use crate::common::fence::Fencing;
use crate::common::key::Key;
use crate::common::lock_id::LockId;
use crate::common::time::Timestamp;
use crate::common::ttl::Ttl;
use crate::contract::LockBackend;
use crate::contract::event::{EngineEvent, LostReason};
use crate::contract::outcome::{Absence, Extend};
use crate::contract::request::{ExtendRequest, Hint, Receipt};

/// A held lock, shared by its guard, its renewal and work that runs under it.
#[derive(Debug)]
pub(super) struct Hold<B: LockBackend> {
    pub(super) context: Arc<Context<B>>,
    pub(super) key: Key,
    pub(super) lock_id: LockId,
    pub(super) token: <B::Fencing as Fencing>::Token,
    /// When the request that got the lock was sent for the first time.
    pub(super) since: LocalInstant,
    state: Mutex<State>,
    /// Rings when the deadline moves, when the lock is lost and when the guard lets go.
    changed: Notify,
    /// One extend at a time, so that the last answer is about the last request.
    extending: tokio::sync::Mutex<()>,
}

#[derive(Debug)]
struct State {
    /// The lock is ours until then, whatever the network does: *before the request was sent* + TTL.
    deadline: LocalInstant,
    expires_at: Timestamp,
    receipt: Option<Receipt>,
    lost: Option<LostReason>,
    /// The guard has let go; from here on nothing is extended.
    is_over: bool,
}

/// What is granted, as far as a hold needs it.
pub(super) struct Grant<F: Fencing> {
    pub(super) lock_id: LockId,
    pub(super) token: F::Token,
    pub(super) expires_at: Timestamp,
    pub(super) receipt: Option<Receipt>,
    pub(super) sent: LocalInstant,
    pub(super) ttl: Ttl,
}

impl<B: LockBackend> Hold<B> {
    pub(super) fn new(context: Arc<Context<B>>, key: Key, grant: Grant<B::Fencing>) -> Self {
        Self {
            context,
            key,
            lock_id: grant.lock_id,
            token: grant.token,
            since: grant.sent,
            state: Mutex::new(State {
                deadline: grant.sent + grant.ttl.as_duration(),
                expires_at: grant.expires_at,
                receipt: grant.receipt,
                lost: None,
                is_over: false,
            }),
            changed: Notify::new(),
            extending: tokio::sync::Mutex::new(()),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn deadline(&self) -> LocalInstant {
        self.state().deadline
    }

    pub(super) fn expires_at(&self) -> Timestamp {
        self.state().expires_at
    }

    pub(super) fn hint(&self) -> Hint {
        Hint::key(self.key.clone()).with_receipt(self.state().receipt.clone())
    }

    /// How long the lock is still ours; zero when it is lost or let go.
    pub(super) fn remaining(&self) -> Duration {
        let state = self.state();
        if state.is_over || state.lost.is_some() {
            return Duration::ZERO;
        }
        state.deadline.since(self.context.ticker.now())
    }

    /// The guard lets go: nothing is extended after this. Answers whether it had not before.
    pub(super) fn let_go(&self) -> bool {
        let first = !std::mem::replace(&mut self.state().is_over, true);
        if first {
            self.changed.notify_waiters();
            self.context.observe(|| EngineEvent::Held {
                key_hash: self.key.hash(),
                held: self.context.ticker.now().since(self.since),
            });
        }
        first
    }

    /// The lock is free, as far as this process knows.
    pub(super) fn given_back(&self) {
        self.context.lanes.given_back(&self.key);
    }

    /// Gives the lock up as lost, for ever.
    pub(super) fn lose(&self, reason: LostReason) {
        {
            let mut state = self.state();
            if state.is_over || state.lost.is_some() {
                return;
            }
            state.lost = Some(reason);
        }
        self.changed.notify_waiters();
        self.given_back();
        tracing::warn!(key_hash = %self.key.hash(), reason = reason.as_str(), "lost a lock: {reason}");
        self.context.observe(|| EngineEvent::Lost { key_hash: self.key.hash(), reason });
    }

    /// Waits until the lock is lost. Never ends when the guard lets go before.
    pub(super) async fn lost(&self) -> LostReason {
        loop {
            let changed = self.changed.notified();
            let mut changed = std::pin::pin!(changed);
            // Registered before looking, so that a change in between is not missed.
            changed.as_mut().enable();
            let (lost, is_over, deadline) = {
                let state = self.state();
                (state.lost, state.is_over, state.deadline)
            };
            match lost {
                Some(reason) => return reason,
                None if is_over => pending::<()>().await,
                None => {}
            }
            tokio::select! {
                biased;
                () = changed => {}
                () = self.context.ticker.sleep_until(deadline) => {
                    if self.deadline() <= deadline {
                        self.lose(LostReason::Expired);
                    }
                }
            }
        }
    }

    /// Waits until the guard lets go or the lock is lost.
    pub(super) async fn ended(&self) {
        loop {
            let changed = self.changed.notified();
            let mut changed = std::pin::pin!(changed);
            changed.as_mut().enable();
            {
                let state = self.state();
                if state.is_over || state.lost.is_some() {
                    return;
                }
            }
            changed.await;
        }
    }

    /// Extends the lock, unless it is lost or let go.
    ///
    /// Dropped half-way, the call goes on in the background and its answer is still noted.
    pub(super) async fn extend(self: &Arc<Self>, ttl: Ttl) -> Result<Extend> {
        const GONE: Result<Extend> = Ok(Extend::NotHeld(Absence::Expired));
        let _one_at_a_time = self.extending.lock().await;
        let sent = self.context.ticker.now();
        if sent >= self.deadline() {
            self.lose(LostReason::Expired);
            return GONE;
        }
        let request = ExtendRequest::new(self.lock_id, ttl).with_hint(self.hint());
        let hold = Arc::clone(self);
        let call = async move { hold.context.backend.extend(&request).await };
        let mut call = Carried::new(call, |rest| self.note_later(rest, sent, ttl));
        // The first poll sends the request. It happens under the same lock as letting go, so that
        // no extend is ever sent after a release.
        let begun = poll_fn(|context| {
            let mut state = self.state();
            if state.is_over || state.lost.is_some() {
                return Poll::Ready(None);
            }
            // A shorter life may begin now, even if the answer is lost.
            state.deadline = state.deadline.min(sent + ttl.as_duration());
            Poll::Ready(Some(Future::poll(Pin::new(&mut call), context)))
        });
        let answer = match begun.await {
            None => return GONE,
            Some(Poll::Ready(answer)) => answer,
            Some(Poll::Pending) => call.await,
        };
        answer.map(|answer| self.note_extend(answer, sent, ttl))
    }

    /// Takes over what an extend answered. Loss is final: an extension that comes after it is
    /// released again.
    fn note_extend(self: &Arc<Self>, answer: Extend, sent: LocalInstant, ttl: Ttl) -> Extend {
        let extension = match &answer {
            Extend::Extended(extension) => extension,
            // Letting go first and then hearing that nothing is held is no loss.
            Extend::NotHeld(_) => {
                self.lose(LostReason::NotHeld);
                return answer;
            }
        };
        let now = self.context.ticker.now();
        {
            let mut state = self.state();
            if state.is_over {
                return answer;
            }
            if state.lost.is_none() && now < state.deadline {
                state.deadline = sent + ttl.as_duration();
                state.expires_at = extension.expires_at();
                state.receipt = extension.receipt().cloned().or_else(|| state.receipt.take());
                drop(state);
                self.changed.notify_waiters();
                return answer;
            }
        }
        self.lose(LostReason::Expired);
        release_later(Arc::clone(self), ReleaseSource::LateExtend, None);
        Extend::NotHeld(Absence::Expired)
    }

    /// An extend whose caller has gone is driven to its answer, which is noted.
    fn note_later(self: &Arc<Self>, rest: BoxFuture<Result<Extend>>, sent: LocalInstant, ttl: Ttl) {
        let hold = Arc::clone(self);
        self.context.reaper.spawn_untracked(async move {
            if let Ok(answer) = rest.await {
                // Whatever it says is noted; nobody waits for the answer.
                drop(hold.note_extend(answer, sent, ttl));
            }
        });
    }
}
