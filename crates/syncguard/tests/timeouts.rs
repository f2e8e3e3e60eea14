//! Waits that end without the lock: what they report, and what they leave to others, on virtual
//! time.

mod support;

use support::{Call, Fault, Faulty, key, locker, ms, ttl_ms};
use syncguard::testing::LocalClock;
use syncguard::{ErrorCode, HolderInfo, Jitter, LockBackend, LockOptions, Locker, RetryPolicy};
use tokio::time::Instant;

/// Returns a locker whose holder has a label.
fn labeled(backend: &Faulty, label: &str, options: LockOptions) -> Locker<Faulty> {
    let builder = Locker::builder(backend.clone()).clock(LocalClock::Tokio);
    builder.options(options).holder(label).build().expect("inside a runtime")
}

#[tokio::test(start_paused = true)]
async fn a_lock_that_comes_too_late_is_released_and_not_reported_as_its_holder() {
    let backend = Faulty::new();
    let other = locker(&backend, LockOptions::default().ttl(ttl_ms(60_000)));
    let held = other.lock("k").await.expect("free");
    let options = LockOptions::default().timeout(ms(1_000)).hold_at_least(ms(30_000));
    let waiter = labeled(&backend, "waiter", options);
    let waiting = {
        let waiter = waiter.clone();
        tokio::spawn(async move { waiter.lock("k").await })
    };
    tokio::time::sleep(ms(500)).await;
    // The grant comes exactly when the time is over.
    backend.fail_next(Call::Acquire, Fault::Delayed(ms(500)));
    held.release().await.expect("works");
    let error = waiting.await.expect("no panic").expect_err("too late");
    assert_eq!(error.code(), ErrorCode::AcquisitionTimeout);
    assert_eq!(error.holder(), None);
    waiter.shutdown().await.expect("released");
    assert!(!backend.is_locked(&key("k")).await.expect("works"), "nobody used it");
}

#[tokio::test(start_paused = true)]
async fn only_a_timeout_names_the_holder() {
    let backend = Faulty::polling();
    let other = labeled(&backend, "other", LockOptions::default());
    let _held = other.lock("k").await.expect("free");
    let waiter = locker(&backend, LockOptions::default().timeout(ms(5_000)));
    backend.fail_next(Call::Acquire, Fault::None);
    backend.fail_next(Call::Acquire, Fault::Fails(ErrorCode::AuthFailed));
    let error = waiter.lock("k").await.expect_err("made to fail");
    assert_eq!((error.code(), error.holder()), (ErrorCode::AuthFailed, None));
    let error = waiter.lock("k").await.expect_err("held");
    assert_eq!(error.code(), ErrorCode::AcquisitionTimeout);
    assert_eq!(error.holder().and_then(HolderInfo::label), Some("other"));
}

/// Whether the lock is held is then unknown.
#[tokio::test(start_paused = true)]
async fn a_timeout_after_an_error_names_no_holder() {
    let backend = Faulty::polling();
    let other = labeled(&backend, "other", LockOptions::default());
    let _held = other.lock("k").await.expect("free");
    let options = LockOptions::default().timeout(ms(1_000)).retry_on_error(true);
    let waiter = locker(&backend, options);
    backend.fail_always(Call::Acquire, Some(Fault::Fails(ErrorCode::ServiceUnavailable)));
    let error = waiter.lock("k").await.expect_err("made to fail");
    assert_eq!((error.code(), error.holder()), (ErrorCode::AcquisitionTimeout, None));
    let error = waiter
        .lock("k")
        .retry(RetryPolicy::default().max_retries(0))
        .await
        .expect_err("made to fail");
    assert!(error.message().ends_with("(1 attempt)"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn a_wait_that_is_over_keeps_no_other_waiter_waiting() {
    let backend = Faulty::new().with_slow_lookups(ms(10_000));
    let other = locker(&backend, LockOptions::default().ttl(ttl_ms(60_000)));
    let held = other.lock("k").await.expect("free");
    let locker = locker(&backend, LockOptions::default());
    let started = Instant::now();
    let [first, second] = [100, 5_000].map(|timeout_ms| {
        let locker = locker.clone();
        tokio::spawn(async move {
            let acquired = locker.lock("k").timeout(ms(timeout_ms)).await;
            (acquired, started.elapsed())
        })
    });
    tokio::time::sleep(ms(150)).await;
    held.release().await.expect("works");
    assert!(first.await.expect("no panic").0.is_err());
    let (acquired, at) = second.await.expect("no panic");
    drop(acquired.expect("released"));
    assert!(at < ms(160), "acquired after {at:?}");
}

#[tokio::test(start_paused = true)]
async fn only_a_lock_of_this_process_is_reported_as_held_in_it() {
    let backend = Faulty::new();
    let here = labeled(&backend, "here", LockOptions::default().timeout(ms(600)));
    let held = here.lock("k").await.expect("free");
    let error = here.lock("k").await.expect_err("held");
    assert_eq!(error.message(), "the lock was not acquired within 600 ms: held in this process");
    assert_eq!(error.holder().and_then(HolderInfo::label), Some("here"));
    let semaphore = here.semaphore("gpu", 1).expect("valid");
    let permit = semaphore.acquire().await.expect("free");
    // The second waits behind the first.
    let (_first, second) = tokio::join!(semaphore.acquire(), semaphore.acquire());
    let error = second.expect_err("held");
    assert_eq!(error.message(), "the lock was not acquired within 600 ms: held in this process");
    drop(permit);
    held.release().await.expect("works");
    let elsewhere = locker(&backend, LockOptions::default().ttl(ttl_ms(60_000)));
    let held = elsewhere.lock("k").await.expect("free");
    // The second waits behind the first, and is the first to give up.
    let (_first, second) = tokio::join!(here.lock("k"), here.lock("k").timeout(ms(500)));
    let error = second.expect_err("held");
    assert_eq!(
        error.message(),
        "the lock was not acquired within 500 ms: another task of this process waits for it"
    );
    assert_eq!(error.holder(), None);
    held.release().await.expect("works");
    let error = here.lock("free").timeout(ms(0)).await.expect_err("no time");
    assert_eq!(error.message(), "the lock was not acquired within 0 ms (0 attempts)");
}

/// Waiters for any of several locks have a queue of their own.
#[tokio::test(start_paused = true)]
async fn undoing_an_acquire_of_a_permit_wakes_the_next_waiter() {
    let backend = Faulty::polling();
    let retry = RetryPolicy::default().jitter(Jitter::None).delay(ms(1_000));
    let locker = locker(&backend, LockOptions::default().retry(retry));
    let semaphore = locker.semaphore("gpu", 1).expect("valid");
    backend.fail_next(Call::Acquire, Fault::LosesReply(ErrorCode::ServiceUnavailable));
    backend.fail_next(Call::Release, Fault::Delayed(ms(100)));
    assert!(semaphore.acquire().await.is_err());
    let started = Instant::now();
    drop(semaphore.acquire().await.expect("undone"));
    assert_eq!(started.elapsed(), ms(100));
}
