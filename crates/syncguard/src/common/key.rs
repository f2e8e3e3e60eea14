//! The name of the thing to lock.

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use unicode_normalization::{IsNormalized, UnicodeNormalization, is_nfc_quick};

use super::error::{Error, Result};
use super::hash_id::{HashId, hash_key};

/// The maximum length of a key, in bytes of UTF-8 after normalization.
pub const MAX_KEY_LENGTH_BYTES: usize = 512;

/// The name of the thing to lock.
///
/// * A key has 1 to [`MAX_KEY_LENGTH_BYTES`] bytes of UTF-8, measured after Unicode NFC.
/// * It contains no NUL character: PostgreSQL cannot store one, so no backend accepts it.
/// * Keys are compared byte by byte after normalization: `Job` and `job` are two locks, and `café`
///   typed in either Unicode form is one.
/// * `Debug` shows the [`hash_id`](Self::hash_id), and there is no `Display`, because keys often
///   contain customer names or numbers. Read a key with [`as_str`](Self::as_str).
///
/// Normalization uses the tables of Unicode 18.0 ([`Key::UNICODE_VERSION`]). Unicode guarantees
/// that the normal form of an assigned character never changes, so two programs with different
/// tables disagree only about characters that one of them does not know yet.
///
/// ```
/// use syncguard::Key;
///
/// assert!(Key::new("invoice:42").is_ok());
/// assert_eq!(Key::new("cafe\u{301}")?, Key::new("café")?);
/// assert!(Key::new("").is_err());
/// assert!(Key::new("a\0b").is_err());
/// assert!(Key::new("x".repeat(513)).is_err());
/// # Ok::<(), syncguard::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key(Arc<str>);

impl Key {
    /// The version of the Unicode tables that normalize keys.
    pub const UNICODE_VERSION: (u8, u8, u8) = unicode_normalization::UNICODE_VERSION;

    /// Normalizes and checks a key.
    pub fn new(text: impl AsRef<str>) -> Result<Self> {
        let text = text.as_ref();
        if text.is_empty() {
            return Err(Error::invalid("key must not be empty"));
        }
        // NFC shrinks a text by a bounded factor (see the test), so a far too long text is refused
        // without normalizing all of it.
        if text.len() > MAX_KEY_LENGTH_BYTES * 64 {
            return Err(Self::too_long());
        }
        let normal: Arc<str> = match is_nfc_quick(text.chars()) {
            IsNormalized::Yes => text.into(),
            _ => text.nfc().collect::<String>().into(),
        };
        if normal.len() > MAX_KEY_LENGTH_BYTES {
            return Err(Self::too_long());
        }
        if normal.contains('\0') {
            return Err(Error::invalid("key must not contain a NUL character"));
        }
        Ok(Self(normal))
    }

    fn too_long() -> Error {
        Error::invalid(format!(
            "key exceeds the maximum length of {MAX_KEY_LENGTH_BYTES} bytes after normalization"
        ))
    }

    /// Returns the normalized text. It is sensitive: do not log it.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the hash that stands for this key in logs and events.
    #[must_use]
    pub fn hash_id(&self) -> HashId {
        hash_key(&self.0)
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key({})", self.hash_id())
    }
}

impl FromStr for Key {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::new(text)
    }
}

/// Implements `TryFrom` for every string type.
macro_rules! key_from {
    ($($text:ty),*) => {
        $(impl TryFrom<$text> for Key {
            type Error = Error;

            fn try_from(text: $text) -> Result<Self> {
                Self::new(&*text)
            }
        })*
    };
}

key_from!(&str, String, &String, Box<str>, Arc<str>, Cow<'_, str>);

/// Lets you pass a key that you keep by reference.
impl From<&Self> for Key {
    fn from(key: &Self) -> Self {
        key.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorCode;

    #[test]
    fn debug_shows_the_hash_only() {
        let key = Key::new("customer-4711").expect("valid");
        assert_eq!(format!("{key:?}"), format!("Key({})", hash_key("customer-4711")));
    }

    #[test]
    fn the_limit_is_measured_after_normalization() {
        // "e" + combining acute is 3 bytes and shrinks to 2; U+0958 is 3 bytes and grows to 6.
        assert_eq!(Key::new("e\u{301}".repeat(256)).expect("512 bytes").as_str().len(), 512);
        assert!(Key::new("e\u{301}".repeat(257)).is_err());
        assert!(Key::new("\u{958}".repeat(85)).is_ok());
        let error = Key::new("\u{958}".repeat(86)).expect_err("516 bytes after NFC");
        assert_eq!(error.code(), ErrorCode::InvalidArgument);
    }

    #[test]
    fn nfc_never_shrinks_a_text_by_more_than_the_early_check_allows() {
        let shrink = |c: char| {
            let decomposed: String = c.to_string().nfd().collect();
            decomposed.len().div_ceil(decomposed.nfc().collect::<String>().len())
        };
        let most = ('\u{80}'..=char::MAX).map(shrink).max().expect("some character");
        assert!(most < 64, "{most}");
    }

    #[test]
    fn the_documented_unicode_version_is_the_linked_one() {
        assert_eq!(Key::UNICODE_VERSION, (18, 0, 0));
    }
}
