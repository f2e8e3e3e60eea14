//! Replays every stored state of the TypeScript implementation on Redis: the same calls on ours
//! lead to the same answers and the same records. Where ours differ on purpose, the test asserts
//! our value and names the decision (ADR 029).
#![cfg(feature = "redis")]

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{AsyncCommands, Client};
use serde_json::Value;
use syncguard::backend::{AcquireOutcome, AcquireRequest, ExtendRequest, KeySpace, ReleaseRequest};
use syncguard::redis::RedisConfig;
use syncguard::{
    ExtendOutcome, Key, LockBackend, LockId, RedisBackend, ReleaseOutcome, Ttl, diagnostics,
};
use test_support::{RedisOptions, RedisServer};

/// How long our records outlive their TTL: the tolerance and the grace (settled point 2). Theirs
/// vanish at the expiry itself.
const LONGER_MS: i64 = 2000;

/// The lock id of the leftovers in the last scenarios.
const LEFTOVER_ID: &str = "BBBBBBBBBBBBBBBBBBBBBB";

/// A scenario on its own server.
struct Stage {
    backend: RedisBackend,
    cleaning: RedisBackend,
    raw: MultiplexedConnection,
    space: KeySpace,
    /// Our lock ids by theirs.
    ids: HashMap<String, LockId>,
    key: Key,
    /// The state after the last step.
    last: Vec<Record>,
}

/// A record of the store: name, value, and physical expiry.
#[derive(Clone, Debug, PartialEq)]
struct Record {
    name: String,
    value: String,
    pttl: i64,
}

impl Stage {
    async fn open(server: &RedisServer, prefix: &str) -> Self {
        let config = RedisConfig::from_url(&server.url()).expect("a URL").prefix(prefix);
        let cleaning = config.clone().cleanup_in_is_locked(true);
        let client = Client::open(server.url()).expect("a URL");
        let mut raw = client.get_multiplexed_async_connection().await.expect("connects");
        redis::cmd("FLUSHALL").query_async::<()>(&mut raw).await.expect("works");
        Self {
            backend: RedisBackend::connect(config).await.expect("connects"),
            cleaning: RedisBackend::connect(cleaning).await.expect("connects"),
            raw,
            space: KeySpace::new(prefix, 1000, 26).expect("valid"),
            ids: HashMap::new(),
            key: Key::new("foo").expect("valid"),
            last: Vec::new(),
        }
    }

    /// Stores what the last scenarios begin with: a record that is still there after its expiry.
    async fn plant_leftover(&mut self, expired_ms: u64) {
        let (seconds, micros): (u64, u64) =
            redis::cmd("TIME").query_async(&mut self.raw).await.expect("works");
        let expires = seconds * 1000 + micros / 1000 - expired_ms;
        let record = format!(
            r#"{{"lockId":"{LEFTOVER_ID}","expiresAtMs":{expires},"acquiredAtMs":{},"key":"foo","fence":"000000000000007"}}"#,
            expires - 1000
        );
        self.raw.pset_ex::<_, _, ()>("syncguard:foo", record, 60_000).await.expect("works");
        let index = format!("syncguard:id:{LEFTOVER_ID}");
        self.raw.pset_ex::<_, _, ()>(index, "syncguard:foo", 60_000).await.expect("works");
        self.raw.set::<_, _, ()>("syncguard:fence:syncguard:foo", 7).await.expect("works");
        self.ids.insert(LEFTOVER_ID.to_owned(), LockId::parse(LEFTOVER_ID).expect("valid"));
    }

    async fn state(&mut self) -> Vec<Record> {
        let mut names: Vec<String> = self.raw.keys("*").await.expect("works");
        names.sort();
        let mut records = Vec::new();
        for name in names {
            let value = self.raw.get(&name).await.expect("works");
            let pttl = self.raw.pttl(&name).await.expect("works");
            records.push(Record { name, value, pttl });
        }
        records
    }

    /// Returns our id for one of theirs.
    fn id(&self, call: &Value) -> LockId {
        self.ids[call["lockId"].as_str().expect("an id")]
    }

    /// Replaces their lock ids in a text by ours, in hashed names too.
    fn translate(&self, text: &str) -> String {
        let mut text = text.to_owned();
        for (theirs, ours) in &self.ids {
            let index = |id: &LockId| self.space.index_key(id).expect("fits");
            if text == index(&LockId::parse(theirs).expect("valid")) {
                text = index(ours);
            }
            text = text.replace(theirs, ours.expose());
        }
        text
    }
}

fn ttl(call: &Value) -> Ttl {
    Ttl::new(Duration::from_millis(call["ttlMs"].as_u64().expect("a TTL"))).expect("valid")
}

/// Runs one step and compares its answer.
async fn run(stage: &mut Stage, case: &Value) {
    let (call, result) = (&case["call"], &case["result"]);
    if let Some(key) = call["key"].as_str() {
        stage.key = Key::new(key).expect("valid");
    }
    let what = format!("{}: {}", case["scenario"], case["step"]);
    match case["step"].as_str().expect("a step") {
        "acquire" | "acquire while held" | "re-acquire ttl 300" | "re-acquire after expiry" => {
            let request = AcquireRequest::new(stage.key.clone(), ttl(call)).expect("randomness");
            match stage.backend.acquire(&request).await.expect("works") {
                AcquireOutcome::Acquired(lease) => {
                    assert_eq!(result["ok"], true, "{what}");
                    assert_eq!(result["fence"], lease.fence().to_string(), "{what}");
                    let theirs = result["lockId"].as_str().expect("an id").to_owned();
                    stage.ids.insert(theirs, request.lock_id());
                }
                AcquireOutcome::Contended { .. } => {
                    assert_eq!(result["reason"], "locked", "{what}");
                }
                AcquireOutcome::AlreadyUsed => panic!("{what}: already used"),
            }
        }
        "lookup by key" | "lookup by lockId" => {
            let found = if call["lockId"].is_null() {
                diagnostics::get_by_key_raw(&stage.backend, &stage.key).await
            } else {
                diagnostics::get_by_id_raw(&stage.backend, &stage.id(call)).await
            };
            let found = found.expect("works").expect("held");
            assert_eq!(found.key, stage.key, "{what}");
            assert_eq!(result["keyHash"], found.info.key_hash.as_str(), "{what}");
            assert_eq!(result["fence"], found.info.fence.expect("fenced").to_string(), "{what}");
            let life = result["expiresAtMs"].as_u64().expect("a number")
                - result["acquiredAtMs"].as_u64().expect("a number");
            let ours = found.info.expires_at.since(found.info.acquired_at);
            assert_eq!(ours, Duration::from_millis(life), "{what}");
        }
        "extend" => {
            let request = ExtendRequest::new(stage.id(call), ttl(call));
            let extended = stage.backend.extend(&request).await.expect("works");
            assert_eq!(
                matches!(extended, ExtendOutcome::Extended(_)),
                result["ok"] == true,
                "{what}"
            );
        }
        "400 ms later (expired)" => {
            // Ours is live through the tolerance (settled point 2), and gone after the grace.
            assert!(stage.backend.is_locked(&stage.key).await.expect("works"), "{what}");
            tokio::time::sleep(Duration::from_millis(300 + 2000 + 200)).await;
            assert_eq!(result["isLocked"], false);
            assert!(!stage.backend.is_locked(&stage.key).await.expect("works"), "{what}");
        }
        "isLocked" => {
            let is_locked = stage.cleaning.is_locked(&stage.key).await.expect("works");
            assert_eq!(*result, is_locked, "{what}");
            // The cleanup runs in the background.
            tokio::time::sleep(Duration::from_millis(300)).await;
        }
        step if step.starts_with("release") => {
            let request = ReleaseRequest::new(stage.id(call));
            let released = stage.backend.release(&request).await.expect("works");
            assert_eq!(released == ReleaseOutcome::Released, result["ok"] == true, "{what}");
        }
        step => panic!("{what}: unknown step {step}"),
    }
}

/// Compares the stored records with theirs.
async fn compare(stage: &mut Stage, case: &Value) {
    let what = format!("{}: {}", case["scenario"], case["step"]);
    let records = stage.state().await;
    let Some(wanted) = case["state"].as_array() else {
        assert_eq!(case["state"], "unchanged", "{what}");
        let names = |records: &[Record]| -> Vec<(String, String)> {
            records.iter().map(|record| (record.name.clone(), record.value.clone())).collect()
        };
        assert_eq!(names(&records), names(&stage.last), "{what}");
        return;
    };
    let mut wanted: BTreeMap<String, &Value> = wanted
        .iter()
        .map(|record| (stage.translate(record["key"].as_str().expect("a name")), record))
        .collect();
    if wanted.len() == 1
        && case["scenario"].as_str().is_some_and(|name| name.contains("leftover past"))
    {
        // Theirs deletes a dead record that a release or an extend finds. Ours leaves it until its
        // physical expiry: only a holder deletes a record.
        assert_eq!(records.len(), 3, "{what}");
        return;
    }
    for record in &records {
        let theirs = wanted.remove(&record.name);
        let theirs = theirs.unwrap_or_else(|| panic!("{what}: {} is unexpected", record.name));
        let value = stage.translate(theirs["value"].as_str().expect("a text"));
        match serde_json::from_str::<Value>(&value) {
            Ok(Value::Object(theirs)) => same_fields(&record.value, &theirs, &what),
            _ => assert_eq!(record.value, value, "{what}"),
        }
        let pttl = theirs["pttl"].as_i64().expect("a number");
        if pttl == -1 {
            assert_eq!(record.pttl, -1, "{what}: {} never expires", record.name);
        } else if record.pttl != -1 {
            // Written by them and not touched since, or written by ours, which live longer.
            let limits = pttl - 5000..=pttl + LONGER_MS + 1000;
            assert!(limits.contains(&record.pttl), "{what}: {} {}", record.name, record.pttl);
        } else {
            panic!("{what}: {} has no expiry", record.name);
        }
    }
    assert!(wanted.is_empty(), "{what}: missing {:?}", wanted.keys());
    stage.last = records;
}

/// Checks that two records have the same fields with the same values; times by their difference.
fn same_fields(ours: &str, theirs: &serde_json::Map<String, Value>, what: &str) {
    let Ok(Value::Object(ours)) = serde_json::from_str(ours) else { panic!("{what}: {ours}") };
    let names = |record: &serde_json::Map<String, Value>| -> Vec<String> {
        let mut names: Vec<_> = record.keys().cloned().collect();
        names.sort();
        names
    };
    assert_eq!(names(&ours), names(theirs), "{what}");
    for name in ["key", "fence", "lockId"] {
        assert_eq!(ours[name], theirs[name], "{what}: {name}");
    }
    let life = |record: &serde_json::Map<String, Value>| {
        let number = |name: &str| record[name].as_i64().expect("a whole number");
        number("expiresAtMs") - number("acquiredAtMs")
    };
    // After an extend, it includes the time between the two calls.
    let difference = (life(&ours) - life(theirs)).abs();
    assert!(difference < 5000, "{what}: {difference} ms");
}

/// The prefix of a scenario is in its first step; the last scenarios have the default one.
#[tokio::test(flavor = "multi_thread")]
async fn all_stored_states_are_those_of_the_vectors() {
    let vectors: Value =
        serde_json::from_str(include_str!("vectors/stored_state_redis.json")).expect("JSON");
    let cases = vectors["redis"].as_array().expect("a list");
    let mut scenarios: Vec<(&str, Vec<&Value>)> = Vec::new();
    for case in cases {
        let name = case["scenario"].as_str().expect("a name");
        match scenarios.last_mut() {
            Some((last, steps)) if *last == name => steps.push(case),
            _ => scenarios.push((name, vec![case])),
        }
    }
    let mut running = Vec::new();
    let mut count = 0;
    for (name, steps) in scenarios {
        count += steps.len();
        let name = name.to_owned();
        let steps: Vec<Value> = steps.into_iter().cloned().collect();
        // Each has its own server, so that they can run in parallel.
        let Some(server) = RedisServer::start(&RedisOptions::default()) else { return };
        running.push(tokio::spawn(async move {
            let prefix = steps[0]["call"]["keyPrefix"].as_str().unwrap_or("syncguard");
            let mut stage = Stage::open(&server, prefix).await;
            for (word, expired_ms) in [
                ("now-500", 500),
                ("now-1500", 1500),
                ("past tolerance", 1500),
                ("inside tolerance", 500),
                ("expired 1500", 1500),
                ("expired 2500", 2500),
            ] {
                if name.contains(word) && (name.contains("leftover") || name.contains("isLocked")) {
                    stage.plant_leftover(expired_ms).await;
                    break;
                }
            }
            for step in &steps {
                run(&mut stage, step).await;
                compare(&mut stage, step).await;
            }
        }));
    }
    for scenario in running {
        scenario.await.expect("as the vectors");
    }
    assert_eq!(count, 140, "all cases are run");
}
