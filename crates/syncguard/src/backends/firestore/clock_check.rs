//! Whether the clock of this machine can be trusted.
//!
//! Liveness is judged by every client's own clock here, so two clocks that differ by more than the
//! tolerance break a lock. Every answer carries the server's time, which costs nothing.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::error;
use crate::common::error::Result;
use crate::common::time::Timestamp;

/// How far the clock may be off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Limits {
    /// Above this a warning is logged.
    pub(super) warn: Duration,
    /// Above this nothing is granted or extended.
    pub(super) refuse: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        // Two clients may err in opposite directions, and the tolerance is a second.
        Self { warn: Duration::from_millis(250), refuse: Duration::from_millis(500) }
    }
}

/// Watches the clock.
#[derive(Debug)]
pub(super) struct ClockCheck {
    limits: Option<Limits>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    known: Option<Sample>,
    last_warning: Option<Instant>,
}

/// A time by the clock that is watched, and by one that nobody can move.
#[derive(Clone, Copy, Debug)]
pub(super) struct Moment {
    pub(super) wall: Timestamp,
    pub(super) steady: Instant,
}

impl Moment {
    /// How long after `earlier` this is by the steady clock, and by how much the other one disagrees:
    /// somebody has moved it, or the machine was asleep.
    fn since(self, earlier: Self) -> (i64, i64) {
        let steady = whole(self.steady.saturating_duration_since(earlier.steady));
        let wall = signed(self.wall).saturating_sub(signed(earlier.wall));
        (steady, wall.saturating_sub(steady).saturating_abs())
    }
}

/// One comparison with the server's clock, in milliseconds.
#[derive(Clone, Copy, Debug)]
struct Sample {
    /// By how much this clock is ahead.
    ahead: i64,
    /// Half the time that the comparison took.
    uncertainty: i64,
    taken: Moment,
}

impl Sample {
    /// What it is worth by now: a clock may drift by a millisecond in a second, and it may have been
    /// moved.
    fn uncertainty_at(&self, now: Moment) -> i64 {
        let (age, disagreement) = now.since(self.taken);
        self.uncertainty.saturating_add(age / 1000).saturating_add(disagreement)
    }

    /// The largest error that is possible.
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

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that the server's clock showed `server` at some time between `sent` and `received` of
    /// ours.
    pub(super) fn note(&self, server: Timestamp, sent: Moment, received: Moment) {
        let (took, disagreement) = received.since(sent);
        let sample = Sample {
            ahead: signed(received.wall).saturating_sub(took / 2).saturating_sub(signed(server)),
            uncertainty: (took / 2 + 1).saturating_add(disagreement),
            taken: received,
        };
        let mut state = self.state();
        let is_first = state.known.is_none();
        // A quick answer tells more than a slow one, unless the two contradict each other.
        let is_better = state.known.is_none_or(|known| {
            let uncertainty = known.uncertainty_at(received);
            let reach = uncertainty.saturating_add(sample.uncertainty);
            sample.uncertainty <= uncertainty
                || sample.ahead.saturating_sub(known.ahead).saturating_abs() > reach
        });
        if is_better {
            state.known = Some(sample);
        }
        // The first answer comes late, because the connection is made for it.
        if !is_first {
            self.warn(&mut state, received);
        }
    }

    fn warn(&self, state: &mut State, now: Moment) {
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

    /// Refuses to grant by a clock that is off.
    pub(super) fn approve(&self, now: Moment) -> Result<()> {
        let known = self.state().known;
        match (self.limits, known) {
            (Some(limits), Some(known)) if known.worst_at(now) > whole(limits.refuse) => {
                Err(error::clock_is_off(known.ahead, known.uncertainty_at(now)))
            }
            _ => Ok(()),
        }
    }

    /// The server's time, if it was compared: the earliest that it can be. `None` where nobody looks.
    pub(super) fn earliest_server_time(&self, now: Moment) -> Option<Timestamp> {
        self.limits?;
        let known = self.state().known?;
        let latest_lead = known.ahead.saturating_add(known.uncertainty_at(now));
        let earliest = signed(now.wall).saturating_sub(latest_lead);
        u64::try_from(earliest).ok().map(Timestamp::from_millis)
    }

    /// By how much the clock may be off at most, if it was compared, and whether that is worth
    /// telling.
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

    /// Moments of a clock and of a steady one.
    struct Clocks(Instant);

    impl Clocks {
        fn new() -> Self {
            Self(Instant::now())
        }

        /// Both show the same.
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
            check.approve(clocks.at(1000)).expect("not known yet");
            check.note(time(server), clocks.at(1000), clocks.at(1010));
            assert_eq!(check.approve(clocks.at(1010)).is_ok(), is_fine, "{server}");
            let off = ClockCheck::new(None);
            off.note(time(server), clocks.at(1000), clocks.at(1010));
            off.approve(clocks.at(1010)).expect("it was switched off");
        }
    }

    #[test]
    fn half_the_round_trip_counts_as_error() {
        let (clocks, check) = (Clocks::new(), ClockCheck::new(Some(Limits::default())));
        check.note(time(1600), clocks.at(1000), clocks.at(2200));
        assert!(check.approve(clocks.at(2200)).is_err());
        // A quick answer settles it; another slow one that agrees changes nothing.
        check.note(time(3005), clocks.at(3000), clocks.at(3010));
        check.approve(clocks.at(3010)).expect("known by now");
        check.note(time(5000), clocks.at(4000), clocks.at(6000));
        check.approve(clocks.at(6000)).expect("still known");
    }

    #[test]
    fn a_clock_that_was_moved_is_not_trusted_until_it_is_compared() {
        let (clocks, check) = (Clocks::new(), ClockCheck::new(Some(Limits::default())));
        check.note(time(1005), clocks.at(1000), clocks.at(1010));
        check.approve(clocks.at(2000)).expect("it was compared");
        for wall in [1000, 3000, 60_000] {
            // It shows another time than it should, a second later.
            assert!(check.approve(clocks.at_both(wall, 2000)).is_err(), "{wall}");
        }
        // Compared again, it is as good as before, or really off.
        check.note(time(2105), clocks.at_both(2100, 2100), clocks.at_both(2110, 2110));
        check.approve(clocks.at(2200)).expect("moved back");
        check.note(time(3005), clocks.at_both(9000, 3000), clocks.at_both(9010, 3010));
        assert!(check.approve(clocks.at_both(9010, 3010)).is_err());
    }

    #[test]
    fn a_clock_that_is_moved_during_a_request_is_not_trusted() {
        let (clocks, check) = (Clocks::new(), ClockCheck::new(Some(Limits::default())));
        check.note(time(1005), clocks.at(1000), clocks.at_both(210, 1010));
        assert!(check.approve(clocks.at_both(210, 1010)).is_err());
    }

    #[test]
    fn clocks_that_stood_still_together_are_found_out_by_the_server() {
        let (clocks, check) = (Clocks::new(), ClockCheck::new(Some(Limits::default())));
        check.note(time(1005), clocks.at(1000), clocks.at(1010));
        // A minute passes for everybody else, and nothing here tells.
        check.approve(clocks.at(1020)).expect("as good as before");
        check.note(time(61_025), clocks.at(1020), clocks.at(1030));
        assert!(check.approve(clocks.at(1030)).is_err());
        let earliest = check.earliest_server_time(clocks.at(1030)).expect("compared");
        assert!(earliest > time(61_000) && earliest <= time(61_030), "{earliest:?}");
        assert_eq!(ClockCheck::new(None).earliest_server_time(clocks.at(1030)), None);
    }

    #[test]
    fn what_was_known_long_ago_is_worth_little() {
        let (clocks, check) = (Clocks::new(), ClockCheck::new(Some(Limits::default())));
        check.note(time(1005), clocks.at(1000), clocks.at(1010));
        check.approve(clocks.at(400_000)).expect("drifted a little");
        assert!(check.approve(clocks.at(600_000)).is_err());
        let (worst, is_worth_telling) = check.worst(clocks.at(600_000)).expect("known");
        assert!(is_worth_telling && worst > Duration::from_millis(500));
    }
}
