//! The time to live of a lock.

use std::time::Duration;

use super::error::{Error, Result};

/// How long a lock lives without being extended, in milliseconds.
///
/// * A TTL is positive and at most 24 hours ([`Ttl::MAX`]). [`Ttl::with_limit`] takes a limit of
///   your own. Stored locks with a longer TTL are read and honored.
/// * Prefer a short TTL (10 to 60 seconds): a crashed holder blocks others for this long and one
///   second. Extend the lock for longer work, yourself or by
///   [renewal](crate::LockOptions::renew).
/// * A fraction of a millisecond is rounded up.
///
/// ```
/// use std::time::Duration;
/// use syncguard::Ttl;
///
/// assert_eq!(Ttl::default(), Ttl::new(Duration::from_secs(30))?);
/// assert!(Ttl::new(Duration::ZERO).is_err());
/// assert!(Ttl::new(Duration::from_secs(7 * 86_400)).is_err(), "over a day");
/// assert_eq!(Ttl::new(Duration::from_micros(1500))?, Ttl::from_millis(2));
///
/// const NIGHTLY: Ttl = Ttl::from_secs(60);
/// # Ok::<(), syncguard::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ttl(u64);

impl Ttl {
    /// The default TTL of a lock: 30 seconds.
    pub const DEFAULT: Self = Self(30_000);
    /// The longest TTL that [`Ttl::new`] accepts: 24 hours.
    pub const MAX: Self = Self(24 * 60 * 60 * 1000);

    /// The upper bound of every limit. It keeps expiry times below 10¹⁴ ms, where the JSON encoder
    /// of Redis starts to round.
    const ABSOLUTE_MAX_MS: u64 = 10_000_000_000_000;

    /// Creates a TTL of whole seconds, for constants.
    ///
    /// # Panics
    ///
    /// If it is zero or more than [`Ttl::MAX`]; in a constant this is a compile-time error. Use
    /// [`Ttl::new`] for values that are only known at run time.
    #[must_use]
    pub const fn from_secs(secs: u64) -> Self {
        Self::from_millis(secs.saturating_mul(1000))
    }

    /// Creates a TTL of whole milliseconds, for constants.
    ///
    /// # Panics
    ///
    /// If it is zero or more than [`Ttl::MAX`], like [`from_secs`](Self::from_secs).
    #[must_use]
    pub const fn from_millis(ms: u64) -> Self {
        assert!(ms > 0 && ms <= Self::MAX.0, "a TTL must be positive and at most 24 hours");
        Self(ms)
    }

    /// Creates a TTL of at most [`Ttl::MAX`].
    pub fn new(ttl: Duration) -> Result<Self> {
        Self::with_limit(ttl, Self::MAX.as_duration())
    }

    /// Creates a TTL of at most `limit`, which may be above [`Ttl::MAX`].
    pub fn with_limit(ttl: Duration, limit: Duration) -> Result<Self> {
        if ttl.is_zero() {
            return Err(Error::invalid("a TTL must be greater than zero"));
        }
        match u64::try_from(ttl.as_nanos().div_ceil(1_000_000)) {
            Ok(ms) if ttl <= limit && ms <= Self::ABSOLUTE_MAX_MS => Ok(Self(ms)),
            _ => {
                let limit = limit.min(Duration::from_millis(Self::ABSOLUTE_MAX_MS));
                Err(Error::invalid(format!(
                    "a TTL must not exceed {limit:?}; use a shorter one and renew it, or raise the \
                     limit"
                )))
            }
        }
    }

    /// Returns the TTL in milliseconds.
    #[must_use]
    pub const fn as_millis(self) -> u64 {
        self.0
    }

    /// Returns the TTL as a duration.
    #[must_use]
    pub const fn as_duration(self) -> Duration {
        Duration::from_millis(self.0)
    }

    /// Returns the smaller of this TTL and `left`, but at least a millisecond.
    pub(crate) fn at_most(self, left: Duration) -> Self {
        Self(self.0.min(Self::rest(left).0))
    }

    /// Returns what is left of a TTL, but at least a millisecond.
    pub(crate) fn rest(left: Duration) -> Self {
        let left_ms = u64::try_from(left.as_millis()).unwrap_or(u64::MAX);
        Self(left_ms.max(1))
    }
}

impl Default for Ttl {
    fn default() -> Self {
        Self::DEFAULT
    }
}

impl TryFrom<Duration> for Ttl {
    type Error = Error;

    fn try_from(ttl: Duration) -> Result<Self> {
        Self::new(ttl)
    }
}

/// Serializes a TTL as milliseconds.
#[cfg(feature = "serde")]
impl serde::Serialize for Ttl {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(self.0)
    }
}

#[cfg(feature = "serde")]
impl<'de> serde::Deserialize<'de> for Ttl {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let ms = u64::deserialize(deserializer)?;
        Self::new(Duration::from_millis(ms)).map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ttls_outside_their_bounds_are_refused() {
        let ms = Duration::from_millis;
        assert_eq!(Ttl::new(ms(1)).expect("shortest").as_millis(), 1);
        assert_eq!(Ttl::new(Ttl::MAX.as_duration()).expect("longest"), Ttl::MAX);
        assert!(Ttl::new(Ttl::MAX.as_duration() + ms(1)).is_err());
        assert!(Ttl::new(Duration::MAX).is_err());
        assert!(Ttl::with_limit(ms(Ttl::MAX.as_millis() + 1), Duration::MAX).is_ok());
        assert!(Ttl::with_limit(ms(Ttl::ABSOLUTE_MAX_MS + 1), Duration::MAX).is_err());
        assert!(Ttl::with_limit(ms(5), ms(4)).is_err());
        assert_eq!(Ttl::new(Duration::from_nanos(1)).expect("rounded up").as_millis(), 1);
    }

    #[test]
    fn at_most_returns_the_smaller_of_both() {
        assert_eq!(Ttl::DEFAULT.at_most(Duration::from_secs(5)).as_millis(), 5_000);
        assert_eq!(Ttl::DEFAULT.at_most(Duration::MAX), Ttl::DEFAULT);
        assert_eq!(Ttl::DEFAULT.at_most(Duration::ZERO).as_millis(), 1);
    }
}
