//! A held lease, from the grant until it is over: a state machine without I/O.

use std::time::Duration;

use super::clock::LocalInstant;
use crate::common::lost_reason::LostReason;
use crate::common::ttl::Ttl;

/// How long a lock is ours, and whether it still is.
///
/// The lock counts as ours until [`believed_until`](Self::believed_until), which is never later
/// than what the store may believe. A grant and a confirmed extend count from *before they were
/// sent*. An extend whose outcome is not known may take effect at any time after it was sent, so
/// the lease counts for no longer than its TTL would give.
#[derive(Clone, Debug)]
pub(super) struct LeaseState {
    /// When the request that got the lock was sent for the first time.
    since: LocalInstant,
    /// Ours until then by the last answer of the store.
    confirmed_until: LocalInstant,
    /// Ours at most until then, because an extend of unknown outcome may take effect.
    unknown_until: Option<LocalInstant>,
    /// The shortest TTL of an extend whose outcome is unknown.
    shortest_unknown: Option<Duration>,
    /// The extend that is under way. There is one at a time: an older one that is applied late
    /// could shorten what a newer one has got.
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
struct Renewal {
    ttl: Ttl,
    /// The lock is not kept beyond this.
    end: Option<LocalInstant>,
    next_at: LocalInstant,
    /// A renewal has failed since the last one that succeeded.
    is_failing: bool,
    /// The lock is kept as long as it may be.
    is_complete: bool,
}

/// An extend on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SentExtend {
    number: u32,
    at: LocalInstant,
    pub(super) ttl: Ttl,
    /// When to stop waiting for the answer.
    pub(super) give_up_at: LocalInstant,
    is_renewal: bool,
}

impl SentExtend {
    /// Counted from before it was sent, the lock is ours until then if it takes effect.
    fn until(&self) -> LocalInstant {
        self.at + self.ttl.as_duration()
    }

    /// How long to wait for the answer.
    pub(super) fn limit(&self) -> Duration {
        self.give_up_at.since(self.at)
    }
}

/// What to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// The lease is over.
    Over,
    /// The lease has just been lost.
    Lost(LostReason),
    /// Send this renewal.
    Renew(SentExtend),
    /// Look again then.
    Wait(LocalInstant),
}

/// Whether an extend may be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BeginExtend {
    /// Send it.
    Send(SentExtend),
    /// Another one is under way.
    Busy,
    /// The lease is over. `Some` if it was lost by this look.
    Over(Option<LostReason>),
}

/// How an extend ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ExtendAnswer {
    /// The store has set the new expiry.
    Extended,
    /// The store says that the lock is not held.
    NotHeld,
    /// It failed without effect.
    Refused,
    /// Nobody knows whether it took effect, or will.
    Unknown,
}

/// What an answer to an extend leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AfterExtend {
    /// Nothing but the new state.
    Noted,
    /// The lease has just been lost.
    Lost(LostReason),
    /// The store has extended a lock that was given up as lost: release it. `Some` if it was lost
    /// by this answer.
    ReleaseIt(Option<LostReason>),
}

impl LeaseState {
    /// A lease that was granted to a request first sent at `sent`.
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

    /// Renews the lease at every third of `ttl`, for at most `max_hold` in all.
    pub(super) fn renewed(mut self, ttl: Ttl, max_hold: Option<Duration>) -> Self {
        self.renewal = Some(Renewal {
            ttl,
            end: max_hold.map(|max_hold| self.since + max_hold),
            next_at: self.since + ttl.as_duration() / 3,
            is_failing: false,
            is_complete: false,
        });
        self
    }

    pub(super) fn since(&self) -> LocalInstant {
        self.since
    }

    /// The lock is ours for certain until then, unless the lease is over.
    pub(super) fn believed_until(&self) -> LocalInstant {
        let open_until = self.open.as_ref().map(SentExtend::until);
        let bounds = [self.unknown_until, open_until];
        bounds.into_iter().flatten().fold(self.confirmed_until, Ord::min)
    }

    /// How long the lock is still ours for certain; zero once the lease is over.
    pub(super) fn remaining(&self, now: LocalInstant) -> Duration {
        if self.end().is_some() { Duration::ZERO } else { self.believed_until().since(now) }
    }

    /// Why the lock is not ours any longer, once it is not.
    pub(super) fn end(&self) -> Option<LostReason> {
        self.lost.or(self.let_go_at.map(|_at| LostReason::Released))
    }

    /// When the guard let go.
    pub(super) fn let_go_at(&self) -> Option<LocalInstant> {
        self.let_go_at
    }

    /// Whether the store may have given the lock to another.
    pub(super) fn is_lost(&self) -> bool {
        self.lost.is_some_and(|reason| reason != LostReason::Expiring)
    }

    /// When the loss is signaled unless an extend is confirmed before.
    fn stop_at(&self) -> LocalInstant {
        self.believed_until() - self.stop_margin
    }

    /// Gives the lock up as lost. `None` if the lease was over before.
    pub(super) fn lose(&mut self, reason: LostReason) -> Option<LostReason> {
        if self.end().is_some() {
            return None;
        }
        self.lost = Some(reason);
        self.lost
    }

    /// Gives the lock up if its time is over.
    fn expire(&mut self, now: LocalInstant) -> Option<LostReason> {
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

    /// What is due now.
    pub(super) fn next(&mut self, now: LocalInstant) -> Step {
        if self.end().is_some() {
            return Step::Over;
        }
        if let Some(reason) = self.expire(now) {
            return Step::Lost(reason);
        }
        let stop_at = self.stop_at();
        let Some(renewal) = self.renewal.as_mut().filter(|renewal| !renewal.is_complete) else {
            return Step::Wait(stop_at);
        };
        if self.open.is_some() {
            return Step::Wait(stop_at);
        }
        if now < renewal.next_at {
            return Step::Wait(renewal.next_at.min(stop_at));
        }
        let ttl = match renewal.end {
            Some(end) => renewal.ttl.at_most(end.since(now)),
            None => renewal.ttl,
        };
        Step::Renew(self.send(ttl, now, true))
    }

    /// Begins an extend that was asked for, unless the lease is over or another is under way.
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
        /// An attempt is given this long, if so much is left.
        const SHORTEST: Duration = Duration::from_millis(500);
        let left = self.stop_at().since(now);
        // Half of what is left, so that there is time for a second one.
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

    /// Whether this extend is the one under way.
    pub(super) fn is_open(&self, sent: SentExtend) -> bool {
        self.open == Some(sent)
    }

    /// Takes in how an extend ended.
    pub(super) fn extend_ended(
        &mut self,
        sent: SentExtend,
        answer: ExtendAnswer,
        now: LocalInstant,
    ) -> AfterExtend {
        if self.is_open(sent) && self.end().is_none() {
            // Looked at while it still bounds the lease.
            let is_too_late = now >= self.believed_until();
            let lost = if is_too_late { self.expire(now) } else { None };
            self.close(sent, answer, now);
            if let Some(reason) = lost {
                return match answer {
                    ExtendAnswer::Extended => AfterExtend::ReleaseIt(Some(reason)),
                    _ => AfterExtend::Lost(reason),
                };
            }
        }
        match answer {
            ExtendAnswer::NotHeld => match self.lose(LostReason::NotHeld) {
                Some(reason) => AfterExtend::Lost(reason),
                None => AfterExtend::Noted,
            },
            ExtendAnswer::Extended => match self.lost {
                // The work is stopping under a lock that is still there; the guard releases it.
                None | Some(LostReason::Expiring) => AfterExtend::Noted,
                Some(_) if self.let_go_at.is_some() => AfterExtend::Noted,
                Some(_) => AfterExtend::ReleaseIt(None),
            },
            ExtendAnswer::Refused | ExtendAnswer::Unknown => AfterExtend::Noted,
        }
    }

    /// Ends the extend that is under way.
    fn close(&mut self, sent: SentExtend, answer: ExtendAnswer, now: LocalInstant) {
        self.open = None;
        match answer {
            ExtendAnswer::Extended => {
                // One of unknown outcome that takes effect after this one gives its own TTL, from
                // some time after this one was sent.
                let ttl = sent.ttl.as_duration();
                let shortest = self.shortest_unknown.unwrap_or(ttl).min(ttl);
                self.confirmed_until = sent.until();
                self.unknown_until = self.shortest_unknown.map(|shortest| sent.at + shortest);
                if let Some(renewal) = &mut self.renewal {
                    renewal.is_failing = false;
                    renewal.next_at = sent.at + shortest / 3;
                    // Within a millisecond, the smallest step of a TTL.
                    let reached = sent.until() + Duration::from_millis(1);
                    renewal.is_complete =
                        sent.is_renewal && renewal.end.is_some_and(|end| reached > end);
                }
            }
            ExtendAnswer::Unknown | ExtendAnswer::Refused => {
                if answer == ExtendAnswer::Unknown {
                    let ttl = sent.ttl.as_duration();
                    self.unknown_until = Some(earliest(self.unknown_until, sent.until()));
                    self.shortest_unknown = Some(earliest(self.shortest_unknown, ttl));
                }
                if let Some(renewal) = self.renewal.as_mut().filter(|_| sent.is_renewal) {
                    renewal.is_failing = true;
                    renewal.next_at = now + pause_after_error(renewal.ttl.as_duration());
                }
            }
            ExtendAnswer::NotHeld => {}
        }
    }

    /// The guard lets go: nothing is extended after this. Answers whether it is the first time,
    /// and the loss, if the time of the lease was over before anybody looked.
    pub(super) fn let_go(&mut self, now: LocalInstant) -> LetGo {
        if self.let_go_at.is_some() {
            return LetGo { is_first: false, lost: None };
        }
        let is_over = now >= self.believed_until();
        let lost = if is_over { self.expire(now) } else { None };
        self.let_go_at = Some(now);
        LetGo { is_first: true, lost }
    }

    /// The store says at the release that the lock was not held: it was lost before. `None` if
    /// that was known.
    pub(super) fn was_not_held(&mut self) -> Option<LostReason> {
        let was_known = self.lost.replace(LostReason::NotHeld).is_some();
        (!was_known).then_some(LostReason::NotHeld)
    }
}

/// What letting go has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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

/// Often enough for several tries before the deadline, seldom enough not to press a sick store.
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
    }

    #[test]
    fn loss_is_told_once_and_is_final() {
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
    fn nothing_is_extended_after_letting_go() {
        let mut state = renewed(9);
        assert!(state.let_go(at(1)).is_first);
        assert_eq!(state.end(), Some(LostReason::Released));
        assert_eq!(state.begin_extend(ttl(9), at(1)), BeginExtend::Over(None));
        assert_eq!(state.next(at(3)), Step::Over);
        assert!(!state.let_go(at(2)).is_first);
    }

    #[test]
    fn a_stop_margin_comes_before_the_end_unless_an_extend_is_confirmed() {
        let mut state = LeaseState::new(at(0), ttl(9), UNIT * 2).renewed(ttl(9), None);
        let Step::Renew(sent) = state.next(at(3)) else { panic!("due") };
        assert_eq!(state.extend_ended(sent, ExtendAnswer::Extended, at(6)), AfterExtend::Noted);
        assert_eq!(state.next(at(9)), Step::Renew(state.open.expect("sent")));
        assert_eq!(state.next(at(10)), Step::Lost(LostReason::Expiring));
        let late = state.extend_ended(state.open.expect("sent"), ExtendAnswer::Extended, at(11));
        assert_eq!(late, AfterExtend::Noted, "the guard releases it when the work has stopped");
    }

    /// A store, the network, and a lease, with time in whole units.
    #[derive(Clone, Debug)]
    struct World {
        now: u32,
        /// The store believes in the lock until then.
        stored_until: u32,
        /// Extends on their way to the store.
        travelling: Vec<(SentExtend, u32)>,
        extends_left: u32,
        state: LeaseState,
    }

    /// Walks every order of sending, applying, answering, losing and delaying a few extends of
    /// different length: the lease never believes longer than the store.
    #[test]
    fn in_every_order_the_lease_believes_no_longer_than_the_store() {
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
            assert!(!is_believed || world.now < world.stored_until, "two believers: {world:?}");
            for next in successors(&world) {
                if next.now <= END && seen.insert(format!("{next:?}")) {
                    queue.push(next);
                }
            }
        }
        assert!(seen.len() > 1_000, "the walk went somewhere: {}", seen.len());
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
                ExtendAnswer::NotHeld
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
