//! What goes wrong with Redis, in our words: by code, never by the text of a message.

use std::error::Error as StdError;
use std::io;
use std::sync::Arc;

use redis::{ErrorKind, RedisError};

use crate::common::error::{Cause, Error, ErrorCode};

/// The operation during which most things go wrong.
pub(super) const CONNECT: &str = "connect";

/// The server's code, or what kind of trouble the driver saw.
pub(super) fn cause(error: &RedisError) -> Cause {
    Cause(match error.code() {
        Some(code) => format!("the server answered {code}"),
        None => error.category().to_owned(),
    })
}

/// Our error for one of the driver's.
pub(super) fn map(error: &RedisError, operation: &'static str) -> Error {
    let (code, message, reached_the_store) = classify(error);
    let mapped =
        Error::new(code, message).with_operation("redis", operation).with_source(cause(error));
    if reached_the_store { mapped } else { mapped.without_effect() }
}

/// Our error for a connection that could not be made. Nothing was sent that could take effect.
pub(super) fn refused(error: &RedisError, operation: &'static str) -> Error {
    let refused = match (error.code(), classify(error)) {
        // The only commands so far were those of logging in and of choosing the database.
        (Some(_), (ErrorCode::Internal, ..)) => Error::new(
            ErrorCode::InvalidArgument,
            "Redis refused the connection as configured; check the number of the database (and \
             the right to SELECT it), the user and the password in the URL",
        ),
        (_, (code, message, _)) => Error::new(code, message),
    };
    refused.with_operation("redis", operation).with_source(cause(error)).without_effect()
}

/// The code, the message, and whether the operation may have taken effect.
fn classify(error: &RedisError) -> (ErrorCode, &'static str, bool) {
    use ErrorCode::{
        AuthFailed, Internal, InvalidArgument, NetworkTimeout, RateLimited, ServiceUnavailable,
    };
    match error.code() {
        Some("NOAUTH" | "WRONGPASS") => (AuthFailed, "redis refused the credentials", false),
        Some("NOPERM") => (
            AuthFailed,
            "the redis user lacks a right; docs/specs/redis.md lists those that are enough",
            false,
        ),
        Some("OOM") => (RateLimited, "redis is out of memory", false),
        Some("READONLY") => {
            (ServiceUnavailable, "this redis is a read-only replica; connect to the primary", false)
        }
        Some("MOVED" | "ASK" | "TRYAGAIN" | "CLUSTERDOWN") => (
            ServiceUnavailable,
            "the slot of these locks is moving or down; is this a Cluster \
             that was connected to as one server? (redis+cluster://)",
            false,
        ),
        Some("LOADING" | "BUSY" | "MASTERDOWN" | "NOREPLICAS" | "MISCONF") => {
            (ServiceUnavailable, "redis is not ready to serve this now", false)
        }
        Some("WRONGTYPE") => {
            (InvalidArgument, "another kind of data is stored where the lock belongs", false)
        }
        Some("CROSSSLOT") => {
            (InvalidArgument, "the keys of a lock are in different slots of a cluster", false)
        }
        Some(_) => (Internal, "redis refused the script", true),
        None => match error.kind() {
            ErrorKind::AuthenticationFailed => (AuthFailed, "redis refused the credentials", false),
            ErrorKind::InvalidClientConfig | ErrorKind::RESP3NotSupported => {
                (InvalidArgument, "this redis cannot be used as configured", false)
            }
            ErrorKind::MasterNameNotFoundBySentinel => (
                ServiceUnavailable,
                "the sentinels name no primary of this service now; if that lasts, check its name",
                false,
            ),
            _ if error.is_connection_refusal() => {
                (ServiceUnavailable, "redis refused the connection; is it running there?", false)
            }
            _ if is_tls_failure(error) => (
                ServiceUnavailable,
                "no TLS with redis: its certificate is not trusted, or not for this host (tls_ca)",
                false,
            ),
            _ if error.is_timeout() => (NetworkTimeout, "redis did not answer in time", true),
            ErrorKind::Parse | ErrorKind::UnexpectedReturnType => {
                (Internal, "Redis sent an unexpected response", true)
            }
            _ => (ServiceUnavailable, "the connection to redis was lost", true),
        },
    }
}

/// Whether TLS was refused, by us or by the server.
fn is_tls_failure(error: &RedisError) -> bool {
    type Shared = Arc<dyn StdError + Send + Sync>;
    let cause = StdError::source(error).and_then(|cause| cause.downcast_ref::<Shared>());
    let cause = cause.and_then(|cause| cause.downcast_ref::<io::Error>()?.get_ref());
    matches!(cause, Some(cause) if cause.is::<rustls::Error>())
}

/// The server takes no more clients.
pub(super) fn full() -> Error {
    Error::new(ErrorCode::RateLimited, "Redis refused the connection: maxclients reached")
        .with_operation("redis", CONNECT)
}

/// No answer came in time.
pub(super) fn timeout(operation: &'static str) -> Error {
    Error::new(ErrorCode::NetworkTimeout, "redis did not answer in time")
        .with_operation("redis", operation)
}

/// An answer that no script of ours gives.
pub(super) fn unexpected_response(operation: &'static str) -> Error {
    Error::new(ErrorCode::Internal, "Redis sent an unexpected response")
        .with_operation("redis", operation)
}

/// A record that is not one of ours; nothing was changed.
pub(super) fn foreign(operation: &'static str) -> Error {
    Error::foreign_lock().with_operation("redis", operation)
}

#[cfg(test)]
mod tests {
    use redis::{ErrorKind, make_extension_error};

    use super::*;

    fn code_of(error: &RedisError) -> ErrorCode {
        map(error, "acquire").code()
    }

    #[test]
    fn server_codes() {
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
            ("SOMETHING", ErrorCode::Internal),
        ];
        for (code, expected) in table {
            let error = make_extension_error(code.to_owned(), Some("canary detail".to_owned()));
            assert_eq!(code_of(&error), expected, "{code}");
            let shown = format!("{:?}", map(&error, "acquire"));
            assert!(!shown.contains("canary"), "{shown}");
        }
    }

    #[test]
    fn driver_errors() {
        let io = |kind| RedisError::from(io::Error::from(kind));
        let table = [
            (io(io::ErrorKind::ConnectionRefused), ErrorCode::ServiceUnavailable, false),
            (io(io::ErrorKind::ConnectionReset), ErrorCode::ServiceUnavailable, true),
            (io(io::ErrorKind::BrokenPipe), ErrorCode::ServiceUnavailable, true),
            (io(io::ErrorKind::TimedOut), ErrorCode::NetworkTimeout, true),
            ((ErrorKind::AuthenticationFailed, "x").into(), ErrorCode::AuthFailed, false),
            ((ErrorKind::InvalidClientConfig, "x").into(), ErrorCode::InvalidArgument, false),
            ((ErrorKind::Parse, "x").into(), ErrorCode::Internal, true),
        ];
        for (error, expected, may_have_taken_effect) in table {
            let mapped = map(&error, "acquire");
            assert_eq!(mapped.code(), expected, "{error}");
            assert_eq!(mapped.may_have_taken_effect(), may_have_taken_effect, "{error}");
        }
    }

    /// While connecting, a refusal without a row of its own is about the configuration.
    #[test]
    fn refusals_while_connecting() {
        for (code, expected) in [
            ("ERR", ErrorCode::InvalidArgument),
            ("NOPROTO", ErrorCode::InvalidArgument),
            ("DENIED", ErrorCode::InvalidArgument),
            ("WRONGPASS", ErrorCode::AuthFailed),
            ("LOADING", ErrorCode::ServiceUnavailable),
            ("OOM", ErrorCode::RateLimited),
        ] {
            let error = make_extension_error(code.to_owned(), Some("canary".to_owned()));
            let refused = refused(&error, CONNECT);
            assert_eq!(refused.code(), expected, "{code}");
            assert!(!refused.may_have_taken_effect(), "{code}");
        }
        let lost = RedisError::from(io::Error::from(io::ErrorKind::ConnectionReset));
        assert!(!refused(&lost, CONNECT).may_have_taken_effect());
    }
}
