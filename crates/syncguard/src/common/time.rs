//! Points in time as stores keep them, and the one rule that decides whether a lock is alive.

use std::fmt;
use std::time::{Duration, SystemTime};

use super::ttl::Ttl;

/// How long after its expiry a lock still counts as held, in milliseconds.
///
/// The one tolerance of every backend, in every operation. Scripts and SQL get it as a parameter
/// from here; it cannot be configured.
pub const TIME_TOLERANCE_MS: u64 = 1000;

/// How long a record must have been expired before an opportunistic cleanup may delete it, in
/// milliseconds.
pub const CLEANUP_GUARD_MS: u64 = 2000;

const _: () = assert!(
    CLEANUP_GUARD_MS > TIME_TOLERANCE_MS,
    "a cleanup must never touch a lock that may still count as held"
);

/// A point in time as stores keep it: milliseconds since the Unix epoch, by the time authority of
/// the backend that made it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(transparent))]
pub struct Timestamp(u64);

impl Timestamp {
    /// A point in time by its milliseconds since the Unix epoch.
    #[must_use]
    pub const fn from_millis(unix_ms: u64) -> Self {
        Self(unix_ms)
    }

    /// Milliseconds since the Unix epoch.
    #[must_use]
    pub const fn as_millis(self) -> u64 {
        self.0
    }

    /// When a lock taken or extended at this time expires.
    #[must_use]
    pub const fn expiry(self, ttl: Ttl) -> Self {
        Self(self.0.saturating_add(ttl.as_millis()))
    }

    /// How long after `earlier` this is; zero if it is not after.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Duration {
        Duration::from_millis(self.0.saturating_sub(earlier.0))
    }

    /// How long after `now` a lock that expires at this time is dead by [`is_live`].
    #[must_use]
    pub const fn dead_in(self, now: Self) -> Duration {
        Self(self.0.saturating_add(TIME_TOLERANCE_MS)).since(now)
    }
}

impl fmt::Debug for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ms", self.0)
    }
}

impl From<SystemTime> for Timestamp {
    /// Times before the epoch become the epoch.
    fn from(time: SystemTime) -> Self {
        let since_epoch = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Self(u64::try_from(since_epoch.as_millis()).unwrap_or(u64::MAX))
    }
}

impl From<Timestamp> for SystemTime {
    fn from(timestamp: Timestamp) -> Self {
        Self::UNIX_EPOCH + Duration::from_millis(timestamp.0)
    }
}

/// The one predicate of liveness: a lock is held until [`TIME_TOLERANCE_MS`] after its expiry.
///
/// Both times come from the backend's time authority. A lock that this calls dead can never be
/// extended again; one that it calls live can.
///
/// ```
/// use syncguard::{Timestamp, is_live};
///
/// let expires_at = Timestamp::from_millis(5_000);
/// assert!(is_live(expires_at, Timestamp::from_millis(5_999)));
/// assert!(!is_live(expires_at, Timestamp::from_millis(6_000)));
/// ```
#[must_use]
pub const fn is_live(expires_at: Timestamp, now: Timestamp) -> bool {
    // The sum instead of `expires_at > now - tolerance`: it needs no signed numbers.
    expires_at.0.saturating_add(TIME_TOLERANCE_MS) > now.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dead_in_ends_exactly_when_the_lock_is_dead() {
        let expires_at = Timestamp::from_millis(10_000);
        for now_ms in [0, 9_999, 10_000, 10_999, 11_000, 50_000] {
            let now = Timestamp::from_millis(now_ms);
            let left_ms = u64::try_from(expires_at.dead_in(now).as_millis()).expect("small");
            assert!(!is_live(expires_at, Timestamp::from_millis(now_ms + left_ms)));
            if left_ms > 0 {
                assert!(is_live(expires_at, Timestamp::from_millis(now_ms + left_ms - 1)));
            }
        }
    }

    #[test]
    fn extreme_times_do_not_overflow() {
        let end = Timestamp::from_millis(u64::MAX);
        assert_eq!(end.expiry(Ttl::MAX), end);
        assert!(is_live(end, Timestamp::from_millis(u64::MAX - 1)));
        let epoch: SystemTime = Timestamp::from(SystemTime::UNIX_EPOCH).into();
        assert_eq!(SystemTime::UNIX_EPOCH, epoch);
    }
}
