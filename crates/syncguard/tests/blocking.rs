//! The blocking facade: the same locks from plain threads.
#![cfg(feature = "blocking")]

use std::time::{Duration, Instant};

use syncguard::blocking::{LockHandle, Locker};
use syncguard::{
    ErrorCode, ExtendOutcome, LockBackend, LockOptions, MemoryBackend, ReleaseOutcome, Ttl,
    diagnostics,
};
use tokio::runtime::{Builder, Runtime};

fn ttl(ms: u64) -> Ttl {
    Ttl::new(Duration::from_millis(ms)).expect("valid")
}

#[test]
fn a_lock_is_taken_extended_released_and_taken_again() {
    let locker = Locker::new(MemoryBackend::new()).expect("outside a runtime");
    let guard = locker.lock("k").expect("free");
    assert!(locker.try_lock("k").expect("works").is_none());
    assert!(matches!(guard.extend(Ttl::DEFAULT).expect("works"), ExtendOutcome::Extended(_)));
    assert_eq!(guard.release().expect("works"), ReleaseOutcome::Released);
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
fn renewal_continues_while_the_caller_works() {
    let options = LockOptions::default().ttl(ttl(90)).renew();
    let connect = async { Ok(MemoryBackend::new()) };
    let locker =
        Locker::connect(connect, |builder| builder.options(options)).expect("outside a runtime");
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
fn one_lock_has_its_own_options() {
    let locker = Locker::new(MemoryBackend::new()).expect("outside a runtime");
    let long = Duration::from_mins(1);
    let guard = locker.lock_with("k", |request| request.ttl(long)).expect("free");
    assert!(guard.remaining() > Ttl::DEFAULT.as_duration());
    let hasty = Duration::from_millis(20);
    let error = locker.lock_with("k", |request| request.timeout(hasty)).expect_err("held");
    assert_eq!(error.code(), ErrorCode::AcquisitionTimeout);
    assert!(locker.try_lock_for("k", hasty).expect("works").is_none());
    assert!(locker.try_lock_for("other", hasty).expect("works").is_some());
}

#[test]
fn a_scoped_locker_sees_and_releases_locks_of_its_scope() {
    let locker = Locker::new(MemoryBackend::new()).expect("outside a runtime");
    locker.setup().expect("nothing to do");
    let billing = locker.scoped("billing:");
    let guard = billing.lock("k").expect("free");
    assert!(locker.is_locked("billing:k").expect("works"));
    assert!(!locker.is_locked("k").expect("works"));
    let info = billing.info("k").expect("works").expect("held");
    assert_eq!(info.fence, Some(guard.fence()));
    assert_eq!(locker.release_all(), 1);
    locker.shutdown().expect("nothing is held");
    assert!(!guard.is_valid());
}

/// Runs the whole life of a locker and of a lock.
fn lock_extend_release() {
    let locker = Locker::new(MemoryBackend::new()).expect("blocking is fine here");
    let guard = locker.lock("k").expect("free");
    assert!(matches!(guard.extend(Ttl::DEFAULT).expect("works"), ExtendOutcome::Extended(_)));
    assert_eq!(guard.release().expect("works"), ReleaseOutcome::Released);
    let timeout = LockOptions::default().timeout(Duration::from_millis(20));
    let hasty = locker.with_options(timeout).expect("valid");
    let guard = locker.lock("k").expect("free");
    // This waits, which needs timers.
    assert_eq!(hasty.lock("k").expect_err("held").code(), ErrorCode::AcquisitionTimeout);
    drop(guard);
    drop(hasty.try_lock("k").expect("works").expect("dropping has released it"));
    locker.with_lock("k", |held| assert!(held.is_valid())).expect("free");
    locker.shutdown_within(Duration::from_secs(5)).expect("nothing is left");
}

fn runtimes() -> [Runtime; 2] {
    let single = Builder::new_current_thread().build();
    let several = Builder::new_multi_thread().worker_threads(2).build();
    [single.expect("a runtime"), several.expect("a runtime")]
}

#[test]
fn it_works_on_threads_of_spawn_blocking() {
    for runtime in runtimes() {
        let work = async { tokio::task::spawn_blocking(lock_extend_release).await };
        runtime.block_on(work).expect("no panic");
    }
}

#[test]
fn it_works_in_block_in_place() {
    let [_single, runtime] = runtimes();
    runtime.block_on(async {
        tokio::task::block_in_place(lock_extend_release);
        let task = tokio::spawn(async { tokio::task::block_in_place(lock_extend_release) });
        task.await.expect("no panic");
    });
}

/// Checks that every call that waits is refused in async code.
fn is_refused(locker: &Locker<MemoryBackend>) {
    let refused = [
        Locker::new(MemoryBackend::new()).map(drop),
        locker.lock("j").map(drop),
        locker.try_lock("j").map(drop),
        locker.with_lock("j", |_held| ()),
        locker.shutdown_within(Duration::from_secs(1)),
    ];
    for result in refused {
        let error = result.expect_err("this would stop the runtime");
        assert_eq!(error.code(), ErrorCode::InvalidArgument);
        assert!(error.to_string().contains("spawn_blocking"), "{error}");
    }
}

#[test]
fn blocking_in_async_code_is_an_error_and_not_a_panic() {
    for runtime in runtimes() {
        let locker = Locker::new(MemoryBackend::new()).expect("outside a runtime");
        let [in_root, in_task] = ["root", "task"].map(|key| locker.lock(key).expect("free"));
        runtime.block_on(async {
            is_refused(&locker);
            let error = in_root.extend(Ttl::DEFAULT).expect_err("this would stop the runtime");
            assert_eq!(error.code(), ErrorCode::InvalidArgument);
            // Dropped here, it is released in the background.
            drop(in_root);
            let locker = locker.clone();
            let task = tokio::spawn(async move {
                is_refused(&locker);
                drop(in_task);
            });
            task.await.expect("no panic");
        });
        drop(locker.lock("root").expect("released in time"));
        drop(locker.lock("task").expect("released in time"));
        runtime.block_on(async { drop(locker) });
    }
}

/// The guard lives in a task that is aborted: the worker that drops it must not wait.
#[test]
fn a_task_that_is_aborted_releases_in_the_background() {
    let [_single, runtime] = runtimes();
    let locker = Locker::new(MemoryBackend::new()).expect("outside a runtime");
    let guard = locker.lock("k").expect("free");
    runtime.block_on(async {
        let task = tokio::spawn(async move {
            std::future::pending::<()>().await;
            drop(guard);
        });
        tokio::task::yield_now().await;
        task.abort();
        assert!(task.await.expect_err("aborted").is_cancelled());
    });
    drop(locker.lock("k").expect("released in time"));
}

#[test]
fn work_under_a_lock_can_extend_it() {
    let locker = Locker::new(MemoryBackend::new()).expect("outside a runtime");
    let work = |lock: &LockHandle<MemoryBackend>| {
        let before = lock.expires_at();
        let extended = lock.extend(ttl(3_600_000)).expect("works");
        assert!(matches!(extended, ExtendOutcome::Extended(_)), "{extended:?}");
        assert!(lock.expires_at().since(before) > Duration::from_mins(30));
        assert!(lock.remaining() > Duration::from_mins(30));
        // Handles can move to other threads, and outlive the guard.
        lock.clone()
    };
    let handle = locker.with_lock("k", work).expect("free");
    assert!(!handle.is_valid());
    std::thread::scope(|scope| {
        let late = scope.spawn(|| handle.extend(Ttl::DEFAULT).expect("no error"));
        assert!(matches!(late.join().expect("no panic"), ExtendOutcome::NotHeld(_)));
    });
}

#[test]
fn a_lost_lock_cancels_its_token() {
    let options = LockOptions::default().ttl(ttl(30));
    let connect = async { Ok(MemoryBackend::new()) };
    let locker =
        Locker::connect(connect, |builder| builder.options(options)).expect("outside a runtime");
    let guard = locker.lock("k").expect("free");
    let lost = guard.lost_token();
    let deadline = Instant::now() + Duration::from_secs(20);
    while !lost.is_cancelled() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(lost.is_cancelled());
    assert!(!guard.is_valid());
}

#[test]
fn a_detached_lock_can_be_resumed() {
    let locker = Locker::new(MemoryBackend::new()).expect("outside a runtime");
    let lock_id = locker.lock("k").expect("free").detach();
    let adopted = locker.resume(lock_id).expect("works").expect("still held");
    assert_eq!(adopted.release().expect("works"), ReleaseOutcome::Released);
    assert!(locker.resume(lock_id).expect("works").is_none());
}

#[test]
fn work_is_run_under_the_lock_and_its_value_returned() {
    let backend = MemoryBackend::new();
    let locker = Locker::new(backend.clone()).expect("outside a runtime");
    let fence = locker.with_lock("k", |held| held.fence().get()).expect("free");
    assert_eq!(fence, 1);
    let runtime = Builder::new_current_thread().build().expect("a runtime");
    let key = syncguard::Key::new("k").expect("valid");
    assert!(!runtime.block_on(backend.is_locked(&key)).expect("works"));
    assert!(runtime.block_on(diagnostics::get_by_key(&backend, &key)).expect("works").is_none());
}
