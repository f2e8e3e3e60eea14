//! Helpers for tests with real servers: acquiring locks, waiting for a condition or a notification,
//! cutting connections, and reading the log.

#![allow(dead_code, reason = "every test file uses a part of it")]

pub(crate) mod log;
#[cfg(feature = "postgres")]
pub(crate) mod postgres;

use std::error::Error as _;
use std::fmt::Write as _;
use std::time::{Duration, Instant};

use syncguard::backend::{AcquireOutcome, AcquireRequest, Fenced, Lease, ReleaseRequest};
use syncguard::{Key, LockBackend, LockOptions, Locker, ReleaseOutcome, RetryPolicy, Ttl};
use test_support::{Fault, Proxy};
use tokio::task::JoinHandle;

pub(crate) fn key(text: &str) -> Key {
    Key::new(text).expect("valid")
}

/// Returns everything that an error shows when it is printed, including its sources.
pub(crate) fn shown(error: &syncguard::Error) -> String {
    let mut text = format!("{error} {error:?} {error:#?}");
    let mut source = error.source();
    while let Some(cause) = source {
        write!(text, " {cause} {cause:?}").expect("writing to a string");
        source = cause.source();
    }
    text
}

pub(crate) fn request(text: &str) -> AcquireRequest {
    AcquireRequest::new(key(text), Ttl::DEFAULT).expect("randomness")
}

/// Acquires a lock that is free.
pub(crate) async fn grant<B>(backend: &B, name: &str) -> (AcquireRequest, Lease)
where
    B: LockBackend<Fencing = Fenced>,
{
    let request = request(name);
    match backend.acquire(&request).await.expect("works") {
        AcquireOutcome::Acquired(lease) => (request, lease),
        other => panic!("{other:?}"),
    }
}

/// Installs a crypto provider, as a program that builds Google's credentials itself has to: their
/// crate panics without one.
#[cfg(feature = "firestore")]
pub(crate) fn install_cryptography() {
    // Another test may have done it.
    drop(rustls::crypto::ring::default_provider().install_default());
}

/// Acquires and releases a lock, and returns its fence.
pub(crate) async fn cycle<B>(backend: &B, name: &str) -> syncguard::Result<u64>
where
    B: LockBackend<Fencing = Fenced>,
{
    let request = request(name);
    let outcome = backend.acquire(&request).await?;
    let AcquireOutcome::Acquired(lease) = outcome else { panic!("{outcome:?}") };
    let released = backend.release(&ReleaseRequest::new(request.lock_id())).await?;
    assert_eq!(released, ReleaseOutcome::Released);
    Ok(lease.fence().get())
}

/// Cuts the connection again and again, after a random number of bytes of a reply below `longest`:
/// no orphaned lock remains, and no reply is taken for another one.
pub(crate) async fn resets<B>(through: B, direct: &B, proxy: &Proxy, rounds: u32, longest: u64)
where
    B: LockBackend<Fencing = Fenced>,
{
    let options = LockOptions::default().timeout(Duration::from_secs(5));
    let locker = Locker::builder(through).options(options).build().expect("in a runtime");
    let mut random = 1_u64;
    let (mut cut, mut granted) = (0, 0);
    for round in 0..rounds {
        // The driver's handshake must not be cut.
        proxy.set(Fault::None);
        eventually("connected", async || locker.backend().is_locked(&key("k")).await.is_ok()).await;
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let place = usize::try_from((random >> 33) % longest).expect("small");
        proxy.set(Fault::ResetAfter(place));
        let key = key(&format!("k{}", round % 7));
        match locker.try_lock(&key).await {
            Ok(Some(guard)) => {
                granted += 1;
                let found = syncguard::diagnostics::get_by_key_raw(direct, &key).await;
                let found = found.expect("works").expect("what was granted is there");
                assert_eq!(found.lock_id, guard.lock_id(), "a reply was mixed up");
                assert_eq!(found.info.fence, Some(guard.fence()));
                drop(guard.release().await);
            }
            Ok(None) => {}
            Err(error) => {
                cut += 1;
                assert!(error.is_retryable(), "{error:?}");
            }
        }
    }
    proxy.set(Fault::None);
    locker.shutdown_within(Duration::from_mins(1)).await.expect("all undone");
    assert!(cut > rounds / 10 && granted > rounds / 10, "{cut} cut, {granted} granted");
    for number in 0..7 {
        let key = key(&format!("k{number}"));
        assert!(!direct.is_locked(&key).await.expect("works"), "an orphan at {key:?}");
    }
}

/// Waits until a condition holds, and panics with `what` if it does not.
pub(crate) async fn eventually(what: &str, mut check: impl AsyncFnMut() -> bool) {
    let started = Instant::now();
    while !check().await {
        assert!(started.elapsed() < Duration::from_secs(30), "{what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Returns a locker that relies on notifications: it does not poll, and it has no deadline at which
/// it would try once more.
pub(crate) fn waiter<B: LockBackend>(backend: B) -> Locker<B> {
    let much_later = Duration::from_hours(1);
    let retry = RetryPolicy::default().delay(much_later);
    let options = LockOptions::default().wait_forever().retry(retry).retry_on_error(true);
    Locker::builder(backend).options(options).poll_interval(much_later).build().expect("a runtime")
}

/// Waits for such a locker.
pub(crate) async fn woken(waiting: JoinHandle<syncguard::Result<()>>) {
    let woken = tokio::time::timeout(Duration::from_secs(20), waiting).await;
    woken.expect("woken, not polled").expect("no panic").expect("acquired");
}

/// Checks that a renewed lock survives when the path to the store silently dies while new
/// connections work, although the backend itself would wait for longer than the TTL.
pub(crate) async fn a_dead_path_costs_no_renewed_lock<B>(backend: B, proxy: &Proxy)
where
    B: LockBackend<Fencing = Fenced>,
{
    // Opens several connections, if there is a pool.
    let [a, b, c] = ["a", "b", "c"].map(|key| cycle(&backend, key));
    let (a, b, c) = tokio::join!(a, b, c);
    assert!(a.and(b).and(c).is_ok());
    let ttl = Ttl::new(Duration::from_secs(4)).expect("valid");
    let options = LockOptions::default().ttl(ttl).renew();
    let locker = Locker::builder(backend).options(options).build().expect("in a runtime");
    let guard = locker.lock("renewed").await.expect("free");
    proxy.strand();
    tokio::select! {
        reason = guard.lost() => panic!("{reason}"),
        () = tokio::time::sleep(Duration::from_secs(8)) => {}
    }
    assert_eq!(guard.release().await.expect("works"), ReleaseOutcome::Released);
}
