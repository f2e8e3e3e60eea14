//! Waiting for a lock: in order within this process, woken by the store where it can, polling as
//! the net underneath.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use super::attempt::Carried;
use super::clock::LocalInstant;
use super::guard::LockGuard;
use super::hold::Grant;
use super::lanes::{Lane, Turn};
use super::locker::Shared;
use super::options::LockOptions;
use super::reaper::OrphanAcquire;
use super::retry::{Next, Schedule};
use crate::common::error::{Error, ErrorCode, Result};
use crate::common::key::Key;
use crate::contract::LockBackend;
use crate::contract::event::{EngineEvent, WaitOutcome};
use crate::contract::outcome::Acquire;
use crate::contract::request::AcquireRequest;
use crate::contract::wake::WakeUps;

/// One call of `lock` or `try_lock`.
pub(super) struct Wait<'a, B: LockBackend> {
    shared: &'a Arc<Shared<B>>,
    options: &'a Arc<LockOptions>,
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
    pub(super) fn new(
        shared: &'a Arc<Shared<B>>,
        options: &'a Arc<LockOptions>,
        key: &'a Key,
    ) -> Self {
        Self {
            shared,
            options,
            key,
            started: shared.ticker.now(),
            attempts: AtomicU32::new(0),
            // What it is if the caller drops the wait.
            outcome: WaitOutcome::Cancelled,
        }
    }

    /// One attempt, without queueing.
    pub(super) async fn once(mut self) -> Result<Option<LockGuard<B>>> {
        let ask = async {
            Ok(match self.ask(&mut None).await? {
                Found::Ours(guard) => Some(guard),
                Found::Taken { .. } => None,
            })
        };
        let result = self.bounded(ask).await;
        self.outcome = match &result {
            Ok(Some(_)) => WaitOutcome::Acquired,
            Ok(None) => WaitOutcome::TimedOut,
            Err(error) => outcome_of(error),
        };
        result
    }

    /// Attempts until the lock is ours or the time is over.
    pub(super) async fn until_acquired(mut self) -> Result<LockGuard<B>> {
        let result = self.bounded(self.in_turn()).await;
        self.outcome = match &result {
            Ok(_) => WaitOutcome::Acquired,
            Err(error) => outcome_of(error),
        };
        result
    }

    /// Bounds a wait by the timeout and the cancellation token, a running attempt included.
    async fn bounded<T>(&self, wait: impl Future<Output = Result<T>>) -> Result<T> {
        let deadline = self.options.timeout.map(|timeout| self.started + timeout);
        if self.options.timeout == Some(Duration::ZERO) {
            return Err(self.timed_out());
        }
        let cancelled = async {
            match &self.options.cancel {
                Some(token) => token.cancelled().await,
                None => std::future::pending().await,
            }
        };
        if self
            .options
            .cancel
            .as_ref()
            .is_some_and(|token| token.is_cancelled())
        {
            return Err(self.cancelled());
        }
        let result = tokio::select! {
            biased;
            result = wait => result,
            () = cancelled => return Err(self.cancelled()),
            () = self.shared.ticker.sleep_until_some(deadline) => return Err(self.timed_out()),
        };
        // A lock that came too late is dropped here, and so released.
        if result.is_ok() && deadline.is_some_and(|deadline| self.shared.ticker.now() > deadline) {
            return Err(self.timed_out());
        }
        result
    }

    /// Waits for the turn within this process, then for the lock.
    async fn in_turn(&self) -> Result<LockGuard<B>> {
        let visit = self.shared.lanes.enter(self.key);
        let lane = &*visit.lane;
        let mut turn = lane.turn.lock().await;
        let mut schedule = Schedule::new(self.options.retry, self.options.timeout);
        let mut unanswered = None;
        loop {
            // What this process holds itself need not be asked for until it is given back.
            let mut free_at = turn.held_until;
            if free_at.is_none() {
                match self.ask(&mut unanswered).await {
                    Ok(Found::Ours(guard)) => {
                        turn.held_until = Some(self.shared.ticker.now() + guard.remaining());
                        if let Some(wake_ups) = &mut turn.wake_ups {
                            wake_ups.mark_seen();
                        }
                        return Ok(guard);
                    }
                    Ok(Found::Taken { free_in }) => {
                        turn.courtesy.met_others();
                        if self.subscribe(&mut turn).await {
                            continue;
                        }
                        free_at = free_in.map(|free_in| self.shared.ticker.now() + free_in);
                    }
                    Err(error) if self.options.ride_out_errors && error.is_retryable() => {}
                    Err(error) => return Err(error),
                }
            }
            self.pause(lane, &mut turn, &mut schedule, free_at).await?;
        }
    }

    /// Sleeps until the next attempt is worthwhile.
    async fn pause(
        &self,
        lane: &Lane,
        turn: &mut Turn,
        schedule: &mut Schedule,
        free_at: Option<LocalInstant>,
    ) -> Result<()> {
        let ticker = &self.shared.ticker;
        let elapsed = ticker.now().since(self.started);
        let woken = turn.wake_ups.as_ref().is_some_and(WakeUps::are_working);
        let cap = woken.then_some(self.shared.poll_interval);
        let ask_at = match schedule.next(elapsed, cap, random_fraction()) {
            Next::AskAt(at) => Some(self.started + at),
            Next::WaitForTimeout => None,
            Next::GiveUp => return Err(self.timed_out()),
        };
        let is_held_here = turn.held_until.is_some();
        let woken = async {
            match &mut turn.wake_ups {
                // While this process holds the lock, a wake-up is the echo of its own release.
                Some(wake_ups) if !is_held_here => wake_ups.woken().await,
                _ => std::future::pending().await,
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
        if !self.subscribe(turn).await
            && let Some(wake_ups) = &mut turn.wake_ups
        {
            // Whether it came or not, the round is over.
            drop(tokio::time::timeout(ROUND, wake_ups.woken()).await);
        }
        tokio::time::sleep(HEAD_START).await;
    }

    /// Subscribes to wake-ups if nobody in this lane has yet. When that is new, one more attempt
    /// must be made before waiting: a release may have come just before.
    async fn subscribe(&self, turn: &mut Turn) -> bool {
        if turn.has_subscribed {
            return false;
        }
        turn.wake_ups = self.shared.backend.wake_ups(self.key).await;
        turn.has_subscribed = true;
        turn.wake_ups.is_some()
    }

    /// Asks the store once. A request that got no answer is sent again as it was, so that it can
    /// be granted only once.
    async fn ask(&self, unanswered: &mut Option<Request>) -> Result<Found<B>> {
        loop {
            let Request { request, sent } = match unanswered.take() {
                Some(request) if self.is_worth_repeating(&request) => request,
                abandoned => {
                    if let Some(request) = abandoned {
                        self.orphan(&request).undo();
                    }
                    let request = AcquireRequest::new(self.key.clone(), self.options.ttl)?;
                    Request {
                        request,
                        sent: self.shared.ticker.now(),
                    }
                }
            };
            self.attempts.fetch_add(1, Ordering::Relaxed);
            let this = Request { request, sent };
            let (shared, copy) = (Arc::clone(self.shared), this.request.clone());
            let call = async move { shared.backend.acquire(&copy).await };
            match Carried::new(call, self.orphan(&this)).await {
                Ok(Acquire::Acquired(lease)) => {
                    let grant = Grant {
                        lock_id: this.request.lock_id(),
                        token: lease.token(),
                        expires_at: lease.expires_at(),
                        receipt: lease.receipt().cloned(),
                        sent,
                        ttl: self.options.ttl,
                    };
                    let key = self.key.clone();
                    return Ok(Found::Ours(LockGuard::new(
                        self.shared,
                        self.options,
                        key,
                        grant,
                    )));
                }
                Ok(Acquire::Contended { free_in }) => return Ok(Found::Taken { free_in }),
                // The copy that was granted is over; only a new request can be.
                Ok(Acquire::Spent) => {}
                Err(error) => {
                    if error.may_have_taken_effect() {
                        if self.options.ride_out_errors && error.is_retryable() {
                            *unanswered = Some(this);
                        } else {
                            self.orphan(&this).undo();
                        }
                    }
                    return Err(error.with_key(self.key));
                }
            }
        }
    }

    /// A grant to a copy of an old request is valid from its *first* sending, so an old one is not
    /// worth much.
    fn is_worth_repeating(&self, request: &Request) -> bool {
        let age = self.shared.ticker.now().since(request.sent);
        age < self.options.ttl.as_duration() / 2
    }

    fn orphan(&self, request: &Request) -> OrphanAcquire<B> {
        OrphanAcquire {
            shared: Arc::clone(self.shared),
            options: Arc::clone(self.options),
            request: request.request.clone(),
            sent: request.sent,
        }
    }

    fn timed_out(&self) -> Error {
        let elapsed = self.shared.ticker.now().since(self.started);
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
        self.shared.observe(|| EngineEvent::Waited {
            key_hash: self.key.hash(),
            outcome: self.outcome,
            waited: self.shared.ticker.now().since(self.started),
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

/// An acquire and when it was sent for the first time.
struct Request {
    request: AcquireRequest,
    sent: LocalInstant,
}

fn random_fraction() -> f64 {
    // Without randomness waiters march in step, which is slow but correct.
    f64::from(getrandom::u32().unwrap_or(u32::MAX / 2)) / f64::from(u32::MAX)
}
