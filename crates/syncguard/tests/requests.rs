//! Locks with their own options, and the short forms of `Locker`, on virtual time.

mod support;

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use support::{Call, Fault, Faulty, locker, ms, ttl_ms};
use syncguard::{
    ErrorCode, Key, LockOptions, LostReason, NotHeldReason, ReleaseOutcome, Ttl, testing,
};
use tokio::time::Instant;

#[tokio::test(start_paused = true)]
async fn a_request_has_its_own_options() {
    let backend = Faulty::new();
    let locker = locker(&backend, LockOptions::default().timeout(ms(60_000)));
    let guard = locker.lock("k").ttl(ms(1500)).await.expect("free");
    assert!(guard.remaining() <= ms(1500));
    let started = Instant::now();
    let error = locker.lock("k").timeout(ms(200)).await.expect_err("held");
    assert_eq!((error.code(), started.elapsed()), (ErrorCode::AcquisitionTimeout, ms(200)));
    assert_eq!(error.message(), "the lock was not acquired within 200 ms: held in this process");
    assert_eq!(locker.options().get_timeout(), Some(ms(60_000)), "unchanged");
    assert_eq!(guard.lost().await, LostReason::Expired);
}

#[tokio::test(start_paused = true)]
async fn bad_options_and_keys_are_refused_before_any_io() {
    let backend = Faulty::new();
    let locker = locker(&backend, LockOptions::default());
    let week = Duration::from_hours(7 * 24);
    for request in [
        locker.lock("k").ttl(Duration::ZERO),
        locker.lock("k").ttl(week),
        locker.lock("k").max_hold(ms(10)),
        locker.lock("k").hold_at_least(week),
        locker.lock(""),
        locker.lock("a\0b"),
    ] {
        assert_eq!(request.await.expect_err("bad").code(), ErrorCode::InvalidArgument);
    }
    let good = locker.lock("k").ttl(week).ttl(Ttl::DEFAULT).max_hold(ms(10)).max_hold(None);
    drop(good.await.expect("the last value counts"));
    let options = LockOptions::default().ttl(Duration::ZERO);
    assert_eq!(locker.with_options(options).expect_err("bad").code(), ErrorCode::InvalidArgument);
    assert_eq!(backend.count(Call::Acquire), 1);
}

#[test]
fn every_option_can_be_read_and_unset_on_a_clone() {
    let set = LockOptions::default()
        .timeout(ms(1))
        .max_hold(ms(2))
        .hold_at_least(ms(3))
        .stop_margin(ms(4))
        .label("nightly")
        .on_release_error(|_error, _context| {})
        .renew();
    assert_eq!((set.get_timeout(), set.get_max_hold()), (Some(ms(1)), Some(ms(2))));
    assert_eq!((set.get_hold_at_least(), set.get_stop_margin()), (ms(3), ms(4)));
    assert_eq!((set.get_label(), set.is_renewed()), (Some("nightly"), true));
    let unset = set
        .clone()
        .timeout(ms(5_000))
        .max_hold(None)
        .hold_at_least(Duration::ZERO)
        .stop_margin(Duration::ZERO)
        .no_label()
        .log_release_errors()
        .no_renewal();
    assert_eq!(format!("{unset:?}"), format!("{:?}", LockOptions::default()));
    assert_ne!(format!("{set:?}"), format!("{unset:?}"));
}

#[tokio::test(start_paused = true)]
async fn a_held_lock_is_not_an_error() {
    let backend = Faulty::new();
    let locker = locker(&backend, LockOptions::default());
    let guard = locker.lock("k").await.expect("free");
    let started = Instant::now();
    assert!(locker.try_lock_for("k", ms(300)).await.expect("works").is_none());
    assert_eq!(started.elapsed(), ms(300));
    assert!(locker.try_lock_for("k", Duration::ZERO).await.expect("works").is_none());
    assert_eq!(started.elapsed(), ms(300), "one attempt takes no time");
    let ran = locker.try_with_lock("k", |_lock| async { 1 }).await;
    assert_eq!(ran.expect("works"), None);
    guard.release().await.expect("works");
    let ran = locker.try_with_lock("k", |lock| async move { lock.fence().get() }).await;
    assert_eq!(ran.expect("works"), Some(2));
    assert!(!locker.is_locked("k").await.expect("works"), "released after the work");
    assert!(locker.try_lock_for("k", ms(300)).await.expect("works").is_some());
}

#[tokio::test(start_paused = true)]
async fn a_failing_store_is_not_reported_as_a_held_lock() {
    let backend = Faulty::new();
    let locker = locker(&backend, LockOptions::default().retry_on_error(true));
    let down = Fault::Fails(ErrorCode::ServiceUnavailable);
    backend.fail_always(Call::Acquire, Some(down));
    let error = locker.try_lock_for("k", ms(300)).await.expect_err("unknown");
    assert_eq!(error.code(), ErrorCode::AcquisitionTimeout);
}

#[tokio::test(start_paused = true)]
async fn hold_at_least_keeps_the_lock_after_a_release() {
    let backend = Faulty::new();
    let locker = locker(&backend, LockOptions::default().hold_at_least(ms(10_000)));
    let options = LockOptions::default().timeout(ms(60_000));
    let other = support::locker_without_polls(&backend, options);
    for way in ["release", "drop"] {
        let started = Instant::now();
        let guard = locker.lock("k").await.expect("free");
        tokio::time::sleep(ms(2000)).await;
        if way == "release" {
            assert_eq!(guard.release().await.expect("works"), ReleaseOutcome::Released);
            assert!(guard.ensure_valid().is_err(), "the guard has let go");
        } else {
            drop(guard);
            // Until the background has shortened the TTL, which no waiter learns without a poll.
            tokio::time::sleep(ms(1)).await;
        }
        drop(other.lock("k").await.expect("free in the end"));
        // The lock expires at 10 s and is dead a second later.
        assert_eq!(started.elapsed(), ms(11_000), "{way}");
        tokio::time::sleep(ms(1)).await;
    }
    let guard = locker.lock("k").await.expect("free");
    tokio::time::sleep(ms(10_000)).await;
    guard.release().await.expect("works");
    assert!(other.try_lock("k").await.expect("works").is_some(), "it was held long enough");
}

#[tokio::test(start_paused = true)]
async fn a_guard_can_be_released_through_an_arc_and_reports_why_it_ended() {
    let (locker, _faults) = testing::paused_locker(LockOptions::default()).expect("in a runtime");
    let guard = Arc::new(locker.lock("k").await.expect("free"));
    let handle = guard.handle();
    assert_eq!(handle.ended(), None);
    handle.ensure_valid().expect("held");
    assert_eq!(Arc::clone(&guard).release().await.expect("works"), ReleaseOutcome::Released);
    assert_eq!(handle.ended(), Some(LostReason::Released));
    let error = handle.ensure_valid().expect_err("over");
    assert_eq!((error.code(), error.lost()), (ErrorCode::Aborted, Some(LostReason::Released)));
    let again = guard.release().await.expect("nothing is asked");
    assert_eq!(again, ReleaseOutcome::NotHeld(NotHeldReason::NotFound));
}

#[tokio::test(start_paused = true)]
async fn keys_convert_from_any_text_and_a_scope_is_prepended() {
    let (locker, _faults) = testing::paused_locker(LockOptions::default()).expect("in a runtime");
    let (text, key) = (String::from("job"), Key::new("job").expect("valid"));
    for request in [
        locker.lock("job"),
        locker.lock(text.clone()),
        locker.lock(&text),
        locker.lock(Cow::Borrowed("job")),
        locker.lock(Arc::<str>::from("job")),
        locker.lock(key.clone()),
        locker.lock(&key),
    ] {
        let guard = request.await.expect("free");
        assert_eq!(guard.key().as_str(), "job");
        guard.release().await.expect("works");
    }
    let scoped = locker.scoped("billing:").scoped("eu:");
    let guard = scoped.lock("job").await.expect("free");
    assert_eq!(guard.key().as_str(), "billing:eu:job");
    assert!(scoped.is_locked("job").await.expect("works"));
    let info = locker.info("billing:eu:job").await.expect("works").expect("held");
    assert_eq!(info.fence, Some(guard.fence()));
    let long = locker.scoped("x".repeat(510)).lock("job").await.expect_err("too long");
    assert_eq!(long.code(), ErrorCode::InvalidArgument);
    locker.setup().await.expect("memory needs none");
}

#[tokio::test(start_paused = true)]
async fn faults_are_injected_and_delays_take_virtual_time() {
    let (locker, faults) = testing::paused_locker(LockOptions::default()).expect("in a runtime");
    faults.fail_next(ErrorCode::RateLimited);
    let error = locker.lock("k").await.expect_err("made to fail");
    assert_eq!(error.code(), ErrorCode::RateLimited);
    faults.delay(ms(700));
    let started = Instant::now();
    let guard = locker.lock("k").await.expect("free");
    assert_eq!(started.elapsed(), ms(700));
    faults.delay(Duration::ZERO);
    faults.fail_always(ErrorCode::NetworkTimeout);
    assert!(guard.extend(ttl_ms(1000)).await.is_err());
    faults.fail_always(None);
    guard.release().await.expect("works again");
    locker.shutdown().await.expect("released");
}

#[tokio::test(start_paused = true)]
async fn a_request_that_waits_cannot_become_an_attempt() {
    let backend = Faulty::new();
    let locker = locker(&backend, LockOptions::default());
    let guard = locker.lock("k").await.expect("free");
    for limit in [None, Some(Duration::ZERO)] {
        let mut request = locker.lock("k");
        tokio::select! {
            _acquired = &mut request => panic!("held"),
            () = tokio::time::sleep(ms(10)) => {}
        }
        let outcome = match limit {
            None => request.try_now().await,
            Some(limit) => request.try_for(limit).await,
        };
        assert_eq!(outcome.expect_err("it waits").code(), ErrorCode::InvalidArgument);
    }
    drop(guard);
}
