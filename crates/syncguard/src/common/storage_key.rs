//! The one derivation of storage keys: prefix, key, and a hash where a store has no room.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use sha2::{Digest, Sha256};
use unicode_normalization::UnicodeNormalization;

use super::error::{Error, Result};
use super::key::Key;
use super::lock_id::LockId;

/// How a backend names its records.
///
/// All names of one backend come from one `KeySpace`, so that lock, index and fence keys are cut
/// by the same rule. A text that would not fit is replaced by the first 16 bytes of its SHA-256 in
/// base64url, 22 characters.
///
/// ```
/// use syncguard::{Key, KeySpace};
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
    /// A key space under `prefix`, in a store whose names have at most `limit_bytes`, of which
    /// `reserve_bytes` are kept free for what the backend appends.
    ///
    /// Colons at the end of the prefix do not count.
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
                "prefix exceeds the backend's limit after the reserved bytes; use a shorter one",
            ));
        }
        Ok(Self { prefix, limit_bytes, reserve_bytes })
    }

    /// The prefix, without colons at its end.
    #[must_use]
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// Where the lock of `key` is stored.
    pub fn lock_key(&self, key: &Key) -> Result<String> {
        self.fit("", key.as_str())
    }

    /// Where the fence counter of a lock is stored. Derived from the lock's *storage* key, so that
    /// two keys share a counter only if they share the lock itself.
    pub fn fence_key(&self, lock_key: &str) -> Result<String> {
        self.fit("fence:", lock_key)
    }

    /// Where the way from a lock id to its lock is stored, on stores that need one.
    pub fn index_key(&self, lock_id: &LockId) -> Result<String> {
        self.fit("id:", lock_id.expose())
    }

    /// What stands for a name that a store cannot have.
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
        Err(Error::invalid("prefix leaves no room for a key, not even a hashed one"))
    }

    /// The prefix, as the beginning of a name of which so many bytes follow.
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
