//! The errors of the Redis backend: the Redis column of the error table, row by row, with the
//! context of each error; refusals while connecting; and deadlines.
#![cfg(feature = "redis")]

mod redis_fake;
mod servers;

use std::time::{Duration, Instant};

use redis_fake::FakeRedis;
use servers::{eventually, grant, key, request};
use syncguard::backend::{AcquireOutcome, AcquireRequest, ExtendRequest, ReleaseRequest};
use syncguard::redis::RedisConfig;
use syncguard::{Error, ErrorCode, ExtendOutcome, LockBackend, RedisBackend, Timestamp, Ttl};
use test_support::{RedisOptions, RedisServer};

/// Every error code in the table that a server can return, our code for it, and whether the
/// operation may have taken effect.
const TABLE: [(&str, ErrorCode, bool); 21] = [
    ("LOADING", ErrorCode::ServiceUnavailable, false),
    ("BUSY", ErrorCode::ServiceUnavailable, false),
    ("READONLY", ErrorCode::ServiceUnavailable, false),
    ("MASTERDOWN", ErrorCode::ServiceUnavailable, false),
    ("CLUSTERDOWN", ErrorCode::ServiceUnavailable, false),
    ("TRYAGAIN", ErrorCode::ServiceUnavailable, false),
    ("MOVED", ErrorCode::ServiceUnavailable, false),
    ("ASK", ErrorCode::ServiceUnavailable, false),
    ("NOREPLICAS", ErrorCode::ServiceUnavailable, false),
    ("MISCONF", ErrorCode::ServiceUnavailable, false),
    ("NOAUTH", ErrorCode::AuthFailed, false),
    ("WRONGPASS", ErrorCode::AuthFailed, false),
    ("NOPERM", ErrorCode::AuthFailed, false),
    ("OOM", ErrorCode::RateLimited, false),
    ("WRONGTYPE", ErrorCode::InvalidArgument, false),
    ("CROSSSLOT", ErrorCode::InvalidArgument, false),
    // A script that the server does not understand is a defect, not an invalid argument.
    ("ERR", ErrorCode::Internal, true),
    ("SYNTAX", ErrorCode::Internal, true),
    ("UNKILLABLE", ErrorCode::Internal, true),
    ("EXECABORT", ErrorCode::Internal, true),
    ("WHATEVER", ErrorCode::Internal, true),
];

async fn connect(url: &str) -> syncguard::Result<RedisBackend> {
    RedisBackend::connect(RedisConfig::from_url(url).expect("a URL")).await
}

fn url(fake: &FakeRedis) -> String {
    format!("redis://127.0.0.1:{}/0", fake.port())
}

/// The errors of all operations, with their names.
async fn errors(backend: &RedisBackend) -> Vec<(&'static str, Error)> {
    let (request, id) = (request("canary"), request("other").lock_id());
    vec![
        ("acquire", backend.acquire(&request).await.expect_err("refused")),
        ("release", backend.release(&ReleaseRequest::new(id)).await.expect_err("refused")),
        (
            "extend",
            backend.extend(&ExtendRequest::new(id, Ttl::DEFAULT)).await.expect_err("refused"),
        ),
        ("is_locked", backend.is_locked(&key("canary")).await.expect_err("refused")),
        ("lookup", backend.lookup_key(&key("canary")).await.expect_err("refused")),
        ("lookup", backend.lookup_id(&id).await.expect_err("refused")),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn every_row_of_the_table_has_its_code_and_context() {
    let fake = FakeRedis::start().await;
    let backend = connect(&url(&fake)).await.expect("connects");
    for (code, expected, may_have_taken_effect) in TABLE {
        // The text suggests another error: only the code counts.
        let words = "OOM timeout max number of clients canary 127.0.0.1:1";
        fake.answer("EVALSHA", format!("-{code} {words}\r\n"));
        for (place, (operation, error)) in errors(&backend).await.into_iter().enumerate() {
            let what = format!("{code} in {operation}: {error:?}");
            assert_eq!(error.code(), expected, "{what}");
            assert_eq!(error.may_have_taken_effect(), may_have_taken_effect, "{what}");
            assert_eq!(error.backend(), Some("redis"), "{what}");
            assert_eq!(error.operation(), Some(operation), "{what}");
            let has_key = [0, 3, 4].contains(&place);
            assert_eq!(error.key().is_some(), has_key, "{what}");
            assert_eq!(error.lock_id().is_some(), !has_key, "{what}");
            assert!(!what.contains("canary"), "{what}");
        }
    }
}

/// A refusal while connecting means that the configuration is wrong.
#[tokio::test(flavor = "multi_thread")]
async fn a_refusal_while_connecting_names_what_to_check() {
    let Some(server) = RedisServer::start(&RedisOptions::default()) else { return };
    let error = connect(&server.url().replace("/0", "/99")).await.expect_err("no such database");
    assert_eq!(error.code(), ErrorCode::InvalidArgument, "{error:?}");
    assert!(error.to_string().contains("database"), "{error}");
    assert!(!error.may_have_taken_effect());
    assert_eq!((error.backend(), error.operation()), (Some("redis"), Some("connect")));
    let fake = FakeRedis::start().await;
    for (answer, expected) in [
        ("-ERR unknown command 'HELLO'", ErrorCode::InvalidArgument),
        ("-NOPROTO unsupported protocol version", ErrorCode::InvalidArgument),
        ("-DENIED Redis is running in protected mode", ErrorCode::InvalidArgument),
        ("-WRONGPASS invalid", ErrorCode::AuthFailed),
        ("-NOAUTH", ErrorCode::AuthFailed),
        ("-NOPERM no", ErrorCode::AuthFailed),
        ("-LOADING soon", ErrorCode::ServiceUnavailable),
        ("-BUSY soon", ErrorCode::ServiceUnavailable),
    ] {
        fake.answer("HELLO", format!("{answer}\r\n"));
        let error = connect(&url(&fake)).await.expect_err("refused");
        assert_eq!(error.code(), expected, "{answer}: {error:?}");
        assert!(!error.may_have_taken_effect(), "{answer}");
    }
    // The same applies when the backend reconnects during an operation.
    let fake = FakeRedis::start().await;
    let backend = connect(&url(&fake)).await.expect("connects");
    fake.answer("EVALSHA", "-NOAUTH again\r\n");
    fake.answer("HELLO", "-ERR no longer\r\n");
    backend.acquire(&request("k")).await.expect_err("refused");
    let error = backend.acquire(&request("k")).await.expect_err("refused");
    assert_eq!(error.code(), ErrorCode::InvalidArgument, "{error:?}");
    assert!(!error.may_have_taken_effect(), "{error:?}");
    assert_eq!(error.operation(), Some("acquire"));
}

/// Errors without a code: refused, reset, closed, unknown host, no answer.
#[tokio::test(flavor = "multi_thread")]
async fn errors_without_a_code_have_rows_too() {
    let closed = {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        listener.local_addr().expect("bound").port()
    };
    for host in [&format!("127.0.0.1:{closed}"), "no-such-host.invalid:6379"] {
        let error = connect(&format!("redis://{host}/0")).await.expect_err("no server");
        assert_eq!(error.code(), ErrorCode::ServiceUnavailable, "{host}: {error:?}");
        assert!(!error.may_have_taken_effect(), "{host}");
    }
    let fake = FakeRedis::start().await;
    let config = RedisConfig::from_url(&url(&fake)).expect("a URL");
    let config = config.response_timeout(Duration::from_millis(300));
    let backend = RedisBackend::connect(config).await.expect("connects");
    fake.answer("EVALSHA", "");
    let error = backend.acquire(&request("k")).await.expect_err("no answer");
    assert_eq!(error.code(), ErrorCode::NetworkTimeout, "{error:?}");
    assert!(error.may_have_taken_effect());
    // An unexpected response.
    for answer in ["+OK\r\n", ":7\r\n", "*1\r\n:7\r\n", "*3\r\n:1\r\n$1\r\n7\r\n:1\r\n", "_\r\n"] {
        fake.answer("EVALSHA", answer);
        let error = backend.acquire(&request("k")).await.expect_err("an unexpected response");
        assert_eq!(error.code(), ErrorCode::Internal, "{answer:?}: {error:?}");
        assert!(error.may_have_taken_effect(), "{answer:?}");
        assert_eq!((error.backend(), error.operation()), (Some("redis"), Some("acquire")));
    }
}

/// Calls that no lock needs have a deadline, even on a connection that has none.
#[tokio::test(flavor = "multi_thread")]
async fn probes_and_inspections_have_a_deadline() {
    let fake = FakeRedis::start().await;
    let client = redis::Client::open(url(&fake)).expect("a URL");
    let without_timeout = redis::AsyncConnectionConfig::new().set_response_timeout(None);
    let connection = client.get_multiplexed_async_connection_with_config(&without_timeout).await;
    let config = RedisConfig::from_connection(connection.expect("connects"));
    let config = config.response_timeout(Duration::from_millis(200));
    let in_time = async |what: &str, work: &mut (dyn Future<Output = ()> + Unpin + Send)| {
        let done = tokio::time::timeout(Duration::from_secs(20), work).await;
        done.unwrap_or_else(|_elapsed| panic!("{what} has no deadline"));
    };
    // The server does not answer what `connect` asks.
    fake.answer("INFO", "");
    fake.answer("CONFIG", "");
    let (sender, mut backend) = tokio::sync::oneshot::channel();
    let connecting = async move { drop(sender.send(RedisBackend::connect(config).await)) };
    in_time("connect", &mut Box::pin(connecting)).await;
    let backend = backend.try_recv().expect("connected").expect("missing answers are not an error");
    let admin = backend.admin().expect("Redis has one");
    in_time("findings", &mut Box::pin(async { drop(admin.findings().await) })).await;
    fake.answer("EVALSHA", "");
    let list = async {
        let error = admin.list(None).await.expect_err("no answer");
        assert_eq!(error.code(), ErrorCode::NetworkTimeout, "{error:?}");
    };
    in_time("list", &mut Box::pin(list)).await;
    // A server that accepts and never answers costs one connect timeout, not several in a row.
    let mute = FakeRedis::start().await;
    mute.answer("HELLO", "");
    let config = RedisConfig::from_url(&url(&mute)).expect("a URL");
    let started = Instant::now();
    let error = RedisBackend::connect(config.connect_timeout(Duration::from_secs(2))).await;
    assert_eq!(error.expect_err("no answer").code(), ErrorCode::NetworkTimeout);
    assert!(started.elapsed() < Duration::from_millis(3900), "{:?}", started.elapsed());
}

/// To run it by hand, use `unshare -m` and bind over /etc/resolv.conf a file whose name server is a
/// UDP socket that does not answer.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a name server that does not answer"]
async fn looking_up_a_name_has_a_deadline() {
    let config = RedisConfig::from_url("redis://slow.example:6379/0").expect("a URL");
    let config = config.connect_timeout(Duration::from_secs(1));
    let started = Instant::now();
    let error = RedisBackend::connect(config).await.expect_err("no name server");
    assert_eq!(error.code(), ErrorCode::NetworkTimeout, "{error:?}");
    assert!(started.elapsed() < Duration::from_secs(3), "{:?}", started.elapsed());
}

/// A connection that was abandoned while an answer was outstanding is closed eventually.
#[tokio::test(flavor = "multi_thread")]
async fn abandoned_connections_are_closed() {
    let fake = FakeRedis::start().await;
    let config = RedisConfig::from_url(&url(&fake)).expect("a URL");
    let config = config.response_timeout(Duration::from_millis(300));
    let backend = RedisBackend::connect(config).await.expect("connects");
    fake.answer("EVALSHA", "");
    for _ in 0..5 {
        let error = backend.acquire(&request("k")).await.expect_err("no answer");
        assert_eq!(error.code(), ErrorCode::NetworkTimeout, "{error:?}");
    }
    eventually("closed", async || fake.connections() <= 1).await;
    fake.answer("EVALSHA", "*2\r\n:0\r\n:1000\r\n");
    let outcome = backend.acquire(&request("k")).await.expect("works");
    assert!(matches!(outcome, AcquireOutcome::Contended { .. }), "{outcome:?}");
}

/// The server computes the expiry when the script runs: if it is paused after the request was sent,
/// the TTL counts from when it resumes. A time from the client would be in the past by then.
#[tokio::test(flavor = "multi_thread")]
async fn the_expiry_comes_from_the_servers_clock() {
    let Some(server) = RedisServer::start(&RedisOptions::default()) else { return };
    let config = RedisConfig::from_url(&server.url()).expect("a URL");
    let config = config.response_timeout(Duration::from_secs(30));
    let backend = RedisBackend::connect(config).await.expect("connects");
    // Load the scripts, so that each call is one request.
    let (warm, _) = grant(&backend, "warm").await;
    drop(backend.extend(&ExtendRequest::new(warm.lock_id(), Ttl::DEFAULT)).await.expect("works"));
    let standing_still = async |work: tokio::task::JoinHandle<Timestamp>| {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let resumed = Timestamp::from(std::time::SystemTime::now());
        server.resume();
        (work.await.expect("no panic"), resumed.expiry(Ttl::DEFAULT))
    };
    let request = AcquireRequest::new(key("k"), Ttl::DEFAULT).expect("randomness");
    server.pause();
    let work = tokio::spawn({
        let (backend, request) = (backend.clone(), request.clone());
        async move {
            match backend.acquire(&request).await.expect("works") {
                AcquireOutcome::Acquired(lease) => lease.expires_at(),
                other => panic!("{other:?}"),
            }
        }
    });
    let (expires, earliest) = standing_still(work).await;
    assert!(expires >= earliest, "acquire: {expires:?} before {earliest:?}");
    server.pause();
    let extend = ExtendRequest::new(request.lock_id(), Ttl::DEFAULT);
    let work = tokio::spawn({
        let backend = backend.clone();
        async move {
            match backend.extend(&extend).await.expect("works") {
                ExtendOutcome::Extended(extension) => extension.expires_at(),
                ExtendOutcome::NotHeld(why) => panic!("{why:?}"),
            }
        }
    });
    let (expires, earliest) = standing_still(work).await;
    assert!(expires >= earliest, "extend: {expires:?} before {earliest:?}");
    // The stored expiry is the one that was returned.
    let stored = server.cli(&["GET", "syncguard:k"]);
    assert!(stored.contains(&expires.as_millis().to_string()), "{stored}");
}
