//! Waiting for a lock: in order within this process, woken by the store where it can, polling as
//! the net underneath.

use std::future::{pending, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::Poll;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::attempt::Carried;
use super::clock::LocalInstant;
use super::guard::LockGuard;
use super::hold::Grant;
use super::lanes::{Lane, Turn};
use super::locker::Context;
use super::reaper::OrphanAcquire;
use super::retry::{Next, Schedule};
use crate::common::error::{Error, ErrorCode, Result};
use crate::common::key::Key;
use crate::contract::LockBackend;
use crate::contract::event::{EngineEvent, WaitOutcome};
use crate::contract::outcome::{Acquire, Lease};
use crate::contract::request::AcquireRequest;
use crate::contract::wake::WakeUps;

/// One call of `lock` or `try_lock`.
pub(super) struct Wait<'a, B: LockBackend> {
    context: &'a Arc<Context<B>>,
    key: &'a Key,
    started: LocalInstant,
    attempts: AtomicU32,
    outcome: WaitOutcome,
}

/// What an attempt found, as far as waiting is concerned.
enum Found<B: LockBackend> {
    Ours(LockGuard<B>),
    Taken { free_in: Option<Duration> },
}

/// Why a pause ended.
enum Pause {
    /// Something happened that makes an attempt worthwhile.
    AskNow,
    /// This process gave the lock back.
    GivenBack,
    /// The retry timer ran out.
    Timer,
}

impl<'a, B: LockBackend> Wait<'a, B> {
    pub(super) fn new(context: &'a Arc<Context<B>>, key: &'a Key) -> Self {
        Self {
            context,
            key,
            started: context.ticker.now(),
            attempts: AtomicU32::new(0),
            // What it is if the caller drops the wait.
            outcome: WaitOutcome::Cancelled,
        }
    }

    /// One attempt, without queueing.
    pub(super) async fn once(&mut self) -> Result<Option<LockGuard<B>>> {
        let result = self.bounded(pin!(self.ask(&mut None))).await;
        self.outcome = outcome_of(&result);
        Ok(match result? {
            Found::Ours(guard) => Some(guard),
            Found::Taken { .. } => None,
        })
    }

    /// Attempts until the lock is ours or the time is over.
    pub(super) async fn until_acquired(&mut self) -> Result<LockGuard<B>> {
        let result = self.bounded(pin!(self.in_turn())).await;
        self.outcome = outcome_of(&result);
        match result? {
            Found::Ours(guard) => Ok(guard),
            Found::Taken { .. } => Err(self.timed_out()),
        }
    }

    /// Bounds a wait by the timeout and the cancellation token, a running attempt included.
    ///
    /// Futures are passed by reference, and the limits are only made when there is something to
    /// wait for: a parked waiter is small, and a lock that is free costs no timer.
    async fn bounded(
        &self,
        mut wait: Pin<&mut impl Future<Output = Result<Found<B>>>>,
    ) -> Result<Found<B>> {
        if self.context.options.timeout == Some(Duration::ZERO) {
            return Err(self.timed_out());
        }
        if self.context.options.cancel.as_ref().is_some_and(CancellationToken::is_cancelled) {
            return Err(self.cancelled());
        }
        let mut limits = None;
        let found = poll_fn(|context| {
            if let Poll::Ready(result) = wait.as_mut().poll(context) {
                return Poll::Ready(result);
            }
            let limits = limits.get_or_insert_with(|| Box::pin(self.limits()));
            limits.as_mut().poll(context).map(Err)
        })
        .await?;
        // A lock that came too late is dropped here, and so released.
        let is_late = |deadline| self.context.ticker.now() > deadline;
        if self.deadline().is_some_and(is_late) { Err(self.timed_out()) } else { Ok(found) }
    }

    /// Waits for whatever ends the wait without the lock.
    async fn limits(&self) -> Error {
        let cancelled = async {
            match &self.context.options.cancel {
                Some(token) => token.cancelled().await,
                None => pending().await,
            }
        };
        tokio::select! {
            biased;
            () = cancelled => self.cancelled(),
            () = self.context.ticker.sleep_until_some(self.deadline()) => self.timed_out(),
        }
    }

    fn deadline(&self) -> Option<LocalInstant> {
        self.context.options.timeout.map(|timeout| self.started + timeout)
    }

    /// Waits for the turn within this process, then for the lock.
    async fn in_turn(&self) -> Result<Found<B>> {
        let visit = self.context.lanes.enter(self.key);
        let lane = &*visit.lane;
        let mut turn = lane.turn.lock().await;
        let mut schedule = Schedule::new(self.context.options.retry, self.context.options.timeout);
        let mut unanswered = None;
        loop {
            let mut free_in = None;
            // What this process holds itself need not be asked for until it is given back.
            if turn.held_until.is_none() {
                match self.ask(&mut unanswered).await {
                    Ok(Found::Ours(guard)) => {
                        turn.held_until = Some(self.context.ticker.now() + guard.remaining());
                        if let Some(wake_ups) = &mut turn.wake_ups {
                            wake_ups.mark_seen();
                        }
                        return Ok(Found::Ours(guard));
                    }
                    Ok(Found::Taken { free_in: taken_for }) => {
                        turn.courtesy.met_others();
                        free_in = taken_for;
                    }
                    Err(error) if self.context.options.ride_out_errors && error.is_retryable() => {}
                    Err(error) => return Err(error),
                }
            }
            // Boxed, because only the first waiter of a key needs it.
            Box::pin(self.pause(lane, &mut turn, &mut schedule, free_in)).await?;
        }
    }

    /// Sleeps until the next attempt is worthwhile.
    async fn pause(
        &self,
        lane: &Lane,
        turn: &mut Turn,
        schedule: &mut Schedule,
        free_in: Option<Duration>,
    ) -> Result<()> {
        let ticker = &self.context.ticker;
        let free_at = free_in.map(|free_in| ticker.now() + free_in).or(turn.held_until);
        let is_held_here = turn.held_until.is_some();
        if !is_held_here && self.subscribe(turn).await {
            return Ok(());
        }
        let elapsed = ticker.now().since(self.started);
        let are_working = turn.wake_ups.as_ref().is_some_and(WakeUps::are_working);
        let cap = are_working.then_some(self.context.poll_interval);
        let ask_at = match schedule.next(elapsed, cap, random_fraction()) {
            Next::AskAt(at) => Some(self.started + at),
            Next::WaitForTimeout => None,
            Next::GiveUp => return Err(self.timed_out()),
        };
        let woken = async {
            match &mut turn.wake_ups {
                // While this process holds the lock, a wake-up is the echo of its own release.
                Some(wake_ups) if !is_held_here => wake_ups.woken().await,
                _ => pending().await,
            }
        };
        let pause = tokio::select! {
            biased;
            () = lane.given_back.notified() => Pause::GivenBack,
            () = woken => Pause::AskNow,
            () = ticker.sleep_until_some(free_at) => Pause::AskNow,
            () = ticker.sleep_until_some(ask_at) => Pause::Timer,
        };
        turn.held_until = None;
        match pause {
            Pause::AskNow => {}
            Pause::Timer => schedule.timer_fired(ticker.now().since(self.started)),
            Pause::GivenBack if is_held_here && turn.courtesy.is_due() => {
                self.let_others_go_first(turn).await;
            }
            Pause::GivenBack => {}
        }
        Ok(())
    }

    /// Sits out one round of wake-ups: waits for the one that our own release has sent to
    /// everybody, then a moment longer.
    async fn let_others_go_first(&self, turn: &mut Turn) {
        const ROUND: Duration = Duration::from_millis(10);
        const HEAD_START: Duration = Duration::from_millis(1);
        let is_new = self.subscribe(turn).await;
        if let Some(wake_ups) = &mut turn.wake_ups {
            if wake_ups.is_alone() {
                return;
            }
            if !is_new {
                // Whether it came or not, the round is over.
                drop(tokio::time::timeout(ROUND, wake_ups.woken()).await);
            }
        }
        tokio::time::sleep(HEAD_START).await;
    }

    /// Subscribes to wake-ups if nobody in this lane has yet. When that is new, one more attempt
    /// must be made before waiting: a release may have come just before.
    async fn subscribe(&self, turn: &mut Turn) -> bool {
        if turn.has_subscribed {
            return false;
        }
        turn.wake_ups = self.context.backend.wake_ups(self.key).await;
        turn.has_subscribed = true;
        turn.wake_ups.is_some()
    }

    /// Asks the store once. A request that got no answer is sent again as it was, so that it can
    /// be granted only once.
    async fn ask(&self, unanswered: &mut Option<Request>) -> Result<Found<B>> {
        loop {
            let this = match unanswered.take() {
                Some(request) if self.is_worth_repeating(&request) => request,
                abandoned => {
                    if let Some(request) = abandoned {
                        self.orphan(&request).undo_later(None);
                    }
                    let request = AcquireRequest::new(self.key.clone(), self.context.options.ttl)?;
                    Request { request, sent: self.context.ticker.now() }
                }
            };
            self.attempts.fetch_add(1, Ordering::Relaxed);
            let (context, request) = (Arc::clone(self.context), this.request.clone());
            // The context comes back with the answer, to be the guard's.
            let call = async move {
                let answer = context.backend.acquire(&request).await;
                (answer, context)
            };
            let adopt = |rest| self.orphan(&this).undo_later(Some(rest));
            let (answer, context) = Carried::new(call, adopt).await;
            match answer {
                Ok(Acquire::Acquired(lease)) => {
                    return Ok(Found::Ours(self.guard(context, &this, &lease)));
                }
                Ok(Acquire::Contended { free_in }) => return Ok(Found::Taken { free_in }),
                // The copy that was granted is over; only a new request can be.
                Ok(Acquire::Spent) => {}
                Err(error) => {
                    if error.may_have_taken_effect() {
                        if self.context.options.ride_out_errors && error.is_retryable() {
                            *unanswered = Some(this);
                        } else {
                            self.orphan(&this).undo_later(None);
                        }
                    }
                    return Err(error.with_key(self.key));
                }
            }
        }
    }

    fn guard(
        &self,
        context: Arc<Context<B>>,
        this: &Request,
        lease: &Lease<B::Fencing>,
    ) -> LockGuard<B> {
        let grant = Grant {
            lock_id: this.request.lock_id(),
            token: lease.token(),
            expires_at: lease.expires_at(),
            receipt: lease.receipt().cloned(),
            sent: this.sent,
            ttl: this.request.ttl(),
        };
        LockGuard::new(context, self.key.clone(), grant)
    }

    /// A grant to a copy of an old request is valid from its *first* sending, so an old one is not
    /// worth much.
    fn is_worth_repeating(&self, request: &Request) -> bool {
        let age = self.context.ticker.now().since(request.sent);
        age < self.context.options.ttl.as_duration() / 2
    }

    fn orphan(&self, request: &Request) -> OrphanAcquire<B> {
        OrphanAcquire {
            context: Arc::clone(self.context),
            request: request.request.clone(),
            sent: request.sent,
        }
    }

    fn timed_out(&self) -> Error {
        let elapsed = self.context.ticker.now().since(self.started);
        let attempts = self.attempts.load(Ordering::Relaxed);
        let message = format!(
            "the lock was not obtained within {} ms ({attempts} attempts)",
            elapsed.as_millis()
        );
        Error::new(ErrorCode::AcquisitionTimeout, message).with_key(self.key)
    }

    fn cancelled(&self) -> Error {
        Error::aborted("the wait for the lock was cancelled").with_key(self.key)
    }
}

impl<B: LockBackend> Drop for Wait<'_, B> {
    fn drop(&mut self) {
        self.context.observe(|| EngineEvent::Waited {
            key_hash: self.key.hash(),
            outcome: self.outcome,
            waited: self.context.ticker.now().since(self.started),
            attempts: self.attempts.load(Ordering::Relaxed),
        });
    }
}

fn outcome_of<B: LockBackend>(result: &Result<Found<B>>) -> WaitOutcome {
    match result.as_ref().map_err(Error::code) {
        Ok(Found::Ours(_)) => WaitOutcome::Acquired,
        Ok(Found::Taken { .. }) | Err(ErrorCode::AcquisitionTimeout) => WaitOutcome::TimedOut,
        Err(ErrorCode::Aborted) => WaitOutcome::Cancelled,
        Err(_) => WaitOutcome::Failed,
    }
}

/// An acquire and when it was sent for the first time.
struct Request {
    request: AcquireRequest,
    sent: LocalInstant,
}

fn random_fraction() -> f64 {
    // Without randomness waiters march in step, which is slow but correct.
    f64::from(getrandom::u32().unwrap_or(u32::MAX / 2)) / f64::from(u32::MAX)
}
