//! Maps errors of Redis and its driver to ours: by code, never by the text of a message.

use std::error::Error as StdError;
use std::io;
use std::sync::Arc;

use redis::{ErrorKind, RedisError};

use crate::common::error::{Cause, Error, ErrorCode};
use crate::common::key::Key;
use crate::common::lock_id::LockId;

/// The operation name for errors while connecting.
pub(super) const CONNECT: &str = "connect";

/// Returns the server's error code, or the driver's error category.
pub(super) fn cause(error: &RedisError) -> Cause {
    Cause(match error.code() {
        Some(code) => format!("the server answered {code}"),
        None => error.category().to_owned(),
    })
}

/// Adds the operation that failed. An operation does it once, for everything below it.
pub(super) fn in_operation(operation: &'static str) -> impl Fn(Error) -> Error {
    move |error| error.with_operation("redis", operation)
}

/// Adds the operation that failed and its key.
pub(super) fn of_key(operation: &'static str, key: &Key) -> impl Fn(Error) -> Error {
    move |error| in_operation(operation)(error).with_key(key)
}

/// Adds the operation that failed and its lock id.
pub(super) fn of_id(operation: &'static str, lock_id: LockId) -> impl Fn(Error) -> Error {
    move |error| in_operation(operation)(error).with_lock_id(lock_id)
}

/// Maps an error of the driver.
pub(super) fn map(error: &RedisError) -> Error {
    match error.code() {
        Some("STALEFENCE") => return Error::stale_fence(),
        Some("OTHERLOCK") => return Error::other_lock(),
        _ => {}
    }
    let (code, message, reached_the_store) = classify(error);
    let mapped = Error::new(code, message).with_source(cause(error));
    if reached_the_store { mapped } else { mapped.without_effect() }
}

/// Maps an error while connecting. Nothing was sent that could take effect.
pub(super) fn refused(error: &RedisError) -> Error {
    let refused = match (error.code(), classify(error)) {
        // The only commands so far log in and select the database.
        (Some(_), (ErrorCode::Internal, ..)) => Error::new(
            ErrorCode::InvalidArgument,
            "Redis refused the connection as configured; check the database number (and the \
             permission to SELECT it), the user and the password in the URL",
        ),
        (_, (code, message, _)) => Error::new(code, message),
    };
    refused.with_source(cause(error)).without_effect()
}

/// Returns the code, the message, and whether the operation may have taken effect.
fn classify(error: &RedisError) -> (ErrorCode, &'static str, bool) {
    use ErrorCode::{
        AuthFailed, Internal, InvalidArgument, NetworkTimeout, RateLimited, ServiceUnavailable,
    };
    match error.code() {
        Some("NOAUTH" | "WRONGPASS") => {
            (AuthFailed, "Redis refused the credentials; check the user and the password", false)
        }
        Some("NOPERM") => (
            AuthFailed,
            "the Redis user lacks a permission; run ACL LOG on the server to see which one",
            false,
        ),
        Some("OOM") => (RateLimited, "Redis is out of memory; raise maxmemory", false),
        Some(FULL) => (RateLimited, "Redis refused the connection: maxclients reached", false),
        Some("READONLY") => (
            ServiceUnavailable,
            "this Redis server is a read-only replica; connect to the primary",
            false,
        ),
        Some("MOVED" | "ASK" | "TRYAGAIN" | "CLUSTERDOWN") => (
            ServiceUnavailable,
            "the Cluster slot of these locks is moving or down; try again, and use a \
             redis+cluster:// URL for a Cluster",
            false,
        ),
        Some("LOADING" | "BUSY" | "MASTERDOWN" | "NOREPLICAS" | "MISCONF") => {
            (ServiceUnavailable, "Redis cannot serve this request now; try again", false)
        }
        Some("WRONGTYPE") => (
            InvalidArgument,
            "data of another type is stored where the lock belongs; use another key or prefix",
            false,
        ),
        Some("CROSSSLOT") => (
            InvalidArgument,
            "the records of a lock are in different Cluster slots; use a prefix with a tag in \
             braces, such as \"{locks}\"",
            false,
        ),
        Some("FOREIGNFENCE") => (
            Internal,
            "the record of the largest fence contains other data; nothing was written",
            false,
        ),
        Some(_) => (Internal, "Redis refused the script", true),
        None => match error.kind() {
            ErrorKind::AuthenticationFailed => (
                AuthFailed,
                "Redis refused the credentials; check the user and the password",
                false,
            ),
            ErrorKind::InvalidClientConfig | ErrorKind::RESP3NotSupported => (
                InvalidArgument,
                "cannot connect to Redis as configured; check the URL and the server's version",
                false,
            ),
            ErrorKind::MasterNameNotFoundBySentinel => (
                ServiceUnavailable,
                "Sentinel knows no primary for this service; try again, and check the service name",
                false,
            ),
            _ if error.is_connection_refusal() => {
                (ServiceUnavailable, "Redis refused the connection; is it running there?", false)
            }
            _ if is_tls_failure(error) => (
                ServiceUnavailable,
                "the TLS handshake with Redis failed: its certificate is not trusted or not for \
                 this host; check tls_ca",
                // An alert may also come later, on a connection that was in use.
                true,
            ),
            _ if error.is_timeout() => (NetworkTimeout, "Redis did not answer in time", true),
            ErrorKind::Parse | ErrorKind::UnexpectedReturnType => {
                (Internal, "Redis sent an unexpected response", true)
            }
            _ => (ServiceUnavailable, "the connection to Redis was lost", true),
        },
    }
}

/// Returns whether the TLS handshake failed, on our side or the server's.
fn is_tls_failure(error: &RedisError) -> bool {
    type RedisInner = Arc<dyn StdError + Send + Sync>;
    let cause = StdError::source(error).and_then(|cause| cause.downcast_ref::<RedisInner>());
    let cause = cause.and_then(|cause| cause.downcast_ref::<io::Error>()?.get_ref());
    matches!(cause, Some(cause) if cause.is::<rustls::Error>())
}

/// Our code for a server that has reached `maxclients`; its own error has none.
const FULL: &str = "MAXCLIENTS";

/// Creates the driver's error for such a server.
pub(super) fn full() -> RedisError {
    redis::make_extension_error(FULL.to_owned(), None)
}

/// Creates the error for an answer that did not come in time.
pub(super) fn timeout() -> Error {
    Error::new(ErrorCode::NetworkTimeout, "Redis did not answer in time")
}

/// Creates the error for an answer that no script returns.
pub(super) fn unexpected_response() -> Error {
    Error::new(ErrorCode::Internal, "Redis sent an unexpected response")
}

/// Creates the error for a record that syncguard did not write; nothing was changed.
pub(super) fn foreign() -> Error {
    Error::foreign_lock()
}

#[cfg(test)]
mod tests {
    use redis::{ErrorKind, make_extension_error};

    use super::*;

    fn code_of(error: &RedisError) -> ErrorCode {
        map(error).code()
    }

    #[test]
    fn every_server_code_maps_to_its_error_code() {
        let table = [
            ("NOAUTH", ErrorCode::AuthFailed),
            ("WRONGPASS", ErrorCode::AuthFailed),
            ("NOPERM", ErrorCode::AuthFailed),
            ("OOM", ErrorCode::RateLimited),
            ("READONLY", ErrorCode::ServiceUnavailable),
            ("LOADING", ErrorCode::ServiceUnavailable),
            ("BUSY", ErrorCode::ServiceUnavailable),
            ("MASTERDOWN", ErrorCode::ServiceUnavailable),
            ("CLUSTERDOWN", ErrorCode::ServiceUnavailable),
            ("TRYAGAIN", ErrorCode::ServiceUnavailable),
            ("MOVED", ErrorCode::ServiceUnavailable),
            ("ASK", ErrorCode::ServiceUnavailable),
            ("NOREPLICAS", ErrorCode::ServiceUnavailable),
            ("MISCONF", ErrorCode::ServiceUnavailable),
            ("WRONGTYPE", ErrorCode::InvalidArgument),
            ("CROSSSLOT", ErrorCode::InvalidArgument),
            ("STALEFENCE", ErrorCode::Aborted),
            ("OTHERLOCK", ErrorCode::InvalidArgument),
            ("FOREIGNFENCE", ErrorCode::Internal),
            ("SOMETHING", ErrorCode::Internal),
        ];
        for (code, expected) in table {
            let error = make_extension_error(code.to_owned(), Some("canary detail".to_owned()));
            assert_eq!(code_of(&error), expected, "{code}");
            let shown = format!("{:?}", map(&error));
            assert!(!shown.contains("canary"), "{shown}");
        }
    }

    fn tls_alert() -> RedisError {
        io::Error::other(rustls::Error::General("alert".to_owned())).into()
    }

    #[test]
    fn every_driver_error_maps_to_its_error_code() {
        let io = |kind| RedisError::from(io::Error::from(kind));
        let table = [
            (io(io::ErrorKind::ConnectionRefused), ErrorCode::ServiceUnavailable, false),
            (io(io::ErrorKind::ConnectionReset), ErrorCode::ServiceUnavailable, true),
            (io(io::ErrorKind::BrokenPipe), ErrorCode::ServiceUnavailable, true),
            (io(io::ErrorKind::TimedOut), ErrorCode::NetworkTimeout, true),
            // Also on a connection that was established.
            (tls_alert(), ErrorCode::ServiceUnavailable, true),
            ((ErrorKind::AuthenticationFailed, "x").into(), ErrorCode::AuthFailed, false),
            ((ErrorKind::InvalidClientConfig, "x").into(), ErrorCode::InvalidArgument, false),
            ((ErrorKind::Parse, "x").into(), ErrorCode::Internal, true),
        ];
        for (error, expected, may_have_taken_effect) in table {
            let mapped = map(&error);
            assert_eq!(mapped.code(), expected, "{error}");
            assert_eq!(mapped.may_have_taken_effect(), may_have_taken_effect, "{error}");
        }
    }

    /// While connecting, an error code without its own row means a wrong configuration.
    #[test]
    fn an_unknown_refusal_while_connecting_is_a_wrong_configuration() {
        for (code, expected) in [
            ("ERR", ErrorCode::InvalidArgument),
            ("NOPROTO", ErrorCode::InvalidArgument),
            ("DENIED", ErrorCode::InvalidArgument),
            ("WRONGPASS", ErrorCode::AuthFailed),
            ("LOADING", ErrorCode::ServiceUnavailable),
            ("OOM", ErrorCode::RateLimited),
        ] {
            let error = make_extension_error(code.to_owned(), Some("canary".to_owned()));
            let refused = refused(&error);
            assert_eq!(refused.code(), expected, "{code}");
            assert!(!refused.may_have_taken_effect(), "{code}");
        }
        let lost = RedisError::from(io::Error::from(io::ErrorKind::ConnectionReset));
        assert!(!refused(&lost).may_have_taken_effect());
        assert!(!refused(&tls_alert()).may_have_taken_effect());
    }
}
