//! How the command ends.

use std::fmt;

use syncguard::{Error, ErrorCode};

/// The lock was lost while the command ran.
pub(crate) const LOST: u8 = 123;
/// The lock was not obtained in time.
pub(crate) const NOT_OBTAINED: u8 = 124;
/// Something of ours failed.
pub(crate) const FAILED: u8 = 125;
/// The command was found and could not be run.
pub(crate) const NOT_EXECUTABLE: u8 = 126;
/// The command was not found.
pub(crate) const NOT_FOUND: u8 = 127;
/// Something makes no sense in what was typed.
pub(crate) const USAGE: u8 = 2;
/// The answer to a question is no.
pub(crate) const NO: u8 = 1;

/// What to say, what may help, and the code to end with.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) code: u8,
    pub(crate) message: String,
    pub(crate) hint: Option<String>,
}

impl Failure {
    pub(crate) fn new(code: u8, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), hint: None }
    }

    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
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
        let code = match error.code() {
            // What a store refuses is no mistake in what was typed.
            ErrorCode::InvalidArgument if error.backend().is_none() => USAGE,
            ErrorCode::AcquisitionTimeout => NOT_OBTAINED,
            _ => FAILED,
        };
        let mut message = error.to_string();
        // Sources are sanitized, so they may be shown.
        let mut source = std::error::Error::source(&error);
        while let Some(cause) = source {
            message = format!("{message} ({cause})");
            source = cause.source();
        }
        let failure = Self::new(code, message);
        if error.to_string().contains("setup_schema") {
            return failure.hint("create the tables with `syncguard setup`");
        }
        failure
    }
}
