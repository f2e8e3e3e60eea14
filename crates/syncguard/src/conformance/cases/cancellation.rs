//! Futures dropped at every await point.

use std::fmt::Debug;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::{Fixture, LONG, acquire, assert_unchanged, fresh_key, request, ttl};
use crate::common::error::{Error, ErrorCode, Result};
use crate::contract::LockBackend;
use crate::contract::request::{ExtendRequest, ReleaseRequest};
use crate::lock::cancel::cancellable;
use crate::lock::clock::LocalClock;
use crate::lock::locker::Locker;
use crate::lock::options::LockOptions;

/// Polls a future up to `polls` times, when it is woken, and returns its output if it completes.
async fn poll_up_to<T>(mut work: Pin<&mut impl Future<Output = T>>, polls: usize) -> Option<T> {
    let mut left = polls;
    poll_fn(|context| {
        if left == 0 {
            return Poll::Ready(None);
        }
        left -= 1;
        match work.as_mut().poll(context) {
            Poll::Ready(value) => Poll::Ready(Some(value)),
            // Does not wait for another wake after the last poll: the future is left here.
            Poll::Pending if left == 0 => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        }
    })
    .await
}

/// Polls a future up to `polls` times and then drops it. Returns whether it completed before.
pub(super) async fn poll_then_drop(work: impl Future, polls: usize) -> bool {
    poll_up_to(pin!(work), polls).await.is_some()
}

/// More polls than any operation needs.
pub(super) const MOST_POLLS: usize = 64;

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
        let guard = holder.lock(&key).await.expect("free");
        let waiting = tokio::spawn({
            let (waiter, key) = (waiter.clone(), key.clone());
            async move { poll_then_drop(waiter.lock(&key), polls).await }
        });
        tokio::time::sleep(Duration::from_millis(5)).await;
        guard.release().await.expect("works");
        // Either it was polled that often, or it hangs because nothing wakes it.
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
        let guard = locker.lock(&key).await.expect("free");
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

/// Wherever `extend` is dropped, the holder keeps the lock and can release it.
pub async fn an_extend_dropped_anywhere_does_no_harm<F: Fixture>(fixture: &F) {
    let backend = Arc::new(fixture.backend().await);
    for polls in 0..MOST_POLLS {
        let key = fresh_key("drop-extend");
        let locker = locker(Arc::clone(&backend));
        let guard = locker.lock(&key).await.expect("free");
        let ended = poll_then_drop(guard.extend(ttl(45_000)), polls).await;
        assert!(guard.is_valid());
        assert!(backend.is_locked(&key).await.expect("works"), "after {polls} polls");
        assert_eq!(guard.release().await.expect("works"), crate::ReleaseOutcome::Released);
        assert!(!backend.is_locked(&key).await.expect("works"), "after {polls} polls");
        if ended {
            return;
        }
    }
    panic!("extend() did not end within {MOST_POLLS} polls");
}

/// Wherever a read, or a bare operation of the backend, is dropped, the backend keeps working and
/// the next caller gets its own answer.
pub async fn a_read_dropped_anywhere_does_no_harm<F: Fixture>(fixture: &F) {
    let backend = fixture.backend().await;
    let (held, free) = (fresh_key("drop-read-held"), fresh_key("drop-read-free"));
    let (lock_id, _fence) = acquire(&backend, &held).await;
    for polls in 0..MOST_POLLS {
        let ended = [
            poll_then_drop(backend.is_locked(&held), polls).await,
            poll_then_drop(backend.lookup_key(&held), polls).await,
            poll_then_drop(backend.lookup_id(&lock_id), polls).await,
            poll_then_drop(backend.subscribe(&held), polls).await,
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

fn assert_aborted<T: Debug>(operation: &str, result: &Result<T>) {
    let code = result.as_ref().map_err(Error::code);
    assert!(matches!(code, Err(ErrorCode::Aborted)), "{operation}: {result:?}");
}

/// With a token that is already canceled, no operation begins: nothing is written.
pub async fn a_token_ends_every_operation_before_it_begins<F: Fixture>(fixture: &F) {
    let backend = fixture.backend().await;
    let (held, free) = (fresh_key("cancelled-held"), fresh_key("cancelled-free"));
    let (lock_id, fence) = acquire(&backend, &held).await;
    let before = fixture.peek(&held).await;
    let token = CancellationToken::new();
    token.cancel();
    let (acquire, release) = (request(&free), ReleaseRequest::new(lock_id));
    let extend = ExtendRequest::new(lock_id, ttl(90_000));
    assert_aborted("acquire", &cancellable(&token, backend.acquire(&acquire)).await);
    assert_aborted("release", &cancellable(&token, backend.release(&release)).await);
    assert_aborted("extend", &cancellable(&token, backend.extend(&extend)).await);
    assert_aborted("is_locked", &cancellable(&token, backend.is_locked(&held)).await);
    assert_aborted("lookup_key", &cancellable(&token, backend.lookup_key(&held)).await);
    assert_aborted("lookup_id", &cancellable(&token, backend.lookup_id(&lock_id)).await);
    if let Some(admin) = backend.admin() {
        assert_aborted("list", &cancellable(&token, admin.list(None)).await);
        assert_aborted("findings", &cancellable(&token, admin.findings()).await);
        assert_aborted("setup", &cancellable(&token, admin.setup()).await);
    }
    assert_unchanged(before.as_ref(), fixture.peek(&held).await.as_ref());
    assert_eq!(fixture.fence_counter(&held).await, fence.get());
    assert_eq!(fixture.peek(&free).await, None);
    assert_eq!(fixture.fence_counter(&free).await, 0);
    assert!(!fixture.knows_id(&acquire.lock_id()).await);
}

/// Polls an operation up to `polls` times and then cancels it. Returns whether it completed before.
async fn cancel_after<T: Debug>(
    name: &str,
    operation: impl Future<Output = Result<T>>,
    polls: usize,
) -> bool {
    let token = CancellationToken::new();
    let mut work = pin!(cancellable(&token, operation));
    if let Some(answer) = poll_up_to(work.as_mut(), polls).await {
        answer.unwrap_or_else(|error| panic!("{name}: {error:?}"));
        return true;
    }
    token.cancel();
    let answer = tokio::time::timeout(Duration::from_secs(5), work).await;
    assert_aborted(name, &answer.unwrap_or_else(|_| panic!("{name} continues although canceled")));
    false
}

/// Wherever a token is canceled, the operation ends with [`ErrorCode::Aborted`] and the backend
/// keeps working. What the operation may have done can be undone, or repeated.
pub async fn a_token_ends_every_operation_in_progress<F: Fixture>(fixture: &F) {
    let backend = fixture.backend().await;
    let admin = backend.admin();
    for polls in 1..MOST_POLLS {
        let (held, free) = (fresh_key("cut-held"), fresh_key("cut-free"));
        let (lock_id, _fence) = acquire(&backend, &held).await;
        let taking = request(&free);
        let (release, extend) = (ReleaseRequest::new(lock_id), ExtendRequest::new(lock_id, LONG));
        let mut ended = vec![
            cancel_after("is_locked", backend.is_locked(&held), polls).await,
            cancel_after("lookup_key", backend.lookup_key(&held), polls).await,
            cancel_after("lookup_id", backend.lookup_id(&lock_id), polls).await,
            cancel_after("acquire", backend.acquire(&taking), polls).await,
            cancel_after("extend", backend.extend(&extend), polls).await,
        ];
        if let Some(admin) = &admin {
            ended.push(cancel_after("list", admin.list(None), polls).await);
            ended.push(cancel_after("findings", admin.findings(), polls).await);
            ended.push(cancel_after("setup", admin.setup(), polls).await);
        }
        let found = backend.lookup_key(&held).await.expect("works").expect("still held");
        assert_eq!(found.lock_id, lock_id, "an answer went to the wrong caller");
        ended.push(cancel_after("release", backend.release(&release), polls).await);
        backend.release(&release).await.expect("a release can be repeated");
        backend.release(&ReleaseRequest::undo(&taking)).await.expect("an acquire can be undone");
        assert!(!backend.is_locked(&held).await.expect("works"), "after {polls} polls");
        if ended.iter().all(|ended| *ended) {
            return;
        }
    }
    panic!("the operations did not end within {MOST_POLLS} polls");
}
