//! Maps errors of Firestore by gRPC code, never by message text, which may contain the name of a
//! document.

use std::error::Error as _;

use tonic::{Code, Status, TimeoutExpired};

use crate::common::error::{Cause, Error, ErrorCode};

/// Maps a gRPC status to an error.
pub(super) fn map(status: &Status) -> Error {
    use ErrorCode::{
        AuthFailed, Internal, InvalidArgument, NetworkTimeout, RateLimited, ServiceUnavailable,
    };
    // A status with a source comes from the connection, not from the server, whatever its code.
    let source = status.source();
    let is_timeout = source.and_then(|source| source.downcast_ref::<TimeoutExpired>()).is_some();
    let (code, message) = match status.code() {
        _ if is_timeout => (NetworkTimeout, "Firestore did not respond in time"),
        Code::Unavailable => (ServiceUnavailable, "Firestore is unavailable or cannot be reached"),
        _ if source.is_some() => (ServiceUnavailable, "the connection to Firestore was lost"),
        Code::Internal => (ServiceUnavailable, "Firestore reported an internal error"),
        Code::Aborted => {
            (ServiceUnavailable, "Firestore aborted the request: it conflicted with another")
        }
        Code::DeadlineExceeded | Code::Cancelled => {
            (NetworkTimeout, "Firestore did not respond in time")
        }
        Code::PermissionDenied => (
            AuthFailed,
            "Firestore denied the request; grant the credentials the role roles/datastore.user in \
             this project",
        ),
        Code::Unauthenticated => (AuthFailed, "Firestore refused the credentials"),
        Code::ResourceExhausted => (RateLimited, "a Firestore quota is exhausted"),
        Code::NotFound => (
            InvalidArgument,
            "the Firestore database does not exist; check the project, the database, and that it \
             is in native mode",
        ),
        Code::FailedPrecondition => (
            InvalidArgument,
            "Firestore refused the request for this database; it must be in native mode and have \
             an index on lockId",
        ),
        Code::InvalidArgument | Code::OutOfRange => {
            (InvalidArgument, "Firestore refused the request as invalid")
        }
        _ => (Internal, "Firestore sent an unexpected error"),
    };
    Error::new(code, message).with_source(Cause(format!("gRPC {:?}", status.code())))
}

/// Returns whether a commit was refused because a document has changed.
pub(super) fn is_conflict(status: &Status) -> bool {
    // The code depends on the precondition, and differs between the service and the emulator. A
    // status with a source does not come from the server.
    status.source().is_none()
        && matches!(
            status.code(),
            Code::Aborted | Code::AlreadyExists | Code::FailedPrecondition | Code::NotFound
        )
}

/// Creates the error for a response that did not arrive in time.
pub(super) fn timeout() -> Error {
    Error::new(ErrorCode::NetworkTimeout, "Firestore did not respond in time")
}

/// Creates the error for documents that changed in every round.
pub(super) fn conflict() -> Error {
    Error::new(
        ErrorCode::ServiceUnavailable,
        "the lock's document keeps changing: other clients write to it; try again",
    )
}

/// Creates the error for missing or invalid credentials.
pub(super) fn no_credentials() -> Error {
    Error::new(
        ErrorCode::AuthFailed,
        "no usable Firestore credentials; set GOOGLE_APPLICATION_CREDENTIALS, run `gcloud auth \
         application-default login`, or attach a service account to the machine; an emulator \
         (FIRESTORE_EMULATOR_HOST) needs none",
    )
    .without_effect()
}

/// Creates the error for a token service that is temporarily unavailable.
pub(super) fn credentials_unavailable() -> Error {
    Error::new(
        ErrorCode::ServiceUnavailable,
        "cannot renew the Firestore credentials: the token service is unavailable",
    )
    .without_effect()
}

/// Creates the error for a clock that differs too much from the server's.
pub(super) fn clock_is_off(ahead_ms: i64, uncertainty_ms: i64) -> Error {
    Error::new(
        ErrorCode::ServiceUnavailable,
        format!(
            "the clock of this machine is ahead of Firestore's by {ahead_ms} ms (uncertainty \
             {uncertainty_ms} ms), which is above the limit; synchronize it (NTP)"
        ),
    )
    .without_effect()
}

/// Creates the error for a response that violates the protocol.
pub(super) fn unexpected_response() -> Error {
    Error::new(ErrorCode::Internal, "Firestore sent an unexpected response")
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;

    use super::*;

    /// All gRPC codes that are errors, and our code for each.
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
    fn every_grpc_code_maps_to_its_error_code() {
        for (code, expected) in TABLE {
            // The message text does not matter.
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
    fn a_status_with_a_source_is_a_connection_error() {
        for (code, _) in TABLE {
            let mut lost = Status::new(code, "canary");
            lost.set_source(std::sync::Arc::new(Cause("canary".to_owned())));
            let error = map(&lost);
            assert_eq!(error.code(), ErrorCode::ServiceUnavailable, "{code:?}");
            assert!(!format!("{error} {error:?}").contains("canary"), "{error:?}");
            assert!(!is_conflict(&lost), "{code:?}: only the server reports conflicts");
            let is_one =
                [Code::Aborted, Code::AlreadyExists, Code::FailedPrecondition, Code::NotFound]
                    .contains(&code);
            assert_eq!(is_conflict(&Status::new(code, "")), is_one, "{code:?}");
        }
        let late = Status::from_error(Box::new(TimeoutExpired(())));
        assert_eq!(map(&late).code(), ErrorCode::NetworkTimeout);
    }

    #[test]
    fn own_errors_have_their_codes() {
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
