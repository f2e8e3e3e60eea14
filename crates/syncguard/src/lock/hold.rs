//! The shared state of a held lock: how long it is ours, and whether it still is.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::Duration;

use tokio::sync::{Notify, OwnedMutexGuard};

use super::carried::{BoxFuture, Carried};
use super::clock::LocalInstant;
use super::locker::Context;
use super::options::ReleaseSource;
use super::reaper::{OrphanAcquire, TOLERANCE, release_later};
use crate::common::error::Result;
use crate::common::fence::Fencing;
use crate::common::key::Key;
use crate::common::lock_id::LockId;
use crate::common::time::Timestamp;
use crate::common::ttl::Ttl;
use crate::contract::LockBackend;
use crate::contract::event::{EngineEvent, LostReason};
use crate::contract::outcome::{Absence, Extend};
use crate::contract::request::{AcquireRequest, ExtendRequest, Hint, Receipt};

/// A held lock, shared by its guard, its renewal and work that runs under it.
#[derive(Debug)]
pub(super) struct Hold<B: LockBackend> {
    pub(super) context: Arc<Context<B>>,
    pub(super) key: Key,
    pub(super) lock_id: LockId,
    pub(super) token: <B::Fencing as Fencing>::Token,
    /// When the request that got the lock was sent for the first time.
    pub(super) since: LocalInstant,
    /// The request, when an earlier copy of it is still without an answer: it could be granted
    /// again after the release, so it is undone then.
    in_doubt: Option<AcquireRequest>,
    state: Mutex<State>,
    /// Held while an extend is being sent and while the guard lets go, so that no extend is ever
    /// sent after a release.
    sending: Mutex<()>,
    /// Rings when the deadline moves, when the lock is lost and when the guard lets go.
    changed: Notify,
    /// One extend at a time until it is answered, also when its caller has gone: an older one that
    /// is applied late could shorten what a newer one has got.
    extending: Arc<tokio::sync::Mutex<()>>,
}

#[derive(Debug)]
struct State {
    /// The lock is ours until then, whatever the network does: *before the request was sent* + TTL.
    deadline: LocalInstant,
    /// When renewal should extend it.
    renew_at: LocalInstant,
    expires_at: Timestamp,
    receipt: Option<Receipt>,
    /// How many extends were sent, and which of them was the last whose answer was noted.
    extends_sent: u64,
    last_noted: u64,
    /// A renewal was sent and not answered well.
    is_out_of_touch: bool,
    lost: Option<LostReason>,
    /// The guard has let go; from here on nothing is extended.
    is_over: bool,
    /// The lanes know that this process does not hold the lock any more.
    is_given_back: bool,
    /// Until when the release may be tried, once the guard has let go.
    release_limit: Option<LocalInstant>,
}

/// An extend on its way.
#[derive(Clone, Copy)]
struct Sent {
    number: u64,
    at: LocalInstant,
    ttl: Ttl,
}

impl Sent {
    fn deadline(self) -> LocalInstant {
        self.at + self.ttl.as_duration()
    }
}

/// What is granted, as far as a hold needs it.
pub(super) struct Grant<F: Fencing> {
    pub(super) lock_id: LockId,
    pub(super) token: F::Token,
    pub(super) expires_at: Timestamp,
    pub(super) receipt: Option<Receipt>,
    pub(super) sent: LocalInstant,
    pub(super) ttl: Ttl,
    /// The request, when an earlier copy of it is still without an answer.
    pub(super) in_doubt: Option<AcquireRequest>,
}

impl<F: Fencing> Grant<F> {
    /// The lock is ours for certain until then.
    pub(super) fn deadline(&self) -> LocalInstant {
        self.sent + self.ttl.as_duration()
    }
}

impl<B: LockBackend> Hold<B> {
    /// A hold that its lane already knows of.
    pub(super) fn new(context: Arc<Context<B>>, key: Key, grant: Grant<B::Fencing>) -> Self {
        let deadline = grant.deadline();
        Self {
            context,
            key,
            lock_id: grant.lock_id,
            token: grant.token,
            since: grant.sent,
            in_doubt: grant.in_doubt,
            state: Mutex::new(State {
                deadline,
                renew_at: grant.sent + grant.ttl.as_duration() / 3,
                expires_at: grant.expires_at,
                receipt: grant.receipt,
                extends_sent: 0,
                last_noted: 0,
                is_out_of_touch: false,
                lost: None,
                is_over: false,
                is_given_back: false,
                release_limit: None,
            }),
            sending: Mutex::new(()),
            changed: Notify::new(),
            extending: Arc::default(),
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

    /// The guard lets go: nothing is extended after this.
    pub(super) fn let_go(&self) {
        let now = self.context.ticker.now();
        if now >= self.deadline() {
            self.lose(LostReason::Expired);
        }
        {
            let _nothing_is_being_sent =
                self.sending.lock().unwrap_or_else(PoisonError::into_inner);
            let mut state = self.state();
            if std::mem::replace(&mut state.is_over, true) {
                return;
            }
            state.release_limit = Some(self.release_limit_from(now, &state));
        }
        self.changed.notify_waiters();
        self.context.observe(|| EngineEvent::Held {
            key_hash: self.key.hash(),
            held: now.since(self.since),
        });
    }

    /// Undoes the copy of the request that may still be under way, once the lock was released.
    pub(super) fn undo_what_is_in_doubt(&self) {
        if let Some(request) = &self.in_doubt {
            let orphan = OrphanAcquire {
                context: Arc::clone(&self.context),
                request: request.clone(),
                sent: self.since,
                is_replay: true,
            };
            orphan.undo_later(None);
        }
    }

    /// Until when a release may be tried; counted from when the guard let go.
    pub(super) fn release_limit(&self) -> LocalInstant {
        let state = self.state();
        state
            .release_limit
            .unwrap_or_else(|| self.release_limit_from(self.context.ticker.now(), &state))
    }

    fn release_limit_from(&self, now: LocalInstant, state: &State) -> LocalInstant {
        /// A lock that is already lost is still given this long to be released.
        const AT_LEAST: Duration = Duration::from_secs(5);
        match self.context.options.release_timeout {
            Some(timeout) => now + timeout,
            None => (state.deadline + TOLERANCE).max(now + AT_LEAST),
        }
    }

    /// This process does not hold the lock any more; the next may try.
    pub(super) fn give_back(&self) {
        if !std::mem::replace(&mut self.state().is_given_back, true) {
            self.context.lanes.give_back(&self.key);
        }
    }

    /// Notes whether a renewal is without a good answer.
    pub(super) fn set_out_of_touch(&self, is_out_of_touch: bool) {
        self.state().is_out_of_touch = is_out_of_touch;
    }

    /// The store says at the release that the lock was not held: it was lost before.
    pub(super) fn was_not_held(&self) {
        let was_known = self.state().lost.replace(LostReason::NotHeld).is_some();
        if !was_known {
            self.tell_loss(LostReason::NotHeld);
        }
    }

    /// Gives the lock up as lost, for ever.
    fn lose(&self, reason: LostReason) {
        let reason = {
            let mut state = self.state();
            if state.is_over || state.lost.is_some() {
                return;
            }
            let reason = match reason {
                LostReason::Expired if state.is_out_of_touch => LostReason::Unreachable,
                reason => reason,
            };
            *state.lost.insert(reason)
        };
        self.changed.notify_waiters();
        self.give_back();
        self.tell_loss(reason);
    }

    fn tell_loss(&self, reason: LostReason) {
        tracing::warn!(key_hash = %self.key.hash(), reason = reason.as_str(), "lost a lock: {reason}");
        self.context.observe(|| EngineEvent::Lost { key_hash: self.key.hash(), reason });
    }

    /// Waits until `look` finds something, looking again at every change and at the time it names.
    async fn watch<T>(&self, mut look: impl FnMut(&State) -> Watch<T>) -> T {
        loop {
            let changed = self.changed.notified();
            let mut changed = pin!(changed);
            // Registered before looking, so that a change in between is not missed.
            changed.as_mut().enable();
            let seen = look(&self.state());
            let at = match seen {
                Watch::Found(found) => return found,
                Watch::LookAgainAt(at) => Some(at),
                Watch::LookAgain => None,
            };
            tokio::select! {
                biased;
                () = changed => {}
                () = self.context.ticker.sleep_until_some(at) => {}
            }
        }
    }

    /// Waits until the lock is lost. Never ends when the guard lets go before.
    pub(super) async fn lost(&self) -> LostReason {
        loop {
            let lost = self.watch(|state| match state.lost {
                Some(reason) => Watch::Found(Some(reason)),
                None if state.is_over => Watch::LookAgain,
                None if self.context.ticker.now() >= state.deadline => Watch::Found(None),
                None => Watch::LookAgainAt(state.deadline),
            });
            match lost.await {
                Some(reason) => return reason,
                None => self.lose(LostReason::Expired),
            }
        }
    }

    /// Waits until the guard lets go or the lock is lost.
    pub(super) async fn ended(&self) {
        self.watch(|state| match state.lost {
            None if !state.is_over => Watch::LookAgain,
            _ => Watch::Found(()),
        })
        .await;
    }

    /// Waits until the guard lets go.
    async fn over(&self) {
        self.watch(|state| if state.is_over { Watch::Found(()) } else { Watch::LookAgain }).await;
    }

    /// Waits until the lock should be renewed.
    pub(super) async fn time_to_renew(&self) {
        self.watch(|state| {
            if self.context.ticker.now() >= state.renew_at {
                Watch::Found(())
            } else {
                Watch::LookAgainAt(state.renew_at)
            }
        })
        .await;
    }

    /// Extends the lock, unless it is lost or let go.
    ///
    /// Dropped half-way, the call goes on in the background and its answer is still noted.
    pub(super) async fn extend(self: &Arc<Self>, ttl: Ttl) -> Result<Extend> {
        const GONE: Result<Extend> = Ok(Extend::NotHeld(Absence::Expired));
        let one_at_a_time = Arc::clone(&self.extending).lock_owned().await;
        let at = self.context.ticker.now();
        if at >= self.deadline() {
            self.lose(LostReason::Expired);
            return GONE;
        }
        let sent = {
            let mut state = self.state();
            state.extends_sent += 1;
            Sent { number: state.extends_sent, at, ttl }
        };
        let request = ExtendRequest::new(self.lock_id, ttl).with_hint(self.hint());
        let hold = Arc::clone(self);
        let call = async move { hold.context.backend.extend(&request).await };
        let adopt = |rest| self.note_later(rest, sent, one_at_a_time);
        let mut call = Carried::new(call, adopt);
        // The first poll may send the request; letting go ends whatever has not been sent by then.
        let begun = poll_fn(|context| {
            let _nobody_lets_go = self.sending.lock().unwrap_or_else(PoisonError::into_inner);
            if !self.may_extend(sent) {
                return Poll::Ready(None);
            }
            Poll::Ready(Some(Future::poll(Pin::new(&mut call), context)))
        });
        let answer = match begun.await {
            None => return GONE,
            Some(Poll::Ready(answer)) => answer,
            Some(Poll::Pending) => tokio::select! {
                biased;
                () = self.over() => return GONE,
                answer = &mut call => answer,
            },
        };
        answer.map(|answer| self.note_extend(answer, sent))
    }

    /// Whether the lock is still there to be extended. If so, a shorter life begins now, even if
    /// the answer will be lost.
    fn may_extend(&self, sent: Sent) -> bool {
        let mut state = self.state();
        if state.is_over || state.lost.is_some() {
            return false;
        }
        if sent.deadline() < state.deadline {
            state.deadline = sent.deadline();
            drop(state);
            self.changed.notify_waiters();
        }
        true
    }

    /// Takes over what an extend answered. Loss is final: an extension that comes after it is
    /// released again.
    fn note_extend(self: &Arc<Self>, answer: Extend, sent: Sent) -> Extend {
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
                // The answer to an older request says nothing after that to a newer one.
                if sent.number > state.last_noted {
                    state.last_noted = sent.number;
                    state.deadline = sent.deadline();
                    state.renew_at = sent.at + sent.ttl.as_duration() / 3;
                    state.expires_at = extension.expires_at();
                    state.receipt = extension.receipt().cloned().or_else(|| state.receipt.take());
                }
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
    fn note_later(
        self: &Arc<Self>,
        rest: Option<BoxFuture<Result<Extend>>>,
        sent: Sent,
        one_at_a_time: OwnedMutexGuard<()>,
    ) {
        let Some(rest) = rest.filter(|_| !self.state().is_over) else { return };
        let hold = Arc::clone(self);
        self.context.reaper.spawn_untracked(async move {
            tokio::select! {
                biased;
                // No extend is sent after a release, not even the rest of one.
                () = hold.over() => {}
                answer = rest => if let Ok(answer) = answer {
                    // Whatever it says is noted; nobody waits for the answer.
                    drop(hold.note_extend(answer, sent));
                },
            }
            drop(one_at_a_time);
        });
    }
}

/// However the lock ended, the lane must not wait for it for ever.
impl<B: LockBackend> Drop for Hold<B> {
    fn drop(&mut self) {
        self.give_back();
    }
}

/// What a look at the state found.
enum Watch<T> {
    Found(T),
    LookAgain,
    LookAgainAt(LocalInstant),
}
