//! The error type: a code, a message, a redacted context and a sanitized source.

use std::convert::Infallible;
use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;

use super::holder::HolderInfo;
use super::key::Key;
use super::lock_id::LockId;
use super::lost_reason::LostReason;

/// The result of every operation in this crate that can fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The kind of an [`Error`]: a closed set of eight, the same on every backend.
///
/// Contention and "not held" are not errors; they are variants of the operation's outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorCode {
    /// The store could not be reached, is not ready, or refused for a temporary reason.
    ///
    /// The operation may have taken effect, unless [`Error::may_have_taken_effect`] returns
    /// `false`. Retry; nothing is wrong with the request.
    ServiceUnavailable,
    /// The store refused the credentials, or they lack a permission.
    ///
    /// The operation normally had no effect ([`Error::may_have_taken_effect`]). Correct the
    /// credentials or the grants.
    AuthFailed,
    /// The request or the configuration is invalid.
    ///
    /// Invalid input is refused before any I/O. The store may also refuse a request, for example
    /// because a table is missing; it then normally had no effect
    /// ([`Error::may_have_taken_effect`]). Change what the message names.
    InvalidArgument,
    /// The store ran out of a resource: memory, connections or quota.
    ///
    /// The operation normally had no effect ([`Error::may_have_taken_effect`]). Slow down, then
    /// retry.
    RateLimited,
    /// The store did not respond in time.
    ///
    /// The operation may have taken effect. Retry. A [`Locker`](crate::Locker) undoes a lock that
    /// such an acquire may have left behind.
    NetworkTimeout,
    /// `lock()` did not get the lock before its timeout or its last retry.
    ///
    /// No lock is left behind. Retry later, or allow a longer wait.
    AcquisitionTimeout,
    /// A token canceled the operation, the lock that it ran under was lost, the locker was shut
    /// down, or a resource has seen a later holder.
    ///
    /// No lock is left behind. [`Error::is_canceled`], [`Error::is_shut_down`], [`Error::lost`] and
    /// [`Error::is_stale_fence`] return the reason.
    Aborted,
    /// Something that should not happen: a foreign or corrupt record, an exhausted fence counter,
    /// or an unexpected response.
    ///
    /// The operation may have taken effect. Inspect the store; a retry does not help.
    Internal,
}

impl ErrorCode {
    /// Returns the stable text of this code, for logs, JSON and exit messages.
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

    /// Returns whether the same call may succeed later without any change.
    #[must_use]
    pub const fn is_retryable(self) -> bool {
        matches!(self, Self::ServiceUnavailable | Self::NetworkTimeout | Self::RateLimited)
    }
}

#[cfg(feature = "serde")]
impl serde::Serialize for ErrorCode {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

impl fmt::Display for ErrorCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A failed operation.
///
/// * `Display` prints one line: the [message](Self::message), the code, and the hash of the key if
///   it is known. Walk [`source`](StdError::source) for the cause.
/// * `Debug` shows the context, with the key as a hash and the lock id redacted.
/// * Sources are sanitized before they are attached: the chain contains no key, lock id, password
///   or URL.
///
/// ```
/// use syncguard::{ErrorCode, Key};
///
/// let error = Key::new("").unwrap_err();
/// assert_eq!(error.code(), ErrorCode::InvalidArgument);
/// assert_eq!(error.message(), "key must not be empty");
/// assert_eq!(error.to_string(), "key must not be empty (InvalidArgument)");
/// assert!(!error.is_retryable());
/// ```
#[derive(Clone)]
pub struct Error(Box<ErrorInner>);

#[derive(Clone)]
struct ErrorInner {
    code: ErrorCode,
    message: String,
    abort_reason: Option<AbortReason>,
    may_have_taken_effect: bool,
    operation: Option<&'static str>,
    backend: Option<&'static str>,
    key: Option<Key>,
    lock_id: Option<LockId>,
    holder: Option<HolderInfo>,
    source: Option<Arc<dyn StdError + Send + Sync>>,
}

/// Distinguishes errors with the code [`ErrorCode::Aborted`].
#[derive(Clone, PartialEq, Eq)]
enum AbortReason {
    Canceled,
    ShutDown,
    Lost(LostReason),
    /// A later holder has already used the resource.
    StaleFence,
}

impl Error {
    /// Creates an error. The message is one line, starts in lowercase, and contains no key, lock id
    /// or password.
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self(Box::new(ErrorInner {
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
            holder: None,
            source: None,
        }))
    }

    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::new(ErrorCode::InvalidArgument, message)
    }

    /// Creates the error for a record that syncguard did not write; nothing was changed.
    #[cfg(feature = "_store")]
    pub(crate) fn foreign_lock() -> Self {
        Self::new(
            ErrorCode::Internal,
            "foreign data is stored where the lock belongs; inspect the store",
        )
        .without_effect()
    }

    /// Creates the error for a fence counter that syncguard did not write; nothing was changed.
    #[cfg(feature = "_network")]
    pub(crate) fn foreign_counter() -> Self {
        Self::new(
            ErrorCode::Internal,
            "foreign data is stored where the fence counter belongs; inspect the store",
        )
        .without_effect()
    }

    /// Creates the error for a resource that has seen a larger fence; nothing was changed.
    pub(crate) fn stale_fence() -> Self {
        let message = "the fence is stale: a later holder of the lock has already written";
        Self::aborted_because(AbortReason::StaleFence, message)
    }

    /// Creates the error for a resource that belongs to another lock; nothing was changed.
    pub(crate) fn other_lock() -> Self {
        Self::invalid(
            "the fence belongs to another lock than the one under which this resource was written \
             before, so the two cannot be compared; use the same key for all its writes",
        )
    }

    pub(crate) fn aborted(message: impl Into<String>) -> Self {
        Self::new(ErrorCode::Aborted, message)
    }

    /// Creates the error for a canceled token or wait.
    pub(crate) fn canceled(message: &'static str) -> Self {
        Self::aborted_because(AbortReason::Canceled, message)
    }

    /// Creates the error for a locker that was shut down.
    pub(crate) fn shut_down() -> Self {
        Self::aborted_because(AbortReason::ShutDown, "the locker was shut down")
    }

    /// Creates the error for work that was stopped because its lock is no longer held.
    pub(crate) fn lost_lock(reason: LostReason) -> Self {
        let message = format!("the work was stopped: {reason}");
        Self::aborted_because(AbortReason::Lost(reason), message)
    }

    fn aborted_because(reason: AbortReason, message: impl Into<String>) -> Self {
        let mut error = Self::aborted(message);
        error.0.abort_reason = Some(reason);
        error
    }

    /// Adds the key of the operation. It is shown as a hash.
    #[must_use]
    pub fn with_key(mut self, key: &Key) -> Self {
        self.0.key = Some(key.clone());
        self
    }

    /// Adds the lock id of the operation. It is never shown.
    #[must_use]
    pub fn with_lock_id(mut self, lock_id: LockId) -> Self {
        self.0.lock_id = Some(lock_id);
        self
    }

    /// Adds who held the lock. It is not part of the message.
    #[must_use]
    pub(crate) fn with_holder(mut self, holder: Option<HolderInfo>) -> Self {
        self.0.holder = holder;
        self
    }

    /// Adds the backend and the operation that failed.
    #[must_use]
    pub fn with_operation(mut self, backend: &'static str, operation: &'static str) -> Self {
        self.0.backend = Some(backend);
        self.0.operation = Some(operation);
        self
    }

    /// Attaches the cause. Its whole chain must not contain a key, lock id, password or URL.
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

    /// States that the store may have been changed by something that was sent before the failure.
    ///
    /// A locker then undoes the operation.
    #[must_use]
    pub fn after_effect(mut self) -> Self {
        self.0.may_have_taken_effect = true;
        self
    }

    /// Returns the kind of this error.
    #[must_use]
    pub fn code(&self) -> ErrorCode {
        self.0.code
    }

    /// Returns what failed and why, without the code.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// Returns why the lock was lost, if work was stopped because of that.
    #[must_use]
    pub fn lost(&self) -> Option<LostReason> {
        match &self.0.abort_reason {
            Some(AbortReason::Lost(reason)) => Some(reason.clone()),
            _ => None,
        }
    }

    /// Returns whether your token, or dropping a wait, canceled the operation.
    #[must_use]
    pub fn is_canceled(&self) -> bool {
        self.0.abort_reason == Some(AbortReason::Canceled)
    }

    /// Returns whether the operation ended because its locker was shut down.
    #[must_use]
    pub fn is_shut_down(&self) -> bool {
        self.0.abort_reason == Some(AbortReason::ShutDown)
    }

    /// Returns whether a resource refused a write because a later holder of the lock has already
    /// written: this holder lost its lock without noticing. The code is [`ErrorCode::Aborted`].
    #[must_use]
    pub fn is_stale_fence(&self) -> bool {
        self.0.abort_reason == Some(AbortReason::StaleFence)
    }

    /// Returns the key of the operation, if it is known. It is sensitive: do not log it.
    #[must_use]
    pub fn key(&self) -> Option<&Key> {
        self.0.key.as_ref()
    }

    /// Returns the lock id of the operation, if it is known. It is a secret: anyone who has it can
    /// release the lock.
    #[must_use]
    pub fn lock_id(&self) -> Option<LockId> {
        self.0.lock_id
    }

    /// Returns who held the lock when an [`ErrorCode::AcquisitionTimeout`] ended the wait for it,
    /// if that is known. For display only.
    #[must_use]
    pub fn holder(&self) -> Option<&HolderInfo> {
        self.0.holder.as_ref()
    }

    /// Returns the operation that failed (`"acquire"`, `"release"`, …), if it is known.
    #[must_use]
    pub fn operation(&self) -> Option<&'static str> {
        self.0.operation
    }

    /// Returns the backend that failed (`"redis"`, …), if it is known.
    #[must_use]
    pub fn backend(&self) -> Option<&'static str> {
        self.0.backend
    }

    /// Returns whether the same call may succeed later without any change.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        self.0.code.is_retryable()
    }

    /// Returns whether the store may have been changed although the operation failed.
    #[must_use]
    pub fn may_have_taken_effect(&self) -> bool {
        self.0.may_have_taken_effect
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0.key {
            Some(key) => write!(f, "{} ({}, key {})", self.0.message, self.0.code, key.hash_id()),
            None => write!(f, "{} ({})", self.0.message, self.0.code),
        }
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
            .field("holder", &self.0.holder)
            .field("source", &self.0.source)
            .finish()
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.source.as_deref().map(|source| source as _)
    }
}

/// Lets you pass a [`Key`] where a fallible conversion to one is expected.
impl From<Infallible> for Error {
    fn from(never: Infallible) -> Self {
        match never {}
    }
}

/// A sanitized cause of an error. A driver's own text may contain keys, addresses and passwords.
#[cfg(feature = "_store")]
#[derive(Debug)]
pub(crate) struct Cause(pub(crate) String);

#[cfg(feature = "_store")]
impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(feature = "_store")]
impl StdError for Cause {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_and_display_hide_key_and_lock_id() {
        let key = Key::new("canary-key").expect("valid");
        let lock_id = LockId::parse("canaryCANARYcanaryCANA").expect("valid");
        let error = Error::new(ErrorCode::Internal, "the record is corrupt")
            .with_key(&key)
            .with_lock_id(lock_id)
            .with_operation("memory", "acquire");
        let shown = format!("{error} {error:?}");
        assert!(!shown.contains("canary"), "{shown}");
        assert!(shown.contains(key.hash_id().as_str()), "{shown}");
        assert!(shown.starts_with("the record is corrupt (Internal, key "), "{shown}");
        for part in ["code: Internal", "operation: Some(\"acquire\")", "LockId(redacted)"] {
            assert!(shown.contains(part), "{part} in {shown}");
        }
        assert_eq!(error.key(), Some(&key));
        assert!(error.lock_id().is_some_and(|id| id == lock_id));
    }

    #[test]
    fn a_stale_fence_differs_from_other_aborts() {
        let error = Error::stale_fence();
        assert_eq!(error.code(), ErrorCode::Aborted);
        assert!(error.is_stale_fence() && error.clone().is_stale_fence());
        assert!(!Error::aborted("canceled").is_stale_fence());
    }

    #[test]
    fn each_code_decides_whether_an_error_is_retryable_and_may_have_taken_effect() {
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
