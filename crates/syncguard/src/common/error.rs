//! The one error type: a code, a sentence, a redacted context and a sanitized source.

use std::convert::Infallible;
use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;

use super::key::Key;
use super::lock_id::LockId;
use super::lost_reason::LostReason;

/// The result of everything in this crate that can fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What kind of trouble an [`Error`] is: a closed set of eight, the same on every backend.
///
/// Contention and "not held" are not errors; they are variants of the operation's outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorCode {
    /// The store could not be reached, is not ready, or refused for a passing reason.
    ///
    /// *May it have taken effect?* Yes, unless [`Error::may_have_taken_effect`] says otherwise.
    /// *What now?* Try again; nothing in the request was wrong.
    ServiceUnavailable,
    /// The store refused the credentials, or they lack a right.
    ///
    /// *May it have taken effect?* No. *What now?* Mend the credentials or the grants.
    AuthFailed,
    /// The request or the configuration makes no sense.
    ///
    /// *May it have taken effect?* No; bad input is refused before any I/O.
    /// *What now?* Change the input; the message says which.
    InvalidArgument,
    /// The store is out of some resource: memory, connections, quota.
    ///
    /// *May it have taken effect?* No. *What now?* Slow down, then try again.
    RateLimited,
    /// The store did not answer in time.
    ///
    /// *May it have taken effect?* Yes. *What now?* Try again. A [`Locker`](crate::Locker)
    /// undoes a lock that such an acquire may have left behind.
    NetworkTimeout,
    /// `lock()` did not get the lock before its timeout or its last retry.
    ///
    /// *May it have taken effect?* No lock is left behind. *What now?* Try later, or wait longer.
    AcquisitionTimeout,
    /// The operation was cancelled by a token, the lock it ran under was lost, or a resource has seen
    /// a later holder ([`Error::is_stale_fence`]).
    ///
    /// *May it have taken effect?* No lock is left behind. *What now?* It was asked for.
    Aborted,
    /// Something that should not happen: a foreign or corrupt record, an exhausted fence counter,
    /// an answer that makes no sense.
    ///
    /// *May it have taken effect?* Possibly. *What now?* Look at the store; retrying will not help.
    Internal,
}

impl ErrorCode {
    /// The stable text of this code, for logs, JSON and exit messages.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::ServiceUnavailable => "ServiceUnavailable",
            Self::AuthFailed => "AuthFailed",
            Self::InvalidArgument => "InvalidArgument",
            Self::RateLimited => "RateLimited",
            Self::NetworkTimeout => "NetworkTimeout",
            Self::AcquisitionTimeout => "AcquisitionTimeout",
            Self::Aborted => "Aborted",
            Self::Internal => "Internal",
        }
    }

    /// Whether the same call may succeed later without any change.
    #[must_use]
    pub const fn is_retryable(self) -> bool {
        matches!(self, Self::ServiceUnavailable | Self::NetworkTimeout | Self::RateLimited)
    }
}

impl fmt::Display for ErrorCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A failed operation.
///
/// * `Display` is one line without key, lock id or source; walk [`source`](StdError::source) for
///   the cause.
/// * `Debug` shows the context with the key as a hash and the lock id redacted.
/// * Sources are sanitized by whoever attaches them: no key, lock id, password or URL in the chain.
///
/// ```
/// use syncguard::{ErrorCode, Key};
///
/// let error = Key::new("").unwrap_err();
/// assert_eq!(error.code(), ErrorCode::InvalidArgument);
/// assert_eq!(error.to_string(), "key must not be empty");
/// assert!(!error.is_retryable());
/// ```
#[derive(Clone)]
pub struct Error(Box<Inner>);

#[derive(Clone)]
struct Inner {
    code: ErrorCode,
    message: String,
    abort_reason: Option<AbortReason>,
    may_have_taken_effect: bool,
    operation: Option<&'static str>,
    backend: Option<&'static str>,
    key: Option<Key>,
    lock_id: Option<LockId>,
    source: Option<Arc<dyn StdError + Send + Sync>>,
}

/// What tells errors of the code [`ErrorCode::Aborted`] apart.
#[derive(Clone, Copy, PartialEq, Eq)]
enum AbortReason {
    Canceled,
    ShutDown,
    Lost(LostReason),
    /// A later holder has used the resource already.
    StaleFence,
}

impl Error {
    /// Makes an error. The message is one lowercase sentence without key, lock id or password.
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self(Box::new(Inner {
            code,
            message: message.into(),
            abort_reason: None,
            may_have_taken_effect: matches!(
                code,
                ErrorCode::ServiceUnavailable | ErrorCode::NetworkTimeout | ErrorCode::Internal
            ),
            operation: None,
            backend: None,
            key: None,
            lock_id: None,
            source: None,
        }))
    }

    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::new(ErrorCode::InvalidArgument, message)
    }

    /// A record that is no lock of ours; nothing was changed.
    #[cfg(any(feature = "firestore", feature = "postgres", feature = "redis", feature = "sqlite"))]
    pub(crate) fn foreign_lock() -> Self {
        Self::new(ErrorCode::Internal, "foreign data is stored where the lock belongs")
            .without_effect()
    }

    /// A counter that is none of ours; nothing was changed.
    #[cfg(any(feature = "firestore", feature = "postgres", feature = "redis"))]
    pub(crate) fn foreign_counter() -> Self {
        Self::new(ErrorCode::Internal, "foreign data is stored where the fence counter belongs")
            .without_effect()
    }

    /// A resource has seen a larger fence than this one; nothing was changed.
    #[cfg(feature = "postgres")]
    pub(crate) fn stale_fence() -> Self {
        let message = "a later holder of the lock has written already; this fence is stale";
        Self::aborted_because(AbortReason::StaleFence, message)
    }

    pub(crate) fn aborted(message: impl Into<String>) -> Self {
        Self::new(ErrorCode::Aborted, message)
    }

    /// A caller's token was canceled.
    pub(crate) fn canceled(message: &'static str) -> Self {
        Self::aborted_because(AbortReason::Canceled, message)
    }

    /// The locker was shut down.
    pub(crate) fn shut_down() -> Self {
        Self::aborted_because(AbortReason::ShutDown, "the locker was shut down")
    }

    /// Work was ended because its lock is not held any longer.
    pub(crate) fn lost_lock(reason: LostReason) -> Self {
        let message = format!("the work was stopped: {reason}");
        Self::aborted_because(AbortReason::Lost(reason), message)
    }

    fn aborted_because(reason: AbortReason, message: impl Into<String>) -> Self {
        let mut error = Self::aborted(message);
        error.0.abort_reason = Some(reason);
        error
    }

    /// Notes the key that the operation was about. It is shown as a hash.
    #[must_use]
    pub fn with_key(mut self, key: &Key) -> Self {
        self.0.key = Some(key.clone());
        self
    }

    /// Notes the lock id that the operation was about. It is never shown.
    #[must_use]
    pub fn with_lock_id(mut self, lock_id: LockId) -> Self {
        self.0.lock_id = Some(lock_id);
        self
    }

    /// Notes which backend failed in which operation.
    #[must_use]
    pub fn with_operation(mut self, backend: &'static str, operation: &'static str) -> Self {
        self.0.backend = Some(backend);
        self.0.operation = Some(operation);
        self
    }

    /// Attaches the cause, which must hold no key, lock id, password or URL in its whole chain.
    #[must_use]
    pub fn with_source(mut self, source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        self.0.source = Some(Arc::from(source.into()));
        self
    }

    /// States that the store was certainly not changed, for example because nothing was sent.
    ///
    /// A locker then has nothing to undo.
    #[must_use]
    pub fn without_effect(mut self) -> Self {
        self.0.may_have_taken_effect = false;
        self
    }

    /// States that the store may have been changed, by something that was sent before this failed.
    #[cfg(any(feature = "firestore", feature = "redis"))]
    pub(crate) fn after_effect(mut self) -> Self {
        self.0.may_have_taken_effect = true;
        self
    }

    /// What kind of trouble this is.
    #[must_use]
    pub fn code(&self) -> ErrorCode {
        self.0.code
    }

    /// Why the lock was lost, if work was ended because of that: something to look into.
    #[must_use]
    pub fn lost(&self) -> Option<LostReason> {
        match self.0.abort_reason {
            Some(AbortReason::Lost(reason)) => Some(reason),
            _ => None,
        }
    }

    /// Whether the caller's own token, or the dropping of a wait, ended the operation.
    #[must_use]
    pub fn is_canceled(&self) -> bool {
        self.0.abort_reason == Some(AbortReason::Canceled)
    }

    /// Whether the operation ended because its locker was shut down.
    #[must_use]
    pub fn is_shut_down(&self) -> bool {
        self.0.abort_reason == Some(AbortReason::ShutDown)
    }

    /// Whether a resource refused a write because a later holder of the lock has written already: this
    /// holder had lost its lock without noticing. Its code is [`ErrorCode::Aborted`].
    #[must_use]
    pub fn is_stale_fence(&self) -> bool {
        self.0.abort_reason == Some(AbortReason::StaleFence)
    }

    /// The key the operation was about, if it is known. Sensitive: do not log it.
    #[must_use]
    pub fn key(&self) -> Option<&Key> {
        self.0.key.as_ref()
    }

    /// The lock id the operation was about, if it is known. A secret: whoever has it can release.
    #[must_use]
    pub fn lock_id(&self) -> Option<LockId> {
        self.0.lock_id
    }

    /// The operation that failed (`"acquire"`, `"release"`, …), if it is known.
    #[must_use]
    pub fn operation(&self) -> Option<&'static str> {
        self.0.operation
    }

    /// The backend that failed (`"redis"`, …), if it is known.
    #[must_use]
    pub fn backend(&self) -> Option<&'static str> {
        self.0.backend
    }

    /// Whether the same call may succeed later without any change.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        self.0.code.is_retryable()
    }

    /// Whether the store may have been changed although the operation failed.
    #[must_use]
    pub fn may_have_taken_effect(&self) -> bool {
        self.0.may_have_taken_effect
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.message)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Error")
            .field("code", &self.0.code)
            .field("message", &self.0.message)
            .field("backend", &self.0.backend)
            .field("operation", &self.0.operation)
            .field("key", &self.0.key)
            .field("lock_id", &self.0.lock_id)
            .field("source", &self.0.source)
            .finish()
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.source.as_deref().map(|source| source as _)
    }
}

/// So that a [`Key`] can stand where a fallible conversion to one is asked for.
impl From<Infallible> for Error {
    fn from(never: Infallible) -> Self {
        match never {}
    }
}

/// The cause of an error in our words: what a driver says may hold keys, addresses and passwords.
#[cfg(any(feature = "firestore", feature = "postgres", feature = "redis", feature = "sqlite"))]
#[derive(Debug)]
pub(crate) struct Cause(pub(crate) String);

#[cfg(any(feature = "firestore", feature = "postgres", feature = "redis", feature = "sqlite"))]
impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(any(feature = "firestore", feature = "postgres", feature = "redis", feature = "sqlite"))]
impl StdError for Cause {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_and_display_hide_key_and_lock_id() {
        let key = Key::new("canary-key").expect("valid");
        let lock_id = LockId::parse("canaryCANARYcanaryCANA").expect("valid");
        let error = Error::new(ErrorCode::Internal, "the record makes no sense")
            .with_key(&key)
            .with_lock_id(lock_id)
            .with_operation("memory", "acquire");
        let shown = format!("{error} {error:?}");
        assert!(!shown.contains("canary"), "{shown}");
        assert!(shown.contains(key.hash().as_str()), "{shown}");
        assert_eq!(error.key(), Some(&key));
        assert!(error.lock_id().is_some_and(|id| id == lock_id));
    }

    #[cfg(feature = "postgres")]
    #[test]
    fn a_stale_fence_is_told_from_other_aborts() {
        let error = Error::stale_fence();
        assert_eq!(error.code(), ErrorCode::Aborted);
        assert!(error.is_stale_fence() && error.clone().is_stale_fence());
        assert!(!Error::aborted("cancelled").is_stale_fence());
    }

    #[test]
    fn retryable_and_ambiguous_codes() {
        let by_code = |code| {
            let error = Error::new(code, "x");
            (error.is_retryable(), error.may_have_taken_effect())
        };
        assert_eq!(by_code(ErrorCode::ServiceUnavailable), (true, true));
        assert_eq!(by_code(ErrorCode::NetworkTimeout), (true, true));
        assert_eq!(by_code(ErrorCode::RateLimited), (true, false));
        assert_eq!(by_code(ErrorCode::AuthFailed), (false, false));
        assert_eq!(by_code(ErrorCode::InvalidArgument), (false, false));
        assert_eq!(by_code(ErrorCode::AcquisitionTimeout), (false, false));
        assert_eq!(by_code(ErrorCode::Aborted), (false, false));
        assert_eq!(by_code(ErrorCode::Internal), (false, true));
        assert!(!Error::new(ErrorCode::Internal, "x").without_effect().may_have_taken_effect());
    }
}
