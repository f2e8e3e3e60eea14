//! The names of tables and indexes: validated, quoted, and never longer than the server allows.

use crate::common::error::{Error, Result};
use crate::common::hash_id::hash_key;
use crate::common::key::Key;
use crate::common::sql_name::{self, LIMIT_BYTES};
use crate::common::storage_key::KeySpace;

/// The maximum length of a row's key, which must fit in an index entry.
const LIMIT_KEY_BYTES: usize = 1700;

/// All names of one backend: its tables, and the keys of its rows.
#[derive(Clone, Debug)]
pub(super) struct Names {
    pub(super) locks: TableName,
    pub(super) fences: TableName,
    space: KeySpace,
}

impl Names {
    /// Validates the names of the tables, which must differ.
    pub(super) fn new(locks: &str, fences: &str) -> Result<Self> {
        let (locks, fences) = (TableName::parse(locks)?, TableName::parse(fences)?);
        if locks == fences {
            return Err(Error::invalid("locks and fence counters must be in different tables"));
        }
        Ok(Self { locks, fences, space: KeySpace::new("", LIMIT_KEY_BYTES, 0)? })
    }

    /// Returns the key of a lock's row.
    pub(super) fn lock_key(&self, key: &Key) -> Result<String> {
        self.space.lock_key(key)
    }

    /// Returns the key of a fence counter's row, by the key of its lock's row.
    pub(super) fn fence_key(&self, lock_key: &str) -> Result<String> {
        self.space.fence_key(lock_key)
    }

    /// Returns the channel for notifications of releases.
    pub(super) fn channel(&self) -> String {
        self.locks.channel()
    }
}

/// The name of a table, optionally with a schema.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TableName {
    schema: Option<String>,
    name: String,
}

impl TableName {
    /// Parses `table` or `schema.table`: letters, digits and underscores, not beginning with a
    /// digit.
    pub(super) fn parse(text: &str) -> Result<Self> {
        let (schema, name) = match text.split_once('.') {
            Some((schema, name)) => (Some(schema), name),
            None => (None, text),
        };
        for part in schema.into_iter().chain([name]) {
            sql_name::check(part)?;
        }
        Ok(Self { schema: schema.map(str::to_owned), name: name.to_owned() })
    }

    /// Returns the name as it is written in SQL.
    pub(super) fn quoted(&self) -> String {
        match &self.schema {
            Some(schema) => format!("\"{schema}\".\"{}\"", self.name),
            None => format!("\"{}\"", self.name),
        }
    }

    /// Returns the name of one of its indexes, as it is written in SQL. It is that of the
    /// TypeScript implementation if that fits, and contains a hash if not, to keep it unique.
    pub(super) fn index(&self, what: &str) -> String {
        let plain = format!("idx_{}_{what}", self.name);
        if plain.len() <= LIMIT_BYTES {
            return format!("\"{plain}\"");
        }
        let hash = hash_key(&self.name).as_str().to_owned();
        let room = LIMIT_BYTES
            - plain.len().min(LIMIT_BYTES).min("idx__".len() + what.len() + 1 + hash.len());
        format!("\"idx_{}_{hash}_{what}\"", &self.name[..room.min(self.name.len())])
    }

    /// Returns the channel for notifications about the table.
    fn channel(&self) -> String {
        let name = self
            .schema
            .as_ref()
            .map_or(self.name.clone(), |schema| format!("{schema}.{}", self.name));
        format!("syncguard_{}", hash_key(&name).as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_validated_and_quoted() {
        let table = TableName::parse("billing.locks").expect("valid");
        assert_eq!(table.quoted(), "\"billing\".\"locks\"");
        assert_eq!(table.index("lock_id"), "\"idx_locks_lock_id\"");
        for bad in [
            "",
            ".",
            "a.",
            ".a",
            "a.b.c",
            "1a",
            "a b",
            "a\"b",
            "x\"; drop table y; --",
            "é",
            &"a".repeat(64),
        ] {
            assert!(TableName::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn row_keys_are_those_of_the_key_space() {
        let names = Names::new("locks", "fences").expect("valid");
        for text in ["k", "fence:k", "id:x", &"x".repeat(512), "users/42"] {
            let lock_key = names.lock_key(&Key::new(text).expect("valid")).expect("fits");
            assert_eq!(lock_key, text, "a key always fits");
            assert_eq!(names.fence_key(&lock_key).expect("fits"), format!("fence:{text}"));
        }
        assert!(Names::new("same", "same").is_err());
    }

    #[test]
    fn long_names_have_distinct_indexes_that_fit() {
        let (one, two) = ("a".repeat(62) + "x", "a".repeat(62) + "y");
        let mut seen = std::collections::HashSet::new();
        for name in [one, two] {
            let table = TableName::parse(&name).expect("valid");
            for what in ["lock_id", "expires"] {
                let index = table.index(what);
                assert!(index.len() <= LIMIT_BYTES + 2, "{index}");
                assert!(seen.insert(index));
            }
        }
    }
}
