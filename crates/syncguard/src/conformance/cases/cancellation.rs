//! Futures dropped at every await point.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use super::{Fixture, LONG, acquire, fresh_key, ttl};
use crate::contract::LockBackend;
use crate::contract::request::{ExtendRequest, ReleaseRequest};
use crate::lock::clock::LocalClock;
use crate::lock::locker::Locker;
use crate::lock::options::LockOptions;

/// Polls a future up to `polls` times, as it asks for it, and then drops it. Answers whether it
/// ended before.
async fn poll_then_drop(work: impl Future, polls: usize) -> bool {
    let mut work = pin!(work);
    let mut left = polls;
    poll_fn(|context| {
        if left == 0 {
            return Poll::Ready(false);
        }
        left -= 1;
        match work.as_mut().poll(context) {
            Poll::Ready(_) => Poll::Ready(true),
            // The last poll's wake-up is not waited for: that is where the future is dropped.
            Poll::Pending if left == 0 => Poll::Ready(false),
            Poll::Pending => Poll::Pending,
        }
    })
    .await
}

/// More polls than any operation needs.
const MOST_POLLS: usize = 64;

fn locker<B: LockBackend>(backend: B) -> Locker<B> {
    let options = LockOptions::default().ttl(LONG).timeout(Duration::from_secs(20));
    Locker::builder(backend)
        .clock(LocalClock::Tokio)
        .options(options)
        .build()
        .expect("inside a runtime")
}

/// Wherever `lock` is dropped, the key is free as soon as the background work is done.
pub async fn an_acquire_dropped_anywhere_leaves_no_lock<F: Fixture>(fixture: &F) {
    let backend = Arc::new(fixture.backend().await);
    for polls in 0..MOST_POLLS {
        let key = fresh_key("drop-acquire");
        let locker = locker(Arc::clone(&backend));
        let ended = poll_then_drop(locker.lock(&key), polls).await;
        locker.shutdown().await.expect("the background work ends");
        assert!(!backend.is_locked(&key).await.expect("works"), "after {polls} polls");
        acquire(&*backend, &key).await;
        if ended {
            return;
        }
    }
    panic!("lock() did not end within {MOST_POLLS} polls");
}

/// Wherever `lock` is dropped while it waits, is woken and takes over, the key is free afterwards
/// and the next waiter gets it.
pub async fn a_wait_dropped_anywhere_leaves_no_lock<F: Fixture>(fixture: &F) {
    let backend = Arc::new(fixture.backend().await);
    for polls in 1..MOST_POLLS {
        let key = fresh_key("drop-wait");
        let (holder, waiter) = (locker(Arc::clone(&backend)), locker(Arc::clone(&backend)));
        let mut guard = holder.lock(&key).await.expect("free");
        let waiting = tokio::spawn({
            let (waiter, key) = (waiter.clone(), key.clone());
            async move { poll_then_drop(waiter.lock(&key), polls).await }
        });
        tokio::time::sleep(Duration::from_millis(5)).await;
        guard.release().await.expect("works");
        // Either it got that far, or it hangs in a poll that nothing wakes any more.
        let ended = tokio::time::timeout(Duration::from_secs(5), waiting).await;
        let ended = ended.expect("the release wakes it").expect("no panic");
        waiter.shutdown().await.expect("the background work ends");
        assert!(!backend.is_locked(&key).await.expect("works"), "after {polls} polls");
        acquire(&*backend, &key).await;
        if ended {
            return;
        }
    }
    panic!("lock() did not end within {MOST_POLLS} polls");
}

/// Wherever `release` is dropped, the lock is released.
pub async fn a_release_dropped_anywhere_still_releases<F: Fixture>(fixture: &F) {
    let backend = Arc::new(fixture.backend().await);
    for polls in 0..MOST_POLLS {
        let key = fresh_key("drop-release");
        let locker = locker(Arc::clone(&backend));
        let mut guard = locker.lock(&key).await.expect("free");
        let ended = poll_then_drop(guard.release(), polls).await;
        drop(guard);
        locker.shutdown().await.expect("the background work ends");
        assert!(!backend.is_locked(&key).await.expect("works"), "after {polls} polls");
        if ended {
            return;
        }
    }
    panic!("release() did not end within {MOST_POLLS} polls");
}

/// Wherever `extend` is dropped, the lock is still the holder's, and can be released.
pub async fn an_extend_dropped_anywhere_does_no_harm<F: Fixture>(fixture: &F) {
    let backend = Arc::new(fixture.backend().await);
    for polls in 0..MOST_POLLS {
        let key = fresh_key("drop-extend");
        let locker = locker(Arc::clone(&backend));
        let mut guard = locker.lock(&key).await.expect("free");
        let ended = poll_then_drop(guard.extend(ttl(45_000)), polls).await;
        assert!(guard.is_valid());
        assert!(backend.is_locked(&key).await.expect("works"), "after {polls} polls");
        assert_eq!(guard.release().await.expect("works"), crate::Release::Released);
        assert!(!backend.is_locked(&key).await.expect("works"), "after {polls} polls");
        if ended {
            return;
        }
    }
    panic!("extend() did not end within {MOST_POLLS} polls");
}

/// Wherever a read, or a bare operation of the backend, is dropped, the backend goes on working
/// and answers the next caller with that caller's own answer.
pub async fn a_read_dropped_anywhere_does_no_harm<F: Fixture>(fixture: &F) {
    let backend = fixture.backend().await;
    let (held, free) = (fresh_key("drop-read-held"), fresh_key("drop-read-free"));
    let (lock_id, _fence) = acquire(&backend, &held).await;
    for polls in 0..MOST_POLLS {
        let ended = [
            poll_then_drop(backend.is_locked(&held), polls).await,
            poll_then_drop(backend.lookup_key(&held), polls).await,
            poll_then_drop(backend.lookup_id(&lock_id), polls).await,
            poll_then_drop(backend.wake_ups(&held), polls).await,
            poll_then_drop(backend.extend(&ExtendRequest::new(lock_id, LONG)), polls).await,
        ];
        assert!(!backend.is_locked(&free).await.expect("works"));
        let found = backend.lookup_key(&held).await.expect("works").expect("held");
        assert_eq!(found.lock_id, lock_id);
        assert!(backend.lookup_key(&free).await.expect("works").is_none());
        if ended.iter().all(|ended| *ended) {
            backend.release(&ReleaseRequest::new(lock_id)).await.expect("works");
            return;
        }
    }
    panic!("the operations did not end within {MOST_POLLS} polls");
}
