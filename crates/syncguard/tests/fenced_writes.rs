//! Fences at the resource, on every store: a holder in another process is paused past its TTL, a
//! later holder writes, and the late write is refused. Also what each check does with bad input.
#![cfg(all(feature = "redis", feature = "postgres", feature = "sqlite", feature = "firestore"))]

mod firestore_raw;
mod servers;

use std::io::{BufRead, BufReader, Write as _};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

use firestore_raw::{Raw, fields, string, text_of};
use redis::AsyncCommands;
use redis::cluster_async::ClusterConnection;
use servers::{eventually, key};
use syncguard::backend::{AcquireOutcome, AcquireRequest};
use syncguard::firestore::{FencedCollection, FirestoreConfig};
use syncguard::postgres::{FenceTrigger, FencedTable, tokio_postgres};
use syncguard::redis::{FencedKeys, FencedScript};
use syncguard::{Error, ErrorCode, Fence, FirestoreBackend, Key, LockBackend, Result, Ttl, sqlite};
use test_support::{
    FirestoreEmulator, PostgresOptions, PostgresServer, RedisCluster, RedisOptions, RedisServer,
    TempDir,
};

/// A lock, as a resource sees it.
type Lock = (Key, Fence);

/// The places of the locks and of the data, and how the data is written.
#[derive(Clone)]
struct Store {
    kind: String,
    locks: String,
    data: String,
}

const KIND: &str = "SYNCGUARD_TEST_KIND";
const LOCKS: &str = "SYNCGUARD_TEST_LOCKS";
const DATA: &str = "SYNCGUARD_TEST_DATA";

fn lock(name: &str, fence: u64) -> Lock {
    (key(name), Fence::new(fence).expect("valid"))
}

async fn postgres_client(url: &str) -> tokio_postgres::Client {
    let (client, connection) =
        tokio_postgres::connect(url, tokio_postgres::NoTls).await.expect("connects");
    tokio::spawn(connection);
    client
}

async fn redis_connection(url: &str) -> redis::aio::MultiplexedConnection {
    let client = redis::Client::open(url).expect("a URL");
    client.get_multiplexed_async_connection().await.expect("connects")
}

async fn cluster_connection(nodes: &str) -> ClusterConnection {
    let client = redis::cluster::ClusterClient::new(nodes.split(',')).expect("URLs");
    client.get_async_connection().await.expect("connects")
}

impl Store {
    /// Writes under a fence, the way a user does.
    async fn write(&self, lock: &Lock, text: &str) -> Result<()> {
        match self.kind.as_str() {
            "redis" => {
                let mut connection = redis_connection(&self.data).await;
                FencedKeys::new().set(&mut connection, lock, "document", text).await
            }
            "redis-cluster" => {
                let mut connection = cluster_connection(&self.data).await;
                FencedKeys::new().set(&mut connection, lock, "document", text).await
            }
            "postgres" => {
                let mut client = postgres_client(&self.data).await;
                let transaction = client.transaction().await.expect("begins");
                FencedTable::new("fenced")?.check(&transaction, lock).await?;
                transaction.execute("UPDATE documents SET text = $1", &[&text]).await.expect("sql");
                transaction.commit().await.expect("commits");
                Ok(())
            }
            "postgres-trigger" => {
                let mut client = postgres_client(&self.data).await;
                let transaction = client.transaction().await.expect("begins");
                let fence = lock.1.to_string();
                transaction.execute(FenceTrigger::set_sql(), &[&fence]).await.expect("set");
                match transaction.execute("UPDATE documents SET text = $1", &[&text]).await {
                    Ok(_) => transaction.commit().await.expect("commits"),
                    Err(cause) => {
                        let state = cause.code().expect("from the server").code();
                        assert_eq!(state, FenceTrigger::STALE_FENCE);
                        return Err(Error::new(ErrorCode::Aborted, "refused by the trigger"));
                    }
                }
                Ok(())
            }
            "sqlite" => {
                let mut db = rusqlite::Connection::open(&self.data).expect("opens");
                db.busy_timeout(Duration::from_secs(5)).expect("works");
                let transaction = db.transaction().expect("begins");
                sqlite::FencedTable::new("fenced")?.check(&transaction, lock)?;
                transaction.execute("UPDATE documents SET text = ?1", [text]).expect("sql");
                transaction.commit().expect("commits");
                Ok(())
            }
            "firestore" => {
                let backend = self.firestore().await;
                let write = firestore_raw::set("documents/1", fields([("text", string(text))]));
                FencedCollection::new("fenced")?.commit(&backend, lock, vec![write]).await
            }
            other => panic!("{other}"),
        }
    }

    async fn firestore(&self) -> FirestoreBackend {
        let config = FirestoreConfig::new("test").emulator(format!("127.0.0.1:{}", self.data));
        FirestoreBackend::connect(config).await.expect("connects")
    }

    async fn read(&self) -> String {
        match self.kind.as_str() {
            "redis" => redis_connection(&self.data).await.get("document").await.expect("works"),
            "redis-cluster" => {
                cluster_connection(&self.data).await.get("document").await.expect("works")
            }
            "postgres" | "postgres-trigger" => {
                let client = postgres_client(&self.data).await;
                client.query_one("SELECT text FROM documents", &[]).await.expect("works").get(0)
            }
            "sqlite" => {
                let db = rusqlite::Connection::open(&self.data).expect("opens");
                db.query_row("SELECT text FROM documents", [], |row| row.get(0)).expect("works")
            }
            "firestore" => {
                let raw = Raw::new(self.data.parse().expect("a port"));
                text_of(&raw.get("documents/1").await.expect("written"), "text")
            }
            other => panic!("{other}"),
        }
    }

    /// Tries to acquire the lock of the document.
    async fn acquire(&self, ttl: Duration) -> Option<Lock> {
        let backend = syncguard::connect(&self.locks).await.expect("connects");
        let ttl = Ttl::new(ttl).expect("valid");
        let request = AcquireRequest::new(key("document"), ttl).expect("randomness");
        match backend.acquire(&request).await.expect("works") {
            AcquireOutcome::Acquired(lease) => Some((key("document"), lease.fence())),
            _ => None,
        }
    }

    /// Pauses a holder past its TTL, and checks that its late write is refused.
    async fn check_a_paused_holder(&self) {
        let mut holder = Holder::start(self);
        assert_eq!(holder.answer(), "written", "a holder can write");
        assert_eq!(self.read().await, "early");
        holder.signal("STOP");
        let mut current = None;
        eventually("the lock of the paused holder expires", async || {
            current = self.acquire(Duration::from_mins(1)).await;
            current.is_some()
        })
        .await;
        let current = current.expect("acquired");
        self.write(&current, "current").await.expect("the current holder can write");
        holder.signal("CONT");
        assert_eq!(holder.answer(), "refused", "the paused holder writes late");
        assert_eq!(self.read().await, "current");
        self.write(&current, "current again").await.expect("the same fence passes again");
        assert_eq!(self.read().await, "current again");
    }
}

/// This program again, as a holder that writes twice.
struct Holder {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl Holder {
    fn start(store: &Store) -> Self {
        let mut child = Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", "another_process", "--ignored", "--nocapture"])
            .env(KIND, &store.kind)
            .env(LOCKS, &store.locks)
            .env(DATA, &store.data)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("starts");
        let lines = BufReader::new(child.stdout.take().expect("piped"));
        Self { child, lines }
    }

    /// Lets the holder write, and returns the outcome.
    fn answer(&mut self) -> String {
        self.child.stdin.as_mut().expect("piped").write_all(b"\n").expect("written");
        loop {
            let mut line = String::new();
            assert!(self.lines.read_line(&mut line).expect("readable") > 0, "the holder ended");
            if let Some(answer) = line.trim_end().strip_prefix("> ") {
                return answer.to_owned();
            }
        }
    }

    fn signal(&self, name: &str) {
        let process = self.child.id().to_string();
        let sent = Command::new("kill").args([&format!("-{name}"), &process]).status();
        assert!(sent.expect("kill runs").success());
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// The holder: acquires the lock for half a second, and writes once per line.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "started by the tests, as another process"]
async fn another_process() {
    let variable = |name| std::env::var(name).expect("set by the test");
    let store = Store { kind: variable(KIND), locks: variable(LOCKS), data: variable(DATA) };
    let held = store.acquire(Duration::from_millis(500)).await.expect("free");
    for text in ["early", "late"] {
        std::io::stdin().read_line(&mut String::new()).expect("readable");
        match store.write(&held, text).await {
            Ok(()) => println!("> written"),
            Err(error) if error.code() == ErrorCode::Aborted => println!("> refused"),
            Err(error) => println!("> {error}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn redis_refuses_a_paused_holder() {
    let Some(server) = RedisServer::start(&RedisOptions::default()) else { return };
    let url = server.url();
    Store { kind: "redis".to_owned(), locks: url.clone(), data: url }.check_a_paused_holder().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_redis_cluster_refuses_a_paused_holder() {
    let Some(cluster) = RedisCluster::start(0) else { return };
    let nodes: Vec<_> = cluster.nodes().iter().map(RedisServer::url).collect();
    let locks = cluster.url("prefix=%7Blocks%7D");
    let store = Store { kind: "redis-cluster".to_owned(), locks, data: nodes.join(",") };
    store.check_a_paused_holder().await;
}

fn postgres() -> Option<PostgresServer> {
    let options = PostgresOptions::default().with(["fsync = off"]);
    let server = PostgresServer::start(&options)?;
    let tables = "CREATE TABLE documents (text text, fence bigint NOT NULL DEFAULT 0); \
                  INSERT INTO documents VALUES ('empty')";
    assert!(server.sql(tables).contains("INSERT"));
    let fenced = FencedTable::new("fenced").expect("valid").schema_sql();
    assert!(server.sql(&fenced).contains("CREATE"));
    Some(server)
}

#[tokio::test(flavor = "multi_thread")]
async fn postgres_refuses_a_paused_holder_by_table_and_by_trigger() {
    let Some(server) = postgres() else { return };
    let locks = server.url();
    let backend = syncguard::connect(&locks).await.expect("connects");
    backend.admin().expect("an admin").setup().await.expect("works");
    let store = Store { kind: "postgres".to_owned(), locks: locks.clone(), data: locks };
    store.check_a_paused_holder().await;
    let trigger = FenceTrigger::new("documents").expect("valid").create_sql();
    assert!(server.sql(&trigger).contains("CREATE"));
    assert!(server.sql("DELETE FROM syncguard_locks").contains("DELETE"));
    Store { kind: "postgres-trigger".to_owned(), ..store }.check_a_paused_holder().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn sqlite_refuses_a_paused_holder() {
    let folder = TempDir::new();
    let data = folder.path().join("data.db").display().to_string();
    let db = rusqlite::Connection::open(&data).expect("opens");
    let fenced = sqlite::FencedTable::new("fenced").expect("valid");
    db.execute_batch(&fenced.schema_sql()).expect("works");
    db.execute_batch("CREATE TABLE documents (text); INSERT INTO documents VALUES ('empty')")
        .expect("works");
    let locks = format!("sqlite:{}", folder.path().join("locks.db").display());
    Store { kind: "sqlite".to_owned(), locks, data }.check_a_paused_holder().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn firestore_refuses_a_paused_holder() {
    let Some(emulator) = FirestoreEmulator::start() else { return };
    let data = emulator.port().to_string();
    let store = Store { kind: "firestore".to_owned(), locks: emulator.url(), data };
    store.check_a_paused_holder().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn fenced_redis_writes_check_before_they_write() {
    let Some(server) = RedisServer::start(&RedisOptions::default()) else { return };
    let mut raw = redis_connection(&server.url()).await;
    let fenced = FencedKeys::new();
    let (first, second) = (lock("a", 7), lock("a", 8));
    let is_stale = |error: Error| error.is_stale_fence() && !error.may_have_taken_effect();

    fenced.set(&mut raw, &second, "text", "x").await.expect("written");
    assert!(is_stale(fenced.set(&mut raw, &first, "text", "y").await.expect_err("stale")));
    assert!(is_stale(fenced.del(&mut raw, &first, "text").await.expect_err("stale")));
    assert_eq!(raw.get::<_, String>("text").await.expect("works"), "x");
    assert!(fenced.del(&mut raw, &second, "text").await.expect("deleted"));
    assert!(!fenced.del(&mut raw, &second, "text").await.expect("was gone"));
    assert!(is_stale(fenced.set(&mut raw, &first, "text", "y").await.expect_err("remembered")));

    let fields = [("one", "1"), ("two", "2")];
    assert_eq!(fenced.hset(&mut raw, &first, "hash", &fields).await.expect("written"), 2);
    assert_eq!(fenced.hset(&mut raw, &second, "hash", &[("one", "3")]).await.expect("again"), 0);
    assert!(is_stale(fenced.hset(&mut raw, &first, "hash", &fields).await.expect_err("stale")));
    let empty: [(&str, &str); 0] = [];
    let error = fenced.hset(&mut raw, &second, "hash", &empty).await.expect_err("no field");
    assert_eq!(error.code(), ErrorCode::InvalidArgument);

    // A script of the user's sees its own keys and arguments only.
    let append = "redis.call('RPUSH', KEYS[1], unpack(ARGV)) return {#KEYS, #ARGV, KEYS[2]}";
    let append = FencedScript::new(append).expect("valid");
    let keys = ["log", "other"];
    let answer: (u32, u32, String) =
        fenced.run(&mut raw, &first, &append, &keys, &["a", "b", "c"]).await.expect("ran");
    assert_eq!(answer, (2, 3, "other".to_owned()));
    let run = fenced.run::<_, redis::Value>(&mut raw, &lock("a", 6), &append, &keys, &["d"]).await;
    assert!(is_stale(run.expect_err("stale")));
    assert_eq!(raw.llen::<_, u32>("log").await.expect("works"), 3, "it did not run");
    let run = fenced.run::<_, redis::Value>(&mut raw, &first, &append, &[""; 0], &["d"]).await;
    assert_eq!(run.expect_err("no key").code(), ErrorCode::InvalidArgument);

    // Redis rolls nothing back: what the script wrote before its error stays.
    let twice = "redis.call('SET', KEYS[1], 'x') return redis.call('LPUSH', KEYS[1], 'y')";
    let twice = FencedScript::new(twice).expect("valid");
    let none: [&str; 0] = [];
    let run = fenced.run::<_, redis::Value>(&mut raw, &first, &twice, &["half"], &none).await;
    assert!(run.expect_err("another type").may_have_taken_effect());
    assert_eq!(raw.get::<_, String>("half").await.expect("works"), "x");

    // A fence of another lock cannot be compared.
    let error = fenced.set(&mut raw, &lock("b", 99), "text", "y").await.expect_err("another lock");
    assert_eq!(error.code(), ErrorCode::InvalidArgument, "{error}");
    assert!(!raw.exists::<_, bool>("text").await.expect("works"), "nothing was written");
    // Neither can data of another program.
    raw.set::<_, _, ()>("{taken}:syncguard-fence", "data").await.expect("works");
    let error = fenced.set(&mut raw, &first, "taken", "y").await.expect_err("foreign");
    assert_eq!((error.code(), error.may_have_taken_effect()), (ErrorCode::Internal, false));
    assert!(!raw.exists::<_, bool>("taken").await.expect("works"));

    // Records are kept for good, unless an expiry is set.
    let kept: i64 = redis::cmd("PTTL")
        .arg("{text}:syncguard-fence")
        .query_async(&mut raw)
        .await
        .expect("works");
    assert_eq!(kept, -1);
    let days = |days: u64| Duration::from_hours(24 * days);
    assert!(FencedKeys::new().fence_expiry(days(1)).is_err());
    let expiring = FencedKeys::new().fence_expiry(days(2)).expect("valid");
    expiring.set(&mut raw, &second, "text", "z").await.expect("written");
    let kept: i64 = redis::cmd("PTTL")
        .arg("{text}:syncguard-fence")
        .query_async(&mut raw)
        .await
        .expect("works");
    assert!((1..=days(2).as_millis().try_into().expect("small")).contains(&kept), "{kept}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stale_fence_ends_the_postgres_transaction_even_if_the_refusal_is_ignored() {
    let Some(server) = postgres() else { return };
    let mut client = postgres_client(&server.url()).await;
    let fenced = FencedTable::new("fenced").expect("valid");
    let mut write = async |fence: u64, text: &str| {
        let lock = (Key::new("document").expect("valid"), Fence::new(fence).expect("valid"));
        let transaction = client.transaction().await.expect("begins");
        let checked = fenced.check(&transaction, &lock).await;
        // As in a pipeline, which does not wait for the answer.
        drop(transaction.execute("UPDATE documents SET text = $1", &[&text]).await);
        drop(transaction.commit().await);
        checked
    };
    write(5, "later").await.expect("the first fence");
    let error = write(4, "stale").await.expect_err("a smaller one");
    assert!(error.is_stale_fence(), "{error}");
    assert_eq!(server.sql("SELECT text FROM documents"), "later");
    write(5, "again").await.expect("the same fence");
    assert_eq!(server.sql("SELECT text FROM documents"), "again");
    let sql = fenced.check_sql();
    let number = 4_i64;
    let error = client.execute(&sql, &[&"document", &number]).await.expect_err("stale");
    let error = error.as_db_error().expect("from the server");
    assert_eq!(error.code().code(), FencedTable::STALE_FENCE);
    assert!(error.message().contains("the fence is stale"), "{error}");
    // PostgreSQL logs both.
    assert!(!error.message().contains("document") && error.detail().is_none(), "{error:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_postgres_trigger_refuses_missing_invalid_and_stale_fences() {
    let Some(server) = postgres() else { return };
    let client = postgres_client(&server.url()).await;
    client.batch_execute("CREATE TABLE bare (text text)").await.expect("works");
    let missing = FenceTrigger::new("bare").expect("valid").create_sql();
    let error = client.batch_execute(&missing).await.expect_err("no column");
    assert_eq!(error.code().expect("from the server").code(), "42703", "{error}");
    client.batch_execute("INSERT INTO bare VALUES ('x')").await.expect("no trigger was created");
    let trigger = FenceTrigger::new("public.documents").expect("valid").create_sql();
    client.batch_execute(&trigger).await.expect("created");
    client.batch_execute(&trigger).await.expect("created again");
    let write = async |fence: Option<&str>, statement: &str| {
        let fence = fence.map_or_else(String::new, |fence| {
            format!("SELECT set_config('syncguard.fence', '{fence}', true);")
        });
        let script = format!("BEGIN; {fence} {statement}; COMMIT");
        let done = client.batch_execute(&script).await;
        client.batch_execute("ROLLBACK").await.expect("works");
        done.map_err(|cause| cause.code().expect("from the server").code().to_owned())
    };
    let update = "UPDATE documents SET text = text || '.'";
    let (stale, none) = (FenceTrigger::STALE_FENCE, FenceTrigger::NO_FENCE);
    write(Some("000000000000034"), update).await.expect("the first fence");
    write(Some("34"), update).await.expect("the same fence");
    for (fence, state) in [
        (None, none),
        (Some(""), none),
        (Some("-1"), none),
        (Some("x"), none),
        (Some("1234567890123456"), none),
        (Some("000000000000033"), stale),
    ] {
        for statement in [update, "DELETE FROM documents"] {
            assert_eq!(write(fence, statement).await.expect_err("refused"), state, "{fence:?}");
        }
    }
    assert_eq!(write(None, "INSERT INTO documents VALUES ('new')").await.expect_err(""), none);
    assert_eq!(server.sql("SELECT text, fence FROM documents"), "empty..|34");
    write(Some("35"), "INSERT INTO documents VALUES ('new')").await.expect("written");
    write(Some("36"), "DELETE FROM documents").await.expect("deleted");
}

#[test]
fn a_sqlite_table_that_is_missing_or_different_is_an_error() {
    let mut db = rusqlite::Connection::open_in_memory().expect("opens");
    let fenced = sqlite::FencedTable::new("fenced").expect("valid");
    let invalid = |error: Error| assert_eq!(error.code(), ErrorCode::InvalidArgument, "{error}");
    for bad in ["", "1a", "a.b", "a\"b", "x; DROP TABLE y", &"a".repeat(64)] {
        invalid(sqlite::FencedTable::new(bad).expect_err("refused"));
    }
    let transaction = db.transaction().expect("begins");
    invalid(fenced.check(&transaction, &lock("a", 1)).expect_err("no table"));
    transaction.execute_batch("CREATE TABLE fenced (key TEXT PRIMARY KEY)").expect("works");
    invalid(fenced.check(&transaction, &lock("a", 1)).expect_err("no column"));
    drop(transaction);
    db.execute_batch(&fenced.schema_sql()).expect("works");
    let transaction = db.transaction().expect("begins");
    fenced.check(&transaction, &lock("a", 2)).expect("the first");
    fenced.check(&transaction, &lock("a", 2)).expect("the same");
    assert!(fenced.check(&transaction, &lock("a", 1)).expect_err("stale").is_stale_fence());
    fenced.check(&transaction, &lock("b", 1)).expect("another lock has fences of its own");
    drop(transaction);
    let transaction = db.transaction().expect("begins");
    fenced.check(&transaction, &lock("a", 1)).expect("what was rolled back is forgotten");
}

#[tokio::test(flavor = "multi_thread")]
async fn fenced_firestore_commits_are_all_or_nothing() {
    let Some(emulator) = FirestoreEmulator::start() else { return };
    let config = FirestoreConfig::new("test").emulator(emulator.host());
    let backend = FirestoreBackend::connect(config).await.expect("connects");
    let raw = Raw::new(emulator.port());
    for bad in ["", "a/b", "..", "__x__"] {
        let error = FencedCollection::new(bad).expect_err("refused");
        assert_eq!(error.code(), ErrorCode::InvalidArgument, "{error}");
    }
    let fenced = FencedCollection::new("fenced").expect("valid");
    let write =
        |text: &str| vec![firestore_raw::set("documents/1", fields([("text", string(text))]))];
    fenced.commit(&backend, &lock("a", 8), write("x")).await.expect("written");
    let error = fenced.commit(&backend, &lock("a", 7), write("y")).await.expect_err("stale");
    assert!(error.is_stale_fence() && error.operation().is_some(), "{error}");
    // A precondition of the caller's fails: nothing is written, and the fence is not remembered.
    let mut only_if_new = write("z");
    only_if_new[0].current_document = Some(syncguard::firestore::api::Precondition {
        condition_type: Some(syncguard::firestore::api::precondition::ConditionType::Exists(false)),
    });
    let error = fenced.commit(&backend, &lock("a", 9), only_if_new).await.expect_err("it exists");
    assert!(!error.is_stale_fence(), "{error}");
    assert_eq!(text_of(&raw.get("documents/1").await.expect("there"), "text"), "x");
    fenced.commit(&backend, &lock("a", 8), write("w")).await.expect("8 is still the largest");
    fenced.commit(&backend, &lock("b", 1), write("v")).await.expect("fences of its own");
    // Two writers at once: both are applied, in some order.
    let held = lock("a", 10);
    let (one, two) = tokio::join!(
        fenced.commit(&backend, &held, write("one")),
        fenced.commit(&backend, &held, write("two"))
    );
    one.expect("written");
    two.expect("written");
}

/// The largest fence of a resource is remembered in the lock store, on every backend.
async fn check_resources(url: &str) {
    let backend = syncguard::connect(url).await.expect("connects");
    let admin = backend.admin().expect("an admin");
    admin.setup().await.expect("works");
    let (file, other) = (key("/srv/site map/\u{e9}"), key("another"));
    let (a, b) = (key("a"), key("b"));
    let check = async |resource: &Key, fence: u64, key: Option<&Key>| {
        admin.check_fence(resource, Fence::new(fence).expect("valid"), key).await
    };
    check(&file, 7, Some(&a)).await.expect("the first");
    check(&file, 8, Some(&a)).await.expect("a later one");
    check(&file, 8, Some(&a)).await.expect("the same");
    assert!(check(&file, 7, Some(&a)).await.expect_err("stale").is_stale_fence(), "{url}");
    let error = check(&file, 9, Some(&b)).await.expect_err("another lock");
    assert_eq!(error.code(), ErrorCode::InvalidArgument, "{url}: {error}");
    check(&file, 8, Some(&a)).await.expect("9 was not remembered");
    check(&file, 9, None).await.expect("without a key");
    assert!(check(&file, 8, None).await.expect_err("stale").is_stale_fence(), "{url}");
    assert!(check(&file, 9, Some(&b)).await.is_err(), "{url}: the lock is still known");
    check(&other, 1, None).await.expect("another resource");
    check(&other, 2, Some(&b)).await.expect("the lock becomes known");
    assert!(check(&other, 3, Some(&a)).await.is_err(), "{url}");
    // A resource is not a lock, and leaves the counters alone.
    assert!(!backend.is_locked(&file).await.expect("works"));
    let request = AcquireRequest::new(file.clone(), Ttl::DEFAULT).expect("randomness");
    let AcquireOutcome::Acquired(lease) = backend.acquire(&request).await.expect("works") else {
        panic!("free")
    };
    assert_eq!(lease.fence(), Fence::FIRST, "{url}");
    let page = admin.list(None).await.expect("works");
    assert_eq!(page.locks.len(), 1, "{url}");
}

#[tokio::test(flavor = "multi_thread")]
async fn every_store_remembers_the_largest_fence_of_a_resource() {
    check_resources("memory:").await;
    let folder = TempDir::new();
    check_resources(&format!("sqlite:{}", folder.path().join("locks.db").display())).await;
    if let Some(server) = RedisServer::start(&RedisOptions::default()) {
        check_resources(&server.url()).await;
    }
    if let Some(server) = postgres() {
        check_resources(&server.url()).await;
    }
    if let Some(emulator) = FirestoreEmulator::start() {
        check_resources(&emulator.url()).await;
    }
}
