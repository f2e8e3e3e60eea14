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

    /// Recommends fences from the clock, for a store whose settings can lose fence counters.
    #[cfg(feature = "_listener")]
    pub(crate) fn lost_counters() -> Self {
        Self::new(
            "fences",
            "a lost fence counter starts at 1 again; with \"fences=clock\" it starts above every \
             fence that it has granted, unless the clock is set back past the loss; do not use it \
             if TypeScript programs share the store, because they start a missing counter at 1",
        )
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_finding_is_displayed_by_its_text() {
        let finding = Finding::new("fsync", "a crash can lose locks");
        assert_eq!(finding.to_string(), "a crash can lose locks");
    }
}
