//! Sources of the current time, for backends whose time authority is this machine.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use super::time::Timestamp;
use super::uptime::uptime;

/// A source of wall-clock time that tests can replace.
pub trait Clock: fmt::Debug + Send + Sync + 'static {
    /// Returns the current time.
    fn now(&self) -> Timestamp;
}

/// The wall clock of this machine. It can jump in both directions when it is corrected.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> Timestamp {
        SystemTime::now().into()
    }
}

/// A clock that reads the wall clock once, when you create it, and counts from there.
///
/// * It never jumps: setting the wall clock later does not move it. It may therefore drift away
///   from the wall clock, so use it only for locks that one process sees.
/// * It includes the time that the machine is suspended on Linux, Android, Apple platforms and
///   Windows.
///
/// ```
/// use syncguard::backend::{Clock, MonotonicClock};
///
/// let clock = MonotonicClock::new();
/// let before = clock.now();
/// assert!(clock.now() >= before);
/// ```
#[derive(Clone, Copy, Debug)]
pub struct MonotonicClock {
    wall: Timestamp,
    /// The uptime at which the wall clock was read.
    read_at: Duration,
}

impl MonotonicClock {
    /// Creates a clock that agrees with the wall clock now.
    #[must_use]
    pub fn new() -> Self {
        Self { wall: SystemTime::now().into(), read_at: uptime() }
    }

    fn at(&self, uptime: Duration) -> Timestamp {
        let passed = uptime.saturating_sub(self.read_at);
        let passed_ms = u64::try_from(passed.as_millis()).unwrap_or(u64::MAX);
        Timestamp::from_millis(self.wall.as_millis().saturating_add(passed_ms))
    }
}

impl Default for MonotonicClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for MonotonicClock {
    fn now(&self) -> Timestamp {
        self.at(uptime())
    }
}

/// A clock that moves only when you move it, for tests that need an exact time.
///
/// ```
/// use std::{sync::Arc, time::Duration};
/// use syncguard::backend::{Clock, ManualClock};
///
/// let clock = Arc::new(ManualClock::default());
/// let before = clock.now();
/// clock.advance(Duration::from_secs(1));
/// assert_eq!(clock.now().since(before), Duration::from_secs(1));
/// ```
#[derive(Debug)]
pub struct ManualClock(AtomicU64);

impl ManualClock {
    /// Creates a clock that shows `start`.
    #[must_use]
    pub const fn new(start: Timestamp) -> Self {
        Self(AtomicU64::new(start.as_millis()))
    }

    /// Moves the clock forward by whole milliseconds.
    pub fn advance(&self, by: Duration) {
        let by_ms = u64::try_from(by.as_millis()).unwrap_or(u64::MAX);
        self.0.fetch_add(by_ms, Ordering::SeqCst);
    }

    /// Sets the clock to a time, which may be earlier.
    pub fn set(&self, now: Timestamp) {
        self.0.store(now.as_millis(), Ordering::SeqCst);
    }
}

impl Default for ManualClock {
    /// Creates a clock that starts at a recent time, so that offsets into the past stay positive.
    fn default() -> Self {
        Self::new(Timestamp::from_millis(1_763_232_000_000))
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Timestamp {
        Timestamp::from_millis(self.0.load(Ordering::SeqCst))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_monotonic_clock_counts_from_the_wall_clock_time_it_read() {
        let read_at = Duration::from_secs(100);
        let clock = MonotonicClock { wall: Timestamp::from_millis(5_000), read_at };
        assert_eq!(clock.at(read_at), Timestamp::from_millis(5_000));
        assert_eq!(clock.at(read_at + Duration::from_micros(1_999)).as_millis(), 5_001);
        assert_eq!(clock.at(read_at + Duration::from_secs(7)).as_millis(), 12_000);
        assert_eq!(clock.at(Duration::ZERO).as_millis(), 5_000, "it never goes backwards");
        assert_eq!(clock.at(Duration::MAX).as_millis(), u64::MAX);
    }
}
