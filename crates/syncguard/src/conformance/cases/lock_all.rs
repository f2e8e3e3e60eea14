//! Several locks at once.

use std::future::IntoFuture;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::cancellation::poll_then_drop;
use super::{Fixture, LONG, acquire, fresh_key};
use crate::common::error::ErrorCode;
use crate::common::key::Key;
use crate::common::lost_reason::LostReason;
use crate::contract::LockBackend;
use crate::contract::outcome::ReleaseOutcome;
use crate::contract::request::ReleaseRequest;
use crate::lock::clock::LocalClock;
use crate::lock::locker::Locker;
use crate::lock::options::LockOptions;

/// More polls than a set of locks needs, also where its operations travel in batches with others.
const MOST_POLLS: usize = 256;

fn locker<B: LockBackend>(backend: B) -> Locker<B> {
    let options = LockOptions::default().ttl(LONG).timeout(Duration::from_secs(30));
    let builder = Locker::builder(backend).clock(LocalClock::Tokio).options(options);
    builder.build().expect("inside a runtime")
}

/// Returns keys in ascending order.
fn sorted_keys(name: &str, count: usize) -> Vec<Key> {
    let base = fresh_key(name);
    let numbered = |number| Key::new(format!("{}:{number:02}", base.as_str())).expect("valid");
    (0..count).map(numbered).collect()
}

async fn held<B: LockBackend>(backend: &B, keys: &[Key]) -> Vec<bool> {
    let mut all = Vec::new();
    for key in keys {
        all.push(backend.is_locked(key).await.expect("works"));
    }
    all
}

/// If one of the locks is held, none of the others is taken, whether the caller waits or not.
pub async fn several_locks_are_taken_all_or_none<F: Fixture>(fixture: &F) {
    let backend = Arc::new(fixture.backend().await);
    let (here, elsewhere) = (locker(Arc::clone(&backend)), locker(Arc::clone(&backend)));
    let keys = sorted_keys("all-or-none", 3);
    let middle = elsewhere.lock(&keys[1]).await.expect("free");
    assert!(here.try_lock_all(&keys).await.expect("works").is_none());
    assert_eq!(held(&*backend, &keys).await, [false, true, false]);
    let waiting = here.lock_all(keys.iter().rev()).timeout(Duration::from_millis(300)).await;
    let error = waiting.expect_err("one is held");
    assert_eq!(error.code(), ErrorCode::AcquisitionTimeout);
    assert_eq!(error.key(), Some(&keys[1]));
    middle.release().await.expect("works");
    here.shutdown().await.expect("the background work ends");
    assert_eq!(held(&*backend, &keys).await, [false, false, false]);

    let guard = elsewhere.lock_all(keys.iter().chain(&keys[..1])).await.expect("free");
    assert!(guard.keys().eq(&keys));
    assert_eq!(held(&*backend, &keys).await, [true, true, true]);
    for (key, fence) in guard.fences() {
        assert_eq!(fixture.fence_counter(key).await, fence.get());
    }
    assert_eq!(guard.release().await.expect("works"), ReleaseOutcome::Released);
    assert_eq!(held(&*backend, &keys).await, [false, false, false]);
    elsewhere.shutdown().await.expect("nothing is left to do");
}

/// Tasks of two lockers take overlapping sets in every order and add to the counters of their keys:
/// all finish, and no update is lost.
pub async fn overlapping_sets_do_not_deadlock<F: Fixture>(fixture: &F) {
    const TASKS: usize = 6;
    const TURNS: usize = 3;
    let backend = Arc::new(fixture.backend().await);
    let lockers = [locker(Arc::clone(&backend)), locker(Arc::clone(&backend))];
    let keys = Arc::new(sorted_keys("overlap", 4));
    let counters: Arc<Vec<AtomicU64>> = Arc::new(keys.iter().map(|_| AtomicU64::new(0)).collect());
    let tasks: Vec<_> = (0..TASKS)
        .map(|task| {
            let locker = lockers[task % 2].clone();
            let (keys, counters) = (Arc::clone(&keys), Arc::clone(&counters));
            tokio::spawn(async move {
                for turn in 0..TURNS {
                    // Three of four keys, from a different one on each time, and sometimes
                    // backward.
                    let mut mine: Vec<usize> = (0..3).map(|i| (task + turn + i) % 4).collect();
                    if task % 3 == 0 {
                        mine.reverse();
                    }
                    let wanted = mine.iter().map(|&place| &keys[place]);
                    let guard = locker.lock_all(wanted).await.expect("in time");
                    let read: Vec<_> =
                        mine.iter().map(|&place| counters[place].load(Ordering::SeqCst)).collect();
                    tokio::task::yield_now().await;
                    for (&place, read) in mine.iter().zip(read) {
                        counters[place].store(read + 1, Ordering::SeqCst);
                    }
                    guard.release().await.expect("works");
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.expect("no panic");
    }
    let total: u64 = counters.iter().map(|counter| counter.load(Ordering::SeqCst)).sum();
    assert_eq!(total, (TASKS * TURNS * 3) as u64);
    for locker in lockers {
        locker.shutdown().await.expect("nothing is left to do");
    }
}

/// When another process takes one of the locks away, all are lost, and the others are released with
/// the guard.
pub async fn losing_one_lock_is_losing_all<F: Fixture>(fixture: &F) {
    let backend = Arc::new(fixture.backend().await);
    let locker = locker(Arc::clone(&backend));
    let keys = sorted_keys("lose-one", 3);
    let guard = locker.lock_all(&keys).await.expect("free");
    assert!(guard.is_valid());
    let taken = guard.handle(&keys[2]).expect("it is one of them").lock_id();
    backend.release(&ReleaseRequest::new(taken)).await.expect("works");
    drop(guard.extend(LONG).await.expect("works"));
    assert!(!guard.is_valid());
    assert_eq!(guard.lost().await, LostReason::NotHeld);
    assert!(guard.ensure_valid().is_err_and(|error| error.lost().is_some()));
    assert!(guard.run(async {}).await.is_err());
    drop(guard);
    locker.shutdown().await.expect("the background work ends");
    assert_eq!(held(&*backend, &keys).await, [false, false, false]);
}

/// Wherever `lock_all` is dropped, with all locks free or while it waits for one of them, nothing
/// stays held.
pub async fn a_set_dropped_anywhere_leaves_no_lock<F: Fixture>(fixture: &F) {
    let backend = Arc::new(fixture.backend().await);
    for is_contended in [false, true] {
        let mut has_ended = false;
        for polls in 0..MOST_POLLS {
            let keys = sorted_keys("drop-all", 3);
            let locker = locker(Arc::clone(&backend));
            let other = request_of_another(&*backend, is_contended.then_some(&keys[1])).await;
            let taking = tokio::spawn({
                let (locker, keys) = (locker.clone(), keys.clone());
                async move { poll_then_drop(locker.lock_all(&keys).into_future(), polls).await }
            });
            if let Some(other) = other {
                tokio::time::sleep(Duration::from_millis(5)).await;
                backend.release(&other).await.expect("works");
            }
            let ended = tokio::time::timeout(Duration::from_secs(5), taking).await;
            has_ended = ended.expect("it is woken").expect("no panic");
            locker.shutdown().await.expect("the background work ends");
            assert_eq!(held(&*backend, &keys).await, [false; 3], "after {polls} polls");
            if has_ended {
                break;
            }
        }
        assert!(has_ended, "lock_all() did not end within {MOST_POLLS} polls");
    }
}

/// Takes a lock as another process, and returns the request that releases it.
async fn request_of_another(
    backend: &impl LockBackend<Fencing = crate::backend::Fenced>,
    key: Option<&Key>,
) -> Option<ReleaseRequest> {
    let (lock_id, _fence) = acquire(backend, key?).await;
    Some(ReleaseRequest::new(lock_id))
}
