//! The names of tables and indexes: validated, quoted, and never longer than the server keeps.

use crate::common::error::{Error, Result};
use crate::common::hash_id::hash_key;

/// The longest name that the server keeps whole.
const LIMIT_BYTES: usize = 63;

/// A table, perhaps in a schema.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TableName {
    schema: Option<String>,
    name: String,
}

impl TableName {
    /// `table` or `schema.table`: letters, digits and underscores, not beginning with a digit.
    pub(super) fn parse(text: &str) -> Result<Self> {
        let (schema, name) = match text.split_once('.') {
            Some((schema, name)) => (Some(schema), name),
            None => (None, text),
        };
        for part in schema.into_iter().chain([name]) {
            let is_letter = |letter: char| letter.is_ascii_alphabetic() || letter == '_';
            let is_name = part.starts_with(is_letter)
                && part.chars().all(|letter| is_letter(letter) || letter.is_ascii_digit());
            if !is_name || part.len() > LIMIT_BYTES {
                return Err(Error::invalid(
                    "a table name has letters, digits and underscores, at most 63 of them, does not \
                     begin with a digit, and may follow a schema and a dot",
                ));
            }
        }
        Ok(Self { schema: schema.map(str::to_owned), name: name.to_owned() })
    }

    /// As it is written in SQL.
    pub(super) fn quoted(&self) -> String {
        match &self.schema {
            Some(schema) => format!("\"{schema}\".\"{}\"", self.name),
            None => format!("\"{}\"", self.name),
        }
    }

    /// An index of it, as it is written in SQL. The name is that of the TypeScript implementation
    /// where it fits, and stays apart from others where it does not.
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

    /// A channel for news about it.
    pub(super) fn channel(&self) -> String {
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
