//! Waiting for a lock: order, timeouts, retries and notifications, on virtual time.

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use support::{Call, Fault, Faulty, key, locker, ms, ttl_ms};
use syncguard::backend::{AcquireOutcome, AcquireRequest, ExtendRequest, ReleaseRequest};
use syncguard::testing::LocalClock;
use syncguard::{
    Backoff, CancellationToken, ErrorCode, ExtendOutcome, HolderInfo, Jitter, LockBackend,
    LockOptions, Locker, MemoryBackend, ReleaseOutcome, RetryPolicy,
};
use tokio::time::Instant;

fn plain_retry() -> RetryPolicy {
    RetryPolicy::default().jitter(Jitter::None)
}

#[tokio::test(start_paused = true)]
async fn retries_follow_the_policy_and_one_comes_just_before_the_timeout() {
    let backend = Faulty::polling();
    let holder = locker(&backend, LockOptions::default().ttl(ttl_ms(60_000)));
    let _guard = holder.lock("k").await.expect("free");
    let waiter = locker(&backend, LockOptions::default().retry(plain_retry()));
    let started = Instant::now();
    let error = waiter.lock("k").await.expect_err("held");
    assert_eq!(error.code(), ErrorCode::AcquisitionTimeout);
    assert_eq!(error.key(), Some(&key("k")));
    assert_eq!(started.elapsed(), ms(5000));
    let asked: Vec<_> = backend.times(Call::Acquire)[1..]
        .iter()
        .map(|at| at.duration_since(started).as_millis())
        .collect();
    // 100, 200, 400, 800, 1600 ms apart; the sleep that would pass the timeout ends 250 ms before.
    assert_eq!(asked, [0, 100, 300, 700, 1500, 3100, 4750]);
}

#[tokio::test(start_paused = true)]
async fn the_last_retry_ends_the_wait() {
    let backend = Faulty::polling();
    let holder = locker(&backend, LockOptions::default());
    let _guard = holder.lock("k").await.expect("free");
    for (max_retries, delay_ms, elapsed_ms) in [(0, 100, 0), (3, 100, 700), (10, 0, 0)] {
        let retry = plain_retry().max_retries(Some(max_retries)).delay(ms(delay_ms));
        let waiter = locker(&backend, LockOptions::default().retry(retry));
        let (started, before) = (Instant::now(), backend.count(Call::Acquire));
        let error = waiter.lock("k").await.expect_err("held");
        assert_eq!(error.code(), ErrorCode::AcquisitionTimeout);
        assert_eq!(started.elapsed(), ms(elapsed_ms));
        let asked = backend.count(Call::Acquire) - before;
        assert_eq!(asked, 1 + max_retries as usize);
    }
}

#[tokio::test(start_paused = true)]
async fn a_timeout_of_zero_makes_no_attempt_and_wins_over_cancellation() {
    let backend = Faulty::new();
    let token = CancellationToken::new();
    token.cancel();
    let options = LockOptions::default().timeout(Duration::ZERO).cancel(token);
    let locker = locker(&backend, options);
    let error = locker.lock("k").await.expect_err("no time");
    assert_eq!(error.code(), ErrorCode::AcquisitionTimeout);
    assert_eq!(backend.count(Call::Acquire), 0);
}

#[tokio::test(start_paused = true)]
async fn try_lock_makes_one_attempt_whatever_the_timeout() {
    let backend = Faulty::new();
    let locker = locker(&backend, LockOptions::default().timeout(Duration::ZERO));
    let guard = locker.try_lock("k").await.expect("works").expect("free");
    assert!(locker.try_lock("k").await.expect("works").is_none());
    assert_eq!(backend.count(Call::Acquire), 2);
    drop(guard);
}

#[tokio::test(start_paused = true)]
async fn with_a_timeout_and_no_retry_policy_only_the_timeout_ends_the_wait() {
    for backend in [Faulty::new(), Faulty::polling()] {
        let holder = locker(&backend, LockOptions::default().ttl(ttl_ms(3_600_000)));
        let _guard = holder.lock("k").await.expect("free");
        let waiter = locker(&backend, LockOptions::default().timeout(ms(120_000)));
        let started = Instant::now();
        let error = waiter.lock("k").await.expect_err("held");
        assert_eq!(error.code(), ErrorCode::AcquisitionTimeout);
        assert_eq!(started.elapsed(), ms(120_000));
    }
}

#[tokio::test(start_paused = true)]
async fn retries_are_used_up_while_this_process_holds_the_lock() {
    let backend = Faulty::new();
    let retry = plain_retry().max_retries(Some(2)).delay(ms(10));
    let locker = locker(&backend, LockOptions::default().retry(retry));
    let _guard = locker.lock("k").await.expect("free");
    let started = Instant::now();
    // The first waits at the head of the queue, the second behind it.
    let (first, second) = tokio::join!(locker.lock("k"), locker.lock("k"));
    for outcome in [first, second] {
        assert_eq!(outcome.expect_err("held").code(), ErrorCode::AcquisitionTimeout);
    }
    assert!(started.elapsed() < ms(1_000), "{:?}", started.elapsed());
    assert_eq!(backend.count(Call::Acquire), 1, "the answer was known");
}

#[tokio::test(start_paused = true)]
async fn a_canceled_token_prevents_any_io() {
    let backend = Faulty::new();
    let token = CancellationToken::new();
    token.cancel();
    let locker = locker(&backend, LockOptions::default().cancel(token));
    let error = locker.lock("k").await.expect_err("canceled");
    assert_eq!(error.code(), ErrorCode::Aborted);
    assert!(error.is_canceled() && !error.is_shut_down() && error.lost().is_none());
    assert_eq!(locker.try_lock("k").await.expect_err("canceled").code(), ErrorCode::Aborted);
    assert_eq!(backend.count(Call::Acquire), 0);
}

#[tokio::test(start_paused = true)]
async fn canceling_ends_a_sleep_at_once() {
    let backend = Faulty::polling();
    let holder = locker(&backend, LockOptions::default().ttl(ttl_ms(60_000)));
    let _guard = holder.lock("k").await.expect("free");
    let token = CancellationToken::new();
    let waiter = locker(&backend, LockOptions::default().wait_forever().cancel(token.clone()));
    let started = Instant::now();
    let cancel = async {
        tokio::time::sleep(ms(1234)).await;
        token.cancel();
    };
    let (result, ()) = tokio::join!(waiter.lock("k"), cancel);
    assert_eq!(result.expect_err("canceled").code(), ErrorCode::Aborted);
    assert_eq!(started.elapsed(), ms(1234));
}

#[tokio::test(start_paused = true)]
async fn the_timeout_bounds_a_hanging_attempt_and_its_lock_is_undone() {
    for fault in [Fault::Hangs, Fault::HangsAfter, Fault::Delayed(ms(3000))] {
        let backend = Faulty::new();
        let locker = locker(&backend, LockOptions::default().timeout(ms(1000)).ttl(ttl_ms(20_000)));
        backend.fail_next(Call::Acquire, fault);
        let started = Instant::now();
        let error = locker.lock("k").await.expect_err("no answer");
        assert_eq!(error.code(), ErrorCode::AcquisitionTimeout);
        assert_eq!(started.elapsed(), ms(1000));
        locker.shutdown_within(ms(60_000)).await.expect("the undo ends");
        assert!(!backend.is_locked(&key("k")).await.expect("works"), "{fault:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_lock_that_comes_after_the_deadline_is_not_taken() {
    // The answer arrives in the very poll in which the deadline has passed.
    let backend = Faulty::new();
    let locker = locker(&backend, LockOptions::default().timeout(ms(100)));
    backend.fail_next(Call::Acquire, Fault::Delayed(ms(101)));
    let error = locker.lock("k").await.expect_err("too late");
    assert_eq!(error.code(), ErrorCode::AcquisitionTimeout);
    locker.shutdown().await.expect("the undo ends");
    assert!(!backend.is_locked(&key("k")).await.expect("works"));
}

#[tokio::test]
async fn a_lock_whose_answer_comes_with_the_deadline_is_not_taken() {
    // The thread is held up, so that the answer and the deadline are seen in the same poll.
    let backend = Faulty::new();
    let options = LockOptions::default().timeout(ms(20));
    let locker = Locker::builder(backend.clone()).options(options).build();
    let locker = locker.expect("in a runtime");
    backend.fail_next(Call::Acquire, Fault::Blocks(ms(60)));
    let error = locker.lock("k").await.expect_err("too late");
    assert_eq!(error.code(), ErrorCode::AcquisitionTimeout);
    locker.shutdown().await.expect("released");
    assert!(!backend.is_locked(&key("k")).await.expect("works"));
}

#[tokio::test(start_paused = true)]
async fn an_error_ends_the_wait_at_once_and_its_lock_is_undone() {
    let backend = Faulty::new();
    let locker = locker(&backend, LockOptions::default());
    backend.fail_next(Call::Acquire, Fault::LosesReply(ErrorCode::NetworkTimeout));
    let started = Instant::now();
    let error = locker.lock("k").await.expect_err("the answer was lost");
    assert_eq!(error.code(), ErrorCode::NetworkTimeout);
    assert_eq!(started.elapsed(), Duration::ZERO);
    locker.shutdown_within(ms(60_000)).await.expect("the undo ends");
    assert!(!backend.is_locked(&key("k")).await.expect("works"));
}

#[tokio::test(start_paused = true)]
async fn an_undo_continues_until_the_acquire_can_no_longer_take_effect() {
    // "Not held" proves nothing while a copy of the request may still be in flight.
    let backend = Faulty::new();
    let locker = locker(&backend, LockOptions::default().ttl(ttl_ms(10_000)));
    backend.fail_next(Call::Acquire, Fault::Fails(ErrorCode::NetworkTimeout));
    let started = Instant::now();
    drop(locker.lock("k").await.expect_err("no answer"));
    locker.shutdown_within(ms(60_000)).await.expect("the undo ends");
    assert!(backend.count(Call::Release) > 3, "{} releases", backend.count(Call::Release));
    let last = *backend.times(Call::Release).last().expect("some");
    assert!(last.duration_since(started) >= ms(8_000), "{:?}", last.duration_since(started));
    assert!(started.elapsed() <= ms(11_000));
}

#[tokio::test(start_paused = true)]
async fn retry_on_error_sends_the_same_request_again() {
    let backend = Faulty::new();
    let locker = locker(&backend, LockOptions::default().retry_on_error(true));
    backend.fail_next(Call::Acquire, Fault::Fails(ErrorCode::ServiceUnavailable));
    backend.fail_next(Call::Acquire, Fault::LosesReply(ErrorCode::NetworkTimeout));
    backend.fail_next(Call::Acquire, Fault::Fails(ErrorCode::RateLimited));
    let started = Instant::now();
    let guard = locker.lock("k").await.expect("acquired in the end");
    let ids = backend.acquire_ids();
    assert_eq!(ids.len(), 4);
    assert!(ids.iter().all(|id| *id == guard.lock_id()), "one request, sent four times");
    assert_eq!(guard.fence().get(), 1, "and granted once");
    // The lock counts from when the request was first sent.
    let waited = started.elapsed();
    assert!(waited > Duration::ZERO);
    assert_eq!(guard.remaining(), ms(30_000).saturating_sub(waited));
    assert_eq!(guard.release().await.expect("works"), ReleaseOutcome::Released);
}

#[tokio::test(start_paused = true)]
async fn a_timeout_distinguishes_a_failed_store_from_a_held_lock() {
    let source = |error: &syncguard::Error| {
        let source = std::error::Error::source(error)?.downcast_ref::<syncguard::Error>()?;
        Some(source.code())
    };
    let backend = Faulty::polling();
    let locker = locker(&backend, LockOptions::default().retry_on_error(true).timeout(ms(2000)));
    backend.fail_always(Call::Acquire, Some(Fault::Fails(ErrorCode::ServiceUnavailable)));
    let error = locker.lock("k").await.expect_err("no store");
    assert_eq!(error.code(), ErrorCode::AcquisitionTimeout);
    assert_eq!(source(&error), Some(ErrorCode::ServiceUnavailable));
    // The last answer decides.
    backend.fail_always(Call::Acquire, None);
    let guard = locker.lock("k").await.expect("free");
    backend.fail_next(Call::Acquire, Fault::Fails(ErrorCode::ServiceUnavailable));
    let error = locker.try_lock("k").await.expect_err("no retries for a single attempt");
    assert_eq!(error.code(), ErrorCode::ServiceUnavailable);
    let error = locker.lock("k").await.expect_err("held");
    assert_eq!((error.code(), source(&error)), (ErrorCode::AcquisitionTimeout, None));
    drop(guard);
}

#[tokio::test(start_paused = true)]
async fn a_store_that_never_answers_is_not_taken_for_a_held_lock() {
    let backend = Faulty::new();
    let locker = locker(&backend, LockOptions::default());
    backend.fail_always(Call::Acquire, Some(Fault::Hangs));
    let error = locker.try_lock_for("k", ms(500)).await.expect_err("no answer");
    assert_eq!(error.code(), ErrorCode::AcquisitionTimeout);
    let source = std::error::Error::source(&error).expect("the reason");
    let source = source.downcast_ref::<syncguard::Error>().expect("an error of this crate");
    assert_eq!(source.code(), ErrorCode::NetworkTimeout);
    let several = locker.lock_all(["a", "b"]).try_for(ms(500)).await;
    assert_eq!(several.expect_err("no answer").code(), ErrorCode::AcquisitionTimeout);
    // An earlier answer said that it is held.
    backend.fail_always(Call::Acquire, None);
    let _guard = locker.lock("k").await.expect("free");
    let other = support::locker(&backend, LockOptions::default());
    backend.fail_next(Call::Acquire, Fault::None);
    backend.fail_next(Call::Acquire, Fault::Hangs);
    assert!(other.try_lock_for("k", ms(5000)).await.expect("held").is_none());
}

#[tokio::test(start_paused = true)]
async fn a_lock_that_is_over_when_its_answer_comes_is_not_taken() {
    let backend = Faulty::new();
    let locker = locker(&backend, LockOptions::default().ttl(ttl_ms(1_000)).wait_forever());
    backend.fail_next(Call::Acquire, Fault::Delayed(ms(1_000)));
    let error = locker.lock("k").await.expect_err("over");
    assert_eq!(error.code(), ErrorCode::NetworkTimeout);
    locker.shutdown().await.expect("it is released");
    assert!(!backend.is_locked(&key("k")).await.expect("works"));
}

#[tokio::test(start_paused = true)]
async fn a_request_of_unknown_outcome_is_undone_however_the_wait_ends() {
    // By timeout, by cancellation, by dropping, by a last retry, and for a single attempt.
    for ending in 0..5 {
        let backend = Faulty::polling();
        let token = CancellationToken::new();
        let retry = plain_retry().max_retries((ending == 3).then_some(1));
        let options = LockOptions::default().retry_on_error(true).timeout(ms(2000)).retry(retry);
        let locker = locker(&backend, options.cancel(token.clone()));
        backend.fail_next(Call::Acquire, Fault::LosesReply(ErrorCode::NetworkTimeout));
        backend.fail_always(Call::Acquire, Some(Fault::Fails(ErrorCode::ServiceUnavailable)));
        match ending {
            0 | 3 => drop(locker.lock("k").await.expect_err("never")),
            1 => {
                let cancel = async {
                    tokio::time::sleep(ms(500)).await;
                    token.cancel();
                };
                drop(tokio::join!(locker.lock("k"), cancel));
            }
            2 => drop(tokio::time::timeout(ms(500), locker.lock("k")).await),
            _ => drop(locker.try_lock("k").await.expect_err("no answer")),
        }
        assert!(backend.is_locked(&key("k")).await.expect("works"), "acquired, answer lost");
        locker.shutdown_within(ms(60_000)).await.expect("the undo ends");
        assert!(!backend.is_locked(&key("k")).await.expect("works"), "ending {ending}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_late_copy_of_a_granted_request_is_undone_after_its_release() {
    let backend = Faulty::new();
    let locker = locker(&backend, LockOptions::default().ttl(ttl_ms(10_000)).retry_on_error(true));
    backend.fail_next(Call::Acquire, Fault::Fails(ErrorCode::NetworkTimeout));
    let guard = locker.lock("k").await.expect("granted to the copy");
    guard.release().await.expect("works");
    let before = backend.count(Call::Release);
    locker.shutdown_within(ms(60_000)).await.expect("the undo ends");
    assert!(backend.count(Call::Release) > before, "the first copy may still arrive");
}

#[tokio::test(start_paused = true)]
async fn the_undo_of_a_replay_continues_while_another_copy_may_arrive() {
    let backend = Faulty::new();
    let options = LockOptions::default().ttl(ttl_ms(10_000)).retry_on_error(true);
    let locker = locker(&backend, options.timeout(ms(1_000)));
    // The first copy is in flight for three seconds; the second is granted after the caller left.
    backend.fail_next(Call::Acquire, Fault::Fails(ErrorCode::NetworkTimeout));
    backend.fail_next(Call::Acquire, Fault::Delayed(ms(1_500)));
    drop(locker.lock("k").await.expect_err("no time left"));
    tokio::time::sleep(ms(2_000)).await;
    assert!(backend.count(Call::Release) >= 1, "the second copy was undone");
    let late = AcquireRequest::from_parts(key("k"), backend.acquire_ids()[0], ttl_ms(10_000));
    assert!(matches!(
        backend.inner.acquire(&late).await.expect("works"),
        AcquireOutcome::Acquired(_)
    ));
    locker.shutdown_within(ms(60_000)).await.expect("the undo ends");
    assert!(!backend.is_locked(&key("k")).await.expect("works"), "the late copy was undone too");
}

#[tokio::test(start_paused = true)]
async fn immediate_retries_let_other_tasks_run() {
    let backend = Faulty::polling();
    let holder = locker(&backend, LockOptions::default());
    let guard = holder.lock("k").await.expect("free");
    let retry = plain_retry().delay(Duration::ZERO).max_retries(None);
    let waiter = locker(&backend, LockOptions::default().retry(retry));
    let waiting = tokio::spawn(async move { waiter.lock("k").await.map(drop) });
    for _ in 0..10 {
        tokio::task::yield_now().await;
    }
    guard.release().await.expect("works");
    waiting.await.expect("no panic").expect("acquired");
}

#[tokio::test(start_paused = true)]
async fn a_canceled_waiter_that_reaches_the_head_does_not_ask() {
    let backend = Faulty::new();
    let holder = locker(&backend, LockOptions::default());
    let guard = holder.lock("k").await.expect("free");
    let token = CancellationToken::new();
    let options = LockOptions::default().wait_forever().cancel(token.clone());
    let waiter = holder.with_options(options).expect("valid");
    let waiting = tokio::spawn(async move { waiter.lock("k").await.map(drop) });
    tokio::task::yield_now().await;
    token.cancel();
    guard.release().await.expect("works");
    let error = waiting.await.expect("no panic").expect_err("canceled");
    assert_eq!(error.code(), ErrorCode::Aborted);
    assert_eq!(backend.count(Call::Acquire), 1);
}

#[tokio::test(start_paused = true)]
async fn shutdown_waits_for_an_attempt_in_progress() {
    let backend = Faulty::new();
    let locker = locker(&backend, LockOptions::default());
    backend.fail_next(Call::Acquire, Fault::Delayed(ms(500)));
    let waiting = tokio::spawn({
        let locker = locker.clone();
        async move { locker.lock("k").await.map(drop) }
    });
    tokio::task::yield_now().await;
    let started = Instant::now();
    locker.shutdown().await.expect("drained");
    assert!(started.elapsed() >= ms(500), "the attempt was driven to completion");
    assert!(!backend.is_locked(&key("k")).await.expect("works"));
    assert_eq!(waiting.await.expect("no panic").expect_err("shut down").code(), ErrorCode::Aborted);
}

#[tokio::test(start_paused = true)]
async fn a_backend_that_panics_leaves_no_lock() {
    let backend = Faulty::new();
    let locker = locker(&backend, LockOptions::default());
    backend.fail_next(Call::Acquire, Fault::Panics);
    let waiting = tokio::spawn({
        let locker = locker.clone();
        async move { locker.lock("k").await.map(drop) }
    });
    assert!(waiting.await.expect_err("it panicked").is_panic());
    // The queue is free for other waiters, and the request is undone.
    let guard = locker.lock("k").await.expect("free");
    assert_eq!(guard.release().await.expect("works"), ReleaseOutcome::Released);
    assert!(backend.count(Call::Release) >= 1);
}

#[tokio::test(start_paused = true)]
async fn tasks_of_one_process_are_served_in_order() {
    let backend = Faulty::new();
    let locker = locker(&backend, LockOptions::default().wait_forever());
    let guard = locker.lock("k").await.expect("free");
    let order = Arc::new(std::sync::Mutex::new(Vec::new()));
    let mut waiters = Vec::new();
    for number in 0..50 {
        let (locker, order) = (locker.clone(), Arc::clone(&order));
        waiters.push(tokio::spawn(async move {
            let guard = locker.lock("k").await.expect("in time");
            order.lock().expect("no panic").push((number, guard.fence().get()));
            guard.release().await.expect("works");
        }));
        tokio::task::yield_now().await;
    }
    drop(guard);
    for waiter in waiters {
        waiter.await.expect("no panic");
    }
    let expected: Vec<_> = (0..50).map(|number| (number, number + 2)).collect();
    assert_eq!(*order.lock().expect("no panic"), expected, "a new fence at every hand-over");
    // One acquire and one release per hand-over, and a few acquires in vain.
    assert!(backend.count(Call::Acquire) <= 51 + 15, "{}", backend.count(Call::Acquire));
    assert_eq!(backend.count(Call::Release), 51);
}

#[tokio::test(start_paused = true)]
async fn processes_are_served_in_the_order_in_which_they_came() {
    let backend = Faulty::new();
    let options = LockOptions::default().ttl(ttl_ms(60_000)).timeout(ms(60_000));
    let process = || support::locker_without_polls(&backend, options.clone());
    let order = Arc::new(std::sync::Mutex::new(Vec::new()));
    let guard = process().lock("k").await.expect("free");
    let mut waiting = tokio::task::JoinSet::new();
    for place in 0..20 {
        // A separate locker behaves like a separate process.
        let (waiter, order) = (process(), Arc::clone(&order));
        waiting.spawn(async move {
            let guard = waiter.lock("k").await.expect("free in the end");
            order.lock().expect("no panic").push(place);
            tokio::time::sleep(ms(50)).await;
            drop(guard);
        });
        tokio::time::sleep(ms(50)).await;
    }
    drop(guard);
    waiting.join_all().await;
    assert_eq!(*order.lock().expect("no panic"), (0..20).collect::<Vec<_>>());
}

#[tokio::test(start_paused = true)]
async fn a_waiter_that_is_alone_does_not_pause() {
    let backend = Faulty::new();
    let options = LockOptions::default().ttl(ttl_ms(60_000)).timeout(ms(60_000));
    let guard = locker(&backend, options.clone()).lock("k").await.expect("free");
    tokio::time::sleep(ms(1000)).await;
    let waiter = locker(&backend, options);
    let waiting = tokio::spawn(async move { waiter.lock("k").await.map(drop) });
    tokio::time::sleep(ms(2000)).await;
    let released = Instant::now();
    drop(guard);
    waiting.await.expect("no panic").expect("free");
    assert_eq!(released.elapsed(), ms(0));
}

#[tokio::test(start_paused = true)]
async fn a_thousand_waiters_ask_as_often_as_one() {
    let backend = Faulty::new();
    let locker = locker(&backend, LockOptions::default().timeout(ms(10_000)));
    let holder = locker.with_options(LockOptions::default().ttl(ttl_ms(3_600_000)));
    let _guard = holder.expect("valid").lock("k").await.expect("free");
    let waiters: Vec<_> = (0..1000)
        .map(|_| {
            let locker = locker.clone();
            tokio::spawn(async move { locker.lock("k").await.map(drop) })
        })
        .collect();
    for waiter in waiters {
        let error = waiter.await.expect("no panic").expect_err("held");
        assert_eq!(error.code(), ErrorCode::AcquisitionTimeout);
    }
    // Only the first asks, once a second, because the lock is held in this process.
    let asked = backend.count(Call::Acquire) - 1;
    assert!((8..=10).contains(&asked), "{asked} attempts in ten seconds");

    // Held elsewhere, only the first of them asks.
    let elsewhere = support::locker(&backend, LockOptions::default().ttl(ttl_ms(3_600_000)));
    let _other = elsewhere.lock("other").await.expect("free");
    let before = backend.count(Call::Acquire);
    let waiters: Vec<_> = (0..1000)
        .map(|_| {
            let locker = locker.clone();
            tokio::spawn(async move { locker.lock("other").await.map(drop) })
        })
        .collect();
    for waiter in waiters {
        drop(waiter.await.expect("no panic").expect_err("held"));
    }
    let asked = backend.count(Call::Acquire) - before;
    assert!((10..=20).contains(&asked), "{asked} attempts in ten seconds");
    assert!(format!("{locker:?}").contains("keys: 1"), "only the held one: {locker:?}");
}

#[tokio::test(start_paused = true)]
async fn with_notifications_a_held_lock_is_polled_once_a_second() {
    let backend = Faulty::new();
    let holder = locker(&backend, LockOptions::default().ttl(ttl_ms(3_600_000)));
    let _guard = holder.lock("k").await.expect("free");
    let waiter = locker(&backend, LockOptions::default().timeout(ms(60_000)));
    let before = backend.count(Call::Acquire);
    drop(waiter.lock("k").await.expect_err("held"));
    let asked = backend.count(Call::Acquire) - before;
    assert!((60..=70).contains(&asked), "{asked} attempts in a minute");
}

/// Holds a lock for 20 of every 23 ms, without a notification.
async fn pass_around(backend: &Faulty) -> usize {
    for round in 1.. {
        let request = AcquireRequest::new(key("k"), ttl_ms(30_000)).expect("random");
        let outcome = backend.inner.acquire(&request).await.expect("works");
        tokio::time::sleep(ms(20)).await;
        if matches!(outcome, AcquireOutcome::Acquired(_)) {
            let release = ReleaseRequest::new(request.lock_id());
            backend.inner.release(&release).await.expect("works");
        }
        tokio::time::sleep(ms(3)).await;
        if round == 400 {
            return round;
        }
    }
    unreachable!("it ends after some rounds")
}

#[tokio::test(start_paused = true)]
async fn beside_clients_that_do_not_notify_a_waiter_gets_its_share() {
    let backend = Faulty::silent();
    let waiter = locker(&backend, LockOptions::default().wait_forever());
    let waiting = tokio::spawn(async move {
        let mut grants = 0;
        loop {
            let guard = waiter.lock("k").await.expect("it waits forever");
            grants += 1;
            tokio::time::sleep(ms(1)).await;
            guard.release().await.expect("works");
            tokio::time::sleep(ms(10)).await;
            if grants == 100 {
                return grants;
            }
        }
    });
    pass_around(&backend).await;
    assert!(waiting.is_finished(), "fewer than 100 grants in 400 rounds of another client");
}

#[tokio::test(start_paused = true)]
async fn a_holder_that_renews_in_silence_is_polled_once_a_second() {
    let backend = Faulty::silent();
    let request = AcquireRequest::new(key("k"), ttl_ms(30_000)).expect("random");
    assert!(matches!(backend.inner.acquire(&request).await, Ok(AcquireOutcome::Acquired(_))));
    let (holder, lock_id) = (backend.clone(), request.lock_id());
    tokio::spawn(async move {
        loop {
            tokio::time::sleep(ms(700)).await;
            let extend = ExtendRequest::new(lock_id, ttl_ms(30_000));
            assert!(matches!(holder.inner.extend(&extend).await, Ok(ExtendOutcome::Extended(_))));
        }
    });
    let waiter = locker(&backend, LockOptions::default().timeout(ms(60_000)));
    let before = backend.count(Call::Acquire);
    drop(waiter.lock("k").await.expect_err("held"));
    let asked = backend.count(Call::Acquire) - before;
    assert!((60..=70).contains(&asked), "{asked} attempts in a minute");
}

#[tokio::test(start_paused = true)]
async fn a_release_elsewhere_wakes_a_waiter_at_once() {
    let backend = Faulty::new();
    let (here, there) = (
        locker(&backend, LockOptions::default()),
        locker(&backend, LockOptions::default().retry(plain_retry())),
    );
    let guard = here.lock("k").await.expect("free");
    let waiting = tokio::spawn(async move { there.lock("k").await.map(|guard| guard.fence()) });
    tokio::time::sleep(ms(750)).await;
    let released = Instant::now();
    guard.release().await.expect("works");
    let fence = waiting.await.expect("no panic").expect("woken");
    assert_eq!(fence.get(), 2);
    assert_eq!(released.elapsed(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn a_crashed_holder_is_taken_over_the_moment_its_lock_is_dead() {
    let backend = Faulty::polling();
    let crashed = locker(&backend, LockOptions::default().ttl(ttl_ms(2_345)));
    let started = Instant::now();
    let _lock_id = crashed.lock("k").await.expect("free").detach();
    let waiter = locker(
        &backend,
        LockOptions::default().retry(plain_retry().backoff(Backoff::Fixed).delay(ms(4_000))),
    );
    let _guard = waiter.lock("k").await.expect("taken over");
    assert_eq!(started.elapsed(), ms(2_345 + 1_000));
}

#[tokio::test(start_paused = true)]
async fn a_process_does_not_starve_another() {
    longest_waits_beside_a_crowd(Faulty::new(), ms(1)).await;
}

#[tokio::test(start_paused = true)]
async fn a_process_does_not_starve_another_with_fences_from_the_clock() {
    // These have gaps although no other process had the lock.
    longest_waits_beside_a_crowd(Faulty::with_clock_fences(), ms(1)).await;
}

/// The other waiter pauses after each release, because the holders have waited for longer.
#[tokio::test(start_paused = true)]
async fn a_process_does_not_starve_another_by_locks_that_are_held_for_longer() {
    longest_waits_beside_a_crowd(Faulty::new(), ms(250)).await;
    longest_waits_beside_a_crowd(Faulty::with_clock_fences(), ms(250)).await;
}

/// Lets eight tasks of one process pass a lock around, and another process wait for it.
async fn longest_waits_beside_a_crowd(backend: Faulty, hold: Duration) {
    let greedy = locker(&backend, LockOptions::default().wait_forever());
    let other = locker(&backend, LockOptions::default().wait_forever());
    let hand_overs = Arc::new(AtomicUsize::new(0));
    let stop = CancellationToken::new();
    let crowd: Vec<_> = (0..8)
        .map(|_| {
            let (greedy, hand_overs, stop) =
                (greedy.clone(), Arc::clone(&hand_overs), stop.clone());
            tokio::spawn(async move {
                while !stop.is_cancelled() {
                    let guard = greedy.lock("k").await.expect("in time");
                    hand_overs.fetch_add(1, Ordering::SeqCst);
                    tokio::time::sleep(hold).await;
                    guard.release().await.expect("works");
                }
            })
        })
        .collect();
    tokio::time::sleep(ms(100)).await;
    let mut waits = Vec::new();
    for _ in 0..20 {
        let before = hand_overs.load(Ordering::SeqCst);
        let guard = other.lock("k").await.expect("in time");
        waits.push(hand_overs.load(Ordering::SeqCst) - before);
        guard.release().await.expect("works");
        tokio::time::sleep(ms(1)).await;
    }
    stop.cancel();
    for task in crowd {
        task.await.expect("no panic");
    }
    // The first wait may meet a crowd that has long been alone; after that, four hand-overs and the
    // one in progress.
    assert!(waits[0] <= 66, "{waits:?}");
    assert!(waits[1..].iter().all(|hand_overs| *hand_overs <= 6), "{waits:?}");
}

/// In real time, because virtual time stands still while a task is busy.
#[tokio::test]
async fn waiters_without_a_delay_let_other_tasks_run() {
    let options = LockOptions::default().timeout(ms(400));
    let locker = Locker::builder(MemoryBackend::new()).options(options).build().expect("a runtime");
    let held = locker.lock("k").await.expect("free");
    let retry = RetryPolicy::default().delay(Duration::ZERO).max_retries(u32::MAX);
    let waiting = [(); 3].map(|()| {
        let locker = locker.clone();
        tokio::spawn(async move { locker.lock("k").retry(retry).await.map(drop) })
    });
    let mut ticks = 0;
    while !waiting.iter().all(tokio::task::JoinHandle::is_finished) {
        tokio::time::sleep(ms(10)).await;
        ticks += 1;
    }
    assert!(ticks > 5, "{ticks}");
    held.release().await.expect("works");
}

#[tokio::test(start_paused = true)]
async fn a_waiter_that_cannot_subscribe_tries_again_after_ten_seconds() {
    let backend = Faulty::polling();
    let other = locker(&backend, LockOptions::default().ttl(ttl_ms(60_000)));
    let _held = other.lock("k").await.expect("free");
    let started = Instant::now();
    let waiter = locker(&backend, LockOptions::default().timeout(ms(25_000)));
    drop(waiter.lock("k").await.expect_err("held"));
    let asked: Vec<u64> =
        backend.subscriptions().iter().map(|at| (*at - started).as_secs()).collect();
    assert_eq!(asked.len(), 3, "{asked:?}");
    // At the next time that it looks.
    assert!(asked[0] == 0 && (10..16).contains(&asked[1]), "{asked:?}");
    assert!((asked[1] + 10..25).contains(&asked[2]), "{asked:?}");
}

/// It was not asked for before, because this process held it.
#[tokio::test(start_paused = true)]
async fn a_lock_that_this_process_held_for_long_is_valid_for_its_whole_ttl() {
    let backend = Faulty::new();
    let options = LockOptions::default().ttl(ttl_ms(3_000)).timeout(None);
    let locker = locker(&backend, options);
    for held in [ms(900), ms(10_000)] {
        let holder = locker.lock("k").renew().await.expect("free");
        let waiting = tokio::spawn({
            let locker = locker.clone();
            async move { locker.lock("k").await }
        });
        tokio::time::sleep(held).await;
        holder.release().await.expect("works");
        let guard = waiting.await.expect("no panic").expect("free");
        assert_eq!(guard.remaining(), ms(3_000), "after {held:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn try_lock_does_not_queue() {
    let backend = Faulty::new();
    let locker = locker(&backend, LockOptions::default());
    let guard = locker.lock("k").await.expect("free");
    let queued = tokio::spawn({
        let locker = locker.clone();
        async move { locker.lock("k").await.map(drop) }
    });
    tokio::task::yield_now().await;
    assert!(locker.try_lock("k").await.expect("works").is_none());
    drop(guard);
    queued.await.expect("no panic").expect("served");
}

#[tokio::test(start_paused = true)]
async fn a_waiter_in_the_queue_times_out_without_io() {
    let backend = Faulty::new();
    let locker = locker(&backend, LockOptions::default().timeout(ms(700)));
    let _guard = locker.lock("k").await.expect("free");
    let first = tokio::spawn({
        let retry = plain_retry().delay(ms(10_000));
        let options = LockOptions::default().timeout(ms(5000)).retry(retry);
        let locker = locker.with_options(options).expect("valid");
        async move { locker.lock("k").await.map(drop) }
    });
    tokio::task::yield_now().await;
    let before = backend.count(Call::Acquire);
    let started = Instant::now();
    drop(locker.lock("k").await.expect_err("held"));
    assert_eq!(started.elapsed(), ms(700));
    assert_eq!(backend.count(Call::Acquire), before);
    drop(first.await.expect("no panic").expect_err("held"));
}

#[tokio::test(start_paused = true)]
async fn shutdown_ends_waits_and_refuses_new_ones() {
    let backend = Faulty::new();
    let locker = locker(&backend, LockOptions::default().wait_forever());
    let guard = locker.lock("k").await.expect("free");
    let waiting = tokio::spawn({
        let locker = locker.clone();
        async move { locker.lock("k").await.map(drop) }
    });
    tokio::task::yield_now().await;
    let error = locker.shutdown().await.expect_err("a guard is held");
    assert!(error.to_string().starts_with("1 guards still hold their locks"), "{error}");
    let error = waiting.await.expect("no panic").expect_err("shut down");
    assert_eq!(error.code(), ErrorCode::Aborted);
    assert!(error.is_shut_down() && !error.is_canceled());
    assert_eq!(locker.lock("k").await.expect_err("shut down").code(), ErrorCode::Aborted);
    assert_eq!(guard.release().await.expect("guards stay usable"), ReleaseOutcome::Released);
}

#[tokio::test]
async fn many_keys_used_once_leave_no_queue() {
    let locker = Locker::new(MemoryBackend::new()).expect("in a runtime");
    for number in 0..100_000 {
        let guard = locker.lock(format!("key {number}")).await.expect("free");
        guard.release().await.expect("works");
    }
    assert!(format!("{locker:?}").contains("keys: 0"), "{locker:?}");
}

#[tokio::test(start_paused = true)]
async fn a_timeout_names_the_holder_and_not_in_its_text() {
    let backend = Faulty::new();
    let options = LockOptions::default().ttl(ttl_ms(60_000)).timeout(ms(100));
    let holder = Locker::builder(backend.clone()).clock(LocalClock::Tokio).holder("elsewhere");
    let holder = holder.options(options.clone()).build().expect("valid");
    let _guard = holder.lock("k").await.expect("free");
    let waiter = locker(&backend, options);
    let error = waiter.lock("k").await.expect_err("held");
    let label =
        |error: &syncguard::Error| error.holder().and_then(HolderInfo::label).map(str::to_owned);
    assert_eq!(label(&error).as_deref(), Some("elsewhere"));
    assert!(!error.to_string().contains("elsewhere"), "{error}");
    // Held in this process: known without asking.
    let error = holder.lock("k").await.expect_err("held");
    assert_eq!(label(&error).as_deref(), Some("elsewhere"));
}
