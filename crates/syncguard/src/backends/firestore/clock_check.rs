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

/// One comparison with the server's clock, in milliseconds.
#[derive(Clone, Copy, Debug)]
struct Sample {
    /// By how much this clock is ahead.
    ahead: i64,
    /// Half the time that the comparison took.
    uncertainty: i64,
    taken: Instant,
    taken_at: Timestamp,
}

impl Sample {
    /// What it is worth by now: a clock may drift by a millisecond in a second. Time in which the
    /// machine was asleep counts too, and only the clock itself knows of that.
    fn uncertainty_at(&self, now: Timestamp) -> i64 {
        let age = self.taken.elapsed().max(now.since(self.taken_at));
        self.uncertainty.saturating_add(whole(age) / 1000)
    }

    /// The largest error that is possible.
    fn worst_at(&self, now: Timestamp) -> i64 {
        self.ahead.saturating_abs().saturating_add(self.uncertainty_at(now))
    }
}

fn whole(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
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
    pub(super) fn note(&self, server: Timestamp, sent: Timestamp, received: Timestamp) {
        let signed = |time: Timestamp| i64::try_from(time.as_millis()).unwrap_or(i64::MAX);
        let middle = signed(sent).midpoint(signed(received));
        let sample = Sample {
            ahead: middle.saturating_sub(signed(server)),
            uncertainty: whole(received.since(sent)) / 2 + 1,
            taken: Instant::now(),
            taken_at: received,
        };
        let mut state = self.state();
        let is_first = state.known.is_none();
        // A quick answer tells more than a slow one, unless the two contradict each other: then the
        // clock was moved.
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

    fn warn(&self, state: &mut State, now: Timestamp) {
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
    pub(super) fn approve(&self, now: Timestamp) -> Result<()> {
        let known = self.state().known;
        match (self.limits, known) {
            (Some(limits), Some(known)) if known.worst_at(now) > whole(limits.refuse) => {
                Err(error::clock_is_off(known.ahead, known.uncertainty_at(now)))
            }
            _ => Ok(()),
        }
    }

    /// By how much the clock may be off at most, if it was compared, and whether that is worth
    /// telling.
    pub(super) fn worst(&self, now: Timestamp) -> Option<(Duration, bool)> {
        let worst = self.state().known?.worst_at(now);
        let limits = self.limits.unwrap_or_default();
        let duration = Duration::from_millis(worst.unsigned_abs());
        Some((duration, worst > whole(limits.warn)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(millis: u64) -> Timestamp {
        Timestamp::from_millis(1_000_000 + millis)
    }

    #[test]
    fn a_clock_that_is_off_in_either_direction_is_refused() {
        let cases = [(1000, true), (1450, true), (550, true), (1550, false), (450, false)];
        for (server, is_fine) in cases {
            let check = ClockCheck::new(Some(Limits::default()));
            check.approve(at(1000)).expect("not known yet");
            check.note(at(server), at(1000), at(1010));
            assert_eq!(check.approve(at(1010)).is_ok(), is_fine, "{server}");
            let off = ClockCheck::new(None);
            off.note(at(server), at(1000), at(1010));
            off.approve(at(1010)).expect("it was switched off");
        }
    }

    #[test]
    fn half_the_round_trip_counts_as_error() {
        let check = ClockCheck::new(Some(Limits::default()));
        check.note(at(1600), at(1000), at(2200));
        assert!(check.approve(at(2200)).is_err());
        // A quick answer settles it; another slow one that agrees changes nothing.
        check.note(at(3005), at(3000), at(3010));
        check.approve(at(3010)).expect("known by now");
        check.note(at(5000), at(4000), at(6000));
        check.approve(at(6000)).expect("still known");
    }

    #[test]
    fn a_clock_that_was_moved_is_noticed() {
        let check = ClockCheck::new(Some(Limits::default()));
        check.note(at(1005), at(1000), at(1010));
        check.note(at(2005), at(7000), at(7100));
        assert!(check.approve(at(7100)).is_err());
        check.note(at(3005), at(3000), at(3020));
        check.approve(at(3020)).expect("moved back");
    }

    #[test]
    fn what_was_known_long_ago_is_worth_little() {
        let check = ClockCheck::new(Some(Limits::default()));
        check.note(at(1005), at(1000), at(1010));
        check.approve(at(400_000)).expect("drifted a little");
        assert!(check.approve(at(600_000)).is_err());
        let (worst, is_worth_telling) = check.worst(at(600_000)).expect("known");
        assert!(is_worth_telling && worst > Duration::from_millis(500));
    }
}
