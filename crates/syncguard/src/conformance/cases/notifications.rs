//! Waiting without polling.

use std::sync::Arc;
use std::time::Duration;

use super::{Fixture, LONG, acquire, fresh_key, not_applicable, planted, request};
use crate::common::time::TIME_TOLERANCE_MS;
use crate::contract::LockBackend;
use crate::contract::outcome::AcquireOutcome;
use crate::contract::request::ReleaseRequest;
use crate::diagnostics;
use crate::lock::clock::LocalClock;
use crate::lock::locker::Locker;
use crate::lock::options::LockOptions;
use crate::lock::retry::RetryPolicy;

/// Longer than any notification takes, and sooner than the last attempt before the timeout.
const SOON: Duration = Duration::from_secs(10);
const TIMEOUT: Duration = Duration::from_secs(20);
const MUCH_LATER: Duration = Duration::from_hours(1);

fn locker_without_polling<B: LockBackend>(backend: B) -> Locker<B> {
    let retry = RetryPolicy::default().delay(MUCH_LATER);
    let options = LockOptions::default().ttl(LONG).timeout(TIMEOUT).retry(retry);
    let locker = Locker::builder(backend)
        .clock(LocalClock::Tokio)
        .options(options)
        .poll_interval(MUCH_LATER);
    locker.build().expect("inside a runtime")
}

/// A release notifies every subscription that was there before it.
pub async fn a_release_notifies_subscribers<F: Fixture>(fixture: &F) {
    let backend = fixture.backend().await;
    let key = fresh_key("wake");
    let (lock_id, _fence) = acquire(&backend, &key).await;
    let Some(mut subscription) = backend.subscribe(&key).await else {
        return not_applicable("the backend sends no notifications");
    };
    assert!(subscription.is_working());
    backend.release(&ReleaseRequest::new(lock_id)).await.expect("works");
    tokio::time::timeout(SOON, subscription.notified()).await.expect("woken");
}

/// A notification carries the holder's age from the release, or none.
pub async fn a_notification_carries_the_age_of_the_holder<F: Fixture>(fixture: &F) {
    const AGE: Duration = Duration::from_secs(90);
    let (backend, other) = (fixture.backend().await, fixture.backend().await);
    let key = fresh_key("age");
    let (Some(mut first), Some(mut second)) =
        (backend.subscribe(&key).await, other.subscribe(&key).await)
    else {
        return not_applicable("the backend sends no notifications");
    };
    let mut ages = Vec::new();
    for age in [Some(AGE), None] {
        let (lock_id, _fence) = acquire(&backend, &key).await;
        first.mark_seen();
        second.mark_seen();
        let request = ReleaseRequest::new(lock_id);
        let request = age.into_iter().fold(request, ReleaseRequest::with_holder_age);
        backend.release(&request).await.expect("works");
        for subscription in [&mut first, &mut second] {
            ages.push(tokio::time::timeout(SOON, subscription.notified()).await.expect("woken"));
        }
    }
    if ages[..2] == [None, None] {
        return not_applicable("the backend's notifications carry no age");
    }
    assert_eq!(ages, [Some(AGE), Some(AGE), None, None]);
}

/// A waiter in another locker gets the lock at once, although it would poll only much later.
pub async fn a_waiter_gets_the_lock_without_polling<F: Fixture>(fixture: &F) {
    let backend = Arc::new(fixture.backend().await);
    let key = fresh_key("hand-over");
    if backend.subscribe(&key).await.is_none() {
        return not_applicable("the backend sends no notifications");
    }
    let (holder, waiter) =
        (locker_without_polling(Arc::clone(&backend)), locker_without_polling(backend));
    for _ in 0..5 {
        let guard = holder.lock(&key).await.expect("free");
        let waiting = {
            let (waiter, key) = (waiter.clone(), key.clone());
            tokio::spawn(async move { waiter.lock(&key).await })
        };
        tokio::time::sleep(Duration::from_millis(20)).await;
        guard.release().await.expect("works");
        let next = tokio::time::timeout(SOON, waiting).await.expect("woken, not polled");
        let next = next.expect("no panic").expect("acquired");
        next.release().await.expect("works");
    }
}

/// A holder that crashed is replaced when its lock is dead, not at the next poll.
pub async fn a_crashed_holder_is_taken_over_when_its_lock_is_dead<F: Fixture>(fixture: &F) {
    let backend = Arc::new(fixture.backend().await);
    let key = fresh_key("crash");
    // Dead in 300 ms.
    fixture.plant(&planted(&key, 1, 300 - TIME_TOLERANCE_MS.cast_signed())).await;
    let outcome = backend.acquire(&request(&key)).await.expect("works");
    if !matches!(outcome, AcquireOutcome::Contended { expires_in: Some(_) }) {
        return not_applicable("the backend does not report when a lock is dead");
    }
    let locker = locker_without_polling(backend);
    let waiting = {
        let key = key.clone();
        tokio::spawn(async move { locker.lock(&key).await })
    };
    tokio::time::sleep(Duration::from_millis(20)).await;
    fixture.advance(Duration::from_millis(400)).await;
    let guard = tokio::time::timeout(SOON, waiting).await.expect("taken over, not polled");
    let guard = guard.expect("no panic").expect("acquired");
    assert_eq!(guard.fence().get(), 2);
    guard.release().await.expect("works");
}

/// A process that waits is counted until it no longer does; one that watches is not.
pub async fn waiters_are_counted_and_watchers_are_not<F: Fixture>(fixture: &F) {
    let backend = fixture.backend().await;
    let key = fresh_key("waiters");
    acquire(&backend, &key).await;
    let _watching = backend.watch(&key).await;
    match backend.waiters(&key).await {
        Some(count) => assert_eq!(count, 0),
        None => return not_applicable("the backend does not count waiters"),
    }
    let Some(waiting) = backend.subscribe(&key).await else {
        return not_applicable("the backend sends no notifications");
    };
    assert_eq!(backend.waiters(&key).await, Some(1));
    let info = diagnostics::get_by_key(&backend, &key).await.expect("works").expect("held");
    assert_eq!(info.waiters, Some(1));
    drop(waiting);
    let gone = async {
        while backend.waiters(&key).await != Some(0) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(SOON, gone).await.expect("it no longer waits");
}
