//! When to ask again: pure functions of the policy, the attempt and a random number.

use std::time::Duration;

/// How the delay grows from retry to retry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Backoff {
    /// It doubles.
    #[default]
    Exponential,
    /// It stays the same.
    Fixed,
}

/// How much of a delay is random, so that waiters do not retry in lockstep.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Jitter {
    /// Half of it: between `d/2` and `d`.
    #[default]
    Equal,
    /// All of it: between 0 and `d`.
    Full,
    /// None of it: exactly `d`.
    None,
}

/// How often, and after which delays, a waiting `lock()` asks the store on its own.
///
/// Where the backend sends notifications, this is only the fallback: a waiter asks at once when it
/// is notified, when its own process releases the lock, and when the holder's lock has expired.
/// Those attempts do not count as retries.
///
/// ```
/// use std::time::Duration;
/// use syncguard::{Backoff, Jitter, RetryPolicy};
///
/// let fixed = RetryPolicy::default().backoff(Backoff::Fixed).jitter(Jitter::None);
/// assert_eq!(fixed.delay_for(7, 0.5), Duration::from_millis(100));
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RetryPolicy {
    pub(crate) max_retries: Option<u32>,
    pub(crate) delay: Duration,
    pub(crate) backoff: Backoff,
    pub(crate) jitter: Jitter,
    pub(crate) max_delay: Option<Duration>,
}

impl Default for RetryPolicy {
    /// 10 retries, 100 ms before the first, doubling, with equal jitter.
    fn default() -> Self {
        Self {
            max_retries: Some(10),
            delay: Duration::from_millis(100),
            backoff: Backoff::Exponential,
            jitter: Jitter::Equal,
            max_delay: None,
        }
    }
}

impl RetryPolicy {
    /// Sets how many attempts follow the first; `None` for as many as the timeout allows.
    #[must_use]
    pub fn max_retries(mut self, max_retries: impl Into<Option<u32>>) -> Self {
        self.max_retries = max_retries.into();
        self
    }

    /// Sets the delay before the first retry. Zero retries at once.
    #[must_use]
    pub fn delay(mut self, delay: Duration) -> Self {
        self.delay = delay;
        self
    }

    /// Sets how the delay grows.
    #[must_use]
    pub fn backoff(mut self, backoff: Backoff) -> Self {
        self.backoff = backoff;
        self
    }

    /// Sets how much of the delay is random.
    #[must_use]
    pub fn jitter(mut self, jitter: Jitter) -> Self {
        self.jitter = jitter;
        self
    }

    /// Sets the longest delay; `None` for no limit.
    #[must_use]
    pub fn max_delay(mut self, max_delay: impl Into<Option<Duration>>) -> Self {
        self.max_delay = max_delay.into();
        self
    }

    /// Returns the delay before retry number `retry` (from 1), for a `random` number in `0.0..1.0`.
    #[must_use]
    pub fn delay_for(&self, retry: u32, random: f64) -> Duration {
        let factor = match self.backoff {
            Backoff::Exponential => 2_f64.powi(retry.saturating_sub(1).min(1000).cast_signed()),
            Backoff::Fixed => 1.0,
        };
        let share = match self.jitter {
            Jitter::Equal => 0.5 + random.clamp(0.0, 1.0) / 2.0,
            Jitter::Full => random.clamp(0.0, 1.0),
            Jitter::None => 1.0,
        };
        let longest = self.max_delay.unwrap_or(Duration::MAX);
        let grown = saturating_mul(self.delay, factor).min(longest);
        saturating_mul(grown, share)
    }
}

fn saturating_mul(duration: Duration, factor: f64) -> Duration {
    Duration::try_from_secs_f64(duration.as_secs_f64() * factor).unwrap_or(Duration::MAX)
}

/// What a waiter does after an attempt found the lock held, unless it is notified first.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Next {
    /// Ask again at this time since the start of the wait.
    AskAt(Duration),
    /// Stop asking by the timer; a notification may still come before the timeout.
    WaitForTimeout,
    /// All retries are used up.
    GiveUp,
}

/// The retries of one wait: how many are used up, and when the next is due.
#[derive(Clone, Debug)]
pub(crate) struct Schedule {
    policy: RetryPolicy,
    timeout: Option<Duration>,
    retries: u32,
    /// When the next retry is due. An attempt made earlier, because of a notification or the cap,
    /// does not move it.
    due: Option<Duration>,
}

impl Schedule {
    pub(crate) fn new(policy: RetryPolicy, timeout: Option<Duration>) -> Self {
        Self { policy, timeout, retries: 0, due: None }
    }

    /// Returns whether the number of retries can end the wait.
    pub(crate) fn is_limited(&self) -> bool {
        self.policy.max_retries.is_some()
    }

    /// Returns when to ask again, after an attempt that ended at `elapsed` since the start.
    ///
    /// `cap` limits the sleep, not the policy: an attempt made because of it is not a retry.
    pub(crate) fn next(&mut self, elapsed: Duration, cap: Option<Duration>, random: f64) -> Next {
        if self.policy.max_retries.is_some_and(|max| self.retries >= max) {
            return Next::GiveUp;
        }
        let delay = self.policy.delay_for(self.retries.saturating_add(1), random);
        if let Some(cap) = cap.filter(|_| !self.is_limited()) {
            // Without a limit on retries, such an attempt may count as one.
            self.due = Some(elapsed.saturating_add(delay.min(cap)));
        }
        let due = *self.due.get_or_insert_with(|| elapsed.saturating_add(delay));
        let mut at = due.max(elapsed);
        if let Some(last) = self.last_attempt_at()
            && at > last
        {
            if elapsed >= last {
                return Next::WaitForTimeout;
            }
            at = last;
            self.due = Some(last);
        }
        Next::AskAt(cap.map_or(at, |cap| at.min(elapsed.saturating_add(cap))))
    }

    /// Records that the timer of [`Next::AskAt`] has fired.
    pub(crate) fn timer_fired(&mut self, elapsed: Duration) {
        if self.due.is_some_and(|due| due <= elapsed) {
            self.due = None;
            self.retries = self.retries.saturating_add(1);
        }
    }

    /// Returns when a sleep that would reach the timeout ends: a little before it, for one last
    /// attempt.
    fn last_attempt_at(&self) -> Option<Duration> {
        let reserve = |timeout: Duration| (timeout / 10).min(Duration::from_millis(250));
        self.timeout.map(|timeout| timeout.saturating_sub(reserve(timeout)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: fn(u64) -> Duration = Duration::from_millis;

    #[test]
    fn huge_retry_numbers_saturate() {
        let policy = RetryPolicy { jitter: Jitter::None, ..RetryPolicy::default() };
        assert_eq!(policy.delay_for(u32::MAX, 0.9), Duration::MAX);
        let capped = RetryPolicy { max_delay: Some(MS(500)), ..policy };
        assert_eq!(capped.delay_for(u32::MAX, 0.9), MS(500));
    }

    #[test]
    fn a_policy_is_what_was_set() {
        let policy = RetryPolicy::default()
            .max_retries(3)
            .delay(MS(10))
            .backoff(Backoff::Fixed)
            .jitter(Jitter::Full)
            .max_delay(MS(7));
        let expected = RetryPolicy {
            max_retries: Some(3),
            delay: MS(10),
            backoff: Backoff::Fixed,
            jitter: Jitter::Full,
            max_delay: Some(MS(7)),
        };
        assert_eq!(policy, expected);
    }

    #[test]
    fn jitter_takes_none_half_or_all_of_a_delay() {
        for (jitter, at_0, at_half, at_1) in [
            (Jitter::None, 200, 200, 200),
            (Jitter::Equal, 100, 150, 200),
            (Jitter::Full, 0, 100, 200),
        ] {
            let policy = RetryPolicy::default().jitter(jitter);
            let delays = [0.0, 0.5, 1.0].map(|random| policy.delay_for(2, random));
            assert_eq!(delays, [at_0, at_half, at_1].map(MS), "{jitter:?}");
        }
    }

    #[test]
    fn the_cap_adds_attempts_and_does_not_shorten_the_wait() {
        let policy = RetryPolicy {
            delay: MS(4000),
            jitter: Jitter::None,
            max_retries: Some(1),
            ..RetryPolicy::default()
        };
        let mut schedule = Schedule::new(policy, None);
        let mut elapsed = MS(0);
        let mut attempts = Vec::new();
        while let Next::AskAt(at) = schedule.next(elapsed, Some(MS(1000)), 0.0) {
            schedule.timer_fired(at);
            attempts.push(at);
            elapsed = at;
        }
        assert_eq!(attempts, [MS(1000), MS(2000), MS(3000), MS(4000)]);
    }

    #[test]
    fn an_attempt_between_two_retries_does_not_move_the_next() {
        let policy = RetryPolicy { jitter: Jitter::None, ..RetryPolicy::default() };
        let mut schedule = Schedule::new(policy, Some(MS(5000)));
        assert_eq!(schedule.next(MS(0), None, 0.0), Next::AskAt(MS(100)));
        assert_eq!(schedule.next(MS(60), None, 0.0), Next::AskAt(MS(100)));
        schedule.timer_fired(MS(100));
        assert_eq!(schedule.next(MS(100), None, 0.0), Next::AskAt(MS(300)));
    }

    #[test]
    fn the_last_sleep_leaves_time_for_one_attempt() {
        let policy = RetryPolicy { delay: MS(900), jitter: Jitter::None, ..RetryPolicy::default() };
        let mut schedule = Schedule::new(policy, Some(MS(1000)));
        assert_eq!(schedule.next(MS(0), None, 0.0), Next::AskAt(MS(900)));
        assert_eq!(schedule.next(MS(900), None, 0.0), Next::AskAt(MS(900)), "the timer is due");
        schedule.timer_fired(MS(900));
        assert_eq!(schedule.next(MS(900), None, 0.0), Next::WaitForTimeout);
        let mut long = Schedule::new(policy, Some(MS(800)));
        assert_eq!(long.next(MS(0), None, 0.0), Next::AskAt(MS(720)));
    }
}
