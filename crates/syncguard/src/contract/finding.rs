//! A risk that a backend finds in its store.

use std::fmt;

/// Something about a store that can make locks vanish or fences go backwards, and what to do about
/// it.
///
/// ```
/// # fn show(found: &[syncguard::backend::Finding]) {
/// for finding in found {
///     println!("{}: {finding}", finding.subject());
/// }
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    subject: &'static str,
    text: String,
}

impl Finding {
    /// Creates a finding. `subject` is a word by which programs distinguish findings.
    pub fn new(subject: &'static str, text: impl Into<String>) -> Self {
        Self { subject, text: text.into() }
    }

    /// Returns the word that identifies the finding.
    #[must_use]
    pub fn subject(&self) -> &'static str {
        self.subject
    }

    /// Returns what can happen, and what to do about it.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.text
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}
