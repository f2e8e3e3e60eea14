//! Several requests for the same lock.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::{Fixture, LONG, acquire, assert_unchanged, fresh_key, planted, request};
use crate::common::time::TIME_TOLERANCE_MS;
use crate::contract::LockBackend;
use crate::contract::outcome::AcquireOutcome;
use crate::lock::clock::LocalClock;
use crate::lock::locker::Locker;
use crate::lock::options::LockOptions;

/// A contended acquire returns `Contended` and writes nothing, not even the fence counter.
pub async fn a_held_lock_is_contended_and_only_read<F: Fixture>(fixture: &F) {
    let backend = fixture.backend().await;
    let key = fresh_key("contended");
    let (_lock_id, fence) = acquire(&backend, &key).await;
    let before = fixture.peek(&key).await;
    let second = request(&key);
    let outcome = backend.acquire(&second).await.expect("contention is not an error");
    assert!(matches!(outcome, AcquireOutcome::Contended { .. }), "{outcome:?}");
    assert_unchanged(before.as_ref(), fixture.peek(&key).await.as_ref());
    assert_eq!(fixture.fence_counter(&key).await, fence.get());
    assert!(!fixture.knows_id(&second.lock_id()).await);
}

/// If the backend reports when the holder's lock is dead, that time includes the tolerance.
pub async fn contention_reports_when_the_lock_is_dead<F: Fixture>(fixture: &F) {
    let backend = fixture.backend().await;
    let key = fresh_key("free-in");
    fixture.plant(&planted(&key, 1, 10_000)).await;
    let outcome = backend.acquire(&request(&key)).await.expect("works");
    let AcquireOutcome::Contended { expires_in } = outcome else { panic!("{outcome:?}") };
    if let Some(expires_in) = expires_in {
        let most = Duration::from_millis(10_000 + TIME_TOLERANCE_MS);
        let least = most.saturating_sub(fixture.clock_margin());
        assert!((least..=most).contains(&expires_in), "{expires_in:?}");
    }
}

/// Of many acquires at the same time, exactly one wins.
pub async fn parallel_acquires_have_one_winner<F: Fixture>(fixture: &F) {
    let backend = Arc::new(fixture.backend().await);
    let key = fresh_key("race");
    let attempts: Vec<_> = (0..16)
        .map(|_| {
            let (backend, request) = (Arc::clone(&backend), request(&key));
            tokio::spawn(async move { backend.acquire(&request).await.expect("works") })
        })
        .collect();
    let mut winners = 0;
    for attempt in attempts {
        match attempt.await.expect("no panic") {
            AcquireOutcome::Acquired(lease) => {
                winners += 1;
                assert_eq!(lease.fence().get(), 1);
            }
            AcquireOutcome::Contended { .. } => {}
            AcquireOutcome::AlreadyUsed => panic!("a new request cannot be used already"),
        }
    }
    assert_eq!(winners, 1);
    assert_eq!(fixture.fence_counter(&key).await, 1);
}

/// Sixteen tasks add to a counter that only the lock protects; every fence is larger than the one
/// before.
pub async fn sixteen_tasks_lose_no_update<F: Fixture>(fixture: &F) {
    const TASKS: u64 = 16;
    const TURNS: u64 = 8;
    let options = LockOptions::default().ttl(LONG).timeout(Duration::from_mins(1));
    let options = options.retry(crate::RetryPolicy::default().max_retries(None));
    let locker =
        Locker::builder(fixture.backend().await).clock(LocalClock::Tokio).options(options).build();
    let locker = locker.expect("inside a runtime");
    let key = fresh_key("counter");
    let (counter, last_fence) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let tasks: Vec<_> = (0..TASKS)
        .map(|_| {
            let (locker, key) = (locker.clone(), key.clone());
            let (counter, last_fence) = (Arc::clone(&counter), Arc::clone(&last_fence));
            tokio::spawn(async move {
                for _ in 0..TURNS {
                    let guard = locker.lock(&key).await.expect("in time");
                    let fence = guard.fence().get();
                    assert!(last_fence.swap(fence, Ordering::SeqCst) < fence);
                    // Read, let others run, write: without the lock this loses updates.
                    let read = counter.load(Ordering::SeqCst);
                    tokio::task::yield_now().await;
                    counter.store(read + 1, Ordering::SeqCst);
                    guard.release().await.expect("works");
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.expect("no panic");
    }
    assert_eq!(counter.load(Ordering::SeqCst), TASKS * TURNS);
    assert_eq!(fixture.fence_counter(&key).await, TASKS * TURNS);
    locker.shutdown().await.expect("nothing is left to do");
}
