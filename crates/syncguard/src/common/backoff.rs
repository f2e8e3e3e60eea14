//! Jitter, and the delay before reconnecting.

#[cfg(feature = "_network")]
use std::time::Duration;

/// Returns a random number in `0.0..=1.0`.
pub(crate) fn random_fraction() -> f64 {
    // Without randomness there is no jitter, but nothing fails.
    f64::from(getrandom::u32().unwrap_or(u32::MAX / 2)) / f64::from(u32::MAX)
}

/// Returns how long to wait before reconnecting after `failures` failures in a row.
///
/// The delay is zero without a failure, then up to 20 ms, doubled each time, at most a second. It
/// has full jitter, so that clients do not all connect at once when a server comes back.
#[cfg(feature = "_network")]
pub(crate) fn reconnect_delay(failures: u32) -> Duration {
    const FIRST: Duration = Duration::from_millis(20);
    const LONGEST: Duration = Duration::from_secs(1);
    match failures.checked_sub(1) {
        None => Duration::ZERO,
        Some(doublings) => {
            let longest = FIRST.saturating_mul(2_u32.saturating_pow(doublings)).min(LONGEST);
            longest.mul_f64(random_fraction())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_random_fraction_is_between_zero_and_one() {
        let fractions: Vec<f64> = (0..100).map(|_| random_fraction()).collect();
        assert!(fractions.iter().all(|fraction| (0.0..=1.0).contains(fraction)), "{fractions:?}");
        assert!(fractions.iter().any(|fraction| *fraction > 0.1), "{fractions:?}");
    }

    #[cfg(feature = "_network")]
    #[test]
    fn delays_grow_and_stay_bounded() {
        assert_eq!(reconnect_delay(0), Duration::ZERO);
        for failures in 1..100 {
            assert!(reconnect_delay(failures) <= Duration::from_secs(1));
        }
        assert!(reconnect_delay(1) <= Duration::from_millis(20));
        assert!((0..100).any(|_| reconnect_delay(u32::MAX) > Duration::from_millis(100)));
    }
}
