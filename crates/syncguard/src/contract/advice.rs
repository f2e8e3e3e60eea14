//! What a backend advises about the store it runs on.

use std::fmt;

/// Something about a store that can make locks vanish or fences go backwards, and what to do.
///
/// ```
/// # fn show(found: &[syncguard::Advice]) {
/// for advice in found {
///     println!("{}: {advice}", advice.subject());
/// }
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Advice {
    subject: &'static str,
    text: String,
}

impl Advice {
    /// Advice about one `subject`, a word by which programs tell pieces of advice apart.
    pub fn new(subject: &'static str, text: impl Into<String>) -> Self {
        Self { subject, text: text.into() }
    }

    /// What it is about.
    #[must_use]
    pub fn subject(&self) -> &'static str {
        self.subject
    }

    /// What can happen, and what to do about it.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.text
    }
}

impl fmt::Display for Advice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}
