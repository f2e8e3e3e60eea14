//! The names of a lock's records.

use super::config::RedisConfig;
use crate::common::error::{Error, Result};
use crate::common::key::Key;
use crate::common::lock_id::LockId;
use crate::common::storage_key::KeySpace;

/// The ends of the names next to an index entry: of the note of a break, and of the largest fence
/// of a resource.
const BROKEN: &str = ":broken";
const SEEN: &str = ":seen";

/// The names of the records with one prefix.
#[derive(Clone, Debug)]
pub(super) struct Names {
    pub(super) space: KeySpace,
    /// A user key that begins with this would name the fence counter of another key.
    reserved: String,
}

impl Names {
    /// Creates the names with a prefix.
    pub(super) fn with_prefix(prefix: &str) -> Result<Self> {
        let (limit_bytes, reserve_bytes) = (RedisConfig::LIMIT_BYTES, RedisConfig::RESERVE_BYTES);
        Self::new(KeySpace::new(prefix, limit_bytes, reserve_bytes)?)
    }

    /// Creates the names in a key space. Fails if not even an index key fits after the prefix, so
    /// that `connect` fails and not every lock.
    fn new(space: KeySpace) -> Result<Self> {
        let reserved = match space.prefix() {
            "" => "fence:".to_owned(),
            prefix => format!("fence:{prefix}:"),
        };
        space.index_key(&LockId::parse("AAAAAAAAAAAAAAAAAAAAAA")?)?;
        Ok(Self { space, reserved })
    }

    /// Returns where the lock of `key` is stored. Fails if the key is reserved.
    pub(super) fn lock_key(&self, key: &Key) -> Result<String> {
        if key.as_str().starts_with(&self.reserved) {
            return Err(Error::invalid(
                "keys that begin with \"fence:\" and the prefix are reserved for fence counters; \
                 use another key",
            )
            .with_key(key));
        }
        if names_an_internal_record(key) {
            return Err(Error::invalid(
                "keys of the form \"id:<22 characters>:seen\" and \"…:broken\" are reserved for \
                 internal records; use another key",
            )
            .with_key(key));
        }
        self.space.lock_key(key)
    }

    /// Returns where the note of a break is stored, next to the index entry of the lock id.
    pub(super) fn break_marker(&self, lock_id: &LockId) -> Result<String> {
        Ok(format!("{}{BROKEN}", self.space.index_key(lock_id)?))
    }

    /// Returns where the largest fence of a resource is stored, next to the index entries.
    pub(super) fn resource(&self, resource: &Key) -> Result<String> {
        let hash = LockId::parse(&KeySpace::hashed(resource.as_str()))?;
        Ok(format!("{}{SEEN}", self.space.index_key(&hash)?))
    }

    /// Returns a pattern that matches the names of all records, for `SCAN`.
    pub(super) fn pattern(&self) -> String {
        let separator = if self.space.prefix().is_empty() { "" } else { ":" };
        escaped(self.space.prefix()) + separator + "*"
    }

    /// Returns a pattern that matches the names of the fence counters, except hashed ones. Fails
    /// without a prefix, where it could match data of other programs.
    pub(super) fn counter_pattern(&self) -> Result<String> {
        match self.space.prefix() {
            "" => Err(Error::invalid(
                "without a prefix, fence counters cannot be distinguished from other data, so none \
                 are deleted; set fence_expiry, or delete old counters yourself",
            )),
            prefix => Ok(format!("{}:{}*", escaped(prefix), escaped(&self.reserved))),
        }
    }
}

/// Whether a user key would name a record next to an index entry.
fn names_an_internal_record(key: &Key) -> bool {
    let id = key.as_str().strip_prefix("id:");
    let id = id.and_then(|id| id.strip_suffix(BROKEN).or_else(|| id.strip_suffix(SEEN)));
    id.is_some_and(|id| LockId::parse(id).is_ok())
}

/// Returns a pattern that matches the names of all records of all shards, for `SCAN`.
pub(super) fn pattern_of_shards(prefix: &str) -> String {
    format!("{{{}:*-*}}:*", escaped(prefix))
}

/// Returns a pattern that matches the names of the fence counters of all shards, except hashed
/// ones.
pub(super) fn counter_pattern_of_shards(prefix: &str) -> String {
    let shard = format!("{{{}:*-*}}:", escaped(prefix));
    format!("{shard}fence:{shard}*")
}

/// Escapes a text for `SCAN`.
fn escaped(text: &str) -> String {
    let mut pattern = String::new();
    for letter in text.chars() {
        if matches!(letter, '*' | '?' | '[' | ']' | '\\' | '^' | '-') {
            pattern.push('\\');
        }
        pattern.push(letter);
    }
    pattern
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::common::error::ErrorCode;

    #[test]
    fn no_user_key_names_an_internal_record() {
        let names = Names::with_prefix("shop").expect("valid");
        let id = LockId::parse("AAECAwQFBgcICQoLDA0ODw").expect("valid");
        let resource = names.resource(&Key::new("invoices").expect("valid")).expect("fits");
        let internal = [
            names.space.fence_key("shop:k").expect("fits"),
            names.break_marker(&id).expect("fits"),
            resource,
        ];
        for name in internal {
            let key = Key::new(name.strip_prefix("shop:").expect("prefixed")).expect("valid");
            let error = names.lock_key(&key).expect_err("reserved");
            assert_eq!(error.code(), ErrorCode::InvalidArgument);
        }
        for key in ["id:AAECAwQFBgcICQoLDA0ODw", "id:x:seen", "id:AAECAwQFBgcICQoLDA0ODw:other"] {
            let key = Key::new(key).expect("valid");
            assert_eq!(names.lock_key(&key).expect("ordinary"), format!("shop:{}", key.as_str()));
        }
    }
}
