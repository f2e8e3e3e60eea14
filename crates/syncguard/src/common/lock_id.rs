//! The secret that proves ownership of a lock.

use std::fmt;
use std::str::FromStr;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;

use super::error::{Error, Result};
use super::hash_id::{HashId, hash_key};
use super::randomness::id_bytes;
use super::shard::MAX_SHARDS;

/// The bits of the number of a shard that do not fit in one byte.
const HIGH_BITS: u8 = 0b11;

const _: () = assert!(
    MAX_SHARDS == ((HIGH_BITS as u16) + 1) << 8,
    "a lock id must have room for the number of every shard"
);

/// The secret that proves ownership of a lock: 16 random bytes as 22 base64url characters.
///
/// * The library generates one for every acquire request from the operating system's randomness;
///   you cannot choose it.
/// * [`parse`](Self::parse) accepts any 22 base64url characters, because another process may have
///   generated them.
/// * In a sharded store it names the shard of its lock: 118 of the 128 bits are random then, and
///   the last character is not one of canonical base64url.
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
        Ok(Self::of_bytes(id_bytes()?))
    }

    /// Generates a new id that names a shard, whose number is below [`MAX_SHARDS`].
    ///
    /// The number replaces the last ten bits. The last character has four bits more than 16 bytes
    /// need; they are 1 instead of 0, so that no id of 16 bytes looks like one that names a shard.
    pub(crate) fn random_in_shard(shard: u16) -> Result<Self> {
        let mut bytes = id_bytes()?;
        let [high, low] = shard.to_be_bytes();
        bytes[14] = bytes[14] & !HIGH_BITS | high & HIGH_BITS;
        bytes[15] = low;
        let mut id = Self::of_bytes(bytes);
        // In this alphabet, the characters of 0, 16, 32 and 48 are before those of 1, 17, 33 and
        // 49.
        id.0[Self::LENGTH - 1] += 1;
        Ok(id)
    }

    /// Returns the number of the shard that the id names, if it names one.
    #[cfg(feature = "redis")]
    pub(crate) fn shard(&self) -> Option<u16> {
        let mut text = self.0;
        let last = text.last_mut()?;
        if !matches!(*last, b'B' | b'R' | b'h' | b'x') {
            return None;
        }
        *last -= 1;
        let bytes = URL_SAFE_NO_PAD.decode(text).ok()?;
        Some(u16::from_be_bytes([*bytes.get(14)? & HIGH_BITS, *bytes.get(15)?]))
    }

    fn of_bytes(bytes: [u8; 16]) -> Self {
        let mut text = [0; Self::LENGTH];
        URL_SAFE_NO_PAD
            .encode_slice(bytes, &mut text)
            .expect("BUG: 16 bytes are 22 base64url characters");
        Self(text)
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

    #[cfg(feature = "redis")]
    #[test]
    fn an_id_names_its_shard_and_is_random_otherwise() {
        for shard in 0..MAX_SHARDS {
            let [one, other] = [(); 2].map(|()| LockId::random_in_shard(shard).expect("random"));
            assert_eq!(one.shard(), Some(shard));
            assert_ne!(one, other);
            assert_eq!(LockId::parse(one.expose()).expect("valid"), one);
            assert_eq!(LockId::random().expect("random").shard(), None);
        }
        for text in ["AAAAAAAAAAAAAAAAAAAAAA", "AAAAAAAAAAAAAAAAAAAAAC", "----------------------"] {
            assert_eq!(LockId::parse(text).expect("valid").shard(), None, "{text}");
        }
        // 118 bits differ between ids of one shard.
        let bits = |id: &LockId| {
            let mut text = id.0;
            text[21] -= 1;
            let bytes = URL_SAFE_NO_PAD.decode(text).expect("canonical");
            u128::from_be_bytes(bytes.try_into().expect("16 bytes"))
        };
        let first = bits(&LockId::random_in_shard(5).expect("random"));
        let differ = (0..256).fold(0, |differ, _| {
            differ | (first ^ bits(&LockId::random_in_shard(5).expect("random")))
        });
        assert_eq!(differ.count_ones(), 118);
    }
}
