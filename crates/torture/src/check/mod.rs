//! Checks a history: what must hold whatever the faults were.

mod linear;
mod lost_writes;
mod repetition;
mod rules;

use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

pub use linear::{Verdict, linearize};
use lost_writes::excused;
pub use rules::check_register;

use crate::history::{Allowance, FaultSpan, History, Micros, Op, Outcome, micros};
use crate::register::Accepted;
use crate::script::PATIENT_KEY;

const LINEARIZABILITY: &str = "linearizability";

/// How long after the last fault connections for notifications are open again.
pub const RECONNECT: Duration = Duration::from_secs(3);

/// How long a lock stays live after its expiry.
const TOLERANCE: Micros = 1_000_000;

/// How exactly it is known when a store did something, and which release did it.
#[derive(Clone, Copy, Debug)]
pub struct Precision {
    /// How much earlier or later than its TTL says a lock may end: rounding to milliseconds, and
    /// for a store without a clock of its own, the difference between the clients' clocks.
    pub expiry: Micros,
    /// Whether a release whose answer was lost reports success when the lock is gone, although
    /// another release of the same id, at the same time, may have done it.
    pub shares_releases: bool,
}

impl Default for Precision {
    fn default() -> Self {
        Self { expiry: 30_000, shares_releases: false }
    }
}

/// Returns whether two operations overlap.
fn overlap(one: &Op, other: &Op) -> bool {
    one.start <= other.end && other.start <= one.end
}

/// A broken promise.
#[derive(Clone, Debug)]
pub struct Violation {
    /// Which one, such as `I1`.
    pub rule: &'static str,
    /// What happened, in one sentence.
    pub what: String,
    /// The key.
    pub key: Option<u32>,
    /// From when to when it happened.
    pub window: (Micros, Micros),
}

/// What a check counted.
#[derive(Clone, Debug, Default)]
pub struct Checked {
    /// What was broken.
    pub violations: Vec<Violation>,
    /// The histories of single keys that are linearizable and in which at least two lockers took
    /// part.
    pub histories: usize,
    /// Histories that were too ambiguous to decide.
    pub undecided: usize,
}

/// What the faults of a history allow, by the documentation.
#[derive(Clone, Debug, Default)]
struct Excuses {
    /// When locks may end early or late.
    expiry: Vec<(Micros, Micros)>,
    /// Lock ids that may hold their lock a second time.
    repeated: HashSet<u32>,
}

impl Excuses {
    fn of(history: &History) -> Self {
        let is_excuse =
            |fault: &&FaultSpan| matches!(fault.allows, Allowance::Expiry | Allowance::LostStore);
        let expiry = history.faults.iter().filter(is_excuse);
        Self {
            expiry: expiry.map(|fault| (fault.from, fault.to)).collect(),
            repeated: repetition::repeated_ids(history),
        }
    }

    /// Returns whether a lock that existed at a time may end early or late.
    fn cover(&self, from: Micros, to: Micros) -> bool {
        self.expiry.iter().any(|&(begin, end)| begin <= to && from <= end)
    }
}

/// Checks a history.
#[must_use]
pub fn check(history: &History, accepted: &[Accepted], precision: Precision) -> Checked {
    let history = &excused(history);
    let excuses = Excuses::of(history);
    let mut checked =
        Checked { violations: rules::check(history, &excuses, precision), ..Default::default() };
    checked.violations.extend(check_register(history, accepted));
    for (key, ops) in by_key(history.ops.clone(), repetition::second_effects(history)) {
        match linearize(&ops, precision, |from, to| excuses.cover(from, to)) {
            Verdict::Linearizable => {
                let lockers: HashSet<_> = ops.iter().map(|op| (op.process, op.locker)).collect();
                checked.histories += usize::from(lockers.len() > 1);
            }
            Verdict::Undecided => checked.undecided += 1,
            Verdict::Impossible { from, to } => checked.violations.push(Violation {
                rule: LINEARIZABILITY,
                what: "no order of these operations explains their outcomes".to_owned(),
                key: Some(key),
                window: (from, to),
            }),
        }
    }
    // The rules say best what went wrong.
    checked.violations.sort_by_key(|v| (v.rule == LINEARIZABILITY, v.window.1));
    checked
}

/// Checks that from a time on, without faults, a free lock that is waited for is taken soon, and
/// that those who rely on notifications get them.
#[must_use]
pub fn check_hand_overs(history: &History, calm_from: Micros) -> Vec<Violation> {
    let from = calm_from + micros(RECONNECT);
    let history = &excused(history);
    let mut found = rules::hand_overs(history, from);
    found.extend(rules::waits(history, from, PATIENT_KEY));
    found
}

/// Returns the lock ids whose release, undo or record the faults may have lost, or that may hold
/// their lock a second time, by the documentation: such a lock may stay until it expires.
#[must_use]
pub fn ids_that_may_stay(history: &History) -> HashSet<u32> {
    let excuses = Excuses::of(history);
    let is_hit = |op: &&Op| excuses.cover(op.start, op.end);
    let evicted = history.ops.iter().filter(is_hit).map(|op| op.id);
    evicted.chain(lost_writes::lost(history)).chain(excuses.repeated.iter().copied()).collect()
}

/// Returns the operations of each key that may have had an effect or tell something.
fn by_key(ops: Vec<Op>, second_effects: Vec<Op>) -> BTreeMap<u32, Vec<Op>> {
    let mut keys: BTreeMap<u32, Vec<Op>> = BTreeMap::new();
    for op in ops.into_iter().chain(second_effects) {
        if !matches!(op.outcome, Outcome::Failed | Outcome::AlreadyUsed) && op.key != u32::MAX {
            keys.entry(op.key).or_default().push(op);
        }
    }
    for ops in keys.values_mut() {
        ops.sort_by_key(|op| op.start);
    }
    keys
}
