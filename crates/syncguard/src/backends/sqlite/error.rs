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

    fn mapped(code: i32) -> Error {
        let text = Some("canary".to_owned());
        map(&rusqlite::Error::SqliteFailure(ffi::Error::new(code), text))
    }

    /// Every row of SQLite's column in ADR 032's table, and every primary result code that is an error.
    #[test]
    fn every_result_code_has_its_row() {
        use ErrorCode::{
            AuthFailed, Internal, InvalidArgument, NetworkTimeout, RateLimited, ServiceUnavailable,
        };
        let table = [
            (ffi::SQLITE_ERROR, Internal),
            (ffi::SQLITE_INTERNAL, Internal),
            (ffi::SQLITE_PERM, AuthFailed),
            (ffi::SQLITE_ABORT, Internal),
            (ffi::SQLITE_BUSY, NetworkTimeout),
            (ffi::SQLITE_LOCKED, NetworkTimeout),
            (ffi::SQLITE_NOMEM, Internal),
            (ffi::SQLITE_READONLY, AuthFailed),
            (ffi::SQLITE_INTERRUPT, Internal),
            (ffi::SQLITE_IOERR, ServiceUnavailable),
            (ffi::SQLITE_CORRUPT, Internal),
            (ffi::SQLITE_NOTFOUND, Internal),
            (ffi::SQLITE_FULL, RateLimited),
            (ffi::SQLITE_CANTOPEN, ServiceUnavailable),
            (ffi::SQLITE_PROTOCOL, Internal),
            (ffi::SQLITE_SCHEMA, Internal),
            (ffi::SQLITE_TOOBIG, InvalidArgument),
            (ffi::SQLITE_CONSTRAINT, Internal),
            (ffi::SQLITE_MISMATCH, Internal),
            (ffi::SQLITE_MISUSE, InvalidArgument),
            (ffi::SQLITE_NOLFS, Internal),
            (ffi::SQLITE_AUTH, AuthFailed),
            (ffi::SQLITE_RANGE, Internal),
            (ffi::SQLITE_NOTADB, Internal),
        ];
        for (code, expected) in table {
            // An extended code says more, and is the same row.
            for extended in [code, code | (1 << 8), code | (5 << 8)] {
                let error = mapped(extended);
                assert_eq!(error.code(), expected, "{extended}");
                // Only a disk that fails leaves a doubt.
                let is_doubtful = code == ffi::SQLITE_IOERR;
                assert_eq!(error.may_have_taken_effect(), is_doubtful, "{extended}");
                assert!(!format!("{error:?}").contains("canary"));
                let cause = std::error::Error::source(&error).expect("a cause").to_string();
                assert_eq!(cause, format!("SQLite answered {extended}"));
            }
        }
    }

    #[test]
    fn our_own_errors_have_their_rows() {
        let busy = busy();
        assert_eq!((busy.code(), busy.may_have_taken_effect()), (ErrorCode::NetworkTimeout, false));
        assert_eq!(gone().code(), ErrorCode::Internal);
        let odd = map(&rusqlite::Error::QueryReturnedNoRows);
        assert_eq!((odd.code(), odd.may_have_taken_effect()), (ErrorCode::Internal, false));
    }
}
