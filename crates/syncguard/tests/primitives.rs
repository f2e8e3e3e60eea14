//! Several locks at once, elections and semaphores: invalid input, waiting, loss and fairness, on
//! the memory backend.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use syncguard::diagnostics::{self, LockInfoRaw};
use syncguard::primitives::{MAX_KEYS, MAX_PERMITS, Observation, Permit, Role, Semaphore};
use syncguard::testing::{FaultLayer, Faulty, LocalClock, paused_locker};
use syncguard::{
    CancellationToken, ErrorCode, LockBackend, LockOptions, Locker, LostReason, MemoryBackend,
    ReleaseOutcome,
};

fn paused(options: LockOptions) -> (Locker<Faulty<MemoryBackend>>, FaultLayer) {
    paused_locker(options).expect("inside a runtime")
}

fn locker() -> Locker<MemoryBackend> {
    Locker::new(MemoryBackend::new()).expect("inside a runtime")
}

/// Returns a locker that shares only the store with another one.
fn another_process<B: LockBackend + Clone>(locker: &Locker<B>, options: LockOptions) -> Locker<B> {
    let builder = Locker::builder(locker.backend().clone()).clock(LocalClock::Tokio);
    builder.options(options).build().expect("inside a runtime")
}

fn assert_invalid<T: std::fmt::Debug>(result: syncguard::Result<T>) {
    let error = result.expect_err("invalid");
    assert_eq!(error.code(), ErrorCode::InvalidArgument, "{error}");
}

#[tokio::test(start_paused = true)]
async fn invalid_input_is_refused_before_any_io() {
    let (locker, faults) = paused(LockOptions::default());
    // Whatever reaches the store fails with another code.
    faults.fail_always(ErrorCode::ServiceUnavailable);
    assert_invalid(locker.lock_all::<&str>([]).await);
    assert_invalid(locker.lock_all(["a", ""]).await);
    assert_invalid(locker.try_lock_all((0..=MAX_KEYS).map(|n| n.to_string())).await);
    assert_invalid(locker.lock_all(["a"]).hold_at_least(Duration::from_secs(1)).await);
    assert_invalid(locker.lock_all(["a"]).ttl(Duration::ZERO).await);
    assert_invalid(locker.semaphore("gpu", 0));
    assert_invalid(locker.semaphore("gpu", MAX_PERMITS + 1));
    assert_invalid(locker.semaphore("x".repeat(505), 2));
    assert_invalid(locker.election("x".repeat(510)));
    let semaphore = locker.semaphore("gpu", 2).expect("valid");
    assert_invalid(semaphore.acquire_many(0).await);
    assert_invalid(semaphore.acquire_many(3).await);
    assert_invalid(semaphore.try_acquire_many(3).await);
    assert!(locker.lock_all(["a"]).await.is_err_and(|error| error.is_retryable()));
}

#[tokio::test]
async fn duplicates_are_merged_and_scopes_apply() {
    let locker = locker();
    let scoped = locker.scoped("bank:");
    let guard = scoped.lock_all(["b", "a", "b"]).await.expect("free");
    let keys: Vec<_> = guard.keys().map(|key| key.as_str().to_owned()).collect();
    assert_eq!(keys, ["bank:a", "bank:b"]);
    assert_eq!(guard.fences().count(), 2);
    assert!(guard.handle("bank:b").is_some() && guard.handle("b").is_none());
    let election = scoped.election("x").expect("valid");
    assert_eq!(election.key().as_str(), "bank:x:leader");
    let permit = scoped.semaphore("gpu", 1).expect("valid").acquire().await.expect("free");
    assert_eq!(permit.guard().key().as_str(), "bank:gpu:slot:0");
    drop((guard, permit));
    locker.shutdown().await.expect("released");
}

#[tokio::test(start_paused = true)]
async fn locks_are_kept_while_another_one_is_waited_for() {
    let ttl = Duration::from_secs(3);
    let (locker, _faults) = paused(LockOptions::default().ttl(ttl).timeout(None));
    let last = locker.lock("c").ttl(Duration::from_secs(20)).await.expect("free");
    let waiting = {
        let locker = locker.clone();
        tokio::spawn(async move { locker.lock_all(["a", "b", "c"]).await })
    };
    // Much longer than the TTL of what is held meanwhile.
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert!(locker.is_locked("a").await.expect("works"));
    assert!(locker.try_lock("b").await.expect("works").is_none());
    last.release().await.expect("works");
    let guard = waiting.await.expect("no panic").expect("acquired");
    assert!(guard.remaining() > ttl.mul_f64(0.9), "all have their whole TTL");
    let fences: Vec<_> = guard.fences().map(|(_key, fence)| fence.get()).collect();
    assert_eq!(fences, [1, 1, 2], "none was taken twice");
}

/// Also if no single wait lasts for a third of the TTL, or the loss is signaled early.
#[tokio::test(start_paused = true)]
async fn locks_are_kept_while_others_are_waited_for_one_after_another() {
    const TTL: Duration = Duration::from_secs(3);
    const KEYS: [&str; 6] = ["a", "b", "c", "d", "e", "f"];
    for stop_margin in [Duration::ZERO, TTL * 9 / 10] {
        let options = LockOptions::default().ttl(TTL).stop_margin(stop_margin).timeout(None);
        let (locker, _faults) = paused(options);
        let mut others = Vec::new();
        for key in &KEYS[1..] {
            let request = locker.lock(*key).ttl(Duration::from_mins(1));
            others.push(request.stop_margin(Duration::ZERO).await.expect("free"));
        }
        let all = tokio::spawn({
            let locker = locker.clone();
            async move { locker.lock_all(KEYS).await }
        });
        for guard in others {
            tokio::time::sleep(Duration::from_millis(900)).await;
            guard.release().await.expect("works");
        }
        let all = all.await.expect("no panic").expect("in the end");
        let fences: Vec<u64> = all.fences().map(|(_key, fence)| fence.get()).collect();
        assert_eq!(fences[0], 1, "taken only once: {fences:?}, {stop_margin:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_lock_that_is_lost_while_another_one_is_waited_for_is_taken_again() {
    let (locker, _faults) =
        paused(LockOptions::default().ttl(Duration::from_secs(3)).timeout(None));
    let last = locker.lock("b").ttl(Duration::from_secs(20)).await.expect("free");
    let waiting = {
        let locker = locker.clone();
        tokio::spawn(async move { locker.lock_all(["a", "b"]).await })
    };
    tokio::time::sleep(Duration::from_millis(10)).await;
    let lock = locker.backend().lookup_key(&"a".try_into().expect("valid")).await.expect("works");
    let lock = LockInfoRaw::from(lock.expect("held"));
    assert!(diagnostics::break_lock(locker.backend(), &lock).await.expect("works"));
    tokio::time::sleep(Duration::from_secs(5)).await;
    last.release().await.expect("works");
    let guard = waiting.await.expect("no panic").expect("acquired");
    assert!(guard.is_valid());
    let fences: Vec<_> = guard.fences().map(|(_key, fence)| fence.get()).collect();
    assert_eq!(fences, [2, 2]);
}

#[tokio::test(start_paused = true)]
async fn the_timeout_limits_all_waits_of_a_set_together() {
    let (locker, _faults) = paused(LockOptions::default());
    let held = locker.lock_all(["a", "b", "c"]).ttl(Duration::from_mins(10)).await.expect("free");
    let started = tokio::time::Instant::now();
    let error = locker.lock_all(["c", "a"]).timeout(Duration::from_secs(7)).await;
    let error = error.expect_err("held");
    assert_eq!(error.code(), ErrorCode::AcquisitionTimeout);
    assert_eq!(error.message(), "the 2 locks were not acquired within 7000 ms");
    assert_eq!(started.elapsed(), Duration::from_secs(7));
    let busy = locker.lock_all(["c", "a"]).try_for(Duration::from_secs(1)).await;
    assert!(busy.expect("not an error").is_none());
    drop(held);
}

#[tokio::test(start_paused = true)]
async fn a_store_that_fails_gives_nothing_away() {
    let (locker, faults) = paused(LockOptions::default());
    let keys = ["a", "b", "c"];
    // The first attempt fails, the others succeed.
    faults.fail_next(ErrorCode::ServiceUnavailable);
    assert!(locker.try_lock_all(keys).await.is_err_and(|error| error.is_retryable()));
    faults.fail_next(ErrorCode::ServiceUnavailable);
    assert!(locker.lock_all(keys).await.is_err_and(|error| error.is_retryable()));
    for key in keys {
        assert!(!locker.is_locked(key).await.expect("works"), "{key}");
    }
    faults.fail_next(ErrorCode::ServiceUnavailable);
    let guard = locker.lock_all(keys).retry_on_error(true).await.expect("continues");
    drop(guard);
    let token = CancellationToken::new();
    token.cancel();
    let error = locker.lock_all(["a", "b"]).cancel(token).await.expect_err("canceled");
    assert!(error.is_canceled());
}

#[tokio::test(start_paused = true)]
async fn roles_follow_the_store() {
    let (locker, faults) = paused(LockOptions::default().ttl(Duration::from_secs(30)));
    let (one, other) = (locker.election("x").expect("valid"), locker.election("x").expect("valid"));
    assert_eq!(one.role(), Role::Unknown);
    let leadership = one.campaign().await.expect("free");
    assert_eq!((one.role(), one.role().as_str()), (Role::Leading, "leading"));
    let campaign = {
        let other = other.clone();
        tokio::spawn(async move { other.campaign().await })
    };
    tokio::time::sleep(Duration::from_millis(10)).await;
    assert_eq!(other.role(), Role::Following);
    // While the store is unreachable, a leader leads until its lease is over.
    faults.fail_always(ErrorCode::ServiceUnavailable);
    tokio::time::sleep(Duration::from_secs(29)).await;
    assert_eq!(one.role(), Role::Leading);
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert_eq!((one.role(), other.role()), (Role::Unknown, Role::Unknown));
    assert_eq!(leadership.lost().await, LostReason::Unreachable);
    faults.fail_always(None);
    let next = campaign.await.expect("no panic").expect("leads");
    assert_eq!(other.role(), Role::Leading);
    assert!(next.term() > leadership.term());
    assert!(one.try_campaign().await.expect("works").is_none());
    assert_eq!(next.resign().await.expect("works"), ReleaseOutcome::Released);
    assert_eq!(other.role(), Role::Unknown);
}

#[tokio::test(start_paused = true)]
async fn an_observer_reports_an_unreachable_store_and_a_crashed_leader() {
    let (locker, faults) = paused(LockOptions::default().ttl(Duration::from_secs(30)));
    let election = locker.election("x").expect("valid");
    let mut observer = election.observe();
    assert_eq!(observer.next().await, Observation::Vacant);
    let leadership = election.campaign().await.expect("free");
    assert!(matches!(observer.next().await, Observation::Led(_)));
    faults.fail_always(ErrorCode::ServiceUnavailable);
    assert_eq!(observer.next().await, Observation::Unknown);
    faults.fail_always(None);
    let failed = tokio::time::Instant::now();
    assert!(matches!(observer.next().await, Observation::Led(_)));
    assert_eq!(failed.elapsed(), Duration::from_secs(1), "the poll interval");
    // It crashes: nothing renews or releases the lock.
    let _lock_id = leadership.guard().lock_id();
    std::mem::forget(leadership);
    faults.fail_always(ErrorCode::ServiceUnavailable);
    assert_eq!(observer.next().await, Observation::Unknown);
    tokio::time::sleep(Duration::from_mins(1)).await;
    faults.fail_always(None);
    assert_eq!(observer.next().await, Observation::Vacant);
}

#[tokio::test(start_paused = true)]
async fn work_that_ends_hands_over_and_a_token_ends_the_campaign() {
    let token = CancellationToken::new();
    let (locker, _faults) = paused(LockOptions::default().cancel(token.clone()));
    let terms = Arc::new(Mutex::new(Vec::new()));
    let candidates: Vec<_> = ["one", "two"]
        .map(|name| {
            let election = locker.election("x").expect("valid");
            let terms = Arc::clone(&terms);
            tokio::spawn(async move {
                election
                    .run(|lead| {
                        let terms = Arc::clone(&terms);
                        async move {
                            terms.lock().expect("no panic").push((name, lead.fence().get()));
                            tokio::time::sleep(Duration::from_secs(1)).await;
                        }
                    })
                    .await
            })
        })
        .into();
    tokio::time::sleep(Duration::from_millis(10_500)).await;
    token.cancel();
    for candidate in candidates {
        candidate.await.expect("no panic").expect("it ends without an error");
    }
    assert!(!locker.is_locked("x:leader").await.expect("works"));
    let terms = terms.lock().expect("no panic").clone();
    assert!(terms.len() >= 10, "{terms:?}");
    assert!(terms.is_sorted_by_key(|(_name, term)| *term));
    assert!(terms.windows(2).all(|pair| pair[0].0 != pair[1].0), "they lead in turn: {terms:?}");
}

#[tokio::test]
async fn a_candidate_that_resigned_lets_another_process_go_first() {
    let backend = MemoryBackend::new();
    let (here, elsewhere) = (Locker::new(backend.clone()), Locker::new(backend));
    let here = here.expect("inside a runtime").election("x").expect("valid");
    let elsewhere = elsewhere.expect("inside a runtime").election("x").expect("valid");
    let first = here.campaign().await.expect("free");
    let campaign = {
        let elsewhere = elsewhere.clone();
        tokio::spawn(async move {
            let leadership = elsewhere.campaign().await.expect("leads");
            let term = leadership.term().get();
            leadership.resign().await.expect("works");
            term
        })
    };
    while elsewhere.role() != Role::Following {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    // Long enough to subscribe.
    tokio::time::sleep(Duration::from_millis(20)).await;
    first.resign().await.expect("works");
    let again = here.campaign().await.expect("leads");
    assert_eq!(again.term().get(), 3, "the other one did not lead in between");
    assert_eq!(campaign.await.expect("no panic"), 2);
}

#[tokio::test]
async fn permits_are_shared_fairly_by_sixteen_tasks() {
    const TASKS: u32 = 16;
    let locker = Locker::builder(MemoryBackend::new())
        .timeout(Duration::from_mins(1))
        .build()
        .expect("inside a runtime");
    let total = Arc::new(AtomicU32::new(0));
    let tasks: Vec<_> = (0..TASKS)
        .map(|_| {
            let semaphore = locker.semaphore("gpu", 4).expect("valid");
            let total = Arc::clone(&total);
            tokio::spawn(async move {
                let mut count = 0;
                while total.fetch_add(1, Ordering::Relaxed) < TASKS * 50 {
                    let permit = semaphore.acquire().await.expect("in time");
                    tokio::task::yield_now().await;
                    permit.release().await.expect("works");
                    count += 1;
                }
                count
            })
        })
        .collect();
    for task in tasks {
        let share: u32 = task.await.expect("no panic");
        assert!((25..=100).contains(&share), "a share of {share} instead of 50");
    }
}

#[tokio::test(start_paused = true)]
async fn waiters_get_permits_in_order() {
    let (locker, _faults) = paused(LockOptions::default().ttl(Duration::from_mins(1)));
    let semaphore = locker.semaphore("gpu", 2).expect("valid");
    let mut held = semaphore.acquire_many(2).await.expect("free");
    let order = Arc::new(Mutex::new(Vec::new()));
    let mut waiting = Vec::new();
    for number in 0..4 {
        let (semaphore, order) = (semaphore.clone(), Arc::clone(&order));
        waiting.push(tokio::spawn(async move {
            let permit = semaphore.acquire().await.expect("in time");
            order.lock().expect("no panic").push(number);
            permit.release().await.expect("works");
        }));
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    held.pop().expect("two").release().await.expect("works");
    for waiter in waiting {
        waiter.await.expect("no panic");
    }
    assert_eq!(*order.lock().expect("no panic"), [0, 1, 2, 3]);
}

#[tokio::test(start_paused = true)]
async fn a_crashed_holder_loses_its_permit_after_the_ttl() {
    let (locker, _faults) =
        paused(LockOptions::default().ttl(Duration::from_secs(2)).timeout(None));
    let semaphore = locker.semaphore("gpu", 2).expect("valid");
    for permit in semaphore.acquire_many(2).await.expect("free") {
        std::mem::forget(permit);
    }
    let started = tokio::time::Instant::now();
    let permit = semaphore.acquire().await.expect("in the end");
    // The TTL, and the tolerance.
    assert_eq!(started.elapsed().as_secs(), 3, "{:?}", started.elapsed());
    assert_eq!(permit.fence().get(), 2);
}

/// Among so many names, some share what they are looked up in.
#[tokio::test]
async fn all_semaphores_of_a_name_agree_whatever_others_there_are() {
    let locker = locker();
    let semaphore =
        |number: u32, permits: u32| locker.semaphore(format!("s{number}"), permits).expect("valid");
    let first: Vec<_> = (0..200).map(|number| semaphore(number, 2)).collect();
    let second: Vec<_> = (0..200).map(|number| semaphore(number, 3)).collect();
    assert!(first.iter().chain(&second).all(|semaphore| semaphore.permits() == 3));
}

#[tokio::test(start_paused = true)]
async fn the_locks_of_a_set_are_asked_for_at_the_same_time() {
    let (locker, faults) = paused(LockOptions::default());
    let round_trip = Duration::from_millis(100);
    faults.delay(round_trip);
    let started = tokio::time::Instant::now();
    let set = locker.lock_all(["a", "b", "c"]).await.expect("free");
    assert_eq!(started.elapsed(), round_trip);
    drop(set);
}

/// Everything beyond it would have to be given back.
#[tokio::test(start_paused = true)]
async fn a_set_is_not_asked_for_beyond_a_lock_of_this_process() {
    let (locker, _faults) = paused(LockOptions::default());
    let held = locker.lock("b").await.expect("free");
    let fence_of_c = || async { locker.lock("c").await.expect("free").fence().get() };
    assert_eq!(fence_of_c().await, 1);
    let waiting = tokio::spawn(locker.lock_all(["a", "b", "c"]).into_future());
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(fence_of_c().await, 2, "it was not taken in between");
    held.release().await.expect("works");
    drop(waiting.await.expect("no panic").expect("free"));
}

#[tokio::test]
async fn nothing_begins_after_a_shutdown() {
    let locker = locker();
    let lock_id = locker.lock("k").await.expect("free").detach();
    let election = locker.election("x").expect("valid");
    locker.shutdown().await.expect("nothing is held");
    assert!(locker.resume(lock_id).await.expect_err("shut down").is_shut_down());
    assert!(locker.lock_all(["a"]).await.expect_err("shut down").is_shut_down());
    let work = election.run(|_lead| async {}).await;
    assert!(work.expect_err("shut down").is_shut_down());
}

#[tokio::test(start_paused = true)]
async fn the_larger_number_of_permits_counts() {
    let options = LockOptions::default().ttl(Duration::from_mins(1));
    let (locker, faults) = paused(options.clone());
    // In one process, both are known.
    let (small, large) = (locker.semaphore("a", 1), locker.semaphore("a", 3));
    let (small, large) = (small.expect("valid"), large.expect("valid"));
    assert_eq!((small.permits(), large.permits()), (3, 3));
    // Another process sees that a slot beyond its own is held.
    let other = another_process(&locker, options);
    let many = locker.semaphore("b", 4).expect("valid").acquire_many(4).await.expect("free");
    let few = other.semaphore("b", 2).expect("valid");
    let waiting = tokio::spawn(async move { (few.acquire().await, few) });
    tokio::time::sleep(Duration::from_secs(2)).await;
    let slots: HashMap<u32, _> = many.into_iter().map(|permit| (permit.slot(), permit)).collect();
    slots[&3].release().await.expect("works");
    let (permit, few) = waiting.await.expect("no panic");
    assert_eq!((permit.expect("in time").slot(), few.permits()), (3, 4));
    drop((slots, faults));
}

/// The first waiter that looks beyond its own slots gives up while it does.
#[tokio::test(start_paused = true)]
async fn the_larger_number_of_permits_is_found_by_a_later_waiter_too() {
    let options = LockOptions::default().ttl(Duration::from_mins(1)).timeout(None);
    let (locker, faults) = paused(options.clone());
    let other = another_process(&locker, options);
    let many = locker.semaphore("b", 4).expect("valid").acquire_many(4).await.expect("free");
    let few = other.semaphore("b", 2).expect("valid");
    for _ in 0..2 {
        faults.delay(Duration::from_millis(50));
        let short = Duration::from_millis(520);
        tokio::time::timeout(short, few.acquire()).await.expect_err("all are held");
    }
    faults.delay(Duration::ZERO);
    tokio::time::timeout(Duration::from_secs(2), few.acquire()).await.expect_err("all are held");
    assert_eq!(few.permits(), 4);
    drop(many);
}

#[tokio::test]
async fn a_semaphore_of_a_thousand_uses_every_slot() {
    let locker = locker();
    let semaphore = locker.semaphore("big", MAX_PERMITS).expect("valid");
    let mut permits = Vec::new();
    while let Some(permit) = semaphore.try_acquire().await.expect("works") {
        permits.push(permit);
    }
    let mut slots: Vec<u32> = permits.iter().map(Permit::slot).collect();
    slots.sort_unstable();
    assert!(slots.into_iter().eq(0..MAX_PERMITS));
    assert_eq!(semaphore.available().await.expect("works"), 0);
    let freed = permits.swap_remove(500);
    freed.release().await.expect("works");
    let again = semaphore.acquire().await.expect("one is free");
    assert_eq!(again.slot(), freed.slot());
}

#[tokio::test(start_paused = true)]
async fn a_set_without_time_makes_no_attempt() {
    let (locker, faults) = paused(LockOptions::default());
    // Whatever reaches the store fails with another code.
    faults.fail_always(ErrorCode::ServiceUnavailable);
    let error = locker.lock_all(["a", "b"]).timeout(Duration::ZERO).await.expect_err("no time");
    assert_eq!(error.code(), ErrorCode::AcquisitionTimeout);
    assert_eq!(error.message(), "the 2 locks were not acquired within 0 ms");
}

#[tokio::test(start_paused = true)]
async fn the_timeout_of_a_set_limits_everything_that_it_does() {
    let timeout = Duration::from_secs(1);
    // Each lock expires before its grant is known, so that a set is never complete.
    let options = LockOptions::default().ttl(Duration::from_millis(20));
    let (locker, faults) = paused(options.retry_on_error(true));
    faults.delay(Duration::from_millis(30));
    let started = tokio::time::Instant::now();
    let error = locker.lock_all(["a", "b"]).timeout(timeout).await.expect_err("never complete");
    assert_eq!(error.code(), ErrorCode::AcquisitionTimeout);
    assert!(started.elapsed() <= timeout * 2, "{:?}", started.elapsed());
    // The store stops answering while a set gives back what it cannot keep.
    for is_canceled in [false, true] {
        let (locker, faults) = paused(LockOptions::default());
        let held = locker.lock("a").ttl(Duration::from_mins(10)).await.expect("free");
        let token = CancellationToken::new();
        faults.delay(Duration::from_millis(10));
        let stall = async {
            // While both locks are asked for, of which one is held.
            tokio::time::sleep(Duration::from_millis(5)).await;
            faults.delay(Duration::from_mins(1));
            tokio::time::sleep(Duration::from_millis(10)).await;
            if is_canceled {
                token.cancel();
            }
            std::future::pending::<()>().await;
        };
        let other = Locker::builder(locker.backend().clone()).clock(LocalClock::Tokio);
        let other = other.build().expect("inside a runtime");
        let request = other.lock_all(["a", "b"]).timeout(timeout).cancel(token.clone());
        let started = tokio::time::Instant::now();
        let error = tokio::select! {
            outcome = request => outcome.expect_err("the store stalls"),
            () = stall => unreachable!("it never ends"),
        };
        let code = if is_canceled { ErrorCode::Aborted } else { ErrorCode::AcquisitionTimeout };
        assert_eq!(error.code(), code);
        assert!(started.elapsed() <= timeout * 2, "{:?}", started.elapsed());
        drop(held);
    }
}

#[tokio::test(start_paused = true)]
async fn an_attempt_at_several_locks_keeps_to_the_timeout_while_it_gives_back() {
    let timeout = Duration::from_secs(1);
    for several_permits in [false, true] {
        let (locker, faults) = paused(LockOptions::default().timeout(timeout));
        let semaphore = locker.semaphore("gpu", 2).expect("valid");
        let held = locker.lock("b").await.expect("free");
        let permit = semaphore.acquire().await.expect("free");
        faults.delay(Duration::from_millis(10));
        let stall = async {
            // While both locks are asked for, of which one is held.
            tokio::time::sleep(Duration::from_millis(5)).await;
            faults.delay(Duration::from_mins(1));
            std::future::pending::<()>().await;
        };
        let attempt = async {
            if several_permits {
                semaphore.try_acquire_many(2).await.map(|permits| permits.is_some())
            } else {
                locker.try_lock_all(["a", "b"]).await.map(|guard| guard.is_some())
            }
        };
        let started = tokio::time::Instant::now();
        let error = tokio::select! {
            outcome = attempt => outcome.expect_err("the store stalls"),
            () = stall => unreachable!("it never ends"),
        };
        assert_eq!(error.code(), ErrorCode::AcquisitionTimeout);
        assert!(started.elapsed() <= timeout * 2, "{:?}", started.elapsed());
        drop((held, permit));
    }
}

#[tokio::test(start_paused = true)]
async fn without_time_no_permits_are_asked_for() {
    let (locker, faults) = paused(LockOptions::default().timeout(Duration::ZERO));
    // Whatever reaches the store fails with another code.
    faults.fail_always(ErrorCode::ServiceUnavailable);
    let semaphore = locker.semaphore("gpu", 3).expect("valid");
    for count in [1, 2] {
        let error = semaphore.acquire_many(count).await.expect_err("no time");
        assert_eq!(error.code(), ErrorCode::AcquisitionTimeout, "{count}");
    }
}

#[tokio::test(start_paused = true)]
async fn every_waiter_learns_of_a_larger_number_of_permits() {
    let options = LockOptions::default().ttl(Duration::from_mins(1));
    let (locker, _faults) = paused(options.clone());
    let other = || {
        let other = Locker::builder(locker.backend().clone()).clock(LocalClock::Tokio);
        other.options(options.clone()).build().expect("inside a runtime")
    };
    // Another process has four permits, of which the first and the last are held.
    let mut held = locker.semaphore("gpu", 4).expect("valid").acquire_many(4).await.expect("free");
    held.retain(|permit| permit.slot() % 3 == 0);
    let waiting = |semaphore: Semaphore<_>| tokio::spawn(async move { semaphore.acquire().await });
    let one = other().semaphore("gpu", 1).expect("valid");
    let first = waiting(one.clone());
    tokio::time::sleep(Duration::from_millis(10)).await;
    let second = waiting(one);
    for waiter in [first, second] {
        let permit = waiter.await.expect("no panic").expect("one is free");
        assert!([1, 2].contains(&permit.slot()));
        held.push(permit);
    }
    // The same, if a program that waits names a larger number itself.
    let program = other();
    let all = program.semaphore("fpga", 1).expect("valid").acquire().await.expect("free");
    let waiter = waiting(program.semaphore("fpga", 1).expect("valid"));
    tokio::time::sleep(Duration::from_millis(10)).await;
    let larger = waiting(program.semaphore("fpga", 3).expect("valid"));
    for waiter in [waiter, larger] {
        held.push(waiter.await.expect("no panic").expect("two are free"));
    }
    drop(all);
}

#[tokio::test(start_paused = true)]
async fn an_error_of_a_wait_for_a_permit_names_a_slot() {
    let (locker, _faults) = paused(LockOptions::default());
    let semaphore = locker.semaphore("gpu", 1).expect("valid");
    let permit = semaphore.acquire().await.expect("free");
    let error = semaphore.acquire().await.expect_err("held");
    assert_eq!(error.key(), Some(permit.guard().key()));
}

#[tokio::test(start_paused = true)]
async fn permits_that_are_not_used_are_not_held_at_least_that_long() {
    let minute = Duration::from_mins(1);
    let (locker, _faults) = paused(LockOptions::default().hold_at_least(minute));
    let semaphore = locker.semaphore("gpu", 3).expect("valid");
    assert_invalid(semaphore.acquire_many(2).await);
    assert_invalid(semaphore.try_acquire_many(2).await);
    assert_eq!(semaphore.available().await.expect("works"), 3);
    drop(semaphore.acquire_many(1).await.expect("as one permit"));
}

#[tokio::test(start_paused = true)]
async fn a_stop_margin_is_for_permits_and_not_for_their_gate() {
    let options = LockOptions::default().ttl(Duration::from_secs(30));
    let (locker, _faults) = paused(options.stop_margin(Duration::from_secs(25)));
    let semaphore = locker.semaphore("gpu", 2).expect("valid");
    let held = semaphore.acquire().await.expect("free");
    let error = semaphore.acquire_many(2).await.expect_err("one is held");
    assert_eq!(error.code(), ErrorCode::AcquisitionTimeout, "{error}");
    drop(held);
}

#[tokio::test(start_paused = true)]
async fn several_permits_are_acquired_through_errors_if_asked_to() {
    let (locker, faults) = paused(LockOptions::default().retry_on_error(true));
    let semaphore = locker.semaphore("gpu", 2).expect("valid");
    faults.fail_next(ErrorCode::ServiceUnavailable);
    let permits = semaphore.acquire_many(2).await.expect("the store recovers");
    assert_eq!(permits.len(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_leader_that_resigns_hands_over_at_once_whatever_the_least_hold() {
    let (locker, _faults) = paused(LockOptions::default().hold_at_least(Duration::from_mins(1)));
    let election = locker.election("x").expect("valid");
    let leadership = election.campaign().await.expect("free");
    leadership.resign().await.expect("works");
    assert!(!locker.is_locked(election.key()).await.expect("works"));
}

#[tokio::test(start_paused = true)]
async fn an_earlier_term_that_ends_late_does_not_end_the_present_one() {
    let (locker, _faults) = paused(LockOptions::default());
    let election = locker.election("x").expect("valid");
    let earlier = election.campaign().await.expect("free");
    let lock = locker.backend().lookup_key(election.key()).await.expect("works").expect("held");
    let broken = diagnostics::break_lock(locker.backend(), &LockInfoRaw::from(lock)).await;
    assert!(broken.expect("works"));
    earlier.lost().await;
    let present = election.campaign().await.expect("free");
    earlier.resign().await.expect("works");
    assert_eq!(election.role(), Role::Leading);
    drop(earlier);
    assert_eq!(election.role(), Role::Leading);
    drop(present);
}
