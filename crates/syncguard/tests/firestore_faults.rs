//! The Firestore backend under faults: refused and lost requests, a killed emulator, streams that
//! are cut, missing credentials and invalid input. Also the number of requests of each operation.
#![cfg(feature = "firestore")]

mod firestore_channels;
mod firestore_raw;
mod servers;

use std::time::{Duration, Instant};

use firestore_channels::{Channels, RequestFault};
use firestore_raw::{Raw, fields, string, text_of};
use servers::{grant, install_cryptography, key, request, resets, waiter, woken};
use syncguard::backend::{AcquireOutcome, AcquireRequest, ExtendRequest, Hint, ReleaseRequest};
use syncguard::firestore::google_cloud_auth::credentials::mds;
use syncguard::firestore::tonic::Code;
use syncguard::firestore::{FencedCollection, FirestoreConfig};
use syncguard::{
    Error, ErrorCode, ExtendOutcome, Fence, FirestoreBackend, LockBackend, LockOptions, Locker,
    ReleaseOutcome, Ttl,
};
use test_support::{Fault, FirestoreEmulator, Proxy};

fn config(emulator: &FirestoreEmulator) -> FirestoreConfig {
    FirestoreConfig::new("test").emulator(emulator.host()).response_timeout(Duration::from_secs(2))
}

async fn connect(emulator: &FirestoreEmulator) -> (FirestoreBackend, Channels) {
    let channels = Channels::new(emulator);
    let config = config(emulator).channel(channels.clone());
    let backend = FirestoreBackend::connect(config).await.expect("connects");
    channels.seen();
    (backend, channels)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn operations_send_the_documented_number_of_requests() {
    let Some(emulator) = FirestoreEmulator::start() else { return };
    let (backend, channels) = connect(&emulator).await;
    let is = |expected: &[(&str, u32)]| {
        let seen = channels.seen();
        let expected: Vec<_> = expected.iter().map(|(name, n)| ((*name).to_owned(), *n)).collect();
        assert_eq!(seen, expected);
    };
    let read_and_commit = [("BatchGetDocuments", 1), ("Commit", 1)];
    let query_and_commit = [("Commit", 1), ("RunQuery", 1)];
    // Through the guard, whose receipt has the version.
    let locker = Locker::new(backend.clone()).expect("a runtime");
    let guard = locker.lock("guard").await.expect("free");
    is(&read_and_commit);
    for _ in 0..2 {
        let extended = guard.extend(Ttl::DEFAULT).await.expect("works");
        assert!(matches!(extended, ExtendOutcome::Extended(_)), "{extended:?}");
        is(&[("Commit", 1)]);
    }
    guard.release().await.expect("held");
    is(&[("Commit", 1)]);
    // By the key, and by the id alone.
    for (hint, expected) in
        [(Hint::key(key("k")), read_and_commit), (Hint::default(), query_and_commit)]
    {
        let (request, _) = grant(&backend, "k").await;
        is(&read_and_commit);
        let id = request.lock_id();
        let extend = ExtendRequest::new(id, Ttl::DEFAULT).with_hint(hint.clone());
        assert!(matches!(
            backend.extend(&extend).await.expect("works"),
            ExtendOutcome::Extended(_)
        ));
        is(&expected);
        assert!(backend.is_locked(&key("k")).await.expect("works"));
        is(&[("BatchGetDocuments", 1)]);
        assert!(backend.lookup_key(&key("k")).await.expect("works").is_some());
        is(&[("BatchGetDocuments", 1)]);
        assert!(backend.lookup_id(&id).await.expect("works").is_some());
        is(&[("RunQuery", 1)]);
        let contended = backend.acquire(&self::request("k")).await.expect("works");
        assert!(matches!(contended, AcquireOutcome::Contended { .. }));
        is(&[("BatchGetDocuments", 1)]);
        let release = ReleaseRequest::new(id).with_hint(hint);
        assert_eq!(backend.release(&release).await.expect("works"), ReleaseOutcome::Released);
        is(&expected);
        // Without a lock, there is no commit.
        let again = ReleaseRequest::new(id);
        assert!(matches!(
            backend.release(&again).await.expect("works"),
            ReleaseOutcome::NotHeld(_)
        ));
        is(&[("RunQuery", 1)]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refused_requests_have_their_codes_and_change_nothing() {
    let Some(emulator) = FirestoreEmulator::start() else { return };
    let (backend, channels) = connect(&emulator).await;
    let raw = Raw::new(emulator.port());
    let table = [
        (Code::ResourceExhausted, ErrorCode::RateLimited),
        (Code::Unavailable, ErrorCode::ServiceUnavailable),
        (Code::Internal, ErrorCode::ServiceUnavailable),
        (Code::DeadlineExceeded, ErrorCode::NetworkTimeout),
        (Code::PermissionDenied, ErrorCode::AuthFailed),
        (Code::Unauthenticated, ErrorCode::AuthFailed),
        (Code::InvalidArgument, ErrorCode::InvalidArgument),
        (Code::DataLoss, ErrorCode::Internal),
        (Code::Unimplemented, ErrorCode::Internal),
    ];
    let only_of_reads = [
        (Code::Aborted, ErrorCode::ServiceUnavailable),
        (Code::NotFound, ErrorCode::InvalidArgument),
        (Code::FailedPrecondition, ErrorCode::InvalidArgument),
    ];
    let (held, lease) = grant(&backend, "held").await;
    let by_id = ReleaseRequest::new(held.lock_id());
    let hint = Hint::key(key("held")).with_receipt(lease.receipt().cloned());
    let check = |error: Error, expected: ErrorCode, is_read: bool| {
        assert_eq!(error.code(), expected, "{error:?}");
        let is_unknown =
            [ErrorCode::ServiceUnavailable, ErrorCode::NetworkTimeout, ErrorCode::Internal]
                .contains(&expected);
        assert_eq!(error.may_have_taken_effect(), is_unknown && !is_read, "{error:?}");
        let shown = format!("{error} {error:?}");
        assert!(!shown.contains("canary"), "{shown}");
    };
    for (code, expected) in table.into_iter().chain(only_of_reads) {
        channels.have("BatchGetDocuments", RequestFault::Refused(code), 1);
        check(backend.acquire(&request("a")).await.expect_err("refused"), expected, true);
        channels.have("BatchGetDocuments", RequestFault::Refused(code), 1);
        check(backend.is_locked(&key("a")).await.expect_err("refused"), expected, true);
        channels.have("RunQuery", RequestFault::Refused(code), 1);
        check(backend.release(&by_id).await.expect_err("refused"), expected, true);
    }
    for (code, expected) in table {
        channels.have("Commit", RequestFault::Refused(code), 1);
        check(backend.acquire(&request("a")).await.expect_err("refused"), expected, false);
        channels.have("Commit", RequestFault::Refused(code), 1);
        let release = ReleaseRequest::new(held.lock_id()).with_hint(hint.clone());
        check(backend.release(&release).await.expect_err("refused"), expected, false);
        channels.have("Commit", RequestFault::Refused(code), 1);
        let extend = ExtendRequest::new(held.lock_id(), Ttl::DEFAULT).with_hint(hint.clone());
        check(backend.extend(&extend).await.expect_err("refused"), expected, false);
    }
    assert!(raw.get("locks/a").await.is_none());
    assert!(raw.get("fence_counters/fence:a").await.is_none());
    assert!(backend.is_locked(&key("held")).await.expect("works"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_response_is_recovered_by_a_read() {
    let Some(emulator) = FirestoreEmulator::start() else { return };
    let (backend, channels) = connect(&emulator).await;
    let raw = Raw::new(emulator.port());
    let mut last = 0;
    // Even after `Aborted`, the commit may have taken effect.
    for code in [Code::Unavailable, Code::DeadlineExceeded, Code::Internal, Code::Aborted] {
        channels.have("Commit", RequestFault::Lost(code), 1);
        let (request, lease) = grant(&backend, "k").await;
        assert_eq!(lease.fence().get(), last + 1, "{code:?}");
        last += 1;
        let hint = Hint::key(key("k")).with_receipt(lease.receipt().cloned());
        channels.have("Commit", RequestFault::Lost(code), 1);
        let extend = ExtendRequest::new(request.lock_id(), Ttl::DEFAULT).with_hint(hint);
        let outcome = backend.extend(&extend).await.expect("works");
        let ExtendOutcome::Extended(extension) = outcome else { panic!("{outcome:?}") };
        let hint = Hint::key(key("k")).with_receipt(extension.receipt().cloned());
        channels.have("Commit", RequestFault::Lost(code), 1);
        let release = ReleaseRequest::new(request.lock_id()).with_hint(hint);
        let released = backend.release(&release).await.expect("works");
        // After a conflict, it is unknown which client deleted the lock.
        let is_reported = code != Code::Aborted;
        assert_eq!(released == ReleaseOutcome::Released, is_reported, "{released:?}");
        assert!(raw.get("locks/k").await.is_none());
        let counter = raw.get("fence_counters/fence:k").await.expect("there");
        assert_eq!(text_of(&counter, "fence"), format!("{last:015}"));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fenced_commit_whose_answer_is_lost_is_not_applied_twice() {
    let Some(emulator) = FirestoreEmulator::start() else { return };
    let (backend, channels) = connect(&emulator).await;
    let fenced = FencedCollection::new("fenced").expect("valid");
    let lock = |fence| (key("a"), Fence::new(fence).expect("valid"));
    let write = |document: &str| {
        let mut write = firestore_raw::set(document, fields([("text", string("x"))]));
        // Applied a second time, it fails.
        let condition = syncguard::firestore::api::precondition::ConditionType::Exists(false);
        write.current_document =
            Some(syncguard::firestore::api::Precondition { condition_type: Some(condition) });
        vec![write]
    };
    channels.have("Commit", RequestFault::Lost(Code::Aborted), 1);
    fenced.commit(&backend, &lock(7), write("documents/1")).await.expect("it took effect");
    let counts = [("BatchGetDocuments", 2), ("Commit", 1)];
    assert_eq!(channels.seen(), counts.map(|(name, count)| (name.to_owned(), count)));
    // A conflict that had no effect is retried.
    channels.have("Commit", RequestFault::Refused(Code::Aborted), 1);
    fenced.commit(&backend, &lock(8), write("documents/2")).await.expect("written");
    // If the read after a conflict fails, nothing is known.
    channels.have("Commit", RequestFault::LostAndLast(Code::Aborted), 1);
    let error = fenced.commit(&backend, &lock(9), write("documents/3")).await;
    assert!(error.expect_err("unknown").may_have_taken_effect());
    // A precondition that fails, and a stale fence, have no effect.
    let error = fenced.commit(&backend, &lock(9), write("documents/3")).await.expect_err("exists");
    assert_eq!(error.code(), ErrorCode::InvalidArgument);
    assert!(!error.may_have_taken_effect());
    let error = fenced.commit(&backend, &lock(8), write("documents/4")).await.expect_err("stale");
    assert!(error.is_stale_fence() && !error.may_have_taken_effect());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hot_key_is_contended_not_an_error() {
    let Some(emulator) = FirestoreEmulator::start() else { return };
    let (backend, channels) = connect(&emulator).await;
    // A few conflicts are retried.
    channels.have("Commit", RequestFault::Refused(Code::Aborted), 3);
    let (request, lease) = grant(&backend, "hot").await;
    // With too many, an acquire is contended, and a release fails.
    channels.have("Commit", RequestFault::Refused(Code::Aborted), u32::MAX);
    let outcome = backend.acquire(&self::request("other")).await.expect("works");
    assert!(matches!(outcome, AcquireOutcome::Contended { .. }), "{outcome:?}");
    let hint = Hint::key(key("hot")).with_receipt(lease.receipt().cloned());
    let release = ReleaseRequest::new(request.lock_id()).with_hint(hint);
    let error = backend.release(&release).await.expect_err("conflicts");
    assert_eq!(error.code(), ErrorCode::ServiceUnavailable);
    channels.behave();
    assert_eq!(backend.release(&release).await.expect("works"), ReleaseOutcome::Released);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refusal_without_a_conflict_is_an_error() {
    let Some(emulator) = FirestoreEmulator::start() else { return };
    let (backend, channels) = connect(&emulator).await;
    let (held, _) = grant(&backend, "held").await;
    for (code, expected) in [
        (Code::FailedPrecondition, ErrorCode::InvalidArgument),
        (Code::NotFound, ErrorCode::InvalidArgument),
        (Code::AlreadyExists, ErrorCode::Internal),
    ] {
        // The commit is refused although no document has changed.
        channels.have("Commit", RequestFault::Refused(code), u32::MAX);
        let error = backend.acquire(&request("free")).await.expect_err("refused");
        assert_eq!(error.code(), expected, "{code:?}");
        let release = ReleaseRequest::new(held.lock_id());
        let error = backend.release(&release).await.expect_err("refused");
        assert_eq!(error.code(), expected, "{code:?}");
        channels.behave();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_outcome_that_cannot_be_verified_stays_unknown() {
    let Some(emulator) = FirestoreEmulator::start() else { return };
    let (backend, channels) = connect(&emulator).await;
    // The lock is granted, but expires before it is read.
    channels.have("Commit", RequestFault::Late(Code::Unavailable), 1);
    let ttl = Ttl::new(Duration::from_millis(1)).expect("valid");
    let request = AcquireRequest::new(key("k"), ttl).expect("randomness");
    let error = backend.acquire(&request).await.expect_err("unknown");
    assert_eq!(error.code(), ErrorCode::ServiceUnavailable, "{error:?}");
    assert!(error.may_have_taken_effect());
    // The same with a conflict instead: it counts as contended, and a new request gets the lock.
    channels.have("Commit", RequestFault::Late(Code::Aborted), 1);
    let request = AcquireRequest::new(key("k"), ttl).expect("randomness");
    let outcome = backend.acquire(&request).await.expect("works");
    assert!(matches!(outcome, AcquireOutcome::Contended { .. }), "{outcome:?}");
    assert!(matches!(backend.acquire(&request).await.expect("works"), AcquireOutcome::AlreadyUsed));
    // The commit took effect despite a conflict, and the read fails.
    channels.have("Commit", RequestFault::LostAndLast(Code::Aborted), 1);
    let error = backend.acquire(&self::request("then")).await.expect_err("unknown");
    assert!(error.may_have_taken_effect(), "{error:?}");
    assert!(backend.is_locked(&key("then")).await.expect("works"), "it took effect");
    // The same with the last conflict that is retried.
    channels.have("Commit", RequestFault::Refused(Code::Aborted), 5);
    channels.have("Commit", RequestFault::LostAndLast(Code::Aborted), 1);
    let error = backend.acquire(&self::request("last")).await.expect_err("unknown");
    assert_eq!(error.code(), ErrorCode::ServiceUnavailable, "{error:?}");
    assert!(error.may_have_taken_effect(), "{error:?}");
    assert!(backend.is_locked(&key("last")).await.expect("works"), "it took effect");
    // If the read succeeds, it finds the lock.
    channels.have("Commit", RequestFault::Refused(Code::Aborted), 5);
    channels.have("Commit", RequestFault::Lost(Code::Aborted), 1);
    grant(&backend, "found").await;
    // A release or an extend that ends with conflicts may have taken effect, and so may one whose
    // read after a conflict fails.
    let (held, lease) = grant(&backend, "conflicts").await;
    let hint = Hint::key(key("conflicts")).with_receipt(lease.receipt().cloned());
    let extend = ExtendRequest::new(held.lock_id(), Ttl::DEFAULT).with_hint(hint.clone());
    let release = ReleaseRequest::new(held.lock_id()).with_hint(hint);
    channels.have("Commit", RequestFault::Refused(Code::Aborted), 7);
    let error = backend.extend(&extend).await.expect_err("conflicts");
    assert!(error.may_have_taken_effect(), "{error:?}");
    channels.have("Commit", RequestFault::LostAndLast(Code::Aborted), 1);
    let error = backend.extend(&extend).await.expect_err("unknown");
    assert!(error.may_have_taken_effect(), "{error:?}");
    channels.have("Commit", RequestFault::Refused(Code::Aborted), 7);
    let error = backend.release(&release).await.expect_err("conflicts");
    assert!(error.may_have_taken_effect(), "{error:?}");
    // The response is lost, and the read fails too.
    let (held, lease) = grant(&backend, "held").await;
    let hint = Hint::key(key("held")).with_receipt(lease.receipt().cloned());
    channels.have("Commit", RequestFault::Lost(Code::Unavailable), 1);
    channels.have("BatchGetDocuments", RequestFault::Refused(Code::Unavailable), 1);
    let release = ReleaseRequest::new(held.lock_id()).with_hint(hint);
    let error = backend.release(&release).await.expect_err("unknown");
    assert!(error.may_have_taken_effect());
    assert!(!backend.is_locked(&key("held")).await.expect("works"), "it took effect");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_receipt_does_not_change_the_outcome() {
    let Some(emulator) = FirestoreEmulator::start() else { return };
    let (backend, _) = connect(&emulator).await;
    let (mine, lease) = grant(&backend, "mine").await;
    let (theirs, other) = grant(&backend, "theirs").await;
    let stale = Hint::key(key("mine")).with_receipt(lease.receipt().cloned());
    let wrong = Hint::key(key("mine")).with_receipt(other.receipt().cloned());
    // An extend without the receipt changes the version, so the receipt is out of date.
    let extend = ExtendRequest::new(mine.lock_id(), Ttl::DEFAULT);
    assert!(matches!(backend.extend(&extend).await.expect("works"), ExtendOutcome::Extended(_)));
    let extend = extend.with_hint(stale);
    assert!(matches!(backend.extend(&extend).await.expect("works"), ExtendOutcome::Extended(_)));
    let release = ReleaseRequest::new(mine.lock_id()).with_hint(wrong.clone());
    assert_eq!(backend.release(&release).await.expect("works"), ReleaseOutcome::Released);
    // The receipt of another lock does not give access to it.
    assert!(matches!(backend.release(&release).await.expect("works"), ReleaseOutcome::NotHeld(_)));
    assert!(backend.is_locked(&key("theirs")).await.expect("works"));
    let release = ReleaseRequest::new(theirs.lock_id());
    assert_eq!(backend.release(&release).await.expect("works"), ReleaseOutcome::Released);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_emulator_is_an_error_until_it_restarts() {
    let Some(mut emulator) = FirestoreEmulator::start() else { return };
    let backend = FirestoreBackend::connect(config(&emulator)).await.expect("connects");
    let options = LockOptions::default().timeout(Duration::from_secs(30)).retry_on_error(true);
    let locker = Locker::builder(backend.clone()).options(options).build().expect("a runtime");
    let guard = locker.lock("k").await.expect("free");
    let waiting = tokio::spawn({
        let locker = locker.clone();
        async move { locker.lock("k").await.map(|guard| guard.fence().get()) }
    });
    tokio::time::sleep(Duration::from_millis(200)).await;
    emulator.kill();
    for _ in 0..3 {
        let error = backend.acquire(&request("x")).await.expect_err("no emulator");
        assert_eq!(error.code(), ErrorCode::ServiceUnavailable, "{error:?}");
        assert!(!error.may_have_taken_effect());
    }
    drop(guard);
    // The emulator has lost its data, so the waiter gets the lock without a restart of the client.
    emulator.restart();
    assert_eq!(waiting.await.expect("no panic").expect("works"), 1);
    // Notifications work again on a new stream.
    wakes(&emulator, &backend).await;
}

/// Asserts that deleting a lock, by any client, wakes its waiter, and that nothing else does.
async fn wakes(emulator: &FirestoreEmulator, backend: &FirestoreBackend) {
    let raw = Raw::new(emulator.port());
    let waiter = waiter(backend.clone());
    for round in 0..3 {
        let name = format!("w{round}");
        let other = FirestoreBackend::connect(config(emulator)).await.expect("connects");
        let (held, _) = grant(&other, &name).await;
        let waiting = tokio::spawn({
            let (waiter, name) = (waiter.clone(), name.clone());
            async move { waiter.lock(name).await.map(|_guard| ()) }
        });
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert!(!waiting.is_finished());
        if round == 0 {
            // As the TypeScript implementation does.
            raw.delete(&format!("locks/{name}")).await;
        } else {
            let release = ReleaseRequest::new(held.lock_id());
            assert_eq!(other.release(&release).await.expect("works"), ReleaseOutcome::Released);
        }
        woken(waiting).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_that_is_cut_is_reopened() {
    let Some(emulator) = FirestoreEmulator::start() else { return };
    let proxy = Proxy::start(emulator.port()).await;
    let through = config(&emulator).emulator(format!("127.0.0.1:{}", proxy.port()));
    let backend = FirestoreBackend::connect(through).await.expect("connects");
    wakes(&emulator, &backend).await;
    let (held, _) = grant(&backend, "cut").await;
    let waiting = tokio::spawn({
        let waiter = waiter(backend.clone());
        async move { waiter.lock("cut").await.map(|_guard| ()) }
    });
    tokio::time::sleep(Duration::from_millis(300)).await;
    proxy.set(Fault::ResetAfter(0));
    drop(backend.is_locked(&key("cut")).await);
    proxy.set(Fault::None);
    // Whether the release comes before or after the stream is reopened, the waiter gets the lock
    // long before it would poll.
    let other = FirestoreBackend::connect(config(&emulator)).await.expect("connects");
    let release = ReleaseRequest::new(held.lock_id());
    assert_eq!(other.release(&release).await.expect("works"), ReleaseOutcome::Released);
    woken(waiting).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn resets_leave_no_orphan_and_mix_up_no_reply() {
    let Some(emulator) = FirestoreEmulator::start() else { return };
    let proxy = Proxy::start(emulator.port()).await;
    let direct = FirestoreBackend::connect(config(&emulator)).await.expect("connects");
    let through = config(&emulator).emulator(format!("127.0.0.1:{}", proxy.port()));
    let through = FirestoreBackend::connect(through).await.expect("connects");
    resets(through, &direct, &proxy, 120, 1000).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_black_hole_is_a_timeout() {
    let Some(emulator) = FirestoreEmulator::start() else { return };
    let proxy = Proxy::start(emulator.port()).await;
    let host = format!("127.0.0.1:{}", proxy.port());
    let limit = Duration::from_secs(1);
    let config = config(&emulator).emulator(host).response_timeout(limit);
    let backend = FirestoreBackend::connect(config).await.expect("connects");
    proxy.set(Fault::BlackHole);
    let started = Instant::now();
    let error = backend.acquire(&request("k")).await.expect_err("no answer");
    assert_eq!(error.code(), ErrorCode::NetworkTimeout, "{error:?}");
    assert!(started.elapsed() >= limit);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_that_cannot_be_document_ids_work_like_any_other() {
    let Some(emulator) = FirestoreEmulator::start() else { return };
    let backend = FirestoreBackend::connect(config(&emulator)).await.expect("connects");
    let odd =
        ["users/42", "/", "a/b/c", "a//b", "/a", "a/", ".", "..", "__x__", "____", "%2F", "😀"];
    let mut held = Vec::new();
    for name in odd {
        held.push((name, grant(&backend, name).await.0));
    }
    for (name, request) in held {
        assert!(backend.is_locked(&key(name)).await.expect("works"), "{name}");
        let outcome = backend.acquire(&self::request(name)).await.expect("works");
        assert!(matches!(outcome, AcquireOutcome::Contended { .. }), "{name}");
        let found = backend.lookup_id(&request.lock_id()).await.expect("works").expect("held");
        assert!(format!("{found:?}").contains(key(name).hash_id().as_str()), "{name}");
        let release = ReleaseRequest::new(request.lock_id());
        assert_eq!(
            backend.release(&release).await.expect("works"),
            ReleaseOutcome::Released,
            "{name}"
        );
        assert!(!backend.is_locked(&key(name)).await.expect("works"), "{name}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unavailable_credentials_are_an_auth_failure() {
    install_cryptography();
    // No token service listens there, and no credentials have worked before.
    let unreachable = mds::Builder::default().with_endpoint("http://127.0.0.1:9").build();
    let config = FirestoreConfig::new("project").credentials(unreachable.expect("not asked yet"));
    let error = FirestoreBackend::connect(config).await.expect_err("no credentials");
    assert_eq!(error.code(), ErrorCode::AuthFailed, "{error:?}");
    assert!(error.to_string().contains("GOOGLE_APPLICATION_CREDENTIALS"), "{error}");
    assert!(!error.may_have_taken_effect());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bad_input_is_refused_before_anything_is_sent() {
    let invalid = async |url: &str| {
        let error = syncguard::connect(url).await.expect_err(url);
        assert_eq!(error.code(), ErrorCode::InvalidArgument, "{url}: {error:?}");
        assert!(!error.to_string().contains("canary"), "{error}");
        error.to_string()
    };
    // Nothing listens on port 9, and nothing is sent there.
    for query in [
        "locks_collection=a&fences_collection=a",
        "locks_collection=",
        "fences_collection=",
        "locks_collection=a/b",
        "locks_collection=..",
        "fences_collection=__x__",
        "response_timeout_ms=0",
        "response_timeout_ms=18446744073709551615",
        "connect_timeout_ms=18446744073709551615",
        "response_timeout_ms=canary",
        "clock_check=canary",
        "canary=1",
    ] {
        invalid(&format!("firestore://p?emulator=127.0.0.1:9&{query}")).await;
    }
    invalid("firestore://p/a/b").await;
    invalid("firestore://p?emulator=canary%20canary").await;
    assert!(invalid("firestore:canary/x/y").await.contains("database"));
    let error = syncguard::connect("firestore://p?emulator=127.0.0.1:9").await.expect_err("closed");
    assert_eq!(error.code(), ErrorCode::ServiceUnavailable, "{error:?}");
}
