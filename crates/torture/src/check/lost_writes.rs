//! What a store may lose, by the documentation.
//!
//! A failover with asynchronous replication may lose releases, extends and undos that the old
//! primary answered, and until it follows the new one, the old primary answers what is no longer
//! true. Grants are confirmed by the replica, so they are kept.
//!
//! A crash of PostgreSQL may lose releases and undos, which it answers before they are on its disk.

use std::collections::HashMap;

use super::TOLERANCE;
use crate::history::{Allowance, History, Kind, Micros, Op, Outcome};

/// How far a replica, a copy or a disk may be behind.
const BEHIND: Micros = 1_000_000;

/// From when to when something may be lost.
struct Loss {
    from: Micros,
    to: Micros,
    /// Whether only releases and undos may be lost, and all answers are true.
    only_releases: bool,
}

/// Returns the lock ids with an operation that may have been lost.
pub(super) fn lost(history: &History) -> impl Iterator<Item = u32> + '_ {
    let losses = losses(history);
    history.ops.iter().filter(move |op| may_be_lost(op, &losses)).map(|op| op.id)
}

fn losses(history: &History) -> Vec<Loss> {
    let faults = history.faults.iter();
    let loss = faults.filter_map(|fault| {
        let only_releases = match fault.allows {
            Allowance::LostWrites | Allowance::LostStore => false,
            Allowance::LostReleases => true,
            Allowance::Nothing | Allowance::Expiry | Allowance::Repetition => return None,
        };
        Some(Loss { from: fault.from.saturating_sub(BEHIND), to: fault.to, only_releases })
    });
    loss.collect()
}

/// Returns whether an operation had an effect that may have been lost.
fn may_be_lost(op: &Op, losses: &[Loss]) -> bool {
    match op.outcome {
        Outcome::Undone | Outcome::Released => is_hit(op, losses, |_loss| true),
        Outcome::Extended => is_hit(op, losses, |loss| !loss.only_releases),
        _ => false,
    }
}

fn is_hit(op: &Op, losses: &[Loss], counts: impl Fn(&Loss) -> bool) -> bool {
    losses.iter().any(|loss| op.end >= loss.from && op.start <= loss.to && counts(loss))
}

/// Returns a history without what is excused.
///
/// * A release, extend or undo that may be lost becomes an operation of unknown outcome.
/// * Answers without effect that may be from the old primary are left out.
/// * A guard whose extend may be lost counts as valid until its lease would have ended without.
pub(super) fn excused(history: &History) -> History {
    let mut history = history.clone();
    let losses = losses(&history);
    if losses.is_empty() {
        return history;
    }
    let mut undos = Vec::new();
    let mut lost_extends: Vec<u32> = Vec::new();
    history.ops.retain(|op| {
        let is_without_effect = matches!(op.outcome, Outcome::Contended | Outcome::NotHeld);
        !(is_without_effect && is_hit(op, &losses, |loss| !loss.only_releases))
    });
    for op in history.ops.iter_mut().filter(|op| may_be_lost(op, &losses)) {
        match op.outcome {
            Outcome::Undone => undos.push(Op {
                kind: Kind::Undo,
                end: Micros::MAX,
                outcome: Outcome::Unknown,
                ..op.clone()
            }),
            Outcome::Extended => lost_extends.push(op.id),
            _ => {}
        }
        (op.outcome, op.end) = (Outcome::Unknown, Micros::MAX);
    }
    history.ops.extend(undos);
    let mut dead_from: HashMap<u32, Micros> = lost_extends.into_iter().map(|id| (id, 0)).collect();
    for op in &history.ops {
        if let (Some(dead_from), Outcome::Granted(_) | Outcome::Extended) =
            (dead_from.get_mut(&op.id), op.outcome)
        {
            *dead_from = (*dead_from).max(op.start + op.ttl_ms * 1_000 + TOLERANCE);
        }
    }
    for belief in &mut history.beliefs {
        belief.to = belief.to.min(dead_from.get(&belief.id).copied().unwrap_or(Micros::MAX));
    }
    for write in &mut history.writes {
        write.is_valid &= dead_from.get(&write.id).is_none_or(|dead_from| write.to < *dead_from);
    }
    history
}

#[cfg(test)]
mod tests {
    use crate::check::{Precision, check, check_hand_overs};
    use crate::history::{Allowance, Event, FaultSpan, History, Kind, Outcome};

    /// A history with a failover from the third to the fifth second.
    fn history() -> History {
        let mut history = History::default();
        history.add_process(0, 0);
        history.faults.push(FaultSpan {
            name: "failover".to_owned(),
            client: None,
            from: 3_000_000,
            to: 5_000_000,
            allows: Allowance::LostWrites,
        });
        history
    }

    /// Adds an operation of 10 ms on key 0 with a TTL of one second; the time is in milliseconds.
    fn op(history: &mut History, kind: Kind, id: &str, at: u64, outcome: Outcome) {
        let (op, id, from) = (history.ops.len() as u64, id.to_owned(), at * 1_000);
        let begin = Event::Begin { op, at: from, kind, key: 0, id, ttl_ms: 1_000, locker: 0 };
        history.add(0, begin);
        history.add(0, Event::End { op, at: from + 10_000, outcome });
    }

    fn valid(history: &mut History, id: &str, at: u64) {
        let (before, after) = (at * 1_000, at * 1_000 + 1);
        history.add(0, Event::Valid { before, after, key: 0, id: id.to_owned() });
    }

    fn broken(history: &History) -> Vec<&'static str> {
        let found = check(history, &[], Precision { expiry: 0, shares_releases: false }).violations;
        found.into_iter().map(|violation| violation.rule).collect()
    }

    #[test]
    fn a_release_may_be_lost_in_a_failover_but_not_before() {
        for (at, rules) in [(4_500, &[][..]), (1_500, &["linearizability"])] {
            let mut history = history();
            op(&mut history, Kind::Acquire, "a", 1_000, Outcome::Granted(1));
            history.ops[0].ttl_ms = 9_000;
            op(&mut history, Kind::Release, "a", at, Outcome::Released);
            op(&mut history, Kind::Acquire, "b", 5_100, Outcome::Contended);
            assert_eq!(broken(&history), rules, "at {at}");
        }
    }

    #[test]
    fn a_crash_may_lose_a_release_or_an_undo_but_neither_extends_nor_answers() {
        let crash = || {
            let mut history = history();
            history.faults[0].allows = Allowance::LostReleases;
            op(&mut history, Kind::Acquire, "a", 1_000, Outcome::Granted(1));
            history.ops[0].ttl_ms = 9_000;
            history
        };
        for (at, rules) in [(2_500, &[][..]), (1_500, &["linearizability"])] {
            let mut history = crash();
            op(&mut history, Kind::Release, "a", at, Outcome::Released);
            op(&mut history, Kind::Acquire, "b", 5_100, Outcome::Contended);
            assert_eq!(broken(&history), rules, "at {at}");
        }
        let mut history = crash();
        op(&mut history, Kind::Release, "a", 2_500, Outcome::NotHeld);
        assert_eq!(broken(&history), ["linearizability"]);
        let mut history = crash();
        op(&mut history, Kind::Extend, "a", 2_500, Outcome::Extended);
        history.ops[1].ttl_ms = 9_000;
        op(&mut history, Kind::Acquire, "b", 5_100, Outcome::Granted(2));
        assert_eq!(broken(&history), ["I1", "linearizability"]);
        for (at, rules) in [(2_500, &[][..]), (500, &["linearizability"])] {
            let mut history = self::history();
            history.faults[0].allows = Allowance::LostReleases;
            op(&mut history, Kind::Acquire, "a", at, Outcome::Undone);
            op(&mut history, Kind::Acquire, "b", at + 600, Outcome::Contended);
            assert_eq!(broken(&history), rules, "at {at}");
        }
    }

    #[test]
    fn a_lock_whose_release_may_be_lost_does_not_count_as_free() {
        for (at, count) in [(4_500, 0), (1_500, 1)] {
            let mut history = history();
            op(&mut history, Kind::Acquire, "a", 1_000, Outcome::Granted(1));
            op(&mut history, Kind::Release, "a", at, Outcome::Released);
            let (name, limit) = ("lock".to_owned(), 9_000_000);
            history.add(0, Event::Call { call: 1, at: 9_000_000, name, key: 0, limit });
            let result = "timed out".to_owned();
            history.add(0, Event::Return { call: 1, at: 15_000_000, result });
            assert_eq!(check_hand_overs(&history, 5_000_000).len(), count, "at {at}");
        }
    }

    #[test]
    fn an_undo_may_be_lost_in_a_failover_but_not_before() {
        for (at, rules) in [(4_500, &[][..]), (500, &["linearizability"])] {
            let mut history = history();
            op(&mut history, Kind::Acquire, "a", at, Outcome::Undone);
            op(&mut history, Kind::Acquire, "b", at + 600, Outcome::Contended);
            assert_eq!(broken(&history), rules, "at {at}");
        }
    }

    #[test]
    fn the_old_primary_may_answer_in_a_failover_but_not_after() {
        for (at, rules) in [(4_500, &[][..]), (5_001, &["linearizability"])] {
            let mut history = history();
            op(&mut history, Kind::Acquire, "a", at - 200, Outcome::Granted(1));
            op(&mut history, Kind::Release, "a", at, Outcome::NotHeld);
            assert_eq!(broken(&history), rules, "at {at}");
        }
    }

    #[test]
    fn a_grant_is_not_lost_in_a_failover() {
        let mut history = history();
        op(&mut history, Kind::Acquire, "a", 3_500, Outcome::Granted(1));
        op(&mut history, Kind::Acquire, "b", 3_600, Outcome::Granted(2));
        assert_eq!(broken(&history), ["I1", "linearizability"]);
    }

    #[test]
    fn a_store_that_was_replaced_may_lose_grants_and_releases_but_repeats_no_fence() {
        for (allows, fence, rules) in [
            (Allowance::LostStore, 2, &[][..]),
            (Allowance::LostStore, 1, &["I2", "linearizability"]),
            (Allowance::Nothing, 2, &["I1", "linearizability"]),
        ] {
            let mut history = history();
            history.faults[0].allows = allows;
            op(&mut history, Kind::Acquire, "a", 4_000, Outcome::Granted(1));
            op(&mut history, Kind::Acquire, "b", 5_100, Outcome::Granted(fence));
            history.ops[0].ttl_ms = 2_000;
            assert_eq!(broken(&history), rules, "{allows:?} {fence}");
        }
        let mut history = history();
        history.faults[0].allows = Allowance::LostStore;
        op(&mut history, Kind::Acquire, "a", 4_000, Outcome::Granted(1));
        history.ops[0].ttl_ms = 9_000;
        op(&mut history, Kind::Release, "a", 4_500, Outcome::Released);
        op(&mut history, Kind::Acquire, "b", 5_100, Outcome::Contended);
        assert_eq!(broken(&history), Vec::<&str>::new());
    }

    #[test]
    fn a_guard_whose_extend_may_be_lost_may_be_wrong() {
        for (at, rules) in [(3_500, &[][..]), (1_000, &["I1", "beliefs", "linearizability"])] {
            let mut history = history();
            op(&mut history, Kind::Acquire, "a", at - 800, Outcome::Granted(1));
            op(&mut history, Kind::Extend, "a", at, Outcome::Extended);
            op(&mut history, Kind::Extend, "a", at + 100, Outcome::Extended);
            history.ops[2].ttl_ms = 3_000;
            op(&mut history, Kind::Acquire, "b", at + 1_300, Outcome::Granted(2));
            for (id, at) in [("a", at), ("a", at + 1_900), ("b", at + 1_310), ("b", at + 1_900)] {
                valid(&mut history, id, at);
            }
            assert_eq!(broken(&history), rules, "at {at}");
        }
    }
}
