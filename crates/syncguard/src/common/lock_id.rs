//! The secret that proves ownership of a lock.

use std::fmt;
use std::str::FromStr;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;

use super::error::{Error, Result};
use super::hash_id::{HashId, hash_key};
use super::randomness::id_bytes;

/// The secret that proves ownership of a lock: 16 random bytes as 22 base64url characters.
///
/// * The library generates one for every acquire request from the operating system's randomness;
///   you cannot choose it.
/// * [`parse`](Self::parse) accepts any 22 base64url characters, because another process may have
///   generated them.
/// * It is a secret: anyone who has it can release the lock. `Debug` does not show it, there is no
///   `Display`, and only [`expose`](Self::expose) returns the text.
///
/// ```
/// use syncguard::LockId;
///
/// let id = LockId::parse("AAECAwQFBgcICQoLDA0ODw")?;
/// assert_eq!(id.expose(), "AAECAwQFBgcICQoLDA0ODw");
/// assert_eq!(format!("{id:?}"), "LockId(redacted)");
/// assert!(LockId::parse("too short").is_err());
/// # Ok::<(), syncguard::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct LockId([u8; Self::LENGTH]);

impl LockId {
    /// The length of the text, in characters.
    pub const LENGTH: usize = 22;

    /// Generates a new id from the operating system's randomness.
    pub(crate) fn random() -> Result<Self> {
        let mut text = [0; Self::LENGTH];
        URL_SAFE_NO_PAD
            .encode_slice(id_bytes()?, &mut text)
            .expect("BUG: 16 bytes are 22 base64url characters");
        Ok(Self(text))
    }

    /// Parses an id that another process wrote: exactly 22 base64url characters.
    ///
    /// The error message does not repeat the text.
    pub fn parse(text: &str) -> Result<Self> {
        match <[u8; Self::LENGTH]>::try_from(text.as_bytes()) {
            Ok(bytes) if bytes.iter().all(|b| b.is_ascii_alphanumeric() || b"-_".contains(b)) => {
                Ok(Self(bytes))
            }
            _ => Err(Error::invalid("lock id must be exactly 22 base64url characters")),
        }
    }

    /// Returns the text. Anyone who reads it can release and extend the lock.
    #[must_use]
    pub fn expose(&self) -> &str {
        str::from_utf8(&self.0).expect("BUG: base64url is ASCII")
    }

    /// Returns the hash that stands for this id in logs and events.
    #[must_use]
    pub fn hash_id(&self) -> HashId {
        hash_key(self.expose())
    }
}

impl fmt::Debug for LockId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LockId(redacted)")
    }
}

impl FromStr for LockId {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::parse(text)
    }
}

/// Serializes a [`LockId`] as its text: `#[serde(with = "syncguard::lock_id_text")]`.
///
/// You choose this explicitly because the text is a secret: anyone who has it can release the lock.
#[cfg(feature = "serde")]
pub mod lock_id_text {
    use serde::{Deserialize, Deserializer, Serializer};

    use super::LockId;

    /// Serializes the text of a lock id.
    pub fn serialize<S: Serializer>(lock_id: &LockId, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(lock_id.expose())
    }

    /// Deserializes a lock id from its text.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<LockId, D::Error> {
        let text = <std::borrow::Cow<'de, str>>::deserialize(deserializer)?;
        LockId::parse(&text).map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_ids_differ_and_are_canonical() {
        let ids: Vec<_> = (0..64).map(|_| LockId::random().expect("randomness")).collect();
        for (i, id) in ids.iter().enumerate() {
            assert!(ids[i + 1..].iter().all(|other| other != id));
            let bytes = URL_SAFE_NO_PAD.decode(id.expose()).expect("canonical base64url");
            assert_eq!(bytes.len(), 16);
        }
    }
}
