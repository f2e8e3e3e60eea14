//! Semaphores, and any of several locks.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use super::cancellation::{MOST_POLLS, poll_then_drop};
use super::{Fixture, LONG, assert_unchanged, fresh_key, not_applicable, planted};
use crate::common::key::Key;
use crate::contract::LockBackend;
use crate::contract::outcome::{AcquireAnyOutcome, ReleaseOutcome};
use crate::contract::request::{AcquireAnyRequest, ReleaseRequest};
use crate::lock::clock::LocalClock;
use crate::lock::locker::Locker;
use crate::lock::options::LockOptions;
use crate::lock::retry::RetryPolicy;
use crate::primitives::Permit;

const SOON: Duration = Duration::from_secs(10);

fn locker<B: LockBackend>(backend: B) -> Locker<B> {
    let options = LockOptions::default().ttl(LONG).timeout(Duration::from_secs(30));
    let builder = Locker::builder(backend).clock(LocalClock::Tokio).options(options);
    builder.build().expect("inside a runtime")
}

/// The first free lock is acquired and can be released by its id; dead ones are taken over, and
/// nothing is written if all are held.
pub async fn any_of_several_locks_is_acquired_and_no_other<F: Fixture>(fixture: &F) {
    let backend = fixture.backend().await;
    let base = fresh_key("any");
    let keys: Arc<[Key]> = (0..4)
        .map(|number| Key::new(format!("{}:{number}", base.as_str())).expect("valid"))
        .collect();
    let request = || AcquireAnyRequest::new(Arc::clone(&keys), LONG).expect("randomness");
    let acquired = async |request: &AcquireAnyRequest| match backend
        .acquire_any(request)
        .await
        .expect("works")
    {
        AcquireAnyOutcome::Acquired { key, lease } => (key, lease.fence().get()),
        other @ AcquireAnyOutcome::Contended { .. } => panic!("{other:?}"),
    };
    // Held, dead, free, free.
    fixture.plant(&planted(&keys[0], 5, 20_000)).await;
    fixture.plant(&planted(&keys[1], 7, -60_000)).await;
    let before = fixture.peek(&keys[0]).await;
    let (first, second) = (request(), request());
    assert_eq!(acquired(&first).await, (keys[1].clone(), 8));
    assert_eq!(acquired(&second).await, (keys[2].clone(), 1));
    assert_eq!(acquired(&request()).await, (keys[3].clone(), 1));
    let outcome = backend.acquire_any(&request()).await.expect("works");
    let AcquireAnyOutcome::Contended { expires_in } = outcome else { panic!("{outcome:?}") };
    // The planted one is the first to die.
    assert!(expires_in.is_none_or(|soonest| soonest < Duration::from_secs(22)), "{expires_in:?}");
    assert_unchanged(before.as_ref(), fixture.peek(&keys[0]).await.as_ref());
    assert_eq!(fixture.fence_counter(&keys[0]).await, 5);
    let found = fixture.peek(&keys[2]).await.expect("held");
    assert_eq!(found.lock_id, second.first().lock_id());
    // An undo names the first key, and finds the lock by its id.
    let undo = ReleaseRequest::undo(second.first());
    assert_eq!(backend.release(&undo).await.expect("works"), ReleaseOutcome::Released);
    assert!(!backend.is_locked(&keys[2]).await.expect("works"));
    assert!(backend.is_locked(&keys[3]).await.expect("works"));
}

/// Tasks of two lockers share the permits: never more than agreed, never two with the same slot,
/// and all finish.
pub async fn never_more_permits_than_agreed<F: Fixture>(fixture: &F) {
    const PERMITS: u32 = 3;
    const TASKS: usize = 8;
    const TURNS: usize = 4;
    let backend = Arc::new(fixture.backend().await);
    let name = fresh_key("permits");
    let lockers = [locker(Arc::clone(&backend)), locker(Arc::clone(&backend))];
    let held = Arc::new(AtomicU32::new(0));
    let slots = Arc::new([const { AtomicU32::new(0) }; PERMITS as usize]);
    let tasks: Vec<_> = (0..TASKS)
        .map(|task| {
            let semaphore = lockers[task % 2].semaphore(&name, PERMITS).expect("valid");
            let (held, slots) = (Arc::clone(&held), Arc::clone(&slots));
            tokio::spawn(async move {
                for _ in 0..TURNS {
                    let permit = semaphore.acquire().await.expect("in time");
                    assert!(held.fetch_add(1, Ordering::SeqCst) < PERMITS, "too many permits");
                    let slot = &slots[permit.slot() as usize];
                    assert_eq!(slot.fetch_add(1, Ordering::SeqCst), 0, "one slot was given twice");
                    tokio::task::yield_now().await;
                    slot.fetch_sub(1, Ordering::SeqCst);
                    held.fetch_sub(1, Ordering::SeqCst);
                    permit.release().await.expect("works");
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.expect("no panic");
    }
    let semaphore = lockers[0].semaphore(&name, PERMITS).expect("valid");
    assert_eq!(semaphore.available().await.expect("works"), PERMITS);
    for locker in lockers {
        locker.shutdown().await.expect("nothing is left to do");
    }
}

/// A waiter in another locker gets a permit when any of them is given back, although it would poll
/// only much later.
pub async fn a_permit_is_handed_over_without_polling<F: Fixture>(fixture: &F) {
    const MUCH_LATER: Duration = Duration::from_hours(1);
    let backend = Arc::new(fixture.backend().await);
    let name = fresh_key("hand-permit");
    if backend.subscribe(&name).await.is_none() {
        return not_applicable("the backend sends no notifications");
    }
    let patient = |backend| {
        let retry = RetryPolicy::default().delay(MUCH_LATER);
        let options =
            LockOptions::default().ttl(LONG).timeout(Duration::from_secs(20)).retry(retry);
        let builder = Locker::builder(backend).clock(LocalClock::Tokio).options(options);
        builder.poll_interval(MUCH_LATER).build().expect("inside a runtime")
    };
    let (holder, waiter) = (patient(Arc::clone(&backend)), patient(backend));
    let holds = holder.semaphore(&name, 2).expect("valid");
    let waits = waiter.semaphore(&name, 2).expect("valid");
    for turn in 0..4 {
        let mut permits = holds.acquire_many(2).await.expect("free");
        assert!(waits.try_acquire().await.expect("works").is_none());
        let waiting = {
            let waits = waits.clone();
            tokio::spawn(async move { waits.acquire().await })
        };
        tokio::time::sleep(Duration::from_millis(30)).await;
        let given = permits.swap_remove(turn % 2);
        given.release().await.expect("works");
        let got = tokio::time::timeout(SOON, waiting).await.expect("woken, not polled");
        let got = got.expect("no panic").expect("acquired");
        assert_eq!(got.slot(), given.slot());
        got.release().await.expect("works");
        permits[0].release().await.expect("works");
    }
}

/// Callers that want several permits get all or none, and do not deadlock.
pub async fn several_permits_are_taken_all_or_none<F: Fixture>(fixture: &F) {
    let backend = Arc::new(fixture.backend().await);
    let name = fresh_key("several");
    let lockers = [locker(Arc::clone(&backend)), locker(Arc::clone(&backend))];
    let semaphore = lockers[0].semaphore(&name, 4).expect("valid");
    let permits = semaphore.acquire_many(3).await.expect("free");
    let slots: HashSet<u32> = permits.iter().map(Permit::slot).collect();
    assert_eq!(slots.len(), 3);
    assert!(semaphore.try_acquire_many(2).await.expect("works").is_none());
    assert_eq!(semaphore.available().await.expect("works"), 1);
    drop(permits);
    let tasks: Vec<_> = (0..4)
        .map(|task| {
            let semaphore = lockers[task % 2].semaphore(&name, 4).expect("valid");
            tokio::spawn(async move {
                for _ in 0..2 {
                    let permits = semaphore.acquire_many(3).await.expect("in time");
                    assert!(permits.iter().all(Permit::is_valid));
                    for permit in permits {
                        permit.release().await.expect("works");
                    }
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.expect("no panic");
    }
    assert_eq!(semaphore.available().await.expect("works"), 4);
    for locker in lockers {
        locker.shutdown().await.expect("nothing is left to do");
    }
}

/// Wherever `acquire` and `acquire_many` are dropped, all permits are free afterwards.
pub async fn a_permit_dropped_anywhere_is_given_back<F: Fixture>(fixture: &F) {
    let backend = Arc::new(fixture.backend().await);
    let mut has_ended = false;
    for polls in 0..MOST_POLLS {
        let name = fresh_key("drop-permit");
        let locker = locker(Arc::clone(&backend));
        let semaphore = locker.semaphore(&name, 3).expect("valid");
        has_ended = poll_then_drop(semaphore.acquire(), polls).await
            & poll_then_drop(semaphore.acquire_many(2), polls).await;
        locker.shutdown().await.expect("the background work ends");
        let free = semaphore.available().await.expect("works");
        assert_eq!(free, 3, "after {polls} polls");
        if has_ended {
            break;
        }
    }
    assert!(has_ended, "acquire_many() did not end within {MOST_POLLS} polls");
}
