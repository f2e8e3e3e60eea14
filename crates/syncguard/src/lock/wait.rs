//! Waits for a lock: in order within this process, woken by the store's notifications where it
//! sends them, with polling as a fallback.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock, PoisonError};
use std::task::Poll;
use std::time::Duration;

use tokio::sync::MutexGuard;
use tokio_util::sync::CancellationToken;
use tokio_util::task::task_tracker::TaskTrackerToken;

use super::attempt::{Attempted, Attempts, LockCall};
use super::clock::LocalInstant;
use super::context::Context;
use super::guard::LockGuard;
use super::retry::{Next, Schedule};
use super::trust::Sighting;
use super::wait_queue::{QueueHead, WaitQueue, pause_in_order};
use crate::common::backoff::random_fraction;
use crate::common::error::{Error, ErrorCode, Result};
use crate::common::fence::{Fence, Fencing};
use crate::common::join::join_all;
use crate::common::key::Key;
use crate::common::sync::Mutex;
use crate::contract::LockBackend;
use crate::contract::detach::poll_once;
use crate::contract::event::{EngineEventKind, WaitOutcome};

/// One call of `lock` or `try_lock`.
pub(super) struct Wait<'a, B: LockBackend> {
    call: LockCall<'a, B>,
    /// The error of the last attempt, if the wait continued through it.
    last_error: Mutex<Option<Error>>,
    /// Whether the store has answered an attempt.
    was_answered: AtomicBool,
    /// Whether the wait timed out after such an error, or without an answer.
    has_failed: AtomicBool,
    /// How many tasks of this process held or waited for the lock before.
    queued_behind: AtomicU32,
    /// Whether the call had to wait.
    was_queued: AtomicBool,
    /// Makes a shutdown wait for what is in progress here, until this is dropped.
    under_way: OnceLock<TaskTrackerToken>,
    outcome: WaitOutcome,
    /// The number of the fence that was granted; 0 for none. Half the size of an `Option`.
    fence: u64,
}

/// Who holds the lock that is waited for.
enum Holder {
    /// This process.
    Here,
    /// Another process, or unknown.
    Elsewhere { expires_in: Option<Duration> },
}

impl<'a, B: LockBackend> Wait<'a, B> {
    /// Creates a wait for the lock of a key, or for any of several locks, in the queue of `key`.
    pub(super) fn new(
        context: &'a Arc<Context<B>>,
        key: &'a Key,
        any_of: Option<&'a Arc<[Key]>>,
    ) -> Self {
        Self {
            call: LockCall {
                context,
                key,
                any_of,
                started: context.engine.ticker.now(),
                attempts: AtomicU32::new(0),
                hand_over_us: AtomicU32::new(0),
            },
            last_error: Mutex::new(None),
            was_answered: AtomicBool::new(false),
            has_failed: AtomicBool::new(false),
            queued_behind: AtomicU32::new(0),
            was_queued: AtomicBool::new(false),
            under_way: OnceLock::new(),
            // The outcome if the caller drops the wait.
            outcome: WaitOutcome::Canceled,
            fence: 0,
        }
    }

    /// Limits [`in_order`](Self::in_order) or [`once`](Self::once) by the timeout and the
    /// cancellation token, including an attempt in progress.
    ///
    /// Futures are passed by reference, and the limits are created only when there is something to
    /// wait for: a parked waiter is small, and a free lock costs no timer.
    pub(super) async fn bounded<T>(
        &self,
        mut acquire: Pin<&mut impl Future<Output = Result<T>>>,
    ) -> Result<T> {
        let mut limits = None;
        poll_fn(|context| {
            // First, so that a canceled waiter that reaches the head does not ask the store.
            if self.is_cancelled() {
                return Poll::Ready(Err(self.cancelled()));
            }
            if let Poll::Ready(result) = acquire.as_mut().poll(context) {
                return Poll::Ready(result);
            }
            if limits.is_none() {
                // Only a call that has to wait needs the locker's runtime. A request that was sent
                // from another runtime is undone in the locker's.
                self.call.context.engine.check_runtime()?;
            }
            self.under_way.get_or_init(|| self.call.context.engine.background.token());
            let limits = limits.get_or_insert_with(|| Box::pin(self.limits()));
            limits.as_mut().poll(context).map(Err)
        })
        .await
    }

    /// Completes what [`bounded`](Self::bounded) returned, after its future was dropped: that one
    /// must not keep the lock, nor its place in the queue, while the store is asked who holds the
    /// lock. `guard` returns the guard, unless the lock is held.
    pub(super) async fn ended<T>(
        &mut self,
        acquired: Result<T>,
        guard: impl Fn(&T) -> Option<&LockGuard<B>>,
    ) -> Result<T> {
        let acquired = match acquired {
            Ok(late) if self.is_late() => {
                if let Some(guard) = guard(&late) {
                    guard.discard();
                }
                Err(self.timed_out())
            }
            Err(error) if error.code() == ErrorCode::AcquisitionTimeout => {
                Err(Box::pin(self.with_holder(error)).await)
            }
            acquired => acquired,
        };
        (self.outcome, self.fence) = match acquired.as_ref().map(guard) {
            Ok(Some(guard)) => (WaitOutcome::Acquired, guard.try_fence().map_or(0, Fence::get)),
            Ok(None) => (WaitOutcome::Contended, 0),
            Err(error) => (outcome_of(error), 0),
        };
        acquired
    }

    /// Makes one attempt, without queueing.
    pub(super) async fn once(&self) -> Result<Option<LockGuard<B>>> {
        Ok(match Attempts::new(&self.call, None, true).ask().await? {
            Attempted::Acquired(guard) => Some(guard),
            Attempted::Contended { .. } => None,
        })
    }

    fn is_late(&self) -> bool {
        self.deadline().is_some_and(|deadline| self.call.context.engine.ticker.now() >= deadline)
    }

    fn is_cancelled(&self) -> bool {
        let token = self.call.context.options.cancel.as_ref();
        token.is_some_and(CancellationToken::is_cancelled)
            || self.call.context.engine.is_shut_down()
    }

    /// Completes when the wait must end without the lock.
    async fn limits(&self) -> Error {
        let cancelled = async {
            let shut_down = self.call.context.engine.shut_down.cancelled();
            match &self.call.context.options.cancel {
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
        let ticker = &self.call.context.engine.ticker;
        tokio::select! {
            biased;
            () = cancelled => self.cancelled(),
            () = ticker.sleep_until_some(self.deadline()) => self.timed_out(),
        }
    }

    /// Returns when the time is over. A timeout of zero limits no attempt: `lock` makes none, and
    /// `try_lock` makes one whatever the timeout.
    fn deadline(&self) -> Option<LocalInstant> {
        let timeout = self.call.context.options.timeout.filter(|timeout| !timeout.is_zero());
        timeout.map(|timeout| self.call.started + timeout)
    }

    /// Waits to become the head of the queue within this process, then for the lock.
    pub(super) async fn in_order(&self) -> Result<LockGuard<B>> {
        let ticket = self.call.context.engine.wait_queues.enter(self.call.key);
        self.queued_behind.store(ticket.ahead, Ordering::Relaxed);
        let queue = &*ticket.queue;
        let (mut head, schedule, is_new) = if let Ok(head) = queue.head.try_lock() {
            (head, None, true)
        } else {
            self.note_waiting();
            let (head, schedule) = match self.call.context.options.max_retries() {
                None => (queue.head.lock().await, None),
                // Boxed, so that waiters without a limit are smaller.
                Some(_) => Box::pin(self.reach_head_within_retries(queue)).await?,
            };
            if self.is_late() {
                // It became the head when its timeout was over; it leaves without asking.
                return Err(self.timed_out());
            }
            (head, schedule, false)
        };
        // A lock that this process holds itself is not asked for until it is released. But with one
        // attempt and no retries there is no time to wait for that.
        let asks_at_once =
            !self.is_held_here(queue) || self.call.context.options.max_retries() == Some(0);
        let mut attempts = Attempts::new(&self.call, Some(&ticket), is_new && asks_at_once);
        let mut holder = Holder::Here;
        if asks_at_once {
            let answer = attempts.ask().await;
            match self.note_answer(queue, &mut head, answer).await? {
                Attempted::Acquired(guard) => return Ok(guard),
                Attempted::Contended { expires_in } => holder = Holder::Elsewhere { expires_in },
            }
        } else if self.call.any_of.is_some() {
            holder = Holder::Elsewhere { expires_in: None };
        }
        self.note_waiting();
        // Boxed, because only the first waiter of a key needs it.
        Box::pin(self.contend(queue, head, attempts, holder, schedule)).await
    }

    /// Returns whether this process holds the lock, or all locks of which any will do.
    fn is_held_here(&self, queue: &WaitQueue) -> bool {
        match self.call.any_of {
            None => queue.held_until().is_some(),
            Some(keys) => {
                let wait_queues = &self.call.context.engine.wait_queues;
                keys.iter().all(|key| wait_queues.is_held(key))
            }
        }
    }

    /// Reports once that this call has to wait.
    fn note_waiting(&self) {
        if !self.was_queued.swap(true, Ordering::Relaxed) {
            self.call.context.report(self.call.shown_key(), None, || EngineEventKind::Waiting);
        }
    }

    /// Waits to become the head. A waiter in the queue knows that the lock is held: its retries are
    /// used up without asking.
    async fn reach_head_within_retries<'queue>(
        &self,
        queue: &'queue WaitQueue,
    ) -> Result<(MutexGuard<'queue, QueueHead>, Option<Box<Schedule>>)> {
        let ticker = &self.call.context.engine.ticker;
        let options = &self.call.context.options;
        let mut schedule = Box::new(Schedule::new(options.retry_policy(), options.timeout));
        let mut head = pin!(queue.head.lock());
        loop {
            if let Poll::Ready(head) = poll_once(head.as_mut()).await {
                return Ok((head, Some(schedule)));
            }
            let retry_at = self.next_retry(&mut schedule, None)?;
            tokio::select! {
                biased;
                head = head.as_mut() => return Ok((head, Some(schedule))),
                () = ticker.sleep_until_some(retry_at) => {
                    self.retry_used_up(&mut schedule).await;
                }
            }
        }
    }

    /// Returns when the next retry is due, or `None` if none is due before the timeout.
    fn next_retry(
        &self,
        schedule: &mut Schedule,
        cap: Option<Duration>,
    ) -> Result<Option<LocalInstant>> {
        let elapsed = self.call.context.engine.ticker.now().since(self.call.started);
        match schedule.next(elapsed, cap, random_fraction()) {
            Next::AskAt(at) => Ok(Some(self.call.started + at)),
            Next::WaitForTimeout => Ok(None),
            Next::GiveUp => Err(self.timed_out()),
        }
    }

    /// Records that the timer of a retry fired.
    async fn retry_used_up(&self, schedule: &mut Schedule) {
        schedule.timer_fired(self.call.context.engine.ticker.now().since(self.call.started));
        // A timer that was due at once must not keep other tasks from running.
        tokio::task::yield_now().await;
    }

    /// Waits and asks until the lock is acquired.
    async fn contend(
        &self,
        queue: &WaitQueue,
        mut head: MutexGuard<'_, QueueHead>,
        mut attempts: Attempts<'_, B>,
        mut holder: Holder,
        schedule: Option<Box<Schedule>>,
    ) -> Result<LockGuard<B>> {
        let options = &self.call.context.options;
        let mut schedule = schedule
            .unwrap_or_else(|| Box::new(Schedule::new(options.retry_policy(), options.timeout)));
        loop {
            let released_at = match holder {
                Holder::Here => self.pause_until_released(queue, &mut head, &mut schedule).await?,
                Holder::Elsewhere { expires_in } => {
                    self.pause(queue, &mut head, &mut schedule, expires_in).await?
                }
            };
            let answer = attempts.ask().await;
            match self.note_answer(queue, &mut head, answer).await? {
                Attempted::Acquired(guard) => {
                    if let Some(released_at) = released_at {
                        self.note_hand_over(released_at);
                    }
                    return Ok(guard);
                }
                Attempted::Contended { .. } if queue.held_until().is_some() => {
                    holder = Holder::Here;
                }
                Attempted::Contended { expires_in } => {
                    if self.call.any_of.is_some() && released_at.is_some() {
                        // Another process took what was released.
                        head.fairness.met_others();
                    }
                    holder = Holder::Elsewhere { expires_in };
                }
            }
        }
    }

    /// Notes how long it took to get the lock after its release was known.
    fn note_hand_over(&self, released_at: LocalInstant) {
        let took = self.call.context.engine.ticker.now().since(released_at);
        let took_us = u32::try_from(took.as_micros()).unwrap_or(u32::MAX).max(1);
        self.call.hand_over_us.store(took_us, Ordering::Relaxed);
    }

    /// Records what an attempt found. With `retry_on_error`, a retryable error counts as a held
    /// lock.
    async fn note_answer(
        &self,
        queue: &WaitQueue,
        head: &mut QueueHead,
        answer: Result<Attempted<B>>,
    ) -> Result<Attempted<B>> {
        self.was_answered.store(true, Ordering::Relaxed);
        *self.last_error.lock().unwrap_or_else(PoisonError::into_inner) =
            answer.as_ref().err().cloned();
        match answer {
            Ok(Attempted::Acquired(guard)) => {
                if self.call.any_of.is_none() {
                    let counts_grants = self.call.context.engine.fences_count_grants;
                    head.fairness.granted(guard.try_fence(), counts_grants);
                    let now = self.call.context.engine.ticker.now();
                    head.trust.acquired(now, head.notifications());
                    queue.note_trust(&head.trust);
                }
                head.mark_seen();
                Ok(Attempted::Acquired(guard))
            }
            Ok(taken) => {
                if queue.held_until().is_none() && self.call.any_of.is_none() {
                    head.fairness.met_others();
                    if let Attempted::Contended { expires_in: Some(expires_in) } = &taken {
                        self.note_other_holder(head, *expires_in).await;
                        queue.note_trust(&head.trust);
                    }
                }
                Ok(taken)
            }
            Err(error) if self.call.context.options.retry_on_error && error.is_retryable() => {
                Ok(Attempted::Contended { expires_in: None })
            }
            Err(error) => Err(error),
        }
    }

    /// Records that another process holds the lock. If its holder may have changed without a
    /// notification, looks who it is.
    async fn note_other_holder(&self, head: &mut QueueHead, expires_in: Duration) {
        let now = self.call.context.engine.ticker.now();
        let sighting = head.trust.contended(now, expires_in, head.notifications());
        if sighting == Sighting::Unclear && !head.subscriptions.is_empty() {
            let backend = &self.call.context.engine.backend;
            let lookup = Box::pin(backend.lookup_key(self.call.key));
            if let Ok(found) = lookup.await {
                head.trust.saw(now, found.and_then(|lock| B::Fencing::fence(lock.token)));
            }
        }
    }

    /// Sleeps until this process has released the lock, or must have lost it. Returns when it was
    /// released, if it was.
    ///
    /// Notifications are ignored, because they could only be of an earlier release; the slow
    /// polling continues. Retries are used up without asking, because the answer is known.
    async fn pause_until_released(
        &self,
        queue: &WaitQueue,
        head: &mut QueueHead,
        schedule: &mut Schedule,
    ) -> Result<Option<LocalInstant>> {
        let ticker = &self.call.context.engine.ticker;
        let ask_anyway_at = ticker.now() + self.call.context.engine.poll_interval;
        loop {
            let Some(held_until) = queue.held_until() else { return Ok(None) };
            let retry_at =
                if schedule.is_limited() { self.next_retry(schedule, None)? } else { None };
            tokio::select! {
                biased;
                () = queue.released.notified() => {
                    let released_at = ticker.now();
                    if head.fairness.count_handoff() {
                        self.let_others_go_first(head).await;
                    }
                    return Ok(Some(released_at));
                }
                () = ticker.sleep_until(held_until) => {
                    queue.set_overdue();
                    return Ok(None);
                }
                () = ticker.sleep_until(ask_anyway_at) => return Ok(None),
                () = ticker.sleep_until_some(retry_at) => {
                    self.retry_used_up(schedule).await;
                }
            }
        }
    }

    /// Sleeps until the next attempt at a lock that another process holds is worthwhile. Returns
    /// when the notification of a release came, if one did.
    async fn pause(
        &self,
        queue: &WaitQueue,
        head: &mut QueueHead,
        schedule: &mut Schedule,
        expires_in: Option<Duration>,
    ) -> Result<Option<LocalInstant>> {
        /// The shortest pause, so that a store whose clock is slightly off is not asked in a loop.
        const LEAST: Duration = Duration::from_millis(5);
        let ticker = &self.call.context.engine.ticker;
        let free_at = expires_in.map(|expires_in| ticker.now() + expires_in.max(LEAST));
        let poll_interval = self.call.context.engine.poll_interval;
        let cap = if head.is_notified() && head.trust.is_reliable() {
            Some(poll_interval)
        } else if head.subscriptions.is_empty() {
            None
        } else {
            // Without notifications, the lock changes hands unnoticed.
            let interval = head.trust.interval(ticker.now(), self.call.started, random_fraction());
            expires_in.map(|_is_answered| interval.min(poll_interval))
        };
        let ask_at = self.next_retry(schedule, cap)?;
        if self.subscribe(head).await {
            return Ok(None);
        }
        let released_at = tokio::select! {
            biased;
            () = queue.released.notified() => {
                let released_at = ticker.now();
                if self.call.any_of.is_some() && head.fairness.count_handoff() {
                    self.let_others_go_first(head).await;
                }
                Some(released_at)
            }
            holder_age = head.notified() => {
                let released_at = ticker.now();
                if let Some(holder_age) = holder_age
                    && !head.is_alone()
                {
                    let waited = released_at.since(self.call.started);
                    ticker.sleep(pause_in_order(waited, holder_age)).await;
                }
                Some(released_at)
            }
            () = ticker.sleep_until_some(free_at) => None,
            () = ticker.sleep_until_some(ask_at) => {
                self.retry_used_up(schedule).await;
                None
            }
        };
        Ok(released_at)
    }

    /// Sits out one round of notifications: waits for the one that this process's own release has
    /// sent to every waiter, then longer than any of them pauses.
    async fn let_others_go_first(&self, head: &mut QueueHead) {
        const ROUND: Duration = Duration::from_millis(10);
        const HEAD_START: Duration = Duration::from_millis(1);
        let is_new = self.subscribe(head).await;
        if head.is_alone() {
            return;
        }
        let mut pause = HEAD_START;
        if !is_new && !head.subscriptions.is_empty() {
            // Whether the notification came or not, the round is over.
            let holder_age = tokio::time::timeout(ROUND, head.notified()).await;
            if let Ok(Some(holder_age)) = holder_age {
                // That of a waiter that has just come.
                pause += pause_in_order(Duration::ZERO, holder_age);
            }
        }
        self.call.context.engine.ticker.sleep(pause).await;
    }

    /// Subscribes to notifications, unless this queue has a subscription. Returns `true` if the
    /// subscription is new: the caller must then make one more attempt before it waits, because a
    /// release may have come just before.
    async fn subscribe(&self, head: &mut QueueHead) -> bool {
        /// Of more locks, only some are listened to; releases of the others are found by polling.
        const MOST_SUBSCRIPTIONS: usize = 64;
        /// The pause after a subscription that failed.
        const LEFT_ALONE: Duration = Duration::from_secs(10);
        let ticker = &self.call.context.engine.ticker;
        if !head.subscriptions.is_empty()
            || head.subscribe_after.is_some_and(|at| ticker.now() < at)
        {
            return false;
        }
        // Set before subscribing: if this waiter gives up in the meantime, the next one does not
        // repeat the delay.
        head.subscribe_after = Some(ticker.now() + LEFT_ALONE);
        // Limited, because this waiter notices nothing else in the meantime.
        let limit = ticker.now() + self.call.context.engine.poll_interval;
        let backend = &self.call.context.engine.backend;
        let subscribed = async {
            match self.call.any_of {
                None => backend.subscribe(self.call.key).await.into_iter().collect(),
                Some(keys) => {
                    let keys = keys.iter().take(MOST_SUBSCRIPTIONS);
                    let all = join_all(keys.map(|key| backend.subscribe(key))).await;
                    // With some of them, a missed release would go unnoticed.
                    all.into_iter().collect::<Option<Vec<_>>>().unwrap_or_default()
                }
            }
        };
        head.subscriptions = tokio::select! {
            biased;
            subscriptions = subscribed => subscriptions,
            () = ticker.sleep_until(limit) => Vec::new(),
        };
        !head.subscriptions.is_empty()
    }

    /// Adds who holds the lock that was not acquired, if the call waited for it and the store
    /// reports it in time.
    async fn with_holder(&self, error: Error) -> Error {
        /// The wait is already over.
        const LIMIT: Duration = Duration::from_millis(250);
        let context = self.call.context;
        let holder = if !self.was_queued.load(Ordering::Relaxed) {
            None
        } else if self.call.attempts.load(Ordering::Relaxed) == 0 {
            // It was never asked for, and is not asked for now.
            context.holder.clone().filter(|_| self.has_local_holder())
        } else if self.has_failed.load(Ordering::Relaxed) || self.call.any_of.is_some() {
            None
        } else {
            tokio::select! {
                biased;
                found = context.engine.backend.lookup_key(self.call.key) => {
                    found.ok().flatten().and_then(|lock| lock.holder)
                }
                () = context.engine.ticker.sleep(LIMIT) => None,
            }
        };
        error.with_holder(holder)
    }

    pub(super) fn timed_out(&self) -> Error {
        let elapsed = self.call.context.engine.ticker.now().since(self.call.started);
        let attempts = self.call.attempts.load(Ordering::Relaxed);
        let elapsed_ms = elapsed.as_millis();
        let why = match attempts {
            0 if self.has_local_holder() => ": held in this process".to_owned(),
            0 if self.was_queued.load(Ordering::Relaxed) => {
                ": another task of this process waits for it".to_owned()
            }
            1 => " (1 attempt)".to_owned(),
            _ => format!(" ({attempts} attempts)"),
        };
        let message = format!("the lock was not acquired within {elapsed_ms} ms{why}");
        let error =
            Error::new(ErrorCode::AcquisitionTimeout, message).with_key(self.call.shown_key());
        let last_error = self.last_error.lock().unwrap_or_else(PoisonError::into_inner).take();
        let is_unanswered = attempts > 0 && !self.was_answered.load(Ordering::Relaxed);
        let unanswered =
            || Error::new(ErrorCode::NetworkTimeout, "the store did not answer in time");
        match last_error.or_else(|| is_unanswered.then(unanswered)) {
            Some(cause) => {
                self.has_failed.store(true, Ordering::Relaxed);
                error.with_source(cause)
            }
            None => error,
        }
    }

    /// Returns whether guards of this process hold the lock, or all locks of which any will do.
    fn has_local_holder(&self) -> bool {
        let wait_queues = &self.call.context.engine.wait_queues;
        match self.call.any_of {
            None => wait_queues.has_holder(self.call.key),
            Some(keys) => keys.iter().all(|key| wait_queues.has_holder(key)),
        }
    }

    fn cancelled(&self) -> Error {
        let error = if self.call.context.engine.is_shut_down() {
            Error::shut_down()
        } else {
            Error::canceled("the wait for the lock was canceled")
        };
        error.with_key(self.call.shown_key())
    }
}

impl<B: LockBackend> Drop for Wait<'_, B> {
    fn drop(&mut self) {
        let fence = Fence::new(self.fence).ok().filter(|fence| fence.get() > 0);
        self.call.context.report(self.call.shown_key(), fence, || EngineEventKind::Waited {
            outcome: self.outcome,
            waited: self.call.context.engine.ticker.now().since(self.call.started),
            was_queued: self.was_queued.load(Ordering::Relaxed),
            hand_over: match self.call.hand_over_us.load(Ordering::Relaxed) {
                0 => None,
                took_us => Some(Duration::from_micros(took_us.into())),
            },
            attempts: self.call.attempts.load(Ordering::Relaxed),
            queued_behind: self.queued_behind.load(Ordering::Relaxed),
        });
    }
}

fn outcome_of(error: &Error) -> WaitOutcome {
    match error.code() {
        ErrorCode::AcquisitionTimeout => WaitOutcome::TimedOut,
        ErrorCode::Aborted => WaitOutcome::Canceled,
        _ => WaitOutcome::Failed,
    }
}
