//! Faults of the PostgreSQL backend: crashes, terminated sessions, locks held by other sessions,
//! cut connections and wrong configurations.
#![cfg(feature = "postgres")]

mod servers;

use std::time::{Duration, Instant};

use servers::postgres::{config, connect, raw, start};
use servers::{cycle, eventually, key, request, resets, shown, waiter, woken};
use syncguard::backend::{AcquireOutcome, ExtendRequest, Finding, ReleaseRequest};
use syncguard::postgres::tokio_postgres::{self, NoTls};
use syncguard::postgres::{FencedTable, PostgresConfig};
use syncguard::{
    ErrorCode, ExtendOutcome, LockBackend, LockOptions, Locker, LostReason, PostgresBackend,
    ReleaseOutcome, Ttl,
};
use test_support::{Certificates, Fault, PgBouncer, PostgresOptions, PostgresServer, Proxy};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_that_was_acquired_and_released_unseen_costs_no_fence() {
    let Some(server) = start() else { return };
    let quick = connect(&server.url()).await;
    cycle(&quick, "a").await.expect("works");
    // A statement of the slow backend waits for the test between its snapshot and the advisory
    // lock.
    let raw = raw(&server).await;
    let slow = "CREATE SCHEMA slow; CREATE FUNCTION slow.hashtext(text) RETURNS int AS 'SELECT \
                pg_advisory_xact_lock_shared(4711); SELECT pg_catalog.hashtext($1)' LANGUAGE sql";
    raw.batch_execute(slow).await.expect("works");
    let path = "options=-c%20search_path%3Dpublic,slow,pg_catalog";
    let config = config(&format!("{}?{path}", server.url()));
    let config = config.response_timeout(Duration::from_secs(20));
    let slow = PostgresBackend::connect(config).await.expect("connects");
    for is_held in [true, false] {
        raw.execute("SELECT pg_advisory_lock(4711)", &[]).await.expect("works");
        let request = request("a");
        let (outcome, fence) = tokio::join!(slow.acquire(&request), async {
            let waits = "SELECT FROM pg_locks WHERE objid = 4711 AND NOT granted";
            eventually("the slow backend waits", async || {
                raw.query_opt(waits, &[]).await.expect("works").is_some()
            })
            .await;
            let taken = quick.acquire(&self::request("a")).await.expect("works");
            let AcquireOutcome::Acquired(lease) = taken else { panic!("{taken:?}") };
            if !is_held {
                raw.execute("DELETE FROM syncguard_locks", &[]).await.expect("works");
            }
            raw.execute("SELECT pg_advisory_unlock(4711)", &[]).await.expect("works");
            lease.fence().get()
        });
        match outcome.expect("works") {
            AcquireOutcome::Contended { .. } => assert!(is_held),
            AcquireOutcome::Acquired(lease) => {
                assert_eq!((lease.fence().get(), is_held), (fence + 1, false));
            }
            AcquireOutcome::AlreadyUsed => panic!("it is a new request"),
        }
        let counter = raw.query_one("SELECT fence FROM syncguard_fence_counters", &[]).await;
        let counter: i64 = counter.expect("works").get(0);
        assert_eq!(counter.unsigned_abs(), fence + u64::from(!is_held));
        raw.execute("DELETE FROM syncguard_locks", &[]).await.expect("works");
    }
}

/// Outside of a task of the runtime, a future that has used up its budget is woken at once.
#[test]
fn an_operation_continues_when_the_task_budget_is_used_up() {
    let Some(server) = start() else { return };
    let (done, finished) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
        runtime.expect("a runtime").block_on(async {
            let backend = connect(&server.url()).await;
            for used_up in 100..=128 {
                tokio::task::yield_now().await;
                for _ in 0..used_up {
                    tokio::task::consume_budget().await;
                }
                assert!(!backend.is_locked(&key("k")).await.expect("works"));
            }
        });
        done.send(()).expect("the test waits");
    });
    finished.recv_timeout(Duration::from_mins(1)).expect("it ends");
}

/// A release in one backend wakes a waiter in another.
async fn wakes(holder: &PostgresBackend, there: &PostgresBackend) {
    let guard = waiter(holder.clone()).lock("w").await.expect("free");
    let waiter = waiter(there.clone());
    let waiting = tokio::spawn(async move { waiter.lock("w").await.map(drop) });
    tokio::time::sleep(Duration::from_millis(400)).await;
    assert_eq!(guard.release().await.expect("works"), ReleaseOutcome::Released);
    woken(waiting).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_fence_repeats_after_a_crash_and_the_client_recovers() {
    let Some(mut server) = PostgresServer::start(&PostgresOptions::default()) else { return };
    let backend = connect(&server.url()).await;
    let mut last = 0;
    for other in ["a", "b"] {
        for _ in 0..10 {
            let fence = cycle(&backend, "k").await.expect("works");
            assert!(fence > last);
            last = fence;
        }
        // A grant, so that the crash does not undo the last release.
        cycle(&backend, other).await.expect("works");
        server.crash();
        assert!(backend.is_locked(&key("k")).await.is_err(), "typed, not a hang");
        server.run();
        eventually("the backend is back", async || backend.is_locked(&key("k")).await.is_ok())
            .await;
    }
    wakes(&backend, &backend).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn notifications_survive_terminated_sessions() {
    let Some(server) = start() else { return };
    let (one, two) = (connect(&server.url()).await, connect(&server.url()).await);
    wakes(&one, &two).await;
    let terminate = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE \
                     application_name = 'syncguard'";
    assert_ne!(server.sql(terminate), "0");
    eventually("both are back", async || cycle(&one, "k").await.is_ok()).await;
    eventually("both are back", async || cycle(&two, "k").await.is_ok()).await;
    wakes(&one, &two).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn locks_held_by_other_sessions_cause_timeouts() {
    let Some(server) = start() else { return };
    let (backend, stranger) = (connect(&server.url()).await, raw(&server).await);
    // The advisory lock of the key.
    stranger.batch_execute("SELECT pg_advisory_lock(hashtext('k'))").await.expect("free");
    let started = Instant::now();
    let error = backend.acquire(&request("k")).await.expect_err("it is held");
    assert_eq!(error.code(), ErrorCode::NetworkTimeout, "{error:?}");
    assert!(!error.may_have_taken_effect(), "{error:?}");
    assert!(started.elapsed() < Duration::from_secs(5), "it does not hang");
    assert!(cycle(&backend, "other").await.is_ok());
    stranger.batch_execute("SELECT pg_advisory_unlock(hashtext('k'))").await.expect("held");
    assert!(cycle(&backend, "k").await.is_ok());
    // The row.
    let held = request("row");
    assert!(matches!(backend.acquire(&held).await.expect("works"), AcquireOutcome::Acquired(_)));
    stranger
        .batch_execute("BEGIN; SELECT FROM syncguard_locks WHERE key = 'row' FOR UPDATE")
        .await
        .expect("works");
    let error = backend.release(&ReleaseRequest::new(held.lock_id())).await.expect_err("locked");
    assert_eq!(error.code(), ErrorCode::NetworkTimeout, "{error:?}");
    // A contended acquire only reads, so nothing delays it.
    let outcome = backend.acquire(&request("row")).await.expect("works");
    assert!(matches!(outcome, AcquireOutcome::Contended { .. }), "{outcome:?}");
    stranger.batch_execute("COMMIT").await.expect("works");
    let released = backend.release(&ReleaseRequest::new(held.lock_id())).await.expect("works");
    assert_eq!(released, ReleaseOutcome::Released);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_contended_acquire_writes_and_locks_nothing() {
    let Some(server) = start() else { return };
    let (backend, watcher) = (connect(&server.url()).await, raw(&server).await);
    let held = request("k");
    assert!(matches!(backend.acquire(&held).await.expect("works"), AcquireOutcome::Acquired(_)));
    let position = async || -> String {
        let asked = "SELECT pg_current_wal_insert_lsn()::text";
        watcher.query_one(asked, &[]).await.expect("works").get(0)
    };
    let quiet = async || -> bool {
        let one = position().await;
        tokio::time::sleep(Duration::from_millis(300)).await;
        one == position().await
    };
    eventually("the server is quiet", quiet).await;
    let before = position().await;
    for _ in 0..50 {
        let outcome = backend.acquire(&request("k")).await.expect("works");
        assert!(matches!(outcome, AcquireOutcome::Contended { .. }), "{outcome:?}");
    }
    assert_eq!(position().await, before, "nothing was written");
}

/// Another session takes locks in the other order. PostgreSQL aborts one of the two transactions;
/// if it is ours, the error is retryable.
#[tokio::test(flavor = "multi_thread")]
async fn a_deadlock_with_another_session_is_retryable_and_leaves_nothing() {
    let options = PostgresOptions::default().with(["fsync = off", "deadlock_timeout = '200ms'"]);
    let Some(server) = PostgresServer::start(&options) else { return };
    let (backend, stranger) = (connect(&server.url()).await, raw(&server).await);
    cycle(&backend, "k").await.expect("works");
    // The other session locks the counter, then wants the key's advisory lock, which ours holds.
    stranger
        .batch_execute("BEGIN; SELECT FROM syncguard_fence_counters FOR UPDATE")
        .await
        .expect("works");
    let acquiring = tokio::spawn({
        let backend = backend.clone();
        async move { backend.acquire(&request("k")).await }
    });
    tokio::time::sleep(Duration::from_millis(100)).await;
    let wanted = stranger.batch_execute("SELECT pg_advisory_xact_lock(hashtext('k'))").await;
    stranger.batch_execute("ROLLBACK").await.expect("works");
    match acquiring.await.expect("no panic") {
        Ok(outcome) => {
            assert!(wanted.is_err(), "one of the two was aborted");
            assert!(matches!(outcome, AcquireOutcome::Acquired(_)), "{outcome:?}");
        }
        Err(error) => {
            assert!(error.is_retryable() && !error.may_have_taken_effect(), "{error:?}");
            assert!(!backend.is_locked(&key("k")).await.expect("works"));
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_default_of_serializable_does_not_matter() {
    let options = PostgresOptions::default()
        .with(["fsync = off", "default_transaction_isolation = 'serializable'"])
        .with(["default_transaction_read_only = on"]);
    let Some(server) = PostgresServer::start(&options) else { return };
    let backend = connect(&server.url()).await;
    let tasks: Vec<_> = (0..8)
        .map(|_| {
            let locker = waiter(backend.clone());
            tokio::spawn(async move {
                for _ in 0..25 {
                    let guard = locker.lock("k").await.expect("acquired");
                    assert_eq!(guard.release().await.expect("works"), ReleaseOutcome::Released);
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.expect("no panic");
    }
    assert_eq!(cycle(&backend, "k").await.expect("works"), 201);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_holder_can_release_with_one_connection_and_fifty_waiters() {
    let Some(server) = start() else { return };
    let small = config(&server.url()).pool_size(1);
    let backend = PostgresBackend::connect(small).await.expect("connects");
    backend.setup_schema().await.expect("works");
    let options = LockOptions::default().timeout(Duration::from_mins(1)).renew();
    let locker = Locker::builder(backend).options(options).build().expect("in a runtime");
    let guard = locker.lock("k").await.expect("free");
    let waiters: Vec<_> = (0..50)
        .map(|_| {
            let locker = locker.clone();
            tokio::spawn(async move { locker.lock("k").await.map(drop) })
        })
        .collect();
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(guard.release().await.expect("works"), ReleaseOutcome::Released);
    for waiter in waiters {
        waiter.await.expect("no panic").expect("acquired");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn twenty_backends_set_up_the_schema_at_once() {
    let Some(server) = start() else { return };
    let tasks: Vec<_> = (0..20)
        .map(|task| {
            let config = config(&server.url()).response_timeout(Duration::from_secs(20));
            tokio::spawn(async move {
                let backend = PostgresBackend::connect(config).await.expect("connects");
                backend.setup_schema().await.expect("works");
                cycle(&backend, &format!("k{task}")).await.expect("works")
            })
        })
        .collect();
    for task in tasks {
        assert_eq!(task.await.expect("no panic"), 1);
    }
    let tables = "SELECT count(*) FROM pg_tables WHERE schemaname = 'public'";
    assert_eq!(server.sql(tables), "2");
}

#[tokio::test(flavor = "multi_thread")]
async fn resets_leave_no_orphan_and_mix_up_no_reply() {
    let Some(server) = start() else { return };
    let proxy = Proxy::start(server.port()).await;
    let direct = connect(&server.url()).await;
    let url = format!("postgres://postgres@127.0.0.1:{}/postgres", proxy.port());
    let through = PostgresBackend::connect(config(&url).pool_size(1)).await.expect("connects");
    resets(through.clone(), &direct, &proxy, 120, 500).await;
    // A black hole is a timeout.
    proxy.set(Fault::BlackHole);
    let started = Instant::now();
    let error = through.acquire(&request("hole")).await.expect_err("no answer");
    assert!(error.is_retryable(), "{error:?}");
    assert!(started.elapsed() < Duration::from_secs(10), "it does not hang");
}

#[tokio::test(flavor = "multi_thread")]
async fn grants_and_extends_are_flushed_whatever_the_servers_default() {
    let Some(server) = start() else { return };
    let setup = connect(&server.url()).await;
    let raw = raw(&server).await;
    // A trigger records the setting under which a lock is written.
    let note = "CREATE TABLE noted (value text); \
                CREATE FUNCTION note() RETURNS trigger AS $$ BEGIN \
                INSERT INTO noted VALUES (current_setting('synchronous_commit')); \
                RETURN NEW; END $$ \
                LANGUAGE plpgsql; CREATE TRIGGER note AFTER INSERT OR UPDATE ON syncguard_locks \
                FOR EACH ROW EXECUTE FUNCTION note()";
    raw.batch_execute(note).await.expect("works");
    for (setting, expected) in [("off", "on"), ("local", "on"), ("remote_apply", "remote_apply")] {
        let alter = format!("ALTER DATABASE postgres SET synchronous_commit = {setting}");
        raw.batch_execute(&alter).await.expect("works");
        // In sessions that begin afterwards.
        let Some(pooler) = PgBouncer::start(&server) else { return };
        for url in [server.url(), pooler.url()] {
            let is_pooled = url == pooler.url();
            let config = config(&url).behind_pooler(is_pooled);
            let backend = PostgresBackend::connect(config).await.expect("connects");
            let request = request("k");
            let granted = backend.acquire(&request).await.expect("works");
            assert!(matches!(granted, AcquireOutcome::Acquired(_)), "{granted:?}");
            let extend = ExtendRequest::new(request.lock_id(), Ttl::DEFAULT);
            let extended = backend.extend(&extend).await.expect("works");
            assert!(matches!(extended, ExtendOutcome::Extended(_)), "{extended:?}");
            let noted = raw.query("DELETE FROM noted RETURNING value", &[]).await.expect("works");
            let noted: Vec<&str> = noted.iter().map(|row| row.get(0)).collect();
            assert_eq!(noted, [expected; 2], "{setting}, pooled: {is_pooled}");
            let release = ReleaseRequest::new(request.lock_id());
            assert_eq!(setup.release(&release).await.expect("works"), ReleaseOutcome::Released);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn releases_do_not_wait_for_the_disk_and_grants_do() {
    let Some(server) = start() else { return };
    drop(connect(&server.url()).await);
    let raw = raw(&server).await;
    // A trigger records the setting under which a lock is written or deleted.
    let note = "CREATE TABLE noted (value text); \
                CREATE FUNCTION note() RETURNS trigger AS $$ BEGIN \
                INSERT INTO noted VALUES (TG_OP || ' ' || current_setting('synchronous_commit')); \
                RETURN NULL; END $$ \
                LANGUAGE plpgsql; CREATE TRIGGER note AFTER INSERT OR DELETE ON syncguard_locks \
                FOR EACH ROW EXECUTE FUNCTION note()";
    raw.batch_execute(note).await.expect("works");
    let Some(pooler) = PgBouncer::start(&server) else { return };
    for url in [server.url(), pooler.url()] {
        let config = config(&url).behind_pooler(url == pooler.url());
        let backend = PostgresBackend::connect(config).await.expect("connects");
        let locker = Locker::new(backend).expect("a runtime");
        for _ in 0..2 {
            let guard = locker.lock("alone").await.expect("free");
            guard.release().await.expect("works");
            let several = locker.lock_all(["a", "b", "c"]).await.expect("free");
            several.release().await.expect("works");
        }
        let noted = raw.query("DELETE FROM noted RETURNING value", &[]).await.expect("works");
        let mut noted: Vec<&str> = noted.iter().map(|row| row.get(0)).collect();
        noted.sort_unstable();
        assert_eq!(noted, [["DELETE off"; 8], ["INSERT on"; 8]].concat());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crash_may_undo_a_release_until_the_next_grant() {
    // Nothing but a grant writes to the disk.
    let options = PostgresOptions::default().with(["wal_writer_delay = 10s"]);
    let Some(mut server) = PostgresServer::start(&options) else { return };
    let backend = connect(&server.url()).await;
    let is_back = async || backend.is_locked(&key("k")).await.is_ok();
    let mut fence = cycle(&backend, "k").await.expect("works");
    cycle(&backend, "other").await.expect("works");
    server.crash();
    server.run();
    eventually("the backend is back", is_back).await;
    assert!(!backend.is_locked(&key("k")).await.expect("works"), "the grant kept the release");
    // A page of the log that is full goes to the disk, so it may take more than one crash.
    eventually("a crash undoes a release", async || {
        let next = cycle(&backend, "k").await.expect("works");
        assert!(next > fence, "{next} after {fence}");
        fence = next;
        server.crash();
        server.run();
        eventually("the backend is back", is_back).await;
        backend.is_locked(&key("k")).await.expect("works")
    })
    .await;
    let refused = backend.acquire(&request("k")).await.expect("works");
    assert!(matches!(refused, AcquireOutcome::Contended { .. }), "still exclusive: {refused:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_undeclared_pooler_is_detected() {
    let Some(server) = start() else { return };
    let Some(pooler) = PgBouncer::start(&server) else { return };
    drop(connect(&server.url()).await);
    let backend = PostgresBackend::connect(config(&pooler.url())).await.expect("connects");
    let tasks: Vec<_> = (0..16)
        .map(|task| {
            let backend = backend.clone();
            tokio::spawn(async move {
                for fence in 1..=20 {
                    let granted = cycle(&backend, &format!("k{task}")).await;
                    assert_eq!(granted.expect("detected when connecting"), fence);
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.expect("no panic");
    }
    // Sessions that other clients use too keep none of our settings.
    let (stranger, connection) =
        tokio_postgres::connect(&pooler.url(), NoTls).await.expect("connects");
    tokio::spawn(connection);
    for _ in 0..8 {
        let shown = stranger.simple_query("SHOW statement_timeout").await.expect("works");
        let shown = shown.iter().find_map(|message| match message {
            tokio_postgres::SimpleQueryMessage::Row(row) => row.get(0),
            _ => None,
        });
        assert_eq!(shown, Some("0"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_write_of_a_paused_holder_is_refused_by_the_fence() {
    let Some(server) = start() else { return };
    let options = LockOptions::default().ttl(Duration::from_millis(200));
    let locker = Locker::builder(connect(&server.url()).await).options(options).build();
    let locker = locker.expect("in a runtime");
    let fenced = FencedTable::new("syncguard_fenced").expect("a name");
    let mut client = raw(&server).await;
    client.batch_execute(&fenced.schema_sql()).await.expect("works");
    client.batch_execute("CREATE TABLE documents (text text)").await.expect("works");
    let paused = locker.lock("document").await.expect("free");
    assert_eq!(paused.lost().await, LostReason::Expired);
    let current = locker.lock("document").await.expect("taken over");
    for (holder, is_accepted) in [(&current, true), (&paused, false), (&current, true)] {
        let transaction = client.transaction().await.expect("works");
        let checked = fenced.check(&transaction, holder).await;
        assert_eq!(checked.is_ok(), is_accepted);
        if let Err(error) = checked {
            assert_eq!(error.code(), ErrorCode::Aborted, "{error:?}");
            assert!(error.is_stale_fence(), "{error:?}");
            assert!(!error.may_have_taken_effect(), "{error:?}");
        } else {
            transaction.execute("INSERT INTO documents VALUES ('x')", &[]).await.expect("works");
            transaction.commit().await.expect("works");
        }
    }
    assert_eq!(server.sql("SELECT count(*) FROM documents"), "2");
}

#[tokio::test(flavor = "multi_thread")]
async fn tls_follows_sslmode() {
    let certificates = Certificates::new();
    let options = PostgresOptions::default().with(["fsync = off"]).with_tls(&certificates);
    let Some(server) = PostgresServer::start(&options) else { return };
    let (ca, stranger) = (certificates.path("ca.pem"), Certificates::new());
    let other_ca = stranger.path("ca.pem");
    let port = server.port();
    let is_encrypted = async |query: &str| -> Result<bool, syncguard::Error> {
        let url =
            format!("postgres://postgres@127.0.0.1:{port}/postgres?{query}&application_name=tls");
        let backend = PostgresBackend::connect(config(&url)).await?;
        backend.setup_schema().await?;
        assert!(!backend.is_locked(&key("k")).await?);
        let asked = "SELECT bool_or(ssl) FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) WHERE \
                     application_name = 'tls'";
        let answer = server.sql(asked) == "t";
        drop(backend);
        eventually("gone", async || {
            server.sql("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'tls'")
                == "0"
        })
        .await;
        Ok(answer)
    };
    assert!(!is_encrypted("sslmode=disable").await.expect("connects"));
    for query in [
        "sslmode=prefer".to_owned(),
        "sslmode=require".to_owned(),
        format!("sslmode=verify-ca&sslrootcert={ca}"),
        format!("sslmode=verify-full&sslrootcert={ca}"),
    ] {
        assert!(is_encrypted(&query).await.expect("connects"), "{query}");
    }
    for query in [
        format!("sslmode=require&sslrootcert={other_ca}"),
        format!("sslmode=verify-ca&sslrootcert={other_ca}"),
        format!("sslmode=verify-full&sslrootcert={other_ca}"),
    ] {
        let error = is_encrypted(&query).await.expect_err("not trusted");
        assert_eq!(error.code(), ErrorCode::ServiceUnavailable, "{query}: {error:?}");
    }
    // A server without TLS, where TLS is required.
    let plain = start().expect("installed");
    let url = format!("{}?sslmode=require", plain.url());
    let error = PostgresBackend::connect(config(&url)).await.expect_err("no TLS");
    assert_eq!(error.code(), ErrorCode::ServiceUnavailable, "{error:?}");
    // No crypto provider is installed for the process.
    assert!(rustls::crypto::CryptoProvider::get_default().is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn configuration_errors_have_a_code_and_contain_no_password() {
    let options = PostgresOptions::default().with(["fsync = off"]).with_password();
    let Some(server) = PostgresServer::start(&options) else { return };
    let port = server.port();
    let cases = [
        (format!("postgres://postgres:canary@127.0.0.1:{port}/postgres"), ErrorCode::AuthFailed),
        (format!("postgres://postgres@127.0.0.1:{port}/postgres"), ErrorCode::InvalidArgument),
        (format!("postgres://postgres:right@127.0.0.1:{port}/nowhere"), ErrorCode::InvalidArgument),
        (
            "postgres://postgres:canary@127.0.0.1:1/postgres".to_owned(),
            ErrorCode::ServiceUnavailable,
        ),
        ("postgres://postgres:canary@127.0.0.1:x/postgres".to_owned(), ErrorCode::InvalidArgument),
        ("mysql://canary".to_owned(), ErrorCode::InvalidArgument),
        ("postgres://h/d?canary=1".to_owned(), ErrorCode::InvalidArgument),
        ("postgres://h/d?sslmode=canary".to_owned(), ErrorCode::InvalidArgument),
        (
            "postgres://h/d?locks_table=x%22%3B%20drop%20table%20y%3B%20--".to_owned(),
            ErrorCode::InvalidArgument,
        ),
        (
            "postgres://h/d?locks_table=same&fences_table=same".to_owned(),
            ErrorCode::InvalidArgument,
        ),
        ("postgres://h/d?pool_size=0".to_owned(), ErrorCode::InvalidArgument),
    ];
    for (url, expected) in cases {
        let started = Instant::now();
        let error = match PostgresConfig::from_url(&url) {
            Ok(config) => PostgresBackend::connect(config).await.expect_err("it must be refused"),
            Err(error) => error,
        };
        assert_eq!(error.code(), expected, "{url}: {error:?}");
        assert!(started.elapsed() < Duration::from_secs(7), "it does not hang");
        let shown = shown(&error);
        assert!(!shown.contains("canary"), "{shown}");
    }
    let right = format!("postgres://postgres:right@127.0.0.1:{port}/postgres");
    let backend = connect(&right).await;
    assert!(cycle(&backend, "k").await.is_ok());
    // A user without permissions, and with the documented ones.
    let (client, connection) = tokio_postgres::connect(&right, NoTls).await.expect("connects");
    tokio::spawn(connection);
    client.batch_execute("CREATE ROLE app LOGIN PASSWORD 'app'").await.expect("works");
    let as_app = format!("postgres://app:app@127.0.0.1:{port}/postgres");
    let app = PostgresBackend::connect(config(&as_app)).await.expect("connects");
    let error = app.acquire(&request("k")).await.expect_err("no permission");
    assert_eq!(error.code(), ErrorCode::AuthFailed, "{error:?}");
    let error = app.setup_schema().await.expect_err("no permission to create");
    assert_eq!(error.code(), ErrorCode::AuthFailed, "{error:?}");
    client
        .batch_execute(
            "GRANT SELECT, INSERT, UPDATE, DELETE ON syncguard_locks TO app;
             GRANT SELECT, INSERT, UPDATE ON syncguard_fence_counters TO app",
        )
        .await
        .expect("works");
    assert!(cycle(&app, "k").await.is_ok(), "the documented permissions are sufficient");
    wakes(&app, &app).await;
    // Missing tables.
    let config = config(&right).tables("missing_locks", "missing_fences");
    let backend = PostgresBackend::connect(config).await.expect("connects");
    let error = backend.acquire(&request("k")).await.expect_err("no tables");
    assert_eq!(error.code(), ErrorCode::InvalidArgument, "{error:?}");
    assert!(error.to_string().contains("setup_schema"), "{error}");
    let findings = backend.findings().await.expect("works");
    assert!(findings.iter().any(|finding| finding.subject() == "tables"), "{findings:?}");
    backend.setup_schema().await.expect("works");
    assert!(cycle(&backend, "k").await.is_ok());
}

#[tokio::test(flavor = "multi_thread")]
async fn findings_report_what_can_be_lost() {
    let options = PostgresOptions::default().with([
        "fsync = off",
        "full_page_writes = off",
        "synchronous_commit = off",
    ]);
    let Some(server) = PostgresServer::start(&options) else { return };
    let backend = connect(&server.url()).await;
    let subjects = async || -> Vec<&'static str> {
        backend.findings().await.expect("works").iter().map(Finding::subject).collect()
    };
    let risky = ["fsync", "full_page_writes", "synchronous_commit", "unlogged", "fences"];
    assert_eq!(subjects().await, ["fsync", "full_page_writes", "synchronous_commit", "fences"]);
    assert!(server.sql("ALTER TABLE syncguard_locks SET UNLOGGED").contains("ALTER"));
    assert_eq!(subjects().await, risky);
    // An asynchronous standby, and a connection to it by mistake.
    let standby = server.start_standby();
    eventually("it is seen", async || subjects().await.contains(&"standby")).await;
    let mistaken = PostgresBackend::connect(config(&standby.url())).await.expect("connects");
    let error = mistaken.acquire(&request("k")).await.expect_err("read-only");
    assert_eq!(error.code(), ErrorCode::ServiceUnavailable, "{error:?}");
    assert!(error.to_string().contains("standby"), "{error}");
    let findings = mistaken.findings().await.expect("works");
    assert!(findings.iter().any(|finding| finding.subject() == "recovery"), "{findings:?}");
    drop(standby);
    // A separate schema, and long names.
    assert!(server.sql("CREATE SCHEMA billing").contains("CREATE"));
    let long = "a".repeat(60);
    let tables = (format!("billing.{long}"), format!("billing.f{long}"));
    let config = config(&server.url()).tables(tables.0, tables.1);
    let sql = config.schema_sql().expect("valid");
    assert!(sql.contains("CREATE TABLE IF NOT EXISTS \"billing\""), "{sql}");
    let backend = PostgresBackend::connect(config).await.expect("connects");
    backend.setup_schema().await.expect("works");
    backend.setup_schema().await.expect("works again");
    assert_eq!(cycle(&backend, "k").await.expect("works"), 1);
    let indexes = "SELECT count(*) FROM pg_indexes WHERE schemaname = 'billing'";
    assert_eq!(server.sql(indexes), "4");
}
