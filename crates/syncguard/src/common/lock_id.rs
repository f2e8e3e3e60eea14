//! The holder's proof of ownership.

use std::fmt;
use std::str::FromStr;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;

use super::error::{Error, Result};
use super::hash_id::{HashId, hash_key};
use super::randomness::id_bytes;

/// Proves that its bearer holds a lock: 16 bytes of OS randomness as 22 base64url characters.
///
/// * Drawn by the library for every request; no caller can choose one for an acquire.
/// * Parsed from any 22 base64url characters, as another process may have written them.
/// * A secret: whoever has it can release the lock. `Debug` shows nothing of it, there is no
///   `Display`, and [`expose`](Self::expose) is the only way to the text.
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
    /// The length of the text.
    pub const LENGTH: usize = 22;

    /// Draws a new id from the operating system.
    pub(crate) fn random() -> Result<Self> {
        let mut text = [0; Self::LENGTH];
        URL_SAFE_NO_PAD
            .encode_slice(id_bytes()?, &mut text)
            .expect("BUG: 16 bytes are 22 base64url characters");
        Ok(Self(text))
    }

    /// Reads an id that another process wrote: exactly 22 base64url characters.
    ///
    /// The message of the error does not repeat the text.
    pub fn parse(text: &str) -> Result<Self> {
        match <[u8; Self::LENGTH]>::try_from(text.as_bytes()) {
            Ok(bytes) if bytes.iter().all(|b| b.is_ascii_alphanumeric() || b"-_".contains(b)) => {
                Ok(Self(bytes))
            }
            _ => Err(Error::invalid("lock id must be exactly 22 base64url characters")),
        }
    }

    /// The text. Handing it out is a decision: it lets the reader release and extend the lock.
    #[must_use]
    pub fn expose(&self) -> &str {
        str::from_utf8(&self.0).expect("BUG: base64url is ASCII")
    }

    /// The name under which this id may appear in logs and events.
    #[must_use]
    pub fn hash(&self) -> HashId {
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
