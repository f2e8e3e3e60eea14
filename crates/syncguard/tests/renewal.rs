//! Renewal and loss, on virtual time.

mod support;

use std::time::Duration;

use support::{Call, Fault, Faulty, key, locker, locker_without_polls, ms, ttl_ms};
use syncguard::backend::ReleaseRequest;
use syncguard::{
    ErrorCode, ExtendOutcome, LockBackend, LockOptions, LostReason, ReleaseOutcome, diagnostics,
};
use tokio::time::Instant;

fn renewed() -> LockOptions {
    LockOptions::default().ttl(ttl_ms(3_000)).renew()
}

#[tokio::test(start_paused = true)]
async fn a_renewed_lock_outlives_its_ttl_and_is_extended_at_every_third() {
    let backend = Faulty::new();
    let locker = locker(&backend, renewed());
    let started = Instant::now();
    let guard = locker.lock("k").await.expect("free");
    tokio::time::sleep(ms(30_500)).await;
    assert!(guard.is_valid());
    let extended: Vec<_> = backend
        .times(Call::Extend)
        .iter()
        .map(|at| at.duration_since(started).as_millis())
        .collect();
    assert_eq!(extended, (1..=30).map(|n| n * 1000).collect::<Vec<_>>());
    assert_eq!(guard.release().await.expect("works"), ReleaseOutcome::Released);
}

#[tokio::test(start_paused = true)]
async fn no_extend_is_sent_after_a_release_or_a_drop() {
    let backend = Faulty::new();
    let locker = locker(&backend, renewed());
    let guard = locker.lock("k").await.expect("free");
    tokio::time::sleep(ms(1_500)).await;
    guard.release().await.expect("works");
    let guard = locker.lock("k").await.expect("free");
    tokio::time::sleep(ms(1_500)).await;
    drop(guard);
    tokio::time::sleep(ms(30_000)).await;
    let cycle = [Call::Acquire, Call::Extend, Call::Release];
    assert_eq!(backend.calls(), [cycle, cycle].concat());
}

#[tokio::test(start_paused = true)]
async fn the_renewal_task_ends_with_its_guard() {
    let backend = Faulty::new();
    let locker = locker(&backend, renewed());
    let alive = || tokio::runtime::Handle::current().metrics().num_alive_tasks();
    let before = alive();
    let guards = [locker.lock("a").await.expect("free"), locker.lock("b").await.expect("free")];
    assert_eq!(alive(), before + 2, "one task per guard");
    drop(guards);
    locker.shutdown().await.expect("released");
    tokio::time::sleep(ms(1)).await;
    assert_eq!(alive(), before);
}

#[tokio::test(start_paused = true)]
async fn one_task_watches_a_guard_for_all_that_wait_for_its_end() {
    let backend = Faulty::new();
    let locker = locker(&backend, LockOptions::default());
    let guard = locker.lock("k").await.expect("free");
    let alive = || tokio::runtime::Handle::current().metrics().num_alive_tasks();
    let before = alive();
    for _ in 0..3 {
        tokio::time::timeout(ms(1), guard.lost()).await.expect_err("it is held");
    }
    assert_eq!(alive(), before + 1);
}

/// On some stores several keys share their notifications.
#[tokio::test(start_paused = true)]
async fn a_holder_that_is_notified_again_and_again_looks_less_and_less_often() {
    /// Sleeps end late by up to this.
    const STEP: u64 = 7;
    let backend = Faulty::watched();
    let changes = backend.changes.clone().expect("watched");
    let locker = locker(&backend, LockOptions::default().ttl(ttl_ms(60_000)).renew());
    let _guard = locker.lock("k").await.expect("free");
    let pass = async |steps: u64, is_noisy: bool| {
        for _ in 0..steps {
            if is_noisy {
                changes.notify(&key("k"), None);
            }
            tokio::time::advance(ms(STEP)).await;
            tokio::task::yield_now().await;
        }
    };
    let gaps = |looks: &[Instant]| -> Vec<u128> {
        looks.windows(2).map(|pair| (pair[1] - pair[0]).as_millis()).collect()
    };
    pass(450, true).await;
    let looks = backend.lookups();
    let gaps_of_noise = gaps(&looks);
    assert_eq!(gaps_of_noise[..5], [21, 42, 84, 161, 322]);
    assert!(gaps_of_noise[5..].iter().all(|gap| *gap == 504), "{gaps_of_noise:?}");
    assert!(gaps_of_noise.len() > 6);
    pass(200, false).await;
    let before = backend.lookups().len();
    pass(40, true).await;
    assert_eq!(gaps(&backend.lookups()[before..])[..2], [21, 42], "after a quiet time");
}

#[tokio::test(start_paused = true)]
async fn the_next_waiter_asks_when_the_lock_is_lost() {
    let backend = Faulty::new();
    let locker = locker_without_polls(&backend, renewed());
    let started = Instant::now();
    let guard = locker.lock("k").await.expect("free");
    let waiting = tokio::spawn({
        let locker = locker.clone();
        async move { locker.lock("k").await }
    });
    tokio::time::sleep(ms(500)).await;
    let taken = ReleaseRequest::new(guard.lock_id());
    assert_eq!(backend.inner.release(&taken).await.expect("works"), ReleaseOutcome::Released);
    drop(waiting.await.expect("no panic").expect("free"));
    assert_eq!(guard.ended(), Some(LostReason::NotHeld));
    assert_eq!(started.elapsed(), ms(1_000), "at the renewal, and not at the expiry");
}

#[tokio::test(start_paused = true)]
async fn an_extend_that_is_answered_after_the_loss_was_signaled_does_not_revoke_it() {
    let backend = Faulty::new();
    let options = LockOptions::default().ttl(ttl_ms(3_000)).stop_margin(ms(1_000));
    let locker = locker(&backend, options);
    let guard = locker.lock("k").await.expect("free");
    tokio::time::sleep(ms(500)).await;
    backend.fail_next(Call::Extend, Fault::Delayed(ms(700)));
    let (extended, ended) = tokio::join!(guard.extend(ttl_ms(1_200)), async {
        // The shorter TTL counts from before it was sent.
        tokio::time::sleep(ms(300)).await;
        guard.ended()
    });
    assert_eq!(ended, Some(LostReason::Expiring));
    let extended = extended.expect("answered");
    assert!(matches!(extended, ExtendOutcome::NotHeld(_)), "{extended:?}");
}

#[tokio::test(start_paused = true)]
async fn renewal_continues_through_errors_until_the_deadline() {
    let backend = Faulty::new();
    let locker = locker(&backend, renewed());
    let guard = locker.lock("k").await.expect("free");
    for _ in 0..4 {
        backend.fail_next(Call::Extend, Fault::Fails(ErrorCode::ServiceUnavailable));
    }
    backend.fail_next(Call::Extend, Fault::LosesReply(ErrorCode::NetworkTimeout));
    tokio::time::sleep(ms(10_000)).await;
    assert!(guard.is_valid());
    assert_eq!(guard.release().await.expect("works"), ReleaseOutcome::Released);
}

#[tokio::test(start_paused = true)]
async fn a_lock_is_lost_when_its_store_is_unreachable_past_the_deadline() {
    for fault in [Fault::Fails(ErrorCode::ServiceUnavailable), Fault::Hangs] {
        let backend = Faulty::new();
        let locker = locker(&backend, renewed());
        let started = Instant::now();
        let guard = locker.lock("k").await.expect("free");
        tokio::time::sleep(ms(1_500)).await;
        backend.fail_always(Call::Extend, Some(fault));
        assert_eq!(guard.lost().await, LostReason::Unreachable);
        // The last extend was sent after 1000 ms.
        assert_eq!(started.elapsed(), ms(4_000));
        assert!(!guard.is_valid());
        assert_eq!(guard.lost().await, LostReason::Unreachable, "loss is final");
    }
}

#[tokio::test(start_paused = true)]
async fn a_lock_taken_away_is_lost_at_the_next_renewal() {
    let backend = Faulty::new();
    let locker = locker(&backend, renewed());
    let started = Instant::now();
    let guard = locker.lock("k").await.expect("free");
    let stolen = ReleaseRequest::new(guard.lock_id());
    assert_eq!(backend.inner.release(&stolen).await.expect("works"), ReleaseOutcome::Released);
    assert_eq!(guard.lost().await, LostReason::NotHeld);
    assert_eq!(started.elapsed(), ms(1_000));
    assert!(matches!(guard.release().await.expect("works"), ReleaseOutcome::NotHeld(_)));
}

#[tokio::test(start_paused = true)]
async fn without_renewal_a_lock_is_lost_when_its_ttl_is_over() {
    let backend = Faulty::new();
    let locker = locker(&backend, LockOptions::default().ttl(ttl_ms(2_000)));
    let started = Instant::now();
    let guard = locker.lock("k").await.expect("free");
    let token = guard.lost_token();
    assert_eq!(guard.lost().await, LostReason::Expired);
    assert_eq!(started.elapsed(), ms(2_000));
    token.cancelled().await;
    assert!(matches!(
        guard.extend(ttl_ms(2_000)).await.expect("no I/O"),
        ExtendOutcome::NotHeld(_)
    ));
    assert_eq!(backend.count(Call::Extend), 0, "a lost lock is not extended");
}

#[tokio::test(start_paused = true)]
async fn validity_counts_from_before_the_request_was_sent() {
    let backend = Faulty::new();
    let locker = locker(&backend, LockOptions::default().ttl(ttl_ms(2_000)));
    backend.fail_next(Call::Acquire, Fault::Delayed(ms(600)));
    let guard = locker.lock("k").await.expect("free");
    assert_eq!(guard.remaining(), ms(1_400));
    backend.fail_next(Call::Extend, Fault::Delayed(ms(300)));
    assert!(matches!(
        guard.extend(ttl_ms(5_000)).await.expect("works"),
        ExtendOutcome::Extended(_)
    ));
    assert_eq!(guard.remaining(), ms(4_700));
}

#[tokio::test(start_paused = true)]
async fn work_does_not_start_under_a_lock_that_is_over() {
    let backend = Faulty::new();
    let locker = locker(&backend, LockOptions::default().ttl(ttl_ms(1_000)));
    let guard = locker.lock("k").await.expect("free");
    tokio::time::sleep(ms(3_000)).await;
    let mut has_started = false;
    let outcome = guard.run(async { has_started = true }).await;
    assert_eq!(outcome, Err(LostReason::Expired));
    assert!(!has_started);
    assert_eq!(guard.ended(), Some(LostReason::Expired));
    let guard = locker.lock("k").await.expect("free");
    tokio::time::sleep(ms(3_000)).await;
    assert_eq!(guard.ended(), Some(LostReason::Expired), "nothing else has looked at the time");
}

#[tokio::test(start_paused = true)]
async fn max_hold_bounds_renewal() {
    let backend = Faulty::new();
    let locker = locker(&backend, renewed().max_hold(ms(10_000)));
    let started = Instant::now();
    let guard = locker.lock("k").await.expect("free");
    assert_eq!(guard.lost().await, LostReason::Expired);
    assert_eq!(started.elapsed(), ms(10_000));
    let info =
        diagnostics::get_by_key(&backend, &key("k")).await.expect("works").expect("tolerance");
    let held = info.expires_at.since(info.acquired_at);
    assert_eq!(held, ms(10_000), "the store was never asked for more");
}

#[tokio::test(start_paused = true)]
async fn a_late_not_held_after_a_release_is_not_a_loss() {
    let backend = Faulty::new();
    let locker = locker(&backend, renewed());
    let guard = locker.lock("k").await.expect("free");
    let held = guard.handle();
    // The renewal at 1000 ms reaches the store after the release.
    backend.fail_next(Call::Extend, Fault::Delayed(ms(500)));
    tokio::time::sleep(ms(1_200)).await;
    assert_eq!(backend.count(Call::Extend), 1);
    assert_eq!(guard.release().await.expect("works"), ReleaseOutcome::Released);
    tokio::time::sleep(ms(60_000)).await;
    assert_eq!(held.lost().await, LostReason::Released, "a released lock cannot be lost");
}

#[tokio::test(start_paused = true)]
async fn an_extend_that_succeeds_after_the_loss_is_released_again() {
    let backend = Faulty::new();
    let locker = locker(&backend, renewed());
    let guard = locker.lock("k").await.expect("free");
    // The first is sent at 1000 ms and applied at 3500 ms: within the store's tolerance, after the
    // guard's deadline. All others fail.
    backend.fail_next(Call::Extend, Fault::Delayed(ms(2_500)));
    backend.fail_always(Call::Extend, Some(Fault::Fails(ErrorCode::ServiceUnavailable)));
    assert_eq!(guard.lost().await, LostReason::Unreachable);
    assert!(backend.is_locked(&key("k")).await.expect("works"));
    tokio::time::sleep(ms(600)).await;
    assert!(!backend.is_locked(&key("k")).await.expect("works"), "released again");
    assert!(!guard.is_valid());
}

#[tokio::test(start_paused = true)]
async fn a_manual_extend_may_shorten_the_lock_and_renewal_adapts() {
    let backend = Faulty::new();
    let locker = locker(&backend, LockOptions::default().ttl(ttl_ms(30_000)).renew());
    let guard = locker.lock("k").await.expect("free");
    assert!(matches!(guard.extend(ttl_ms(600)).await.expect("works"), ExtendOutcome::Extended(_)));
    assert_eq!(guard.remaining(), ms(600));
    tokio::time::sleep(ms(5_000)).await;
    assert!(guard.is_valid(), "renewed in time, although a third of the original TTL was far away");
    assert_eq!(guard.release().await.expect("works"), ReleaseOutcome::Released);
}

#[tokio::test(start_paused = true)]
async fn a_shorter_ttl_counts_even_if_the_answer_is_lost() {
    let backend = Faulty::new();
    let locker = locker(&backend, LockOptions::default().ttl(ttl_ms(30_000)));
    let guard = locker.lock("k").await.expect("free");
    backend.fail_next(Call::Extend, Fault::LosesReply(ErrorCode::NetworkTimeout));
    drop(guard.extend(ttl_ms(500)).await.expect_err("the answer was lost"));
    assert_eq!(guard.remaining(), ms(500));
    let started = Instant::now();
    assert_eq!(guard.lost().await, LostReason::Expired);
    assert_eq!(started.elapsed(), ms(500));
}

#[tokio::test(start_paused = true)]
async fn the_answer_to_an_older_extend_is_not_taken_for_the_newest() {
    let backend = Faulty::new();
    let locker = locker(&backend, LockOptions::default().ttl(ttl_ms(30_000)));
    let guard = locker.lock("k").await.expect("free");
    backend.fail_next(Call::Extend, Fault::Delayed(ms(200)));
    let dropped = tokio::time::timeout(ms(100), guard.extend(ttl_ms(60_000))).await;
    assert!(dropped.is_err());
    assert!(matches!(
        guard.extend(ttl_ms(5_000)).await.expect("works"),
        ExtendOutcome::Extended(_)
    ));
    tokio::time::sleep(ms(1_000)).await;
    assert!(guard.remaining() <= ms(4_000), "{:?}", guard.remaining());
}

#[tokio::test(start_paused = true)]
async fn an_older_shorter_extend_does_not_land_after_a_newer_longer_one() {
    let backend = Faulty::new();
    let locker = locker(&backend, LockOptions::default().ttl(ttl_ms(30_000)));
    let guard = locker.lock("k").await.expect("free");
    backend.fail_next(Call::Extend, Fault::Delayed(ms(200)));
    let dropped = tokio::time::timeout(ms(100), guard.extend(ttl_ms(5_000))).await;
    assert!(dropped.is_err());
    assert!(matches!(
        guard.extend(ttl_ms(60_000)).await.expect("works"),
        ExtendOutcome::Extended(_)
    ));
    tokio::time::sleep(ms(20_000)).await;
    assert!(guard.is_valid());
    assert!(backend.is_locked(&key("k")).await.expect("works"), "the store agrees with the guard");
}

#[tokio::test(start_paused = true)]
async fn work_under_a_guard_ends_at_its_loss() {
    let backend = Faulty::new();
    let locker = locker(&backend, LockOptions::default().ttl(ttl_ms(1_000)));
    let guard = locker.lock("k").await.expect("free");
    let started = Instant::now();
    let work = async {
        tokio::time::sleep(Duration::from_hours(1)).await;
    };
    assert_eq!(guard.run(work).await, Err(LostReason::Expired));
    assert_eq!(started.elapsed(), ms(1_000));
    drop(guard);
    tokio::time::sleep(ms(5_000)).await;
    let error = locker
        .with_lock("k", |_held| tokio::time::sleep(Duration::from_hours(1)))
        .await
        .expect_err("the lock is lost after a second");
    assert_eq!(error.code(), ErrorCode::Aborted);
}

#[tokio::test(start_paused = true)]
async fn a_handle_extends_nothing_after_its_guard_released_the_lock() {
    let backend = Faulty::new();
    let locker = locker(&backend, LockOptions::default());
    let guard = locker.lock("k").await.expect("free");
    let held = guard.handle();
    guard.release().await.expect("works");
    assert!(matches!(held.extend(ttl_ms(5_000)).await.expect("no I/O"), ExtendOutcome::NotHeld(_)));
    assert_eq!(backend.count(Call::Extend), 0);
    assert!(!held.is_valid());
}

#[tokio::test(start_paused = true)]
async fn work_ends_when_the_guard_releases_the_lock() {
    let backend = Faulty::new();
    let locker = locker(&backend, renewed());
    let guard = locker.lock("k").await.expect("free");
    let (held, token) = (guard.handle(), guard.lost_token());
    let running = tokio::spawn({
        let held = held.clone();
        async move { held.run(std::future::pending::<()>()).await }
    });
    tokio::time::sleep(ms(100)).await;
    assert_eq!(guard.release().await.expect("works"), ReleaseOutcome::Released);
    assert_eq!(running.await.expect("no panic"), Err(LostReason::Released));
    token.cancelled().await;
    let mut has_run = false;
    let work = async { has_run = true };
    assert_eq!(held.run(work).await, Err(LostReason::Released));
    assert!(!has_run, "no work starts under a released lock");
}

#[tokio::test(start_paused = true)]
async fn a_shorter_extend_of_unknown_outcome_bounds_a_longer_one() {
    let backend = Faulty::new();
    let locker = locker(&backend, LockOptions::default().ttl(ttl_ms(30_000)));
    let guard = locker.lock("k").await.expect("free");
    // Its answer is lost; it may still be in flight.
    backend.fail_next(Call::Extend, Fault::Fails(ErrorCode::NetworkTimeout));
    drop(guard.extend(ttl_ms(5_000)).await.expect_err("the answer was lost"));
    tokio::time::sleep(ms(1_000)).await;
    assert!(matches!(
        guard.extend(ttl_ms(60_000)).await.expect("works"),
        ExtendOutcome::Extended(_)
    ));
    // The short one takes effect now.
    let late = syncguard::backend::ExtendRequest::new(guard.lock_id(), ttl_ms(5_000));
    drop(backend.inner.extend(&late).await.expect("works"));
    assert_eq!(guard.remaining(), ms(5_000), "no longer than in the store");
}

#[tokio::test(start_paused = true)]
async fn an_extend_that_had_no_effect_shortens_nothing() {
    let backend = Faulty::new();
    let locker = locker(&backend, LockOptions::default().ttl(ttl_ms(30_000)));
    let guard = locker.lock("k").await.expect("free");
    backend.fail_next(Call::Extend, Fault::Fails(ErrorCode::RateLimited));
    drop(guard.extend(ttl_ms(5_000)).await.expect_err("refused"));
    assert_eq!(guard.remaining(), ms(30_000));
}

#[tokio::test(start_paused = true)]
async fn a_renewal_that_is_not_answered_leaves_time_for_the_next() {
    let backend = Faulty::new();
    let locker = locker(&backend, renewed());
    let guard = locker.lock("k").await.expect("free");
    backend.fail_next(Call::Extend, Fault::Hangs);
    tokio::time::sleep(ms(10_000)).await;
    assert!(guard.is_valid(), "one lost packet is not a lost lock");
    assert_eq!(guard.release().await.expect("works"), ReleaseOutcome::Released);
}

#[tokio::test(start_paused = true)]
async fn the_loss_is_signaled_a_stop_margin_before_the_end() {
    let backend = Faulty::new();
    let locker = locker(&backend, renewed().stop_margin(ms(1_000)));
    let started = Instant::now();
    let guard = locker.lock("k").await.expect("free");
    tokio::time::sleep(ms(1_500)).await;
    backend.fail_always(Call::Extend, Some(Fault::Hangs));
    assert_eq!(guard.lost().await, LostReason::Expiring);
    // The last extend was sent after 1000 ms and lasts until 4000 ms.
    assert_eq!(started.elapsed(), ms(3_000));
    assert!(!guard.is_valid());
    // The work has time to stop: the lock is still held, and its guard releases it.
    assert!(backend.is_locked(&key("k")).await.expect("works"));
    assert_eq!(guard.release().await.expect("works"), ReleaseOutcome::Released);
}

#[tokio::test(start_paused = true)]
async fn with_a_stop_margin_a_store_that_recovers_in_time_loses_no_lock() {
    let backend = Faulty::new();
    let locker = locker(&backend, renewed().stop_margin(ms(1_000)));
    let guard = locker.lock("k").await.expect("free");
    backend.fail_next(Call::Extend, Fault::Fails(ErrorCode::ServiceUnavailable));
    backend.fail_next(Call::Extend, Fault::Fails(ErrorCode::ServiceUnavailable));
    tokio::time::sleep(ms(30_000)).await;
    assert!(guard.is_valid());
}

/// In real time, where a TTL of whole milliseconds never quite reaches the end.
#[tokio::test]
async fn max_hold_ends_without_a_burst_of_extends() {
    let backend = Faulty::new();
    let options = LockOptions::default().ttl(ttl_ms(300)).renew().max_hold(ms(900));
    let locker = locker(&backend, options);
    let guard = locker.lock("k").await.expect("free");
    assert_eq!(guard.lost().await, LostReason::Expired);
    let extends = backend.count(Call::Extend);
    assert!(extends <= 7, "every 100 ms, the last for the rest: {extends}");
}

#[tokio::test(start_paused = true)]
async fn the_error_of_work_that_lost_its_lock_contains_the_reason() {
    let backend = Faulty::new();
    let locker = locker(&backend, LockOptions::default().ttl(ttl_ms(1_000)));
    let work = locker.with_lock("k", |_held| std::future::pending::<()>());
    let error = work.await.expect_err("lost after a second");
    assert_eq!(error.code(), ErrorCode::Aborted);
    assert_eq!(error.lost(), Some(LostReason::Expired));
    assert!(!error.is_canceled() && !error.is_shut_down());
}

#[tokio::test(start_paused = true)]
async fn max_hold_does_not_shorten_a_manual_extend() {
    for (extended_at, extended_by) in [(1_000, 30_000), (8_000, 30_000)] {
        let backend = Faulty::new();
        let locker = locker(&backend, renewed().max_hold(ms(10_000)));
        let started = Instant::now();
        let guard = locker.lock("k").await.expect("free");
        tokio::time::sleep(ms(extended_at)).await;
        let outcome = guard.extend(ttl_ms(extended_by)).await.expect("works");
        assert!(matches!(outcome, ExtendOutcome::Extended(_)));
        assert_eq!(guard.lost().await, LostReason::Expired);
        assert_eq!(started.elapsed(), ms(extended_at + extended_by));
    }
}
