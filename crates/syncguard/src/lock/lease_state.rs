//! A held lease, from the grant until it is over: a state machine without I/O.

use std::time::Duration;

use super::clock::LocalInstant;
use crate::common::lost_reason::LostReason;
use crate::common::ttl::Ttl;

/// How long a lock is held, and whether it still is.
///
/// The lock counts as held until [`believed_until`](Self::believed_until), which is never later
/// than its expiry in the store. A grant and a confirmed extend count from *before they were sent*.
/// An extend of unknown outcome may take effect at any time after it was sent, so the lease lasts
/// no longer than the TTL of that extend allows.
#[derive(Clone, Debug)]
#[cfg_attr(test, derive(Hash))]
pub(super) struct LeaseState {
    /// When the request that got the lock was sent for the first time.
    since: LocalInstant,
    /// Held until then, according to the store's last answer.
    confirmed_until: LocalInstant,
    /// Held at most until then, because an extend of unknown outcome may take effect.
    unknown_until: Option<LocalInstant>,
    /// The shortest TTL of an extend whose outcome is unknown.
    shortest_unknown: Option<Duration>,
    /// The extend in progress. There is only one at a time: an older one that is applied late could
    /// shorten the result of a newer one.
    open: Option<SentExtend>,
    extends_sent: u32,
    renewal: Option<Renewal>,
    /// The loss is signaled this long before the lease ends.
    stop_margin: Duration,
    lost: Option<LostReason>,
    /// When the guard let go. Nothing is extended after this.
    let_go_at: Option<LocalInstant>,
}

/// When and for how long a lease is renewed.
#[derive(Clone, Debug)]
#[cfg_attr(test, derive(Hash))]
struct Renewal {
    ttl: Ttl,
    /// Renewal does not keep the lock beyond this.
    end: Option<LocalInstant>,
    next_at: LocalInstant,
    /// Whether a renewal has failed since the last one that succeeded.
    is_failing: bool,
    /// Whether the lock already lasts until `end`.
    is_complete: bool,
    /// The number of the last extend before the lock was suspected to be lost. The answer to a
    /// later one tells whether it is.
    suspected_after: Option<u32>,
}

/// An extend that was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct SentExtend {
    number: u32,
    at: LocalInstant,
    pub(super) ttl: Ttl,
    /// When to stop waiting for the answer.
    pub(super) give_up_at: LocalInstant,
    is_renewal: bool,
}

impl SentExtend {
    /// Returns until when the lock is held if this takes effect, counted from before it was sent.
    fn until(&self) -> LocalInstant {
        self.at + self.ttl.as_duration()
    }

    /// Returns how long to wait for the answer.
    pub(super) fn limit(&self) -> Duration {
        self.give_up_at.since(self.at)
    }
}

/// What to do next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// The lease is over.
    Over,
    /// The lease has just been lost.
    Lost(LostReason),
    /// Send this renewal.
    Renew(SentExtend),
    /// Check again at this time.
    Wait(LocalInstant),
}

/// Whether an extend may be sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum BeginExtend {
    /// Send it.
    Send(SentExtend),
    /// Another one is in progress.
    Busy,
    /// The lease is over. `Some` if this check detected the loss.
    Over(Option<LostReason>),
}

/// How an extend ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ExtendAnswer {
    /// The store has set the new expiry.
    Extended,
    /// The store reports that the lock is not held, for this reason.
    NotHeld(LostReason),
    /// It failed without effect.
    Refused,
    /// It is unknown whether it took effect, or will.
    Unknown,
}

/// What follows from the answer to an extend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum AfterExtend {
    /// Nothing more to do.
    Noted,
    /// The lease has just been lost.
    Lost(LostReason),
    /// The store has extended a lock that counts as lost: release it. `Some` if the loss was
    /// detected with this answer.
    ReleaseIt(Option<LostReason>),
}

impl LeaseState {
    /// Creates a lease that was granted to a request first sent at `sent`.
    pub(super) fn new(sent: LocalInstant, ttl: Ttl, stop_margin: Duration) -> Self {
        Self {
            since: sent,
            confirmed_until: sent + ttl.as_duration(),
            unknown_until: None,
            shortest_unknown: None,
            open: None,
            extends_sent: 0,
            renewal: None,
            stop_margin,
            lost: None,
            let_go_at: None,
        }
    }

    /// Enables renewal at every third of `ttl`, for at most `max_hold` in total.
    pub(super) fn renewed(mut self, ttl: Ttl, max_hold: Option<Duration>) -> Self {
        self.renewal = Some(Renewal {
            ttl,
            end: max_hold.map(|max_hold| self.since + max_hold),
            next_at: self.since + ttl.as_duration() / 3,
            is_failing: false,
            is_complete: false,
            suspected_after: None,
        });
        self
    }

    pub(super) fn since(&self) -> LocalInstant {
        self.since
    }

    /// Returns until when the lock is certain to be held, unless the lease is over.
    pub(super) fn believed_until(&self) -> LocalInstant {
        let open_until = self.open.as_ref().map(SentExtend::until);
        let bounds = [self.unknown_until, open_until];
        bounds.into_iter().flatten().fold(self.confirmed_until, Ord::min)
    }

    /// Returns how long the lock is certain to remain held; zero once the lease is over.
    pub(super) fn remaining(&self, now: LocalInstant) -> Duration {
        if self.end().is_some() { Duration::ZERO } else { self.believed_until().since(now) }
    }

    /// Returns why the lease is over, or `None` while the lock is held.
    pub(super) fn end(&self) -> Option<LostReason> {
        self.lost.clone().or(self.let_go_at.map(|_at| LostReason::Released))
    }

    /// Returns when the guard let go.
    pub(super) fn let_go_at(&self) -> Option<LocalInstant> {
        self.let_go_at
    }

    /// Returns whether the store may have granted the lock to another holder.
    pub(super) fn is_lost(&self) -> bool {
        self.lost.as_ref().is_some_and(|reason| *reason != LostReason::Expiring)
    }

    /// Returns when the loss is signaled unless an extend is confirmed first.
    fn stop_at(&self) -> LocalInstant {
        self.believed_until() - self.stop_margin
    }

    /// Marks the lock as lost. Returns `None` if the lease was already over.
    pub(super) fn lose(&mut self, reason: LostReason) -> Option<LostReason> {
        if self.end().is_some() {
            return None;
        }
        self.lost = Some(reason);
        self.lost.clone()
    }

    /// Marks the lock as lost if its time is over. Returns `None` if the lease was already over.
    pub(super) fn expire(&mut self, now: LocalInstant) -> Option<LostReason> {
        if now < self.stop_at() {
            return None;
        }
        let is_failing = self.renewal.as_ref().is_some_and(|renewal| renewal.is_failing)
            || self.open.is_some_and(|open| open.is_renewal);
        self.lose(if now < self.believed_until() {
            LostReason::Expiring
        } else if is_failing {
            LostReason::Unreachable
        } else {
            LostReason::Expired
        })
    }

    /// Returns what is due now.
    pub(super) fn next(&mut self, now: LocalInstant) -> Step {
        if self.end().is_some() {
            return Step::Over;
        }
        if let Some(reason) = self.expire(now) {
            return Step::Lost(reason);
        }
        let (stop_at, believed_until) = (self.stop_at(), self.believed_until());
        let is_due =
            |renewal: &&mut Renewal| !renewal.is_complete || renewal.suspected_after.is_some();
        let Some(renewal) = self.renewal.as_mut().filter(is_due) else {
            return Step::Wait(stop_at);
        };
        if self.open.is_some() {
            return Step::Wait(stop_at);
        }
        if now < renewal.next_at {
            return Step::Wait(renewal.next_at.min(stop_at));
        }
        let ttl = match renewal.end {
            // A renewal, or the caller, has extended it that far.
            Some(end) if end <= believed_until => {
                renewal.is_complete = true;
                if renewal.suspected_after.is_none() {
                    return Step::Wait(stop_at);
                }
                // This only asks whether the lock is held.
                Ttl::rest(believed_until.since(now))
            }
            Some(end) => renewal.ttl.at_most(end.since(now)),
            None => renewal.ttl,
        };
        Step::Renew(self.send(ttl, now, true))
    }

    /// Makes a renewal due now, because the lock may be lost.
    pub(super) fn hurry(&mut self, now: LocalInstant) {
        if let Some(renewal) = &mut self.renewal {
            renewal.next_at = renewal.next_at.min(now);
            renewal.suspected_after = Some(self.extends_sent);
        }
    }

    /// Begins a requested extend, unless the lease is over or another one is in progress.
    pub(super) fn begin_extend(&mut self, ttl: Ttl, now: LocalInstant) -> BeginExtend {
        if self.end().is_some() {
            return BeginExtend::Over(None);
        }
        if let Some(reason) = self.expire(now) {
            return BeginExtend::Over(Some(reason));
        }
        if self.open.is_some() {
            BeginExtend::Busy
        } else {
            BeginExtend::Send(self.send(ttl, now, false))
        }
    }

    fn send(&mut self, ttl: Ttl, now: LocalInstant, is_renewal: bool) -> SentExtend {
        /// The least time for an attempt, if that much is left.
        const SHORTEST: Duration = Duration::from_millis(500);
        // Without an answer, a short TTL counts, which a renewal has to lengthen in time.
        let counts = if self.renewal.is_some() { ttl.as_duration() } else { Duration::MAX };
        let left = self.stop_at().since(now).min(counts);
        // Half of what is left, so that there is time for a second attempt.
        let limit = (left / 2).max(SHORTEST).min(left);
        self.extends_sent = self.extends_sent.wrapping_add(1);
        let sent = SentExtend {
            number: self.extends_sent,
            at: now,
            ttl,
            give_up_at: now + limit,
            is_renewal,
        };
        self.open = Some(sent);
        sent
    }

    /// Returns whether this extend is the one in progress.
    pub(super) fn is_open(&self, sent: SentExtend) -> bool {
        self.open == Some(sent)
    }

    /// Records how an extend ended.
    pub(super) fn extend_ended(
        &mut self,
        sent: SentExtend,
        answer: ExtendAnswer,
        now: LocalInstant,
    ) -> AfterExtend {
        if self.is_open(sent) && self.end().is_none() {
            // Checked while this extend still bounds the lease.
            let is_too_late = now >= self.believed_until();
            let lost = if is_too_late { self.expire(now) } else { None };
            self.close(sent, &answer, now);
            if let Some(reason) = lost {
                return match answer {
                    ExtendAnswer::Extended => AfterExtend::ReleaseIt(Some(reason)),
                    _ => AfterExtend::Lost(reason),
                };
            }
        }
        match answer {
            ExtendAnswer::NotHeld(reason) => match self.lose(reason) {
                Some(reason) => AfterExtend::Lost(reason),
                None => AfterExtend::Noted,
            },
            ExtendAnswer::Extended => match &self.lost {
                // The work is stopping while the lock is still held; the guard releases it.
                None | Some(LostReason::Expiring) => AfterExtend::Noted,
                Some(_) if self.let_go_at.is_some() => AfterExtend::Noted,
                Some(_) => AfterExtend::ReleaseIt(None),
            },
            ExtendAnswer::Refused | ExtendAnswer::Unknown => AfterExtend::Noted,
        }
    }

    /// Closes the extend in progress.
    fn close(&mut self, sent: SentExtend, answer: &ExtendAnswer, now: LocalInstant) {
        self.open = None;
        match answer {
            ExtendAnswer::Extended => {
                // An extend of unknown outcome that takes effect after this one sets its own TTL,
                // counted from some time after this one was sent.
                let ttl = sent.ttl.as_duration();
                let shortest = self.shortest_unknown.unwrap_or(ttl).min(ttl);
                self.confirmed_until = sent.until();
                self.unknown_until = self.shortest_unknown.map(|shortest| sent.at + shortest);
                if let Some(renewal) = &mut self.renewal {
                    renewal.is_failing = false;
                    renewal.suspected_after =
                        renewal.suspected_after.filter(|&last| sent.number <= last);
                    renewal.next_at = if renewal.suspected_after.is_some() {
                        now
                    } else {
                        sent.at + shortest / 3
                    };
                    // Within a millisecond, the smallest step of a TTL.
                    let reached = sent.until() + Duration::from_millis(1);
                    renewal.is_complete =
                        sent.is_renewal && renewal.end.is_some_and(|end| reached > end);
                }
            }
            ExtendAnswer::Unknown | ExtendAnswer::Refused => {
                if *answer == ExtendAnswer::Unknown {
                    let ttl = sent.ttl.as_duration();
                    self.unknown_until = Some(earliest(self.unknown_until, sent.until()));
                    self.shortest_unknown = Some(earliest(self.shortest_unknown, ttl));
                    if let Some(renewal) = &mut self.renewal {
                        // It may end sooner.
                        renewal.is_complete = false;
                    }
                }
                if let Some(renewal) = &mut self.renewal {
                    if sent.is_renewal {
                        renewal.is_failing = true;
                        renewal.next_at = now + pause_after_error(renewal.ttl.as_duration());
                    } else if *answer == ExtendAnswer::Unknown {
                        let third = sent.ttl.as_duration() / 3;
                        renewal.next_at = renewal.next_at.min(sent.at + third);
                    }
                }
            }
            ExtendAnswer::NotHeld(_) => {}
        }
    }

    /// Lets go of the lock for the guard: nothing is extended after this. Returns whether it is the
    /// first time, and the loss if the lease had expired unnoticed.
    pub(super) fn let_go(&mut self, now: LocalInstant) -> LetGo {
        if self.let_go_at.is_some() {
            return LetGo { is_first: false, lost: None };
        }
        let is_over = now >= self.believed_until();
        let lost = if is_over { self.expire(now) } else { None };
        self.let_go_at = Some(now);
        LetGo { is_first: true, lost }
    }

    /// Records that the store reported the lock as not held at its release, so it was lost before.
    /// Returns `None` if the loss was already known; then its reason stays.
    pub(super) fn mark_not_held(&mut self) -> Option<LostReason> {
        if self.lost.is_some() {
            return None;
        }
        self.lost = Some(LostReason::NotHeld);
        self.lost.clone()
    }
}

/// The result of letting go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LetGo {
    pub(super) is_first: bool,
    pub(super) lost: Option<LostReason>,
}

fn earliest<T: Ord>(known: Option<T>, new: T) -> T {
    match known {
        Some(known) => known.min(new),
        None => new,
    }
}

/// Returns the pause before the next renewal: short enough for several tries before the deadline,
/// long enough not to overload a failing store.
fn pause_after_error(ttl: Duration) -> Duration {
    (ttl / 12).clamp(Duration::from_millis(1), Duration::from_secs(1))
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    const UNIT: Duration = Duration::from_secs(1);

    fn at(units: u32) -> LocalInstant {
        LocalInstant::from_start(UNIT * units)
    }

    fn ttl(units: u32) -> Ttl {
        Ttl::new(UNIT * units).expect("valid")
    }

    fn lease(units: u32) -> LeaseState {
        LeaseState::new(at(0), ttl(units), Duration::ZERO)
    }

    fn renewed(units: u32) -> LeaseState {
        lease(units).renewed(ttl(units), None)
    }

    fn send(state: &mut LeaseState, units: u32, now: LocalInstant) -> SentExtend {
        match state.begin_extend(ttl(units), now) {
            BeginExtend::Send(sent) => sent,
            other => panic!("not sent: {other:?}"),
        }
    }

    #[test]
    fn an_extend_counts_from_before_it_was_sent() {
        let mut state = lease(9);
        let sent = send(&mut state, 9, at(3));
        assert_eq!(state.extend_ended(sent, ExtendAnswer::Extended, at(5)), AfterExtend::Noted);
        assert_eq!(state.believed_until(), at(12));
    }

    #[test]
    fn an_extend_bounds_the_lease_from_when_it_is_sent() {
        let mut state = lease(30);
        let sent = send(&mut state, 5, at(1));
        assert_eq!(state.believed_until(), at(6));
        assert_eq!(state.extend_ended(sent, ExtendAnswer::Refused, at(2)), AfterExtend::Noted);
        assert_eq!(state.believed_until(), at(30), "it had no effect");
    }

    #[test]
    fn only_one_extend_is_under_way() {
        let mut state = renewed(9);
        let sent = send(&mut state, 9, at(1));
        assert_eq!(state.begin_extend(ttl(9), at(1)), BeginExtend::Busy);
        assert_eq!(state.next(at(5)), Step::Wait(at(9)), "no renewal beside it");
        assert_eq!(state.extend_ended(sent, ExtendAnswer::Unknown, at(5)), AfterExtend::Noted);
        assert!(matches!(state.next(at(6)), Step::Renew(_)));
    }

    #[test]
    fn a_renewal_leaves_time_for_another() {
        let mut state = renewed(9);
        assert_eq!(state.next(at(0)), Step::Wait(at(3)));
        let Step::Renew(sent) = state.next(at(3)) else { panic!("due") };
        assert_eq!(sent.give_up_at, at(6));
        assert_eq!(sent.limit(), UNIT * 3);
    }

    /// It may have shortened the lock.
    #[test]
    fn a_renewal_follows_a_short_extend_without_an_answer() {
        let mut state = renewed(9);
        let sent = send(&mut state, 3, at(0));
        assert_eq!(sent.give_up_at, at(0) + UNIT * 3 / 2, "while a renewal is still possible");
        assert_eq!(state.extend_ended(sent, ExtendAnswer::Unknown, at(0)), AfterExtend::Noted);
        assert_eq!(state.next(at(0)), Step::Wait(at(1)));
        assert!(matches!(state.next(at(1)), Step::Renew(_)));
    }

    #[test]
    fn a_short_extend_that_is_refused_hurries_no_renewal() {
        let mut state = renewed(9);
        let sent = send(&mut state, 3, at(0));
        assert_eq!(state.extend_ended(sent, ExtendAnswer::Refused, at(0)), AfterExtend::Noted);
        assert_eq!(state.next(at(0)), Step::Wait(at(3)));
    }

    #[test]
    fn no_renewal_follows_a_longer_extend() {
        let mut state = lease(9).renewed(ttl(9), Some(UNIT * 12));
        let sent = send(&mut state, 12, at(1));
        assert_eq!(state.extend_ended(sent, ExtendAnswer::Extended, at(1)), AfterExtend::Noted);
        assert_eq!(state.next(at(5)), Step::Wait(at(13)));
    }

    #[test]
    fn renewal_is_complete_unless_a_millisecond_is_left() {
        let renewed_for = |rest: Duration| {
            let mut state = lease(9).renewed(ttl(7), Some(UNIT * 10 + rest));
            let Step::Renew(sent) = state.next(at(3)) else { panic!("due") };
            let extended = state.extend_ended(sent, ExtendAnswer::Extended, at(3));
            assert_eq!(extended, AfterExtend::Noted);
            state.next(at(6))
        };
        assert_eq!(renewed_for(Duration::from_micros(500)), Step::Wait(at(10)));
        assert!(matches!(renewed_for(Duration::from_millis(1)), Step::Renew(_)));
    }

    /// Returns a lease of 9 units that was renewed until its `max_hold` of 12.
    fn complete() -> LeaseState {
        let mut state = lease(9).renewed(ttl(9), Some(UNIT * 12));
        let Step::Renew(sent) = state.next(at(3)) else { panic!("due") };
        assert_eq!(state.extend_ended(sent, ExtendAnswer::Extended, at(3)), AfterExtend::Noted);
        assert_eq!(state.next(at(7)), Step::Wait(at(12)), "no more renewals");
        state
    }

    #[test]
    fn a_suspected_loss_is_checked_although_renewal_is_complete() {
        let mut state = complete();
        state.hurry(at(8));
        let Step::Renew(sent) = state.next(at(8)) else { panic!("suspected") };
        assert_eq!(sent.ttl, ttl(4), "it neither lengthens nor shortens the lock");
        assert_eq!(state.extend_ended(sent, ExtendAnswer::Unknown, at(8)), AfterExtend::Noted);
        assert_eq!(state.next(at(8)), Step::Wait(at(8) + Duration::from_millis(750)));
        let Step::Renew(sent) = state.next(at(9)) else { panic!("still suspected") };
        assert_eq!(state.extend_ended(sent, ExtendAnswer::Extended, at(9)), AfterExtend::Noted);
        assert_eq!(state.next(at(10)), Step::Wait(at(12)), "it was held");
        state.hurry(at(10));
        let Step::Renew(sent) = state.next(at(10)) else { panic!("suspected again") };
        let gone = ExtendAnswer::NotHeld(LostReason::NotHeld);
        let lost = AfterExtend::Lost(LostReason::NotHeld);
        assert_eq!(state.extend_ended(sent, gone, at(10)), lost);
    }

    #[test]
    fn a_suspicion_outlives_the_answer_to_an_older_extend() {
        let mut state = renewed(9);
        let Step::Renew(sent) = state.next(at(3)) else { panic!("due") };
        state.hurry(at(4));
        assert_eq!(state.extend_ended(sent, ExtendAnswer::Extended, at(4)), AfterExtend::Noted);
        let Step::Renew(sent) = state.next(at(4)) else { panic!("suspected") };
        assert_eq!(state.extend_ended(sent, ExtendAnswer::Extended, at(4)), AfterExtend::Noted);
        assert_eq!(state.next(at(4)), Step::Wait(at(7)));
    }

    #[test]
    fn a_shorter_extend_of_unknown_outcome_is_renewed_again() {
        let mut state = complete();
        let sent = send(&mut state, 2, at(8));
        assert_eq!(state.extend_ended(sent, ExtendAnswer::Unknown, at(8)), AfterExtend::Noted);
        assert_eq!(state.believed_until(), at(10));
        let Step::Renew(sent) = state.next(at(8)) else { panic!("it may end early") };
        assert_eq!(sent.ttl, ttl(4));
    }

    #[test]
    fn loss_is_reported_once_and_is_final() {
        let mut state = renewed(9);
        let Step::Renew(sent) = state.next(at(3)) else { panic!("due") };
        assert_eq!(state.next(at(9)), Step::Lost(LostReason::Unreachable));
        assert_eq!(state.next(at(9)), Step::Over);
        let late = state.extend_ended(sent, ExtendAnswer::Extended, at(10));
        assert_eq!(late, AfterExtend::ReleaseIt(None));
        assert_eq!(state.remaining(at(10)), Duration::ZERO);
        assert_eq!(state.lose(LostReason::NotHeld), None);
    }

    #[test]
    fn an_answer_that_comes_when_the_lease_is_over_reports_the_loss() {
        let answered = |answer: ExtendAnswer| {
            let mut state = lease(9);
            let sent = send(&mut state, 9, at(3));
            state.extend_ended(sent, answer, at(9))
        };
        let expired = || LostReason::Expired;
        assert_eq!(answered(ExtendAnswer::Extended), AfterExtend::ReleaseIt(Some(expired())));
        assert_eq!(answered(ExtendAnswer::Unknown), AfterExtend::Lost(expired()));
    }

    #[test]
    fn what_a_guard_has_let_go_of_is_not_released_again() {
        let mut state = lease(9);
        let sent = send(&mut state, 9, at(3));
        assert_eq!(state.let_go(at(9)), LetGo { is_first: true, lost: Some(LostReason::Expired) });
        assert_eq!(state.extend_ended(sent, ExtendAnswer::Extended, at(9)), AfterExtend::Noted);
    }

    #[test]
    fn a_lease_remains_until_it_is_lost_or_let_go_of() {
        let mut state = LeaseState::new(at(0), ttl(9), UNIT);
        assert_eq!(state.remaining(at(2)), UNIT * 7);
        assert_eq!((state.is_lost(), state.let_go_at()), (false, None));
        assert_eq!(state.next(at(8)), Step::Lost(LostReason::Expiring));
        assert!(!state.is_lost(), "the store still has it");
        let mut expired = lease(9);
        assert_eq!(expired.next(at(9)), Step::Lost(LostReason::Expired));
        assert!(expired.is_lost());
        let mut released = lease(9);
        assert_eq!(released.let_go(at(8)), LetGo { is_first: true, lost: None });
        assert_eq!((released.is_lost(), released.let_go_at()), (false, Some(at(8))));
    }

    #[test]
    fn a_loss_keeps_its_reason_when_its_release_is_answered() {
        let mut state = lease(9);
        assert_eq!(state.next(at(9)), Step::Lost(LostReason::Expired));
        state.let_go(at(10));
        assert_eq!(state.mark_not_held(), None);
        assert_eq!(state.end(), Some(LostReason::Expired));
        let mut stolen = lease(9);
        stolen.let_go(at(1));
        assert_eq!(stolen.mark_not_held(), Some(LostReason::NotHeld));
        assert_eq!(stolen.end(), Some(LostReason::NotHeld));
    }

    #[test]
    fn nothing_is_extended_after_letting_go() {
        let mut state = renewed(9);
        assert!(state.let_go(at(1)).is_first);
        assert_eq!(state.end(), Some(LostReason::Released));
        assert_eq!(state.begin_extend(ttl(9), at(1)), BeginExtend::Over(None));
        assert_eq!(state.next(at(3)), Step::Over);
        assert!(!state.let_go(at(2)).is_first);
    }

    #[test]
    fn loss_is_signaled_a_stop_margin_early_unless_an_extend_is_confirmed() {
        let mut state = LeaseState::new(at(0), ttl(9), UNIT * 2).renewed(ttl(9), None);
        let Step::Renew(sent) = state.next(at(3)) else { panic!("due") };
        assert_eq!(state.extend_ended(sent, ExtendAnswer::Extended, at(6)), AfterExtend::Noted);
        assert_eq!(state.next(at(9)), Step::Renew(state.open.expect("sent")));
        assert_eq!(state.next(at(10)), Step::Lost(LostReason::Expiring));
        let late = state.extend_ended(state.open.expect("sent"), ExtendAnswer::Extended, at(11));
        assert_eq!(late, AfterExtend::Noted, "the guard releases it when the work has stopped");
    }

    /// A store, the network and a lease, with time in whole units.
    #[derive(Clone, Debug)]
    struct World {
        now: u32,
        /// When the lock expires in the store.
        stored_until: u32,
        /// Extends on their way to the store.
        travelling: Vec<(SentExtend, u32)>,
        extends_left: u32,
        state: LeaseState,
    }

    /// Walks every order of sending, applying, answering, losing and delaying a few extends of
    /// different length: the lease never lasts longer than the lock in the store.
    #[test]
    fn in_every_order_the_lease_ends_no_later_than_in_the_store() {
        const END: u32 = 7;
        let start = World {
            now: 0,
            stored_until: 3,
            travelling: Vec::new(),
            extends_left: 3,
            state: lease(3),
        };
        let mut seen = HashSet::from([format!("{start:?}")]);
        let mut queue = vec![start];
        while let Some(world) = queue.pop() {
            let is_believed = !world.state.remaining(at(world.now)).is_zero();
            assert!(!is_believed || world.now < world.stored_until, "it lasts too long: {world:?}");
            for next in successors(&world) {
                if next.now <= END && seen.insert(format!("{next:?}")) {
                    queue.push(next);
                }
            }
        }
        assert!(seen.len() > 1_000, "the walk reached too few states: {}", seen.len());
    }

    fn successors(world: &World) -> Vec<World> {
        let mut next = Vec::new();
        let mut passed = world.clone();
        passed.now += 1;
        next.push(passed);
        if world.extends_left > 0 {
            for units in [1, 4] {
                let mut sending = world.clone();
                let begun = sending.state.begin_extend(ttl(units), at(world.now));
                if let BeginExtend::Send(sent) = begun {
                    sending.travelling.push((sent, units));
                    sending.extends_left -= 1;
                    next.push(sending);
                }
            }
        }
        if let Some(open) = world.state.open {
            let mut unknown = world.clone();
            unknown.state.extend_ended(open, ExtendAnswer::Unknown, at(world.now));
            next.push(unknown);
        }
        for (index, &(sent, units)) in world.travelling.iter().enumerate() {
            let mut applied = world.clone();
            applied.travelling.remove(index);
            let mut refused = applied.clone();
            let answer = if world.now < world.stored_until {
                applied.stored_until = world.now + units;
                ExtendAnswer::Extended
            } else {
                ExtendAnswer::NotHeld(LostReason::NotHeld)
            };
            // Applied, with an answer that has not come yet, and with one that comes at once.
            next.push(applied.clone());
            applied.state.extend_ended(sent, answer, at(world.now));
            next.push(applied);
            refused.state.extend_ended(sent, ExtendAnswer::Refused, at(world.now));
            next.push(refused);
        }
        next
    }
}
