//! Points in time as stores keep them, and the rule that decides whether a lock is alive.

use std::fmt;
use std::time::{Duration, SystemTime};

use super::ttl::Ttl;

/// How long after its expiry a lock still counts as held, in milliseconds.
///
/// Every backend uses this tolerance in every operation. Scripts and SQL statements get it as a
/// parameter. You cannot configure it.
pub const TIME_TOLERANCE_MS: u64 = 1000;

/// How long after its expiry an opportunistic cleanup may delete a record, in milliseconds.
pub const CLEANUP_GUARD_MS: u64 = 2000;

const _: () = assert!(
    CLEANUP_GUARD_MS > TIME_TOLERANCE_MS,
    "a cleanup must never touch a lock that may still count as held"
);

/// A point in time as stores keep it: milliseconds since the Unix epoch, by the backend's time
/// authority.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(transparent))]
pub struct Timestamp(u64);

impl Timestamp {
    /// Creates a timestamp from milliseconds since the Unix epoch.
    #[must_use]
    pub const fn from_millis(unix_ms: u64) -> Self {
        Self(unix_ms)
    }

    /// Returns the milliseconds since the Unix epoch.
    #[must_use]
    pub const fn as_millis(self) -> u64 {
        self.0
    }

    /// Returns when a lock that is acquired or extended at this time expires.
    #[must_use]
    pub const fn expiry(self, ttl: Ttl) -> Self {
        Self(self.0.saturating_add(ttl.as_millis()))
    }

    /// Returns the time since `earlier`, or zero if `earlier` is later than this.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Duration {
        Duration::from_millis(self.0.saturating_sub(earlier.0))
    }

    /// Returns how long after `now` a lock that expires at this time is dead by [`is_live`].
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
    /// Converts a system time; a time before the epoch becomes the epoch.
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

/// Returns whether a lock is live: it is held until [`TIME_TOLERANCE_MS`] after its expiry.
///
/// Both times come from the backend's time authority. You can extend a live lock, but never a dead
/// one.
///
/// ```
/// use syncguard::Timestamp;
/// use syncguard::backend::is_live;
///
/// let expires_at = Timestamp::from_millis(5_000);
/// assert!(is_live(expires_at, Timestamp::from_millis(5_999)));
/// assert!(!is_live(expires_at, Timestamp::from_millis(6_000)));
/// ```
#[must_use]
pub const fn is_live(expires_at: Timestamp, now: Timestamp) -> bool {
    // A sum instead of `expires_at > now - tolerance`, which would need signed numbers.
    expires_at.0.saturating_add(TIME_TOLERANCE_MS) > now.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timestamp_is_a_system_time_and_shows_its_milliseconds() {
        let timestamp = Timestamp::from_millis(1_500);
        let time = SystemTime::from(timestamp);
        assert_eq!(time, SystemTime::UNIX_EPOCH + Duration::from_millis(1_500));
        assert_eq!(Timestamp::from(time), timestamp);
        assert_eq!(format!("{timestamp:?}"), "1500 ms");
    }

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
