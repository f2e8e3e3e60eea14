//! The blocking facade: the same locks from plain threads.
#![cfg(feature = "blocking")]

use std::time::{Duration, Instant};

use syncguard::blocking::Locker;
use syncguard::{
    ErrorCode, Extend, LockBackend, LockOptions, MemoryBackend, Release, Ttl, diagnostics,
};

fn ttl(ms: u64) -> Ttl {
    Ttl::new(Duration::from_millis(ms)).expect("valid")
}

#[test]
fn a_lock_is_taken_extended_released_and_taken_again() {
    let locker = Locker::new(MemoryBackend::new()).expect("outside a runtime");
    let mut guard = locker.lock("k").expect("free");
    assert!(locker.try_lock("k").expect("works").is_none());
    assert!(matches!(guard.extend(Ttl::DEFAULT).expect("works"), Extend::Extended(_)));
    assert_eq!(guard.release().expect("works"), Release::Released);
    drop(guard);
    assert_eq!(locker.lock("k").expect("free").fence().get(), 2);
}

#[test]
fn a_dropped_guard_has_released_when_drop_returns() {
    let locker = Locker::new(MemoryBackend::new()).expect("outside a runtime");
    for _ in 0..100 {
        drop(locker.lock("k").expect("free"));
        drop(locker.try_lock("k").expect("works").expect("free again"));
    }
}

#[test]
fn renewal_goes_on_while_the_caller_works() {
    let options = LockOptions::default().ttl(ttl(90)).renew();
    let connect = async { Ok(MemoryBackend::new()) };
    let locker = Locker::connect(connect, options).expect("outside a runtime");
    let guard = locker.lock("k").expect("free");
    std::thread::sleep(Duration::from_millis(400));
    assert!(guard.is_valid());
}

#[test]
fn a_timeout_and_bad_input_are_errors() {
    let locker = Locker::new(MemoryBackend::new()).expect("outside a runtime");
    let _guard = locker.lock("k").expect("free");
    let hasty = LockOptions::default().timeout(Duration::from_millis(30));
    let started = Instant::now();
    let error = locker.with_options(hasty).expect("valid").lock("k").expect_err("held");
    assert_eq!(error.code(), ErrorCode::AcquisitionTimeout);
    assert!(started.elapsed() >= Duration::from_millis(30));
    assert_eq!(locker.lock("").expect_err("empty").code(), ErrorCode::InvalidArgument);
}

#[test]
fn inside_a_runtime_it_is_an_error_and_not_a_panic() {
    let locker = Locker::new(MemoryBackend::new()).expect("outside a runtime");
    let guard = locker.lock("k").expect("free");
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    runtime.block_on(async {
        let error = Locker::new(MemoryBackend::new()).expect_err("inside a runtime");
        assert_eq!(error.code(), ErrorCode::InvalidArgument);
        assert_eq!(locker.lock("j").expect_err("inside").code(), ErrorCode::InvalidArgument);
        // Dropped here it is released in the background.
        drop(guard);
    });
    drop(locker.lock("k").expect("released in time"));
    runtime.block_on(async { drop(locker) });
}

#[test]
fn a_leaked_lock_can_be_adopted() {
    let locker = Locker::new(MemoryBackend::new()).expect("outside a runtime");
    let lock_id = locker.lock("k").expect("free").leak();
    let mut adopted = locker.adopt(lock_id).expect("works").expect("still held");
    assert_eq!(adopted.release().expect("works"), Release::Released);
    assert!(locker.adopt(lock_id).expect("works").is_none());
}

#[test]
fn work_is_run_under_the_lock_and_its_value_returned() {
    let backend = MemoryBackend::new();
    let locker = Locker::new(backend.clone()).expect("outside a runtime");
    let fence = locker.with_lock("k", |held| held.fence().get()).expect("free");
    assert_eq!(fence, 1);
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    let key = syncguard::Key::new("k").expect("valid");
    assert!(!runtime.block_on(backend.is_locked(&key)).expect("works"));
    assert!(runtime.block_on(diagnostics::get_by_key(&backend, &key)).expect("works").is_none());
}
