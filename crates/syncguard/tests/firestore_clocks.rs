//! The Firestore backend on machines whose clock is off. There, each client's own clock decides.
#![cfg(feature = "firestore")]

mod firestore_channels;
mod firestore_raw;
mod servers;

use std::sync::Arc;
use std::time::{Duration, Instant};

use firestore_channels::{Channels, RequestFault};
use firestore_raw::Raw;
use servers::{eventually, grant, key, request};
use syncguard::backend::{
    AcquireOutcome, AcquireRequest, Clock, ExtendRequest, Hint, Lease, ReleaseRequest, SystemClock,
};
use syncguard::firestore::FirestoreConfig;
use syncguard::firestore::tonic::Code;
use syncguard::{
    ErrorCode, ExtendOutcome, FirestoreBackend, LockBackend, LockOptions, Locker, NotHeldReason,
    ReleaseOutcome, Timestamp, Ttl,
};
use test_support::FirestoreEmulator;

fn config(emulator: &FirestoreEmulator) -> FirestoreConfig {
    FirestoreConfig::new("test").emulator(emulator.host())
}

/// A clock that is off by some milliseconds.
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
        let findings = backend.admin().expect("there is one").findings().await.expect("works");
        assert!(findings.iter().any(|finding| finding.subject() == "clock"), "{findings:?}");
    }
    // Larger limits accept the clock, and so does no check at all.
    let off = || config(&emulator).clock(Arc::new(OffClock(-1_000)));
    let seconds = Duration::from_secs;
    for config in [off().clock_limits(seconds(1), seconds(5)), off().without_clock_check()] {
        let backend = FirestoreBackend::connect(config).await.expect("connects");
        let (request, lease) = grant(&backend, "k").await;
        // A held lock can be released whatever the clock shows.
        let strict = FirestoreBackend::connect(off()).await.expect("connects");
        let extend = ExtendRequest::new(request.lock_id(), Ttl::DEFAULT);
        let error = strict.extend(&extend).await.expect_err("the clock is off");
        assert_eq!(error.code(), ErrorCode::ServiceUnavailable);
        let hint = Hint::key(key("k")).with_receipt(lease.receipt().cloned());
        let release = ReleaseRequest::new(request.lock_id()).with_hint(hint);
        assert_eq!(strict.release(&release).await.expect("works"), ReleaseOutcome::Released);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clock_that_is_off_cleans_nothing_up() {
    let Some(emulator) = FirestoreEmulator::start() else { return };
    let backend = FirestoreBackend::connect(config(&emulator)).await.expect("connects");
    grant(&backend, "k").await;
    let ahead = || config(&emulator).clock(Arc::new(OffClock(60_000))).cleanup_in_is_locked(true);
    let strict = FirestoreBackend::connect(ahead()).await.expect("connects");
    assert!(!strict.is_locked(&key("k")).await.expect("works"), "expired by its clock");
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(backend.is_locked(&key("k")).await.expect("works"), "but not deleted");
    // Without the check, the lock is deleted.
    let blind = FirestoreBackend::connect(ahead().without_clock_check()).await.expect("connects");
    assert!(!blind.is_locked(&key("k")).await.expect("works"));
    eventually("it is cleaned up", async || !backend.is_locked(&key("k")).await.expect("works"))
        .await;
}

/// One client takes a lock with a short TTL and stalls; another takes it over as soon as its own
/// clock allows.
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
    let AcquireOutcome::Acquired(held) = outcome else { panic!("{outcome:?}") };
    let taken = loop {
        let outcome = second.acquire(&self::request(&name)).await.expect("works");
        match outcome {
            AcquireOutcome::Acquired(lease) => break lease,
            _ => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    };
    // Within the tolerance, the first client's TTL is over by then. Beyond it, the fence still
    // distinguishes the two, and the first client has lost its lock.
    if (theirs - ours).abs() <= 1000 {
        assert!(sent.elapsed() >= Duration::from_millis(ttl_ms), "{ours} {theirs}");
    }
    assert!(taken.fence() > held.fence(), "{ours} {theirs}");
    let extend = ExtendRequest::new(request.lock_id(), ttl);
    let extended = first.extend(&extend).await.expect("works");
    assert!(matches!(extended, ExtendOutcome::NotHeld(_)), "{ours} {theirs}: {extended:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clocks_within_the_tolerance_never_allow_two_holders() {
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

/// Connects a backend whose server's time can jump ahead, as it does for a machine that was paused.
async fn pausable(emulator: &FirestoreEmulator) -> (FirestoreBackend, Channels) {
    let channels = Channels::new(emulator);
    let config = config(emulator).channel(channels.clone());
    let backend = FirestoreBackend::connect(config).await.expect("connects");
    // The first response includes the time to connect, so it is imprecise.
    assert!(!backend.is_locked(&key("any")).await.expect("works"));
    (backend, channels)
}

fn extend(request: &AcquireRequest, lease: &Lease) -> ExtendRequest {
    let hint = Hint::key(request.key().clone()).with_receipt(lease.receipt().cloned());
    ExtendRequest::new(request.lock_id(), Ttl::DEFAULT).with_hint(hint)
}

fn is_expired(extended: &ExtendOutcome) -> bool {
    matches!(extended, ExtendOutcome::NotHeld(NotHeldReason::Expired))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_extend_after_a_pause_of_all_clocks_reports_the_expiry() {
    let Some(emulator) = FirestoreEmulator::start() else { return };
    let raw = Raw::new(emulator.port());
    // The lock has expired by the time of the commit, but by no local clock. In the first case, the
    // extend revives the lock, which is then deleted; in the second case, it stays expired.
    for (pause_secs, is_left) in [(35, false), (95, true)] {
        let (backend, channels) = pausable(&emulator).await;
        let name = format!("paused {pause_secs}");
        let request = AcquireRequest::new(key(&name), Ttl::DEFAULT).expect("randomness");
        let AcquireOutcome::Acquired(lease) = backend.acquire(&request).await.expect("works")
        else {
            panic!("it is free")
        };
        channels.pause_for(pause_secs);
        let ttl = Ttl::new(Duration::from_mins(1)).expect("valid");
        let extend = ExtendRequest::new(request.lock_id(), ttl)
            .with_hint(Hint::key(key(&name)).with_receipt(lease.receipt().cloned()));
        let extended = backend.extend(&extend).await.expect("works");
        assert!(is_expired(&extended), "{pause_secs}: {extended:?}");
        assert_eq!(raw.get(&format!("locks/{name}")).await.is_some(), is_left, "{pause_secs}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn extends_after_a_short_pause_of_all_clocks_fail_until_the_lock_expires() {
    let Some(emulator) = FirestoreEmulator::start() else { return };
    let (backend, channels) = pausable(&emulator).await;
    let (request, lease) = grant(&backend, "k").await;
    // The lock is live, but for less time than the holder would believe.
    channels.pause_for(20);
    for is_first in [true, false] {
        let error = backend.extend(&extend(&request, &lease)).await.expect_err("the clock is off");
        assert_eq!(error.code(), ErrorCode::ServiceUnavailable, "{error:?}");
        assert!(error.to_string().contains("clock"), "{error}");
        // The first extend wrote before it noticed the pause.
        assert_eq!(error.may_have_taken_effect(), is_first, "{error:?}");
    }
    // The lock has expired by the server's time, but by no local clock.
    channels.pause_for(20);
    let extended = backend.extend(&extend(&request, &lease)).await.expect("expired");
    assert!(is_expired(&extended), "{extended:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guard_reports_its_loss_after_a_pause_of_all_clocks() {
    let Some(emulator) = FirestoreEmulator::start() else { return };
    let (backend, channels) = pausable(&emulator).await;
    // The first renewal is after 8 s. A guard that believed it would report the loss after 32 s.
    let ttl = Ttl::new(Duration::from_secs(24)).expect("valid");
    let options = LockOptions::default().ttl(ttl).renew();
    let locker = Locker::builder(backend).options(options).build().expect("a runtime");
    let guard = locker.lock("k").await.expect("free");
    channels.pause_for(60);
    let lost = tokio::time::timeout(Duration::from_secs(20), guard.lost()).await;
    lost.expect("the loss is reported");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_grant_after_a_pause_of_all_clocks_is_an_error() {
    let Some(emulator) = FirestoreEmulator::start() else { return };
    // The pause is between the read and the commit, so only the commit reveals it.
    let (backend, channels) = pausable(&emulator).await;
    channels.pause_before_next("Commit", 60);
    let error = backend.acquire(&request("a")).await.expect_err("the clock is off");
    assert_eq!(error.code(), ErrorCode::ServiceUnavailable, "{error:?}");
    assert!(error.may_have_taken_effect(), "{error:?}");
    // The response is lost, and the next read finds the lock and reveals the pause.
    let (backend, channels) = pausable(&emulator).await;
    channels.pause_before_next("Commit", 60);
    channels.have("Commit", RequestFault::Lost(Code::Unavailable), 1);
    let error = backend.acquire(&request("b")).await.expect_err("the clock is off");
    assert!(error.may_have_taken_effect(), "{error:?}");
    // A replay finds its lock, and the read reveals the pause.
    let (backend, channels) = pausable(&emulator).await;
    let (replayed, _) = grant(&backend, "c").await;
    channels.pause_for(60);
    let error = backend.acquire(&replayed).await.expect_err("the clock is off");
    assert_eq!(error.code(), ErrorCode::ServiceUnavailable, "{error:?}");
    assert!(error.may_have_taken_effect(), "{error:?}");
    // The same for an extend whose response is lost.
    let (backend, channels) = pausable(&emulator).await;
    let (held, lease) = grant(&backend, "d").await;
    channels.pause_before_next("Commit", 60);
    channels.have("Commit", RequestFault::Lost(Code::Unavailable), 1);
    let error = backend.extend(&extend(&held, &lease)).await.expect_err("the clock is off");
    assert!(error.may_have_taken_effect(), "{error:?}");
}
