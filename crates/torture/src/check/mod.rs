//! Checks a history: what must hold whatever the faults were.

mod failover;
mod linear;
mod rules;

use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use failover::excused;
pub use linear::{Verdict, linearize};
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

/// When locks may end early or late.
#[derive(Clone, Debug, Default)]
struct Excuses(Vec<(Micros, Micros)>);

impl Excuses {
    fn of(faults: &[FaultSpan]) -> Self {
        let excuses = faults.iter().filter(|fault| fault.allows == Allowance::Expiry);
        Self(excuses.map(|fault| (fault.from, fault.to)).collect())
    }

    /// Returns whether an excuse overlaps a time.
    fn cover(&self, from: Micros, to: Micros) -> bool {
        self.0.iter().any(|&(begin, end)| begin <= to && from <= end)
    }
}

/// Checks a history.
#[must_use]
pub fn check(history: &History, accepted: &[Accepted], precision: Precision) -> Checked {
    let history = &excused(history);
    let excuses = Excuses::of(&history.faults);
    let mut checked =
        Checked { violations: rules::check(history, &excuses, precision), ..Default::default() };
    checked.violations.extend(check_register(history, accepted));
    for (key, ops) in by_key(history) {
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

/// Returns the lock ids whose release, undo or record the faults may have lost, by the
/// documentation: such a lock may stay until it expires.
#[must_use]
pub fn ids_that_may_stay(history: &History) -> HashSet<u32> {
    let excuses = Excuses::of(&history.faults);
    let is_hit = |op: &&Op| excuses.cover(op.start, op.end);
    let evicted = history.ops.iter().filter(is_hit).map(|op| op.id);
    evicted.chain(failover::lost(history)).collect()
}

/// Returns the operations of each key that may have had an effect or tell something.
fn by_key(history: &History) -> BTreeMap<u32, Vec<Op>> {
    let mut keys: BTreeMap<u32, Vec<Op>> = BTreeMap::new();
    for op in &history.ops {
        if !matches!(op.outcome, Outcome::Failed | Outcome::AlreadyUsed) && op.key != u32::MAX {
            keys.entry(op.key).or_default().push(op.clone());
        }
    }
    for ops in keys.values_mut() {
        ops.sort_by_key(|op| op.start);
    }
    keys
}
