//! How long a lock lives without being extended.

use std::time::Duration;

use super::error::{Error, Result};

/// The time to live of a lock: positive whole milliseconds, at most a day unless raised.
///
/// * Short is good (10 to 60 seconds): a crashed holder blocks others for at most this long.
///   Long work extends its lock, by hand or by [renewal](crate::LockOptions::renew).
/// * [`Ttl::new`] refuses more than [`Ttl::MAX`]; [`Ttl::with_limit`] raises the limit for those
///   who mean it. Records of others with a longer life are read and honoured.
///
/// ```
/// use std::time::Duration;
/// use syncguard::Ttl;
///
/// assert_eq!(Ttl::default(), Ttl::new(Duration::from_secs(30))?);
/// assert!(Ttl::new(Duration::ZERO).is_err());
/// assert!(Ttl::new(Duration::from_micros(1500)).is_err(), "whole milliseconds only");
/// assert!(Ttl::new(Duration::from_secs(7 * 86_400)).is_err(), "over a day");
/// # Ok::<(), syncguard::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ttl(u64);

impl Ttl {
    /// The TTL that locks have unless told otherwise: 30 seconds.
    pub const DEFAULT: Self = Self(30_000);
    /// The longest TTL that [`Ttl::new`] takes: 24 hours.
    pub const MAX: Self = Self(24 * 60 * 60 * 1000);

    /// No limit can be raised above this. It keeps expiry times below 10¹⁴ ms, where Redis' JSON
    /// encoder starts to round.
    const ABSOLUTE_MAX_MS: u64 = 10_000_000_000_000;

    /// Checks a TTL of at most [`Ttl::MAX`].
    pub fn new(ttl: Duration) -> Result<Self> {
        Self::with_limit(ttl, Self::MAX.as_duration())
    }

    /// Checks a TTL against a limit of the caller's own, which may be above [`Ttl::MAX`].
    pub fn with_limit(ttl: Duration, limit: Duration) -> Result<Self> {
        if ttl.is_zero() {
            return Err(Error::invalid("ttl must be positive"));
        }
        if !ttl.subsec_nanos().is_multiple_of(1_000_000) {
            return Err(Error::invalid("ttl must be a whole number of milliseconds"));
        }
        match u64::try_from(ttl.as_millis()) {
            Ok(ms) if ttl <= limit && ms <= Self::ABSOLUTE_MAX_MS => Ok(Self(ms)),
            _ => Err(Error::invalid(format!(
                "ttl exceeds the limit of {} ms",
                limit.as_millis().min(u128::from(Self::ABSOLUTE_MAX_MS))
            ))),
        }
    }

    /// The TTL in milliseconds.
    #[must_use]
    pub const fn as_millis(self) -> u64 {
        self.0
    }

    /// The TTL as a duration.
    #[must_use]
    pub const fn as_duration(self) -> Duration {
        Duration::from_millis(self.0)
    }

    /// This TTL, or what is left when that is less. Never below a millisecond.
    pub(crate) fn at_most(self, left: Duration) -> Self {
        let left_ms = u64::try_from(left.as_millis()).unwrap_or(u64::MAX);
        Self(self.0.min(left_ms).max(1))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds() {
        let ms = Duration::from_millis;
        assert_eq!(Ttl::new(ms(1)).expect("shortest").as_millis(), 1);
        assert_eq!(Ttl::new(Ttl::MAX.as_duration()).expect("longest"), Ttl::MAX);
        assert!(Ttl::new(Ttl::MAX.as_duration() + ms(1)).is_err());
        assert!(Ttl::new(Duration::MAX).is_err());
        assert!(Ttl::with_limit(ms(Ttl::MAX.as_millis() + 1), Duration::MAX).is_ok());
        assert!(Ttl::with_limit(ms(Ttl::ABSOLUTE_MAX_MS + 1), Duration::MAX).is_err());
        assert!(Ttl::with_limit(ms(5), ms(4)).is_err());
    }

    #[test]
    fn cut_to_what_is_left() {
        assert_eq!(Ttl::DEFAULT.at_most(Duration::from_secs(5)).as_millis(), 5_000);
        assert_eq!(Ttl::DEFAULT.at_most(Duration::MAX), Ttl::DEFAULT);
        assert_eq!(Ttl::DEFAULT.at_most(Duration::ZERO).as_millis(), 1);
    }
}
