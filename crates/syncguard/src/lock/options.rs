//! The options of a lock.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::release_errors::{ReleaseContext, ReleaseErrors};
use super::retry::RetryPolicy;
use crate::common::error::{Error, Result};
use crate::common::ttl::Ttl;

/// The options of a lock: how long it lives, how long to wait for it, and what happens while it is
/// held.
///
/// A [`LockerBuilder`](crate::LockerBuilder) sets them for all locks of a locker, a
/// [`LockRequest`](crate::LockRequest) for one lock. Both have the setters of this type.
///
/// ```
/// use std::time::Duration;
/// use syncguard::LockOptions;
///
/// let nightly = LockOptions::default()
///     .ttl(Duration::from_secs(60))
///     .timeout(Duration::from_secs(10))
///     .renew()
///     .max_hold(Duration::from_secs(3600));
/// let hourly = nightly.clone().max_hold(None);
/// ```
#[derive(Clone)]
#[must_use]
pub struct LockOptions {
    pub(crate) ttl: Ttl,
    pub(crate) timeout: Option<Duration>,
    pub(crate) retry: Option<RetryPolicy>,
    pub(crate) retry_on_error: bool,
    pub(crate) renew: bool,
    pub(crate) max_hold: Option<Duration>,
    pub(crate) hold_at_least: Duration,
    pub(crate) stop_margin: Duration,
    pub(crate) cancel: Option<CancellationToken>,
    pub(crate) release_timeout: Option<Duration>,
    pub(crate) on_release_error: Option<ReleaseErrors>,
    pub(crate) label: Option<Arc<str>>,
    /// Whether waiters of other processes get the lock in about the order in which they came, which
    /// makes some of them pause before they ask.
    pub(crate) is_ordered: bool,
    /// The error of an invalid value, reported where the options are used.
    invalid: Option<Error>,
}

impl Default for LockOptions {
    /// TTL 30 s, timeout 5 s, retries from 100 ms with equal jitter until the timeout, no renewal.
    fn default() -> Self {
        Self {
            ttl: Ttl::DEFAULT,
            timeout: Some(Duration::from_secs(5)),
            retry: None,
            retry_on_error: false,
            renew: false,
            max_hold: None,
            hold_at_least: Duration::ZERO,
            stop_margin: Duration::ZERO,
            cancel: None,
            release_timeout: None,
            on_release_error: None,
            label: None,
            is_ordered: true,
            invalid: None,
        }
    }
}

/// The setters of [`LockOptions`], for every type that has an `options_mut`. Setters of optional
/// values take the value, or `None` to unset it; where `None` would have no type, another method
/// unsets the value.
macro_rules! option_setters {
    () => {
        /// Sets how long the lock lives without being extended: a [`Ttl`], or a [`Duration`] that
        /// is checked where the options are used. 30 seconds by default.
        pub fn ttl<T>(mut self, ttl: T) -> Self
        where
            T: TryInto<Ttl>,
            Error: From<T::Error>,
        {
            self.options_mut().set_ttl(ttl.try_into().map_err(Error::from));
            self
        }

        /// Sets how long to wait for the lock, including an attempt in progress. 5 seconds by
        /// default; `None` waits without a limit. With zero, `lock` makes no attempt.
        ///
        /// Only the timeout ends the wait, unless a [`RetryPolicy`] ends it sooner.
        pub fn timeout(mut self, timeout: impl Into<Option<Duration>>) -> Self {
            self.options_mut().timeout = timeout.into();
            self
        }

        /// Waits without a timeout and without a limit on retries. The delay between retries still
        /// grows, up to 5 seconds.
        pub fn wait_forever(mut self) -> Self {
            self.options_mut().set_wait_forever();
            self
        }

        /// Sets when, and how often, to ask the store again. By default [`RetryPolicy::default`]
        /// with delays of at most 5 seconds and as many retries as the timeout allows.
        pub fn retry(mut self, retry: impl Into<Option<RetryPolicy>>) -> Self {
            self.options_mut().retry = retry.into();
            self
        }

        /// Sets whether a wait continues through retryable errors ([`Error::is_retryable`]) until
        /// its timeout. By default the first error ends the wait.
        ///
        /// If the last attempt before the timeout failed, its error is the
        /// [`source`](std::error::Error::source) of the timeout: whether the lock is held is then
        /// unknown.
        pub fn retry_on_error(mut self, enabled: bool) -> Self {
            self.options_mut().retry_on_error = enabled;
            self
        }

        /// Extends the lock at every third of its TTL while the guard lives.
        ///
        /// A renewal without a response is retried after half of the remaining time; a failed one
        /// after a twelfth of the TTL or one second, whichever is shorter.
        pub fn renew(mut self) -> Self {
            self.options_mut().renew = true;
            self
        }

        /// Disables renewal, which is the default.
        pub fn no_renewal(mut self) -> Self {
            self.options_mut().renew = false;
            self
        }

        /// Limits how long renewal keeps the lock, so that a hung holder does not keep it forever.
        /// After that the lock is lost, unless you have [extended](crate::LockGuard::extend) it
        /// beyond that yourself. No limit by default.
        pub fn max_hold(mut self, max_hold: impl Into<Option<Duration>>) -> Self {
            self.options_mut().max_hold = max_hold.into();
            self
        }

        /// Keeps the lock for at least this long after it was acquired, even if the guard is
        /// released or dropped sooner: the release sets the expiry to the rest of that time
        /// instead. Zero by default.
        ///
        /// Use it for jobs that are shorter than the clock skew between machines: a job that runs
        /// at midnight on every machine must not run twice because one clock is a second behind.
        ///
        /// `lock_all` and requests for several permits refuse it, because they give back locks that
        /// were never used; elections ignore it.
        pub fn hold_at_least(mut self, time: Duration) -> Self {
            self.options_mut().hold_at_least = time;
            self
        }

        /// Sets how long work under the lock needs to stop. While no renewal succeeds, the loss is
        /// signaled this long before the lock expires, as
        /// [`LostReason::Expiring`](crate::LostReason::Expiring), so that the work has stopped when
        /// the next holder starts. Zero by default.
        ///
        /// The lock is still held then: drop or release the guard when the work has stopped.
        pub fn stop_margin(mut self, margin: Duration) -> Self {
            self.options_mut().stop_margin = margin;
            self
        }

        /// Ends the wait for the lock with [`ErrorCode::Aborted`](crate::ErrorCode::Aborted) when
        /// this token is canceled. A lock that is held is not affected: drop or release its guard.
        pub fn cancel(mut self, token: impl Into<Option<CancellationToken>>) -> Self {
            self.options_mut().cancel = token.into();
            self
        }

        /// Limits how long a release in the background may take before it is reported as failed.
        /// By default until the lock has expired.
        pub fn release_timeout(mut self, timeout: impl Into<Option<Duration>>) -> Self {
            self.options_mut().release_timeout = timeout.into();
            self
        }

        /// Calls `callback` for every release in the background that failed, timed out or never
        /// ran. By default these are logged, without key and lock id. A release that found nothing
        /// to release is not an error.
        ///
        /// | code | meaning |
        /// |---|---|
        /// | `NetworkTimeout` | no answer within the release timeout |
        /// | `Aborted` | the runtime ended before the release ran: call `shutdown` |
        /// | others | the store's last answer |
        ///
        /// The callback runs on its own thread behind a bounded queue, so a slow one delays no
        /// lock; [`shutdown`](crate::Locker::shutdown) waits until it has returned. A panic in it
        /// is ignored.
        pub fn on_release_error(
            mut self,
            callback: impl Fn(&Error, &ReleaseContext) + Send + Sync + 'static,
        ) -> Self {
            self.options_mut().on_release_error = Some(ReleaseErrors::new(callback));
            self
        }

        /// Logs every release in the background that failed, instead of calling a callback. This is
        /// the default.
        pub fn log_release_errors(mut self) -> Self {
            self.options_mut().on_release_error = None;
            self
        }

        /// Names the lock in [engine events](crate::telemetry::EngineEvent) and spans. Unlike the
        /// key, which appears as a hash, a label is visible: choose one without secrets, such as
        /// the kind of job.
        pub fn label(mut self, label: impl Into<Arc<str>>) -> Self {
            self.options_mut().label = Some(label.into());
            self
        }

        /// Removes the label.
        pub fn no_label(mut self) -> Self {
            self.options_mut().label = None;
            self
        }
    };
}
pub(crate) use option_setters;

impl LockOptions {
    /// The longest delay of a long wait without notifications.
    const LONGEST_DELAY: Duration = Duration::from_secs(5);

    option_setters!();

    fn options_mut(&mut self) -> &mut Self {
        self
    }

    pub(crate) fn set_ttl(&mut self, ttl: Result<Ttl>) {
        match ttl {
            Ok(ttl) => (self.ttl, self.invalid) = (ttl, None),
            Err(error) => self.invalid = Some(error),
        }
    }

    pub(crate) fn set_wait_forever(&mut self) {
        self.timeout = None;
        if let Some(retry) = &mut self.retry {
            retry.max_retries = None;
            retry.max_delay.get_or_insert(Self::LONGEST_DELAY.max(retry.delay));
        }
    }

    /// Returns how long the lock lives without being extended.
    #[must_use]
    pub fn get_ttl(&self) -> Ttl {
        self.ttl
    }

    /// Returns how long to wait for the lock; `None` without a limit.
    #[must_use]
    pub fn get_timeout(&self) -> Option<Duration> {
        self.timeout
    }

    /// Returns whether the lock is renewed while its guard lives.
    #[must_use]
    pub fn is_renewed(&self) -> bool {
        self.renew
    }

    /// Returns the label, if there is one.
    #[must_use]
    pub fn get_label(&self) -> Option<&str> {
        self.label.as_deref()
    }

    /// Returns the limit of renewal, if there is one.
    #[must_use]
    pub fn get_max_hold(&self) -> Option<Duration> {
        self.max_hold
    }

    /// Returns how long the lock stays taken, even if it is released sooner.
    #[must_use]
    pub fn get_hold_at_least(&self) -> Duration {
        self.hold_at_least
    }

    /// Returns how long before its expiry a loss is signaled.
    #[must_use]
    pub fn get_stop_margin(&self) -> Duration {
        self.stop_margin
    }

    /// Returns the number of retries that ends a wait, if it is limited.
    pub(crate) fn max_retries(&self) -> Option<u32> {
        self.retry.and_then(|retry| retry.max_retries)
    }

    /// Returns the policy in force: the chosen one, or the default one without a limit on retries.
    pub(crate) fn retry_policy(&self) -> RetryPolicy {
        self.retry.unwrap_or(RetryPolicy {
            max_retries: None,
            max_delay: Some(Self::LONGEST_DELAY),
            ..RetryPolicy::default()
        })
    }

    /// Refuses invalid values and values that do not fit together.
    pub(crate) fn validate(&self) -> Result<()> {
        if let Some(error) = &self.invalid {
            return Err(error.clone());
        }
        if self.renew && self.ttl.as_millis() < 3 {
            return Err(Error::invalid("renewal needs a TTL of at least 3 ms"));
        }
        let RetryPolicy { delay, max_delay, max_retries, .. } = self.retry_policy();
        if max_delay.is_some_and(|max_delay| max_delay < delay) {
            return Err(Error::invalid(
                "max_delay of the retry policy must not be shorter than its delay",
            ));
        }
        if delay.is_zero() && max_retries.is_none() && self.timeout.is_none() {
            return Err(Error::invalid(
                "zero delay with unlimited retries and no timeout would busy-loop",
            ));
        }
        let renewed_after = if self.renew { self.ttl.as_duration() / 3 } else { Duration::ZERO };
        if self.stop_margin.saturating_add(renewed_after) >= self.ttl.as_duration() {
            return Err(Error::invalid(if self.renew {
                "with renewal, stop_margin must be less than two thirds of the TTL"
            } else {
                "stop_margin must be less than the TTL"
            }));
        }
        if self.hold_at_least > Ttl::MAX.as_duration() {
            return Err(Error::invalid("hold_at_least must not exceed 24 hours"));
        }
        match self.max_hold {
            Some(_) if !self.renew => {
                Err(Error::invalid("max_hold limits renewal; enable renewal with renew()"))
            }
            Some(max_hold) if max_hold < self.ttl.as_duration() => {
                Err(Error::invalid("max_hold must not be shorter than the TTL"))
            }
            _ if self.release_timeout == Some(Duration::ZERO) => {
                Err(Error::invalid("release_timeout must be greater than zero"))
            }
            _ => Ok(()),
        }
    }
}

impl fmt::Debug for LockOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockOptions")
            .field("ttl", &self.ttl)
            .field("timeout", &self.timeout)
            .field("retry", &self.retry)
            .field("retry_on_error", &self.retry_on_error)
            .field("renew", &self.renew)
            .field("max_hold", &self.max_hold)
            .field("hold_at_least", &self.hold_at_least)
            .field("stop_margin", &self.stop_margin)
            .field("release_timeout", &self.release_timeout)
            .field("on_release_error", &self.on_release_error.is_some())
            .field("label", &self.label)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: fn(u64) -> Duration = Duration::from_millis;

    #[test]
    fn values_are_refused_just_beyond_their_limits() {
        let options = LockOptions::default;
        let day = Ttl::MAX.as_duration();
        let policy = |max_delay| RetryPolicy::default().delay(MS(100)).max_delay(MS(max_delay));
        for (valid, invalid) in [
            (options().ttl(MS(3)).renew(), options().ttl(MS(2)).renew()),
            (options().retry(policy(100)), options().retry(policy(99))),
            (options().hold_at_least(day), options().hold_at_least(day + MS(1))),
            (options().ttl(MS(9)).stop_margin(MS(8)), options().ttl(MS(9)).stop_margin(MS(9))),
            (
                options().ttl(MS(9)).renew().max_hold(MS(9)),
                options().ttl(MS(9)).renew().max_hold(MS(8)),
            ),
        ] {
            assert!(valid.validate().is_ok(), "{valid:?}");
            assert!(invalid.validate().is_err(), "{invalid:?}");
        }
    }

    #[test]
    fn options_return_what_was_set() {
        let options = LockOptions::default();
        assert!(!options.is_renewed());
        assert_eq!(options.max_retries(), None);
        assert_eq!(options.retry_policy().max_delay, Some(LockOptions::LONGEST_DELAY));
        let options = options.ttl(MS(9)).renew().retry(RetryPolicy::default().max_retries(3));
        assert_eq!(options.get_ttl().as_duration(), MS(9));
        assert!(options.is_renewed());
        assert_eq!((options.max_retries(), options.retry_policy().max_delay), (Some(3), None));
    }
}
