//! The outcomes and errors of the Firestore backend: expired or not found, the time of the expiry,
//! the context of errors, and lock ids that are in several documents or in an unexpected one.
#![cfg(feature = "firestore")]

mod firestore_channels;
mod firestore_raw;
mod servers;

use std::time::{Duration, SystemTime};

use firestore_channels::{Channels, RequestFault};
use firestore_raw::{Raw, fields, integer, number_of, string};
use servers::log::Log;
use servers::{grant, key, request};
use syncguard::backend::{
    AcquireOutcome, AcquireRequest, Capabilities, Clock, ExtendRequest, Fenced, Hint,
    ReleaseRequest, SystemClock, TimeAuthority,
};
use syncguard::firestore::FirestoreConfig;
use syncguard::firestore::tonic::Code;
use syncguard::{
    Error, ErrorCode, ExtendOutcome, FirestoreBackend, Key, LockBackend, LockId, NotHeldReason,
    ReleaseOutcome, Timestamp, Ttl,
};
use test_support::FirestoreEmulator;

async fn connect(emulator: &FirestoreEmulator) -> (FirestoreBackend, Channels) {
    let channels = Channels::new(emulator);
    let config = FirestoreConfig::new("test").emulator(emulator.host()).channel(channels.clone());
    (FirestoreBackend::connect(config).await.expect("connects"), channels)
}

fn now_ms() -> i64 {
    Timestamp::from(SystemTime::now()).as_millis().try_into().expect("soon")
}

/// Stores a lock in a document.
async fn plant(raw: &Raw, document: &str, lock_id: LockId, expires_in_ms: i64) {
    let planted = fields([
        ("lockId", string(lock_id.expose())),
        ("expiresAtMs", integer(now_ms() + expires_in_ms)),
        ("acquiredAtMs", integer(now_ms())),
        ("key", string(document)),
        ("fence", string("000000000000001")),
    ]);
    raw.set(&format!("locks/{document}"), planted).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_lock_is_expired_and_a_missing_one_is_not_found() {
    let Some(emulator) = FirestoreEmulator::start() else { return };
    let ((backend, _), raw) = (connect(&emulator).await, Raw::new(emulator.port()));
    let (dead, missing) = (request("dead").lock_id(), request("missing").lock_id());
    plant(&raw, "dead", dead, -1_001).await;
    for (lock_id, name, reason) in
        [(dead, "dead", NotHeldReason::Expired), (missing, "missing", NotHeldReason::NotFound)]
    {
        for hint in [Hint::default(), Hint::key(key(name)), Hint::key(key("another"))] {
            let extend = ExtendRequest::new(lock_id, Ttl::DEFAULT).with_hint(hint.clone());
            let extended = backend.extend(&extend).await.expect("works");
            assert!(
                matches!(extended, ExtendOutcome::NotHeld(why) if why == reason),
                "{extended:?}"
            );
            let release = ReleaseRequest::new(lock_id).with_hint(hint);
            let released = backend.release(&release).await.expect("works");
            assert_eq!(released, ReleaseOutcome::NotHeld(reason), "{name}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_expiry_is_computed_after_the_reads() {
    let Some(emulator) = FirestoreEmulator::start() else { return };
    let ((backend, channels), raw) = (connect(&emulator).await, Raw::new(emulator.port()));
    let slow = Duration::from_millis(800);
    let (before, ttl) = (SystemClock.now(), Ttl::DEFAULT);
    channels.have("BatchGetDocuments", RequestFault::Slow(slow), 1);
    let (held, lease) = grant(&backend, "k").await;
    assert!(lease.expires_at().since(before.expiry(ttl)) >= slow, "computed before the read");
    assert!(lease.expires_at() <= SystemClock.now().expiry(ttl));
    let stored = raw.get("locks/k").await.expect("there");
    let expires_at = i64::try_from(lease.expires_at().as_millis()).expect("soon");
    assert_eq!(number_of(&stored, "expiresAtMs"), expires_at);
    let before = SystemClock.now();
    channels.have("RunQuery", RequestFault::Slow(slow), 1);
    let extended = backend.extend(&ExtendRequest::new(held.lock_id(), ttl)).await.expect("works");
    let ExtendOutcome::Extended(extension) = extended else { panic!("{extended:?}") };
    assert!(extension.expires_at().since(before.expiry(ttl)) >= slow, "computed before the query");
    let stored = raw.get("locks/k").await.expect("there");
    let expires_at = i64::try_from(extension.expires_at().as_millis()).expect("soon");
    assert_eq!(number_of(&stored, "expiresAtMs"), expires_at);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn capabilities_and_error_contexts_are_correct() {
    let Some(emulator) = FirestoreEmulator::start() else { return };
    let (backend, channels) = connect(&emulator).await;
    let expected = Capabilities::new::<Fenced>("firestore", TimeAuthority::Client);
    assert_eq!(backend.capabilities(), expected);
    let check = |error: Error, operation: &str, key: Option<&Key>, lock_id: Option<LockId>| {
        assert_eq!(error.code(), ErrorCode::AuthFailed, "{error:?}");
        assert_eq!(error.backend(), Some("firestore"), "{error:?}");
        assert_eq!(error.operation(), Some(operation), "{error:?}");
        assert_eq!(error.key(), key, "{error:?}");
        assert!(error.lock_id() == lock_id, "{error:?}");
    };
    for method in ["BatchGetDocuments", "RunQuery", "ListDocuments", "Commit"] {
        channels.have(method, RequestFault::Refused(Code::PermissionDenied), u32::MAX);
    }
    let (key, request) = (key("k"), request("k"));
    let id = request.lock_id();
    let refused = "refused";
    let error = backend.acquire(&request).await.expect_err(refused);
    check(error, "acquire", Some(&key), None);
    let error = backend.is_locked(&key).await.expect_err(refused);
    check(error, "is_locked", Some(&key), None);
    let error = backend.lookup_key(&key).await.expect_err(refused);
    check(error, "lookup", Some(&key), None);
    let error = backend.lookup_id(&id).await.expect_err(refused);
    check(error, "lookup", None, Some(id));
    let error = backend.extend(&ExtendRequest::new(id, Ttl::DEFAULT)).await.expect_err(refused);
    check(error, "extend", None, Some(id));
    let error = backend.release(&ReleaseRequest::new(id)).await.expect_err(refused);
    check(error, "release", None, Some(id));
    let admin = backend.admin().expect("it has one");
    check(admin.list(None).await.expect_err(refused), "list", None, None);
    check(admin.findings().await.expect_err(refused), "findings", None, None);
    let config = FirestoreConfig::new("test").emulator(emulator.host()).channel(channels.clone());
    let error = FirestoreBackend::connect(config).await.expect_err(refused);
    check(error, "connect", None, None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_that_a_query_returns_by_mistake_is_not_changed() {
    let Some(emulator) = FirestoreEmulator::start() else { return };
    let (backend, channels) = connect(&emulator).await;
    let raw = Raw::new(emulator.port());
    let (theirs, _) = grant(&backend, "theirs").await;
    let ours = request("ours").lock_id();
    let before = raw.get("locks/theirs").await.expect("there");
    channels.swap(ours, theirs.lock_id());
    let released = backend.release(&ReleaseRequest::new(ours)).await.expect("works");
    assert_eq!(released, ReleaseOutcome::NotHeld(NotHeldReason::NotFound));
    let extended = backend.extend(&ExtendRequest::new(ours, Ttl::DEFAULT)).await.expect("works");
    assert!(matches!(extended, ExtendOutcome::NotHeld(NotHeldReason::NotFound)), "{extended:?}");
    assert!(backend.lookup_id(&ours).await.expect("works").is_none());
    assert_eq!(raw.get("locks/theirs").await.expect("still there"), before);
}

#[tokio::test]
async fn an_id_in_several_documents_logs_a_warning_without_key_or_id() {
    let Some(emulator) = FirestoreEmulator::start() else { return };
    let log = Log::default();
    // Everything in this test runs on this thread.
    let _log = tracing::subscriber::set_default(log.clone());
    let ((backend, _), raw) = (connect(&emulator).await, Raw::new(emulator.port()));
    let id = request("any").lock_id();
    let warnings = || {
        let logged = log.take();
        let lines: Vec<&str> =
            logged.lines().filter(|line| line.contains("several documents")).collect();
        for line in &lines {
            assert!(line.starts_with("WARN") && line.contains("documents=2"), "{line}");
            assert!(!line.contains("canary") && !line.contains(id.expose()), "{line}");
        }
        lines.len()
    };
    plant(&raw, "canary-1", id, 60_000).await;
    assert!(backend.lookup_id(&id).await.expect("works").is_some());
    assert_eq!(warnings(), 0, "one document is normal");
    plant(&raw, "canary-2", id, 60_000).await;
    assert!(backend.lookup_id(&id).await.expect("works").is_some());
    assert_eq!(warnings(), 1);
    let released = backend.release(&ReleaseRequest::new(id)).await.expect("works");
    assert_eq!(released, ReleaseOutcome::NotHeld(NotHeldReason::Unknown));
    assert_eq!(warnings(), 1);
    let extended = backend.extend(&ExtendRequest::new(id, Ttl::DEFAULT)).await.expect("works");
    assert!(matches!(extended, ExtendOutcome::NotHeld(NotHeldReason::Unknown)), "{extended:?}");
    assert_eq!(warnings(), 1);
}

/// The one exception to "a hint never changes a result" (ADR 024).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hint_selects_one_of_two_live_documents_with_the_same_id() {
    let Some(emulator) = FirestoreEmulator::start() else { return };
    let ((backend, _), raw) = (connect(&emulator).await, Raw::new(emulator.port()));
    let request = AcquireRequest::new(key("d0"), Ttl::DEFAULT).expect("randomness");
    let AcquireOutcome::Acquired(lease) = backend.acquire(&request).await.expect("works") else {
        panic!("it is free")
    };
    let id = request.lock_id();
    plant(&raw, "d1", id, 60_000).await;
    let release = async |hint: Hint| {
        backend.release(&ReleaseRequest::new(id).with_hint(hint)).await.expect("works")
    };
    let left = async || {
        let found = raw.find(id.expose(), false).await.expect("works").0;
        let mut names: Vec<String> = found.into_iter().map(|(path, _)| path).collect();
        names.sort();
        names
    };
    // Without a hint, or with one that leads to neither, it is unknown which one is meant.
    for hint in [Hint::default(), Hint::key(key("d9"))] {
        assert_eq!(release(hint).await, ReleaseOutcome::NotHeld(NotHeldReason::Unknown));
        assert_eq!(left().await, ["locks/d0", "locks/d1"]);
    }
    // A hint or a receipt selects one of them, and only that one is changed.
    assert_eq!(release(Hint::key(key("d1"))).await, ReleaseOutcome::Released);
    assert_eq!(left().await, ["locks/d0"]);
    plant(&raw, "d1", id, 60_000).await;
    let receipt = Hint::default().with_receipt(lease.receipt().cloned());
    assert_eq!(release(receipt).await, ReleaseOutcome::Released);
    assert_eq!(left().await, ["locks/d1"]);
}
