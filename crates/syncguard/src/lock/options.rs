//! What can be chosen about a single lock.

use std::fmt;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::release_errors::{ReleaseContext, ReleaseErrors};
use super::retry::RetryPolicy;
use crate::common::error::{Error, Result};
use crate::common::ttl::Ttl;

/// What can be chosen about a lock: the defaults of a [`Locker`](crate::Locker), or those of one
/// [`with_options`](crate::Locker::with_options).
///
/// ```
/// use std::time::Duration;
/// use syncguard::{LockOptions, Ttl};
///
/// let nightly = LockOptions::default()
///     .ttl(Ttl::new(Duration::from_secs(60))?)
///     .timeout(Duration::from_secs(10))
///     .renew()
///     .max_hold(Duration::from_secs(3600));
/// # Ok::<(), syncguard::Error>(())
/// ```
#[derive(Clone)]
pub struct LockOptions {
    pub(crate) ttl: Ttl,
    pub(crate) timeout: Option<Duration>,
    pub(crate) retry: Option<RetryPolicy>,
    pub(crate) ride_out_errors: bool,
    pub(crate) renew: bool,
    pub(crate) max_hold: Option<Duration>,
    pub(crate) stop_margin: Duration,
    pub(crate) cancel: Option<CancellationToken>,
    pub(crate) release_timeout: Option<Duration>,
    pub(crate) on_release_error: Option<ReleaseErrors>,
}

impl Default for LockOptions {
    /// TTL 30 s, timeout 5 s, retries from 100 ms with equal jitter until the timeout, no renewal.
    fn default() -> Self {
        Self {
            ttl: Ttl::DEFAULT,
            timeout: Some(Duration::from_secs(5)),
            retry: None,
            ride_out_errors: false,
            renew: false,
            max_hold: None,
            stop_margin: Duration::ZERO,
            cancel: None,
            release_timeout: None,
            on_release_error: None,
        }
    }
}

impl LockOptions {
    /// The delay that a long wait grows to, where no wake-ups help.
    const LONGEST_DELAY: Duration = Duration::from_secs(5);

    /// How long the lock lives without being extended.
    #[must_use]
    pub fn ttl(mut self, ttl: Ttl) -> Self {
        self.ttl = ttl;
        self
    }

    /// How long to wait for the lock in all, a running attempt included. With zero,
    /// [`lock`](crate::Locker::lock) makes no attempt.
    ///
    /// The timeout alone ends the wait, unless a [`retry`](Self::retry) policy is chosen that ends
    /// it before.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Waits without a timeout and without counting retries. The delay between two of them still
    /// grows, up to five seconds.
    #[must_use]
    pub fn wait_forever(mut self) -> Self {
        self.timeout = None;
        if let Some(retry) = &mut self.retry {
            retry.max_retries = None;
            retry.max_delay.get_or_insert(Self::LONGEST_DELAY.max(retry.delay));
        }
        self
    }

    /// When to ask the store again, and how often. By default as [`RetryPolicy::default`], with
    /// delays of at most five seconds and as many retries as the timeout allows.
    #[must_use]
    pub fn retry(mut self, retry: RetryPolicy) -> Self {
        self.retry = Some(retry);
        self
    }

    /// How many retries can end a wait.
    pub(crate) fn max_retries(&self) -> Option<u32> {
        self.retry.and_then(|retry| retry.max_retries)
    }

    /// The policy in force: the one chosen, or the default one without an end of its own.
    pub(crate) fn retry_policy(&self) -> RetryPolicy {
        self.retry.unwrap_or(RetryPolicy {
            max_retries: None,
            max_delay: Some(Self::LONGEST_DELAY),
            ..RetryPolicy::default()
        })
    }

    /// Whether a wait goes on through errors that may pass ([`Error::is_retryable`]), until its
    /// timeout. Without it the first error ends the wait.
    ///
    /// If the last attempt before the timeout failed, its error is the
    /// [`source`](std::error::Error::source) of the timeout's: whether anyone holds the lock is not
    /// known then.
    #[must_use]
    pub fn ride_out_errors(mut self, ride_out: bool) -> Self {
        self.ride_out_errors = ride_out;
        self
    }

    /// Extends the lock at every third of its TTL for as long as the guard lives.
    #[must_use]
    pub fn renew(mut self) -> Self {
        self.renew = true;
        self
    }

    /// The longest time that renewal keeps the lock, so that a hung holder does not keep it for
    /// ever. The lock is lost then.
    #[must_use]
    pub fn max_hold(mut self, max_hold: Duration) -> Self {
        self.max_hold = Some(max_hold);
        self
    }

    /// How long work under the lock needs to stop. While no renewal succeeds, the loss is signaled
    /// this long before the lock expires, as [`LostReason::Expiring`](crate::LostReason::Expiring),
    /// so that the work has ended when the next holder begins. Zero by default.
    ///
    /// The lock is still held then: drop or release the guard when the work has stopped.
    #[must_use]
    pub fn stop_margin(mut self, margin: Duration) -> Self {
        self.stop_margin = margin;
        self
    }

    /// Ends the wait for the lock with [`ErrorCode::Aborted`](crate::ErrorCode::Aborted) when this
    /// token is cancelled. It does not touch a lock that is held: drop or release its guard.
    #[must_use]
    pub fn cancel(mut self, token: CancellationToken) -> Self {
        self.cancel = Some(token);
        self
    }

    /// How long a release in the background may take before it is reported as failed. Without it,
    /// until the lock is dead anyway.
    #[must_use]
    pub fn release_timeout(mut self, timeout: Duration) -> Self {
        self.release_timeout = Some(timeout);
        self
    }

    /// Hears of releases in the background that failed, timed out or never ran. Without it they
    /// are logged, without key and lock id. A release that found nothing to release is no error.
    ///
    /// It is called on a thread of its own behind a bounded queue, so that a slow one delays no lock;
    /// [`shutdown`](crate::Locker::shutdown) waits until it has returned. A panic in it is ignored.
    #[must_use]
    pub fn on_release_error(
        mut self,
        callback: impl Fn(&Error, &ReleaseContext) + Send + Sync + 'static,
    ) -> Self {
        self.on_release_error = Some(ReleaseErrors::new(callback));
        self
    }

    /// Refuses what makes no sense together.
    pub(crate) fn validate(&self) -> Result<()> {
        if self.renew && self.ttl.as_millis() < 3 {
            return Err(Error::invalid("a ttl below 3 ms is too short to be renewed"));
        }
        let RetryPolicy { delay, max_delay, max_retries, .. } = self.retry_policy();
        if max_delay.is_some_and(|max_delay| max_delay < delay) {
            return Err(Error::invalid("the longest retry delay must not be below the first"));
        }
        if delay.is_zero() && max_retries.is_none() && self.timeout.is_none() {
            return Err(Error::invalid(
                "zero delay with unlimited retries and no timeout would busy-loop",
            ));
        }
        let renewed_after = if self.renew { self.ttl.as_duration() / 3 } else { Duration::ZERO };
        if self.stop_margin.saturating_add(renewed_after) >= self.ttl.as_duration() {
            return Err(Error::invalid(if self.renew {
                "stop_margin must be below two thirds of the ttl, or there is no time to renew"
            } else {
                "stop_margin must be below the ttl"
            }));
        }
        match self.max_hold {
            Some(_) if !self.renew => {
                Err(Error::invalid("max_hold bounds renewal; ask for renewal too"))
            }
            Some(max_hold) if max_hold < self.ttl.as_duration() => {
                Err(Error::invalid("max_hold must not be shorter than the ttl"))
            }
            _ if self.release_timeout == Some(Duration::ZERO) => {
                Err(Error::invalid("release_timeout must be positive"))
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
            .field("ride_out_errors", &self.ride_out_errors)
            .field("renew", &self.renew)
            .field("max_hold", &self.max_hold)
            .field("stop_margin", &self.stop_margin)
            .field("release_timeout", &self.release_timeout)
            .finish_non_exhaustive()
    }
}
