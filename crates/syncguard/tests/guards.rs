//! What happens to a lock when its guard is released, dropped or detached, in every state of a
//! runtime.

mod support;

use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use support::{Call, Fault, Faulty, Reports, key, locker, ms, shut_down, ttl_ms};
use syncguard::backend::ReleaseRequest;
use syncguard::{
    ErrorCode, ExtendOutcome, LockBackend, LockGuard, LockOptions, Locker, LostReason,
    MemoryBackend, ReleaseOutcome, ReleaseSource,
};
use tokio::runtime::{Builder, Runtime};

fn runtimes() -> [Runtime; 2] {
    [
        Builder::new_current_thread().enable_all().build().expect("a runtime"),
        Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime"),
    ]
}

fn held_lock(
    runtime: &Runtime,
    backend: &MemoryBackend,
    reports: &Reports,
) -> (Locker<MemoryBackend>, LockGuard<MemoryBackend>) {
    runtime.block_on(async {
        let locker = Locker::builder(backend.clone()).options(reports.options()).build();
        let locker = locker.expect("in a runtime");
        let guard = locker.lock("k").await.expect("free");
        (locker, guard)
    })
}

fn is_locked(backend: &MemoryBackend) -> bool {
    let runtime = Builder::new_current_thread().build().expect("a runtime");
    runtime.block_on(backend.is_locked(&key("k"))).expect("works")
}

#[test]
fn a_dropped_guard_is_released_once_shutdown_has_returned() {
    for runtime in runtimes() {
        let (backend, reports) = (MemoryBackend::new(), Reports::default());
        let (locker, guard) = held_lock(&runtime, &backend, &reports);
        runtime.block_on(async {
            drop(guard);
            locker.shutdown().await.expect("released");
        });
        assert!(!is_locked(&backend));
        assert_eq!(reports.codes(), []);
    }
}

#[test]
fn a_guard_can_be_dropped_outside_any_runtime() {
    for runtime in runtimes() {
        let (backend, reports) = (MemoryBackend::new(), Reports::default());
        let (locker, guard) = held_lock(&runtime, &backend, &reports);
        std::thread::spawn(move || drop(guard)).join().expect("no panic");
        runtime.block_on(locker.shutdown()).expect("released");
        assert!(!is_locked(&backend));
    }
}

#[test]
fn a_guard_can_be_dropped_inside_another_runtime() {
    let [home, elsewhere] = runtimes();
    let (backend, reports) = (MemoryBackend::new(), Reports::default());
    let (locker, guard) = held_lock(&home, &backend, &reports);
    elsewhere.block_on(async { drop(guard) });
    home.block_on(locker.shutdown()).expect("released");
    assert!(!is_locked(&backend));
}

#[test]
fn a_guard_dropped_after_its_runtime_reports_once_and_does_not_panic() {
    for runtime in runtimes() {
        let (backend, reports) = (MemoryBackend::new(), Reports::default());
        let (_locker, guard) = held_lock(&runtime, &backend, &reports);
        runtime.shutdown_timeout(ms(1000));
        drop(guard);
        assert_eq!(reports.next(), ErrorCode::Aborted);
        assert!(is_locked(&backend), "it stays held until its TTL, and was reported");
    }
}

#[test]
fn a_guard_held_by_a_task_survives_the_end_of_its_runtime() {
    for runtime in runtimes() {
        let (backend, reports) = (MemoryBackend::new(), Reports::default());
        let (_locker, guard) = held_lock(&runtime, &backend, &reports);
        runtime.spawn(async move {
            let _guard = guard;
            std::future::pending::<()>().await;
        });
        std::thread::sleep(ms(20));
        drop(runtime);
        assert_eq!(reports.next(), ErrorCode::Aborted);
    }
}

#[test]
fn a_panic_under_the_lock_releases_it_and_propagates() {
    for runtime in runtimes() {
        let (backend, reports) = (MemoryBackend::new(), Reports::default());
        let locker = runtime.block_on(async {
            Locker::builder(backend.clone()).options(reports.options()).build().expect("valid")
        });
        let panicking = AssertUnwindSafe(|| {
            let work = locker.with_lock("k", |_held| async { panic!("in the critical section") });
            runtime.block_on(work)
        });
        let payload = std::panic::catch_unwind(panicking).expect_err("the panic is passed on");
        assert_eq!(payload.downcast_ref(), Some(&"in the critical section"));
        runtime.block_on(locker.shutdown()).expect("released");
        assert!(!is_locked(&backend));
    }
}

#[test]
fn another_runtime_is_an_error_and_not_a_hang() {
    let [home, elsewhere] = runtimes();
    let (backend, reports) = (MemoryBackend::new(), Reports::default());
    let (locker, guard) = held_lock(&home, &backend, &reports);
    let codes = elsewhere.block_on(async {
        [
            locker.lock("other").await.expect_err("elsewhere").code(),
            locker.try_lock("other").await.expect_err("elsewhere").code(),
            locker.resume(guard.lock_id()).await.expect_err("elsewhere").code(),
            guard.extend(ttl_ms(1000)).await.expect_err("elsewhere").code(),
            locker.shutdown().await.expect_err("elsewhere").code(),
        ]
    });
    assert_eq!(codes, [ErrorCode::InvalidArgument; 5]);
    home.block_on(async { guard.release().await.expect("at home it works") });
    assert!(!is_locked(&backend));
}

#[test]
fn a_task_of_another_runtime_gets_an_error_and_its_request_is_undone() {
    let [home, elsewhere] = runtimes();
    let (locker, backend) = home.block_on(async {
        let backend = Faulty::new();
        (Locker::new(backend.clone()).expect("in a runtime"), backend)
    });
    backend.fail_next(Call::Acquire, Fault::Delayed(ms(10)));
    let asking = elsewhere.spawn({
        let locker = locker.clone();
        async move { locker.lock("k").await.map(drop) }
    });
    let error = elsewhere.block_on(asking).expect("no panic").expect_err("not its runtime");
    assert_eq!(error.code(), ErrorCode::InvalidArgument);
    home.block_on(async {
        locker.shutdown().await.expect("undone at home");
        assert!(!backend.is_locked(&key("k")).await.expect("works"));
    });
}

#[test]
fn a_release_from_another_runtime_continues_in_the_lockers_runtime() {
    let [home, elsewhere] = runtimes();
    let (locker, guard, backend) = home.block_on(async {
        let backend = Faulty::new();
        let locker = Locker::new(backend.clone()).expect("in a runtime");
        let guard = locker.lock("k").await.expect("free");
        (locker, guard, backend)
    });
    backend.fail_next(Call::Release, Fault::Delayed(ms(10)));
    let error = elsewhere.block_on(guard.release()).expect_err("not its runtime");
    assert_eq!(error.code(), ErrorCode::InvalidArgument);
    home.block_on(async {
        drop(guard);
        locker.shutdown().await.expect("released at home");
        assert!(!backend.is_locked(&key("k")).await.expect("works"));
    });
}

#[test]
fn a_locker_cannot_be_built_outside_a_runtime() {
    let error = Locker::new(MemoryBackend::new()).expect_err("no runtime here");
    assert_eq!(error.code(), ErrorCode::InvalidArgument);
}

#[tokio::test(start_paused = true)]
async fn invalid_options_are_refused() {
    let locker = locker(&Faulty::new(), LockOptions::default());
    let refused = |options: LockOptions| {
        locker.with_options(options).expect_err("invalid").code() == ErrorCode::InvalidArgument
    };
    assert!(refused(LockOptions::default().max_hold(ms(60_000))), "max_hold without renewal");
    assert!(refused(LockOptions::default().renew().max_hold(ms(10))), "shorter than the TTL");
    assert!(refused(LockOptions::default().renew().ttl(ttl_ms(2))), "too short to renew");
    assert!(refused(LockOptions::default().release_timeout(Duration::ZERO)));
    let short = LockOptions::default().ttl(ttl_ms(3_000));
    assert!(refused(short.clone().stop_margin(ms(3_000))), "no time to work");
    assert!(refused(short.renew().stop_margin(ms(2_000))), "no time to renew");
    let retry = syncguard::RetryPolicy::default().max_delay(Some(ms(1)));
    assert!(refused(LockOptions::default().retry(retry)), "max_delay below delay");
    let retry = syncguard::RetryPolicy::default().delay(Duration::ZERO);
    assert!(refused(LockOptions::default().retry(retry).wait_forever()), "a busy loop");
    let builder = Locker::builder(MemoryBackend::new()).poll_interval(Duration::ZERO);
    assert_eq!(builder.build().expect_err("invalid").code(), ErrorCode::InvalidArgument);
}

#[tokio::test(start_paused = true)]
async fn a_second_release_returns_without_asking_the_store() {
    let backend = Faulty::new();
    let locker = locker(&backend, LockOptions::default());
    let guard = locker.lock("k").await.expect("free");
    assert_eq!(guard.release().await.expect("works"), ReleaseOutcome::Released);
    assert!(matches!(guard.release().await.expect("works"), ReleaseOutcome::NotHeld(_)));
    drop(guard);
    locker.shutdown().await.expect("nothing to do");
    assert_eq!(backend.count(Call::Release), 1);
}

#[tokio::test(start_paused = true)]
async fn a_release_that_another_one_overtakes_is_not_a_loss() {
    let backend = Faulty::new();
    let locker = locker(&backend, LockOptions::default());
    let guard = locker.lock("k").await.expect("free");
    backend.fail_next(Call::Release, Fault::Delayed(ms(100)));
    let (late, first) = tokio::join!(guard.release(), guard.release());
    assert_eq!(first.expect("works"), ReleaseOutcome::Released);
    assert!(matches!(late.expect("works"), ReleaseOutcome::NotHeld(_)));
    assert_eq!(guard.ended(), Some(LostReason::Released));
}

#[tokio::test(start_paused = true)]
async fn an_extend_that_is_dropped_before_it_is_sent_delays_no_other() {
    let backend = Faulty::new();
    let locker = locker(&backend, LockOptions::default());
    let guard = locker.lock("k").await.expect("free");
    let task = async {
        // Then tokio lets the task yield before it polls a branch of a `select!`.
        while tokio::task::coop::has_budget_remaining() {
            tokio::task::consume_budget().await;
        }
        let extend = pin!(guard.extend(ttl_ms(5_000)));
        let mut context = Context::from_waker(Waker::noop());
        let _dropped = extend.poll(&mut context);
    };
    task.await;
    let again = tokio::time::timeout(ms(100), guard.extend(ttl_ms(5_000))).await;
    let outcome = again.expect("not busy").expect("works");
    assert!(matches!(outcome, ExtendOutcome::Extended(_)));
}

#[tokio::test(start_paused = true)]
async fn a_release_that_failed_can_be_tried_again() {
    let backend = Faulty::new();
    let locker = locker(&backend, LockOptions::default());
    let guard = locker.lock("k").await.expect("free");
    backend.fail_next(Call::Release, Fault::Fails(ErrorCode::ServiceUnavailable));
    let error = guard.release().await.expect_err("made to fail");
    assert_eq!(error.code(), ErrorCode::ServiceUnavailable);
    assert!(backend.is_locked(&key("k")).await.expect("works"));
    assert_eq!(guard.release().await.expect("works"), ReleaseOutcome::Released);
}

#[tokio::test(start_paused = true)]
async fn not_held_after_a_release_without_an_answer_counts_as_released() {
    let backend = Faulty::new();
    let locker = locker(&backend, LockOptions::default());
    let guard = locker.lock("k").await.expect("free");
    backend.fail_next(Call::Release, Fault::LosesReply(ErrorCode::NetworkTimeout));
    drop(guard.release().await.expect_err("the answer was lost"));
    assert_eq!(guard.release().await.expect("works"), ReleaseOutcome::Released);
    assert_eq!(guard.ended(), Some(LostReason::Released));
}

#[tokio::test(start_paused = true)]
async fn a_release_reports_that_the_lock_was_lost_before() {
    let backend = Faulty::new();
    let locker = locker(&backend, LockOptions::default());
    let guard = locker.lock("k").await.expect("free");
    let taken = ReleaseRequest::new(guard.lock_id());
    assert_eq!(backend.inner.release(&taken).await.expect("works"), ReleaseOutcome::Released);
    assert!(matches!(guard.release().await.expect("works"), ReleaseOutcome::NotHeld(_)));
    assert_eq!(guard.ended(), Some(LostReason::NotHeld));
}

/// Waiters of a lock that changes hands quickly do not pause.
#[tokio::test(start_paused = true)]
async fn only_a_holder_that_waited_long_makes_waiters_ask_in_order() {
    for (held, is_ordered) in [(ms(100), false), (ms(300), true)] {
        let backend = Faulty::new();
        let locker = locker(&backend, LockOptions::default());
        let mut released = backend.subscribe(&key("k")).await.expect("offered");
        let guard = locker.lock("k").await.expect("free");
        tokio::time::sleep(held).await;
        guard.release().await.expect("works");
        assert_eq!(released.notified().await.is_some(), is_ordered, "after {held:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_failed_release_is_tried_again_in_the_background() {
    let (backend, reports) = (Faulty::new(), Reports::default());
    let locker = locker(&backend, reports.options());
    let guard = locker.lock("k").await.expect("free");
    for _ in 0..3 {
        backend.fail_next(Call::Release, Fault::Fails(ErrorCode::ServiceUnavailable));
    }
    drop(guard);
    locker.shutdown().await.expect("released in the end");
    assert!(!backend.is_locked(&key("k")).await.expect("works"));
    assert_eq!(reports.codes(), [], "it worked in the end");
    assert_eq!(backend.count(Call::Release), 4);
}

#[tokio::test(start_paused = true)]
async fn failure_and_timeout_are_reported_and_not_held_is_not() {
    let cases = [
        (Fault::Fails(ErrorCode::AuthFailed), vec![ErrorCode::AuthFailed]),
        (Fault::Fails(ErrorCode::ServiceUnavailable), vec![ErrorCode::ServiceUnavailable]),
        (Fault::Hangs, vec![ErrorCode::NetworkTimeout]),
        (Fault::Panics, vec![ErrorCode::Aborted]),
    ];
    for (fault, expected) in cases {
        let (backend, reports) = (Faulty::new(), Reports::default());
        let locker = locker(&backend, reports.options().release_timeout(ms(3_000)));
        let guard = locker.lock("k").await.expect("free");
        backend.fail_always(Call::Release, Some(fault));
        drop(guard);
        shut_down(&locker).await;
        assert_eq!(reports.codes(), expected, "{fault:?}");
    }
    let (backend, reports) = (Faulty::new(), Reports::default());
    let locker = locker(&backend, reports.options().ttl(ttl_ms(100)));
    let guard = locker.lock("k").await.expect("free");
    tokio::time::sleep(ms(5_000)).await;
    drop(guard);
    locker.shutdown().await.expect("done");
    assert_eq!(reports.codes(), [], "an expired lock is not an error");
}

#[tokio::test(start_paused = true)]
async fn a_report_names_key_lock_id_and_source_and_may_panic() {
    let backend = Faulty::new();
    let (sender, mut reported) = tokio::sync::mpsc::unbounded_channel();
    let options = LockOptions::default().on_release_error(move |error, context| {
        sender.send((error.code(), context.clone())).expect("the test listens");
        panic!("in the callback");
    });
    let locker = locker(&backend, options);
    let guard = locker.lock("k").await.expect("free");
    let lock_id = guard.lock_id();
    backend.fail_next(Call::Release, Fault::Fails(ErrorCode::Internal));
    drop(guard);
    shut_down(&locker).await;
    let (code, context) = reported.recv().await.expect("reported");
    assert_eq!(code, ErrorCode::Internal);
    assert_eq!(context.key, key("k"));
    assert_eq!(context.lock_id, lock_id);
    assert_eq!(context.source, ReleaseSource::Guard);
}

#[tokio::test(start_paused = true)]
async fn a_callback_that_hangs_delays_no_lock() {
    let backend = Faulty::new();
    let (sender, reported) = std::sync::mpsc::channel();
    let (go_on, waits) = std::sync::mpsc::channel::<()>();
    let waits = std::sync::Mutex::new(waits);
    let options = LockOptions::default().on_release_error(move |error, _context| {
        sender.send(error.code()).expect("the test listens");
        let _ended = waits.lock().expect("one thread").recv();
    });
    let locker = locker(&backend, options);
    for _ in 0..3 {
        backend.fail_next(Call::Release, Fault::Fails(ErrorCode::AuthFailed));
        drop(locker.lock("k").await.expect("free, or dead by now"));
        tokio::time::sleep(ms(60_000)).await;
    }
    assert_eq!(reported.recv().expect("reported"), ErrorCode::AuthFailed);
    assert!(reported.try_recv().is_err(), "the callback hangs");
    let error = locker.shutdown_within(ms(100)).await.expect_err("reports are not delivered");
    assert_eq!(error.code(), ErrorCode::NetworkTimeout);
    drop(go_on);
    // Threads take real time, and this clock is virtual.
    assert_eq!([reported.recv(), reported.recv()], [Ok(ErrorCode::AuthFailed); 2]);
}

#[tokio::test(start_paused = true)]
async fn work_keeps_its_value_and_its_error_whatever_the_release_did() {
    let (backend, reports) = (Faulty::new(), Reports::default());
    let locker = locker(&backend, reports.options().release_timeout(ms(100)));
    for fault in [Fault::None, Fault::Fails(ErrorCode::Internal), Fault::Hangs] {
        backend.fail_always(Call::Release, Some(fault));
        let key = format!("{fault:?}");
        let value = locker.with_lock(&key, |held| async move { held.fence().get() }).await;
        assert_eq!(value.expect("the value"), 1);
        let failed: Result<(), &str> = locker
            .with_lock(&format!("{key} 2"), |_held| async { Err("own error") })
            .await
            .expect("ran");
        assert_eq!(failed, Err("own error"));
    }
    shut_down(&locker).await;
    assert_eq!(reports.codes().len(), 4);
}

#[tokio::test(start_paused = true)]
async fn a_dropped_with_lock_releases_in_the_background() {
    let backend = Faulty::new();
    let locker = locker(&backend, LockOptions::default());
    let work = locker.with_lock("k", |_held| std::future::pending::<()>());
    assert!(tokio::time::timeout(ms(100), work).await.is_err());
    locker.shutdown().await.expect("released");
    assert!(!backend.is_locked(&key("k")).await.expect("works"));
}

#[tokio::test(start_paused = true)]
async fn a_detached_lock_can_be_resumed_by_its_id() {
    let backend = Faulty::new();
    let (here, there) =
        (locker(&backend, LockOptions::default()), locker(&backend, LockOptions::default()));
    let guard = here.lock("k").await.expect("free");
    let fence = guard.fence();
    let lock_id = guard.detach();
    here.shutdown().await.expect("nothing to do");
    assert!(backend.is_locked(&key("k")).await.expect("works"), "detached, not released");
    tokio::time::sleep(ms(20_000)).await;
    let adopted = there.resume(lock_id).await.expect("works").expect("still held");
    assert_eq!(adopted.fence(), fence);
    assert_eq!(adopted.key(), &key("k"));
    assert_eq!(adopted.remaining(), ms(30_000), "extended first");
    assert_eq!(adopted.release().await.expect("works"), ReleaseOutcome::Released);
    assert!(there.resume(lock_id).await.expect("works").is_none(), "no longer held");
}

#[tokio::test(start_paused = true)]
async fn shutdown_returns_an_error_after_its_limit() {
    let backend = Faulty::new();
    let locker = locker(&backend, LockOptions::default());
    let guards = [locker.lock("k").await.expect("free"), locker.lock("k2").await.expect("free")];
    backend.fail_always(Call::Release, Some(Fault::Hangs));
    drop(guards);
    let error = locker.shutdown_within(ms(500)).await.expect_err("they hang");
    assert_eq!(error.code(), ErrorCode::NetworkTimeout);
    assert_eq!(error.message(), "2 background releases were unfinished after 500 ms");
}

#[tokio::test(start_paused = true)]
async fn a_lock_that_was_lost_is_not_reported_as_released() {
    let backend = Faulty::new();
    let locker = locker(&backend, LockOptions::default().ttl(ttl_ms(1_000)));
    let guard = locker.lock("k").await.expect("free");
    tokio::time::sleep(ms(5_000)).await;
    backend.fail_next(Call::Release, Fault::LosesReply(ErrorCode::NetworkTimeout));
    drop(guard.release().await.expect_err("the answer was lost"));
    assert!(matches!(guard.release().await.expect("works"), ReleaseOutcome::NotHeld(_)));
}

#[tokio::test(start_paused = true)]
async fn a_release_that_begins_late_is_not_reported_as_late() {
    let (backend, reports) = (Faulty::new(), Reports::default());
    let locker = locker(&backend, reports.options().release_timeout(ms(50)));
    let guard = locker.lock("k").await.expect("free");
    backend.fail_next(Call::Release, Fault::Delayed(ms(10)));
    drop(guard);
    // The runtime starts the release only after its timeout.
    tokio::time::advance(ms(200)).await;
    locker.shutdown().await.expect("released");
    assert!(!backend.is_locked(&key("k")).await.expect("works"));
    assert_eq!(reports.codes(), []);
}

#[tokio::test(start_paused = true)]
async fn shutdown_counts_held_guards_and_release_all_releases_them() {
    let backend = Faulty::new();
    let locker = locker(&backend, LockOptions::default().renew());
    let guards = [locker.lock("a").await.expect("free"), locker.lock("b").await.expect("free")];
    let error = locker.shutdown().await.expect_err("two guards are held");
    assert_eq!(error.code(), ErrorCode::InvalidArgument);
    assert!(error.to_string().starts_with("2 guards"), "{error}");
    assert!(guards[0].is_valid(), "guards stay usable");
    assert_eq!(locker.release_all(), 2);
    assert!(!guards[0].is_valid());
    assert_eq!(guards[1].lost().await, LostReason::Released);
    locker.shutdown().await.expect("nothing is held");
    for name in ["a", "b"] {
        assert!(!backend.is_locked(&key(name)).await.expect("works"));
    }
    drop(guards);
    locker.shutdown().await.expect("nothing is held");
    assert_eq!(backend.count(Call::Release), 2, "each was released once");
}

#[test]
fn a_handle_reports_the_loss_in_another_runtime_and_after_its_own_has_ended() {
    let [home, elsewhere] = runtimes();
    let backend = MemoryBackend::new();
    let options = LockOptions::default().ttl(ttl_ms(100));
    let (short, long) = home.block_on(async {
        let locker = Locker::builder(backend.clone()).options(options).build().expect("valid");
        let short = locker.lock("short").await.expect("free");
        let long = locker.with_options(LockOptions::default()).expect("valid");
        (short, long.lock("long").await.expect("free"))
    });
    let home_thread = std::thread::spawn(move || {
        home.block_on(async { tokio::time::sleep(ms(300)).await });
        home
    });
    assert_eq!(elsewhere.block_on(short.lost()), LostReason::Expired);
    let (token, held) = (long.lost_token(), long.handle());
    home_thread.join().expect("no panic").shutdown_timeout(ms(1_000));
    // Nothing would detect its end from now on.
    assert_eq!(elsewhere.block_on(held.lost()), LostReason::Unreachable);
    elsewhere.block_on(token.cancelled());
}

#[test]
fn futures_and_guards_are_send() {
    fn assert_send<T: Send>(_value: &T) {}
    let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
    let _inside = runtime.enter();
    let locker = Arc::new(Locker::new(MemoryBackend::new()).expect("in a runtime"));
    assert_send(&locker.lock("k"));
    assert_send(&locker.try_lock("k"));
    assert_send(&locker.with_lock("k", |held| async move { held.fence() }));
    assert_send(&locker.shutdown());
}

#[test]
fn a_runtime_without_a_timer_is_refused() {
    let runtime = Builder::new_current_thread().build().expect("a runtime");
    std::panic::set_hook(Box::new(|_| {}));
    let error = runtime.block_on(async { Locker::new(MemoryBackend::new()) });
    drop(std::panic::take_hook());
    assert_eq!(error.expect_err("no timer").code(), ErrorCode::InvalidArgument);
}

/// The loss comes while the token's task is being polled on another thread.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_loss_is_missed_by_a_token() {
    let backend = MemoryBackend::new();
    let locker = Locker::new(backend.clone()).expect("in a runtime");
    for round in 0..20_000_u32 {
        let guard = locker.lock("k").await.expect("free");
        let token = guard.lost_token();
        for _ in 0..round % 64 {
            std::hint::spin_loop();
        }
        let stolen = ReleaseRequest::new(guard.lock_id());
        backend.release(&stolen).await.expect("works");
        drop(guard.extend(ttl_ms(1_000)).await.expect("works"));
        let reported = tokio::time::timeout(Duration::from_secs(10), token.cancelled()).await;
        assert!(reported.is_ok(), "missed in round {round}");
    }
}

/// A waiter waits for a release in this process until the first TTL is over, then asks the store.
#[tokio::test(start_paused = true)]
async fn a_renewed_guard_counts_as_held_after_another_task_has_waited_for_it() {
    let backend = Faulty::new();
    let locker = locker(&backend, LockOptions::default().ttl(ttl_ms(300)).renew());
    let guard = locker.lock("k").await.expect("free");
    let waited = locker.lock("k").timeout(ms(1_000)).await;
    assert_eq!(waited.expect_err("held").code(), ErrorCode::AcquisitionTimeout);
    assert_eq!(locker.release_all(), 1);
    shut_down(&locker).await;
    assert!(!backend.is_locked(&key("k")).await.expect("works"));
    drop(guard);
}

#[tokio::test(start_paused = true)]
async fn a_guard_that_lost_its_lock_does_not_hide_the_next_holder() {
    let backend = Faulty::new();
    let locker = locker(&backend, LockOptions::default().ttl(ttl_ms(300)));
    let lost = locker.lock("k").await.expect("free");
    tokio::time::advance(ms(2_000)).await;
    let held = locker.lock("k").await.expect("expired");
    drop(lost);
    assert!(locker.shutdown().await.is_err(), "a guard holds its lock");
    assert_eq!(locker.release_all(), 1);
    shut_down(&locker).await;
    assert!(!backend.is_locked(&key("k")).await.expect("works"));
    drop(held);
}

#[test]
fn reads_outside_a_runtime_are_refused() {
    let [runtime, _] = runtimes();
    let (backend, reports) = (MemoryBackend::new(), Reports::default());
    let (locker, guard) = held_lock(&runtime, &backend, &reports);
    let mut context = Context::from_waker(Waker::noop());
    let refusals = [
        pin!(locker.is_locked("k")).poll(&mut context).map(|read| read.map(drop)),
        pin!(locker.info("k")).poll(&mut context).map(|read| read.map(drop)),
        pin!(locker.setup()).poll(&mut context),
    ];
    for refusal in refusals {
        let Poll::Ready(Err(error)) = refusal else { panic!("not refused: {refusal:?}") };
        assert_eq!(error.code(), ErrorCode::InvalidArgument);
    }
    drop(guard);
    runtime.block_on(locker.shutdown()).expect("released");
}
