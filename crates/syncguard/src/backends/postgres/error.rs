//! What goes wrong with PostgreSQL, in our words: by SQLSTATE, never by the text of a message.

use tokio_postgres::error::SqlState;

use crate::common::error::{Cause, Error, ErrorCode};

/// Our error for one of the driver's.
pub(super) fn map(error: &tokio_postgres::Error) -> Error {
    let (code, message, reached_the_store) = classify(error);
    let cause = match error.code() {
        Some(state) => format!("SQLSTATE {}", state.code()),
        None if error.is_closed() => "the connection is closed".to_owned(),
        None => "the driver failed".to_owned(),
    };
    let mapped = Error::new(code, message).with_source(Cause(cause));
    if reached_the_store { mapped } else { mapped.without_effect() }
}

/// The code, the message, and whether the operation may have taken effect.
fn classify(error: &tokio_postgres::Error) -> (ErrorCode, &'static str, bool) {
    use ErrorCode::{
        AuthFailed, Internal, InvalidArgument, NetworkTimeout, RateLimited, ServiceUnavailable,
    };
    let Some(state) = error.code() else { return without_state(error) };
    // A statement that failed took its transaction with it; only at its end nobody knows.
    match state.code() {
        "57014" => (NetworkTimeout, "postgres cancelled the statement, which took too long", false),
        "55P03" => (NetworkTimeout, "a lock inside postgres was not obtained in time", false),
        "25006" | "0A000" => (
            ServiceUnavailable,
            "this postgres is a read-only standby; connect to the primary",
            false,
        ),
        "40001" | "40P01" => (ServiceUnavailable, "postgres gave another transaction way", false),
        "40003" => (ServiceUnavailable, "postgres does not know whether it happened", true),
        "57P01" | "57P02" | "57P03" => {
            (ServiceUnavailable, "postgres is shutting down or starting up", true)
        }
        "42501" => (
            AuthFailed,
            "the postgres user lacks a right; docs/specs/postgres.md lists those that \
              are enough",
            false,
        ),
        "42P01" => (InvalidArgument, "the tables are missing; run setup_schema", false),
        "42703" | "42883" => {
            (InvalidArgument, "the tables are not those of this library; run setup_schema", false)
        }
        "3D000" => (InvalidArgument, "there is no such database", false),
        code => match &code[..2] {
            "08" => (ServiceUnavailable, "the connection to postgres was lost", true),
            "28" => (AuthFailed, "postgres refused the credentials", false),
            "53" => (RateLimited, "postgres is out of connections, memory or disk space", false),
            "22" | "23" => (InvalidArgument, "postgres refuses this input", false),
            _ => (Internal, "postgres answered an error that makes no sense here", false),
        },
    }
}

/// What the driver says by itself.
fn without_state(error: &tokio_postgres::Error) -> (ErrorCode, &'static str, bool) {
    use ErrorCode::{InvalidArgument, NetworkTimeout, ServiceUnavailable};
    let io =
        std::error::Error::source(error).and_then(|cause| cause.downcast_ref::<std::io::Error>());
    match io.map(std::io::Error::kind) {
        Some(std::io::ErrorKind::ConnectionRefused | std::io::ErrorKind::NotFound) => {
            (ServiceUnavailable, "postgres refused the connection; is it running there?", false)
        }
        Some(std::io::ErrorKind::TimedOut) => {
            (NetworkTimeout, "postgres did not answer in time", true)
        }
        _ if is_tls_failure(error) => (
            ServiceUnavailable,
            "no TLS with postgres: it does not offer it, its certificate is not trusted, or not for \
             this host (sslmode, sslrootcert)",
            false,
        ),
        _ if error.to_string().starts_with("invalid configuration") => (
            InvalidArgument,
            "postgres cannot be connected to as configured; is the password missing?",
            false,
        ),
        _ => (ServiceUnavailable, "the connection to postgres was lost", true),
    }
}

/// The driver tells this only in words of its own, which are fixed.
fn is_tls_failure(error: &tokio_postgres::Error) -> bool {
    error.to_string().starts_with("error performing TLS handshake")
}

/// Whether a statement that was prepared is not known on the connection that was used: a pooler
/// stands between us and the server.
pub(super) fn is_poolers(error: &tokio_postgres::Error) -> bool {
    let unknown = [SqlState::INVALID_SQL_STATEMENT_NAME, SqlState::DUPLICATE_PSTATEMENT];
    error.code().is_some_and(|state| unknown.contains(state))
}

/// Whether settings that a session was to begin with were refused, as a pooler does.
pub(super) fn is_refused_setting(error: &tokio_postgres::Error) -> bool {
    error.code() == Some(&SqlState::PROTOCOL_VIOLATION)
}

/// Whether the server does not know a setting that a session was to begin with.
pub(super) fn is_unknown_setting(error: &tokio_postgres::Error) -> bool {
    error.code() == Some(&SqlState::UNDEFINED_OBJECT)
}

/// A setting is not known there.
pub(super) fn unknown_setting() -> Error {
    Error::invalid(
        "postgres does not know a setting: it is too old, 12 is the oldest that works, or the URL's \
         options name one that there is not",
    )
}

/// The server lacks what the statements need.
pub(super) fn too_old() -> Error {
    Error::invalid("this postgres is too old; 12 is the oldest that works")
}

/// No answer came in time.
pub(super) fn timeout() -> Error {
    Error::new(ErrorCode::NetworkTimeout, "postgres did not answer in time")
}

/// The connection ended before the answer came.
pub(super) fn lost() -> Error {
    Error::new(ErrorCode::ServiceUnavailable, "the connection to postgres was lost")
}

/// No connection was free in time.
pub(super) fn no_connection() -> Error {
    Error::new(ErrorCode::NetworkTimeout, "no connection to postgres was free in time")
        .without_effect()
}

/// An answer that no statement of ours gives.
pub(super) fn nonsense() -> Error {
    Error::new(ErrorCode::Internal, "postgres answered something that makes no sense")
}
