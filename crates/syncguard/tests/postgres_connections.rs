//! The connections of the PostgreSQL backend: servers that became read-only, several hosts, stale
//! plans, deadlines, and the context of errors.
#![cfg(feature = "postgres")]

mod servers;

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use servers::postgres::{config, connect, connect_with, raw, start};
use servers::{a_dead_path_costs_no_renewed_lock, cycle, eventually, grant, key, request};
use syncguard::backend::{ExtendRequest, ReleaseRequest};
use syncguard::postgres::PostgresConfig;
use syncguard::{
    ErrorCode, ExtendOutcome, LockBackend, PostgresBackend, ReleaseOutcome, Ttl, diagnostics,
};
use test_support::{Fault, Proxy};

fn through(proxy: &Proxy) -> String {
    format!("postgres://postgres@127.0.0.1:{}/postgres", proxy.port())
}

/// A failover moves a DNS name, and the old primary continues as a standby.
#[tokio::test(flavor = "multi_thread")]
async fn connections_to_a_read_only_server_are_replaced() {
    let Some(primary) = start() else { return };
    drop(connect(&primary.url()).await);
    let standby = primary.start_standby();
    let name = Proxy::start(standby.port()).await;
    let backend = PostgresBackend::connect(config(&through(&name))).await.expect("connects");
    // Several connections, all of which lead to the standby.
    let (one, two, three) = (request("k"), request("k"), request("k"));
    let refused =
        tokio::join!(backend.acquire(&one), backend.acquire(&two), backend.acquire(&three));
    for outcome in [refused.0, refused.1, refused.2] {
        let error = outcome.expect_err("read-only");
        assert_eq!(error.code(), ErrorCode::ServiceUnavailable, "{error:?}");
    }
    name.retarget(primary.port());
    eventually("the primary is found", async || cycle(&backend, "k").await.is_ok()).await;
    for _ in 0..8 {
        cycle(&backend, "k").await.expect("no connection to the standby is left");
    }
}

/// A DNS name moves while the old server still answers.
#[tokio::test(flavor = "multi_thread")]
async fn old_connections_are_replaced() {
    let (Some(old), Some(new)) = (start(), start()) else { return };
    drop(connect(&old.url()).await);
    drop(connect(&new.url()).await);
    let name = Proxy::start(old.port()).await;
    let aging = config(&through(&name)).max_connection_age(Duration::from_millis(300));
    let backend = PostgresBackend::connect(aging).await.expect("connects");
    let (_held, _) = grant(&backend, "k").await;
    name.retarget(new.port());
    eventually("the new server is asked", async || {
        !backend.is_locked(&key("k")).await.expect("works")
    })
    .await;
    // A connection that is not old is kept.
    let lasting = PostgresBackend::connect(config(&through(&name))).await.expect("connects");
    let (_held, _) = grant(&lasting, "kept").await;
    name.retarget(old.port());
    for _ in 0..20 {
        assert!(lasting.is_locked(&key("kept")).await.expect("works"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_does_not_answer_is_skipped() {
    let Some(server) = start() else { return };
    let silent = Proxy::start(server.port()).await;
    silent.set(Fault::BlackHole);
    let url = format!(
        "postgres://postgres@127.0.0.1:{},127.0.0.1:{}/postgres",
        silent.port(),
        server.port()
    );
    let timeout = Duration::from_secs(3);
    let backend = connect_with(config(&url).connect_timeout(timeout)).await;
    cycle(&backend, "k").await.expect("works");
    // The next connections begin with the host that answered.
    let begun = Instant::now();
    let names = ["a", "b", "c", "d", "e", "f"];
    let cycles = names.map(|name| {
        let backend = backend.clone();
        tokio::spawn(async move { cycle(&backend, name).await })
    });
    for cycle in cycles {
        cycle.await.expect("no panic").expect("works");
    }
    assert!(begun.elapsed() < timeout, "the silent host was asked again: {:?}", begun.elapsed());
}

/// libpq's option, in seconds, applies to each host.
#[tokio::test(flavor = "multi_thread")]
async fn the_connect_timeout_of_libpq_applies_to_each_host() {
    let Some(server) = start() else { return };
    let silent = Proxy::start(server.port()).await;
    silent.set(Fault::BlackHole);
    let url = format!(
        "postgres://postgres@127.0.0.1:{},127.0.0.1:{}/postgres?connect_timeout=1",
        silent.port(),
        server.port()
    );
    let begun = Instant::now();
    let backend = connect_with(PostgresConfig::from_url(&url).expect("a URL")).await;
    cycle(&backend, "k").await.expect("works");
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
}

/// A column that changes its type makes the plans of prepared statements stale on every connection.
#[tokio::test(flavor = "multi_thread")]
async fn statements_are_prepared_again_when_a_table_has_changed() {
    let Some(server) = start() else { return };
    let backend = connect(&server.url()).await;
    let (held, _) = grant(&backend, "held").await;
    cycle(&backend, "k").await.expect("works");
    let change = "ALTER TABLE syncguard_locks ALTER COLUMN fence TYPE varchar(15)";
    raw(&server).await.batch_execute(change).await.expect("works");
    assert!(backend.is_locked(&key("held")).await.expect("prepared again"));
    assert_eq!(cycle(&backend, "k").await.expect("prepared again"), 2);
    let extend = ExtendRequest::new(held.lock_id(), Ttl::DEFAULT);
    let extended = backend.extend(&extend).await.expect("prepared again");
    assert!(matches!(extended, ExtendOutcome::Extended(_)), "{extended:?}");
    backend.release(&ReleaseRequest::new(held.lock_id())).await.expect("prepared again");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_error_names_backend_operation_key_and_lock_id() {
    let Some(server) = start() else { return };
    let missing = config(&server.url()).tables("missing_locks", "missing_fences");
    let backend = PostgresBackend::connect(missing).await.expect("connects");
    let (key, acquire) = (key("k"), request("k"));
    let id = acquire.lock_id();
    let about_key = [
        ("acquire", backend.acquire(&acquire).await.expect_err("no tables")),
        ("is_locked", backend.is_locked(&key).await.expect_err("no tables")),
        ("lookup", diagnostics::get_by_key(&backend, &key).await.expect_err("no tables")),
    ];
    for (operation, error) in &about_key {
        assert_eq!(error.backend(), Some("postgres"), "{operation}");
        assert_eq!(error.operation(), Some(*operation));
        assert_eq!(error.key(), Some(&key), "{operation}");
    }
    let release = backend.release(&ReleaseRequest::new(id)).await;
    let extend = backend.extend(&ExtendRequest::new(id, Ttl::DEFAULT)).await;
    let about_id = [
        ("release", release.expect_err("no tables")),
        ("extend", extend.expect_err("no tables")),
        ("lookup", diagnostics::get_by_id(&backend, &id).await.expect_err("no tables")),
    ];
    for (operation, error) in &about_id {
        assert_eq!(error.backend(), Some("postgres"), "{operation}");
        assert_eq!(error.operation(), Some(*operation));
        assert!(error.lock_id().is_some_and(|named| named == id), "{operation}");
        assert_eq!(error.code(), ErrorCode::InvalidArgument, "{operation}: {error:?}");
    }
    let admin = backend.admin().expect("offered");
    let listed = admin.list(None).await.expect_err("no tables");
    assert_eq!((listed.backend(), listed.operation()), (Some("postgres"), Some("list")));
}

/// Admin calls, subscriptions, connecting and name resolution included.
#[tokio::test(flavor = "multi_thread")]
async fn every_call_to_a_server_that_does_not_answer_has_a_deadline() {
    let Some(server) = start() else { return };
    let proxy = Proxy::start(server.port()).await;
    let quick = config(&through(&proxy))
        .response_timeout(Duration::from_millis(500))
        .connect_timeout(Duration::from_millis(500));
    let backend = connect_with(quick.clone()).await;
    proxy.set(Fault::BlackHole);
    let admin = backend.admin().expect("offered");
    let limit = Duration::from_secs(20);
    let ended = tokio::time::timeout(limit, async {
        assert!(admin.list(None).await.is_err());
        assert!(admin.findings().await.is_err());
        assert!(admin.setup().await.is_err());
        assert!(backend.subscribe(&key("k")).await.is_none());
        assert!(PostgresBackend::connect(quick).await.is_err());
        let nowhere = config("postgres://postgres@name.invalid/postgres");
        let nowhere = nowhere.connect_timeout(Duration::from_millis(500));
        let error = PostgresBackend::connect(nowhere).await.expect_err("no such name");
        assert!(error.is_retryable() && !error.may_have_taken_effect(), "{error:?}");
    });
    ended.await.expect("every call has a deadline");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_renewed_lock_survives_a_path_that_dies() {
    let Some(server) = start() else { return };
    let proxy = Proxy::start(server.port()).await;
    let config = config(&through(&proxy)).response_timeout(Duration::from_secs(30));
    let backend = connect_with(config).await;
    Box::pin(a_dead_path_costs_no_renewed_lock(backend, &proxy)).await;
}

/// A lock table has few rows most of the time, and the planner would read it from end to end. It
/// plans once, and the table may grow.
#[tokio::test(flavor = "multi_thread")]
async fn small_tables_are_read_by_index_too() {
    const COUNT: usize = 16;
    let Some(server) = start() else { return };
    cycle(&connect(&server.url()).await, "k").await.expect("works");
    let raw = raw(&server).await;
    for table in ["syncguard_locks", "syncguard_fence_counters"] {
        raw.batch_execute(&format!("VACUUM (ANALYZE) {table}")).await.expect("works");
    }
    let statistics = async || -> [i64; 2] {
        let sums = "SELECT sum(seq_scan)::bigint, sum(n_tup_del)::bigint FROM pg_stat_user_tables";
        let row = raw.query_one(sums, &[]).await.expect("works");
        [row.get(0), row.get(1)]
    };
    let [scans, mut deleted] = statistics().await;
    for is_pooled in [false, true] {
        let config = config(&server.url()).behind_pooler(is_pooled);
        let backend = PostgresBackend::connect(config).await.expect("connects");
        cycle(&backend, "k").await.expect("works");
        let keys: Vec<String> = (0..COUNT).map(|number| format!("k{number}")).collect();
        let held = join_all(keys.iter().map(|key| grant(&backend, key))).await;
        let extends = held.iter().map(|(held, _)| ExtendRequest::new(held.lock_id(), Ttl::DEFAULT));
        let extends: Vec<_> = extends.collect();
        for extended in join_all(extends.iter().map(|extend| backend.extend(extend))).await {
            assert!(matches!(extended.expect("works"), ExtendOutcome::Extended(_)));
        }
        assert!(backend.is_locked(&key("k0")).await.expect("works"));
        let releases: Vec<_> =
            held.iter().map(|(held, _)| ReleaseRequest::new(held.lock_id())).collect();
        for released in join_all(releases.iter().map(|release| backend.release(release))).await {
            assert_eq!(released.expect("works"), ReleaseOutcome::Released);
        }
        deleted += 1 + i64::try_from(COUNT).expect("small");
    }
    // Sessions report what they did when they end, at the latest.
    eventually("everything is reported", async || statistics().await[1] >= deleted).await;
    assert_eq!(statistics().await, [scans, deleted]);
}

/// The waker of a task, which counts how often the task is woken while it runs.
struct Observed {
    task: Waker,
    is_running: AtomicBool,
    needless: AtomicUsize,
}

impl Wake for Observed {
    fn wake(self: Arc<Self>) {
        if self.is_running.load(Ordering::SeqCst) {
            self.needless.fetch_add(1, Ordering::SeqCst);
        }
        self.task.wake_by_ref();
    }
}

/// A runtime with several threads wakes another one for each of them.
#[tokio::test]
async fn an_operation_does_not_wake_its_own_task_while_it_runs() {
    let Some(server) = start() else { return };
    let backend = connect(&server.url()).await;
    cycle(&backend, "k").await.expect("opens a connection");
    let task = poll_fn(|context| Poll::Ready(context.waker().clone())).await;
    let (is_running, needless) = (AtomicBool::new(false), AtomicUsize::new(0));
    let observed = Arc::new(Observed { task, is_running, needless });
    let waker = Waker::from(Arc::clone(&observed));
    let mut cycles = pin!(async {
        for _ in 0..5 {
            cycle(&backend, "k").await.expect("works");
        }
    });
    poll_fn(|_| {
        observed.is_running.store(true, Ordering::SeqCst);
        let done = cycles.as_mut().poll(&mut Context::from_waker(&waker));
        observed.is_running.store(false, Ordering::SeqCst);
        done
    })
    .await;
    assert_eq!(observed.needless.load(Ordering::SeqCst), 0);
}
