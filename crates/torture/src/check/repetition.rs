//! What requests that are sent twice may do, by the documentation: each may take effect a second
//! time, then or later. An acquire may leave a lock that no guard knows, until it expires.

use std::collections::HashSet;

use crate::history::{Allowance, History, Micros, Op, Outcome};

/// How much later the second effect may come. The second request is sent within half a second, to a
/// server that is stopped for a few seconds at most.
const LATE: Micros = 10_000_000;

/// Returns the second effects of operations whose requests were sent twice: as operations of
/// unknown outcome, because they may come at any time, before the answer too, or never.
pub(super) fn second_effects(history: &History) -> Vec<Op> {
    let repeated = history.ops.iter().filter(|op| is_repeated(op, history));
    let second = |op: &Op| Op {
        // Before the operation, which may report the effect of its other request.
        start: op.start.saturating_sub(1),
        end: op.start + LATE,
        outcome: Outcome::Unknown,
        ..op.clone()
    };
    repeated.map(second).collect()
}

/// Returns the lock ids that may hold their lock a second time.
pub(super) fn repeated_ids(history: &History) -> HashSet<u32> {
    history.ops.iter().filter(|op| is_repeated(op, history)).map(|op| op.id).collect()
}

fn is_repeated(op: &Op, history: &History) -> bool {
    let client = history.processes[op.process].client;
    history.faults.iter().any(|fault| {
        fault.allows == Allowance::Repetition
            && fault.client == Some(client)
            && op.end >= fault.from
            && op.start <= fault.to
    })
}

#[cfg(test)]
mod tests {
    use crate::check::{Precision, check};
    use crate::history::{Allowance, Event, FaultSpan, History, Kind, Outcome};

    /// A history in which the requests of one of two clients are sent twice, from the third to the
    /// fifth second.
    fn history() -> History {
        let mut history = History::default();
        history.add_process(0, 0);
        history.add_process(1, 0);
        history.faults.push(FaultSpan {
            name: "requests sent twice".to_owned(),
            client: Some(0),
            from: 3_000_000,
            to: 5_000_000,
            allows: Allowance::Repetition,
        });
        history
    }

    /// Adds an operation of 10 ms with a TTL of one second; the time is in milliseconds.
    fn op(history: &mut History, client: usize, kind: Kind, id: &str, at: u64, outcome: Outcome) {
        let (op, id, from) = (history.ops.len() as u64, id.to_owned(), at * 1_000);
        let begin = Event::Begin { op, at: from, kind, key: 0, id, ttl_ms: 1_000, locker: 0 };
        history.add(client, begin);
        history.add(client, Event::End { op, at: from + 10_000, outcome });
    }

    fn broken(history: &History) -> Vec<&'static str> {
        let found = check(history, &[], Precision { expiry: 0, shares_releases: false }).violations;
        found.into_iter().map(|violation| violation.rule).collect()
    }

    /// The clients, and the times, whose requests are sent twice and are not.
    const CASES: [(usize, u64, bool); 3] = [(0, 4_000, true), (1, 4_000, false), (0, 1_000, false)];

    #[test]
    fn an_acquire_that_is_sent_twice_may_hold_a_lock_that_was_released() {
        for (client, at, is_allowed) in CASES {
            let mut history = history();
            op(&mut history, client, Kind::Acquire, "a", at, Outcome::Granted(1));
            op(&mut history, client, Kind::Release, "a", at + 20, Outcome::Released);
            op(&mut history, 1, Kind::Acquire, "b", at + 50, Outcome::Contended);
            let expected: &[&str] = if is_allowed { &[] } else { &["linearizability"] };
            assert_eq!(broken(&history), expected, "client {client} at {at}");
        }
    }

    #[test]
    fn a_lock_that_is_held_a_second_time_may_be_released_a_second_time() {
        for (client, at, is_allowed) in CASES {
            let mut history = history();
            op(&mut history, client, Kind::Acquire, "a", at, Outcome::Granted(1));
            op(&mut history, client, Kind::Release, "a", at + 20, Outcome::Released);
            op(&mut history, client, Kind::Release, "a", at + 50, Outcome::Released);
            let expected: &[&str] = if is_allowed { &[] } else { &["I4", "linearizability"] };
            assert_eq!(broken(&history), expected, "client {client} at {at}");
        }
    }

    #[test]
    fn a_release_may_come_after_its_second_request() {
        for (client, at, is_allowed) in CASES {
            let mut history = history();
            op(&mut history, client, Kind::Acquire, "a", at, Outcome::Granted(1));
            op(&mut history, client, Kind::Release, "a", at + 20, Outcome::NotHeld);
            let expected: &[&str] = if is_allowed { &[] } else { &["linearizability"] };
            assert_eq!(broken(&history), expected, "client {client} at {at}");
        }
    }

    #[test]
    fn two_grants_are_not_allowed() {
        let mut history = history();
        op(&mut history, 0, Kind::Acquire, "a", 4_000, Outcome::Granted(1));
        op(&mut history, 1, Kind::Acquire, "b", 4_100, Outcome::Granted(2));
        assert_eq!(broken(&history), ["I1", "linearizability"]);
    }
}
