//! A held lock, shared by its guard, its handles and its task: carries out what the state machine
//! of the lease decides.

use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::sync::futures::Notified;

use super::acquisition::{Acquisition, TOLERANCE};
use super::cleanup::{Report, release_until, undo_later};
use super::clock::LocalInstant;
use super::context::Context;
use super::detach::{BoxFuture, DetachOnDrop, poll_once};
use super::lanes::LocalHolder;
use super::lease_state::{AfterExtend, BeginExtend, ExtendAnswer, LeaseState, SentExtend, Step};
use super::release_errors::{ReleaseContext, ReleaseSource};
use crate::common::error::{Error, ErrorCode, Result};
use crate::common::fence::Fencing;
use crate::common::key::Key;
use crate::common::lock_id::LockId;
use crate::common::lost_reason::LostReason;
use crate::common::time::Timestamp;
use crate::common::ttl::Ttl;
use crate::contract::LockBackend;
use crate::contract::event::EngineEvent;
use crate::contract::outcome::{Absence, Extend, Release};
use crate::contract::request::{ExtendRequest, Hint, Receipt, ReleaseRequest};

/// A held lock.
#[derive(Debug)]
pub(super) struct SharedLease<B: LockBackend> {
    pub(super) context: Arc<Context<B>>,
    pub(super) key: Key,
    pub(super) lock_id: LockId,
    pub(super) token: <B::Fencing as Fencing>::Token,
    inner: Mutex<Inner>,
    /// Rings when the state changes.
    changed: Notify,
}

#[derive(Debug)]
struct Inner {
    state: LeaseState,
    expires_at: Timestamp,
    receipt: Option<Receipt>,
    /// The acquisition, if a copy of its request is still open: it could be granted after the
    /// release, so it is undone then.
    unsettled: Option<Box<Acquisition>>,
    release: ReleaseState,
    /// The lanes know that this process does not hold the lock any longer.
    is_given_back: bool,
    /// A task looks after the end of the lease.
    has_task: bool,
}

/// How far the lock is on its way back to the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReleaseState {
    NotSent,
    /// A release failed. It may have worked all the same.
    Failed {
        may_have_worked: bool,
    },
    /// A release is on its way, here or in the background, or the lock was kept on purpose.
    HandedOn,
    /// The store has answered a release.
    Answered,
}

/// What is granted.
pub(super) struct Grant<F: Fencing> {
    pub(super) lock_id: LockId,
    pub(super) token: F::Token,
    pub(super) expires_at: Timestamp,
    pub(super) receipt: Option<Receipt>,
    /// When the request was sent for the first time.
    pub(super) sent: LocalInstant,
    pub(super) ttl: Ttl,
    /// The acquisition, if a copy of its request is still open.
    pub(super) unsettled: Option<Box<Acquisition>>,
}

impl<F: Fencing> Grant<F> {
    /// The lock is ours for certain until then.
    pub(super) fn deadline(&self) -> LocalInstant {
        self.sent + self.ttl.as_duration()
    }
}

impl<B: LockBackend> SharedLease<B> {
    /// A lease that its lane already knows of.
    pub(super) fn new(context: Arc<Context<B>>, key: Key, grant: Grant<B::Fencing>) -> Self {
        let options = &context.options;
        let mut state = LeaseState::new(grant.sent, grant.ttl, options.stop_margin);
        if options.renew {
            state = state.renewed(options.ttl, options.max_hold);
        }
        Self {
            context,
            key,
            lock_id: grant.lock_id,
            token: grant.token,
            inner: Mutex::new(Inner {
                state,
                expires_at: grant.expires_at,
                receipt: grant.receipt,
                unsettled: grant.unsettled,
                release: ReleaseState::NotSent,
                is_given_back: false,
                has_task: false,
            }),
            changed: Notify::new(),
        }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> LocalInstant {
        self.context.engine.ticker.now()
    }

    pub(super) fn expires_at(&self) -> Timestamp {
        self.inner().expires_at
    }

    pub(super) fn hint(&self) -> Hint {
        Hint::key(self.key.clone()).with_receipt(self.inner().receipt.clone())
    }

    pub(super) fn remaining(&self) -> Duration {
        self.inner().state.remaining(self.now())
    }

    /// Why the lock is not ours any longer, once it is not.
    pub(super) fn end(&self) -> Option<LostReason> {
        self.inner().state.end()
    }

    /// Notes that a task looks after the lease. Answers whether there was none.
    pub(super) fn claim_task(&self) -> bool {
        !std::mem::replace(&mut self.inner().has_task, true)
    }

    /// What is due now, a loss already told.
    pub(super) fn next(&self) -> Step {
        let step = self.inner().state.next(self.now());
        if let Step::Lost(reason) = step {
            self.tell_loss(reason);
        }
        step
    }

    /// Completes at the next change of the state, counted from when it is enabled.
    pub(super) fn changed(&self) -> Notified<'_> {
        self.changed.notified()
    }

    /// Waits until `look` finds something, looking again at every change of the state.
    async fn watch<T>(&self, mut look: impl FnMut(&LeaseState) -> Option<T>) -> T {
        loop {
            let changed = self.changed.notified();
            let mut changed = pin!(changed);
            // Registered before looking, so that a change in between is not missed.
            changed.as_mut().enable();
            let found = look(&self.inner().state);
            if let Some(found) = found {
                return found;
            }
            changed.await;
        }
    }

    /// Waits until the lock is not ours any longer. Something must look after the time: see
    /// [`Self::claim_task`].
    pub(super) async fn ended(&self) -> LostReason {
        self.watch(LeaseState::end).await
    }

    /// Waits until the guard lets go.
    async fn let_go_by_guard(&self) {
        self.watch(|state| state.let_go_at().map(|_at| ())).await;
    }

    /// The guard lets go: nothing is extended after this. `and_then` sees the state afterwards.
    fn let_go<T>(&self, and_then: impl FnOnce(&mut Inner) -> T) -> T {
        let now = self.now();
        let (let_go, since, seen) = {
            let mut inner = self.inner();
            let let_go = inner.state.let_go(now);
            (let_go, inner.state.since(), and_then(&mut inner))
        };
        if let Some(reason) = let_go.lost {
            self.tell_loss(reason);
        }
        if let_go.is_first {
            self.changed.notify_waiters();
            self.context.engine.observe(|| EngineEvent::Held {
                key_hash: self.key.hash(),
                held: now.since(since),
            });
        }
        seen
    }

    /// Gives the lock up as lost.
    pub(super) fn lose(&self, reason: LostReason) {
        let lost = self.inner().state.lose(reason);
        if let Some(reason) = lost {
            self.tell_loss(reason);
        }
    }

    /// Tells everything that waits, and the world, of a loss.
    fn tell_loss(&self, reason: LostReason) {
        self.changed.notify_waiters();
        // A lock that is about to expire is still there; it is given back with its guard.
        if reason != LostReason::Expiring {
            self.give_back();
        }
        let key_hash = self.key.hash();
        tracing::warn!(%key_hash, reason = reason.as_str(), "lost a lock: {reason}");
        self.context.engine.observe(|| EngineEvent::Lost { key_hash, reason });
    }

    /// This process does not hold the lock any longer; the next may try.
    fn give_back(&self) {
        let was_given_back = std::mem::replace(&mut self.inner().is_given_back, true);
        if !was_given_back {
            self.context.engine.lanes.give_back(&self.key);
        }
    }

    /// After the release: undoes the copy of the request that may still be under way, and gives the
    /// lock back. `and_then` changes the state on the way.
    fn settle<T>(&self, and_then: impl FnOnce(&mut Inner) -> T) -> T {
        let (seen, unsettled, was_given_back) = {
            let mut inner = self.inner();
            let was_given_back = std::mem::replace(&mut inner.is_given_back, true);
            (and_then(&mut inner), inner.unsettled.take(), was_given_back)
        };
        if let Some(mut acquisition) = unsettled {
            acquisition.released();
            undo_later(&self.context, *acquisition, None);
        }
        if !was_given_back {
            self.context.engine.lanes.give_back(&self.key);
        }
        seen
    }

    /// Extends the lock, unless it is lost or let go.
    ///
    /// Dropped half-way, the call goes on in the background and its answer is still noted.
    pub(super) async fn extend(self: &Arc<Self>, ttl: Ttl) -> Result<Extend> {
        let begun = loop {
            let changed = self.changed.notified();
            let mut changed = pin!(changed);
            changed.as_mut().enable();
            let begun = self.inner().state.begin_extend(ttl, self.now());
            if begun != BeginExtend::Busy {
                break begun;
            }
            changed.await;
        };
        match begun {
            BeginExtend::Send(sent) => self.send_extend(sent).await,
            BeginExtend::Over(lost) => {
                if let Some(reason) = lost {
                    self.tell_loss(reason);
                }
                Ok(GONE)
            }
            BeginExtend::Busy => unreachable!("BUG: waited for above"),
        }
    }

    /// Sends an extend that the state machine has begun.
    pub(super) async fn send_extend(self: &Arc<Self>, sent: SentExtend) -> Result<Extend> {
        let request = ExtendRequest::new(self.lock_id, sent.ttl)
            .with_hint(self.hint())
            // The backend gives up first, and can then leave a path that has died.
            .answer_within(sent.limit().mul_f64(0.9));
        let lease = Arc::clone(self);
        let call = async move { lease.context.engine.backend.extend(&request).await };
        // Whatever becomes of the call, the state machine hears of it.
        let detach = |rest: Option<BoxFuture<Result<Extend>>>| match rest {
            Some(rest) => self.note_later(rest, sent),
            None => self.note(sent, ExtendAnswer::Unknown),
        };
        let call = DetachOnDrop::new(call, detach);
        tokio::select! {
            biased;
            // No extend is sent after a release, not even the rest of one.
            () = self.let_go_by_guard() => Ok(GONE),
            answer = call => self.note_answer(sent, answer),
            () = self.context.engine.ticker.sleep_until(sent.give_up_at) => {
                self.note(sent, ExtendAnswer::Unknown);
                Err(Error::new(ErrorCode::NetworkTimeout, "the extend was not answered in time"))
            }
        }
    }

    /// Drives an extend without a caller to its answer, which is noted.
    fn note_later(self: &Arc<Self>, rest: BoxFuture<Result<Extend>>, sent: SentExtend) {
        if self.inner().state.let_go_at().is_some() {
            return;
        }
        let lease = Arc::clone(self);
        self.context.engine.background.spawn_untracked(async move {
            let mut rest = rest;
            let answer = tokio::select! {
                biased;
                () = lease.let_go_by_guard() => return,
                answer = &mut rest => Some(answer),
                () = lease.context.engine.ticker.sleep_until(sent.give_up_at) => None,
            };
            let answer = if let Some(answer) = answer {
                answer
            } else {
                lease.note(sent, ExtendAnswer::Unknown);
                tokio::select! {
                    biased;
                    () = lease.let_go_by_guard() => return,
                    answer = rest => answer,
                }
            };
            // Whatever it says is noted; no one waits for the answer.
            drop(lease.note_answer(sent, answer));
        });
    }

    /// Takes over what an extend answered. Loss is final: an extension that comes after it is
    /// released again.
    fn note_answer(self: &Arc<Self>, sent: SentExtend, answer: Result<Extend>) -> Result<Extend> {
        let noted = match &answer {
            Ok(Extend::Extended(_)) => ExtendAnswer::Extended,
            Ok(Extend::NotHeld(_)) => ExtendAnswer::NotHeld,
            Err(error) if error.may_have_taken_effect() => ExtendAnswer::Unknown,
            Err(_) => ExtendAnswer::Refused,
        };
        if let Ok(Extend::Extended(extension)) = &answer
            && let mut inner = self.inner()
            && inner.state.is_open(sent)
        {
            inner.expires_at = extension.expires_at();
            if let Some(receipt) = extension.receipt() {
                inner.receipt = Some(receipt.clone());
            }
        }
        self.note(sent, noted);
        let is_over = self.end().is_some();
        match answer {
            Ok(Extend::Extended(_)) if is_over => Ok(GONE),
            answer => answer,
        }
    }

    fn note(self: &Arc<Self>, sent: SentExtend, answer: ExtendAnswer) {
        let after = self.inner().state.extend_ended(sent, answer, self.now());
        self.changed.notify_waiters();
        let (lost, must_release) = match after {
            AfterExtend::Noted => (None, false),
            AfterExtend::Lost(reason) => (Some(reason), false),
            AfterExtend::ReleaseIt(lost) => (lost, true),
        };
        if let Some(reason) = lost {
            self.tell_loss(reason);
        }
        if must_release {
            self.spawn_release(ReleaseSource::LateExtend, None);
        }
    }

    /// Gives the lock back and waits for the answer.
    ///
    /// Dropped half-way, the release goes on in the background.
    pub(super) async fn release(self: &Arc<Self>) -> Result<Release> {
        let begun = self.let_go(|inner| {
            if inner.release == ReleaseState::Answered {
                return None;
            }
            let before = std::mem::replace(&mut inner.release, ReleaseState::HandedOn);
            // Nothing that was lost before can have been released by us.
            let may_have_worked = !inner.state.is_lost()
                && matches!(
                    before,
                    ReleaseState::HandedOn | ReleaseState::Failed { may_have_worked: true }
                );
            Some((may_have_worked, inner.receipt.clone()))
        });
        let Some((may_have_worked, receipt)) = begun else {
            return Ok(Release::NotHeld(Absence::NotFound));
        };
        let hint = Hint::key(self.key.clone()).with_receipt(receipt);
        let request = ReleaseRequest::new(self.lock_id).with_hint(hint);
        let lease = Arc::clone(self);
        let call = async move { lease.context.engine.backend.release(&request).await };
        let detach = |rest| self.spawn_release(ReleaseSource::Guard, rest);
        let mut call = DetachOnDrop::new(call, detach);
        let answer = match poll_once(Pin::new(&mut call)).await {
            Poll::Ready(answer) => answer,
            Poll::Pending => {
                // Only a call that waits needs its runtime. Elsewhere it is handed home.
                self.context.engine.check_runtime()?;
                call.await
            }
        };
        match answer {
            Ok(answer) => {
                let lost = self.settle(|inner| {
                    inner.release = ReleaseState::Answered;
                    let was_lost = matches!(answer, Release::NotHeld(_)) && !may_have_worked;
                    if was_lost { inner.state.was_not_held() } else { None }
                });
                if let Some(reason) = lost {
                    self.tell_loss(reason);
                }
                // The release before this one may have worked although its answer was lost.
                Ok(if may_have_worked { Release::Released } else { answer })
            }
            Err(error) => {
                let may_have_worked = may_have_worked || error.may_have_taken_effect();
                self.inner().release = ReleaseState::Failed { may_have_worked };
                Err(error.with_key(&self.key).with_lock_id(self.lock_id))
            }
        }
    }

    /// The guard goes: releases the lock in the background, unless that is done or under way.
    pub(super) fn abandon(self: &Arc<Self>) {
        let before = self.let_go(|inner| {
            let before = inner.release;
            if before != ReleaseState::Answered {
                inner.release = ReleaseState::HandedOn;
            }
            before
        });
        if matches!(before, ReleaseState::NotSent | ReleaseState::Failed { .. }) {
            self.spawn_release(ReleaseSource::Guard, None);
        }
    }

    /// The lock is kept beyond its guard.
    pub(super) fn keep(&self) {
        self.let_go(|inner| inner.release = ReleaseState::HandedOn);
        self.give_back();
    }

    /// Releases the lock in the background, until it is answered or its time is over. `begun` is a
    /// call that is already under way.
    fn spawn_release(
        self: &Arc<Self>,
        source: ReleaseSource,
        begun: Option<BoxFuture<Result<Release>>>,
    ) {
        let which = ReleaseContext { key: self.key.clone(), lock_id: self.lock_id, source };
        let report = Report::new(Arc::clone(&self.context), which);
        let lease = Arc::clone(self);
        self.context.engine.background.spawn(async move {
            let limit = lease.release_limit();
            let request = ReleaseRequest::new(lease.lock_id).with_hint(lease.hint());
            let ask = || lease.context.engine.backend.release(&request);
            let answer = release_until(&lease.context, limit, begun, ask).await;
            report.settle(answer.map(|_answer| ()));
            lease.settle(|_inner| ());
        });
    }

    /// Until when a release that is first tried now may be tried.
    pub(super) fn release_limit(&self) -> LocalInstant {
        /// A lock that is already lost is still given this long to be released.
        const AT_LEAST: Duration = Duration::from_secs(5);
        let now = self.now();
        match self.context.options.release_timeout {
            Some(timeout) => now + timeout,
            None => (self.inner().state.believed_until() + TOLERANCE).max(now + AT_LEAST),
        }
    }
}

/// The answer to an extend of a lock that is not ours any longer.
const GONE: Extend = Extend::NotHeld(Absence::Expired);

/// The lane can take the lock back from a guard that outlives its locker.
impl<B: LockBackend> LocalHolder for SharedLease<B> {
    fn release_now(self: Arc<Self>) {
        self.abandon();
    }
}

/// However the lock ended, the lane must not wait for it any longer.
impl<B: LockBackend> Drop for SharedLease<B> {
    fn drop(&mut self) {
        self.give_back();
    }
}
