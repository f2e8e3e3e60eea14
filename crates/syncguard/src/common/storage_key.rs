//! Derives the names of stored records from prefix and key, hashing names that are too long.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use sha2::{Digest, Sha256};
use unicode_normalization::UnicodeNormalization;

use super::error::{Error, Result};
use super::key::Key;
use super::lock_id::LockId;

/// Derives the names of a backend's records.
///
/// All names of one backend come from one `KeySpace`, so that the same rule shortens lock, index
/// and fence keys. A name that does not fit is replaced by the first 16 bytes of its SHA-256 hash
/// in base64url (22 characters).
///
/// ```
/// use syncguard::Key;
/// use syncguard::backend::KeySpace;
///
/// let space = KeySpace::new("app", 1000, 26)?;
/// let lock = space.lock_key(&Key::new("invoice:42")?)?;
/// assert_eq!(lock, "app:invoice:42");
/// assert_eq!(space.fence_key(&lock)?, "app:fence:app:invoice:42");
/// # Ok::<(), syncguard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeySpace {
    prefix: String,
    limit_bytes: usize,
    reserve_bytes: usize,
}

impl KeySpace {
    /// Creates a key space under `prefix`, in a store whose names have at most `limit_bytes`, of
    /// which `reserve_bytes` are reserved for what the backend appends.
    ///
    /// Colons at the end of the prefix are removed.
    pub fn new(
        prefix: impl Into<String>,
        limit_bytes: usize,
        reserve_bytes: usize,
    ) -> Result<Self> {
        let mut prefix = prefix.into();
        prefix.truncate(prefix.trim_end_matches(':').len());
        let separator = usize::from(!prefix.is_empty());
        if (prefix.len() + separator).saturating_add(reserve_bytes) > limit_bytes {
            return Err(Error::invalid(
                "the prefix is too long for the backend; use a shorter one",
            ));
        }
        Ok(Self { prefix, limit_bytes, reserve_bytes })
    }

    /// Returns the prefix, without colons at its end.
    #[must_use]
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// Returns the name of the record that stores the lock of `key`.
    pub fn lock_key(&self, key: &Key) -> Result<String> {
        self.fit("", key.as_str())
    }

    /// Returns the name of the record that stores the fence counter of a lock.
    ///
    /// It is derived from the lock's *storage* key, so that two keys share a counter only if they
    /// share the lock itself.
    pub fn fence_key(&self, lock_key: &str) -> Result<String> {
        self.fit("fence:", lock_key)
    }

    /// Returns the name of the record that maps a lock id to its lock, on stores that need one.
    pub fn index_key(&self, lock_id: &LockId) -> Result<String> {
        self.fit("id:", lock_id.expose())
    }

    /// Returns the hash that replaces a name that a store cannot represent.
    pub(crate) fn hashed(name: &str) -> String {
        URL_SAFE_NO_PAD.encode(&Sha256::digest(name.as_bytes())[..16])
    }

    fn fit(&self, kind: &str, name: &str) -> Result<String> {
        let mut full = self.with_room_for(kind.len() + name.len());
        full.push_str(kind);
        if name.is_ascii() {
            full.push_str(name);
        } else {
            full.extend(name.nfc());
        }
        if full.len() + self.reserve_bytes <= self.limit_bytes {
            return Ok(full);
        }
        let mut hashed = self.with_room_for(22);
        hashed.push_str(&Self::hashed(&full));
        if hashed.len() + self.reserve_bytes <= self.limit_bytes {
            return Ok(hashed);
        }
        Err(Error::invalid("the prefix leaves no room for a hashed key; use a shorter one"))
    }

    /// Returns the prefix and its separator, with capacity for `bytes` more bytes.
    fn with_room_for(&self, bytes: usize) -> String {
        let mut name = String::with_capacity(self.prefix.len() + 1 + bytes);
        if !self.prefix.is_empty() {
            name.push_str(&self.prefix);
            name.push(':');
        }
        name
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_hashed_exactly_when_it_does_not_fit() {
        let space = KeySpace::new("p", 34, 2).expect("valid");
        let plain = Key::new("x".repeat(30)).expect("valid");
        assert_eq!(space.lock_key(&plain).expect("fits"), format!("p:{}", "x".repeat(30)));
        let long = Key::new("x".repeat(31)).expect("valid");
        assert_eq!(space.lock_key(&long).expect("hashed").len(), 2 + 22);
    }
}
