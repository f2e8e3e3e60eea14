//! What goes wrong with Firestore, in our words: by gRPC code, never by the text of a message, which
//! may hold the name of a document.

use std::error::Error as _;

use tonic::{Code, Status, TimeoutExpired};

use crate::common::error::{Cause, Error, ErrorCode};

/// Our error for an answer that is none.
pub(super) fn map(status: &Status) -> Error {
    use ErrorCode::{
        AuthFailed, Internal, InvalidArgument, NetworkTimeout, RateLimited, ServiceUnavailable,
    };
    // With a source it did not come from the server, but from the way to it, whatever its code.
    let source = status.source();
    let is_timeout = source.and_then(|source| source.downcast_ref::<TimeoutExpired>()).is_some();
    let (code, message) = match status.code() {
        _ if is_timeout => (NetworkTimeout, "firestore did not answer in time"),
        Code::Unavailable => {
            (ServiceUnavailable, "firestore cannot be reached, or is not available")
        }
        _ if source.is_some() => (ServiceUnavailable, "the connection to firestore was lost"),
        Code::Internal => (ServiceUnavailable, "firestore failed inside"),
        Code::Aborted => (ServiceUnavailable, "firestore gave way to another transaction"),
        Code::DeadlineExceeded | Code::Cancelled => {
            (NetworkTimeout, "firestore did not answer in time")
        }
        Code::PermissionDenied => (
            AuthFailed,
            "firestore refused the request: the credentials need the role roles/datastore.user in \
             this project",
        ),
        Code::Unauthenticated => (AuthFailed, "firestore refused the credentials"),
        Code::ResourceExhausted => (RateLimited, "a quota of firestore is used up"),
        Code::NotFound => (
            InvalidArgument,
            "there is no such database; check project and database, and that it is one in native \
             mode",
        ),
        Code::FailedPrecondition => (
            InvalidArgument,
            "firestore cannot do this with that database; it must be one in native mode, with an \
             index on lockId",
        ),
        Code::InvalidArgument | Code::OutOfRange => {
            (InvalidArgument, "firestore refuses this input")
        }
        _ => (Internal, "Firestore sent an unexpected error"),
    };
    Error::new(code, message).with_source(Cause(format!("gRPC {:?}", status.code())))
}

/// Whether a write was refused because a document is not what it was thought to be.
pub(super) fn is_conflict(status: &Status) -> bool {
    // Which of them it is depends on the precondition, and on who answers; it must be the server.
    status.source().is_none()
        && matches!(
            status.code(),
            Code::Aborted | Code::AlreadyExists | Code::FailedPrecondition | Code::NotFound
        )
}

/// No answer came in time.
pub(super) fn timeout() -> Error {
    Error::new(ErrorCode::NetworkTimeout, "firestore did not answer in time")
}

/// Documents keep changing while we look at them.
pub(super) fn conflict() -> Error {
    Error::new(ErrorCode::ServiceUnavailable, "the lock's document keeps changing")
}

/// No credentials, or none that work.
pub(super) fn no_credentials() -> Error {
    Error::new(
        ErrorCode::AuthFailed,
        "no credentials for firestore: set GOOGLE_APPLICATION_CREDENTIALS, run `gcloud auth \
         application-default login`, or give the machine a service account; \
         FIRESTORE_EMULATOR_HOST needs none",
    )
    .without_effect()
}

/// Whoever gives out credentials does not answer.
pub(super) fn credentials_unavailable() -> Error {
    Error::new(
        ErrorCode::ServiceUnavailable,
        "no new credentials for firestore: whoever gives them out does not answer",
    )
    .without_effect()
}

/// The clock of this machine cannot be trusted.
pub(super) fn clock_is_off(ahead_ms: i64, uncertainty_ms: i64) -> Error {
    Error::new(
        ErrorCode::ServiceUnavailable,
        format!(
            "the clock of this machine is ahead of firestore's by {ahead_ms} ms, give or take \
             {uncertainty_ms} ms, which is too much; synchronize it (NTP)"
        ),
    )
    .without_effect()
}

/// An answer that the protocol does not have.
pub(super) fn unexpected_response() -> Error {
    Error::new(ErrorCode::Internal, "Firestore sent an unexpected response")
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;

    use super::*;

    /// All codes of gRPC that are errors, with the row that they are in.
    const TABLE: [(Code, ErrorCode); 16] = [
        (Code::Cancelled, ErrorCode::NetworkTimeout),
        (Code::Unknown, ErrorCode::Internal),
        (Code::InvalidArgument, ErrorCode::InvalidArgument),
        (Code::DeadlineExceeded, ErrorCode::NetworkTimeout),
        (Code::NotFound, ErrorCode::InvalidArgument),
        (Code::AlreadyExists, ErrorCode::Internal),
        (Code::PermissionDenied, ErrorCode::AuthFailed),
        (Code::ResourceExhausted, ErrorCode::RateLimited),
        (Code::FailedPrecondition, ErrorCode::InvalidArgument),
        (Code::Aborted, ErrorCode::ServiceUnavailable),
        (Code::OutOfRange, ErrorCode::InvalidArgument),
        (Code::Unimplemented, ErrorCode::Internal),
        (Code::Internal, ErrorCode::ServiceUnavailable),
        (Code::Unavailable, ErrorCode::ServiceUnavailable),
        (Code::DataLoss, ErrorCode::Internal),
        (Code::Unauthenticated, ErrorCode::AuthFailed),
    ];

    #[test]
    fn every_code_has_its_row() {
        for (code, expected) in TABLE {
            // Words in the message change nothing.
            for words in ["canary", "PERMISSION_DENIED canary", "Transaction is invalid or closed."]
            {
                let error = map(&Status::new(code, words));
                assert_eq!(error.code(), expected, "{code:?}");
                assert!(!format!("{error} {error:?}").contains("canary"), "{error:?}");
                let cause = error.source().expect("a cause").to_string();
                assert_eq!(cause, format!("gRPC {code:?}"));
            }
        }
    }

    #[test]
    fn what_did_not_come_from_the_server_is_the_way_to_it() {
        for (code, _) in TABLE {
            let mut lost = Status::new(code, "canary");
            lost.set_source(std::sync::Arc::new(Cause("canary".to_owned())));
            let error = map(&lost);
            assert_eq!(error.code(), ErrorCode::ServiceUnavailable, "{code:?}");
            assert!(!format!("{error} {error:?}").contains("canary"), "{error:?}");
            assert!(!is_conflict(&lost), "{code:?}: only the server's own word is a conflict");
            let is_one =
                [Code::Aborted, Code::AlreadyExists, Code::FailedPrecondition, Code::NotFound]
                    .contains(&code);
            assert_eq!(is_conflict(&Status::new(code, "")), is_one, "{code:?}");
        }
        let late = Status::from_error(Box::new(TimeoutExpired(())));
        assert_eq!(map(&late).code(), ErrorCode::NetworkTimeout);
    }

    #[test]
    fn our_own_errors_have_their_rows() {
        let table = [
            (timeout(), ErrorCode::NetworkTimeout, true),
            (conflict(), ErrorCode::ServiceUnavailable, true),
            (no_credentials(), ErrorCode::AuthFailed, false),
            (credentials_unavailable(), ErrorCode::ServiceUnavailable, false),
            (clock_is_off(-700, 3), ErrorCode::ServiceUnavailable, false),
            (unexpected_response(), ErrorCode::Internal, true),
        ];
        for (error, code, is_doubtful) in table {
            assert_eq!(
                (error.code(), error.may_have_taken_effect()),
                (code, is_doubtful),
                "{error}"
            );
        }
    }
}
