//! What tests with real servers share: waiting for something, and for a wake-up.

#![allow(dead_code, reason = "every test file uses a part of it")]

use std::time::{Duration, Instant};

use syncguard::{LockBackend, LockOptions, Locker, RetryPolicy};
use tokio::task::JoinHandle;

/// Waits until something holds, and says what if it does not.
pub(crate) async fn eventually(what: &str, mut check: impl AsyncFnMut() -> bool) {
    let started = Instant::now();
    while !check().await {
        assert!(started.elapsed() < Duration::from_secs(30), "{what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// A locker that hears of releases or never: it does not poll, and it has no deadline at which it would
/// try once more.
pub(crate) fn waiter<B: LockBackend>(backend: B) -> Locker<B> {
    let much_later = Duration::from_hours(1);
    let retry = RetryPolicy { delay: much_later, ..RetryPolicy::default() };
    let options = LockOptions::default().wait_forever().retry(retry).ride_out_errors(true);
    Locker::builder(backend).options(options).poll_interval(much_later).build().expect("a runtime")
}

/// Waits for such a one.
pub(crate) async fn woken(waiting: JoinHandle<syncguard::Result<()>>) {
    let woken = tokio::time::timeout(Duration::from_secs(20), waiting).await;
    woken.expect("woken, not polled").expect("no panic").expect("acquired");
}
