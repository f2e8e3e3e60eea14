//! Compatibility with the TypeScript implementation: the documents are the same field by field, and
//! both work in one database. The tests imitate its transactions, from the description of its wire
//! format.
#![cfg(all(feature = "firestore", feature = "conformance"))]

mod firestore_raw;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use firestore_raw::{
    Fields, Raw, delete, double, fields, integer, number_of, set, string, text_of,
};
use googleapis_tonic_google_firestore_v1::google::firestore::v1::value::ValueType;
use serde_json::{Value, json};
use syncguard::backend::{
    AcquireOutcome, AcquireRequest, ExtendRequest, Hint, ManualClock, ReleaseRequest,
};
use syncguard::firestore::FirestoreConfig;
use syncguard::firestore::tonic::{Code, Status};
use syncguard::{
    ErrorCode, ExtendOutcome, Fence, FirestoreBackend, HolderInfo, Key, LockBackend, LockId,
    LockOptions, Locker, NotHeldReason, ReleaseOutcome, Timestamp, Ttl, diagnostics,
};
use test_support::FirestoreEmulator;

fn key(text: &str) -> Key {
    Key::new(text).expect("valid")
}

fn ttl(ms: u64) -> Ttl {
    Ttl::new(Duration::from_millis(ms)).expect("valid")
}

fn random_id() -> LockId {
    AcquireRequest::new(key("any"), Ttl::DEFAULT).expect("randomness").lock_id()
}

fn config(emulator: &FirestoreEmulator) -> FirestoreConfig {
    FirestoreConfig::new("test").emulator(emulator.host())
}

async fn connect(emulator: &FirestoreEmulator) -> FirestoreBackend {
    FirestoreBackend::connect(config(emulator)).await.expect("connects")
}

fn now_ms() -> i64 {
    Timestamp::from(SystemTime::now()).as_millis().try_into().expect("soon")
}

/// Returns fields in the format of the vectors.
fn shown(fields: &Fields) -> Value {
    let show = |value: &ValueType| match value {
        ValueType::StringValue(text) => json!({"valueType": "stringValue", "value": text}),
        ValueType::IntegerValue(number) => {
            json!({"valueType": "integerValue", "value": number.to_string()})
        }
        other => panic!("{other:?}"),
    };
    let fields = fields
        .iter()
        .map(|(name, value)| (name.clone(), show(value.value_type.as_ref().expect("a value"))));
    Value::Object(fields.collect())
}

/// Returns the expected fields: those of the vector, except that keys are stored in NFC.
fn expected(fields: &Value) -> Value {
    let mut fields = fields.clone();
    for name in ["key", "keyDebug"] {
        if let Some(text) = fields[name]["value"].as_str() {
            let text = key(text).as_str().to_owned();
            fields[name]["value"] = Value::from(text);
        }
    }
    fields
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn documents_match_the_vectors() {
    let Some(emulator) = FirestoreEmulator::start() else { return };
    let (raw, clock) = (Raw::new(emulator.port()), Arc::new(ManualClock::default()));
    let config = config(&emulator).clock(Arc::clone(&clock) as _).without_clock_check();
    let backend = FirestoreBackend::connect(config).await.expect("connects");
    let vectors: Vec<Value> =
        serde_json::from_str(include_str!("vectors/stored_state_firestore.json")).expect("JSON");
    let at = |ms: u64| clock.set(Timestamp::from_millis(ms));
    let (mut expires_at, mut compared) = (0, 0);
    for vector in &vectors {
        let (step, call, result) = (&vector["step"], &vector["call"], &vector["result"]);
        let step = step.as_str().expect("text");
        let lock_id = |value: &Value| LockId::parse(value.as_str().expect("text")).expect("valid");
        let length = call["ttlMs"].as_u64();
        if let Some(expires) = result["expiresAtMs"].as_u64() {
            expires_at = expires;
            if let Some(length) = length {
                at(expires - length);
            }
        }
        if step.starts_with("500 ms later") {
            at(expires_at + 300);
        } else if step.starts_with("1400 ms later") {
            at(expires_at + 1200);
        }
        if step.contains("acquire") {
            let key = key(call["key"].as_str().expect("text"));
            let is_granted = result["ok"] == true;
            let id = if is_granted { lock_id(&result["lockId"]) } else { random_id() };
            let request = AcquireRequest::from_parts(key, id, ttl(length.expect("a number")));
            match backend.acquire(&request).await.expect("works") {
                AcquireOutcome::Acquired(lease) if is_granted => {
                    assert_eq!(lease.fence().to_string(), result["fence"], "{step}");
                    assert_eq!(lease.expires_at().as_millis(), expires_at, "{step}");
                }
                AcquireOutcome::Contended { .. } => assert!(!is_granted, "{step}"),
                other => panic!("{step}: {other:?}"),
            }
        } else if step == "extend" {
            let request =
                ExtendRequest::new(lock_id(&call["lockId"]), ttl(length.expect("a number")));
            let outcome = backend.extend(&request).await.expect("works");
            let ExtendOutcome::Extended(extension) = outcome else { panic!("{outcome:?}") };
            assert_eq!(extension.expires_at().as_millis(), expires_at);
        } else if step.starts_with("release") {
            let released = backend.release(&ReleaseRequest::new(lock_id(&call["lockId"]))).await;
            let is_released = released.expect("works") == ReleaseOutcome::Released;
            assert_eq!(is_released, result["ok"] == true, "{step}");
        } else if step.ends_with("isLocked") {
            let key = key(call["key"].as_str().expect("text"));
            assert_eq!(backend.is_locked(&key).await.expect("works"), *result == true, "{step}");
        } else {
            let found = diagnostics::get_by_id(&backend, &lock_id(&call["lockId"])).await;
            let found = found.expect("works").expect("held");
            assert_eq!(found.expires_at.as_millis(), expires_at, "{step}");
            assert_eq!(found.key_hash.as_str(), result["keyHash"], "{step}");
            assert_eq!(found.lock_id_hash.as_str(), result["lockIdHash"], "{step}");
        }
        for collection in ["locks", "fence_counters"] {
            let Some(documents) = vector["state"][collection].as_array() else { continue };
            for document in documents {
                let path = document["path"].as_str().expect("text");
                let found = raw.get(path).await.unwrap_or_else(|| panic!("{step}: {path}"));
                assert_eq!(shown(&found), expected(&document["fields"]), "{step}");
                compared += 1;
            }
            if documents.is_empty() {
                let id = &vectors.iter().find(|first| first["scenario"] == vector["scenario"]);
                let path = id.expect("itself")["state"]["locks"][0]["path"].as_str();
                assert!(raw.get(path.expect("text")).await.is_none(), "{step}");
            }
        }
    }
    assert!(compared > 50, "{compared}");
}

/// The transactions of the TypeScript implementation.
struct TypeScript {
    raw: Raw,
}

/// How many times its library attempts a transaction before it gives up.
const ATTEMPTS: u32 = 5;

/// Returns the response, or `None` after a conflict.
async fn answered<T>(answer: Result<T, Status>) -> Option<T> {
    match answer {
        Ok(answer) => Some(answer),
        Err(status) => {
            assert_eq!(status.code(), Code::Aborted, "{status:?}");
            tokio::time::sleep(Duration::from_millis(20)).await;
            None
        }
    }
}

impl TypeScript {
    /// Acquires a lock. Returns the fence, or `None` if the key is locked.
    async fn acquire(&self, key: &str, lock_id: &str, ttl_ms: i64) -> Option<i64> {
        for _ in 0..ATTEMPTS {
            let taken = self.try_acquire(key, lock_id, ttl_ms).await;
            if let Some(taken) = answered(taken).await {
                return taken;
            }
        }
        None
    }

    async fn try_acquire(
        &self,
        key: &str,
        lock_id: &str,
        ttl_ms: i64,
    ) -> Result<Option<i64>, Status> {
        let (lock, counter) = (format!("locks/{key}"), format!("fence_counters/fence:{key}"));
        let (found, transaction) = self.raw.read(&[&lock, &counter], true).await?;
        let now = now_ms();
        let is_live = |lock: &Fields| number_of(lock, "expiresAtMs") > now - 1000;
        if found.get(&lock).is_some_and(is_live) {
            self.raw.rollback(transaction).await;
            return Ok(None);
        }
        let number = |found: &Fields| text_of(found, "fence").parse::<i64>().expect("digits");
        let next = found.get(&counter).map_or(0, number) + 1;
        let fence = format!("{next:015}");
        let count = fields([("fence", string(&fence)), ("keyDebug", string(key))]);
        let taken = fields([
            ("lockId", string(lock_id)),
            ("expiresAtMs", integer(now + ttl_ms)),
            ("acquiredAtMs", integer(now)),
            ("key", string(key)),
            ("fence", string(&fence)),
        ]);
        self.raw.commit(vec![set(&counter, count), set(&lock, taken)], transaction).await?;
        Ok(Some(next))
    }

    async fn release(&self, lock_id: &str) -> bool {
        loop {
            let released = self.try_release(lock_id).await;
            if let Some(released) = answered(released).await {
                return released;
            }
        }
    }

    async fn try_release(&self, lock_id: &str) -> Result<bool, Status> {
        let (found, transaction) = self.raw.find(lock_id, true).await?;
        match found.first() {
            Some((path, lock)) if number_of(lock, "expiresAtMs") > now_ms() - 1000 => {
                self.raw.commit(vec![delete(path)], transaction).await?;
                Ok(true)
            }
            _ => {
                self.raw.rollback(transaction).await;
                Ok(false)
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_typescript_peer_and_this_library_exclude_each_other() {
    const IDS: [&str; 2] = ["AAAAAAAAAAAAAAAAAAAAAA", "BBBBBBBBBBBBBBBBBBBBBA"];
    let Some(emulator) = FirestoreEmulator::start() else { return };
    let backend = connect(&emulator).await;
    let peer = TypeScript { raw: Raw::new(emulator.port()) };
    assert_eq!(peer.acquire("k", IDS[0], 60_000).await, Some(1));
    let holder = HolderInfo::of_this_process(None);
    let request = AcquireRequest::new(key("k"), ttl(60_000)).expect("randomness");
    let request = request.with_holder(Some(holder.clone()));
    let refused = backend.acquire(&request).await.expect("works");
    assert!(matches!(refused, AcquireOutcome::Contended { expires_in: Some(_) }), "{refused:?}");
    let id = LockId::parse(IDS[0]).expect("valid");
    let found = diagnostics::get_by_id(&backend, &id).await.expect("works").expect("held");
    assert_eq!(found.fence.map(Fence::get), Some(1));
    let extended = backend.extend(&ExtendRequest::new(id, ttl(90_000))).await.expect("works");
    assert!(matches!(extended, ExtendOutcome::Extended(_)), "{extended:?}");
    assert_eq!(
        backend.release(&ReleaseRequest::new(id)).await.expect("works"),
        ReleaseOutcome::Released
    );
    let granted = backend.acquire(&request).await.expect("works");
    let AcquireOutcome::Acquired(lease) = granted else { panic!("{granted:?}") };
    assert_eq!(lease.fence().get(), 2);
    let held_by = async || {
        let found = diagnostics::get_by_key(&backend, &key("k")).await.expect("works");
        found.expect("held").holder
    };
    assert_eq!(held_by().await, Some(holder));
    assert_eq!(peer.acquire("k", IDS[1], 60_000).await, None);
    assert!(peer.release(request.lock_id().expose()).await);
    assert_eq!(peer.acquire("k", IDS[1], 60_000).await, Some(3));
    assert_eq!(held_by().await, None, "they name no holder, and leave none behind");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_parallel_typescript_peer_causes_no_second_holder_and_no_repeated_fence() {
    let Some(emulator) = FirestoreEmulator::start() else { return };
    let backend = connect(&emulator).await;
    let peer = TypeScript { raw: Raw::new(emulator.port()) };
    let (is_held, last) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let enter = {
        let (is_held, last) = (Arc::clone(&is_held), Arc::clone(&last));
        move |fence: u64| {
            assert!(!is_held.swap(true, Ordering::SeqCst), "two hold the lock");
            assert!(last.swap(fence, Ordering::SeqCst) < fence, "a fence was repeated");
        }
    };
    let leave = move || assert!(is_held.swap(false, Ordering::SeqCst));
    let (started, mut tasks) = (std::time::Instant::now(), Vec::new());
    let (ours, theirs) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    // The emulator can take two seconds to resolve a conflict.
    let goes_on = {
        let (ours, theirs) = (Arc::clone(&ours), Arc::clone(&theirs));
        move || {
            let fewest = ours.load(Ordering::SeqCst).min(theirs.load(Ordering::SeqCst));
            let longest = if fewest < 2 { Duration::from_mins(1) } else { Duration::from_secs(6) };
            started.elapsed() < longest
        }
    };
    for _ in 0..2 {
        let options = LockOptions::default().timeout(Duration::from_secs(30));
        let locker = Locker::builder(backend.clone()).options(options).build().expect("a runtime");
        let (enter, leave, ours) = (enter.clone(), leave.clone(), Arc::clone(&ours));
        let goes_on = goes_on.clone();
        tasks.push(tokio::spawn(async move {
            while goes_on() {
                let guard = locker.lock("k").await.expect("works");
                enter(guard.fence().get());
                tokio::time::sleep(Duration::from_millis(3)).await;
                leave();
                guard.release().await.expect("works");
                ours.fetch_add(1, Ordering::SeqCst);
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }));
    }
    // One peer is enough: two would mostly wait for each other's transactions.
    let counted = Arc::clone(&theirs);
    tasks.push(tokio::spawn(async move {
        while goes_on() {
            let id = random_id();
            let fence = peer.acquire("k", id.expose(), 60_000).await;
            if let Some(fence) = fence {
                enter(fence.unsigned_abs());
                tokio::time::sleep(Duration::from_millis(3)).await;
                leave();
                assert!(peer.release(id.expose()).await);
                counted.fetch_add(1, Ordering::SeqCst);
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }));
    for task in tasks {
        task.await.expect("no panic");
    }
    let (ours, theirs) = (ours.load(Ordering::SeqCst), theirs.load(Ordering::SeqCst));
    println!("grants: {ours} ours, {theirs} theirs");
    assert!(ours > 1 && theirs > 1, "{ours} {theirs}");
}

fn record(lock_id: &str, expires_at: firestore_raw::Number, fence: &str) -> Fields {
    fields([
        ("lockId", string(lock_id)),
        ("expiresAtMs", expires_at.value()),
        ("acquiredAtMs", integer(now_ms())),
        ("key", string("cafe\u{301}")),
        ("fence", string(fence)),
    ])
}

const ID: &str = "AAAAAAAAAAAAAAAAAAAAAA";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn documents_written_by_typescript_are_understood() {
    use firestore_raw::Number::{Double, Integer};
    let Some(emulator) = FirestoreEmulator::start() else { return };
    let (backend, raw) = (connect(&emulator).await, Raw::new(emulator.port()));
    let (path, key) = ("locks/caf\u{e9}", key("cafe\u{301}"));
    let id = LockId::parse(ID).expect("valid");
    // The key is not normalized, and the expiry is a double or has just passed.
    let fence = "000000000000041";
    #[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
    let soon = Double(now_ms() as f64 + 60_000.5);
    for (expires_at, is_live) in [(soon, true), (Integer(now_ms() - 1500), false)] {
        raw.set(path, record(ID, expires_at, fence)).await;
        assert_eq!(backend.is_locked(&key).await.expect("works"), is_live);
        let extended = backend.extend(&ExtendRequest::new(id, ttl(60_000))).await.expect("works");
        assert_eq!(matches!(extended, ExtendOutcome::Extended(_)), is_live, "{extended:?}");
        let released = backend.release(&ReleaseRequest::new(id)).await.expect("works");
        let expected = if is_live {
            ReleaseOutcome::Released
        } else {
            ReleaseOutcome::NotHeld(NotHeldReason::Expired)
        };
        assert_eq!(released, expected);
    }
    // Counters: 19 digits, an integer, no field, an empty string.
    let counter = "fence_counters/fence:caf\u{e9}";
    let stored = [
        (fields([("fence", string("0000000000000000041"))]), 42),
        (fields([("fence", integer(41))]), 42),
        (fields([("keyDebug", string("x"))]), 1),
        (fields([("fence", string(""))]), 1),
    ];
    for (stored, expected) in stored {
        raw.delete(path).await;
        raw.set(counter, stored).await;
        let request = AcquireRequest::new(key.clone(), ttl(60_000)).expect("randomness");
        let outcome = backend.acquire(&request).await.expect("works");
        let AcquireOutcome::Acquired(lease) = outcome else { panic!("{outcome:?}") };
        assert_eq!(lease.fence().get(), expected);
        let found = raw.get(counter).await.expect("there");
        assert_eq!(text_of(&found, "fence"), format!("{expected:015}"));
        assert_eq!(text_of(&found, "keyDebug"), "caf\u{e9}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invalid_documents_are_an_internal_error_and_stay_unchanged() {
    let Some(emulator) = FirestoreEmulator::start() else { return };
    let (backend, raw) = (connect(&emulator).await, Raw::new(emulator.port()));
    let sound = record(ID, firestore_raw::Number::Integer(now_ms() + 60_000), "000000000000001");
    let nonsense = [
        ("lockId", string("short")),
        ("lockId", integer(1)),
        ("expiresAtMs", string("1794769163371")),
        ("expiresAtMs", double(f64::NAN)),
        ("expiresAtMs", double(-1.0)),
        ("expiresAtMs", integer(-1)),
        ("acquiredAtMs", string("x")),
        ("fence", string("x")),
        ("fence", string("-00000000000001")),
        ("fence", integer(-1)),
        ("key", string("")),
        ("key", integer(7)),
    ];
    let (path, counter) = ("locks/n", "fence_counters/fence:n");
    for (field, value) in nonsense {
        let mut fields = sound.clone();
        fields.insert(field.to_owned(), value);
        raw.set(path, fields.clone()).await;
        let request = AcquireRequest::new(key("n"), ttl(60_000)).expect("randomness");
        let errors = [
            backend.acquire(&request).await.expect_err("invalid"),
            backend.is_locked(&key("n")).await.expect_err("invalid"),
            backend.lookup_key(&key("n")).await.expect_err("invalid"),
        ];
        for error in errors {
            assert_eq!(error.code(), ErrorCode::Internal, "{field}");
            assert!(!error.may_have_taken_effect(), "{field}");
        }
        let found = raw.get(path).await.expect("it stays");
        assert_eq!(format!("{:?}", found[field]), format!("{:?}", fields[field]));
        assert!(raw.get(counter).await.is_none(), "{field}");
    }
    raw.delete(path).await;
    for value in [string("1.5"), string("x"), string("-1"), string("+1"), integer(-1), double(1.0)]
    {
        raw.set(counter, fields([("fence", value.clone())])).await;
        let request = AcquireRequest::new(key("n"), ttl(60_000)).expect("randomness");
        let error = backend.acquire(&request).await.expect_err("invalid");
        assert_eq!(error.code(), ErrorCode::Internal);
        assert_eq!(raw.get(counter).await.expect("it stays")["fence"], value);
        assert!(raw.get(path).await.is_none());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_live_one_of_duplicate_documents_counts() {
    use firestore_raw::Number::Integer;
    let Some(emulator) = FirestoreEmulator::start() else { return };
    let (backend, raw) = (connect(&emulator).await, Raw::new(emulator.port()));
    let (dead, live) = (now_ms() - 5_000, now_ms() + 60_000);
    let id = LockId::parse(ID).expect("valid");
    let plant = async |times: &[i64]| {
        for (place, expires_at) in times.iter().enumerate() {
            let fields = record(ID, Integer(*expires_at), "000000000000001");
            raw.set(&format!("locks/d{place}"), fields).await;
        }
    };
    let left = async || raw.find(ID, false).await.expect("works").0.len();
    let clear = async || {
        for place in 0..3 {
            raw.delete(&format!("locks/d{place}")).await;
        }
    };
    let release = async || backend.release(&ReleaseRequest::new(id)).await.expect("works");
    let extend =
        async || backend.extend(&ExtendRequest::new(id, ttl(60_000))).await.expect("works");
    for times in [[dead, live], [live, dead]] {
        plant(&times).await;
        assert!(backend.lookup_id(&id).await.expect("works").is_some());
        let outcome = extend().await;
        assert!(matches!(outcome, ExtendOutcome::Extended(_)), "{outcome:?}");
        assert_eq!(left().await, 1);
        plant(&times).await;
        assert_eq!(release().await, ReleaseOutcome::Released);
        assert_eq!(left().await, 0);
    }
    // With two live ones, it is unknown which is meant. The expired one is deleted.
    plant(&[live, dead, live]).await;
    assert!(matches!(release().await, ReleaseOutcome::NotHeld(_)));
    assert_eq!(left().await, 2);
    assert!(matches!(extend().await, ExtendOutcome::NotHeld(_)));
    assert_eq!(left().await, 2);
    clear().await;
    // If all have expired, they are deleted. A single expired one stays.
    plant(&[dead, dead]).await;
    assert_eq!(release().await, ReleaseOutcome::NotHeld(NotHeldReason::Expired));
    assert_eq!(left().await, 0);
    plant(&[dead]).await;
    assert_eq!(release().await, ReleaseOutcome::NotHeld(NotHeldReason::Expired));
    assert_eq!(left().await, 1);
    clear().await;
    // A hint at the expired one, at the live one or at neither does not change the outcome.
    for hinted in ["d0", "d1", "d9"] {
        plant(&[dead, live]).await;
        let release = ReleaseRequest::new(id).with_hint(Hint::key(key(hinted)));
        let released = backend.release(&release).await.expect("works");
        assert_eq!(released, ReleaseOutcome::Released, "{hinted}");
        clear().await;
    }
}
