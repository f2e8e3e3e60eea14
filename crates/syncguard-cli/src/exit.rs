//! Exit codes and failures.

use std::fmt;

use syncguard::{Error, ErrorCode};

/// A negative result, such as "not held".
pub(crate) const NO: u8 = 1;
/// A usage error.
pub(crate) const USAGE: u8 = 2;
/// The command took longer than `--max-hold`.
pub(crate) const MAX_HOLD: u8 = 122;
/// The lock was lost while the command ran.
pub(crate) const LOST: u8 = 123;
/// The lock was not acquired in time.
pub(crate) const NOT_ACQUIRED: u8 = 124;
/// `syncguard` itself failed.
pub(crate) const FAILED: u8 = 125;
/// The command was found but could not be run.
pub(crate) const NOT_EXECUTABLE: u8 = 126;
/// The command was not found.
pub(crate) const NOT_FOUND: u8 = 127;

/// All exit codes with their meanings, for the help text and the manual.
pub(crate) const CODES: [(&str, &str); 10] = [
    ("0", "success; `run` exits with the exit code of the command"),
    (
        "1",
        "negative result: not held, free, nothing broken, a stale fence, or doctor found an error",
    ),
    ("2", "usage error"),
    ("122", "run: the command took longer than --max-hold and was terminated"),
    ("123", "run, elect: the lock was lost; the command was terminated, or had already ended"),
    ("124", "the lock was not acquired in time (see --conflict-exit-code)"),
    ("125", "syncguard failed, for example because the store is unreachable"),
    ("126", "run, elect: the command cannot be executed"),
    ("127", "run, elect: the command was not found"),
    ("128+n", "run, elect: signal n terminated the command"),
];

/// What a failure is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum About {
    /// Neither of the others.
    Other,
    /// Another process holds the lock.
    Conflict,
    /// The store. Its address belongs in the message.
    Store,
}

/// A failure: a message, an optional hint, and the exit code.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) code: u8,
    pub(crate) message: String,
    pub(crate) hint: Option<String>,
    about: About,
    may_pass: bool,
}

impl Failure {
    pub(crate) fn new(code: u8, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), hint: None, about: About::Other, may_pass: false }
    }

    /// Another process holds the lock; `code` is the exit code that the user chose for that.
    pub(crate) fn conflict(code: u8, message: impl Into<String>) -> Self {
        Self { about: About::Conflict, ..Self::new(code, message) }
    }

    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Returns whether a retry may succeed.
    pub(crate) fn may_pass(&self) -> bool {
        self.may_pass
    }

    pub(crate) fn is_conflict(&self) -> bool {
        self.about == About::Conflict
    }

    /// Returns whether the store failed, so that its address belongs in the message.
    pub(crate) fn is_about_the_store(&self) -> bool {
        self.about == About::Store
    }

    /// Replaces the message with one that names the store.
    pub(crate) fn located(mut self, message: String) -> Self {
        self.message = message;
        self.about = About::Other;
        self
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let source = std::error::Error::source(&error);
        let (code, about) = match error.code() {
            // An argument that the store refuses is not a usage error.
            ErrorCode::InvalidArgument if error.backend().is_none() => (USAGE, About::Other),
            ErrorCode::AcquisitionTimeout => {
                // If the store failed, it is unknown whether another process holds the lock.
                if let Some(last) = source.and_then(|source| source.downcast_ref::<Error>()) {
                    return Self::from(last.clone());
                }
                (NOT_ACQUIRED, About::Conflict)
            }
            ErrorCode::Aborted => (FAILED, About::Other),
            _ => (FAILED, About::Store),
        };
        let mut message = error.message().to_owned();
        // Sources are sanitized, so they may be shown.
        let mut source = source;
        while let Some(cause) = source {
            message = format!("{message} ({cause})");
            source = cause.source();
        }
        let may_pass = error.is_retryable();
        let failure = Self { about, may_pass, ..Self::new(code, message) };
        if error.message().contains("setup_schema") {
            return failure.hint("run `syncguard setup`");
        }
        failure
    }
}
