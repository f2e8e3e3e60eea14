//! The tables of the TypeScript implementation: ours are the same column by column, and both can
//! use one database together. Its side is played by its statements, from the description of its
//! wire format.
#![cfg(feature = "postgres")]

mod servers;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde_json::Value;
use servers::key;
use servers::postgres::{raw, start};
use syncguard::backend::{
    AcquireOutcome, AcquireRequest, ExtendRequest, ReleaseRequest, TimeAuthority,
};
use syncguard::postgres::PostgresConfig;
use syncguard::postgres::tokio_postgres::{Client, Transaction};
use syncguard::{
    ExtendOutcome, Fence, HolderInfo, LockBackend, LockId, NotHeldReason, PostgresBackend,
    ReleaseOutcome, Ttl, diagnostics,
};
use test_support::PostgresServer;

fn ttl(ms: u64) -> Ttl {
    Ttl::new(Duration::from_millis(ms)).expect("valid")
}

async fn connect(server: &PostgresServer) -> PostgresBackend {
    let config = PostgresConfig::from_url(&server.url()).expect("a URL");
    let backend = PostgresBackend::connect(config).await.expect("connects");
    backend.setup_schema().await.expect("works");
    backend
}

fn vectors() -> Value {
    serde_json::from_str(include_str!("vectors/stored_state_postgres.json")).expect("JSON")
}

/// The statements of the TypeScript implementation.
struct TypeScript {
    client: Client,
}

const NOW: &str = "SELECT floor(extract(epoch FROM NOW()) * 1000)::bigint";

impl TypeScript {
    async fn now(transaction: &Transaction<'_>) -> i64 {
        transaction.query_one(NOW, &[]).await.expect("works").get(0)
    }

    /// Returns the fence, or `None` if the key is locked.
    async fn acquire(&mut self, key: &str, lock_id: &str, ttl_ms: i64) -> Option<i64> {
        let transaction = self.client.transaction().await.expect("works");
        let lock_key = "SELECT pg_advisory_xact_lock(hashtext($1))";
        transaction.execute(lock_key, &[&key]).await.expect("works");
        let now = Self::now(&transaction).await;
        let read = "SELECT expires_at_ms FROM syncguard_locks WHERE key = $1";
        let held = transaction.query_opt(read, &[&key]).await.expect("works");
        if held.is_some_and(|row| row.get::<_, i64>(0) > now - 1000) {
            transaction.commit().await.expect("works");
            return None;
        }
        let counter = format!("fence:{key}");
        let insert = "INSERT INTO syncguard_fence_counters (fence_key, fence, key_debug) VALUES \
                      ($1, 0, $2) ON CONFLICT (fence_key) DO NOTHING";
        transaction.execute(insert, &[&counter, &key]).await.expect("works");
        let count = "UPDATE syncguard_fence_counters SET fence = fence + 1 WHERE fence_key = $1 \
                     RETURNING fence";
        let fence: i64 = transaction.query_one(count, &[&counter]).await.expect("works").get(0);
        let upsert = "INSERT INTO syncguard_locks (key, lock_id, expires_at_ms, acquired_at_ms, \
                      fence, user_key) VALUES ($1, $2, $3, $4, $5, $1) ON CONFLICT (key) DO UPDATE \
                      SET lock_id = EXCLUDED.lock_id, expires_at_ms = EXCLUDED.expires_at_ms, \
                      acquired_at_ms = EXCLUDED.acquired_at_ms, fence = EXCLUDED.fence, user_key = \
                      EXCLUDED.user_key";
        let (expires, text) = (now + ttl_ms, format!("{fence:015}"));
        transaction.execute(upsert, &[&key, &lock_id, &expires, &now, &text]).await.expect("works");
        transaction.commit().await.expect("works");
        Some(fence)
    }

    async fn release(&mut self, lock_id: &str) -> bool {
        let transaction = self.client.transaction().await.expect("works");
        let now = Self::now(&transaction).await;
        let read = "SELECT key, expires_at_ms FROM syncguard_locks WHERE lock_id = $1 FOR UPDATE";
        let Some(row) = transaction.query_opt(read, &[&lock_id]).await.expect("works") else {
            return false;
        };
        if row.get::<_, i64>(1) <= now - 1000 {
            return false;
        }
        let delete = "DELETE FROM syncguard_locks WHERE key = $1";
        transaction.execute(delete, &[&row.get::<_, &str>(0)]).await.expect("works");
        transaction.commit().await.expect("works");
        true
    }

    /// Extends, with a pause between reading and writing.
    async fn extend_slowly(&mut self, lock_id: &str, ttl_ms: i64, pause: Duration) -> bool {
        let transaction = self.client.transaction().await.expect("works");
        let now = Self::now(&transaction).await;
        let read = "SELECT key, expires_at_ms FROM syncguard_locks WHERE lock_id = $1 FOR UPDATE";
        let Some(row) = transaction.query_opt(read, &[&lock_id]).await.expect("works") else {
            return false;
        };
        if row.get::<_, i64>(1) <= now - 1000 {
            return false;
        }
        tokio::time::sleep(pause).await;
        let update = "UPDATE syncguard_locks SET expires_at_ms = $1 WHERE key = $2";
        let parameters: (i64, &str) = (now + ttl_ms, row.get(0));
        transaction.execute(update, &[&parameters.0, &parameters.1]).await.expect("works");
        transaction.commit().await.expect("works");
        true
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_schema_is_that_of_the_vectors() {
    let Some(server) = start() else { return };
    let backend = connect(&server).await;
    // A second call changes nothing.
    backend.setup_schema().await.expect("works");
    let client = raw(&server).await;
    let columns = client
        .query(
            "SELECT table_name::text, column_name::text, ordinal_position::int, data_type::text,
               is_nullable::text, column_default::text
             FROM information_schema.columns WHERE table_schema = 'public'
             ORDER BY table_name, ordinal_position",
            &[],
        )
        .await
        .expect("works");
    let columns: Vec<Value> = columns
        .iter()
        .map(|row| {
            serde_json::json!({
                "table_name": row.get::<_, &str>(0), "column_name": row.get::<_, &str>(1),
                "ordinal_position": row.get::<_, i32>(2), "data_type": row.get::<_, &str>(3),
                "is_nullable": row.get::<_, &str>(4),
                "column_default": row.get::<_, Option<&str>>(5),
            })
        })
        .collect();
    let mut expected = vectors()["postgresSchema"]["columns"].clone();
    // An addition that the TypeScript implementation does not see.
    expected.as_array_mut().expect("a list").push(serde_json::json!({
        "table_name": "syncguard_locks", "column_name": "holder", "ordinal_position": 7,
        "data_type": "text", "is_nullable": "YES", "column_default": null,
    }));
    assert_eq!(Value::from(columns), expected);
    let indexes = client
        .query(
            "SELECT tablename::text, indexname::text, indexdef FROM pg_indexes
             WHERE schemaname = 'public' ORDER BY tablename, indexname",
            &[],
        )
        .await
        .expect("works");
    let indexes: Vec<Value> = indexes
        .iter()
        .map(|row| {
            serde_json::json!({
                "tablename": row.get::<_, &str>(0), "indexname": row.get::<_, &str>(1),
                "indexdef": row.get::<_, &str>(2),
            })
        })
        .collect();
    assert_eq!(Value::from(indexes), vectors()["postgresSchema"]["indexes"]);
}

/// Their upserts leave our column as it was, and their extends too.
#[tokio::test(flavor = "multi_thread")]
async fn a_typescript_peer_keeps_our_holder_and_never_inherits_it() {
    let Some(server) = start() else { return };
    let (backend, mut peer) = (connect(&server).await, TypeScript { client: raw(&server).await });
    let holder = HolderInfo::of_this_process(Some("ours"));
    let request = AcquireRequest::new(key("k"), ttl(30_000)).expect("randomness");
    let request = request.with_holder(Some(holder.clone()));
    assert!(matches!(backend.acquire(&request).await, Ok(AcquireOutcome::Acquired(_))));
    assert!(peer.extend_slowly(request.lock_id().expose(), 60_000, Duration::ZERO).await);
    let info = diagnostics::get_by_key(&backend, &key("k")).await.expect("works").expect("held");
    assert_eq!(info.holder, Some(holder));
    let expire = "UPDATE syncguard_locks SET expires_at_ms = expires_at_ms - 600000";
    peer.client.batch_execute(expire).await.expect("works");
    assert_eq!(peer.acquire("k", "AAAAAAAAAAAAAAAAAAAAAA", 30_000).await, Some(2));
    let stale = "SELECT holder FROM syncguard_locks";
    let stale = peer.client.query_one(stale, &[]).await.expect("one row");
    assert!(stale.get::<_, Option<&str>>(0).is_some(), "the value is stale, so it is ignored");
    let info = diagnostics::get_by_key(&backend, &key("k")).await.expect("works").expect("held");
    assert_eq!((info.holder, info.fence.map(Fence::get)), (None, Some(2)));
}

/// A table of the TypeScript implementation stores no holders until `setup_schema` adds the column,
/// here or in another process. Both implementations use it all the time.
#[tokio::test(flavor = "multi_thread")]
async fn a_table_without_the_column_works_and_setup_adds_it() {
    let Some(server) = start() else { return };
    drop(connect(&server).await);
    let mut peer = TypeScript { client: raw(&server).await };
    let drop_column = "ALTER TABLE syncguard_locks DROP COLUMN holder";
    peer.client.batch_execute(drop_column).await.expect("works");
    let config = PostgresConfig::from_url(&server.url()).expect("a URL");
    let backend = PostgresBackend::connect(config).await.expect("connects");
    let held_by = async |name: &str| {
        let request = AcquireRequest::new(key(name), ttl(30_000)).expect("randomness");
        let holder = HolderInfo::of_this_process(Some(name));
        let request = request.with_holder(Some(holder));
        assert!(matches!(backend.acquire(&request).await, Ok(AcquireOutcome::Acquired(_))));
        let info = diagnostics::get_by_key(&backend, &key(name)).await.expect("works");
        info.expect("held").holder.and_then(|holder| holder.label().map(str::to_owned))
    };
    assert_eq!(held_by("before").await, None);
    backend.setup_schema().await.expect("works");
    assert_eq!(held_by("after").await.as_deref(), Some("after"));
    assert_eq!(peer.acquire("theirs", "AAAAAAAAAAAAAAAAAAAAAA", 30_000).await, Some(1));
    // The column disappears under a backend that uses it.
    peer.client.batch_execute(drop_column).await.expect("works");
    assert_eq!(held_by("without again").await, None);
}

#[tokio::test(flavor = "multi_thread")]
async fn capabilities_are_those_of_the_specification() {
    let Some(server) = start() else { return };
    let capabilities = connect(&server).await.capabilities();
    assert_eq!(capabilities.backend, "postgres");
    assert!(capabilities.fencing);
    assert_eq!(capabilities.time_authority, TimeAuthority::Server);
    assert!(!capabilities.undo_is_final, "an acquire can arrive after its undo");
}

#[tokio::test(flavor = "multi_thread")]
async fn expired_and_not_found_are_distinguished() {
    let Some(server) = start() else { return };
    let (backend, client) = (connect(&server).await, raw(&server).await);
    let request = AcquireRequest::new(key("k"), Ttl::DEFAULT).expect("randomness");
    let never = LockId::parse("AAAAAAAAAAAAAAAAAAAAAA").expect("valid");
    assert!(matches!(backend.acquire(&request).await.expect("works"), AcquireOutcome::Acquired(_)));
    let expire = "UPDATE syncguard_locks SET expires_at_ms = expires_at_ms - 600000";
    client.batch_execute(expire).await.expect("works");
    for (id, reason) in
        [(request.lock_id(), NotHeldReason::Expired), (never, NotHeldReason::NotFound)]
    {
        let extended = backend.extend(&ExtendRequest::new(id, Ttl::DEFAULT)).await;
        let extended = extended.expect("works");
        assert!(
            matches!(extended, ExtendOutcome::NotHeld(found) if found == reason),
            "{extended:?}"
        );
        let released = backend.release(&ReleaseRequest::new(id)).await.expect("works");
        assert_eq!(released, ReleaseOutcome::NotHeld(reason));
    }
}

/// The server's clock is an hour ahead of ours. All times that are stored, returned or compared
/// come from the server.
#[tokio::test(flavor = "multi_thread")]
async fn all_times_come_from_the_servers_clock() {
    let Some(server) = start() else { return };
    drop(connect(&server).await);
    let client = raw(&server).await;
    let ahead = "CREATE SCHEMA ahead; CREATE FUNCTION ahead.clock_timestamp() RETURNS timestamptz \
                 AS $$ SELECT pg_catalog.clock_timestamp() + interval '1 hour' $$ \
                 LANGUAGE sql VOLATILE";
    client.batch_execute(ahead).await.expect("works");
    let path = "options=-c%20search_path%3Dpublic,ahead,pg_catalog";
    let config = PostgresConfig::from_url(&format!("{}?{path}", server.url())).expect("a URL");
    let backend = PostgresBackend::connect(config).await.expect("connects");
    let is_hour_ahead = |millis: u64| {
        let here = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        let here = u64::try_from(here.expect("after 1970").as_millis()).expect("small");
        millis.abs_diff(here + 3_600_000) < 600_000
    };
    let request = AcquireRequest::new(key("k"), ttl(30_000)).expect("randomness");
    let outcome = backend.acquire(&request).await.expect("works");
    let AcquireOutcome::Acquired(lease) = outcome else { panic!("{outcome:?}") };
    assert!(is_hour_ahead(lease.expires_at().as_millis()), "the answer of an acquire");
    let stored = async || -> (u64, u64) {
        let row = client.query_one("SELECT * FROM syncguard_locks", &[]).await.expect("one row");
        let time = |column: &str| u64::try_from(row.get::<_, i64>(column)).expect("positive");
        (time("acquired_at_ms"), time("expires_at_ms"))
    };
    let (acquired_at, expires_at) = stored().await;
    assert_eq!(expires_at, lease.expires_at().as_millis(), "the stored expiry is the returned one");
    assert_eq!(expires_at - acquired_at, 30_000);
    let extend = ExtendRequest::new(request.lock_id(), ttl(60_000));
    let outcome = backend.extend(&extend).await.expect("works");
    let ExtendOutcome::Extended(extension) = outcome else { panic!("{outcome:?}") };
    assert!(is_hour_ahead(extension.expires_at().as_millis()), "the answer of an extend");
    assert_eq!(stored().await.1, extension.expires_at().as_millis());
    assert!(backend.is_locked(&key("k")).await.expect("works"), "judged by the same clock");
    // Live by our clock for nearly an hour, dead by the server's.
    let past = "UPDATE syncguard_locks SET expires_at_ms = expires_at_ms - 120000";
    client.batch_execute(past).await.expect("works");
    assert!(!backend.is_locked(&key("k")).await.expect("works"), "judged by the same clock");
    let released = backend.release(&ReleaseRequest::new(request.lock_id())).await.expect("works");
    assert_eq!(released, ReleaseOutcome::NotHeld(NotHeldReason::Expired));
    let next = AcquireRequest::new(key("k"), Ttl::DEFAULT).expect("randomness");
    let outcome = backend.acquire(&next).await.expect("works");
    assert!(matches!(outcome, AcquireOutcome::Acquired(_)), "{outcome:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn each_side_sees_releases_and_extends_the_others_locks() {
    let Some(server) = start() else { return };
    let backend = connect(&server).await;
    let mut theirs = TypeScript { client: raw(&server).await };
    let their_id = "AAAAAAAAAAAAAAAAAAAAAA";
    assert_eq!(theirs.acquire("k", their_id, 30_000).await, Some(1));
    let request = AcquireRequest::new(key("k"), Ttl::DEFAULT).expect("randomness");
    let outcome = backend.acquire(&request).await.expect("works");
    assert!(matches!(outcome, AcquireOutcome::Contended { .. }), "{outcome:?}");
    let found = diagnostics::get_by_key_raw(&backend, &key("k")).await.expect("works");
    assert_eq!(found.expect("held").lock_id.expose(), their_id);
    let their_lock = LockId::parse(their_id).expect("valid");
    let extended = backend.extend(&ExtendRequest::new(their_lock, ttl(60_000))).await;
    assert!(matches!(extended.expect("works"), ExtendOutcome::Extended(_)));
    let released = backend.release(&ReleaseRequest::new(their_lock)).await.expect("works");
    assert_eq!(released, ReleaseOutcome::Released);
    let outcome = backend.acquire(&request).await.expect("works");
    let AcquireOutcome::Acquired(lease) = outcome else { panic!("{outcome:?}") };
    assert_eq!(lease.fence().get(), 2, "one counter for both");
    assert_eq!(theirs.acquire("k", their_id, 30_000).await, None);
    let our_id = request.lock_id();
    assert!(theirs.extend_slowly(our_id.expose(), 30_000, Duration::ZERO).await);
    assert!(theirs.release(our_id.expose()).await);
    assert_eq!(theirs.acquire("k", their_id, 30_000).await, Some(3));
}

/// Both sides at once on one key: never two holders, and no fence twice.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn both_sides_exclude_each_other_in_parallel() {
    let Some(server) = start() else { return };
    let backend = connect(&server).await;
    let (holders, last) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let enter = {
        let (holders, last) = (Arc::clone(&holders), Arc::clone(&last));
        move |fence: u64| {
            assert_eq!(holders.fetch_add(1, Ordering::SeqCst), 0, "two holders");
            let before = last.swap(fence, Ordering::SeqCst);
            assert!(fence > before, "{fence} after {before}");
        }
    };
    let mut tasks = Vec::new();
    for task in 0..4 {
        let (ours_enter, ours_holders) = (enter.clone(), Arc::clone(&holders));
        let (enter, holders) = (enter.clone(), Arc::clone(&holders));
        let mut theirs = TypeScript { client: raw(&server).await };
        tasks.push(tokio::spawn(async move {
            let mut granted = 0;
            for round in 0..150 {
                let lock_id = format!("{task}{round:021}");
                if let Some(fence) = theirs.acquire("k", &lock_id, 30_000).await {
                    enter(u64::try_from(fence).expect("positive"));
                    tokio::task::yield_now().await;
                    holders.fetch_sub(1, Ordering::SeqCst);
                    assert!(theirs.release(&lock_id).await);
                    granted += 1;
                }
            }
            granted
        }));
        let (enter, holders) = (ours_enter.clone(), Arc::clone(&ours_holders));
        let backend = backend.clone();
        tasks.push(tokio::spawn(async move {
            let mut granted = 0;
            for _ in 0..150 {
                let request = AcquireRequest::new(key("k"), Ttl::DEFAULT).expect("randomness");
                if let AcquireOutcome::Acquired(lease) =
                    backend.acquire(&request).await.expect("works")
                {
                    enter(lease.fence().get());
                    tokio::task::yield_now().await;
                    holders.fetch_sub(1, Ordering::SeqCst);
                    let release = ReleaseRequest::new(request.lock_id());
                    assert_eq!(
                        backend.release(&release).await.expect("works"),
                        ReleaseOutcome::Released
                    );
                    granted += 1;
                }
            }
            granted
        }));
    }
    let mut granted = 0;
    for task in tasks {
        granted += task.await.expect("no panic");
    }
    assert_eq!(last.load(Ordering::SeqCst), granted, "every fence was granted once");
}

/// Defect B1 of the TypeScript implementation: an extend that lasts past the expiry and an acquire
/// both succeed. Our acquire waits for the row and sees the extension.
#[tokio::test(flavor = "multi_thread")]
async fn an_acquire_waits_for_an_extend_in_progress() {
    let Some(server) = start() else { return };
    let backend = connect(&server).await;
    let mut theirs = TypeScript { client: raw(&server).await };
    let their_id = "BBBBBBBBBBBBBBBBBBBBBB";
    assert_eq!(theirs.acquire("k", their_id, 300).await, Some(1));
    let extending = tokio::spawn(async move {
        theirs.extend_slowly(their_id, 30_000, Duration::from_millis(2500)).await
    });
    // Dead by the clock, but being extended.
    tokio::time::sleep(Duration::from_millis(1600)).await;
    let request = AcquireRequest::new(key("k"), Ttl::DEFAULT).expect("randomness");
    let outcome = backend.acquire(&request).await.expect("works");
    assert!(extending.await.expect("no panic"), "their extend succeeded");
    assert!(matches!(outcome, AcquireOutcome::Contended { .. }), "{outcome:?}");
}

/// Defect B2 of the TypeScript implementation: waiting must not reduce the TTL.
#[tokio::test(flavor = "multi_thread")]
async fn the_expiry_counts_from_after_the_wait() {
    let Some(server) = start() else { return };
    let (backend, blocker) = (connect(&server).await, raw(&server).await);
    blocker
        .batch_execute("BEGIN; SELECT pg_advisory_xact_lock(hashtext('k'))")
        .await
        .expect("free");
    let acquiring = tokio::spawn(async move {
        let request = AcquireRequest::new(key("k"), ttl(1500)).expect("randomness");
        backend.acquire(&request).await
    });
    tokio::time::sleep(Duration::from_secs(2)).await;
    blocker.batch_execute("COMMIT").await.expect("works");
    let outcome = acquiring.await.expect("no panic").expect("works");
    let AcquireOutcome::Acquired(lease) = outcome else { panic!("{outcome:?}") };
    let now: i64 = blocker.query_one(NOW, &[]).await.expect("works").get(0);
    let left = i64::try_from(lease.expires_at().as_millis()).expect("small") - now;
    assert!(left > 700, "{left} ms are left of 1500");
}
