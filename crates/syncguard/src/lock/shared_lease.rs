//! A held lock, shared by its guard, its handles and its task. It carries out the decisions of the
//! lease's state machine.

use std::pin::{Pin, pin};
use std::sync::{Arc, PoisonError};
use std::task::Poll;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::sync::futures::Notified;
use tracing::Span;

use super::acquisition::{Acquisition, TOLERANCE};
use super::cleanup::{ReleaseReport, release_until, undo_later};
use super::clock::LocalInstant;
use super::context::Context;

use super::lease_state::{AfterExtend, BeginExtend, ExtendAnswer, LeaseState, SentExtend, Step};
use super::release_errors::{ReleaseContext, ReleaseSource};
use super::wait_queue::{LocalHolder, is_worth_order};
use crate::common::error::{Error, ErrorCode, Result};
use crate::common::fence::{Fence, Fencing};
use crate::common::holder::BreakNote;
use crate::common::key::Key;
use crate::common::lock_id::LockId;
use crate::common::lost_reason::LostReason;
use crate::common::sync::{Mutex, MutexGuard};
use crate::common::time::Timestamp;
use crate::common::ttl::Ttl;
use crate::contract::detach::{DetachOnDrop, poll_once};
use crate::contract::event::EngineEventKind;
use crate::contract::outcome::{ExtendOutcome, NotHeldReason, ReleaseOutcome};
use crate::contract::request::{ExtendRequest, Hint, Receipt, ReleaseRequest};
use crate::contract::{BoxFuture, LockBackend};

/// A held lock.
#[derive(Debug)]
pub(super) struct SharedLease<B: LockBackend> {
    pub(super) context: Arc<Context<B>>,
    pub(super) key: Key,
    pub(super) lock_id: LockId,
    pub(super) token: <B::Fencing as Fencing>::Token,
    /// When the caller began to wait for it.
    wanted_since: LocalInstant,
    /// Another queue whose first waiter can take this lock.
    also_wakes: Option<Key>,
    inner: Mutex<LeaseInner>,
    /// Notified when the state changes.
    changed: Notify,
}

#[derive(Debug)]
struct LeaseInner {
    state: LeaseState,
    expires_at: Timestamp,
    receipt: Option<Receipt>,
    /// The acquisition, if a copy of its request is still open. That copy could be granted after
    /// the release, so it is undone then.
    unsettled: Option<Box<Acquisition>>,
    release: ReleaseState,
    /// Whether the queue was notified that this process no longer holds the lock.
    is_given_back: bool,
    /// Whether a task watches for the end of the lease.
    has_task: bool,
    /// Whether nobody uses the lock.
    is_discarded: bool,
    /// Open while the lock is held, if spans are enabled.
    hold_span: Span,
}

/// The progress of the release.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReleaseState {
    NotSent,
    /// A release failed, but may have taken effect.
    Failed {
        may_have_worked: bool,
    },
    /// A release is in progress, here or in the background, or the guard was detached.
    HandedOn,
    /// The store has answered a release.
    Answered,
}

/// What the store granted.
pub(super) struct Grant<F: Fencing> {
    pub(super) lock_id: LockId,
    pub(super) token: F::Token,
    pub(super) expires_at: Timestamp,
    pub(super) receipt: Option<Receipt>,
    /// When the caller began to wait for the lock.
    pub(super) wanted_since: LocalInstant,
    /// When the request was sent for the first time.
    pub(super) sent: LocalInstant,
    pub(super) ttl: Ttl,
    /// The acquisition, if a copy of its request is still open.
    pub(super) unsettled: Option<Box<Acquisition>>,
    /// Another queue whose first waiter can take the lock.
    pub(super) also_wakes: Option<Key>,
}

impl<F: Fencing> Grant<F> {
    /// Returns until when the lock is certain to be held.
    pub(super) fn deadline(&self) -> LocalInstant {
        self.sent + self.ttl.as_duration()
    }
}

impl<B: LockBackend> SharedLease<B> {
    /// Creates a lease. The caller must record it in the wait queue of its key.
    pub(super) fn new(context: Arc<Context<B>>, key: Key, grant: Grant<B::Fencing>) -> Self {
        let options = &context.options;
        let mut state = LeaseState::new(grant.sent, grant.ttl, options.stop_margin);
        if options.renew {
            state = state.renewed(options.ttl, options.max_hold);
        }
        let fence = B::Fencing::fence(grant.token).map(tracing::field::display);
        let hold_span = tracing::debug_span!(
            target: "syncguard::engine",
            "hold",
            key_hash = %key.hash_id(),
            label = context.options.label.as_deref(),
            fence,
        );
        Self {
            context,
            key,
            lock_id: grant.lock_id,
            token: grant.token,
            wanted_since: grant.wanted_since,
            also_wakes: grant.also_wakes,
            inner: Mutex::new(LeaseInner {
                state,
                expires_at: grant.expires_at,
                receipt: grant.receipt,
                unsettled: grant.unsettled,
                release: ReleaseState::NotSent,
                is_given_back: false,
                has_task: false,
                is_discarded: false,
                hold_span,
            }),
            changed: Notify::new(),
        }
    }

    fn inner(&self) -> MutexGuard<'_, LeaseInner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> LocalInstant {
        self.context.engine.ticker.now()
    }

    pub(super) fn fence(&self) -> Option<Fence> {
        B::Fencing::fence(self.token)
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

    /// Returns why the lease is over, or `None` while the lock is held. Reports a loss that nothing
    /// else has noticed.
    pub(super) fn end(&self) -> Option<LostReason> {
        let now = self.now();
        let (lost, end) = {
            let mut inner = self.inner();
            (inner.state.expire(now), inner.state.end())
        };
        if let Some(reason) = lost {
            self.report_loss(reason);
        }
        end
    }

    /// Records that a task watches the lease. Returns `false` if the lease already had one.
    pub(super) fn claim_task(&self) -> bool {
        !std::mem::replace(&mut self.inner().has_task, true)
    }

    /// Returns what is due now, after reporting a loss.
    pub(super) fn next(&self) -> Step {
        let step = self.inner().state.next(self.now());
        if let Step::Lost(reason) = &step {
            self.report_loss(reason.clone());
        }
        step
    }

    /// Returns a future that completes at the next change of the state after it is enabled.
    pub(super) fn changed(&self) -> Notified<'_> {
        self.changed.notified()
    }

    /// Waits until `look` returns a value, and calls it again at every change of the state.
    async fn watch<T>(&self, mut look: impl FnMut(&LeaseState) -> Option<T>) -> T {
        loop {
            let changed = self.changed.notified();
            let mut changed = pin!(changed);
            // Registers before checking, so that no change in between is missed.
            changed.as_mut().enable();
            let found = look(&self.inner().state);
            if let Some(found) = found {
                return found;
            }
            changed.await;
        }
    }

    /// Waits until the lease is over. A task must watch the time: see [`Self::claim_task`].
    pub(super) async fn ended(&self) -> LostReason {
        match self.end() {
            Some(reason) => reason,
            None => self.watch(LeaseState::end).await,
        }
    }

    /// Waits until the guard lets go of the lock.
    async fn let_go_by_guard(&self) {
        self.watch(|state| state.let_go_at().map(|_at| ())).await;
    }

    /// Lets go of the lock for the guard: nothing is extended after this. `and_then` runs on the
    /// state afterwards.
    fn let_go<T>(&self, and_then: impl FnOnce(&mut LeaseInner) -> T) -> T {
        let now = self.now();
        let (let_go, since, seen) = {
            let mut inner = self.inner();
            let let_go = inner.state.let_go(now);
            inner.hold_span = Span::none();
            (let_go, inner.state.since(), and_then(&mut inner))
        };
        if let Some(reason) = let_go.lost {
            self.report_loss(reason);
        }
        if let_go.is_first {
            self.changed.notify_waiters();
            self.report(|| EngineEventKind::Held { held: now.since(since) });
        }
        seen
    }

    /// Marks the lock as lost and reports it.
    pub(super) fn lose(&self, reason: LostReason) {
        let lost = self.inner().state.lose(reason);
        if let Some(reason) = lost {
            self.report_loss(reason);
        }
    }

    /// Reports a loss to waiting tasks, the wait queue and telemetry.
    fn report_loss(&self, reason: LostReason) {
        self.changed.notify_waiters();
        // A lock that is about to expire is still held; its guard releases it.
        if reason != LostReason::Expiring {
            self.note_released();
        }
        let (engine, key_hash) = (&self.context.engine, self.key.hash_id());
        if engine.recorder.is_off() {
            tracing::warn!(%key_hash, reason = reason.as_str(), "lost a lock: {reason}");
        }
        self.report(|| EngineEventKind::Lost { reason });
    }

    /// Reports an event about this lock.
    pub(super) fn report(&self, kind: impl FnOnce() -> EngineEventKind) {
        self.context.report(&self.key, self.fence(), kind);
    }

    /// Records that this process no longer holds the lock, so that the next waiter can try.
    fn note_released(&self) {
        let was_given_back = std::mem::replace(&mut self.inner().is_given_back, true);
        if !was_given_back {
            self.wake_queues();
        }
    }

    fn wake_queues(&self) {
        let wait_queues = &self.context.engine.wait_queues;
        wait_queues.note_released(&self.key, self);
        if let Some(queue) = &self.also_wakes {
            wait_queues.wake_head(queue);
        }
    }

    /// Finishes a release: undoes a copy of the request that may still be open, and lets the next
    /// waiter try. `and_then` updates the state first.
    fn settle<T>(&self, and_then: impl FnOnce(&mut LeaseInner) -> T) -> T {
        let (seen, unsettled, was_given_back) = {
            let mut inner = self.inner();
            let was_given_back = std::mem::replace(&mut inner.is_given_back, true);
            (and_then(&mut inner), inner.unsettled.take(), was_given_back)
        };
        if let Some(mut acquisition) = unsettled {
            acquisition.released();
            self.undo_after_hold(*acquisition);
        }
        if !was_given_back {
            self.wake_queues();
        }
        seen
    }

    /// Undoes the copies of a request that may still be open. The undo would end a lock that is
    /// kept for `hold_at_least`, so it waits until then.
    fn undo_after_hold(&self, acquisition: Acquisition) {
        let context = Arc::clone(&self.context);
        let queue = self.also_wakes.as_ref().unwrap_or(&self.key).clone();
        let rest = self.left_of_hold();
        if rest.is_zero() {
            return undo_later(&context, queue, acquisition, None);
        }
        // A shutdown does not wait for it: a copy that arrives so late leaves a lock for its TTL.
        self.context.engine.background.spawn_untracked(async move {
            context.engine.ticker.sleep(rest).await;
            undo_later(&context, queue, acquisition, None);
        });
    }

    /// Extends the lock, unless it is lost or its guard has let go.
    ///
    /// If dropped before it completes, the call continues in the background and its outcome is
    /// still recorded.
    pub(super) async fn extend(self: &Arc<Self>, ttl: Ttl) -> Result<ExtendOutcome> {
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
                    self.report_loss(reason);
                }
                Ok(GONE)
            }
            BeginExtend::Busy => unreachable!("BUG: waited for above"),
        }
    }

    /// Sends an extend that the state machine has begun.
    pub(super) async fn send_extend(self: &Arc<Self>, sent: SentExtend) -> Result<ExtendOutcome> {
        let request = ExtendRequest::new(self.lock_id, sent.ttl)
            .with_hint(self.hint())
            // The backend gives up first, and can then abandon a dead connection.
            .answer_within(sent.limit().mul_f64(0.9));
        let lease = Arc::clone(self);
        let call = async move { lease.ask_to_extend(&request).await };
        // The state machine is notified however the call ends.
        let detach = |rest: Option<BoxFuture<'static, ExtendReply>>| match rest {
            Some(rest) => self.note_later(rest, sent),
            None => self.note(sent, ExtendAnswer::Unknown),
        };
        let mut call = DetachOnDrop::new(call, detach);
        // No extend is sent after a release, and one in progress does not continue.
        let mut let_go = pin!(self.let_go_by_guard());
        if poll_once(let_go.as_mut()).await.is_ready() {
            return Ok(GONE);
        }
        // Begun here, because `select!` may yield before it polls anything: if dropped then, the
        // extend would count as sent and never end.
        if let Poll::Ready(reply) = poll_once(Pin::new(&mut call)).await {
            return self.note_reply(sent, reply);
        }
        tokio::select! {
            biased;
            () = let_go => Ok(GONE),
            reply = call => self.note_reply(sent, reply),
            () = self.context.engine.ticker.sleep_until(sent.give_up_at) => {
                self.note(sent, ExtendAnswer::Unknown);
                Err(Error::new(ErrorCode::NetworkTimeout, "the store did not answer the extend in time"))
            }
        }
    }

    /// Extends the lock once. If it is not held, asks whether it was broken.
    async fn ask_to_extend(&self, request: &ExtendRequest) -> ExtendReply {
        /// A loss must not wait for its reason.
        const LIMIT: Duration = Duration::from_millis(500);
        let engine = &self.context.engine;
        let answer = engine.recorder.extend(&engine.backend, request).await;
        if !matches!(answer, Ok(ExtendOutcome::NotHeld(_))) {
            return ExtendReply { answer, note: None };
        }
        let note = tokio::select! {
            biased;
            note = engine.backend.break_note(&self.lock_id) => note,
            () = engine.ticker.sleep(LIMIT) => None,
        };
        ExtendReply { answer, note }
    }

    /// Asks the store now whether the lock is still held, because it may not be.
    pub(super) fn suspect_loss(&self) {
        self.inner().state.hurry(self.now());
        self.changed.notify_waiters();
    }

    /// Drives a detached extend to its answer in the background and records it.
    fn note_later(self: &Arc<Self>, rest: BoxFuture<'static, ExtendReply>, sent: SentExtend) {
        if self.inner().state.let_go_at().is_some() {
            return;
        }
        let lease = Arc::clone(self);
        self.context.engine.background.spawn_untracked(async move {
            let mut rest = rest;
            let reply = tokio::select! {
                biased;
                () = lease.let_go_by_guard() => return,
                reply = &mut rest => Some(reply),
                () = lease.context.engine.ticker.sleep_until(sent.give_up_at) => None,
            };
            let reply = if let Some(reply) = reply {
                reply
            } else {
                lease.note(sent, ExtendAnswer::Unknown);
                tokio::select! {
                    biased;
                    () = lease.let_go_by_guard() => return,
                    reply = rest => reply,
                }
            };
            // Recorded; no caller waits for the answer.
            drop(lease.note_reply(sent, reply));
        });
    }

    /// Records the answer to an extend. Loss is final: a lock that is extended after its loss is
    /// released again.
    fn note_reply(
        self: &Arc<Self>,
        sent: SentExtend,
        ExtendReply { answer, note }: ExtendReply,
    ) -> Result<ExtendOutcome> {
        let noted = match &answer {
            Ok(ExtendOutcome::Extended(_)) => ExtendAnswer::Extended,
            Ok(ExtendOutcome::NotHeld(_)) => {
                ExtendAnswer::NotHeld(note.map_or(LostReason::NotHeld, LostReason::from))
            }
            Err(error) if error.may_have_taken_effect() => ExtendAnswer::Unknown,
            Err(_) => ExtendAnswer::Refused,
        };
        if let Ok(ExtendOutcome::Extended(extension)) = &answer
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
            Ok(ExtendOutcome::Extended(_)) if is_over => Ok(GONE),
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
            self.report_loss(reason);
        }
        if must_release {
            self.spawn_release(ReleaseSource::LateExtend, None);
        }
    }

    /// Releases the lock and waits for the answer.
    ///
    /// If dropped before it completes, the release continues in the background.
    pub(super) async fn release(self: &Arc<Self>) -> Result<ReleaseOutcome> {
        let begun = self.let_go(|inner| {
            if inner.release == ReleaseState::Answered {
                return None;
            }
            let before = std::mem::replace(&mut inner.release, ReleaseState::HandedOn);
            // A lock that was lost before cannot have been released here.
            let may_have_worked = !inner.state.is_lost()
                && matches!(
                    before,
                    ReleaseState::HandedOn | ReleaseState::Failed { may_have_worked: true }
                );
            Some((may_have_worked, inner.receipt.clone()))
        });
        let Some((may_have_worked, receipt)) = begun else {
            return Ok(ReleaseOutcome::NotHeld(NotHeldReason::NotFound));
        };
        let hint = Hint::key(self.key.clone()).with_receipt(receipt);
        let request = self.release_request(hint);
        let lease = Arc::clone(self);
        let call = async move { lease.send_release(&request).await };
        let detach = |rest| self.spawn_release(ReleaseSource::Guard, rest);
        let mut call = DetachOnDrop::new(call, detach);
        let answer = match poll_once(Pin::new(&mut call)).await {
            Poll::Ready(answer) => answer,
            Poll::Pending => {
                // Only a call that has to wait needs the locker's runtime. In another runtime it
                // is dropped, and so continues in the background of the locker's.
                self.context.engine.check_runtime()?;
                call.await
            }
        };
        match answer {
            Ok(answer) => {
                let lost = self.settle(|inner| {
                    let before = std::mem::replace(&mut inner.release, ReleaseState::Answered);
                    // Another call may have released it meanwhile.
                    let was_lost = matches!(answer, ReleaseOutcome::NotHeld(_))
                        && !may_have_worked
                        && before != ReleaseState::Answered;
                    if was_lost { inner.state.mark_not_held() } else { None }
                });
                if let Some(reason) = lost {
                    self.report_loss(reason);
                }
                // The release before this one may have taken effect although its answer was lost.
                Ok(if may_have_worked { ReleaseOutcome::Released } else { answer })
            }
            Err(error) => {
                let may_have_worked = may_have_worked || error.may_have_taken_effect();
                self.inner().release = ReleaseState::Failed { may_have_worked };
                Err(error.with_key(&self.key).with_lock_id(self.lock_id))
            }
        }
    }

    /// Releases the lock in the background, unless that is done or in progress.
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

    /// Records that nobody uses the lock.
    pub(super) fn discard(&self) {
        self.inner().is_discarded = true;
    }

    /// Keeps the lock beyond its guard.
    pub(super) fn keep(&self) {
        self.let_go(|inner| inner.release = ReleaseState::HandedOn);
        self.note_released();
    }

    /// Releases the lock in the background, with retries until [`Self::release_limit`]. `begun` is
    /// a call that is already in progress.
    fn spawn_release(
        self: &Arc<Self>,
        source: ReleaseSource,
        begun: Option<BoxFuture<'static, Result<ReleaseOutcome>>>,
    ) {
        let which = ReleaseContext { key: self.key.clone(), lock_id: self.lock_id, source };
        let report = ReleaseReport::new(Arc::clone(&self.context), which);
        let lease = Arc::clone(self);
        self.context.engine.background.spawn(async move {
            let limit = lease.release_limit();
            let request = lease.release_request(lease.hint());
            let ask = || lease.send_release(&request);
            let answer = release_until(&lease.context, limit, begun, ask).await;
            report.settle(answer.map(|_answer| ()));
            lease.settle(|_inner| ());
        });
    }

    /// Releases the lock, or sets its TTL to what is left of `hold_at_least`.
    async fn send_release(&self, request: &ReleaseRequest) -> Result<ReleaseOutcome> {
        let engine = &self.context.engine;
        let rest = self.left_of_hold();
        if rest.is_zero() {
            return engine.recorder.release(&engine.backend, request).await;
        }
        let request = ExtendRequest::new(self.lock_id, Ttl::new(rest)?);
        let request = request.with_hint(self.hint());
        // Boxed, so that an ordinary release is smaller.
        Ok(match Box::pin(engine.recorder.extend(&engine.backend, &request)).await? {
            ExtendOutcome::Extended(_) => ReleaseOutcome::Released,
            ExtendOutcome::NotHeld(reason) => ReleaseOutcome::NotHeld(reason),
        })
    }

    /// How much is left of `hold_at_least`; nothing if the lock is lost, or nobody used it.
    fn left_of_hold(&self) -> Duration {
        let at_least = self.context.options.hold_at_least;
        if at_least.is_zero() {
            return Duration::ZERO;
        }
        let inner = self.inner();
        if inner.is_discarded || inner.state.is_lost() {
            return Duration::ZERO;
        }
        at_least.saturating_sub(self.now().since(inner.state.since()))
    }

    fn release_request(&self, hint: Hint) -> ReleaseRequest {
        let request = ReleaseRequest::new(self.lock_id).with_hint(hint);
        let let_go_at = self.inner().state.let_go_at();
        let age = let_go_at.map_or(Duration::ZERO, |at| at.since(self.wanted_since));
        let is_ordered = self.context.options.is_ordered && is_worth_order(age);
        if is_ordered { request.with_holder_age(age) } else { request }
    }

    /// Returns until when a release that begins now may be retried.
    pub(super) fn release_limit(&self) -> LocalInstant {
        /// The least time for a release, for locks that are already lost.
        const AT_LEAST: Duration = Duration::from_secs(5);
        let now = self.now();
        match self.context.options.release_timeout {
            Some(timeout) => now + timeout,
            None => (self.inner().state.believed_until() + TOLERANCE).max(now + AT_LEAST),
        }
    }
}

/// The answer to an extend, and the note of a break if there is one.
struct ExtendReply {
    answer: Result<ExtendOutcome>,
    note: Option<BreakNote>,
}

/// The answer to an extend of a lock that is no longer held.
const GONE: ExtendOutcome = ExtendOutcome::NotHeld(NotHeldReason::Expired);

/// Lets `release_all` release the lock while its guard still exists.
impl<B: LockBackend> LocalHolder for SharedLease<B> {
    fn release_now(self: Arc<Self>) {
        self.abandon();
    }
}

/// However the lease ended, the queue must no longer wait for it.
impl<B: LockBackend> Drop for SharedLease<B> {
    fn drop(&mut self) {
        self.note_released();
    }
}
