//! The data of the report, as JSON. Times are milliseconds from the begin of a run.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use serde_json::{Value, json};

use crate::bug::Bug;
use crate::check::Violation;
use crate::history::{History, Kind, Micros, Op, Outcome};
use crate::plan::Deployment;
use crate::run::Run;
use crate::script::HOT_KEYS;

/// How many keys without a violation are shown, per run.
const SHOWN_KEYS: usize = 6;
/// How many violations are shown, per run.
const SHOWN_VIOLATIONS: usize = 5;

pub(super) fn of(runs: &[Run]) -> Value {
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "runs": runs.iter().map(run).collect::<Vec<_>>(),
    })
}

fn run(run: &Run) -> Value {
    let time = |at: Micros| ms(at.saturating_sub(run.began));
    let faults: Vec<Value> = run
        .history
        .faults
        .iter()
        .map(|fault| {
            json!([fault.name, fault.client, time(fault.from), time(fault.to.min(run.ended))])
        })
        .collect();
    let violations: Vec<Value> =
        run.checked.violations.iter().take(SHOWN_VIOLATIONS).map(|v| violation(run, v)).collect();
    let deployment = run.plan.deployment;
    json!({
        "name": deployment.name(),
        "store": run.version,
        "seed": run.plan.seed.to_string(),
        "bug": run.bug.map(Bug::name),
        "length": time(run.ended),
        "calm": time(run.calm_from),
        "lanes": lanes(deployment),
        "faults": faults,
        "keys": keys(run),
        "figures": figures(run),
        "gaps": hand_overs(&run.history),
        "violations": violations,
        "violationCount": run.checked.violations.len(),
        "command": command(run),
    })
}

/// Returns the command that repeats a run.
fn command(run: &Run) -> String {
    let (name, seed) = (run.plan.deployment.name(), run.plan.seed);
    let seconds = (run.plan.noisy + run.plan.quiet).as_secs();
    let bug = run.bug.map(|bug| format!(" --bug {}", bug.name())).unwrap_or_default();
    format!("cargo xtask torture {name} --seconds {seconds} --seed {seed}{bug}")
}

fn ms(time: Micros) -> f64 {
    // Two digits after the point.
    (Duration::from_micros(time).as_secs_f64() * 100_000.0).round() / 100.0
}

/// The lockers, by client.
fn lanes(deployment: Deployment) -> Vec<String> {
    let lockers = if deployment.clients() == 1 { 4 } else { 2 };
    let name = |client, locker| format!("client {client}, locker {locker}");
    (0..deployment.clients())
        .flat_map(|client| (0..lockers).map(move |locker| name(client + 1, locker + 1)))
        .collect()
}

fn lane(history: &History, op: &Op, deployment: Deployment) -> usize {
    let lockers = if deployment.clients() == 1 { 4 } else { 2 };
    history.processes[op.process].client * lockers + op.locker as usize
}

/// The timelines of the keys that are shown: those with violations, hot ones, and some others.
fn keys(run: &Run) -> Vec<Value> {
    let broken = run.checked.violations.iter().take(SHOWN_VIOLATIONS).filter_map(|v| v.key);
    let mut shown: Vec<u32> = broken.collect();
    shown.extend(0..HOT_KEYS);
    shown.sort_unstable();
    shown.dedup();
    let mut counts: BTreeMap<u32, usize> = BTreeMap::new();
    for op in &run.history.ops {
        *counts.entry(op.key).or_default() += 1;
    }
    let mut others: Vec<_> = counts.iter().filter(|(key, _)| !shown.contains(key)).collect();
    others.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
    let room = SHOWN_KEYS.saturating_sub(shown.len());
    shown.extend(others.into_iter().take(room).map(|(key, _)| *key));
    shown.into_iter().map(|key| timeline(run, key)).collect()
}

fn timeline(run: &Run, key: u32) -> Value {
    let time = |at: Micros| ms(at.saturating_sub(run.began));
    let history = &run.history;
    let ops: Vec<&Op> = history.ops.iter().filter(|op| op.key == key).collect();
    let mut ends: HashMap<u32, (Micros, &str)> = HashMap::new();
    let mut leases: HashMap<u32, Micros> = HashMap::new();
    for op in &ops {
        match (op.kind, op.outcome) {
            (Kind::Release | Kind::Undo, Outcome::Released) => {
                ends.insert(op.id, (op.end, "released"));
            }
            (Kind::Acquire, Outcome::Granted(_)) | (Kind::Extend, Outcome::Extended) => {
                leases.insert(op.id, op.start + op.ttl_ms * 1_000);
            }
            _ => {}
        }
    }
    let grants = ops.iter().filter_map(|op| match op.outcome {
        Outcome::Granted(fence) => Some((fence, op.end)),
        _ => None,
    });
    let next_grant = NextGrant(grants.collect());
    let is_broken = run.checked.violations.iter().any(|violation| violation.key == Some(key));
    let holds: Vec<Value> = ops
        .iter()
        .filter_map(|op| {
            let Outcome::Granted(fence) = op.outcome else { return None };
            let expiry = leases.get(&op.id).copied().unwrap_or(op.end);
            let (until, how) = ends.get(&op.id).copied().unwrap_or((expiry, "expired"));
            let lane = lane(history, op, run.plan.deployment);
            // A lock whose release was not answered, which was evicted, or which a clock ended, was
            // free by the next grant, if no promise was broken.
            let next = next_grant.after(fence).filter(|_| how == "expired" && !is_broken);
            let until = until.min(next.unwrap_or(until)).max(op.end).min(run.ended);
            Some(json!([lane, time(op.end), time(until), fence, how, op.id]))
        })
        .collect();
    let refused: Vec<Value> = history
        .writes
        .iter()
        .filter(|write| write.key == key && !write.accepted)
        .map(|write| json!([time(write.to), write.fence]))
        .collect();
    let contended = ops.iter().filter(|op| op.outcome == Outcome::Contended).count();
    let unknown = ops.iter().filter(|op| op.outcome == Outcome::Unknown).count();
    json!({
        "key": key,
        "kind": if key < HOT_KEYS { "hot" } else { "cold" },
        "holds": holds,
        "refused": refused,
        "contended": contended,
        "unknown": unknown,
    })
}

/// The fences of a key, and when they were granted.
struct NextGrant(BTreeMap<u64, Micros>);

impl NextGrant {
    /// Returns when the next larger fence was granted.
    fn after(&self, fence: u64) -> Option<Micros> {
        self.0.range(fence + 1..).next().map(|(_, at)| *at)
    }
}

/// How long a hot key was free until the next grant, in milliseconds, sorted.
fn hand_overs(history: &History) -> Vec<f64> {
    let mut gaps = Vec::new();
    for key in 0..HOT_KEYS {
        let mut free_from: Option<Micros> = None;
        let mut ops: Vec<&Op> = history.ops.iter().filter(|op| op.key == key).collect();
        ops.sort_by_key(|op| op.end);
        for op in ops {
            match (op.outcome, free_from) {
                (Outcome::Released, _) => free_from = Some(op.end),
                (Outcome::Granted(_), Some(from)) => {
                    gaps.push(ms(op.end.saturating_sub(from)));
                    free_from = None;
                }
                _ => {}
            }
        }
    }
    gaps.sort_by(f64::total_cmp);
    // A few hundred are enough to draw their distribution.
    let step = gaps.len().div_ceil(400).max(1);
    gaps.into_iter().step_by(step).collect()
}

/// The figures of a run.
fn figures(run: &Run) -> Vec<(&'static str, u64)> {
    let history = &run.history;
    let count = |outcome: Outcome| history.ops.iter().filter(|op| op.outcome == outcome).count();
    let granted = |op: &&Op| matches!(op.outcome, Outcome::Granted(_));
    vec![
        ("operations at the store", history.ops.len() as u64),
        ("locks granted", history.ops.iter().filter(granted).count() as u64),
        ("attempts at a held lock", count(Outcome::Contended) as u64),
        ("operations of unknown outcome", count(Outcome::Unknown) as u64),
        ("calls of the library", history.calls.len() as u64),
        ("futures dropped before they completed", run.dropped()),
        ("client processes", history.processes.len() as u64),
        ("faults", run.damage.faults),
        ("processes killed (kill -9)", run.damage.kills),
        ("processes stopped (SIGSTOP)", run.damage.stops),
        ("connections cut", run.damage.cuts),
        ("failovers", run.damage.failovers),
        ("packets sent twice", run.damage.duplicates),
        ("concurrent histories, linearizable", run.checked.histories as u64),
        ("histories not decided", run.checked.undecided as u64),
        ("writes accepted by the fenced register", run.accepted),
        ("stale writes refused", run.refused),
        ("violations", run.checked.violations.len() as u64),
    ]
}

/// A violation, with the operations around it.
fn violation(run: &Run, violation: &Violation) -> Value {
    /// How many operations are shown.
    const SHOWN: usize = 24;
    let time = |at: Micros| if at == Micros::MAX { None } else { Some(ms(at - run.began)) };
    let (from, to) = violation.window;
    let history = &run.history;
    let is_near = |op: &&Op| {
        Some(op.key) == violation.key
            && op.outcome != Outcome::Failed
            && op.start <= to
            && (op.end >= from && op.end < Micros::MAX || op.start >= from)
    };
    let mut near: Vec<&Op> = history.ops.iter().filter(is_near).collect();
    near.sort_by_key(|op| op.start);
    let ids: Vec<u32> = near.iter().map(|op| op.id).collect();
    // The grants of the locks that these operations are about.
    let grants = history.ops.iter().filter(|op| {
        Some(op.key) == violation.key
            && ids.contains(&op.id)
            && matches!(op.outcome, Outcome::Granted(_) | Outcome::Released)
    });
    let mut shown: Vec<&Op> = grants.collect();
    shown.extend(near.iter().rev().take(SHOWN));
    shown.sort_by_key(|op| (op.start, op.end));
    shown.dedup_by(|one, two| std::ptr::eq(*one, *two));
    let first = shown.len().saturating_sub(SHOWN);
    let ops: Vec<Value> = shown[first..]
        .iter()
        .map(|op| {
            let kind = format!("{:?}", op.kind).to_lowercase();
            let outcome = match op.outcome {
                Outcome::Granted(fence) => format!("granted, fence {fence}"),
                outcome => format!("{outcome:?}").to_lowercase(),
            };
            let lane = lane(history, op, run.plan.deployment);
            json!([lane, kind, op.id, op.ttl_ms, time(op.start), time(op.end), outcome])
        })
        .collect();
    json!({
        "rule": violation.rule,
        "what": violation.what,
        "key": violation.key,
        "from": time(from.max(run.began)),
        "to": time(to.max(run.began)),
        "ops": ops,
    })
}

#[cfg(test)]
mod tests {
    use super::NextGrant;

    #[test]
    fn a_hold_ends_by_the_grant_of_the_next_larger_fence() {
        let grants = NextGrant([(7, 40), (3, 10), (5, 30)].into());
        assert_eq!(
            [3, 4, 5, 7].map(|fence| grants.after(fence)),
            [Some(30), Some(30), Some(40), None]
        );
    }
}
