//! The notifications of the PostgreSQL backend: how many markers there are, what happens if a
//! marker fails, and whether a notification is sent if its process ends.
#![cfg(feature = "postgres")]

mod servers;

use std::future::poll_fn;
use std::ops::Deref;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use servers::postgres::{connect, raw, start};
use servers::{cycle, eventually, grant, key, waiter, woken};
use syncguard::backend::{ReleaseRequest, hash_key};
use syncguard::postgres::tokio_postgres::{self, AsyncMessage, Client, NoTls};
use syncguard::postgres::{ClientPool, Loan, PooledClient, PostgresConfig};
use syncguard::{AnyBackend, LockBackend, PostgresBackend, ReleaseOutcome};
use test_support::{PostgresOptions, PostgresServer};

/// Returns the number of markers in the server's lock table.
async fn markers(client: &Client) -> i64 {
    let count = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 2";
    client.query_one(count, &[]).await.expect("works").get(0)
}

/// Returns a client that listens, and the notifications that it receives.
async fn listening(server: &PostgresServer) -> (Client, Arc<Mutex<Vec<String>>>) {
    let (client, mut connection) =
        tokio_postgres::connect(&server.url(), NoTls).await.expect("connects");
    let received = Arc::new(Mutex::new(Vec::new()));
    tokio::spawn({
        let received = Arc::clone(&received);
        async move {
            while let Some(Ok(message)) = poll_fn(|context| connection.poll_message(context)).await
            {
                if let AsyncMessage::Notification(notification) = message {
                    received.lock().expect("no panic").push(notification.payload().to_owned());
                }
            }
        }
    });
    let channel = format!("LISTEN \"syncguard_{}\"", hash_key("syncguard_locks"));
    client.batch_execute(&channel).await.expect("works");
    (client, received)
}

#[tokio::test(flavor = "multi_thread")]
async fn thousands_of_awaited_keys_do_not_fill_the_lock_table() {
    let options = PostgresOptions::default().with([
        "fsync = off",
        "max_connections = 20",
        "max_locks_per_transaction = 10",
    ]);
    let Some(server) = PostgresServer::start(&options) else { return };
    let (backend, there) = (connect(&server.url()).await, connect(&server.url()).await);
    let client = raw(&server).await;
    let mut waiting = Vec::new();
    for number in 0..3_000 {
        let subscription = backend.subscribe(&key(&format!("k{number}"))).await;
        waiting.push(subscription.unwrap_or_else(|| panic!("no subscription to key {number}")));
    }
    let count = markers(&client).await;
    assert!(count <= 100, "{count} markers");
    // Keys with their own marker and keys without one are both notified.
    for number in [0, 4, 5, 6, 2_999] {
        let subscription = &mut waiting[number];
        subscription.mark_seen();
        cycle(&there, &format!("k{number}")).await.expect("works");
        let woken = tokio::time::timeout(Duration::from_secs(10), subscription.notified()).await;
        woken.unwrap_or_else(|_| panic!("key {number} was not notified"));
    }
    waiting.clear();
    eventually("the markers are gone", async || markers(&client).await == 0).await;
}

/// All applications of a server share its lock table.
#[tokio::test(flavor = "multi_thread")]
async fn many_processes_that_wait_leave_room_in_the_lock_table() {
    const PROCESSES: usize = 12;
    let options = PostgresOptions::default().with([
        "fsync = off",
        "max_connections = 40",
        "max_locks_per_transaction = 10",
    ]);
    let Some(server) = PostgresServer::start(&options) else { return };
    let (mut backends, mut waiting) = (Vec::new(), Vec::new());
    for process in 0..PROCESSES {
        let backend = connect(&server.url()).await;
        for number in 0..70 {
            let awaited = key(&format!("p{process}k{number}"));
            waiting.push(backend.subscribe(&awaited).await.expect("offered"));
        }
        backends.push(backend);
    }
    // Another application takes half of what the connections have room for.
    let client = raw(&server).await;
    let take = "SELECT count(pg_advisory_lock(n)) FROM generate_series(1, 200) AS n";
    client.batch_execute(take).await.expect("there is room");
    let count = markers(&client).await;
    assert!(count <= i64::try_from(PROCESSES * 6).expect("small"), "{count} markers");
    for place in [0, 4, 5, 69, 70, 839] {
        let subscription = &mut waiting[place];
        subscription.mark_seen();
        let name = format!("p{}k{}", place / 70, place % 70);
        cycle(&backends[PROCESSES - 1], &name).await.expect("works");
        let woken = tokio::time::timeout(Duration::from_secs(10), subscription.notified()).await;
        woken.unwrap_or_else(|_| panic!("{name} was not notified"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_release_notifies_only_while_its_key_is_awaited() {
    let Some(server) = start() else { return };
    let backend = connect(&server.url()).await;
    let (client, received) = listening(&server).await;
    for _ in 0..5 {
        cycle(&backend, "quiet").await.expect("works");
    }
    let subscription = backend.subscribe(&key("awaited")).await.expect("offered");
    cycle(&backend, "quiet").await.expect("works");
    cycle(&backend, "awaited").await.expect("works");
    let awaited = hash_key("awaited").to_string();
    eventually("notified", async || received.lock().expect("no panic").contains(&awaited)).await;
    assert_eq!(received.lock().expect("no panic").as_slice(), [awaited]);
    drop((subscription, client));
}

/// Another session holds the marker of one key for a while. The connection that listens still
/// works, and is kept.
#[tokio::test(flavor = "multi_thread")]
async fn a_marker_that_fails_does_not_end_the_connection_that_listens() {
    let options = PostgresOptions::default().with(["fsync = off", "log_connections = on"]);
    let Some(server) = PostgresServer::start(&options) else { return };
    let url = format!("{}?application_name=listens", server.url());
    let backend = connect(&url).await;
    let opened = || {
        let log = server.socket_folder().join("server.log");
        let log = std::fs::read_to_string(log).expect("readable");
        let is_ours = |line: &&str| line.contains("authorized") && line.contains("=listens");
        log.lines().filter(is_ours).count()
    };
    let stranger = raw(&server).await;
    let _first = backend.subscribe(&key("first")).await.expect("offered");
    // The first number of the marker, which the server shows without its sign.
    let table = "SELECT classid::int8 FROM pg_locks WHERE locktype = 'advisory'";
    let table: i64 = stranger.query_one(table, &[]).await.expect("one marker").get(0);
    let table = u32::try_from(table).expect("32 bits").cast_signed();
    let sit = format!("SELECT pg_advisory_lock({table}, hashtext('second'))");
    stranger.batch_execute(&sit).await.expect("free");
    let before = opened();
    let leaving = async {
        // Marking the key fails after 1.6 s.
        tokio::time::sleep(Duration::from_millis(2_300)).await;
        let leave = format!("SELECT pg_advisory_unlock({table}, hashtext('second'))");
        stranger.batch_execute(&leave).await.expect("held");
    };
    let second = key("second");
    let (_second, ()) = tokio::join!(backend.subscribe(&second), leaving);
    tokio::time::sleep(Duration::from_millis(1_500)).await;
    let opened = opened() - before;
    assert!(opened <= 1, "{opened} connections were opened for one marker that failed");
    let mut third = backend.subscribe(&key("third")).await.expect("offered");
    third.mark_seen();
    cycle(&backend, "third").await.expect("works");
    let woken = tokio::time::timeout(Duration::from_secs(10), third.notified()).await;
    woken.expect("the connection still listens");
}

/// A marker that no subscription has would make every release notify.
#[tokio::test(flavor = "multi_thread")]
async fn a_subscription_that_fails_leaves_no_marker() {
    // Of so few locks, five may be markers of single keys.
    let options = PostgresOptions::default().with(["max_locks_per_transaction = 10"]);
    let Some(server) = PostgresServer::start(&options) else { return };
    let backend = connect(&server.url()).await;
    let stranger = raw(&server).await;
    let mut subscriptions = vec![backend.subscribe(&key("first")).await.expect("offered")];
    let sit = "SELECT pg_advisory_lock(classid::int8::bit(32)::int4, hashtext('refused')) \
               FROM pg_locks WHERE locktype = 'advisory'";
    stranger.batch_execute(sit).await.expect("free");
    for name in ["second", "third", "fourth", "fifth"] {
        subscriptions.push(backend.subscribe(&key(name)).await.expect("offered"));
    }
    assert!(backend.subscribe(&key("refused")).await.is_none(), "another session has its marker");
    stranger.batch_execute("SELECT pg_advisory_unlock_all()").await.expect("works");
    eventually("only markers of subscriptions", async || markers(&stranger).await == 5).await;
}

/// A process that ends when its release has returned: its runtime ends at once, with all tasks that
/// were only started.
#[tokio::test(flavor = "multi_thread")]
async fn a_release_notifies_even_if_its_process_ends_right_after() {
    let Some(server) = start() else { return };
    let there = connect(&server.url()).await;
    for round in 0..5 {
        let name = format!("w{round}");
        let (url, held) = (server.url(), name.clone());
        let (holds, is_held) = tokio::sync::oneshot::channel();
        let (go_on, may_end) = std::sync::mpsc::channel::<()>();
        let holder = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let runtime = runtime.expect("a runtime");
            runtime.block_on(async {
                let backend = connect(&url).await;
                let (request, _) = grant(&backend, &held).await;
                holds.send(()).expect("the test waits");
                may_end.recv().expect("the test continues");
                let release = ReleaseRequest::new(request.lock_id());
                assert_eq!(
                    backend.release(&release).await.expect("works"),
                    ReleaseOutcome::Released
                );
            });
        });
        is_held.await.expect("held");
        let locker = waiter(there.clone());
        let waiting = tokio::spawn(async move { locker.lock(name.as_str()).await.map(drop) });
        let client = raw(&server).await;
        eventually("the key is marked", async || markers(&client).await == 1).await;
        tokio::time::sleep(Duration::from_millis(100)).await;
        go_on.send(()).expect("the holder waits");
        woken(waiting).await;
        holder.join().expect("no panic");
        eventually("the marker is gone", async || markers(&client).await == 0).await;
    }
}

/// A notification that cannot be sent at once is sent in the background, and `quiesce` waits for
/// it.
#[tokio::test(flavor = "multi_thread")]
async fn quiesce_waits_for_notifications_that_could_not_be_sent_at_once() {
    let Some(server) = start() else { return };
    let backend = connect(&server.url()).await;
    let (client, received) = listening(&server).await;
    // With the caller's own pool, the backend waits for a connection that another task drives.
    let pooled = PostgresConfig::from_pool(SlowPool { url: server.url() });
    let pooled = PostgresBackend::connect(pooled).await.expect("connects");
    let _wake_ups = backend.subscribe(&key("k")).await.expect("offered");
    let expected = hash_key("k").to_string();
    let (request, _) = grant(&pooled, "k").await;
    let release = ReleaseRequest::new(request.lock_id());
    assert_eq!(pooled.release(&release).await.expect("works"), ReleaseOutcome::Released);
    AnyBackend::new(pooled).quiesce().await;
    // Notifications that were committed before this statement are delivered with its answer.
    client.batch_execute("SELECT 1").await.expect("works");
    assert_eq!(received.lock().expect("no panic").as_slice(), [expected]);
}

/// Slowly opens a connection for every operation.
struct SlowPool {
    url: String,
}

struct Opened(Client);

impl Deref for Opened {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.0
    }
}

impl PooledClient for Opened {
    fn discard(self: Box<Self>) {}
}

impl ClientPool for SlowPool {
    fn get(&self) -> Loan<'_> {
        Box::pin(async move {
            tokio::time::sleep(Duration::from_millis(100)).await;
            let (client, connection) = tokio_postgres::connect(&self.url, NoTls).await?;
            tokio::spawn(connection);
            Ok(Box::new(Opened(client)) as Box<dyn PooledClient>)
        })
    }
}
