//! Where fences come from: a counter alone, or a counter that is at least the clock.

use std::str::FromStr;
use std::time::Duration;

use super::error::{Error, Result};
use super::fence::Fence;
use super::time::Timestamp;
use super::ttl::Ttl;
use super::url_options::UrlOptions;

/// Where the fences of a store come from.
///
/// * [`Counter`](Self::Counter), the default: the first fence of a key is 1, and every grant gets
///   the next number. If the store loses the counter, fences start at 1 again.
/// * [`Clock`](Self::Clock): a grant gets the next number or the time authority's clock in units of
///   0.1 ms, whichever is larger. A counter that is lost starts above every fence that it has
///   granted, and an idle counter may be deleted.
///
/// The stored format is the same, so that programs can switch from one to the other. All programs
/// that share a store must use the same source: one that only counts starts at 1 when it finds no
/// counter. The TypeScript implementation only counts.
///
/// `Clock` relies on the clock: fences can still go backwards if it is set back past a loss, or if
/// a key was granted more than 10,000 times per second, on average, until the loss. While the
/// counter exists, the clock can show anything.
///
/// ```
/// use syncguard::{FenceSource, Locker, MemoryBackend, memory::MemoryConfig};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> syncguard::Result<()> {
/// let config = MemoryConfig::default().fences(FenceSource::Clock); // or "memory:?fences=clock"
/// let locker = Locker::new(MemoryBackend::with_config(config))?;
/// let guard = locker.lock("job").await?;
/// assert!(guard.fence().get() > 17_000_000_000_000);
/// # drop(guard); locker.shutdown().await
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum FenceSource {
    /// Count the grants of a key.
    #[default]
    Counter,
    /// Count the grants of a key, from the time authority's clock on.
    Clock,
}

impl FenceSource {
    /// The shortest time after which an idle counter may be deleted: twice the longest TTL.
    const SHORTEST_AGE: Duration = Ttl::MAX.as_duration().saturating_mul(2);
    /// The longest such time, which keeps all sums in range.
    const LONGEST_AGE: Duration = Duration::from_hours(100 * 366 * 24);

    /// Takes the option `fences` from a URL.
    pub(crate) fn take(options: &mut UrlOptions) -> Result<Self> {
        Ok(options.take_as("fences", "counter or clock")?.unwrap_or_default())
    }

    /// Returns how many fences a millisecond of the clock is worth: 0 if the clock does not count.
    /// A script or statement multiplies the clock by it to get the smallest fence to grant.
    #[must_use]
    pub const fn per_millisecond(self) -> u64 {
        match self {
            Self::Counter => 0,
            Self::Clock => 10,
        }
    }

    /// Fails unless a counter that was idle for this long may be deleted: at least twice
    /// [`Ttl::MAX`].
    pub(crate) fn check_age(idle: Duration) -> Result<()> {
        if idle < Self::SHORTEST_AGE || idle > Self::LONGEST_AGE {
            return Err(Error::invalid(
                "fence counters must be idle for at least 48 hours (twice the longest TTL), and at \
                 most 100 years",
            ));
        }
        Ok(())
    }

    /// Returns the age in milliseconds from which idle counters may be deleted. Fails if they may
    /// not: a counter that is only counted would start at 1 again.
    pub(crate) fn collectable_age_ms(self, idle: Duration) -> Result<u64> {
        if self == Self::Counter {
            return Err(Error::invalid(
                "fence counters cannot be deleted while fences only count: a deleted counter \
                 starts at 1 again; use fences=clock in all programs that share the store",
            ));
        }
        Self::check_age(idle)?;
        Ok(u64::try_from(idle.as_millis()).unwrap_or(u64::MAX))
    }

    /// Returns the fence below which a counter was last used before that age.
    pub(crate) const fn idle_below(self, now: Timestamp, age_ms: u64) -> u64 {
        now.as_millis().saturating_sub(age_ms).saturating_mul(self.per_millisecond())
    }

    /// Returns the fence to grant at a time when the stored counter is `counter`.
    ///
    /// Fails with [`ErrorCode::Internal`](crate::ErrorCode::Internal) above [`Fence::MAX`]. A
    /// backend calls it before it writes, so that the store stays unchanged.
    pub fn next(self, counter: u64, now: Timestamp) -> Result<Fence> {
        let floor = now.as_millis().saturating_mul(self.per_millisecond());
        Fence::after(counter.max(floor.saturating_sub(1)))
    }
}

impl FromStr for FenceSource {
    type Err = Error;

    /// Parses `counter` or `clock`.
    fn from_str(text: &str) -> Result<Self> {
        match text {
            "counter" => Ok(Self::Counter),
            "clock" => Ok(Self::Clock),
            _ => Err(Error::invalid("unknown source of fences; expected counter or clock")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fence_is_the_next_number_or_the_clock() {
        let now = Timestamp::from_millis(1_794_812_298_551);
        let next = |source: FenceSource, counter| source.next(counter, now).expect("granted").get();
        assert_eq!(next(FenceSource::Counter, 0), 1);
        assert_eq!(next(FenceSource::Counter, 41), 42);
        assert_eq!(next(FenceSource::Clock, 0), 17_948_122_985_510);
        assert_eq!(next(FenceSource::Clock, 17_948_122_985_509), 17_948_122_985_510);
        assert_eq!(next(FenceSource::Clock, 17_948_122_985_510), 17_948_122_985_511);
        assert_eq!(next(FenceSource::Clock, 20_000_000_000_000), 20_000_000_000_001);
    }

    #[test]
    fn a_counter_may_go_after_two_days_to_a_hundred_years() {
        let (shortest, longest) = (Duration::from_hours(48), Duration::from_hours(878_400));
        let moment = Duration::from_nanos(1);
        for (idle, may_go) in [
            (shortest, true),
            (longest, true),
            (shortest.saturating_sub(moment), false),
            (longest + moment, false),
        ] {
            assert_eq!(FenceSource::check_age(idle).is_ok(), may_go, "{idle:?}");
        }
    }

    #[test]
    fn the_end_of_the_range_is_an_error_for_both() {
        let now = Timestamp::from_millis(1_794_812_298_551);
        for source in [FenceSource::Counter, FenceSource::Clock] {
            assert_eq!(source.next(Fence::MAX.get() - 1, now).expect("the last"), Fence::MAX);
            assert!(source.next(Fence::MAX.get(), now).is_err());
        }
        let last = Timestamp::from_millis(Fence::MAX.get() / 10);
        assert_eq!(FenceSource::Clock.next(0, last).expect("the last"), Fence::MAX);
        for ms in [Fence::MAX.get() / 10 + 1, u64::MAX] {
            let after = Timestamp::from_millis(ms);
            assert!(FenceSource::Clock.next(0, after).is_err(), "a clock past the range");
            assert_eq!(FenceSource::Counter.next(0, after).expect("counts"), Fence::FIRST);
        }
    }

    #[test]
    fn only_counters_that_the_clock_replaces_may_be_deleted() {
        let (day, now) = (Duration::from_hours(24), Timestamp::from_millis(1_794_812_298_551));
        let refused = FenceSource::Counter.collectable_age_ms(7 * day).expect_err("refused");
        assert!(refused.message().contains("fences=clock"), "{refused}");
        for bad in [Duration::ZERO, Duration::from_secs(2 * 86_400 - 1), Duration::MAX] {
            assert!(FenceSource::Clock.collectable_age_ms(bad).is_err(), "{bad:?}");
        }
        let age_ms = FenceSource::Clock.collectable_age_ms(2 * day).expect("two days");
        let then = Timestamp::from_millis(now.as_millis() - age_ms);
        let limit = FenceSource::Clock.idle_below(now, age_ms);
        assert_eq!(FenceSource::Clock.next(0, then).expect("granted").get(), limit);
        assert_eq!(FenceSource::Clock.idle_below(Timestamp::from_millis(1), age_ms), 0);
    }

    #[test]
    fn only_two_sources_are_known() {
        let parse = |url| FenceSource::take(&mut UrlOptions::split(url).expect("a URL").1);
        assert_eq!(parse("x:").expect("the default"), FenceSource::Counter);
        assert_eq!(parse("x:?fences=counter").expect("known"), FenceSource::Counter);
        assert_eq!(parse("x:?fences=clock").expect("known"), FenceSource::Clock);
        for bad in ["x:?fences=", "x:?fences=Clock", "x:?fences=1", "x:?fences=clock&fences=clock"]
        {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
