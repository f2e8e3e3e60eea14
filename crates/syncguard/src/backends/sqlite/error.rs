//! Maps errors of SQLite by code, never by message text.

use rusqlite::ErrorCode as Sqlite;

use crate::common::error::{Cause, Error, ErrorCode};

/// Maps an error of SQLite. The transaction is rolled back, so the operation had no effect, except
/// after a disk error: then it is unknown what the disk has kept.
pub(super) fn map(error: &rusqlite::Error) -> Error {
    let (code, message) = classify(error.sqlite_error_code());
    let cause = match error.sqlite_error() {
        Some(cause) => Cause(format!("SQLite returned code {}", cause.extended_code)),
        None => Cause("SQLite returned an unexpected result".to_owned()),
    };
    let mapped = Error::new(code, message).with_source(cause);
    if is_disk_failure(error) { mapped } else { mapped.without_effect() }
}

/// Maps an error of a check of a fence in the user's own database.
pub(super) fn map_check(error: &rusqlite::Error) -> Error {
    let (code, message) = match error.sqlite_error_code() {
        // A statement that SQLite cannot prepare has this code.
        Some(Sqlite::Unknown) | None => (
            ErrorCode::InvalidArgument,
            "the table of fences is missing or has other columns; run its schema_sql",
        ),
        code => (classify(code).0, "SQLite could not check the fence; nothing was written"),
    };
    let source = map(error);
    Error::new(code, message).with_source(source).without_effect()
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
            "cannot open the lock file; check that its directory exists and is writable",
        ),
        Some(Sqlite::SystemIoFailure) => {
            (ServiceUnavailable, "a disk error occurred on the lock file")
        }
        Some(Sqlite::DatabaseBusy | Sqlite::DatabaseLocked) => {
            (NetworkTimeout, "other processes kept the lock file busy until the timeout")
        }
        Some(
            Sqlite::ReadOnly | Sqlite::PermissionDenied | Sqlite::AuthorizationForStatementDenied,
        ) => (
            AuthFailed,
            "the lock file is not writable; grant write access to it and to its directory",
        ),
        Some(Sqlite::DiskFull) => (RateLimited, "no disk space is left for the lock file"),
        Some(Sqlite::TooBig | Sqlite::ApiMisuse) => (InvalidArgument, "SQLite refused the input"),
        Some(Sqlite::NotADatabase) => (Internal, "the lock file is not a SQLite database"),
        Some(Sqlite::DatabaseCorrupt) => (Internal, "the lock file is corrupt"),
        _ => (Internal, "SQLite returned an unexpected error"),
    }
}

/// Creates the error for a file that was busy until the caller's timeout.
pub(super) fn busy() -> Error {
    let (code, message) = classify(Some(Sqlite::DatabaseBusy));
    Error::new(code, message).without_effect()
}

/// Creates the error for a worker thread that has ended, which only a bug can cause.
pub(super) fn gone() -> Error {
    Error::new(ErrorCode::Internal, "the worker thread of the lock file has ended")
}

#[cfg(test)]
mod tests {
    use rusqlite::ffi;

    use super::*;

    fn mapped(code: i32) -> Error {
        let text = Some("canary".to_owned());
        map(&rusqlite::Error::SqliteFailure(ffi::Error::new(code), text))
    }

    /// Every primary result code that is an error, by the table in ADR 032.
    #[test]
    fn every_result_code_maps_to_its_error_code() {
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
            // An extended code maps like its primary code.
            for extended in [code, code | (1 << 8), code | (5 << 8)] {
                let error = mapped(extended);
                assert_eq!(error.code(), expected, "{extended}");
                // Only after a disk error is the effect unknown.
                let is_doubtful = code == ffi::SQLITE_IOERR;
                assert_eq!(error.may_have_taken_effect(), is_doubtful, "{extended}");
                assert!(!format!("{error:?}").contains("canary"));
                let cause = std::error::Error::source(&error).expect("a cause").to_string();
                assert_eq!(cause, format!("SQLite returned code {extended}"));
            }
        }
    }

    #[test]
    fn a_damaged_file_is_named() {
        assert_eq!(mapped(ffi::SQLITE_NOTADB).message(), "the lock file is not a SQLite database");
        assert_eq!(mapped(ffi::SQLITE_CORRUPT).message(), "the lock file is corrupt");
    }

    #[test]
    fn own_errors_have_their_codes() {
        let busy = busy();
        assert_eq!((busy.code(), busy.may_have_taken_effect()), (ErrorCode::NetworkTimeout, false));
        assert_eq!(gone().code(), ErrorCode::Internal);
        let odd = map(&rusqlite::Error::QueryReturnedNoRows);
        assert_eq!((odd.code(), odd.may_have_taken_effect()), (ErrorCode::Internal, false));
    }
}
