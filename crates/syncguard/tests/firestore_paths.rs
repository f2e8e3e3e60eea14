//! The Firestore backend when the path to the server is dead or slow: it opens another channel,
//! reopens streams with backoff, and ends every call.
#![cfg(feature = "firestore")]

mod firestore_channels;
mod firestore_raw;
mod servers;

use std::time::Duration;

use firestore_channels::{Channels, RequestFault};
use firestore_raw::Raw;
use servers::{
    a_dead_path_costs_no_renewed_lock, grant, install_cryptography, key, request, waiter, woken,
};
use syncguard::backend::{ExtendRequest, Hint};
use syncguard::firestore::FirestoreConfig;
use syncguard::firestore::google_cloud_auth::credentials::mds;
use syncguard::{Error, ErrorCode, ExtendOutcome, FirestoreBackend, LockBackend, Ttl};
use test_support::{Fault, FirestoreEmulator, Proxy};

const RESPONSE_TIMEOUT: Duration = Duration::from_secs(1);

/// Far longer than any call may take, but shorter than the keep-alive.
const LONG: Duration = Duration::from_secs(20);

fn config(host: String) -> FirestoreConfig {
    FirestoreConfig::new("test").emulator(host).response_timeout(RESPONSE_TIMEOUT)
}

async fn through(proxy: &Proxy) -> FirestoreBackend {
    let config = config(format!("127.0.0.1:{}", proxy.port()));
    FirestoreBackend::connect(config).await.expect("connects")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_path_is_abandoned_after_one_timeout() {
    let Some(emulator) = FirestoreEmulator::start() else { return };
    let proxy = Proxy::start(emulator.port()).await;
    let backend = through(&proxy).await;
    let (held, lease) = grant(&backend, "held").await;
    let hint = Hint::key(key("held")).with_receipt(lease.receipt().cloned());
    let extend = ExtendRequest::new(held.lock_id(), Ttl::DEFAULT).with_hint(hint);
    let name = key("held");
    for _ in 0..3 {
        // In the same millisecond, it would find the expiry of the previous extend and succeed.
        tokio::time::sleep(Duration::from_millis(20)).await;
        proxy.strand();
        // Concurrent requests share one timeout.
        let (first, second) = tokio::join!(backend.extend(&extend), backend.is_locked(&name));
        for error in [first.expect_err("a dead path"), second.expect_err("a dead path")] {
            assert_eq!(error.code(), ErrorCode::NetworkTimeout, "{error:?}");
        }
        let extended = backend.extend(&extend).await.expect("on another path");
        assert!(matches!(extended, ExtendOutcome::Extended(_)), "{extended:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_on_a_dead_path_is_reopened_on_another() {
    let Some(emulator) = FirestoreEmulator::start() else { return };
    let (proxy, raw) = (Proxy::start(emulator.port()).await, Raw::new(emulator.port()));
    let backend = through(&proxy).await;
    grant(&backend, "awaited").await;
    let waiting = tokio::spawn({
        let waiter = waiter(backend.clone());
        async move { waiter.lock("awaited").await.map(|_guard| ()) }
    });
    tokio::time::sleep(Duration::from_millis(500)).await;
    proxy.strand();
    let error = backend.is_locked(&key("any")).await.expect_err("a dead path");
    assert_eq!(error.code(), ErrorCode::NetworkTimeout, "{error:?}");
    raw.delete("locks/awaited").await;
    woken(waiting).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_that_ends_after_its_first_messages_is_reopened_with_backoff() {
    let Some(emulator) = FirestoreEmulator::start() else { return };
    let channels = Channels::new(&emulator);
    let config = config(emulator.host()).channel(channels.clone());
    let backend = FirestoreBackend::connect(config).await.expect("connects");
    let (_, raw) = (grant(&backend, "awaited").await, Raw::new(emulator.port()));
    channels.have("Listen", RequestFault::CutWhenCurrent, u32::MAX);
    channels.seen();
    let waiting = tokio::spawn({
        let waiter = waiter(backend.clone());
        async move { waiter.lock("awaited").await.map(|_guard| ()) }
    });
    tokio::time::sleep(Duration::from_secs(4)).await;
    let seen = channels.seen();
    let opened = seen.iter().find(|(method, _)| method == "Listen").map_or(0, |(_, count)| *count);
    assert!((2..60).contains(&opened), "opened {opened} times in four seconds");
    // Once the faults stop, notifications work again.
    channels.behave();
    tokio::time::sleep(Duration::from_secs(2)).await;
    raw.delete("locks/awaited").await;
    woken(waiting).await;
}

/// Asserts that a call ends with an error, and returns its code.
async fn ends<T: std::fmt::Debug>(
    what: &str,
    call: impl Future<Output = Result<T, Error>>,
) -> ErrorCode {
    let ended = tokio::time::timeout(LONG, call).await;
    let error = ended.unwrap_or_else(|_| panic!("{what} has no deadline")).expect_err(what);
    assert_eq!(error.backend(), Some("firestore"), "{what}: {error:?}");
    error.code()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_call_has_a_deadline() {
    let Some(emulator) = FirestoreEmulator::start() else { return };
    let proxy = Proxy::start(emulator.port()).await;
    let backend = through(&proxy).await;
    let admin = backend.admin().expect("it has one");
    proxy.set(Fault::BlackHole);
    let timeout = ErrorCode::NetworkTimeout;
    assert_eq!(ends("list", admin.list(None)).await, timeout);
    assert_eq!(ends("findings", admin.findings()).await, timeout);
    assert_eq!(ends("acquire", backend.acquire(&request("k"))).await, timeout);
    assert_eq!(ends("is_locked", backend.is_locked(&key("k"))).await, timeout);
    let waiting = tokio::time::timeout(LONG, backend.subscribe(&key("k"))).await;
    assert!(waiting.expect("it has a deadline").is_none());
    let host = format!("127.0.0.1:{}", proxy.port());
    assert_eq!(ends("connect", FirestoreBackend::connect(config(host))).await, timeout);
    install_cryptography();
    // This token service accepts connections but never responds.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = silent.local_addr().expect("an address");
    let tokens = mds::Builder::default().with_endpoint(format!("http://{address}")).build();
    let config = FirestoreConfig::new("project").response_timeout(RESPONSE_TIMEOUT);
    let config = config.credentials(tokens.expect("not asked yet"));
    assert_eq!(ends("a token", FirestoreBackend::connect(config)).await, timeout);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_renewed_lock_survives_a_path_that_dies() {
    let Some(emulator) = FirestoreEmulator::start() else { return };
    let proxy = Proxy::start(emulator.port()).await;
    let config = config(format!("127.0.0.1:{}", proxy.port()));
    let config = config.response_timeout(Duration::from_secs(30));
    let backend = FirestoreBackend::connect(config).await.expect("connects");
    Box::pin(a_dead_path_costs_no_renewed_lock(backend, &proxy)).await;
}
