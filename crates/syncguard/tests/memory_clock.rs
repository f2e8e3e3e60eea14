//! Locks in memory while the wall clock is set.
#![cfg(target_os = "linux")]

mod wall_clock;

use std::time::{Duration, SystemTime};

use syncguard::backend::{AcquireOutcome, AcquireRequest, ExtendRequest, ReleaseRequest};
use syncguard::{ExtendOutcome, Key, LockBackend, MemoryBackend, ReleaseOutcome, Ttl};
use wall_clock::with_a_movable_clock;

async fn is_held_and_can_be_extended(backend: &MemoryBackend, request: &AcquireRequest) {
    assert!(backend.is_locked(request.key()).await.expect("works"), "the lock is lost");
    let other = AcquireRequest::new(request.key().clone(), Ttl::DEFAULT).expect("randomness");
    let rival = backend.acquire(&other).await.expect("works");
    assert!(matches!(rival, AcquireOutcome::Contended { .. }), "two hold the same lock");
    let extend = ExtendRequest::new(request.lock_id(), Ttl::DEFAULT);
    let answer = backend.extend(&extend).await.expect("works");
    assert!(matches!(answer, ExtendOutcome::Extended(_)), "{answer:?}");
}

#[test]
fn a_wall_clock_that_jumps_ahead_frees_no_lock() {
    let test = "a_wall_clock_that_jumps_ahead_frees_no_lock";
    with_a_movable_clock(test, |clock| {
        run(async {
            let backend = MemoryBackend::new();
            let request = request("ahead", Ttl::DEFAULT);
            assert!(matches!(backend.acquire(&request).await, Ok(AcquireOutcome::Acquired(_))));
            clock.set_ahead();
            is_held_and_can_be_extended(&backend, &request).await;
            let release = ReleaseRequest::new(request.lock_id());
            assert_eq!(backend.release(&release).await.expect("works"), ReleaseOutcome::Released);
        });
    });
}

#[test]
fn a_wall_clock_that_is_set_back_keeps_no_lock_alive() {
    let test = "a_wall_clock_that_is_set_back_keeps_no_lock_alive";
    with_a_movable_clock(test, |clock| {
        run(async {
            let backend = MemoryBackend::new();
            let short = Ttl::new(Duration::from_millis(1)).expect("valid");
            let request = request("behind", short);
            assert!(matches!(backend.acquire(&request).await, Ok(AcquireOutcome::Acquired(_))));
            clock.set_back();
            tokio::time::sleep(Duration::from_millis(1100)).await;
            assert!(
                !backend.is_locked(request.key()).await.expect("works"),
                "the lock outlives its TTL"
            );
        });
    });
}

/// Timestamps still show the time of day.
#[test]
fn times_are_those_of_the_wall_clock() {
    run(async {
        let backend = MemoryBackend::new();
        let request = request("readable", Ttl::DEFAULT);
        let Ok(AcquireOutcome::Acquired(lease)) = backend.acquire(&request).await else { panic!() };
        let expires_at = SystemTime::from(lease.expires_at());
        let expected = SystemTime::now() + Ttl::DEFAULT.as_duration();
        let off = expected.duration_since(expires_at).unwrap_or_else(|ahead| ahead.duration());
        assert!(off < Duration::from_mins(1), "off by {off:?}");
    });
}

fn request(key: &str, ttl: Ttl) -> AcquireRequest {
    AcquireRequest::new(Key::new(key).expect("valid"), ttl).expect("randomness")
}

fn run(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
    runtime.expect("a runtime").block_on(test);
}
