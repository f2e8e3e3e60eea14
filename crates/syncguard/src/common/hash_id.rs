//! The 24-digit hash that stands for keys and lock ids in logs and events.

use std::fmt;

use unicode_normalization::UnicodeNormalization;

/// The sanitized name of a key or lock id: 24 lowercase hexadecimal digits.
///
/// It distinguishes keys in a log; it does not protect them. The hash is linear and unsalted, so
/// anyone who can guess a key can confirm the guess. It is never used for storage.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HashId([u8; 24]);

/// Computes the [`HashId`] of any text, after Unicode NFC.
///
/// ```
/// assert_eq!(syncguard::backend::hash_key("foo").as_str(), "00018cc6004bf5b2b26baaca");
/// ```
#[must_use]
pub fn hash_key(text: &str) -> HashId {
    if text.is_ascii() {
        HashId::of_units(text.bytes().map(u32::from))
    } else {
        let mut units = [0; 2];
        HashId::of_units(text.nfc().flat_map(|c| {
            let encoded = c.encode_utf16(&mut units);
            let (first, second) = (encoded[0], encoded.get(1).copied());
            std::iter::once(u32::from(first)).chain(second.map(u32::from))
        }))
    }
}

impl HashId {
    /// Concatenates three 32-bit polynomial hashes over UTF-16 code units.
    fn of_units(units: impl Iterator<Item = u32>) -> Self {
        let [mut h1, mut h2, mut h3] = [0_u32; 3];
        for unit in units {
            h1 = h1.wrapping_mul(31).wrapping_add(unit);
            h2 = h2.wrapping_mul(127).wrapping_add(unit.wrapping_mul(3));
            h3 = h3.wrapping_mul(2047).wrapping_add(unit.wrapping_mul(7));
        }
        let mut digits = [0; 24];
        for (chunk, hash) in digits.chunks_exact_mut(8).zip([h1, h2, h3]) {
            for (digit, shift) in chunk.iter_mut().zip((0..8).rev()) {
                *digit = b"0123456789abcdef"[(hash >> (shift * 4)) as usize & 0xf];
            }
        }
        Self(digits)
    }

    /// Parses 24 lowercase hexadecimal digits.
    #[cfg(feature = "postgres")]
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let digits: [u8; 24] = text.as_bytes().try_into().ok()?;
        digits
            .iter()
            .all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'))
            .then_some(Self(digits))
    }

    /// Returns the 24 digits.
    #[must_use]
    pub fn as_str(&self) -> &str {
        str::from_utf8(&self.0).expect("BUG: the digits are ASCII")
    }
}

impl fmt::Display for HashId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Debug for HashId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(feature = "serde")]
impl serde::Serialize for HashId {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

/// Returns the FNV-1a hash of a text, which is the same in every process and build.
pub(crate) fn number_of(text: &str) -> u32 {
    let mix = |hash: u32, byte: u8| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193);
    text.bytes().fold(0x811C_9DC5, mix)
}

#[cfg(all(test, feature = "postgres"))]
mod tests {
    use super::*;

    #[test]
    fn only_the_text_of_a_hash_is_parsed() {
        let hash = hash_key("k");
        assert_eq!(HashId::parse(hash.as_str()), Some(hash));
        for foreign in ["", "0123", &hash.as_str().to_uppercase(), &format!("{hash}0")] {
            assert_eq!(HashId::parse(foreign), None, "{foreign}");
        }
    }
}
