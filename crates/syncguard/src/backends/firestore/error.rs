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
        _ => (Internal, "firestore answered an error that makes no sense here"),
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
    Error::new(ErrorCode::ServiceUnavailable, "the lock's document keeps changing").without_effect()
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

/// An answer that makes no sense.
pub(super) fn nonsense() -> Error {
    Error::new(ErrorCode::Internal, "firestore answered something that makes no sense")
}
