//! The observed behavior of the TypeScript `lock()` helper, case by case. Where syncguard differs
//! on purpose, the settled point that changes it is named and syncguard's behavior is asserted.

mod support;

use std::time::Duration;

use serde_json::Value;
use support::{Call, Fault, Faulty, Reports, key, locker, ms, shut_down};
use syncguard::{CancellationToken, ErrorCode, LockBackend, LockOptions, Ttl};
use tokio::time::Instant;

fn cancelled() -> CancellationToken {
    let token = CancellationToken::new();
    token.cancel();
    token
}

async fn code_of(backend: &Faulty, options: LockOptions, key: &str) -> ErrorCode {
    let locker = locker(backend, options);
    locker.with_lock(key, |_held| async {}).await.expect_err("it must fail").code()
}

/// Runs one case and checks its result; `code` is what TypeScript returns.
async fn play(name: &str, code: Option<&str>) {
    let (backend, reports) = (Faulty::polling(), Reports::default());
    let defaults = LockOptions::default();
    let same = |ours: ErrorCode| assert_eq!(Some(ours.as_str()), code, "{name}");
    match name {
        "key is normalized before acquire" => {
            let held = locker(&backend, defaults)
                .with_lock("cafe\u{301}", |held| async move { held.key().clone() })
                .await;
            assert_eq!(held.expect("ran").as_str(), "caf\u{e9}");
        }
        "ttlMs 0" => same(Ttl::new(Duration::ZERO).expect_err("zero").code()),
        // A `Duration` has parts of a millisecond; they are rounded up, not refused (ADR 029).
        "ttlMs 1.5" => {
            assert_eq!(Ttl::new(Duration::from_micros(1500)).expect("rounded").as_millis(), 2);
        }
        // A `Duration` is always a number; the largest one is the nearest to infinity.
        "ttlMs NaN" | "ttlMs Infinity" => same(Ttl::new(Duration::MAX).expect_err("huge").code()),
        "empty key" => same(code_of(&backend, defaults, "").await),
        "config.signal already aborted" | "both aborted" => {
            same(code_of(&backend, defaults.cancel(cancelled()), "k").await);
            assert_eq!(backend.count(Call::Acquire), 0, "{name}");
        }
        "timeoutMs 0 wins over aborted signal" => {
            let options = defaults.timeout(Duration::ZERO).cancel(cancelled());
            same(code_of(&backend, options, "k").await);
        }
        "backend throws LockError" => {
            backend.fail_next(Call::Acquire, Fault::Fails(ErrorCode::ServiceUnavailable));
            same(code_of(&backend, defaults, "k").await);
        }
        "backend throws plain Error" => {
            // A backend can only fail with an `Error`; anything else is `Internal`.
            backend.fail_next(Call::Acquire, Fault::Fails(ErrorCode::Internal));
            same(code_of(&backend, defaults, "k").await);
        }
        "fn throws" => {
            let result: Result<(), &str> = locker(&backend, defaults)
                .with_lock("k", |_held| async { Err("user error") })
                .await
                .expect("ran");
            assert_eq!(result, Err("user error"));
            assert_eq!(backend.calls(), [Call::Acquire, Call::Release]);
        }
        "release throws, custom handler" | "release throws non-Error, handler throws too" => {
            backend.fail_always(Call::Release, Some(Fault::Fails(ErrorCode::Internal)));
            let locker = locker(&backend, reports.options());
            assert_eq!(locker.with_lock("k", |_held| async { 1 }).await.expect("the value"), 1);
            shut_down(&locker).await;
            assert_eq!(reports.codes(), [ErrorCode::Internal]);
        }
        "release returns ok:false" => {
            let locker = locker(&backend, reports.options());
            let stolen = backend.inner.clone();
            let work = |held: syncguard::LockHandle<Faulty>| async move {
                let release = syncguard::backend::ReleaseRequest::new(held.lock_id());
                stolen.release(&release).await.expect("works");
                1
            };
            assert_eq!(locker.with_lock("k", work).await.expect("the value"), 1);
            locker.shutdown().await.expect("nothing to do");
            assert_eq!(reports.codes(), []);
        }
        // Settled point 10: the final release never sees the user's token, so nothing is reported
        // and the lock is free.
        "onReleaseError after abort in fn"
        | "config.signal aborted while fn runs: release gets the aborted signal" => {
            let token = CancellationToken::new();
            let locker = locker(&backend, reports.options().cancel(token.clone()));
            let work = |_held| async move {
                token.cancel();
                "done"
            };
            assert_eq!(locker.with_lock("k", work).await.expect("the value"), "done");
            assert!(!backend.is_locked(&key("k")).await.expect("works"));
            assert_eq!(reports.codes(), []);
        }
        // Settled point 9: sleeps end at once when canceled.
        "config.signal aborted during retry delay (noticed only after the delay)" => {
            let _guard = locker(&backend, defaults.clone()).lock("k").await.expect("free");
            let token = CancellationToken::new();
            let waiter = locker(&backend, defaults.cancel(token.clone()));
            let started = Instant::now();
            let cancel = async {
                tokio::time::sleep(ms(50)).await;
                token.cancel();
            };
            let (result, ()) = tokio::join!(waiter.lock("k"), cancel);
            same(result.expect_err("canceled").code());
            assert_eq!(started.elapsed(), ms(50));
        }
        unknown => panic!("unknown case: {unknown}"),
    }
}

#[tokio::test(start_paused = true)]
async fn every_case_passes() {
    let vectors: Value =
        serde_json::from_str(include_str!("vectors/lock_helper.json")).expect("JSON");
    for case in vectors["cases"].as_array().expect("a list") {
        play(case["name"].as_str().expect("a text"), case["errorCode"].as_str()).await;
    }
}
