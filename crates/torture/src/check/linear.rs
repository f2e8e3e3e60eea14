//! Linearizability of the operations of one key: an order in which a store, one operation at a
//! time, gives exactly these outcomes.
//!
//! The search is that of Wing, Gong and Lowe with a memo of visited configurations. An operation of
//! unknown outcome may take effect at any time after its begin, or never. An acquire that was
//! undone is two operations: one of unknown outcome, and the undo, after which it takes effect no
//! more.

use std::collections::HashMap;

use super::{Precision, TOLERANCE, overlap};
use crate::history::{Kind, Micros, Op, Outcome};

/// The most configurations that are visited.
const LIMIT: usize = 100_000;
/// An operation of unknown outcome takes effect within this time, or never: no fault lasts longer.
const LATE: Micros = 30_000_000;

/// The result of a search.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// There is such an order.
    Linearizable,
    /// There is none: the operations between these times cannot be ordered.
    Impossible {
        /// The begin of the first one.
        from: Micros,
        /// The end of the last one.
        to: Micros,
    },
    /// The search was given up.
    Undecided,
}

/// The state of a key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct State {
    holder: Option<Holder>,
    /// The largest fence, or less if grants of unknown outcome took some.
    fence: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Holder {
    id: u32,
    /// The fence, if it is known.
    fence: Option<u64>,
    /// The operation that set the expiry.
    lease: u32,
}

/// What has been ordered so far.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Configuration {
    state: State,
    /// All known operations before this one are ordered.
    next: usize,
    /// Later ones that are ordered too.
    ahead: Vec<usize>,
    /// Operations of unknown outcome that took effect.
    applied: Vec<usize>,
}

impl Configuration {
    /// Returns whether a known operation is ordered.
    fn has(&self, index: usize) -> bool {
        index < self.next || self.ahead.contains(&index)
    }
}

/// The holder, and the ordered operations as in [`Configuration`].
type Ordered = (Option<Holder>, usize, Vec<usize>);
/// The fence, and the applied operations.
type Used = (u64, Vec<usize>);

/// The configurations that were visited.
#[derive(Debug, Default)]
struct Visited {
    known: HashMap<Ordered, Vec<Used>>,
    count: usize,
}

impl Visited {
    /// Adds a configuration. Returns `false` if one was visited from which at least as much is
    /// possible: with a smaller fence, and with fewer operations of unknown outcome used up.
    fn insert(&mut self, configuration: &Configuration) -> bool {
        let Configuration { state, next, ahead, applied } = configuration;
        let alike = self.known.entry((state.holder, *next, ahead.clone())).or_default();
        let is_better = |(fence, used): &Used| {
            *fence <= state.fence && used.iter().all(|index| applied.binary_search(index).is_ok())
        };
        if alike.iter().any(is_better) {
            return false;
        }
        alike.push((state.fence, applied.clone()));
        self.count += 1;
        true
    }
}

/// Returns whether an operation of unknown outcome can no longer take effect at a time.
fn is_over(op: &Op, at: Micros) -> bool {
    at > op.end || at.saturating_sub(op.start) >= LATE
}

struct Search<'a, E> {
    all: &'a [Op],
    /// The operations of known outcome, as indexes, and the undos.
    known: Vec<usize>,
    /// Those of unknown outcome, and with the place of their undo among the known, those undone.
    unknown: Vec<(usize, Option<usize>)>,
    /// Ids with a release of unknown outcome, and when the first of them began.
    unknown_releases: HashMap<u32, Micros>,
    precision: Precision,
    is_excused: E,
}

/// Searches an order of the operations of one key, which are sorted by their begin.
pub fn linearize(
    ops: &[Op],
    precision: Precision,
    is_excused: impl Fn(Micros, Micros) -> bool,
) -> Verdict {
    let (mut unknown, mut known) = (Vec::new(), Vec::new());
    let mut unknown_releases = HashMap::new();
    for (index, op) in ops.iter().enumerate() {
        match op.outcome {
            Outcome::Unknown => {
                unknown.push((index, None));
                if matches!(op.kind, Kind::Release | Kind::Undo) {
                    unknown_releases.entry(op.id).or_insert(op.start);
                }
            }
            outcome => {
                if outcome == Outcome::Undone {
                    unknown.push((index, Some(known.len())));
                }
                known.push(index);
            }
        }
    }
    let search = Search { all: ops, known, unknown, unknown_releases, precision, is_excused };
    search.run()
}

impl<E: Fn(Micros, Micros) -> bool> Search<'_, E> {
    fn run(&self) -> Verdict {
        let start = Configuration {
            state: State::default(),
            next: 0,
            ahead: Vec::new(),
            applied: Vec::new(),
        };
        let mut visited = Visited::default();
        visited.insert(&start);
        let mut stack = vec![start];
        // How far the search came: the operations that could not be ordered.
        let mut furthest = (0, 0, 0);
        while let Some(configuration) = stack.pop() {
            if configuration.next == self.known.len() {
                return Verdict::Linearizable;
            }
            let done = configuration.next + configuration.ahead.len();
            let bound = self.earliest_end(&configuration);
            if done >= furthest.0 {
                furthest = (done, self.all[self.known[configuration.next]].start, bound);
            }
            // The last one that is pushed is tried first: known operations in the order of their
            // ends, then those of unknown outcome, the latest first.
            let mut found = self.unknown_steps(&configuration, bound);
            found.extend(self.known_steps(&configuration, bound));
            for configuration in found {
                if visited.count > LIMIT {
                    return Verdict::Undecided;
                }
                if visited.insert(&configuration) {
                    stack.push(configuration);
                }
            }
        }
        Verdict::Impossible { from: furthest.1, to: furthest.2 }
    }

    /// Returns when the first of the remaining operations ended. One that began later comes later.
    fn earliest_end(&self, configuration: &Configuration) -> Micros {
        let mut earliest = Micros::MAX;
        for (index, &number) in self.known.iter().enumerate().skip(configuration.next) {
            let op = &self.all[number];
            if op.start > earliest {
                break;
            }
            if !configuration.ahead.contains(&index) {
                earliest = earliest.min(op.end);
            }
        }
        earliest
    }

    fn known_steps(&self, configuration: &Configuration, bound: Micros) -> Vec<Configuration> {
        let mut found: Vec<(Micros, Configuration)> = Vec::new();
        for (index, &number) in self.known.iter().enumerate().skip(configuration.next) {
            let op = &self.all[number];
            if op.start > bound {
                break;
            }
            if configuration.ahead.contains(&index) {
                continue;
            }
            let Some(state) = self.apply(configuration.state, number) else { continue };
            let mut next = Configuration { state, ..configuration.clone() };
            next.ahead.push(index);
            next.ahead.sort_unstable();
            while next.ahead.first() == Some(&next.next) {
                next.ahead.remove(0);
                next.next += 1;
            }
            found.push((op.end, next));
        }
        found.sort_by_key(|(end, _)| std::cmp::Reverse(*end));
        found.into_iter().map(|(_, next)| next).collect()
    }

    fn unknown_steps(&self, configuration: &Configuration, bound: Micros) -> Vec<Configuration> {
        let mut found = Vec::new();
        for (index, &(number, undo)) in self.unknown.iter().enumerate() {
            let op = &self.all[number];
            let is_due = op.start <= bound && !is_over(op, bound);
            let is_undone = undo.is_some_and(|undo| configuration.has(undo));
            if !is_due || is_undone || configuration.applied.contains(&index) {
                continue;
            }
            let state = match op.kind {
                Kind::Acquire => self.take_unseen(configuration.state, number),
                _ => self.apply(configuration.state, number),
            };
            let Some(state) = state else { continue };
            if state == configuration.state {
                continue;
            }
            let mut next = Configuration { state, ..configuration.clone() };
            next.applied.push(index);
            next.applied.sort_unstable();
            // Those that can no longer take effect need not be told apart.
            next.applied.retain(|&index| !is_over(&self.all[self.unknown[index].0], bound));
            found.push(next);
        }
        found
    }

    /// Returns the state after an operation, or `None` if its outcome is not possible.
    fn apply(&self, state: State, number: usize) -> Option<State> {
        let op = &self.all[number];
        let lease = u32::try_from(number).unwrap_or(u32::MAX);
        let (owned, other) = match state.holder {
            Some(holder) if holder.id == op.id => (Some(holder), None),
            other => (None, other),
        };
        let without_holder = State { holder: None, ..state };
        let leased = |fence| Some(Holder { id: op.id, fence, lease });
        match (op.kind, op.outcome) {
            (Kind::Acquire, Outcome::Granted(fence)) => {
                let Some(holder) = owned else {
                    let is_free = other.is_none_or(|holder| self.may_be_dead(holder, op));
                    return (is_free && fence > state.fence)
                        .then(|| State { holder: leased(Some(fence)), fence });
                };
                // A replay.
                let is_same = holder.fence.is_none_or(|held| held == fence);
                let is_larger = holder.fence.is_some() || fence >= state.fence;
                (is_same && is_larger && self.may_be_alive(holder, op)).then(|| State {
                    holder: Some(Holder { fence: Some(fence), ..holder }),
                    fence: state.fence.max(fence),
                })
            }
            (Kind::Acquire, Outcome::Contended) => {
                other.is_some_and(|holder| self.may_be_alive(holder, op)).then_some(state)
            }
            // The undo, wherever the acquire came before it.
            (Kind::Acquire, Outcome::Undone) => {
                Some(if owned.is_some() { without_holder } else { state })
            }
            (Kind::Extend, Outcome::Extended | Outcome::Unknown) => {
                let holder = owned.filter(|&holder| self.may_be_alive(holder, op))?;
                Some(State { holder: Some(Holder { lease, ..holder }), ..state })
            }
            (Kind::Release | Kind::Undo, Outcome::Released) => {
                let Some(holder) = owned else {
                    // A repeated release may report the effect of one whose answer was lost.
                    let first = self.unknown_releases.get(&op.id);
                    let is_repeated = first.is_some_and(|first| *first < op.start);
                    return (is_repeated || self.is_shared(op)).then_some(state);
                };
                self.may_be_alive(holder, op).then_some(without_holder)
            }
            (Kind::Release | Kind::Undo, Outcome::Unknown) => owned.map(|_| without_holder),
            (_, Outcome::NotHeld) => {
                owned.is_none_or(|holder| self.may_be_dead(holder, op)).then_some(state)
            }
            _ => Some(state),
        }
    }

    /// Returns whether a release may report the effect of another one.
    fn is_shared(&self, op: &Op) -> bool {
        let is_other = |other: &&Op| {
            other.id == op.id && other.outcome == Outcome::Released && !std::ptr::eq(*other, op)
        };
        let mut others = self.all.iter().filter(is_other);
        self.precision.shares_releases && others.any(|other| overlap(other, op))
    }

    /// Returns the state after an acquire whose grant its caller did not see, if it is possible.
    fn take_unseen(&self, state: State, number: usize) -> Option<State> {
        let op = &self.all[number];
        let lease = u32::try_from(number).unwrap_or(u32::MAX);
        let is_free =
            state.holder.is_none_or(|holder| holder.id != op.id && self.may_be_dead(holder, op));
        let holder = Some(Holder { id: op.id, fence: None, lease });
        is_free.then_some(State { holder, fence: state.fence + 1 })
    }

    /// Returns whether a lock may have been dead when an operation took effect.
    fn may_be_dead(&self, holder: Holder, op: &Op) -> bool {
        let lease = &self.all[holder.lease as usize];
        let dead_from = lease.start + lease.ttl_ms * 1_000 + TOLERANCE;
        op.end >= dead_from.saturating_sub(self.precision.expiry)
            || (self.is_excused)(lease.start, op.end)
    }

    /// Returns whether a lock may have been live when an operation took effect.
    fn may_be_alive(&self, holder: Holder, op: &Op) -> bool {
        let lease = &self.all[holder.lease as usize];
        let live_until = lease.end.saturating_add(lease.ttl_ms * 1_000 + TOLERANCE);
        op.start <= live_until.saturating_add(self.precision.expiry)
            || (self.is_excused)(lease.start, op.end)
    }
}

#[cfg(test)]
mod tests {
    use super::{Verdict, linearize};
    use crate::check::Precision;
    use crate::history::{Kind, Micros, Op, Outcome};
    use crate::random::Random;

    /// An operation on a lock with a TTL of one second, by times in milliseconds.
    fn op(kind: Kind, id: u32, start: u64, end: u64, outcome: Outcome) -> Op {
        let end = if outcome == Outcome::Unknown { Micros::MAX } else { end * 1_000 };
        let (start, ttl_ms) = (start * 1_000, 1_000);
        Op { process: 0, locker: id, kind, key: 0, id, ttl_ms, start, end, outcome }
    }

    fn verdict(ops: &[Op]) -> Verdict {
        linearize(ops, Precision { expiry: 0, shares_releases: false }, |_, _| false)
    }

    fn is_linearizable(ops: &[Op]) -> bool {
        verdict(ops) == Verdict::Linearizable
    }

    #[test]
    fn a_lock_that_is_handed_over_is_linearizable() {
        assert!(is_linearizable(&[
            op(Kind::Acquire, 1, 0, 10, Outcome::Granted(1)),
            op(Kind::Acquire, 2, 5, 8, Outcome::Contended),
            op(Kind::Release, 1, 20, 30, Outcome::Released),
            op(Kind::Acquire, 3, 25, 28, Outcome::Granted(2)),
        ]));
    }

    #[test]
    fn two_grants_of_a_held_lock_are_not() {
        let found = verdict(&[
            op(Kind::Acquire, 1, 0, 10, Outcome::Granted(1)),
            op(Kind::Acquire, 2, 20, 30, Outcome::Granted(2)),
        ]);
        assert_eq!(found, Verdict::Impossible { from: 20_000, to: 30_000 });
    }

    #[test]
    fn a_dead_lock_is_taken_over_but_not_before_it_is_dead() {
        let held = op(Kind::Acquire, 1, 0, 10, Outcome::Granted(1));
        let taken = |end| op(Kind::Acquire, 2, 1_500, end, Outcome::Granted(2));
        assert!(is_linearizable(&[held.clone(), taken(2_000)]));
        assert!(!is_linearizable(&[held, taken(1_999)]));
    }

    #[test]
    fn a_dead_lock_blocks_no_other_and_is_not_revived() {
        let held = op(Kind::Acquire, 1, 0, 10, Outcome::Granted(1));
        let late = |start, kind, id, outcome| op(kind, id, start, start + 5, outcome);
        for (kind, id, outcome) in [
            (Kind::Acquire, 2, Outcome::Contended),
            (Kind::Extend, 1, Outcome::Extended),
            (Kind::Release, 1, Outcome::Released),
        ] {
            assert!(is_linearizable(&[held.clone(), late(2_010, kind, id, outcome)]));
            assert!(!is_linearizable(&[held.clone(), late(2_011, kind, id, outcome)]));
        }
    }

    #[test]
    fn fences_grow() {
        let grants = |second| {
            vec![
                op(Kind::Acquire, 1, 0, 10, Outcome::Granted(5)),
                op(Kind::Release, 1, 20, 30, Outcome::Released),
                op(Kind::Acquire, 2, 40, 50, Outcome::Granted(second)),
            ]
        };
        assert!(is_linearizable(&grants(6)));
        assert!(!is_linearizable(&grants(5)));
    }

    #[test]
    fn a_release_by_another_id_frees_nothing() {
        let ops = |released| {
            vec![
                op(Kind::Acquire, 1, 0, 10, Outcome::Granted(1)),
                op(Kind::Release, 2, 20, 30, released),
                op(Kind::Acquire, 3, 40, 50, Outcome::Contended),
            ]
        };
        assert!(is_linearizable(&ops(Outcome::NotHeld)));
        assert!(!is_linearizable(&ops(Outcome::Released)));
    }

    #[test]
    fn an_unknown_acquire_may_take_effect_late_or_never() {
        let unknown = op(Kind::Acquire, 1, 0, 10, Outcome::Unknown);
        let granted = op(Kind::Acquire, 2, 20, 30, Outcome::Granted(1));
        let released = op(Kind::Release, 2, 40, 50, Outcome::Released);
        let contended = op(Kind::Acquire, 3, 60, 70, Outcome::Contended);
        assert!(is_linearizable(&[unknown.clone(), granted.clone(), released.clone()]));
        assert!(is_linearizable(&[unknown, granted.clone(), released.clone(), contended.clone()]));
        assert!(!is_linearizable(&[granted, released, contended]));
    }

    #[test]
    fn a_grant_that_is_undone_is_visible_once_and_not_after_its_end() {
        let undone = op(Kind::Acquire, 1, 0, 100, Outcome::Undone);
        let contended =
            |at| op(Kind::Acquire, at, at.into(), u64::from(at) + 5, Outcome::Contended);
        assert!(is_linearizable(&[undone.clone(), contended(20), contended(90)]));
        assert!(!is_linearizable(&[undone.clone(), contended(101)]));
        assert!(!is_linearizable(&[contended(20)]));
        let granted = op(Kind::Acquire, 2, 30, 35, Outcome::Granted(2));
        let released = op(Kind::Release, 2, 50, 55, Outcome::Released);
        let held = [undone, granted, released];
        for seen in [&[20][..], &[60], &[20, 60], &[40], &[101]] {
            let mut ops = held.to_vec();
            ops.extend(seen.iter().map(|at| contended(*at)));
            ops.sort_by_key(|op| op.start);
            // Not twice, and not after its end.
            let is_possible = !matches!(seen, [20, 60] | [101]);
            assert_eq!(is_linearizable(&ops), is_possible, "{seen:?}");
        }
    }

    #[test]
    fn a_grant_that_is_undone_takes_no_held_lock_and_may_use_up_a_fence() {
        let undone = op(Kind::Acquire, 1, 20, 100, Outcome::Undone);
        let held = op(Kind::Acquire, 2, 0, 10, Outcome::Granted(1));
        let extended = op(Kind::Extend, 2, 110, 120, Outcome::Extended);
        assert!(is_linearizable(&[held.clone(), undone.clone(), extended]));
        let lost = op(Kind::Extend, 2, 110, 120, Outcome::NotHeld);
        assert!(!is_linearizable(&[held, undone.clone(), lost]));
        let next = |fence| op(Kind::Acquire, 3, 110, 120, Outcome::Granted(fence));
        assert!(is_linearizable(&[undone.clone(), next(1)]));
        assert!(is_linearizable(&[undone, next(2)]));
    }

    #[test]
    fn a_replay_has_the_fence_of_the_first_send() {
        let first = op(Kind::Acquire, 1, 0, 10, Outcome::Granted(1));
        let replay = |fence| op(Kind::Acquire, 1, 20, 30, Outcome::Granted(fence));
        assert!(is_linearizable(&[first.clone(), replay(1)]));
        assert!(!is_linearizable(&[first, replay(2)]));
    }

    #[test]
    fn a_repeated_release_may_report_the_effect_of_the_first() {
        let granted = op(Kind::Acquire, 1, 0, 10, Outcome::Granted(1));
        let lost = op(Kind::Release, 1, 20, 30, Outcome::Unknown);
        let taken = op(Kind::Acquire, 2, 40, 50, Outcome::Granted(2));
        let repeated = op(Kind::Release, 1, 60, 70, Outcome::Released);
        let all = [granted.clone(), lost, taken.clone(), repeated.clone()];
        assert!(is_linearizable(&all));
        assert!(!is_linearizable(&[granted, taken, repeated]));
    }

    #[test]
    fn a_release_reports_the_effect_of_another_at_the_same_time_only_if_the_store_shares_them() {
        let granted = op(Kind::Acquire, 1, 0, 10, Outcome::Granted(1));
        let released = |from| op(Kind::Release, 1, from, from + 10, Outcome::Released);
        for (second, shares_releases, verdict) in
            [(25, true, true), (25, false, false), (31, true, false)]
        {
            let ops = [granted.clone(), released(20), released(second)];
            let found = linearize(&ops, Precision { expiry: 0, shares_releases }, |_, _| false);
            assert_eq!(found == Verdict::Linearizable, verdict, "{second} {shares_releases}");
        }
    }

    /// A store with a random schedule of many clients, and the history that they see.
    fn random_history(seed: u64, unknown_percent: u64) -> Vec<Op> {
        let mut random = Random::new(seed);
        let (mut ops, mut time, mut fence) = (Vec::new(), 0, 0);
        let mut holder = None;
        for id in 0..300 {
            time += random.within(1..4);
            // The effect is somewhere between begin and end.
            let (before, after) = (random.within(1..9), random.within(1..9));
            let (kind, id, outcome) = match holder {
                None => {
                    fence += 1;
                    holder = Some(id);
                    (Kind::Acquire, id, Outcome::Granted(fence))
                }
                Some(holding) if random.chance(50) => {
                    holder = None;
                    (Kind::Release, holding, Outcome::Released)
                }
                Some(_) => (Kind::Acquire, id, Outcome::Contended),
            };
            let outcome = if random.chance(unknown_percent) { Outcome::Unknown } else { outcome };
            ops.push(op(kind, id, time + 10 - before, time + 10 + after, outcome));
        }
        ops.sort_by_key(|op| op.start);
        ops
    }

    #[test]
    fn random_histories_of_a_correct_store_are_linearizable() {
        for seed in 0..100 {
            assert!(is_linearizable(&random_history(seed, 3)), "seed {seed}");
        }
    }

    #[test]
    fn random_histories_with_one_wrong_outcome_are_not() {
        for seed in 0..100 {
            let mut ops = random_history(seed, 0);
            // Later grants have smaller fences.
            let wrong = ops.iter().position(|op| op.outcome == Outcome::Contended);
            ops[wrong.expect("contended")].outcome = Outcome::Granted(1_000);
            assert!(!is_linearizable(&ops), "seed {seed}");
        }
    }
}
