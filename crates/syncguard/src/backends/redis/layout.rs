//! How the records of a backend are distributed over the slots of a Cluster.

use super::names::Names;
use crate::common::error::Result;
use crate::common::key::Key;
use crate::common::shard::shard_of;

/// The number of slots of a Cluster.
const SLOTS: u16 = 16384;

/// The names of a backend's records, for each shard.
#[derive(Clone, Debug)]
pub(super) struct Layout {
    /// One, if the store has no shards.
    shards: Vec<Names>,
}

impl Layout {
    /// Creates the layout of a store without shards.
    pub(super) fn whole(names: Names) -> Self {
        Self { shards: vec![names] }
    }

    /// Creates the layout of a store with shards.
    pub(super) fn sharded(prefix: &str, shards: u16) -> Result<Self> {
        let names =
            (0..shards).map(|shard| Names::with_prefix(&shard_prefix(prefix, shard, shards)));
        Ok(Self { shards: names.collect::<Result<_>>()? })
    }

    /// Returns the names of every shard.
    pub(super) fn shards(&self) -> &[Names] {
        &self.shards
    }

    /// Returns the number of the shard that has the records of a key.
    pub(super) fn place_of(&self, key: &Key) -> usize {
        match self.shards.len() {
            1 => 0,
            count => usize::from(shard_of(key, u16::try_from(count).unwrap_or(u16::MAX))),
        }
    }
}

/// Returns the prefix of a shard's records: a tag with the configured prefix, the number of the
/// shard, and a number that puts the tag where it belongs. Shard `i` of `n` is in the `i`-th of `n`
/// equal ranges of slots, so that nodes with as many slots have as many shards.
fn shard_prefix(prefix: &str, shard: u16, shards: u16) -> String {
    let begin = format!("{prefix}:{shard}-");
    let crc_of_begin = crc16(0, begin.as_bytes());
    let is_in_range = |number: &u32| {
        let slot = crc16(crc_of_begin, number.to_string().as_bytes()) % SLOTS;
        u32::from(slot) * u32::from(shards) / u32::from(SLOTS) == u32::from(shard)
    };
    let number = (0..=u32::MAX).find(is_in_range).expect("BUG: some number leads to every slot");
    format!("{{{begin}{number}}}")
}

/// Returns the name of the record that has the number of shards.
pub(super) fn count_name(prefix: &str) -> String {
    format!("{{{prefix}:shards}}:count")
}

/// Returns the slot of a name: that of the tag in its first braces, if there is one.
pub(super) fn slot_of(name: &str) -> u16 {
    crc16(0, tag_of(name).unwrap_or(name).as_bytes()) % SLOTS
}

/// Returns the tag of a name: the text in its first braces, unless it is empty.
pub(super) fn tag_of(name: &str) -> Option<&str> {
    let (tag, _) = name.split_once('{')?.1.split_once('}')?;
    (!tag.is_empty()).then_some(tag)
}

/// Continues the CRC-16 that Redis uses (XMODEM).
fn crc16(crc: u16, bytes: &[u8]) -> u16 {
    const TABLE: [u16; 256] = {
        let mut table = [0; 256];
        let (mut byte, mut high) = (0, 0_u16);
        while byte < 256 {
            let mut crc = high << 8;
            let mut bit = 0;
            while bit < 8 {
                crc = if crc & 0x8000 == 0 { crc << 1 } else { crc << 1 ^ 0x1021 };
                bit += 1;
            }
            table[byte] = crc;
            (byte, high) = (byte + 1, high + 1);
        }
        table
    };
    bytes.iter().fold(crc, |crc, byte| {
        let [high, _] = crc.to_be_bytes();
        crc << 8 ^ TABLE[usize::from(high ^ byte)]
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_those_of_redis() {
        // From the Cluster specification, and from CLUSTER KEYSLOT.
        assert_eq!(crc16(0, b"123456789"), 0x31C3);
        for (name, slot) in [("", 0), ("foo", 12182), ("{user1000}.following", 3443)] {
            assert_eq!(slot_of(name), slot, "{name}");
        }
        assert_eq!(slot_of("a{}b{c}"), crc16(0, b"a{}b{c}") % SLOTS, "an empty tag is none");
        assert_eq!(slot_of("x{foo}y{bar}"), slot_of("foo"));
    }

    #[test]
    fn only_text_in_the_first_braces_is_a_tag() {
        for (name, tag) in [("{a}", "a"), ("shop:{a}", "a"), ("{a}:shop", "a"), ("}{a}", "a")] {
            assert_eq!(tag_of(name), Some(tag), "{name}");
        }
        for name in ["", "shop", "{", "}", "{}", "}{", "{}{a}", "x{}y{a}z}"] {
            assert_eq!(tag_of(name), None, "{name}");
        }
    }

    #[test]
    fn shards_are_evenly_spread_over_the_slots() {
        for shards in [1, 3, 16, 256, 1000] {
            let layout = Layout::sharded("shop", shards).expect("valid");
            for (place, names) in layout.shards().iter().enumerate() {
                let first = place * usize::from(SLOTS) / usize::from(shards);
                let next = (place + 1) * usize::from(SLOTS) / usize::from(shards);
                let slot = usize::from(slot_of(names.space.prefix()));
                assert!((first..=next).contains(&slot), "{slot} of {place} of {shards}");
            }
        }
    }

    /// A change of these names loses every lock of every sharded store.
    #[test]
    fn the_names_of_a_shard_never_change() {
        let layout = Layout::sharded("syncguard", 256).expect("valid");
        let prefix = |place: usize| layout.shards()[place].space.prefix();
        assert_eq!(prefix(0), "{syncguard:0-66}");
        assert_eq!(prefix(255), "{syncguard:255-154}");
        let key = Key::new("invoice:42").expect("valid");
        assert_eq!(layout.place_of(&key), 12);
        assert_eq!(count_name("syncguard"), "{syncguard:shards}:count");
    }
}
