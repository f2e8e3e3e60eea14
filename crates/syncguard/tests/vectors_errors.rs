//! Error codes of the running TypeScript implementation, compared with ours for the same failure.
//! TypeScript matches words in messages; ours maps codes ([ADR 032]), so many differ on purpose.
//! Every case runs, and where ours differs, the test names the reason.
//!
//! [ADR 032]: ../../../docs/adr/032-error-codes-in-one-table.md
#![cfg(all(feature = "firestore", feature = "postgres", feature = "redis"))]

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::task::{Context, Poll};
use std::thread;
use std::time::Duration;

use ::redis::aio::ConnectionLike;
use ::redis::{Cmd, Pipeline, RedisError, RedisFuture, Value as RedisValue, parse_redis_value};
use serde_json::Value;
use syncguard::backend::AcquireRequest;
use syncguard::firestore::FirestoreConfig;
use syncguard::firestore::tonic::body::Body;
use syncguard::firestore::tonic::codegen::{Service, http};
use syncguard::firestore::tonic::{Code, Status};
use syncguard::postgres::PostgresConfig;
use syncguard::redis::RedisConfig;
use syncguard::{Error, FirestoreBackend, Key, LockBackend, PostgresBackend, RedisBackend, Ttl};

fn vectors(backend: &str) -> Vec<Value> {
    let all: Value =
        serde_json::from_str(include_str!("vectors/error_mapping.json")).expect("JSON");
    all[backend].as_array().expect("a list of cases").clone()
}

/// Returns the code and the text that identify a case: a message, or a value that is not an error.
fn input(case: &Value) -> (&str, &str) {
    let input = &case["input"];
    let text = |name: &str| input[name].as_str().unwrap_or_default();
    match (text("nonError"), text("marker")) {
        ("", "") => (text("code"), text("message")),
        (other, "") | ("", other) => (text("code"), other),
        both => panic!("an unknown case: {both:?}"),
    }
}

fn request() -> AcquireRequest {
    AcquireRequest::new(Key::new("canary-key").expect("valid"), Ttl::DEFAULT).expect("randomness")
}

/// Our code, and why it differs from TypeScript's.
type Departure = (&'static str, &'static str);

/// Asserts TypeScript's code, or ours where a departure is listed. A departure that does not differ
/// is out of date.
#[track_caller]
fn compare(case: &Value, departure: Option<Departure>, error: &Error) {
    let theirs = case["code"].as_str().expect("a code");
    let expected = match departure {
        Some((ours, why)) => {
            assert_ne!(ours, theirs, "not a departure ({why}): {case}");
            ours
        }
        None => theirs,
    };
    assert_eq!(error.code().as_str(), expected, "{error}: {case}");
    let shown = format!("{error} {error:?}");
    assert!(!shown.contains("canary"), "{shown}");
}

/// A connection on which every command fails with the same error.
#[derive(Clone)]
struct Refusing(RedisError);

impl ConnectionLike for Refusing {
    fn req_packed_command<'a>(&'a mut self, _command: &'a Cmd) -> RedisFuture<'a, RedisValue> {
        Box::pin(async { Err(self.0.clone()) })
    }

    fn req_packed_commands<'a>(
        &'a mut self,
        _pipeline: &'a Pipeline,
        _offset: usize,
        _count: usize,
    ) -> RedisFuture<'a, Vec<RedisValue>> {
        Box::pin(async { Err(self.0.clone()) })
    }

    fn get_db(&self) -> i64 {
        0
    }
}

/// Parses an error reply of the server with the driver.
fn answered(line: &str) -> RedisError {
    let answer = parse_redis_value(format!("-{line}\r\n").as_bytes()).expect("a complete answer");
    answer.extract_error().expect_err("it is an error")
}

const BY_CODE: &str = "the code decides, and a caller must know whether to retry";
const NO_WORDS: &str = "message text does not matter, and no server sends this code";

/// Returns the same failure with our driver, and our code if it differs.
fn redis_error(message: &str) -> (RedisError, Option<Departure>) {
    let io = |kind: io::ErrorKind| RedisError::from(io::Error::from(kind));
    let lost = Some(("ServiceUnavailable", BY_CODE));
    let word = message.split(' ').next().unwrap_or_default();
    match message {
        "timeout" => (io(io::ErrorKind::TimedOut), None),
        "Command timed out" | "connect ETIMEDOUT" => {
            (io(io::ErrorKind::TimedOut), Some(("NetworkTimeout", BY_CODE)))
        }
        "read ECONNRESET" => (io(io::ErrorKind::ConnectionReset), None),
        "connect ECONNREFUSED 127.0.0.1:1" => (io(io::ErrorKind::ConnectionRefused), None),
        // The connection was refused, whatever else the message mentions.
        "connect ECONNREFUSED after timeout" => (io(io::ErrorKind::ConnectionRefused), lost),
        "getaddrinfo ENOTFOUND host" => (io::Error::other("no such host").into(), None),
        "connect EHOSTUNREACH" => (io(io::ErrorKind::HostUnreachable), lost),
        "write EPIPE" => (io(io::ErrorKind::BrokenPipe), lost),
        "Connection is closed." => (io(io::ErrorKind::UnexpectedEof), lost),
        _ if message.starts_with("Socket timeout.") => (io(io::ErrorKind::TimedOut), None),
        _ if message.starts_with("Reached the max retries") => {
            (io(io::ErrorKind::ConnectionAborted), lost)
        }
        _ if message.starts_with("Stream isn't writeable") => {
            (io(io::ErrorKind::NotConnected), lost)
        }
        _ => {
            let departure = match word {
                "MOVED" | "CLUSTERDOWN" | "LOADING" | "READONLY" | "BUSY" => lost,
                "OOM" => Some(("RateLimited", BY_CODE)),
                "CROSSSLOT" => Some(("InvalidArgument", BY_CODE)),
                "SYNTAX" | "INVALID" => Some(("Internal", NO_WORDS)),
                _ => None,
            };
            (answered(message), departure)
        }
    }
}

#[tokio::test]
async fn errors_of_redis_match_the_vectors() {
    for case in vectors("redis") {
        let (_, message) = input(&case);
        if message == "ERR max number of clients reached" {
            let error = full_redis(message).await;
            compare(&case, Some(("RateLimited", BY_CODE)), &error);
            continue;
        }
        let (failure, departure) = redis_error(message);
        let config = RedisConfig::from_connection(Refusing(failure));
        let error = match RedisBackend::connect(config).await {
            Ok(backend) => backend.acquire(&request()).await.expect_err("it fails"),
            Err(error) => error,
        };
        compare(&case, departure, &error);
    }
}

/// Connects to a Redis that sends this error for a new connection and closes it.
async fn full_redis(message: &str) -> Error {
    let line = format!("-{message}\r\n");
    let port = serve(move |mut client| drop(client.write_all(line.as_bytes())));
    let config = RedisConfig::from_url(&format!("redis://127.0.0.1:{port}/0")).expect("valid");
    RedisBackend::connect(config).await.expect_err("it is full")
}

/// Listens on a free port and serves every connection with `answer`.
fn serve(answer: impl Fn(TcpStream) + Send + Sync + 'static) -> u16 {
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
    let port = listener.local_addr().expect("an address").port();
    let answer = std::sync::Arc::new(answer);
    thread::spawn(move || {
        for client in listener.incoming() {
            let (client, answer) = (client.expect("a client"), std::sync::Arc::clone(&answer));
            thread::spawn(move || answer(client));
        }
    });
    port
}

/// What a fake PostgreSQL server does once a client is logged in.
#[derive(Clone)]
enum Postgres {
    /// It fails every request with this SQLSTATE.
    Answers(String),
    Closes,
    IsSilent,
}

impl Postgres {
    fn serve(&self, mut client: TcpStream) -> io::Result<()> {
        // The startup message has a length but no type. Its content does not matter here.
        read_message(&mut client, false)?;
        // Replies that authentication is not needed and that the server is ready.
        client.write_all(b"R\0\0\0\x08\0\0\0\0Z\0\0\0\x05I")?;
        loop {
            let kind = read_message(&mut client, true)?;
            let ends_a_request = matches!(kind, b'Q' | b'S');
            match self {
                Self::Answers(state) if ends_a_request => {
                    let fields = format!("SERROR\0VERROR\0C{state}\0Mcanary\0Dcanary\0\0");
                    let length = u32::try_from(fields.len() + 4).expect("short");
                    client.write_all(b"E")?;
                    client.write_all(&length.to_be_bytes())?;
                    client.write_all(fields.as_bytes())?;
                    client.write_all(b"Z\0\0\0\x05I")?;
                }
                Self::Answers(_) => {}
                Self::Closes => return Ok(()),
                Self::IsSilent => thread::sleep(Duration::from_mins(1)),
            }
        }
    }
}

/// Reads a message and returns its type, or zero if it has none.
fn read_message(client: &mut TcpStream, has_type: bool) -> io::Result<u8> {
    let (mut kind, mut length) = ([0], [0; 4]);
    if has_type {
        client.read_exact(&mut kind)?;
    }
    client.read_exact(&mut length)?;
    let rest = u32::from_be_bytes(length).saturating_sub(4);
    io::copy(&mut client.take(rest.into()), &mut io::sink())?;
    Ok(kind[0])
}

/// Returns the same failure with our driver (a server or an address), and our code if it differs.
fn postgres_error(
    code: &str,
    message: &str,
) -> (Result<Postgres, &'static str>, Option<Departure>) {
    let lost = Some(("ServiceUnavailable", BY_CODE));
    // TypeScript recognizes these only by words in the message.
    let has_message = !message.is_empty() && message != "msg";
    match code {
        "CONNECT_TIMEOUT" | "ETIMEDOUT" => {
            (Ok(Postgres::IsSilent), Some(("NetworkTimeout", BY_CODE)))
        }
        "CONNECTION_CLOSED" | "CONNECTION_ENDED" | "CONNECTION_DESTROYED" | "EPIPE" => {
            (Ok(Postgres::Closes), lost)
        }
        "ECONNRESET" => (Ok(Postgres::Closes), lost.filter(|_| !has_message)),
        "ECONNREFUSED" => (Err("127.0.0.1:1"), lost.filter(|_| !has_message)),
        "ENOTFOUND" => (Err("syncguard.invalid:5432"), lost.filter(|_| !has_message)),
        // Not an error of the server: use an unknown SQLSTATE.
        "" => (Ok(Postgres::Answers("ZZ999".to_owned())), None),
        state => {
            let departure = match state {
                "08007" | "08P01" | "25006" | "25P03" | "57P01" | "57P02" | "57P03" | "57P05" => {
                    lost
                }
                "22021" | "22P05" | "23505" | "3D000" => Some(("InvalidArgument", BY_CODE)),
                "42501" => Some(("AuthFailed", BY_CODE)),
                "53400" => Some(("RateLimited", BY_CODE)),
                "55P03" => Some(("NetworkTimeout", BY_CODE)),
                _ => None,
            };
            (Ok(Postgres::Answers(state.to_owned())), departure)
        }
    }
}

#[tokio::test]
async fn errors_of_postgresql_match_the_vectors() {
    for case in vectors("postgres") {
        let (code, message) = input(&case);
        let (failure, departure) = postgres_error(code, message);
        let address = match failure {
            Ok(server) => {
                // A client may disconnect at any time.
                format!("127.0.0.1:{}", serve(move |client| drop(server.serve(client))))
            }
            Err(address) => address.to_owned(),
        };
        let url = format!("postgres://canary@{address}/canary?sslmode=disable");
        let config = PostgresConfig::from_url(&url).expect("valid");
        let config = config.response_timeout(Duration::from_millis(500));
        let error = match PostgresBackend::connect(config).await {
            Ok(backend) => backend.acquire(&request()).await.expect_err("it fails"),
            Err(error) => error,
        };
        compare(&case, departure, &error);
    }
}

/// A channel on which every request fails with the same status.
#[derive(Clone)]
struct Failing(Code, &'static str);

impl Service<http::Request<Body>> for Failing {
    type Response = http::Response<Body>;
    type Error = Status;
    type Future = std::future::Ready<Result<http::Response<Body>, Status>>;

    fn poll_ready(&mut self, _context: &mut Context<'_>) -> Poll<Result<(), Status>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _request: http::Request<Body>) -> Self::Future {
        std::future::ready(Err(Status::new(self.0, self.1)))
    }
}

/// Returns the same gRPC code, and our code if it differs.
fn firestore_error(message: &str) -> (Code, Option<Departure>) {
    let input = Some(("InvalidArgument", BY_CODE));
    let number = message.split(' ').next().and_then(|number| number.parse().ok());
    match (number.map(Code::from_i32), message) {
        (Some(Code::InvalidArgument), "3 INVALID_ARGUMENT: Transaction is invalid or closed.") => {
            (Code::InvalidArgument, Some(("InvalidArgument", "ours uses no transactions; ADR 042")))
        }
        (Some(Code::Unavailable), "14 UNAVAILABLE: PERMISSION_DENIED by proxy") => {
            (Code::Unavailable, Some(("ServiceUnavailable", NO_WORDS)))
        }
        (Some(Code::Cancelled), _) => (Code::Cancelled, Some(("NetworkTimeout", BY_CODE))),
        (Some(code @ (Code::NotFound | Code::OutOfRange)), _) => (code, input),
        (Some(code), _) => (code, None),
        (None, "Transaction is invalid or closed.") => {
            (Code::Unknown, Some(("Internal", "ours uses no transactions; ADR 042")))
        }
        // An error that does not come from the server has no code.
        (None, _) => (Code::Unknown, None),
    }
}

#[tokio::test]
async fn errors_of_firestore_match_the_vectors() {
    for case in vectors("firestore") {
        let (_, message) = input(&case);
        if message == "internal abort marker" {
            // Ours needs no marker: the token ends the call, without the store.
            let token = syncguard::CancellationToken::new();
            token.cancel();
            let never = std::future::pending::<syncguard::Result<()>>();
            let error = syncguard::cancellable(&token, never).await.expect_err("canceled");
            compare(&case, None, &error);
            continue;
        }
        let (code, departure) = firestore_error(message);
        let config = FirestoreConfig::new("project").emulator("127.0.0.1:1").without_clock_check();
        let config = config.channel(Failing(code, "canary"));
        let backend = FirestoreBackend::connect(config).await;
        let error = match backend {
            Ok(backend) => backend.is_locked(request().key()).await.expect_err("it fails"),
            Err(error) => error,
        };
        compare(&case, departure, &error);
    }
}
