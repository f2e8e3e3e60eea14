//! The driver logs to the `log` facade. What it logs contains no key, lock id or password.
#![cfg(feature = "postgres")]

mod servers;

use std::fmt::Write as _;
use std::sync::Mutex;

use servers::{key, request};
use syncguard::backend::{AcquireOutcome, ExtendRequest, ReleaseRequest};
use syncguard::postgres::tokio_postgres::{self, NoTls};
use syncguard::postgres::{FencedTable, PostgresConfig};
use syncguard::{ExtendOutcome, Key, LockBackend, PostgresBackend, Ttl, diagnostics};
use test_support::{PgBouncer, PostgresOptions, PostgresServer};

const CANARY: &str = "canary-key-4711";
const PASSWORD: &str = "right";

/// Keeps every line.
struct Lines(Mutex<String>);

static LINES: Lines = Lines(Mutex::new(String::new()));

impl log::Log for Lines {
    fn enabled(&self, _metadata: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        let mut lines = self.0.lock().expect("no panic");
        writeln!(lines, "{}: {}", record.target(), record.args()).expect("writing to a string");
    }

    fn flush(&self) {}
}

#[tokio::test(flavor = "multi_thread")]
async fn the_driver_logs_neither_keys_nor_lock_ids() {
    log::set_logger(&LINES).expect("the first logger");
    log::set_max_level(log::LevelFilter::Trace);
    let options = PostgresOptions::default().with(["fsync = off"]).with_password();
    let Some(server) = PostgresServer::start(&options) else { return };
    let url = format!("postgres://postgres:{PASSWORD}@127.0.0.1:{}/postgres", server.port());
    let config = PostgresConfig::from_url(&url).expect("a URL").cleanup_in_is_locked(true);
    let backend = PostgresBackend::connect(config).await.expect("connects");
    backend.setup_schema().await.expect("works");
    let mut ids = Vec::new();
    let canary = key(CANARY);
    use_everything(&backend, &canary, &mut ids).await;
    // The user's own connection.
    let (mut client, connection) = tokio_postgres::connect(&url, NoTls).await.expect("connects");
    tokio::spawn(connection);
    let fenced = FencedTable::new("syncguard_fenced").expect("a name");
    client.batch_execute(&fenced.schema_sql()).await.expect("works");
    let transaction = client.transaction().await.expect("works");
    let fence = syncguard::Fence::new(7).expect("valid");
    fenced.check(&transaction, &(&canary, fence)).await.expect("the first");
    transaction.commit().await.expect("works");
    // Behind a pooler, the backend uses other calls of the driver.
    let plain = PostgresServer::start(&PostgresOptions::default().with(["fsync = off"]));
    let plain = plain.expect("installed");
    let Some(pooler) = PgBouncer::start(&plain) else { return };
    let config = PostgresConfig::from_url(&pooler.url()).expect("a URL").behind_pooler(true);
    let indirect = PostgresBackend::connect(config).await.expect("connects");
    indirect.setup_schema().await.expect("works");
    use_everything(&indirect, &canary, &mut ids).await;

    let lines = LINES.0.lock().expect("no panic").clone();
    assert!(lines.contains("tokio_postgres"), "the driver logs: {lines}");
    assert!(!lines.contains(CANARY), "a key was logged");
    assert!(!ids.is_empty());
    for id in ids {
        assert!(!lines.contains(&id), "a lock id was logged");
    }
    assert!(!lines.contains(&format!(":{PASSWORD}@")), "a password was logged");
}

async fn use_everything(backend: &PostgresBackend, canary: &Key, ids: &mut Vec<String>) {
    let request = request(CANARY);
    let id = request.lock_id();
    ids.push(id.expose().to_owned());
    let acquired = backend.acquire(&request).await.expect("works");
    assert!(matches!(acquired, AcquireOutcome::Acquired(_)), "{acquired:?}");
    let second = servers::request(CANARY);
    ids.push(second.lock_id().expose().to_owned());
    let contended = backend.acquire(&second).await.expect("works");
    assert!(matches!(contended, AcquireOutcome::Contended { .. }), "{contended:?}");
    let subscription = backend.subscribe(canary).await;
    let extended = backend.extend(&ExtendRequest::new(id, Ttl::DEFAULT)).await.expect("works");
    assert!(matches!(extended, ExtendOutcome::Extended(_)), "{extended:?}");
    assert!(backend.is_locked(canary).await.expect("works"));
    assert!(diagnostics::get_by_key(backend, canary).await.expect("works").is_some());
    assert!(diagnostics::get_by_id(backend, &id).await.expect("works").is_some());
    let admin = backend.admin().expect("offered");
    assert!(!admin.list(None).await.expect("works").locks.is_empty());
    backend.release(&ReleaseRequest::new(id)).await.expect("works");
    drop(subscription);
}
