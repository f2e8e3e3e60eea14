//! Tests the kit itself with a small, independent backend: once correct, and then with one
//! deliberate bug after the other. The kit must pass the first and catch every bug, and every case
//! must catch something.
#![cfg(feature = "conformance")]

mod sloppy;

use std::panic::AssertUnwindSafe;
use std::time::Duration;

use sloppy::{BUGS, Bug, SloppyFixture};
use syncguard::conformance::Case;
use tokio::runtime::Builder;

/// Cases that no bug of a backend makes fail, because the engine ensures them. `cargo xtask
/// mutants` plants bugs in the engine.
const THE_ENGINES: [&str; 5] = [
    "an_acquire_dropped_anywhere_leaves_no_lock",
    "a_wait_dropped_anywhere_leaves_no_lock",
    "a_release_dropped_anywhere_still_releases",
    "overlapping_sets_do_not_deadlock",
    "a_campaign_dropped_anywhere_leaves_no_leader",
];

/// How long a case may take, on virtual time.
const LONGEST: Duration = Duration::from_hours(1);

/// Returns the names of the cases that fail on a backend with this bug.
///
/// They run on virtual time, where a case that waits in vain for a notification takes no time.
fn failures(bug: Bug) -> Vec<&'static str> {
    let cases: Vec<Case<SloppyFixture>> =
        Vec::from(syncguard::conformance_tests!(@each list SloppyFixture));
    let fails = |case: &&Case<SloppyFixture>| {
        let runtime = Builder::new_current_thread().enable_all().start_paused(true).build();
        let run = AssertUnwindSafe(|| {
            runtime.expect("a runtime can be started").block_on(async {
                let fixture = SloppyFixture::new(bug);
                let run = (case.run)(&fixture);
                tokio::time::timeout(LONGEST, run).await.expect("it ends");
            });
        });
        std::panic::catch_unwind(run).is_err()
    };
    cases.iter().filter(fails).map(|case| case.name).collect()
}

#[test]
fn a_correct_backend_passes_and_every_bug_is_caught() {
    assert_eq!(failures(Bug::None), [""; 0]);
    // The cases that follow are meant to panic; their messages would only confuse.
    std::panic::set_hook(Box::new(|_| {}));
    let caught: Vec<_> = BUGS.iter().map(|bug| (bug, failures(*bug))).collect();
    drop(std::panic::take_hook());
    for (bug, failures) in &caught {
        println!("{bug:?}: caught by {failures:?}");
    }
    let missed: Vec<_> = caught.iter().filter(|(_, failures)| failures.is_empty()).collect();
    assert!(missed.is_empty(), "the kit does not catch {missed:?}");
    let names = syncguard::conformance_tests!(@each list SloppyFixture).map(|case| case.name);
    let is_red = |name: &&str| caught.iter().any(|(_, failures)| failures.contains(name));
    let never_red: Vec<_> = names.into_iter().filter(|name| !is_red(name)).collect();
    assert_eq!(never_red, THE_ENGINES, "cases that no bug here makes fail");
}
