//! What an error contains: backend, operation, key and lock id.

mod support;

use support::{Call, Fault, Faulty, key, locker};
use syncguard::memory::MemoryConfig;
use syncguard::{Error, ErrorCode, LockOptions, Locker, MemoryBackend, Ttl};

const DOWN: Fault = Fault::Fails(ErrorCode::ServiceUnavailable);

/// Returns what an error contains besides its message.
fn context(error: &Error) -> (Option<&str>, Option<&str>, bool, bool) {
    (error.backend(), error.operation(), error.key().is_some(), error.lock_id().is_some())
}

#[cfg(feature = "conformance")]
#[tokio::test]
async fn an_error_of_the_backend_keeps_its_name_through_the_locker() {
    use syncguard::Fence;
    use syncguard::conformance::{Fixture, MemoryFixture};

    let fixture = MemoryFixture::new();
    fixture.set_fence_counter(&key("k"), Fence::MAX.get()).await;
    let locker = Locker::new(fixture.backend().await).expect("inside a runtime");
    for error in [
        locker.lock("k").await.expect_err("exhausted"),
        locker.try_lock("k").await.expect_err("exhausted"),
        locker.with_lock("k", |_held| async {}).await.expect_err("exhausted"),
    ] {
        assert_eq!(context(&error), (Some("memory"), Some("acquire"), true, false));
        assert_eq!(error.key(), Some(&key("k")));
    }
}

#[tokio::test(start_paused = true)]
async fn errors_of_a_guard_name_key_and_lock_id() {
    let backend = Faulty::new();
    let locker = locker(&backend, LockOptions::default());
    let guard = locker.lock("k").await.expect("free");
    backend.fail_next(Call::Extend, DOWN);
    backend.fail_next(Call::Release, DOWN);
    let errors = [
        guard.extend(Ttl::DEFAULT).await.expect_err("down"),
        guard.release().await.expect_err("down"),
    ];
    for error in errors {
        assert_eq!(error.code(), ErrorCode::ServiceUnavailable);
        assert_eq!(error.key(), Some(&key("k")));
        assert!(error.lock_id().is_some_and(|lock_id| lock_id == guard.lock_id()));
        assert!(!format!("{error} {error:?}").contains(guard.lock_id().expose()));
    }
}

#[tokio::test(start_paused = true)]
async fn a_failed_resume_names_the_lock_id() {
    let backend = Faulty::new();
    let locker = locker(&backend, LockOptions::default());
    let lock_id = locker.lock("k").await.expect("free").detach();
    backend.fail_next(Call::Extend, DOWN);
    let error = locker.resume(lock_id).await.expect_err("down");
    assert!(error.lock_id().is_some_and(|found| found == lock_id));
}

/// What is unknown stays empty.
#[tokio::test]
async fn an_error_before_any_operation_names_nothing() {
    let backend = MemoryBackend::with_config(MemoryConfig::default());
    let locker = Locker::new(backend).expect("inside a runtime");
    let error = locker.lock("").await.expect_err("empty");
    assert_eq!(context(&error), (None, None, false, false));
}
