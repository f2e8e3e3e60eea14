//! The Firestore backend by clocks that are off: every client's own decides there.
#![cfg(feature = "firestore")]

mod firestore_raw;
mod servers;

use std::sync::Arc;
use std::time::{Duration, Instant};

use firestore_raw::Raw;
use servers::{eventually, grant, key, request};
use syncguard::firestore::FirestoreConfig;
use syncguard::{
    Acquire, AcquireRequest, Clock, ErrorCode, Extend, ExtendRequest, FirestoreBackend, Hint,
    LockBackend, Release, ReleaseRequest, SystemClock, Timestamp, Ttl,
};
use test_support::FirestoreEmulator;

fn config(emulator: &FirestoreEmulator) -> FirestoreConfig {
    FirestoreConfig::new("test").emulator(emulator.host())
}

/// A clock that is off.
#[derive(Debug)]
struct OffClock(i64);

impl Clock for OffClock {
    fn now(&self) -> Timestamp {
        let now = SystemClock.now().as_millis();
        Timestamp::from_millis(now.checked_add_signed(self.0).expect("in range"))
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clock_that_is_off_grants_nothing() {
    let Some(emulator) = FirestoreEmulator::start() else { return };
    let raw = Raw::new(emulator.port());
    for off in [-60_000, -1_000, 1_000, 60_000] {
        let off_clock = config(&emulator).clock(Arc::new(OffClock(off)));
        let backend = FirestoreBackend::connect(off_clock).await.expect("it may look");
        let error = backend.acquire(&request("k")).await.expect_err("the clock is off");
        assert_eq!(error.code(), ErrorCode::ServiceUnavailable, "{off}");
        assert!(error.to_string().contains("clock"), "{error}");
        assert!(!error.may_have_taken_effect());
        assert!(raw.get("locks/k").await.is_none());
        let advice = backend.inspector().expect("there is one").advice().await.expect("works");
        assert!(advice.iter().any(|advice| advice.subject() == "clock"), "{advice:?}");
    }
    // Enough patience makes it good enough; so does nobody looking.
    let off = || config(&emulator).clock(Arc::new(OffClock(-1_000)));
    let seconds = Duration::from_secs;
    for config in [off().clock_limits(seconds(1), seconds(5)), off().without_clock_check()] {
        let backend = FirestoreBackend::connect(config).await.expect("connects");
        let (request, lease) = grant(&backend, "k").await;
        // What is held can be given back, whatever the clock says by now.
        let strict = FirestoreBackend::connect(off()).await.expect("connects");
        let extend = ExtendRequest::new(request.lock_id(), Ttl::DEFAULT);
        let error = strict.extend(&extend).await.expect_err("the clock is off");
        assert_eq!(error.code(), ErrorCode::ServiceUnavailable);
        let hint = Hint::key(key("k")).with_receipt(lease.receipt().cloned());
        let release = ReleaseRequest::new(request.lock_id()).with_hint(hint);
        assert_eq!(strict.release(&release).await.expect("works"), Release::Released);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clock_that_is_off_cleans_nothing_up() {
    let Some(emulator) = FirestoreEmulator::start() else { return };
    let backend = FirestoreBackend::connect(config(&emulator)).await.expect("connects");
    grant(&backend, "k").await;
    let ahead = || config(&emulator).clock(Arc::new(OffClock(60_000))).cleanup_in_is_locked(true);
    let strict = FirestoreBackend::connect(ahead()).await.expect("connects");
    assert!(!strict.is_locked(&key("k")).await.expect("works"), "by its clock it is dead");
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(backend.is_locked(&key("k")).await.expect("works"), "and it is not");
    // Without the check it does what it was told.
    let blind = FirestoreBackend::connect(ahead().without_clock_check()).await.expect("connects");
    assert!(!blind.is_locked(&key("k")).await.expect("works"));
    eventually("it is cleaned up", async || !backend.is_locked(&key("k")).await.expect("works"))
        .await;
}

/// One takes a lock for a moment and stalls; another takes it over as soon as its clock allows.
async fn take_over(emulator: &FirestoreEmulator, ours: i64, theirs: i64) {
    let ttl_ms = 300;
    let connect = async |off: i64| {
        let config = config(emulator).clock(Arc::new(OffClock(off))).without_clock_check();
        FirestoreBackend::connect(config).await.expect("connects")
    };
    let (first, second) = (connect(ours).await, connect(theirs).await);
    let name = format!("clocks {ours} {theirs}");
    let ttl = Ttl::new(Duration::from_millis(ttl_ms)).expect("valid");
    let request = AcquireRequest::new(key(&name), ttl).expect("randomness");
    let sent = Instant::now();
    let outcome = first.acquire(&request).await.expect("works");
    let Acquire::Acquired(held) = outcome else { panic!("{outcome:?}") };
    let taken = loop {
        let outcome = second.acquire(&self::request(&name)).await.expect("works");
        match outcome {
            Acquire::Acquired(lease) => break lease,
            _ => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    };
    // Within the tolerance the first one's time was over by then. Beyond it the fence still tells the
    // two apart, and the first one's lock is gone.
    if (theirs - ours).abs() <= 1000 {
        assert!(sent.elapsed() >= Duration::from_millis(ttl_ms), "{ours} {theirs}");
    }
    assert!(taken.fence() > held.fence(), "{ours} {theirs}");
    let extend = ExtendRequest::new(request.lock_id(), ttl);
    let extended = first.extend(&extend).await.expect("works");
    assert!(matches!(extended, Extend::NotHeld(_)), "{ours} {theirs}: {extended:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clocks_that_differ_within_the_tolerance_never_make_two_holders() {
    let Some(emulator) = FirestoreEmulator::start() else { return };
    let emulator = &emulator;
    tokio::join!(
        take_over(emulator, 0, 0),
        take_over(emulator, -5_000, -5_000),
        take_over(emulator, 500, -500),
        take_over(emulator, -500, 500),
        take_over(emulator, 0, 1_000),
        take_over(emulator, 5_000, 4_000),
        take_over(emulator, 0, 2_000),
        take_over(emulator, -2_500, 2_500),
        take_over(emulator, 2_500, -2_500),
        take_over(emulator, -5_000, 5_000),
    );
}
