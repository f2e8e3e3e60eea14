//! How often releases and undos in the background are tried, on virtual time.

mod support;

use support::{Call, Fault, Faulty, Reports, locker, ms, shut_down};
use syncguard::{ErrorCode, LockBackend, Locker};
use tokio::time::Instant;

/// Makes an acquire take effect and lose its answer, so that it has to be undone.
async fn lose_an_acquire(backend: &Faulty, reports: &Reports) -> Locker<Faulty> {
    let locker = locker(backend, reports.options());
    backend.fail_next(Call::Acquire, Fault::LosesReply(ErrorCode::ServiceUnavailable));
    let error = locker.lock("k").ttl(ms(5000)).await.expect_err("its answer is lost");
    assert_eq!(error.code(), ErrorCode::ServiceUnavailable);
    locker
}

/// The undo refuses a late copy of the acquire, but it must not end a lock that is kept.
#[tokio::test(start_paused = true)]
async fn an_undo_waits_until_a_lock_was_held_for_long_enough() {
    for is_dropped in [false, true] {
        let (backend, reports) = (Faulty::new(), Reports::default());
        let options = reports.options().retry_on_error(true).hold_at_least(ms(10_000));
        let locker = locker(&backend, options);
        backend.fail_next(Call::Acquire, Fault::LosesReply(ErrorCode::ServiceUnavailable));
        let started = Instant::now();
        let guard = locker.lock("k").await.expect("the second copy is answered");
        if is_dropped {
            drop(guard);
        } else {
            guard.release().await.expect("works");
        }
        tokio::time::sleep_until(started + ms(9_990)).await;
        assert!(is_locked(&backend).await, "dropped: {is_dropped}");
        tokio::time::sleep(ms(20)).await;
        assert!(!is_locked(&backend).await, "dropped: {is_dropped}");
        assert_eq!(backend.count(Call::Release), 1, "dropped: {is_dropped}");
        assert_eq!(reports.codes(), []);
        shut_down(&locker).await;
    }
}

async fn is_locked(backend: &Faulty) -> bool {
    backend.is_locked(&support::key("k")).await.expect("works")
}

#[tokio::test(start_paused = true)]
async fn an_undo_that_fails_is_tried_again() {
    let (backend, reports) = (Faulty::new(), Reports::default());
    backend.fail_next(Call::Release, Fault::Fails(ErrorCode::ServiceUnavailable));
    let locker = lose_an_acquire(&backend, &reports).await;
    tokio::time::sleep(ms(1000)).await;
    assert!(!is_locked(&backend).await);
    let times = backend.times(Call::Release);
    assert!(times[1] - times[0] >= ms(50), "it pauses");
    assert_eq!(reports.codes(), []);
    shut_down(&locker).await;
}

#[tokio::test(start_paused = true)]
async fn an_undo_that_cannot_succeed_is_tried_once_and_reported() {
    let (backend, reports) = (Faulty::new(), Reports::default());
    backend.fail_always(Call::Release, Some(Fault::Fails(ErrorCode::AuthFailed)));
    let locker = lose_an_acquire(&backend, &reports).await;
    tokio::time::sleep(ms(1)).await;
    assert_eq!(reports.next(), ErrorCode::AuthFailed);
    assert_eq!(backend.count(Call::Release), 1);
    shut_down(&locker).await;
}

/// It reports what went wrong instead of that its time is over.
#[tokio::test(start_paused = true)]
async fn an_undo_is_tried_until_the_lock_is_dead() {
    let (backend, reports) = (Faulty::new(), Reports::default());
    backend.fail_always(Call::Release, Some(Fault::Fails(ErrorCode::ServiceUnavailable)));
    let started = Instant::now();
    let locker = lose_an_acquire(&backend, &reports).await;
    shut_down(&locker).await;
    assert_eq!(reports.next(), ErrorCode::ServiceUnavailable);
    let tried = backend.times(Call::Release);
    let last = tried[tried.len() - 1] - started;
    assert!(tried.len() > 5 && last > ms(3000) && last < ms(6000), "{tried:?}");
}

/// A try at the end of the time would be of no use.
#[tokio::test(start_paused = true)]
async fn a_release_is_tried_until_its_time_is_over() {
    let (backend, reports) = (Faulty::new(), Reports::default());
    backend.fail_always(Call::Release, Some(Fault::Fails(ErrorCode::ServiceUnavailable)));
    let locker = locker(&backend, reports.options().release_timeout(ms(150)));
    drop(locker.lock("k").await.expect("free"));
    tokio::time::sleep(ms(10_000)).await;
    assert_eq!(reports.next(), ErrorCode::ServiceUnavailable);
    let times = backend.times(Call::Release);
    assert_eq!(times.len(), 2, "at once and after 50 ms, but not after 150: {times:?}");
    shut_down(&locker).await;
}

#[tokio::test(start_paused = true)]
async fn without_a_release_timeout_a_lock_is_released_until_it_is_dead_and_for_at_least_5_seconds()
{
    for (held, last) in [(ms(0), 9_150), (ms(20_000), 3_150)] {
        let (backend, reports) = (Faulty::new(), Reports::default());
        let locker = locker(&backend, reports.options().ttl(support::ttl_ms(10_000)));
        backend.fail_always(Call::Release, Some(Fault::Fails(ErrorCode::ServiceUnavailable)));
        let guard = locker.lock("k").await.expect("free");
        tokio::time::sleep(held).await;
        let dropped = Instant::now();
        drop(guard);
        tokio::time::sleep(ms(20_000)).await;
        assert_eq!(reports.next(), ErrorCode::ServiceUnavailable);
        let tried = backend.times(Call::Release);
        assert_eq!(tried[tried.len() - 1] - dropped, ms(last), "{tried:?}");
        shut_down(&locker).await;
    }
}
