//! Waiting for a lock: in order within this process, woken by the store where it can, polling as
//! the net underneath.

use std::future::{pending, poll_fn};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::task::Poll;
use std::time::Duration;

use tokio::sync::MutexGuard;
use tokio_util::sync::CancellationToken;
use tokio_util::task::task_tracker::TaskTrackerToken;

use super::attempt::{Attempts, Found};
use super::clock::LocalInstant;
use super::context::Context;
use super::detach::poll_once;
use super::guard::LockGuard;
use super::lanes::{Lane, Turn};

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
    /// The error of the last attempt, if it was ridden out.
    trouble: Mutex<Option<Error>>,
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
            started: context.engine.ticker.now(),
            attempts: AtomicU32::new(0),
            trouble: Mutex::new(None),
            under_way: OnceLock::new(),
            // What it is if the caller drops the wait.
            outcome: WaitOutcome::Cancelled,
        }
    }

    /// One attempt, without queueing.
    pub(super) async fn once(&mut self) -> Result<Option<LockGuard<B>>> {
        let mut attempts =
            Attempts::new(self.context, self.key, &self.attempts, None, Some(self.started));
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
        if self.context.options.timeout == Some(Duration::ZERO) {
            self.outcome = WaitOutcome::TimedOut;
            return Err(self.timed_out());
        }
        let result = self.bounded(pin!(self.in_turn())).await;
        self.outcome = result.as_ref().map_or_else(outcome_of, |_guard| WaitOutcome::Acquired);
        result
    }

    /// Bounds a wait by the timeout and the cancellation token, a running attempt included.
    ///
    /// Futures are passed by reference, and the limits are only made when there is something to
    /// wait for: a parked waiter is small, and a lock that is free costs no timer.
    async fn bounded<T>(&self, mut wait: Pin<&mut impl Future<Output = Result<T>>>) -> Result<T> {
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
                self.context.engine.check_runtime()?;
            }
            self.under_way.get_or_init(|| self.context.engine.background.token());
            let limits = limits.get_or_insert_with(|| Box::pin(self.limits()));
            limits.as_mut().poll(context).map(Err)
        })
        .await?;
        // A lock that came too late is dropped here, and so released.
        if self.is_late() { Err(self.timed_out()) } else { Ok(found) }
    }

    fn is_late(&self) -> bool {
        self.deadline().is_some_and(|deadline| self.context.engine.ticker.now() >= deadline)
    }

    fn is_cancelled(&self) -> bool {
        let token = self.context.options.cancel.as_ref();
        token.is_some_and(CancellationToken::is_cancelled)
            || self.context.engine.shut_down.is_cancelled()
    }

    /// Waits for whatever ends the wait without the lock.
    async fn limits(&self) -> Error {
        let cancelled = async {
            let shut_down = self.context.engine.shut_down.cancelled();
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
            () = self.context.engine.ticker.sleep_until_some(self.deadline()) => self.timed_out(),
        }
    }

    /// When the time is over. A timeout of zero bounds no attempt: `lock` makes none, and the one of
    /// `try_lock` is made whatever the timeout.
    fn deadline(&self) -> Option<LocalInstant> {
        let timeout = self.context.options.timeout.filter(|timeout| !timeout.is_zero());
        timeout.map(|timeout| self.started + timeout)
    }

    /// Waits for the turn within this process, then for the lock.
    async fn in_turn(&self) -> Result<LockGuard<B>> {
        let visit = self.context.engine.lanes.enter(self.key);
        let lane = &*visit.lane;
        let (mut turn, schedule, now) = if let Ok(turn) = lane.turn.try_lock() {
            (turn, None, Some(self.started))
        } else {
            let (turn, schedule) = match self.context.options.max_retries() {
                None => (lane.turn.lock().await, None),
                // Boxed, so that waiters without a limit are smaller.
                Some(_) => Box::pin(self.turn_within_retries(lane)).await?,
            };
            if self.is_late() {
                // Its turn came with its timeout; it leaves without asking.
                return Err(self.timed_out());
            }
            (turn, schedule, None)
        };
        let mut attempts = Attempts::new(self.context, self.key, &self.attempts, Some(&visit), now);
        // What this process holds itself need not be asked for until it is given back; but with one
        // attempt and no retries there is no time to wait for that.
        let mut holder = Holder::Here;
        if lane.held_until().is_none() || self.context.options.max_retries() == Some(0) {
            match self.ask(lane, &mut turn, &mut attempts).await? {
                Found::Ours(guard) => return Ok(guard),
                Found::Taken { free_in } => holder = Holder::Elsewhere { free_in },
            }
        }
        // Boxed, because only the first waiter of a key needs it.
        Box::pin(self.contend(lane, turn, attempts, holder, schedule)).await
    }

    /// Waits for the turn. A waiter in the queue knows that the lock is taken: its retries are used
    /// up without asking.
    async fn turn_within_retries<'lane>(
        &self,
        lane: &'lane Lane,
    ) -> Result<(MutexGuard<'lane, Turn>, Option<Box<Schedule>>)> {
        let ticker = &self.context.engine.ticker;
        let options = &self.context.options;
        let mut schedule = Box::new(Schedule::new(options.retry_policy(), options.timeout));
        let mut turn = pin!(lane.turn.lock());
        loop {
            if let Poll::Ready(turn) = poll_once(turn.as_mut()).await {
                return Ok((turn, Some(schedule)));
            }
            let retry_at = self.next_retry(&mut schedule, None)?;
            tokio::select! {
                biased;
                turn = turn.as_mut() => return Ok((turn, Some(schedule))),
                () = ticker.sleep_until_some(retry_at) => {
                    schedule.timer_fired(ticker.now().since(self.started));
                }
            }
        }
    }

    /// When the policy wants its next retry, if it wants one before the timeout.
    fn next_retry(
        &self,
        schedule: &mut Schedule,
        cap: Option<Duration>,
    ) -> Result<Option<LocalInstant>> {
        let elapsed = self.context.engine.ticker.now().since(self.started);
        match schedule.next(elapsed, cap, random_fraction()) {
            Next::AskAt(at) => Ok(Some(self.started + at)),
            Next::WaitForTimeout => Ok(None),
            Next::GiveUp => Err(self.timed_out()),
        }
    }

    /// Waits and asks until the lock is ours.
    async fn contend(
        &self,
        lane: &Lane,
        mut turn: MutexGuard<'_, Turn>,
        mut attempts: Attempts<'_, B>,
        mut holder: Holder,
        schedule: Option<Box<Schedule>>,
    ) -> Result<LockGuard<B>> {
        let options = &self.context.options;
        let mut schedule = schedule
            .unwrap_or_else(|| Box::new(Schedule::new(options.retry_policy(), options.timeout)));
        loop {
            match holder {
                Holder::Here => {
                    self.pause_until_given_back(lane, &mut turn, &mut schedule).await?;
                }
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
        let answer = attempts.ask().await;
        *self.trouble.lock().unwrap_or_else(PoisonError::into_inner) =
            answer.as_ref().err().cloned();
        match answer {
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
    /// only be the echo of an earlier release; the slow net stays. Retries are used up without
    /// asking: the answer is known.
    async fn pause_until_given_back(
        &self,
        lane: &Lane,
        turn: &mut Turn,
        schedule: &mut Schedule,
    ) -> Result<()> {
        let ticker = &self.context.engine.ticker;
        let ask_anyway_at = ticker.now() + self.context.engine.poll_interval;
        loop {
            let Some(held_until) = lane.held_until() else { return Ok(()) };
            let retry_at =
                if schedule.is_limited() { self.next_retry(schedule, None)? } else { None };
            tokio::select! {
                biased;
                () = lane.given_back.notified() => {
                    if turn.courtesy.is_due() {
                        self.let_others_go_first(turn).await;
                    }
                    return Ok(());
                }
                () = ticker.sleep_until(held_until) => {
                    lane.set_not_held();
                    return Ok(());
                }
                () = ticker.sleep_until(ask_anyway_at) => return Ok(()),
                () = ticker.sleep_until_some(retry_at) => {
                    schedule.timer_fired(ticker.now().since(self.started));
                }
            }
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
        let ticker = &self.context.engine.ticker;
        let free_at = free_in.map(|free_in| ticker.now() + free_in.max(LEAST));
        let are_working = turn.wake_ups.as_ref().is_some_and(WakeUps::are_working);
        let cap = are_working.then_some(self.context.engine.poll_interval);
        let ask_at = self.next_retry(schedule, cap)?;
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
        self.context.engine.ticker.sleep(HEAD_START).await;
    }

    /// Subscribes to wake-ups if nobody in this lane has yet. When that is new, one more attempt
    /// must be made before waiting: a release may have come just before.
    async fn subscribe(&self, turn: &mut Turn) -> bool {
        /// How long a subscription that failed is left alone.
        const LEFT_ALONE: Duration = Duration::from_secs(10);
        let ticker = &self.context.engine.ticker;
        if turn.wake_ups.is_some() || turn.subscribe_after.is_some_and(|at| ticker.now() < at) {
            return false;
        }
        // Noted before: a waiter that gives up meanwhile does not hand the trouble on.
        turn.subscribe_after = Some(ticker.now() + LEFT_ALONE);
        // Bounded, because nothing else is noticed meanwhile.
        let limit = ticker.now() + self.context.engine.poll_interval;
        turn.wake_ups = tokio::select! {
            biased;
            wake_ups = self.context.engine.backend.wake_ups(self.key) => wake_ups,
            () = ticker.sleep_until(limit) => None,
        };
        turn.wake_ups.is_some()
    }

    fn timed_out(&self) -> Error {
        let elapsed = self.context.engine.ticker.now().since(self.started);
        let attempts = self.attempts.load(Ordering::Relaxed);
        let message = format!(
            "the lock was not obtained within {} ms ({attempts} attempts)",
            elapsed.as_millis()
        );
        let error = Error::new(ErrorCode::AcquisitionTimeout, message).with_key(self.key);
        match self.trouble.lock().unwrap_or_else(PoisonError::into_inner).take() {
            Some(trouble) => error.with_source(trouble),
            None => error,
        }
    }

    fn cancelled(&self) -> Error {
        let error = if self.context.engine.shut_down.is_cancelled() {
            Error::shut_down()
        } else {
            Error::canceled("the wait for the lock was canceled")
        };
        error.with_key(self.key)
    }
}

impl<B: LockBackend> Drop for Wait<'_, B> {
    fn drop(&mut self) {
        self.context.engine.observe(|| EngineEvent::Waited {
            key_hash: self.key.hash(),
            outcome: self.outcome,
            waited: self.context.engine.ticker.now().since(self.started),
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
