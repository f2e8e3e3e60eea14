//! `cancellable` around everything that a user awaits: canceled before it begins and while it is in
//! progress. The kit does the same with the bare operations of every backend.

mod support;

use std::future::Future;

use support::{Call, Fault, Faulty, key, locker, ms, ttl_ms};
use syncguard::backend::AcquireRequest;
use syncguard::{
    CancellationToken, ErrorCode, LockBackend, LockOptions, ReleaseOutcome, Result, Ttl,
    cancellable, diagnostics,
};

/// Cancels an operation after a while and returns its result.
async fn cancel_after_10_ms<T>(operation: impl Future<Output = Result<T>>) -> Result<T> {
    let token = CancellationToken::new();
    let cancel = async {
        tokio::time::sleep(ms(10)).await;
        token.cancel();
    };
    tokio::join!(cancellable(&token, operation), cancel).0
}

#[track_caller]
fn assert_aborted<T>(operation: &str, result: Result<T>) {
    let code = result.err().map(|error| error.code());
    assert_eq!(code, Some(ErrorCode::Aborted), "{operation}");
}

#[tokio::test(start_paused = true)]
async fn with_a_canceled_token_the_store_is_not_asked() {
    let backend = Faulty::new();
    let locker = locker(&backend, LockOptions::default());
    let guard = locker.lock("held").await.expect("free");
    let handle = guard.handle();
    let lock_id = guard.lock_id();
    let (held, calls) = (key("held"), backend.calls());
    let token = CancellationToken::new();
    token.cancel();
    assert_aborted("lock", cancellable(&token, locker.lock("free")).await);
    assert_aborted("try_lock", cancellable(&token, locker.try_lock("free")).await);
    let with_lock = locker.with_lock("free", |_held| async { panic!("it must not run") });
    assert_aborted::<()>("with_lock", cancellable(&token, with_lock).await);
    assert_aborted("resume", cancellable(&token, locker.resume(lock_id)).await);
    assert_aborted("extend", cancellable(&token, handle.extend(Ttl::DEFAULT)).await);
    assert_aborted("release", cancellable(&token, guard.release()).await);
    assert_aborted(
        "get_by_key",
        cancellable(&token, diagnostics::get_by_key(&backend, &held)).await,
    );
    assert_aborted(
        "get_by_id",
        cancellable(&token, diagnostics::get_by_id(&backend, &lock_id)).await,
    );
    assert_aborted("owns", cancellable(&token, diagnostics::owns(&backend, &lock_id)).await);
    let shown = diagnostics::get_by_key_raw(&backend, &held).await.expect("works").expect("held");
    assert_aborted("break", cancellable(&token, diagnostics::break_lock(&backend, &shown)).await);
    assert_aborted("shutdown", cancellable(&token, locker.shutdown()).await);
    assert_eq!(backend.calls(), calls, "something was sent");
    assert!(guard.is_valid(), "the guard is unchanged");
    drop(locker.try_lock("free").await.expect("the locker was not shut down").expect("free"));
    assert_eq!(guard.release().await.expect("works"), ReleaseOutcome::Released);
}

#[tokio::test(start_paused = true)]
async fn an_acquire_canceled_in_progress_is_undone() {
    for fault in [Fault::Delayed(ms(500)), Fault::HangsAfter] {
        let backend = Faulty::new();
        // An undo that hangs would not be an undo; the acquire alone is slow.
        let locker = locker(&backend, LockOptions::default().ttl(ttl_ms(2_000)));
        backend.fail_next(Call::Acquire, fault);
        assert_aborted("lock", cancel_after_10_ms(locker.lock("k")).await);
        backend.fail_next(Call::Acquire, fault);
        assert_aborted("try_lock", cancel_after_10_ms(locker.try_lock("k")).await);
        locker.shutdown().await.expect("the undo ends");
        assert!(!backend.is_locked(&key("k")).await.expect("works"), "{fault:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_release_canceled_in_progress_continues() {
    let backend = Faulty::new();
    let locker = locker(&backend, LockOptions::default());
    let guard = locker.lock("k").await.expect("free");
    backend.fail_next(Call::Release, Fault::Delayed(ms(500)));
    assert_aborted("release", cancel_after_10_ms(guard.release()).await);
    assert!(backend.is_locked(&key("k")).await.expect("works"), "not yet");
    locker.shutdown().await.expect("the release ends");
    assert!(!backend.is_locked(&key("k")).await.expect("works"));
}

#[tokio::test(start_paused = true)]
async fn an_extend_canceled_in_progress_is_recorded() {
    let backend = Faulty::new();
    let locker = locker(&backend, LockOptions::default().ttl(ttl_ms(5_000)));
    let guard = locker.lock("k").await.expect("free");
    backend.fail_next(Call::Extend, Fault::Delayed(ms(500)));
    assert_aborted("extend", cancel_after_10_ms(guard.extend(ttl_ms(60_000))).await);
    tokio::time::sleep(ms(1_000)).await;
    assert!(guard.remaining() > ms(50_000), "{:?}", guard.remaining());
    drop(guard);
    locker.shutdown().await.expect("released");
}

/// Without a locker, nothing undoes the acquire; the caller has the request, and can.
#[tokio::test(start_paused = true)]
async fn a_canceled_bare_acquire_can_be_undone_by_the_caller() {
    let backend = Faulty::new();
    let request = AcquireRequest::new(key("k"), Ttl::DEFAULT).expect("randomness");
    backend.fail_next(Call::Acquire, Fault::HangsAfter);
    assert_aborted("acquire", cancel_after_10_ms(backend.acquire(&request)).await);
    assert!(backend.is_locked(&key("k")).await.expect("works"), "it had taken effect");
    let undo = syncguard::backend::ReleaseRequest::undo(&request);
    assert_eq!(backend.release(&undo).await.expect("works"), ReleaseOutcome::Released);
}
