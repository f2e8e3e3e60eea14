//! The conformance kit on the Firestore backend with an emulator: direct, type-erased, under
//! telemetry and through the fault proxy.
#![cfg(all(feature = "firestore", feature = "conformance"))]

mod firestore_raw;

use std::sync::{Arc, LazyLock};
use std::time::{Duration, SystemTime};

use firestore_raw::{Raw, fields, integer, number_of, string, text_of};
use syncguard::backend::Layer;
use syncguard::conformance::{Fixture, RawLock};
use syncguard::diagnostics::explain_key;
use syncguard::firestore::FirestoreConfig;
use syncguard::telemetry::{TelemetryLayer, TracingSink};
use syncguard::{
    AnyBackend, Fence, FenceSource, FirestoreBackend, Key, LockBackend, LockId, Timestamp,
};
use test_support::{Fault, FirestoreEmulator, Proxy};

/// One emulator for all cases of the kit, which use distinct keys.
static EMULATOR: LazyLock<Option<FirestoreEmulator>> = LazyLock::new(FirestoreEmulator::start);

struct FirestoreFixture {
    config: FirestoreConfig,
    raw: Raw,
    /// The proxy between the backend and the emulator, if there is one.
    _proxy: Option<Proxy>,
}

impl FirestoreFixture {
    fn direct() -> Self {
        let emulator = EMULATOR.as_ref().expect("checked by every test");
        let config = FirestoreConfig::new("test").emulator(emulator.host());
        Self { config, raw: Raw::new(emulator.port()), _proxy: None }
    }

    async fn through_proxy() -> Self {
        let direct = Self::direct();
        let proxy = Proxy::start(EMULATOR.as_ref().expect("checked by every test").port()).await;
        proxy.set(Fault::Delay(Duration::from_millis(1)));
        let config = direct.config.emulator(format!("127.0.0.1:{}", proxy.port()));
        Self { config, raw: direct.raw, _proxy: Some(proxy) }
    }
}

/// Returns the documents of a key: its lock and its fence counter.
fn paths(key: &Key) -> [String; 2] {
    let places = explain_key("firestore://test", key).expect("a URL");
    let path = |what| places.iter().find(|place| place.0 == what).expect("there").1.clone();
    [path("lock"), path("fence")]
}

fn now_ms() -> i64 {
    Timestamp::from(SystemTime::now()).as_millis().try_into().expect("soon")
}

impl Fixture for FirestoreFixture {
    type Backend = FirestoreBackend;

    fn passes_break_notes_on(&self) -> bool {
        false
    }

    async fn backend(&self) -> FirestoreBackend {
        FirestoreBackend::connect(self.config.clone()).await.expect("connects")
    }

    async fn backend_with_cleanup(&self) -> FirestoreBackend {
        let config = self.config.clone().cleanup_in_is_locked(true);
        FirestoreBackend::connect(config).await.expect("connects")
    }

    async fn backend_with_clock_fences(&self) -> Option<FirestoreBackend> {
        let config = self.config.clone().fences(FenceSource::Clock);
        Some(FirestoreBackend::connect(config).await.expect("connects"))
    }

    async fn delete_fence_counter(&self, key: &Key) {
        let [_, path] = paths(key);
        self.raw.delete(&path).await;
    }

    async fn plant(&self, lock: &RawLock) {
        let ([path, _], now) = (paths(&lock.key), now_ms());
        let planted = fields([
            ("lockId", string(lock.lock_id.expose())),
            ("expiresAtMs", integer(now + lock.expires_in_ms)),
            ("acquiredAtMs", integer(now - lock.acquired_ms_ago)),
            ("key", string(lock.key.as_str())),
            ("fence", string(&lock.fence.to_string())),
        ]);
        self.raw.set(&path, planted).await;
        self.set_fence_counter(&lock.key, lock.fence.get()).await;
    }

    async fn peek(&self, key: &Key) -> Option<RawLock> {
        let [path, _] = paths(key);
        let (found, now) = (self.raw.get(&path).await?, now_ms());
        Some(RawLock {
            key: Key::new(text_of(&found, "key")).expect("valid"),
            lock_id: LockId::parse(&text_of(&found, "lockId")).expect("valid"),
            fence: text_of(&found, "fence").parse::<Fence>().expect("15 digits"),
            acquired_ms_ago: now - number_of(&found, "acquiredAtMs"),
            expires_in_ms: number_of(&found, "expiresAtMs") - now,
        })
    }

    async fn knows_id(&self, lock_id: &LockId) -> bool {
        !self.raw.find(lock_id.expose(), false).await.expect("works").0.is_empty()
    }

    async fn fence_counter(&self, key: &Key) -> u64 {
        let [_, path] = paths(key);
        let found = self.raw.get(&path).await;
        found.map_or(0, |found| text_of(&found, "fence").parse().expect("digits"))
    }

    async fn set_fence_counter(&self, key: &Key, counter: u64) {
        let [_, path] = paths(key);
        let counter = string(&format!("{counter:015}"));
        let debug = string(key.as_str());
        self.raw.set(&path, fields([("fence", counter), ("keyDebug", debug)])).await;
    }

    async fn corrupt(&self, key: &Key) -> bool {
        let [path, _] = paths(key);
        let mut found = self.raw.get(&path).await.expect("a lock to corrupt");
        found.insert("expiresAtMs".to_owned(), string("tomorrow"));
        self.raw.set(&path, found).await;
        true
    }
}

/// The backend installs a crypto provider for the whole process only if it needs a token; see ADR
/// 043.
#[tokio::test]
async fn an_emulator_installs_no_crypto_provider() {
    if EMULATOR.is_none() {
        return;
    }
    let backend = FirestoreFixture::direct().backend().await;
    assert!(!backend.is_locked(&Key::new("any").expect("valid")).await.expect("works"));
    assert!(rustls::crypto::CryptoProvider::get_default().is_none());
}

/// Runs the kit, unless there is no emulator.
macro_rules! kit {
    ($name:ident, $fixture:expr) => {
        mod $name {
            use super::*;

            syncguard::conformance_tests!({
                if EMULATOR.is_none() {
                    return;
                }
                $fixture
            });
        }
    };
}

kit!(direct, FirestoreFixture::direct());
kit!(erased, FirestoreFixture::direct().wrapped(AnyBackend::new));
kit!(under_telemetry, {
    let layer = TelemetryLayer::new(Arc::new(TracingSink));
    FirestoreFixture::direct().wrapped(move |backend| layer.layer(backend))
});
kit!(through_proxy, FirestoreFixture::through_proxy().await);
