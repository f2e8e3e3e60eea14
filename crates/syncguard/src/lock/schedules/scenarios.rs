//! What is explored, and what must hold in every schedule.

#![cfg(test)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use shuttle::future::{JoinHandle, spawn, yield_now};
use shuttle::rand::{Rng, thread_rng};

use super::remote::Remote;
use super::{dropped_midway, explore};
use crate::common::key::Key;
use crate::common::lost_reason::LostReason;
use crate::contract::LockBackend;
use crate::contract::event::{EngineEvent, EngineEventKind, EventSink};
use crate::contract::notifier::Notifier;
use crate::contract::request::ReleaseRequest;
use crate::lock::clock::LocalClock;
use crate::lock::locker::{Locker, LockerBuilder};
use crate::lock::options::LockOptions;

const TTL: Duration = Duration::from_secs(30);

/// The clock of a scenario overtakes any limit; a release is not given up for that.
fn options() -> LockOptions {
    LockOptions::default().ttl(TTL).wait_forever().release_timeout(Duration::from_hours(1))
}

fn locker(remote: &Remote, options: LockOptions) -> Locker<Remote> {
    builder(remote, options).build().expect("valid options")
}

/// A locker that practically never polls.
fn builder(remote: &Remote, options: LockOptions) -> LockerBuilder<Remote> {
    Locker::builder(remote.clone())
        .options(options)
        .clock(LocalClock::Tokio)
        .poll_interval(Duration::from_hours(1))
}

/// Checks that all work of a locker ends, and that it leaves nothing behind.
async fn leaves_nothing(locker: &Locker<Remote>) {
    let ended = locker.shutdown_within(Duration::from_hours(1)).await;
    ended.expect("no guard is left, and every job ends");
    assert_eq!(locker.waits_and_holds(), 0, "a queue was left behind");
}

async fn is_free(remote: &Remote) {
    let key = Key::new("k").expect("valid");
    assert!(!remote.store.is_locked(&key).await.expect("works"), "a lock was left behind");
}

fn chance() -> bool {
    thread_rng().r#gen()
}

async fn all(tasks: Vec<JoinHandle<()>>) {
    for task in tasks {
        task.await.expect("no panic");
    }
}

/// Counts reported losses.
#[derive(Debug, Default)]
struct Losses(AtomicU32);

impl EventSink for Losses {
    fn engine(&self, event: &EngineEvent) {
        if matches!(event.kind, EngineEventKind::Lost { .. }) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn is_inline(&self) -> bool {
        true
    }
}

/// Renewal, extends, theft, expiry, release and drop, in any order: every observer learns the end,
/// the loss is reported at most once, and nothing is left behind.
#[test]
fn every_observer_learns_the_end_of_a_lock() {
    explore("renewal, release, loss and drop of a guard", |time| async move {
        let remote = Remote::new(0);
        let losses = Arc::<Losses>::default();
        let sink: Arc<dyn EventSink> = Arc::clone(&losses) as _;
        let options = if chance() { options().renew() } else { options().no_renewal() };
        let locker = builder(&remote, options).telemetry(sink).build().expect("valid options");
        let guard = locker.lock("k").await.expect("free");
        let mut tasks = Vec::new();
        let token = guard.lost_token();
        tasks.push(spawn(async move { token.cancelled().await }));
        let handle = guard.handle();
        tasks.push(spawn(async move {
            let reason = handle.lost().await;
            let end = handle.ended().expect("ended");
            assert!(reason == end || reason == LostReason::Released, "{reason:?}, then {end:?}");
        }));
        if chance() {
            let handle = guard.handle();
            tasks.push(spawn(async move {
                handle.run(std::future::pending::<()>()).await.expect_err("it ends");
            }));
        }
        if chance() {
            let handle = guard.handle();
            tasks.push(spawn(async move {
                drop(dropped_midway(handle.extend(TTL)).await);
                // It fails if the clock overtakes it.
                drop(handle.extend(TTL / 2).await);
            }));
        }
        if chance() {
            let (store, lock_id) = (remote.store.clone(), guard.lock_id());
            tasks.push(spawn(async move {
                yield_now().await;
                store.release(&ReleaseRequest::new(lock_id)).await.expect("works");
            }));
        }
        let steps = thread_rng().gen_range(0..6);
        tasks.push(spawn(async move { time.pass_often(steps, TTL / 3).await }));
        match thread_rng().gen_range(0..4) {
            0 => drop(guard.release().await.expect("works")),
            1 => drop(dropped_midway(guard.release()).await),
            2 => assert!(locker.release_all() <= 1),
            _ => yield_now().await,
        }
        drop(guard);
        all(tasks).await;
        leaves_nothing(&locker).await;
        is_free(&remote).await;
        assert!(losses.0.load(Ordering::Relaxed) <= 1, "a loss was reported twice");
    });
}

/// A loss that only an extend can notice, with nothing else going on: the token is canceled.
#[test]
fn no_loss_is_missed_by_a_token() {
    explore("loss against a token", |_time| async {
        let remote = Remote::new(0);
        let locker = locker(&remote, options().no_renewal());
        let guard = locker.lock("k").await.expect("free");
        let token = guard.lost_token();
        let handle = guard.handle();
        let stolen = ReleaseRequest::new(guard.lock_id());
        remote.store.release(&stolen).await.expect("works");
        let noticing = spawn(async move { drop(handle.extend(TTL).await.expect("works")) });
        token.cancelled().await;
        noticing.await.expect("no panic");
        drop(guard);
        leaves_nothing(&locker).await;
    });
}

/// Waiters of one process: without any time passing, each gets the lock, one at a time, although
/// some give up and some do not wait for the answer to their release.
#[test]
fn a_queue_hands_over_without_a_timer() {
    explore("hand-over within a process", |_time| async {
        let remote = Remote::new(0);
        let locker = locker(&remote, options().no_renewal());
        let inside = Arc::<AtomicU32>::default();
        let tasks = (0..3).map(|_| {
            let (locker, inside) = (locker.clone(), Arc::clone(&inside));
            spawn(async move {
                if chance() {
                    drop(dropped_midway(async { locker.lock("k").await }).await);
                }
                hold_once(locker, inside).await;
            })
        });
        all(tasks.collect()).await;
        leaves_nothing(&locker).await;
        is_free(&remote).await;
    });
}

/// Waiters of two processes: they learn of each other's releases only by notifications.
#[test]
fn processes_hand_over_without_a_timer() {
    explore("hand-over between processes", |_time| async {
        let remote = Remote::new(0);
        let lockers = [0; 2].map(|_| locker(&remote, options().no_renewal()));
        let inside = Arc::<AtomicU32>::default();
        let tasks =
            (0..3).map(|number| spawn(hold_once(lockers[number % 2].clone(), Arc::clone(&inside))));
        all(tasks.collect()).await;
        for locker in &lockers {
            leaves_nothing(locker).await;
        }
        is_free(&remote).await;
    });
}

async fn hold_once(locker: Locker<Remote>, inside: Arc<AtomicU32>) {
    let tried = if chance() { locker.try_lock("k").await.expect("works") } else { None };
    let guard = match tried {
        Some(guard) => guard,
        None => locker.lock("k").await.expect("works"),
    };
    assert_eq!(inside.fetch_add(1, Ordering::Relaxed), 0, "two holders");
    yield_now().await;
    inside.fetch_sub(1, Ordering::Relaxed);
    match thread_rng().gen_range(0..3) {
        0 => drop(guard.release().await.expect("works")),
        1 => drop(dropped_midway(guard.release()).await),
        _ => drop(guard),
    }
}

/// Lost, late and unanswered requests, and waits that are dropped: when all work has ended, no lock
/// is left, and none appears later.
#[test]
fn an_abandoned_acquire_leaves_no_lock() {
    explore("lost answers and dropped waits", |time| async move {
        let remote = Remote::new(3);
        let locker = locker(&remote, options().no_renewal());
        let clock = spawn(async move { time.pass_often(u32::MAX, Duration::from_secs(1)).await });
        let tasks = (0..2).map(|_| {
            let locker = locker.clone();
            spawn(async move {
                let lock = async { locker.lock("k").await };
                if let Some(Ok(guard)) = dropped_midway(lock).await {
                    drop(guard.release().await);
                }
                drop(locker.try_lock("k").await);
            })
        });
        all(tasks.collect()).await;
        leaves_nothing(&locker).await;
        clock.abort();
        is_free(&remote).await;
    });
}

/// A shutdown while tasks wait and hold: every wait ends, and every lock is released.
#[test]
fn a_shutdown_ends_every_wait() {
    explore("shutdown", |_time| async {
        let remote = Remote::new(0);
        let locker = locker(&remote, options().no_renewal());
        let tasks = (0..3).map(|_| {
            let locker = locker.clone();
            spawn(async move {
                if let Ok(guard) = locker.lock("k").await {
                    yield_now().await;
                    drop(guard);
                }
            })
        });
        let tasks = tasks.collect();
        yield_now().await;
        drop(locker.shutdown().await);
        all(tasks).await;
        leaves_nothing(&locker).await;
        is_free(&remote).await;
    });
}

/// Subscriptions that come and go while a key is notified: none misses a notification that comes
/// after it, and the last one leaves an empty notifier.
#[test]
fn no_subscription_misses_a_notification() {
    explore("notifications", |_time| async {
        let key = Key::new("k").expect("valid");
        let idle = Arc::<AtomicU32>::default();
        let count = Arc::clone(&idle);
        let notifier = Notifier::with_idle_hook(move |_key| {
            count.fetch_add(1, Ordering::Relaxed);
        });
        let mut tasks: Vec<_> = (0..2)
            .map(|_| {
                let (notifier, key) = (notifier.clone(), key.clone());
                spawn(async move {
                    let mut subscription = notifier.subscribe(&key);
                    let releasing = notifier.clone();
                    let released = key.clone();
                    let release = spawn(async move { releasing.notify(&released, None) });
                    subscription.notified().await;
                    release.await.expect("no panic");
                })
            })
            .collect();
        let (changing, other) = (notifier.clone(), key.clone());
        tasks.push(spawn(async move {
            changing.set_working(false);
            drop(changing.subscribe(&other));
            changing.set_working(true);
        }));
        all(tasks).await;
        assert!(!notifier.is_awaited(&key));
        assert_eq!(notifier.awaited_keys(), 0);
        assert!(idle.load(Ordering::Relaxed) >= 1, "the last subscription was not noticed");
        assert!(notifier.subscribe(&key).is_working());
    });
}
