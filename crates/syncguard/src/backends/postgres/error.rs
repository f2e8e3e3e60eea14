//! Maps errors of PostgreSQL and its driver to ours: by SQLSTATE, never by the text of the server's
//! message.

use tokio_postgres::error::{Severity, SqlState};

use crate::common::error::{Cause, Error, ErrorCode};

/// Maps an error of the driver.
pub(super) fn map(error: &tokio_postgres::Error) -> Error {
    let (row, cause) = match error.code() {
        Some(state) => (
            row_of(state.code(), ends_statement_only(error)),
            format!("SQLSTATE {}", printable(state.code())),
        ),
        None if error.is_closed() => (without_state(error), "the connection is closed".to_owned()),
        None => (without_state(error), "the driver failed".to_owned()),
    };
    by_row(row).with_source(Cause(cause))
}

fn by_row((code, message, may_have_taken_effect): Row) -> Error {
    let error = Error::new(code, message);
    if may_have_taken_effect { error.after_effect() } else { error.without_effect() }
}

/// The code, the message, and whether the operation may have taken effect.
type Row = (ErrorCode, &'static str, bool);

/// Returns a SQLSTATE, which has five letters and digits. Anything else is not repeated.
fn printable(state: &str) -> &str {
    let is_state = state.len() == 5 && state.bytes().all(|byte| byte.is_ascii_alphanumeric());
    if is_state { state } else { "malformed" }
}

/// Returns the row of the error table for an error of the server.
fn row_of(state: &str, ends_statement_only: bool) -> Row {
    let (code, message, may_have_taken_effect) = by_state(state);
    (code, message, may_have_taken_effect || !ends_statement_only)
}

/// Returns the row of the error table for a SQLSTATE.
fn by_state(state: &str) -> Row {
    use ErrorCode::{
        AuthFailed, Internal, InvalidArgument, NetworkTimeout, RateLimited, ServiceUnavailable,
    };
    // A failed statement rolls back its transaction. Only an error that ends the session may come
    // after the commit; these codes always do.
    match state {
        "57014" => (NetworkTimeout, "PostgreSQL canceled the statement: it took too long", false),
        "55P03" => (
            NetworkTimeout,
            "another PostgreSQL session held a row or advisory lock for too long; try again",
            false,
        ),
        "25006" => (
            ServiceUnavailable,
            "this PostgreSQL server is a read-only standby; connect to the primary",
            false,
        ),
        // Statements with stale plans have been prepared again by now. What remains is a standby,
        // which cannot read an unlogged table.
        "0A000" => (
            ServiceUnavailable,
            "this PostgreSQL server does not support the operation; if it is a standby, connect to \
             the primary",
            false,
        ),
        "40001" | "40P01" => (
            ServiceUnavailable,
            "PostgreSQL aborted this transaction (deadlock or serialization failure)",
            false,
        ),
        "40003" => {
            (ServiceUnavailable, "PostgreSQL does not know whether the commit completed", true)
        }
        "57P01" | "57P02" | "57P03" => {
            (ServiceUnavailable, "PostgreSQL is shutting down or starting up", true)
        }
        "57P05" | "25P03" | "25P04" => {
            (ServiceUnavailable, "PostgreSQL ended the session because of a timeout", true)
        }
        "42501" => (
            AuthFailed,
            "the PostgreSQL user lacks a permission; grant SELECT, INSERT, UPDATE and DELETE on \
             the lock table, and SELECT, INSERT and UPDATE on the fence table",
            false,
        ),
        "42P01" => (
            InvalidArgument,
            "the PostgreSQL tables are missing; run setup_schema or `syncguard setup`",
            false,
        ),
        "42703" | "42883" => (
            InvalidArgument,
            "the PostgreSQL tables are not those of syncguard; choose other table names",
            false,
        ),
        "3D000" => {
            (InvalidArgument, "the PostgreSQL database does not exist; check the URL", false)
        }
        _ => match state.get(..2) {
            Some("08") => (ServiceUnavailable, LOST, true),
            Some("28") => (
                AuthFailed,
                "PostgreSQL refused the credentials; check the user and the password",
                false,
            ),
            Some("53") => {
                (RateLimited, "PostgreSQL is out of connections, memory or disk space", false)
            }
            Some("22" | "23") => (InvalidArgument, "PostgreSQL refused this input", false),
            _ => (Internal, "PostgreSQL returned an unexpected error", false),
        },
    }
}

/// Returns the row for an error that the driver reports by itself.
fn without_state(error: &tokio_postgres::Error) -> Row {
    use ErrorCode::{InvalidArgument, NetworkTimeout, ServiceUnavailable};
    let io =
        std::error::Error::source(error).and_then(|cause| cause.downcast_ref::<std::io::Error>());
    match io.map(std::io::Error::kind) {
        Some(std::io::ErrorKind::ConnectionRefused | std::io::ErrorKind::NotFound) => {
            (ServiceUnavailable, "PostgreSQL refused the connection; is it running there?", false)
        }
        Some(std::io::ErrorKind::TimedOut) => {
            (NetworkTimeout, "PostgreSQL did not answer in time", true)
        }
        // The driver has no code for these two; the beginning of its message is fixed (ADR 032).
        _ if error.to_string().starts_with("error performing TLS handshake") => (
            ServiceUnavailable,
            "the TLS handshake with PostgreSQL failed: it does not offer TLS, or its certificate \
             is not trusted or not for this host; check sslmode and sslrootcert",
            false,
        ),
        _ if error.to_string().starts_with("invalid configuration") => (
            InvalidArgument,
            "cannot connect to PostgreSQL as configured; is the password missing?",
            false,
        ),
        _ => (ServiceUnavailable, LOST, true),
    }
}

/// What to do about the connection on which an error came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Remedy {
    /// Nothing: it still works.
    None,
    /// Replace it: its session has ended or is about to.
    Replace,
    /// Replace it and all others: they lead to a server that cannot be written to.
    FindPrimary,
    /// Replace it and all others, and repeat the operation: a table has changed since the
    /// statements were prepared, and their plans are stale.
    PrepareAgain,
    /// Prepare nothing from now on, and repeat the operation: the connection does not know a
    /// prepared statement, so there is a pooler in front of the server.
    PrepareNothing,
}

/// Returns what to do about the connection on which an error came.
pub(super) fn remedy(error: &tokio_postgres::Error) -> Remedy {
    let Some(state) = error.code() else { return Remedy::Replace };
    remedy_of(state, ends_statement_only(error))
}

fn remedy_of(state: &SqlState, ends_statement_only: bool) -> Remedy {
    match state.code() {
        // A prepared statement is unknown, or exists already.
        "26000" | "42P05" => Remedy::PrepareNothing,
        // "cached plan must not change result type", or an unlogged table on a standby.
        "0A000" => Remedy::PrepareAgain,
        "25006" => Remedy::FindPrimary,
        _ if ends_statement_only => Remedy::None,
        _ => Remedy::Replace,
    }
}

/// Returns whether a table lacks a column. The only column that may be missing is `holder`.
pub(super) fn is_missing_column(error: &tokio_postgres::Error) -> bool {
    error.code() == Some(&SqlState::UNDEFINED_COLUMN)
}

/// Returns whether a statement took too long.
pub(super) fn is_late(error: &tokio_postgres::Error) -> bool {
    error.code() == Some(&SqlState::QUERY_CANCELED)
}

/// Returns whether an error ended only a statement, and its session continues.
pub(super) fn ends_statement_only(error: &tokio_postgres::Error) -> bool {
    error.as_db_error().is_some_and(|error| error.parsed_severity() == Some(Severity::Error))
}

/// Returns whether the settings for a new session were refused, as a pooler does.
pub(super) fn is_refused_setting(error: &tokio_postgres::Error) -> bool {
    error.code() == Some(&SqlState::PROTOCOL_VIOLATION)
}

/// Returns whether the server does not know one of the settings for a new session.
pub(super) fn is_unknown_setting(error: &tokio_postgres::Error) -> bool {
    error.code() == Some(&SqlState::UNDEFINED_OBJECT)
}

/// Creates the error for a setting that the server does not know.
pub(super) fn unknown_setting() -> Error {
    Error::invalid(
        "PostgreSQL does not know a session setting; use version 12 or newer, and check \
         \"options\" in the URL",
    )
}

/// Creates the error for a server that is too old.
pub(super) fn too_old() -> Error {
    Error::invalid("this PostgreSQL server is too old; use version 12 or newer")
}

/// Creates the error for a host name without an address.
pub(super) fn unknown_host() -> Error {
    Error::new(
        ErrorCode::ServiceUnavailable,
        "cannot resolve the name of the PostgreSQL host; check the URL",
    )
    .without_effect()
}

/// Creates the error for an answer that did not come in time.
pub(super) fn timeout() -> Error {
    Error::new(ErrorCode::NetworkTimeout, "PostgreSQL did not answer in time")
}

const LOST: &str = "the connection to PostgreSQL was lost";

/// Creates the error for a connection that ended before the answer came.
pub(super) fn lost() -> Error {
    Error::new(ErrorCode::ServiceUnavailable, LOST)
}

/// Returns whether a connection ended before the answer came.
pub(super) fn is_lost(error: &Error) -> bool {
    error.message() == LOST
}

/// Creates the error for a pool in which no connection was free in time.
pub(super) fn no_connection() -> Error {
    Error::new(
        ErrorCode::NetworkTimeout,
        "no connection to PostgreSQL was free in time; use a larger pool",
    )
    .without_effect()
}

/// Creates the error for an answer that no statement returns.
pub(super) fn unexpected_response() -> Error {
    Error::new(ErrorCode::Internal, "PostgreSQL sent an unexpected response")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// It may come after the commit, and poolers use any code.
    #[test]
    fn an_error_that_ends_the_session_may_have_taken_effect() {
        for state in ["XX000", "53100", "58030", "42P01"] {
            for ends_statement_only in [true, false] {
                let error = by_row(row_of(state, ends_statement_only));
                assert_eq!(error.may_have_taken_effect(), !ends_statement_only, "{state}");
            }
        }
    }

    #[test]
    fn every_row_of_the_table() {
        use ErrorCode::{
            AuthFailed, Internal, InvalidArgument, NetworkTimeout, RateLimited, ServiceUnavailable,
        };
        let rows = [
            ("08000", ServiceUnavailable, true),
            ("08001", ServiceUnavailable, true),
            ("08003", ServiceUnavailable, true),
            ("08004", ServiceUnavailable, true),
            ("08006", ServiceUnavailable, true),
            ("08007", ServiceUnavailable, true),
            ("08P01", ServiceUnavailable, true),
            ("57P01", ServiceUnavailable, true),
            ("57P02", ServiceUnavailable, true),
            ("57P03", ServiceUnavailable, true),
            ("57P05", ServiceUnavailable, true),
            ("25P03", ServiceUnavailable, true),
            ("25P04", ServiceUnavailable, true),
            ("40003", ServiceUnavailable, true),
            ("40001", ServiceUnavailable, false),
            ("40P01", ServiceUnavailable, false),
            ("25006", ServiceUnavailable, false),
            ("57014", NetworkTimeout, false),
            ("55P03", NetworkTimeout, false),
            ("28000", AuthFailed, false),
            ("28P01", AuthFailed, false),
            ("42501", AuthFailed, false),
            ("53000", RateLimited, false),
            ("53100", RateLimited, false),
            ("53200", RateLimited, false),
            ("53300", RateLimited, false),
            ("22001", InvalidArgument, false),
            ("22021", InvalidArgument, false),
            ("22P02", InvalidArgument, false),
            ("23502", InvalidArgument, false),
            ("23505", InvalidArgument, false),
            ("3D000", InvalidArgument, false),
            ("42P01", InvalidArgument, false),
            ("42703", InvalidArgument, false),
            ("42883", InvalidArgument, false),
            ("0A000", ServiceUnavailable, false),
            ("25P02", Internal, false),
            ("57P04", Internal, false),
            ("XX000", Internal, false),
            ("XX002", Internal, false),
        ];
        for (state, code, may_have_taken_effect) in rows {
            let row = by_state(state);
            assert_eq!((row.0, row.2), (code, may_have_taken_effect), "{state}");
        }
    }

    #[test]
    fn a_malformed_state_has_a_row_and_is_not_repeated() {
        for state in ["", "2", "é", "2é", "€€", "28", "22\n00"] {
            let (code, _, _) = by_state(state);
            assert_ne!(code, ErrorCode::ServiceUnavailable, "{state:?}");
            assert_eq!(printable(state), "malformed", "{state:?}");
        }
        assert_eq!(printable("XX000"), "XX000");
    }

    #[test]
    fn every_remedy_follows_from_the_state() {
        let rows = [
            ("25006", true, Remedy::FindPrimary),
            ("0A000", true, Remedy::PrepareAgain),
            ("26000", true, Remedy::PrepareNothing),
            ("42P05", true, Remedy::PrepareNothing),
            ("40001", true, Remedy::None),
            ("57014", true, Remedy::None),
            ("57P01", false, Remedy::Replace),
            ("57P05", false, Remedy::Replace),
            ("25P04", false, Remedy::Replace),
            ("XX000", false, Remedy::Replace),
        ];
        for (state, ends_statement_only, expected) in rows {
            let found = remedy_of(&SqlState::from_code(state), ends_statement_only);
            assert_eq!(found, expected, "{state}");
        }
    }
}
