//! The rules that a history must keep, checked one by one, each with a message of its own.

use std::collections::{BTreeMap, HashMap};

use super::{Excuses, Precision, TOLERANCE, Violation, overlap};
use crate::history::{Belief, Call, History, Kind, Micros, Op, Outcome};
use crate::register::Accepted;

/// How much longer than its limit a call may take.
const LATE: Micros = 1_000_000;

/// Checks all rules.
pub(super) fn check(history: &History, excuses: &Excuses, precision: Precision) -> Vec<Violation> {
    let mut found = Vec::new();
    let mut keys: BTreeMap<u32, Vec<&Op>> = BTreeMap::new();
    for op in &history.ops {
        keys.entry(op.key).or_default().push(op);
    }
    for (key, ops) in &keys {
        found.extend(exclusion(*key, ops, excuses, precision));
        found.extend(fences(*key, ops));
        found.extend(releases(*key, ops, excuses, precision));
    }
    found.extend(beliefs(history, excuses));
    found.extend(refused_writes(history, excuses));
    found.extend(deadlines(history));
    found.extend(history.leaks.iter().map(|place| Violation {
        rule: "I7",
        what: format!("a key or a lock id was found in {place}"),
        key: None,
        window: (0, 0),
    }));
    found
}

fn fence_of(op: &Op) -> Option<u64> {
    match op.outcome {
        Outcome::Granted(fence) => Some(fence),
        _ => None,
    }
}

/// I1: no two grants of a key overlap on the store's timeline.
fn exclusion(key: u32, ops: &[&Op], excuses: &Excuses, precision: Precision) -> Vec<Violation> {
    let mut found = Vec::new();
    let mut of_id: HashMap<u32, Vec<&Op>> = HashMap::new();
    for op in ops {
        of_id.entry(op.id).or_default().push(op);
    }
    let mut grants: Vec<&Op> = ops.iter().copied().filter(|op| fence_of(op).is_some()).collect();
    grants.sort_by_key(|op| op.start);
    for (index, first) in grants.iter().enumerate() {
        let until = held_until(first, &of_id[&first.id]).saturating_sub(precision.expiry);
        for second in &grants[index + 1..] {
            if second.start > until {
                break;
            }
            let is_inside = second.start >= first.end && second.end <= until;
            if is_inside && second.id != first.id && !excuses.cover(first.start, second.end) {
                found.push(Violation {
                    rule: "I1",
                    what: "a lock was granted while another grant was live".to_owned(),
                    key: Some(key),
                    window: (first.start, second.end),
                });
            }
        }
    }
    found
}

/// Returns until when a granted lock is certainly held: until it is asked to be released, or dead.
fn held_until(grant: &Op, of_id: &[&Op]) -> Micros {
    let lease_end = |op: &Op| op.start + op.ttl_ms * 1_000 + TOLERANCE;
    let mut until = lease_end(grant);
    for op in of_id.iter().filter(|op| op.start >= grant.start) {
        match op.kind {
            Kind::Acquire => {}
            Kind::Release | Kind::Undo => until = until.min(op.start),
            Kind::Extend if op.outcome == Outcome::Extended && op.end < until => {
                until = lease_end(op);
            }
            Kind::Extend => until = until.min(lease_end(op)),
        }
    }
    until
}

/// I2: fences grow in real-time order, and no two grants have the same.
fn fences(key: u32, ops: &[&Op]) -> Vec<Violation> {
    let mut found = Vec::new();
    let mut by_start: Vec<(&Op, u64)> =
        ops.iter().filter_map(|op| Some((*op, fence_of(op)?))).collect();
    let mut by_end = by_start.clone();
    by_start.sort_by_key(|(op, _)| op.start);
    by_end.sort_by_key(|(op, _)| op.end);
    let mut ended = by_end.iter().peekable();
    let mut largest: Option<(&Op, u64)> = None;
    let mut owners: HashMap<u64, &Op> = HashMap::new();
    for (op, fence) in by_start {
        while let Some((earlier, fence)) = ended.next_if(|(earlier, _)| earlier.end < op.start) {
            if largest.is_none_or(|(_, largest)| *fence > largest) {
                largest = Some((earlier, *fence));
            }
        }
        let broken = largest.filter(|(earlier, largest)| fence <= *largest && earlier.id != op.id);
        let owner = *owners.entry(fence).or_insert(op);
        if let Some((earlier, larger)) = broken {
            found.push(Violation {
                rule: "I2",
                what: format!("fence {fence} was granted after fence {larger}"),
                key: Some(key),
                window: (earlier.start, op.end),
            });
        } else if owner.id != op.id {
            found.push(Violation {
                rule: "I2",
                what: format!("fence {fence} was granted twice"),
                key: Some(key),
                window: (owner.start.min(op.start), op.end.max(owner.end)),
            });
        }
    }
    found
}

/// I4: at most one release of an id succeeds.
fn releases(key: u32, ops: &[&Op], excuses: &Excuses, precision: Precision) -> Vec<Violation> {
    let mut released: HashMap<u32, &Op> = HashMap::new();
    let mut found = Vec::new();
    let is_once = |op: &&&Op| !excuses.repeated.contains(&op.id);
    for op in ops.iter().filter(|op| op.outcome == Outcome::Released).filter(is_once) {
        let first = released.insert(op.id, op);
        let first = first.filter(|first| !(precision.shares_releases && overlap(first, op)));
        if let Some(first) = first {
            found.push(Violation {
                rule: "I4",
                what: "two releases of the same lock succeeded".to_owned(),
                key: Some(key),
                window: (first.start.min(op.start), op.end.max(first.end)),
            });
        }
    }
    found
}

/// No two guards of a key are valid at once.
fn beliefs(history: &History, excuses: &Excuses) -> Vec<Violation> {
    let mut keys: BTreeMap<u32, Vec<&Belief>> = BTreeMap::new();
    for belief in history.beliefs.iter().filter(|belief| belief.from < belief.to) {
        keys.entry(belief.key).or_default().push(belief);
    }
    let mut found = Vec::new();
    for (key, beliefs) in &mut keys {
        beliefs.sort_by_key(|belief| belief.from);
        for (index, first) in beliefs.iter().enumerate() {
            for second in &beliefs[index + 1..] {
                if second.from >= first.to {
                    break;
                }
                if second.id != first.id && !excuses.cover(first.from, second.to) {
                    found.push(Violation {
                        rule: "beliefs",
                        what: "two guards of a key were valid at once".to_owned(),
                        key: Some(*key),
                        window: (second.from, first.to.min(second.to)),
                    });
                }
            }
        }
    }
    found
}

/// A write of a guard that is valid is not refused.
fn refused_writes(history: &History, excuses: &Excuses) -> Vec<Violation> {
    let refused = history.writes.iter().filter(|write| !write.accepted && write.is_valid);
    // A lock that ended early is noticed when its guard renews it, or not at all.
    let mut granted: HashMap<u32, Micros> = HashMap::new();
    for op in history.ops.iter().filter(|op| fence_of(op).is_some()) {
        granted.entry(op.id).or_insert(op.start);
    }
    let refused = refused.filter(|write| {
        !excuses.cover(granted.get(&write.id).copied().unwrap_or(write.from), write.to)
    });
    let violation = |write: &crate::history::Write| Violation {
        rule: "I3",
        what: "the write of a valid guard was refused: a later holder had written".to_owned(),
        key: Some(write.key),
        window: (write.from, write.to),
    };
    refused.map(violation).collect()
}

/// I3: the register accepted no write of an earlier holder after one of a later holder.
#[must_use]
pub fn check_register(history: &History, accepted: &[Accepted]) -> Vec<Violation> {
    let mut last: HashMap<u32, &Accepted> = HashMap::new();
    let mut found = Vec::new();
    for write in accepted {
        let before = last.insert(write.key, write);
        if before.is_some_and(|before| before.id != write.id && before.fence >= write.fence) {
            let same = history.writes.iter().rfind(|other| {
                other.key == write.key && other.fence == write.fence && other.accepted
            });
            found.push(Violation {
                rule: "I3",
                what: format!("two holders wrote with fence {}", write.fence),
                key: Some(write.key),
                window: same.map_or((0, 0), |write| (write.from, write.to)),
            });
        }
    }
    found
}

/// I6: no call takes longer than its limit and a second.
fn deadlines(history: &History) -> Vec<Violation> {
    let mut found = Vec::new();
    for call in &history.calls {
        let end = call.end.unwrap_or_else(|| history.processes[call.process].known_until());
        let took = end.saturating_sub(call.start);
        if took <= call.limit + LATE {
            continue;
        }
        let took = took.saturating_sub(time_stopped(history, &[call.process], call.start, end));
        if took > call.limit + LATE {
            let (ms, limit_ms) = (took / 1_000, call.limit / 1_000);
            found.push(Violation {
                rule: "I6",
                what: format!("{} took {ms} ms; its limit is {limit_ms} ms", call.name),
                key: Some(call.key),
                window: (call.start, end),
            });
        }
    }
    found
}

/// Returns for how long one of these processes, or the coordinator, did not run between two times:
/// it was stopped, or the machine was busy. What a busy machine delays breaks no promise.
pub(super) fn time_stopped(
    history: &History,
    processes: &[usize],
    from: Micros,
    to: Micros,
) -> Micros {
    let gaps = processes.iter().flat_map(|process| &history.processes[*process].gaps);
    let inside = gaps.chain(&history.lags).filter(|gap| gap.0 < to && gap.1 > from);
    let mut inside: Vec<_> = inside.map(|gap| (gap.0.max(from), gap.1.min(to))).collect();
    inside.sort_unstable();
    let (mut stopped, mut counted) = (0, from);
    for (begin, end) in inside {
        stopped += end.saturating_sub(begin.max(counted));
        counted = counted.max(end);
    }
    stopped
}

/// I5: from a time on without faults, a free lock that is waited for is taken soon.
pub(super) fn hand_overs(history: &History, from: Micros) -> Vec<Violation> {
    /// Less than the interval in which the lockers that rely on notifications poll.
    const SOON: Micros = 3_000_000;
    let mut ops: HashMap<u32, Vec<&Op>> = HashMap::new();
    for op in history.ops.iter().filter(|op| op.outcome != Outcome::Contended) {
        ops.entry(op.key).or_default().push(op);
    }
    let mut found = Vec::new();
    let all: Vec<usize> = (0..history.processes.len()).collect();
    let waits = history.calls.iter().filter(|call| call.name == "lock" && call.start > from);
    for call in waits {
        let end = call.end.unwrap_or_else(|| history.processes[call.process].known_until());
        let Some(ops) = ops.get(&call.key).filter(|_| end - call.start > SOON) else { continue };
        // The key was free from the last release before, unless there was a grant since.
        for release in ops.iter().filter(|op| op.outcome == Outcome::Released) {
            let free_from = release.end.max(call.start);
            let is_grant = |op: &&&Op| {
                let may_hold =
                    matches!(op.outcome, Outcome::Granted(_) | Outcome::Unknown | Outcome::Undone);
                op.kind == Kind::Acquire && may_hold && op.end > release.start
            };
            let taken = ops.iter().filter(is_grant).map(|op| op.start).min().unwrap_or(end);
            let free = taken.min(end).saturating_sub(free_from);
            let stopped = time_stopped(history, &all, free_from, end);
            if release.end < end && free.saturating_sub(stopped) > SOON {
                found.push(Violation {
                    rule: "I5",
                    what: format!("a free lock was waited for during {} ms", free / 1_000),
                    key: Some(call.key),
                    window: (free_from, taken.min(end)),
                });
                break;
            }
        }
    }
    found
}

/// I5: from a time on without faults, a waiter on a key is not passed over: after a release it gets
/// the lock, or others that came before it do.
pub(super) fn waits(history: &History, from: Micros, key: u32) -> Vec<Violation> {
    /// Less than the interval in which the lockers that rely on notifications poll.
    const SOON: Micros = 4_000_000;
    /// More than the tasks that wait: a slow store lets few of them have their turn.
    const TURNS: usize = 40;
    let all: Vec<usize> = (0..history.processes.len()).collect();
    let is_release = |op: &&Op| op.key == key && op.outcome == Outcome::Released;
    let mut releases: Vec<Micros> =
        history.ops.iter().filter(is_release).map(|op| op.end).collect();
    releases.sort_unstable();
    let is_wait = |call: &&Call| call.name == "lock" && call.key == key && call.start > from;
    let mut found = Vec::new();
    for call in history.calls.iter().filter(is_wait) {
        let end = call.end.unwrap_or_else(|| history.processes[call.process].known_until());
        let first = releases.partition_point(|release| *release < call.start);
        let Some(&release) = releases.get(first).filter(|release| **release < end) else {
            continue;
        };
        let waited = (end - release).saturating_sub(time_stopped(history, &all, release, end));
        let is_turn = |at: &&Micros| **at > release && **at < end;
        if waited > SOON && releases.iter().filter(is_turn).count() > TURNS {
            found.push(Violation {
                rule: "I5",
                what: format!("a waiter was passed over for {} ms after a release", waited / 1_000),
                key: Some(key),
                window: (release, end),
            });
        }
    }
    found
}

#[cfg(test)]
#[path = "rules_tests.rs"]
mod tests;
