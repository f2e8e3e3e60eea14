//! What goes wrong with SQLite, in our words: by code, never by the text of a message.

use rusqlite::ErrorCode as Sqlite;

use crate::common::error::{Cause, Error, ErrorCode};

/// Our error for one of SQLite's. Nothing was changed, because the transaction is rolled back; only
/// of a disk that fails nobody knows what it has kept.
pub(super) fn map(error: &rusqlite::Error) -> Error {
    let (code, message) = classify(error.sqlite_error_code());
    let cause = match error.sqlite_error() {
        Some(cause) => Cause(format!("SQLite answered {}", cause.extended_code)),
        None => Cause("SQLite answered something that makes no sense".to_owned()),
    };
    let mapped = Error::new(code, message).with_source(cause);
    if is_disk_failure(error) { mapped } else { mapped.without_effect() }
}

pub(super) fn is_disk_failure(error: &rusqlite::Error) -> bool {
    error.sqlite_error_code() == Some(Sqlite::SystemIoFailure)
}

fn classify(code: Option<Sqlite>) -> (ErrorCode, &'static str) {
    use ErrorCode::{
        AuthFailed, Internal, InvalidArgument, NetworkTimeout, RateLimited, ServiceUnavailable,
    };
    match code {
        Some(Sqlite::CannotOpen) => (
            ServiceUnavailable,
            "the lock file cannot be opened; does its directory exist, and may it be written?",
        ),
        Some(Sqlite::SystemIoFailure) => (ServiceUnavailable, "the disk of the lock file fails"),
        Some(Sqlite::DatabaseBusy | Sqlite::DatabaseLocked) => {
            (NetworkTimeout, "the lock file was busy for too long")
        }
        Some(
            Sqlite::ReadOnly | Sqlite::PermissionDenied | Sqlite::AuthorizationForStatementDenied,
        ) => (
            AuthFailed,
            "the lock file may not be written; locks need write access to it and to its directory",
        ),
        Some(Sqlite::DiskFull) => (RateLimited, "no room is left for the lock file"),
        Some(Sqlite::TooBig | Sqlite::ApiMisuse) => (InvalidArgument, "SQLite refuses this input"),
        Some(Sqlite::NotADatabase) => (Internal, "the lock file is no SQLite database"),
        Some(Sqlite::DatabaseCorrupt) => (Internal, "the lock file is damaged"),
        _ => (Internal, "SQLite answered something that makes no sense"),
    }
}

/// The file was busy until the caller's patience ended.
pub(super) fn busy() -> Error {
    let (code, message) = classify(Some(Sqlite::DatabaseBusy));
    Error::new(code, message).without_effect()
}

/// The thread that owns the file is gone, which only a bug can do.
pub(super) fn gone() -> Error {
    Error::new(ErrorCode::Internal, "the worker of the lock file has ended")
}

#[cfg(test)]
mod tests {
    use rusqlite::ffi;

    use super::*;

    #[test]
    fn codes_of_the_table() {
        for (code, expected) in [
            (ffi::SQLITE_CANTOPEN, ErrorCode::ServiceUnavailable),
            (ffi::SQLITE_IOERR_FSYNC, ErrorCode::ServiceUnavailable),
            (ffi::SQLITE_BUSY, ErrorCode::NetworkTimeout),
            (ffi::SQLITE_LOCKED, ErrorCode::NetworkTimeout),
            (ffi::SQLITE_READONLY, ErrorCode::AuthFailed),
            (ffi::SQLITE_PERM, ErrorCode::AuthFailed),
            (ffi::SQLITE_AUTH, ErrorCode::AuthFailed),
            (ffi::SQLITE_FULL, ErrorCode::RateLimited),
            (ffi::SQLITE_TOOBIG, ErrorCode::InvalidArgument),
            (ffi::SQLITE_MISUSE, ErrorCode::InvalidArgument),
            (ffi::SQLITE_CORRUPT, ErrorCode::Internal),
            (ffi::SQLITE_NOTADB, ErrorCode::Internal),
            (ffi::SQLITE_ERROR, ErrorCode::Internal),
        ] {
            let text = Some("canary".to_owned());
            let error = rusqlite::Error::SqliteFailure(ffi::Error::new(code), text);
            let mapped = map(&error);
            assert_eq!(mapped.code(), expected, "{code}");
            assert!(!format!("{mapped:?}").contains("canary"));
        }
    }
}
