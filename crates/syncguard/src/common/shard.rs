//! Which part of a sharded store has the records of a key.

use super::hash_id::number_of;
use super::key::Key;

/// The most shards of a store: a lock id has room for their numbers.
pub(crate) const MAX_SHARDS: u16 = 1024;

/// Returns the number of the shard that has the records of `key`, below `shards`.
///
/// It is the same in every process, build and version, because locks are found by it: the FNV-1a
/// hash of the normalized key, whose bits are mixed as the 32-bit finalizer of `MurmurHash3` does,
/// scaled to the number of shards.
pub(crate) fn shard_of(key: &Key, shards: u16) -> u16 {
    let mut hash = number_of(key.as_str());
    hash = (hash ^ (hash >> 16)).wrapping_mul(0x85EB_CA6B);
    hash = (hash ^ (hash >> 13)).wrapping_mul(0xC2B2_AE35);
    hash ^= hash >> 16;
    let scaled = (u64::from(hash) * u64::from(shards)) >> 32;
    u16::try_from(scaled).expect("BUG: the product is below 2^32 times the number of shards")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shard(key: &str, shards: u16) -> u16 {
        shard_of(&Key::new(key).expect("valid"), shards)
    }

    /// A change of these numbers loses every lock of every sharded store.
    #[test]
    fn the_shard_of_a_key_never_changes() {
        let known =
            [("invoice:42", 256, 12), ("a", 256, 26), ("caf\u{e9}", 1024, 893), ("k", 3, 1)];
        for (key, shards, expected) in known {
            assert_eq!(shard(key, shards), expected, "{key}");
        }
        assert_eq!(shard("cafe\u{301}", 1024), shard("caf\u{e9}", 1024), "normalized");
        assert_eq!(shard("anything", 1), 0);
    }

    #[test]
    fn ten_thousand_keys_spread_over_the_shards() {
        const KEYS: u32 = 10_000;
        type Name = fn(u32) -> String;
        let names: [Name; 3] = [
            |number| format!("order:{number}"),
            |number| format!("{number:08}"),
            |number| format!("tenant/{}/job/{}", number % 100, number / 100),
        ];
        for name in names {
            for (shards, most) in [(3_u16, 1.06), (16, 1.2), (256, 2.0)] {
                let mut counts = vec![0_u32; usize::from(shards)];
                for number in 0..KEYS {
                    counts[usize::from(shard(&name(number), shards))] += 1;
                }
                let even = f64::from(KEYS) / f64::from(shards);
                let largest = f64::from(*counts.iter().max().expect("some"));
                assert!(largest < even * most, "{}: {largest} of {even}", name(0));
            }
        }
    }
}
