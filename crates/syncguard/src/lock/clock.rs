//! The clock that the engine uses for validity and timeouts.

use std::fmt;
use std::future::pending;
use std::ops::{Add, Sub};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::time::{Instant, Sleep};

use crate::common::uptime::uptime;

/// The clock that a [`Locker`](crate::Locker) uses for validity and timeouts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum LocalClock {
    /// A monotonic clock that keeps counting while the machine is suspended: a laptop that sleeps
    /// through the TTL detects on wake that its lock has expired.
    #[default]
    SuspendAware,
    /// Tokio's clock, which a test can pause and advance.
    Tokio,
}

/// A running [`LocalClock`]. It uses the timers of the locker's own runtime, so that a guard can be
/// waited on from any runtime.
#[derive(Clone, Debug)]
pub(crate) struct Ticker {
    kind: LocalClock,
    origin: Instant,
    runtime: Handle,
}

/// A point in time of one [`Ticker`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct LocalInstant(Duration);

impl LocalInstant {
    /// A point in time for tests that need no clock.
    #[cfg(test)]
    pub(crate) const fn from_start(elapsed: Duration) -> Self {
        Self(elapsed)
    }

    pub(crate) fn since(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }
}

impl Add<Duration> for LocalInstant {
    type Output = Self;

    fn add(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(duration))
    }
}

impl Sub<Duration> for LocalInstant {
    type Output = Self;

    fn sub(self, duration: Duration) -> Self {
        Self(self.0.saturating_sub(duration))
    }
}

impl fmt::Debug for LocalInstant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Ticker {
    /// The longest single sleep. Tokio's timers stop while the machine is suspended; sleeping in
    /// slices limits how late a deadline that passed in the meantime is noticed.
    const SLICE: Duration = Duration::from_secs(1);

    pub(crate) fn new(kind: LocalClock, runtime: Handle) -> Self {
        Self { kind, origin: Instant::now(), runtime }
    }

    pub(crate) fn now(&self) -> LocalInstant {
        LocalInstant(match self.kind {
            LocalClock::SuspendAware => uptime(),
            LocalClock::Tokio => self.origin.elapsed(),
        })
    }

    pub(crate) async fn sleep_until(&self, deadline: LocalInstant) {
        loop {
            let left = deadline.since(self.now());
            if left.is_zero() {
                return;
            }
            self.sleep(match self.kind {
                LocalClock::SuspendAware => left.min(Self::SLICE),
                LocalClock::Tokio => left,
            })
            .await;
        }
    }

    /// Sleeps by tokio's clock.
    pub(crate) fn sleep(&self, duration: Duration) -> Sleep {
        let _inside = self.runtime.enter();
        tokio::time::sleep(duration)
    }

    pub(crate) async fn sleep_until_some(&self, deadline: Option<LocalInstant>) {
        match deadline {
            Some(deadline) => self.sleep_until(deadline).await,
            None => pending().await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ticker(kind: LocalClock) -> Ticker {
        Ticker::new(kind, Handle::current())
    }

    #[tokio::test(start_paused = true)]
    async fn tokio_time_can_be_moved_and_real_time_cannot() {
        let (moved, real) = (ticker(LocalClock::Tokio), ticker(LocalClock::SuspendAware));
        let (moved_before, real_before) = (moved.now(), real.now());
        tokio::time::advance(Duration::from_hours(1)).await;
        assert_eq!(moved.now().since(moved_before), Duration::from_hours(1));
        assert!(real.now().since(real_before) < Duration::from_mins(1));
    }

    #[tokio::test(start_paused = true)]
    async fn sleeping_ends_at_the_deadline() {
        let ticker = ticker(LocalClock::Tokio);
        let start = ticker.now();
        ticker.sleep_until(start + Duration::from_millis(1500)).await;
        assert_eq!(ticker.now().since(start), Duration::from_millis(1500));
    }
}
