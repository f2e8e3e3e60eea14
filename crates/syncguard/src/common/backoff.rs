//! Chance, and how long to wait before one connects again.

#[cfg(any(feature = "firestore", feature = "postgres", feature = "redis"))]
use std::time::Duration;

/// A random number in `0.0..=1.0`.
pub(crate) fn random_fraction() -> f64 {
    // Without randomness there is no jitter, which is no reason to fail.
    f64::from(getrandom::u32().unwrap_or(u32::MAX / 2)) / f64::from(u32::MAX)
}

/// How long to wait before connecting again after so many failures in a row: nothing at first, then
/// up to 20 ms, doubled each time, at most a second. The whole of it is jitter, so that the clients
/// of a server that comes back do not come all at once.
#[cfg(any(feature = "firestore", feature = "postgres", feature = "redis"))]
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

#[cfg(all(test, any(feature = "firestore", feature = "postgres", feature = "redis")))]
mod tests {
    use super::*;

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
