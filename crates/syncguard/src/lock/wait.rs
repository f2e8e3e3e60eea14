//! Waiting for a lock: in order within this process, woken by the store where it can, polling as
//! the net underneath.

use std::future::{pending, poll_fn};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::Poll;
use std::time::Duration;

use tokio::sync::MutexGuard;
use tokio_util::sync::CancellationToken;
use tokio_util::task::task_tracker::TaskTrackerToken;

use super::attempt::{Attempts, Found};
use super::clock::LocalInstant;
use super::guard::LockGuard;
use super::lanes::{Lane, Turn};
use super::locker::Context;
use super::retry::{Next, Schedule};
use crate::common::backoff::random_fraction;
use crate::common::error::{Error, ErrorCode, Result};
use crate::common::key::Key;
use crate::contract::LockBackend;
use crate::contract::event::{EngineEvent, WaitOutcome};
use crate::contract::wake::WakeUps;

/// One call of `lock` or `try_lock`.
pub(super) struct Wait<'a, B: LockBackend> {
    context: &'a Arc<Context<B>>,
    key: &'a Key,
    started: LocalInstant,
    attempts: AtomicU32,
    /// Makes a shutdown wait for what is under way here, until this is dropped.
    under_way: OnceLock<TaskTrackerToken>,
    outcome: WaitOutcome,
}

/// Who has the lock that is waited for.
enum Holder {
    /// This process.
    Here,
    /// Somebody whom only the store knows, or nobody can tell.
    Elsewhere { free_in: Option<Duration> },
}

impl<'a, B: LockBackend> Wait<'a, B> {
    pub(super) fn new(context: &'a Arc<Context<B>>, key: &'a Key) -> Self {
        Self {
            context,
            key,
            started: context.ticker.now(),
            attempts: AtomicU32::new(0),
            under_way: OnceLock::new(),
            // What it is if the caller drops the wait.
            outcome: WaitOutcome::Cancelled,
        }
    }

    /// One attempt, without queueing.
    pub(super) async fn once(&mut self) -> Result<Option<LockGuard<B>>> {
        let mut attempts = Attempts::new(self.context, self.key, &self.attempts, None);
        let result = self.bounded(pin!(attempts.ask())).await;
        drop(attempts);
        self.outcome = match &result {
            Ok(Found::Ours(_)) => WaitOutcome::Acquired,
            Ok(Found::Taken { .. }) => WaitOutcome::Contended,
            Err(error) => outcome_of(error),
        };
        Ok(match result? {
            Found::Ours(guard) => Some(guard),
            Found::Taken { .. } => None,
        })
    }

    /// Attempts until the lock is ours or the time is over.
    pub(super) async fn until_acquired(&mut self) -> Result<LockGuard<B>> {
        let result = self.bounded(pin!(self.in_turn())).await;
        self.outcome = result.as_ref().map_or_else(outcome_of, |_guard| WaitOutcome::Acquired);
        result
    }

    /// Bounds a wait by the timeout and the cancellation token, a running attempt included.
    ///
    /// Futures are passed by reference, and the limits are only made when there is something to
    /// wait for: a parked waiter is small, and a lock that is free costs no timer.
    async fn bounded<T>(&self, mut wait: Pin<&mut impl Future<Output = Result<T>>>) -> Result<T> {
        if self.context.options.timeout == Some(Duration::ZERO) {
            return Err(self.timed_out());
        }
        let mut limits = None;
        let found = poll_fn(|context| {
            // First, so that a waiter whose turn comes with its cancellation asks nobody.
            if self.is_cancelled() {
                return Poll::Ready(Err(self.cancelled()));
            }
            if let Poll::Ready(result) = wait.as_mut().poll(context) {
                return Poll::Ready(result);
            }
            if limits.is_none() {
                // Only what waits needs its runtime. What was sent elsewhere is undone at home.
                self.context.check_runtime()?;
            }
            self.under_way.get_or_init(|| self.context.reaper.under_way());
            let limits = limits.get_or_insert_with(|| Box::pin(self.limits()));
            limits.as_mut().poll(context).map(Err)
        })
        .await?;
        // A lock that came too late is dropped here, and so released.
        if self.is_late() { Err(self.timed_out()) } else { Ok(found) }
    }

    fn is_late(&self) -> bool {
        self.deadline().is_some_and(|deadline| self.context.ticker.now() >= deadline)
    }

    fn is_cancelled(&self) -> bool {
        let token = self.context.options.cancel.as_ref();
        token.is_some_and(CancellationToken::is_cancelled) || self.context.shut_down.is_cancelled()
    }

    /// Waits for whatever ends the wait without the lock.
    async fn limits(&self) -> Error {
        let cancelled = async {
            let shut_down = self.context.shut_down.cancelled();
            match &self.context.options.cancel {
                None => shut_down.await,
                // Boxed, so that waiters without a token are smaller.
                Some(token) => {
                    Box::pin(async {
                        tokio::select! {
                            biased;
                            () = token.cancelled() => {}
                            () = shut_down => {}
                        }
                    })
                    .await;
                }
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
    async fn in_turn(&self) -> Result<LockGuard<B>> {
        let visit = self.context.lanes.enter(self.key);
        let lane = &*visit.lane;
        let mut turn = lane.turn.lock().await;
        if self.is_late() {
            // Its turn came with its timeout; it leaves without asking.
            return Err(self.timed_out());
        }
        let mut attempts = Attempts::new(self.context, self.key, &self.attempts, Some(&visit));
        // What this process holds itself need not be asked for until it is given back; but with one
        // attempt and no retries there is no time to wait for that.
        let retries = self.context.options.retry.max_retries;
        let mut holder = Holder::Here;
        if lane.held_until().is_none() || retries == Some(0) {
            match self.ask(lane, &mut turn, &mut attempts).await? {
                Found::Ours(guard) => return Ok(guard),
                Found::Taken { free_in } => holder = Holder::Elsewhere { free_in },
            }
        }
        // Boxed, because only the first waiter of a key needs it.
        Box::pin(self.contend(lane, turn, attempts, holder)).await
    }

    /// Waits and asks until the lock is ours.
    async fn contend(
        &self,
        lane: &Lane,
        mut turn: MutexGuard<'_, Turn>,
        mut attempts: Attempts<'_, B>,
        mut holder: Holder,
    ) -> Result<LockGuard<B>> {
        let options = &self.context.options;
        let mut schedule = Schedule::new(options.retry, options.timeout);
        loop {
            match holder {
                Holder::Here => self.pause_until_given_back(lane, &mut turn).await,
                Holder::Elsewhere { free_in } => {
                    self.pause(lane, &mut turn, &mut schedule, free_in).await?;
                }
            }
            match self.ask(lane, &mut turn, &mut attempts).await? {
                Found::Ours(guard) => return Ok(guard),
                Found::Taken { .. } if lane.held_until().is_some() => holder = Holder::Here,
                Found::Taken { free_in } => holder = Holder::Elsewhere { free_in },
            }
        }
    }

    /// Asks the store once, and takes an error that is to be ridden out for a lock that is held.
    async fn ask(
        &self,
        lane: &Lane,
        turn: &mut Turn,
        attempts: &mut Attempts<'_, B>,
    ) -> Result<Found<B>> {
        match attempts.ask().await {
            Ok(Found::Ours(guard)) => {
                turn.courtesy.granted(guard.try_fence());
                if let Some(wake_ups) = &mut turn.wake_ups {
                    wake_ups.mark_seen();
                }
                Ok(Found::Ours(guard))
            }
            Ok(taken) => {
                if lane.held_until().is_none() {
                    turn.courtesy.met_others();
                }
                Ok(taken)
            }
            Err(error) if self.context.options.ride_out_errors && error.is_retryable() => {
                Ok(Found::Taken { free_in: None })
            }
            Err(error) => Err(error),
        }
    }

    /// Sleeps until this process has given the lock back, or must have lost it. A wake-up would
    /// only be the echo of an earlier release; the slow net stays.
    async fn pause_until_given_back(&self, lane: &Lane, turn: &mut Turn) {
        let Some(held_until) = lane.held_until() else { return };
        let ticker = &self.context.ticker;
        tokio::select! {
            biased;
            () = lane.given_back.notified() => {
                if turn.courtesy.is_due() {
                    self.let_others_go_first(turn).await;
                }
            }
            () = ticker.sleep_until(held_until) => lane.set_not_held(),
            () = ticker.sleep_until(ticker.now() + self.context.poll_interval) => {}
        }
    }

    /// Sleeps until the next attempt at a lock that somebody else holds is worthwhile.
    async fn pause(
        &self,
        lane: &Lane,
        turn: &mut Turn,
        schedule: &mut Schedule,
        free_in: Option<Duration>,
    ) -> Result<()> {
        /// A store whose clock is a little off must not be asked without a pause.
        const LEAST: Duration = Duration::from_millis(5);
        let ticker = &self.context.ticker;
        let free_at = free_in.map(|free_in| ticker.now() + free_in.max(LEAST));
        let elapsed = ticker.now().since(self.started);
        let are_working = turn.wake_ups.as_ref().is_some_and(WakeUps::are_working);
        let cap = are_working.then_some(self.context.poll_interval);
        let ask_at = match schedule.next(elapsed, cap, random_fraction()) {
            Next::AskAt(at) => Some(self.started + at),
            Next::WaitForTimeout => None,
            Next::GiveUp => return Err(self.timed_out()),
        };
        if self.subscribe(turn).await {
            return Ok(());
        }
        let woken = async {
            match &mut turn.wake_ups {
                Some(wake_ups) => wake_ups.woken().await,
                None => pending().await,
            }
        };
        tokio::select! {
            biased;
            () = lane.given_back.notified() => {}
            () = woken => {}
            () = ticker.sleep_until_some(free_at) => {}
            () = ticker.sleep_until_some(ask_at) => {
                schedule.timer_fired(ticker.now().since(self.started));
                // A timer that was due at once must not keep everybody else from running.
                tokio::task::yield_now().await;
            }
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
        self.context.ticker.sleep(HEAD_START).await;
    }

    /// Subscribes to wake-ups if nobody in this lane has yet. When that is new, one more attempt
    /// must be made before waiting: a release may have come just before.
    async fn subscribe(&self, turn: &mut Turn) -> bool {
        /// How long a subscription that failed is left alone.
        const LEFT_ALONE: Duration = Duration::from_secs(10);
        let ticker = &self.context.ticker;
        if turn.wake_ups.is_some() || turn.subscribe_after.is_some_and(|at| ticker.now() < at) {
            return false;
        }
        // Noted before: a waiter that gives up meanwhile does not hand the trouble on.
        turn.subscribe_after = Some(ticker.now() + LEFT_ALONE);
        // Bounded, because nothing else is noticed meanwhile.
        let limit = ticker.now() + self.context.poll_interval;
        turn.wake_ups = tokio::select! {
            biased;
            wake_ups = self.context.backend.wake_ups(self.key) => wake_ups,
            () = ticker.sleep_until(limit) => None,
        };
        turn.wake_ups.is_some()
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

fn outcome_of(error: &Error) -> WaitOutcome {
    match error.code() {
        ErrorCode::AcquisitionTimeout => WaitOutcome::TimedOut,
        ErrorCode::Aborted => WaitOutcome::Cancelled,
        _ => WaitOutcome::Failed,
    }
}
