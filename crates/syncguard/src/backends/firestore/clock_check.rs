//! The clock check: compares this machine's clock with the server's.
//!
//! Each client decides by its own clock whether a lock is live, so two clocks that differ by more
//! than the tolerance can give two clients the same lock. Every response contains the server's
//! time, so the comparison needs no extra request.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::error;
use crate::common::error::Result;
use crate::common::time::Timestamp;

/// How far the clock may differ from the server's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Limits {
    /// Above this, a warning is logged.
    pub(super) warn: Duration,
    /// Above this, nothing is granted or extended.
    pub(super) refuse: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        // Two clients may be off in opposite directions, and the tolerance is one second.
        Self { warn: Duration::from_millis(250), refuse: Duration::from_millis(500) }
    }
}

/// Compares the clock with the server's and remembers the best comparison.
#[derive(Debug)]
pub(super) struct ClockCheck {
    limits: Option<Limits>,
    state: Mutex<ClockState>,
}

#[derive(Debug, Default)]
struct ClockState {
    known: Option<Sample>,
    last_warning: Option<Instant>,
}

/// A moment by two clocks: the wall clock, and a monotonic one that cannot be set.
#[derive(Clone, Copy, Debug)]
pub(super) struct Moment {
    pub(super) wall: Timestamp,
    pub(super) steady: Instant,
}

impl Moment {
    /// Returns the time since `earlier` by the monotonic clock, and by how much the wall clock
    /// disagrees. It does if it was set or if the machine was suspended.
    fn since(self, earlier: Self) -> (i64, i64) {
        let steady = whole(self.steady.saturating_duration_since(earlier.steady));
        let wall = signed(self.wall).saturating_sub(signed(earlier.wall));
        (steady, wall.saturating_sub(steady).saturating_abs())
    }
}

/// One comparison with the server's clock, in milliseconds.
#[derive(Clone, Copy, Debug)]
struct Sample {
    /// How far this machine's clock is ahead.
    ahead: i64,
    /// Half the round trip, plus any disagreement of the two local clocks.
    uncertainty: i64,
    taken: Moment,
}

impl Sample {
    /// Returns the uncertainty at a later moment. It grows because the clock may drift by a
    /// millisecond per second and may have been set.
    fn uncertainty_at(&self, now: Moment) -> i64 {
        let (age, disagreement) = now.since(self.taken);
        self.uncertainty.saturating_add(age / 1000).saturating_add(disagreement)
    }

    /// Returns the largest possible error.
    fn worst_at(&self, now: Moment) -> i64 {
        self.ahead.saturating_abs().saturating_add(self.uncertainty_at(now))
    }
}

fn whole(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}

fn signed(time: Timestamp) -> i64 {
    i64::try_from(time.as_millis()).unwrap_or(i64::MAX)
}

impl ClockCheck {
    pub(super) fn new(limits: Option<Limits>) -> Self {
        Self { limits, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, ClockState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that the server's clock showed `server` at a moment between `sent` and `received`.
    pub(super) fn note(&self, server: Timestamp, sent: Moment, received: Moment) {
        let (took, disagreement) = received.since(sent);
        let sample = Sample {
            ahead: signed(received.wall).saturating_sub(took / 2).saturating_sub(signed(server)),
            uncertainty: (took / 2 + 1).saturating_add(disagreement),
            taken: received,
        };
        let mut state = self.state();
        let is_first = state.known.is_none();
        // A fast response is more precise than a slow one, unless the two contradict each other.
        let is_better = state.known.is_none_or(|known| {
            let uncertainty = known.uncertainty_at(received);
            let reach = uncertainty.saturating_add(sample.uncertainty);
            sample.uncertainty <= uncertainty
                || sample.ahead.saturating_sub(known.ahead).saturating_abs() > reach
        });
        if is_better {
            state.known = Some(sample);
        }
        // The first response is imprecise, because it includes the time to connect.
        if !is_first {
            self.warn(&mut state, received);
        }
    }

    fn warn(&self, state: &mut ClockState, now: Moment) {
        const INTERVAL: Duration = Duration::from_mins(1);
        let (Some(limits), Some(known)) = (self.limits, state.known) else { return };
        let is_due = state.last_warning.is_none_or(|last| last.elapsed() >= INTERVAL);
        if known.worst_at(now) > whole(limits.warn) && is_due {
            state.last_warning = Some(Instant::now());
            tracing::warn!(
                ahead_ms = known.ahead,
                uncertainty_ms = known.uncertainty_at(now),
                "the clock of this machine differs from Firestore's; synchronize it (NTP)"
            );
        }
    }

    /// Fails if the clock may differ by more than the limit.
    pub(super) fn approve(&self, now: Moment) -> Result<()> {
        let known = self.state().known;
        match (self.limits, known) {
            (Some(limits), Some(known)) if known.worst_at(now) > whole(limits.refuse) => {
                Err(error::clock_is_off(known.ahead, known.uncertainty_at(now)))
            }
            _ => Ok(()),
        }
    }

    /// Returns the earliest time that the server's clock can show, or `None` without a comparison
    /// or limits.
    pub(super) fn earliest_server_time(&self, now: Moment) -> Option<Timestamp> {
        self.limits?;
        let known = self.state().known?;
        let latest_lead = known.ahead.saturating_add(known.uncertainty_at(now));
        let earliest = signed(now.wall).saturating_sub(latest_lead);
        u64::try_from(earliest).ok().map(Timestamp::from_millis)
    }

    /// Returns how far the clock may be off at most, if it was compared, and whether that is above
    /// the warning limit.
    pub(super) fn worst(&self, now: Moment) -> Option<(Duration, bool)> {
        let worst = self.state().known?.worst_at(now);
        let limits = self.limits.unwrap_or_default();
        let duration = Duration::from_millis(worst.unsigned_abs());
        Some((duration, worst > whole(limits.warn)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates moments of a wall clock and a monotonic one.
    struct Clocks(Instant);

    impl Clocks {
        fn new() -> Self {
            Self(Instant::now())
        }

        /// Returns a moment at which both clocks agree.
        fn at(&self, millis: u64) -> Moment {
            self.at_both(millis, millis)
        }

        fn at_both(&self, wall: u64, steady: u64) -> Moment {
            Moment { wall: time(wall), steady: self.0 + Duration::from_millis(steady) }
        }
    }

    fn time(millis: u64) -> Timestamp {
        Timestamp::from_millis(1_000_000 + millis)
    }

    #[test]
    fn a_clock_that_is_off_in_either_direction_is_refused() {
        let clocks = Clocks::new();
        let cases = [(1000, true), (1450, true), (550, true), (1550, false), (450, false)];
        for (server, is_fine) in cases {
            let check = ClockCheck::new(Some(Limits::default()));
            check.approve(clocks.at(1000)).expect("not compared yet");
            check.note(time(server), clocks.at(1000), clocks.at(1010));
            assert_eq!(check.approve(clocks.at(1010)).is_ok(), is_fine, "{server}");
            let off = ClockCheck::new(None);
            off.note(time(server), clocks.at(1000), clocks.at(1010));
            off.approve(clocks.at(1010)).expect("the check is off");
        }
    }

    #[test]
    fn half_the_round_trip_counts_as_error() {
        let (clocks, check) = (Clocks::new(), ClockCheck::new(Some(Limits::default())));
        check.note(time(1600), clocks.at(1000), clocks.at(2200));
        assert!(check.approve(clocks.at(2200)).is_err());
        // A fast response settles it; another slow one that agrees changes nothing.
        check.note(time(3005), clocks.at(3000), clocks.at(3010));
        check.approve(clocks.at(3010)).expect("precise now");
        check.note(time(5000), clocks.at(4000), clocks.at(6000));
        check.approve(clocks.at(6000)).expect("still precise");
    }

    #[test]
    fn a_clock_that_was_set_is_not_trusted_until_it_is_compared() {
        let (clocks, check) = (Clocks::new(), ClockCheck::new(Some(Limits::default())));
        check.note(time(1005), clocks.at(1000), clocks.at(1010));
        check.approve(clocks.at(2000)).expect("it was compared");
        for wall in [1000, 3000, 60_000] {
            // A second later, the wall clock shows another time than it should.
            assert!(check.approve(clocks.at_both(wall, 2000)).is_err(), "{wall}");
        }
        // Another comparison shows whether it is really off.
        check.note(time(2105), clocks.at_both(2100, 2100), clocks.at_both(2110, 2110));
        check.approve(clocks.at(2200)).expect("set back");
        check.note(time(3005), clocks.at_both(9000, 3000), clocks.at_both(9010, 3010));
        assert!(check.approve(clocks.at_both(9010, 3010)).is_err());
    }

    #[test]
    fn a_clock_that_is_set_during_a_request_is_not_trusted() {
        let (clocks, check) = (Clocks::new(), ClockCheck::new(Some(Limits::default())));
        check.note(time(1005), clocks.at(1000), clocks.at_both(210, 1010));
        assert!(check.approve(clocks.at_both(210, 1010)).is_err());
    }

    #[test]
    fn the_server_time_reveals_clocks_that_stood_still_together() {
        let (clocks, check) = (Clocks::new(), ClockCheck::new(Some(Limits::default())));
        check.note(time(1005), clocks.at(1000), clocks.at(1010));
        // A minute passes elsewhere, and no local clock shows it.
        check.approve(clocks.at(1020)).expect("no difference is known");
        check.note(time(61_025), clocks.at(1020), clocks.at(1030));
        assert!(check.approve(clocks.at(1030)).is_err());
        let earliest = check.earliest_server_time(clocks.at(1030)).expect("compared");
        assert!(earliest > time(61_000) && earliest <= time(61_030), "{earliest:?}");
        assert_eq!(ClockCheck::new(None).earliest_server_time(clocks.at(1030)), None);
    }

    #[test]
    fn an_old_comparison_is_uncertain() {
        let (clocks, check) = (Clocks::new(), ClockCheck::new(Some(Limits::default())));
        check.note(time(1005), clocks.at(1000), clocks.at(1010));
        check.approve(clocks.at(400_000)).expect("drifted a little");
        assert!(check.approve(clocks.at(600_000)).is_err());
        let (worst, is_worth_telling) = check.worst(clocks.at(600_000)).expect("known");
        assert!(is_worth_telling && worst > Duration::from_millis(500));
    }
}
