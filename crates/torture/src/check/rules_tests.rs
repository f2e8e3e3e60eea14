//! Tests of the rules: each finds its violation, and only that.

use super::{Excuses, check, check_register, hand_overs, time_stopped, waits};
use crate::check::{Precision, Violation};
use crate::history::{Allowance, Event, FaultSpan, History, Kind, Outcome};
use crate::register::Accepted;

/// A history with one process.
fn history() -> History {
    let mut history = History::default();
    history.add_process(0, 0);
    history
}

/// Adds an operation on key 0 with a TTL of one second; the times are in milliseconds.
fn op(history: &mut History, kind: Kind, id: &str, from: u64, to: u64, outcome: Outcome) {
    let (op, id) = (history.ops.len() as u64, id.to_owned());
    let begin = Event::Begin { op, at: from * 1_000, kind, key: 0, id, ttl_ms: 1_000, locker: 0 };
    history.add(0, begin);
    history.add(0, Event::End { op, at: to * 1_000, outcome });
}

fn broken(history: &History) -> Vec<&'static str> {
    let excuses = Excuses::of(history);
    let found = check(history, &excuses, Precision { expiry: 0, shares_releases: false });
    found.into_iter().map(|violation: Violation| violation.rule).collect()
}

#[test]
fn a_grant_within_a_live_grant_breaks_i1_unless_a_clock_jumped() {
    let mut history = history();
    op(&mut history, Kind::Acquire, "a", 0, 10, Outcome::Granted(1));
    op(&mut history, Kind::Acquire, "b", 20, 30, Outcome::Granted(2));
    assert_eq!(broken(&history), ["I1"]);
    history.faults.push(FaultSpan {
        name: "a clock jumps".to_owned(),
        client: None,
        from: 5_000,
        to: 6_000,
        allows: Allowance::Expiry,
    });
    assert!(broken(&history).is_empty());
}

#[test]
fn a_grant_after_a_release_or_the_expiry_breaks_nothing() {
    for (kind, at) in [(Kind::Release, 20), (Kind::Undo, 20)] {
        let mut history = history();
        op(&mut history, Kind::Acquire, "a", 0, 10, Outcome::Granted(1));
        op(&mut history, kind, "a", at, at + 20, Outcome::Unknown);
        op(&mut history, Kind::Acquire, "b", at + 1, at + 5, Outcome::Granted(2));
        assert!(broken(&history).is_empty());
    }
    let mut history = history();
    op(&mut history, Kind::Acquire, "a", 0, 10, Outcome::Granted(1));
    op(&mut history, Kind::Acquire, "b", 1_990, 2_001, Outcome::Granted(2));
    assert!(broken(&history).is_empty());
}

#[test]
fn an_extended_lock_is_live_for_longer() {
    let mut history = history();
    op(&mut history, Kind::Acquire, "a", 0, 10, Outcome::Granted(1));
    op(&mut history, Kind::Extend, "a", 900, 910, Outcome::Extended);
    op(&mut history, Kind::Acquire, "b", 2_100, 2_110, Outcome::Granted(2));
    assert_eq!(broken(&history), ["I1"]);
}

#[test]
fn a_fence_that_does_not_grow_breaks_i2() {
    for fence in [4, 5] {
        let mut history = history();
        op(&mut history, Kind::Acquire, "a", 0, 10, Outcome::Granted(5));
        op(&mut history, Kind::Release, "a", 20, 30, Outcome::Released);
        op(&mut history, Kind::Acquire, "b", 40, 50, Outcome::Granted(fence));
        assert_eq!(broken(&history), ["I2"]);
    }
}

#[test]
fn two_releases_break_i4() {
    let mut history = history();
    op(&mut history, Kind::Acquire, "a", 0, 10, Outcome::Granted(1));
    op(&mut history, Kind::Release, "a", 20, 30, Outcome::Released);
    op(&mut history, Kind::Release, "a", 40, 50, Outcome::Released);
    assert_eq!(broken(&history), ["I4"]);
}

#[test]
fn two_releases_at_the_same_time_break_i4_unless_the_store_shares_them() {
    let mut history = history();
    op(&mut history, Kind::Acquire, "a", 0, 10, Outcome::Granted(1));
    op(&mut history, Kind::Release, "a", 20, 30, Outcome::Released);
    op(&mut history, Kind::Release, "a", 25, 35, Outcome::Released);
    assert_eq!(broken(&history), ["I4"]);
    let precision = Precision { expiry: 0, shares_releases: true };
    assert!(check(&history, &Excuses::default(), precision).is_empty());
    op(&mut history, Kind::Release, "a", 36, 40, Outcome::Released);
    assert_eq!(check(&history, &Excuses::default(), precision).len(), 1);
}

#[test]
fn two_valid_guards_of_a_key_break_the_beliefs() {
    let valid = |id: &str, at: u64| {
        let id = id.to_owned();
        Event::Valid { before: at, after: at + 1, key: 0, id }
    };
    let mut history = history();
    for event in [valid("a", 10), valid("a", 100), valid("b", 100), valid("b", 200)] {
        history.add(0, event);
    }
    assert!(broken(&history).is_empty(), "one begins when the other ends");
    history.add(0, valid("a", 150));
    assert_eq!(broken(&history), ["beliefs"]);
}

#[test]
fn the_write_of_a_valid_guard_that_is_refused_breaks_i3() {
    let write = |is_valid| Event::Write {
        from: 1,
        to: 2,
        key: 0,
        id: "a".to_owned(),
        fence: 3,
        accepted: false,
        is_valid,
    };
    let mut history = history();
    history.add(0, write(false));
    assert!(broken(&history).is_empty(), "a stale write is refused");
    history.add(0, write(true));
    assert_eq!(broken(&history), ["I3"]);
}

#[test]
fn the_guard_of_a_lock_that_was_evicted_may_be_refused() {
    for (granted, rules) in [(0, &[][..]), (20, &["I3"])] {
        let mut history = history();
        op(&mut history, Kind::Acquire, "a", granted, granted + 1, Outcome::Granted(3));
        history.faults.push(FaultSpan {
            name: "eviction".to_owned(),
            client: None,
            from: 5_000,
            to: 10_000,
            allows: Allowance::Expiry,
        });
        let (from, to, id) = (30_000, 30_001, "a".to_owned());
        let (accepted, is_valid) = (false, true);
        history.add(0, Event::Write { from, to, key: 0, id, fence: 3, accepted, is_valid });
        assert_eq!(broken(&history), rules, "granted at {granted}");
    }
}

#[test]
fn two_writers_with_one_fence_break_i3() {
    let write = |id: &str, fence| Accepted { key: 0, fence, id: id.to_owned() };
    let writes = [write("a", 1), write("a", 1), write("b", 2)];
    assert!(check_register(&history(), &writes).is_empty());
    let writes = [write("a", 1), write("b", 1)];
    assert_eq!(check_register(&history(), &writes).len(), 1);
}

#[test]
fn a_late_call_breaks_i6_unless_its_process_was_stopped() {
    let mut history = history();
    let (name, limit) = ("lock".to_owned(), 1_000_000);
    history.add(0, Event::Call { call: 1, at: 0, name, key: 0, limit });
    history.add(0, Event::Return { call: 1, at: 2_500_000, result: "granted".to_owned() });
    assert_eq!(broken(&history), ["I6"]);
    history.add(0, Event::Gap { from: 100, to: 900_000 });
    assert!(broken(&history).is_empty());
}

#[test]
fn a_call_that_does_not_return_breaks_i6() {
    let mut history = history();
    let (name, limit) = ("lock".to_owned(), 1_000);
    history.add(0, Event::Call { call: 1, at: 5, name, key: 0, limit });
    history.add(0, Event::Gap { from: 900_000, to: 1_000_000 });
    assert!(broken(&history).is_empty(), "its end may not have been read yet");
    history.add(0, Event::Gap { from: 2_000_000, to: 2_000_001 });
    assert_eq!(broken(&history), ["I6"]);
    let mut history = self::history();
    history.add(0, Event::Call { call: 1, at: 5, name: "lock".to_owned(), key: 0, limit });
    history.processes[0].ended = Some(2_000_000);
    assert_eq!(broken(&history), ["I6"]);
}

#[test]
fn a_leak_breaks_i7() {
    let mut history = history();
    history.add(0, Event::Leak { place: "a log".to_owned() });
    assert_eq!(broken(&history), ["I7"]);
}

#[test]
fn a_free_lock_that_is_waited_for_breaks_i5() {
    let wait = |granted_at| {
        let mut history = history();
        op(&mut history, Kind::Acquire, "a", 0, 10, Outcome::Granted(1));
        op(&mut history, Kind::Release, "a", 500, 510, Outcome::Released);
        op(&mut history, Kind::Acquire, "b", granted_at, granted_at + 5, Outcome::Granted(2));
        let (name, limit) = ("lock".to_owned(), 6_000_000);
        history.add(0, Event::Call { call: 1, at: 400_000, name, key: 0, limit });
        let result = "granted".to_owned();
        history.add(0, Event::Return { call: 1, at: (granted_at + 6) * 1_000, result });
        hand_overs(&history, 1).len()
    };
    assert_eq!(wait(3_400), 0);
    assert_eq!(wait(3_600), 1);
}

#[test]
fn a_waiter_that_is_passed_over_breaks_i5() {
    let wait = |until: u64, turns: u64| {
        let mut history = history();
        for turn in 0..turns {
            let at = 500 + turn * 10;
            op(&mut history, Kind::Release, &turn.to_string(), at, at + 10, Outcome::Released);
        }
        let (name, limit) = ("lock".to_owned(), 6_000_000);
        history.add(0, Event::Call { call: 1, at: 400_000, name, key: 0, limit });
        let result = "granted".to_owned();
        history.add(0, Event::Return { call: 1, at: until * 1_000, result });
        (waits(&history, 1, 0).len(), waits(&history, 1, 1).len())
    };
    assert_eq!(wait(4_500, 100), (0, 0));
    assert_eq!(wait(4_511, 100), (1, 0));
    assert_eq!(wait(4_511, 30), (0, 0), "the store is slow");
}

#[test]
fn what_a_busy_machine_delays_breaks_neither_i5_nor_i6() {
    let mut history = history();
    op(&mut history, Kind::Acquire, "a", 0, 10, Outcome::Granted(1));
    op(&mut history, Kind::Release, "a", 500, 510, Outcome::Released);
    let (name, limit) = ("lock".to_owned(), 3_000_000);
    history.add(0, Event::Call { call: 1, at: 400_000, name, key: 0, limit });
    let result = "granted".to_owned();
    history.add(0, Event::Return { call: 1, at: 4_500_000, result });
    assert_eq!((broken(&history), hand_overs(&history, 1).len()), (vec!["I6"], 1));
    history.lags.push((1_000_000, 1_500_000));
    history.processes[0].gaps.push((1_400_000, 2_000_000));
    assert_eq!((broken(&history), hand_overs(&history, 1).len()), (vec![], 0));
}

#[test]
fn the_time_that_a_process_was_stopped_is_cut_at_the_ends() {
    let mut history = history();
    history.processes[0].gaps = vec![(0, 10), (20, 40), (90, 99)];
    assert_eq!(time_stopped(&history, &[0], 5, 30), 15);
    history.processes[0].gaps = vec![(0, 10), (5, 20), (6, 8)];
    history.lags = vec![(18, 25)];
    assert_eq!(time_stopped(&history, &[0], 0, 30), 25, "counted once");
    assert_eq!(time_stopped(&history, &[], 0, 30), 7);
}
