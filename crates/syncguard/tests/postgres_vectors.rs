//! Replays every call of the vectors on PostgreSQL, and compares its answer and the stored rows.
//! Times are compared by their difference, lock ids by the call that drew them.
#![cfg(feature = "postgres")]

use std::collections::HashMap;
use std::time::Duration;

use serde_json::Value;
use syncguard::backend::{AcquireOutcome, AcquireRequest, ExtendRequest, ReleaseRequest};
use syncguard::postgres::PostgresConfig;
use syncguard::postgres::tokio_postgres::{self, Client, NoTls};
use syncguard::{
    ExtendOutcome, Key, LockBackend, LockId, PostgresBackend, ReleaseOutcome, Ttl, diagnostics,
};
use test_support::{PostgresOptions, PostgresServer};

fn text<'a>(value: &'a Value, field: &str) -> &'a str {
    value[field].as_str().unwrap_or_else(|| panic!("{field} of {value}"))
}

fn number(value: &Value, field: &str) -> i64 {
    let field = &value[field];
    let parsed = field.as_str().map_or_else(|| field.as_i64(), |text| text.parse().ok());
    parsed.unwrap_or_else(|| panic!("not a number: {value}"))
}

fn key(call: &Value) -> Key {
    Key::new(text(call, "key")).expect("valid")
}

fn ttl(call: &Value) -> Ttl {
    let ms = u64::try_from(number(call, "ttlMs")).expect("positive");
    Ttl::new(Duration::from_millis(ms)).expect("valid")
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_and_stored_rows_are_those_of_the_vectors() {
    let server = PostgresServer::start(&PostgresOptions::default().with(["fsync = off"]));
    let Some(server) = server else { return };
    let config = PostgresConfig::from_url(&server.url()).expect("a URL");
    let backend = PostgresBackend::connect(config.clone()).await.expect("connects");
    backend.setup_schema().await.expect("works");
    let cleaning = PostgresBackend::connect(config.cleanup_in_is_locked(true)).await;
    let (client, connection) =
        tokio_postgres::connect(&server.url(), NoTls).await.expect("connects");
    tokio::spawn(connection);
    let mut replay = Replay {
        backend,
        cleaning: cleaning.expect("connects"),
        client,
        ids: HashMap::new(),
        state: Value::Null,
    };
    let vectors: Value =
        serde_json::from_str(include_str!("vectors/stored_state_postgres.json")).expect("JSON");
    let cases = vectors["postgres"].as_array().expect("a list");
    let mut scenario = "";
    for case in cases {
        if text(case, "scenario") != scenario {
            scenario = text(case, "scenario");
            replay.begin(scenario).await;
        }
        replay.play(case).await;
        replay.compare(case).await;
    }
    assert_eq!(cases.len(), 57, "the number of cases has changed");
}

/// Plays the calls of a scenario one after the other.
struct Replay {
    backend: PostgresBackend,
    cleaning: PostgresBackend,
    client: Client,
    /// Our lock id for each of theirs.
    ids: HashMap<String, LockId>,
    /// The state that they have stored.
    state: Value,
}

impl Replay {
    /// Empties the tables, and stores what the scenario begins with.
    async fn begin(&mut self, scenario: &str) {
        let empty = "TRUNCATE syncguard_locks, syncguard_fence_counters";
        self.client.batch_execute(empty).await.expect("works");
        self.ids.clear();
        let age_ms = match scenario {
            "isLocked with cleanup, expired 1500 ms (inside the guard)" => 1_500,
            "isLocked with cleanup, expired 2500 ms" => 2_500,
            _ => return,
        };
        let theirs = "BBBBBBBBBBBBBBBBBBBBBB";
        self.ids.insert(theirs.to_owned(), LockId::parse(theirs).expect("valid"));
        let plant = format!(
            "INSERT INTO syncguard_locks (key, lock_id, expires_at_ms, acquired_at_ms, fence, \
             user_key) VALUES ('foo', '{theirs}', 1000, 0, '000000000000007', 'foo'); \
             INSERT INTO syncguard_fence_counters VALUES ('fence:foo', 7, 'foo')"
        );
        self.client.batch_execute(&plant).await.expect("works");
        self.age(age_ms).await;
    }

    /// Shifts a lock in time, so that it expired `expired_ms` ago.
    async fn age(&self, expired_ms: i64) {
        let shift = "UPDATE syncguard_locks SET expires_at_ms = now - $1, \
                     acquired_at_ms = acquired_at_ms + now - $1 - expires_at_ms \
                     FROM (SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint \
                     AS now) AS clock";
        self.client.execute(shift, &[&expired_ms]).await.expect("works");
    }

    fn ours(&self, case: &Value) -> LockId {
        self.ids[text(&case["call"], "lockId")]
    }

    async fn play(&mut self, case: &Value) {
        let (call, result) = (&case["call"], &case["result"]);
        match text(case, "step") {
            "acquire" | "re-acquire ttl 200" | "re-acquire after expiry" | "acquire while held" => {
                self.acquire(call, result).await;
            }
            "500 ms later: acquire (expired 300 ms ago, inside tolerance)" => {
                self.age(300).await;
                self.acquire(call, result).await;
            }
            "lookup by lockId" => self.look_up(self.ours(case), result).await,
            "extend" => {
                let extend = ExtendRequest::new(self.ours(case), ttl(call));
                let outcome = self.backend.extend(&extend).await.expect("works");
                assert_eq!(
                    matches!(outcome, ExtendOutcome::Extended(_)),
                    result["ok"] == true,
                    "{case}"
                );
            }
            "release" | "release again" | "release of expired lock (row stays)" => {
                let release = ReleaseRequest::new(self.ours(case));
                let outcome = self.backend.release(&release).await.expect("works");
                assert_eq!(outcome == ReleaseOutcome::Released, result["ok"] == true, "{case}");
            }
            "1400 ms later: isLocked" => {
                self.age(1_200).await;
                let is_locked = self.backend.is_locked(&key(call)).await.expect("works");
                assert_eq!(Value::from(is_locked), *result, "{case}");
            }
            "isLocked" => {
                let is_locked = self.cleaning.is_locked(&key(call)).await.expect("works");
                assert_eq!(Value::from(is_locked), *result, "{case}");
                // It deletes in the background.
                tokio::time::sleep(Duration::from_millis(700)).await;
            }
            unknown => panic!("unknown step: {unknown}"),
        }
        if case["state"] != "unchanged" {
            self.state = case["state"].clone();
        }
    }

    async fn acquire(&mut self, call: &Value, result: &Value) {
        let request = AcquireRequest::new(key(call), ttl(call)).expect("randomness");
        match self.backend.acquire(&request).await.expect("works") {
            AcquireOutcome::Acquired(lease) => {
                assert_eq!(lease.fence().to_string(), text(result, "fence"), "{call}");
                self.ids.insert(text(result, "lockId").to_owned(), request.lock_id());
            }
            AcquireOutcome::Contended { .. } => {
                assert_eq!(text(result, "reason"), "locked", "{call}");
            }
            AcquireOutcome::AlreadyUsed => panic!("it is a new request"),
        }
    }

    async fn look_up(&self, id: LockId, result: &Value) {
        let found = diagnostics::get_by_id(&self.backend, &id).await.expect("works");
        let found = found.expect("held");
        assert_eq!(found.key_hash.as_str(), text(result, "keyHash"));
        assert_eq!(found.lock_id_hash, id.hash_id());
        assert_eq!(found.fence.expect("fenced").to_string(), text(result, "fence"));
        let lived = found.expires_at.as_millis() - found.acquired_at.as_millis();
        let theirs = number(result, "expiresAtMs") - number(result, "acquiredAtMs");
        assert_eq!(i64::try_from(lived).expect("small"), theirs);
    }

    /// Checks that the stored rows are theirs, except for the times and the lock ids themselves.
    async fn compare(&self, case: &Value) {
        let rows = self.client.query("SELECT * FROM syncguard_locks", &[]).await.expect("works");
        let wanted = self.state["locks"].as_array().expect("a list");
        assert_eq!(rows.len(), wanted.len(), "{case}");
        for (row, wanted) in rows.iter().zip(wanted) {
            for column in ["key", "user_key", "fence"] {
                assert_eq!(row.get::<_, &str>(column), text(wanted, column), "{case}");
            }
            let ours = self.ids[text(wanted, "lock_id")];
            assert_eq!(row.get::<_, &str>("lock_id"), ours.expose(), "{case}");
            let lived = row.get::<_, i64>("expires_at_ms") - row.get::<_, i64>("acquired_at_ms");
            let theirs = number(wanted, "expires_at_ms") - number(wanted, "acquired_at_ms");
            // An extend counts from its own time, some milliseconds after the acquire.
            let slack = if text(case, "step") == "extend" { 10_000 } else { 0 };
            assert!((lived - theirs).abs() <= slack, "{lived} and {theirs} ms: {case}");
        }
        let counters = "SELECT * FROM syncguard_fence_counters";
        let rows = self.client.query(counters, &[]).await.expect("works");
        let wanted = self.state["fenceCounters"].as_array().expect("a list");
        assert_eq!(rows.len(), wanted.len(), "{case}");
        for (row, wanted) in rows.iter().zip(wanted) {
            assert_eq!(row.get::<_, &str>("fence_key"), text(wanted, "fence_key"), "{case}");
            assert_eq!(row.get::<_, i64>("fence"), number(wanted, "fence"), "{case}");
            assert_eq!(row.get::<_, &str>("key_debug"), text(wanted, "key_debug"), "{case}");
        }
    }
}
