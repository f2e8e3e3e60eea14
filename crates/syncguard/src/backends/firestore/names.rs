//! The names of the documents.

use crate::common::error::{Error, Result};
use crate::common::key::Key;
use crate::common::storage_key::KeySpace;

/// Firestore's limit for the length of a document id.
const LONGEST_ID_BYTES: usize = 1500;

/// The names of the documents in one database.
#[derive(Clone, Debug)]
pub(super) struct Names {
    project: String,
    database: String,
    locks: String,
    fences: String,
    space: KeySpace,
}

impl Names {
    /// Validates the configured names.
    pub(super) fn new(project: &str, database: &str, [locks, fences]: [&str; 2]) -> Result<Self> {
        for (what, name) in [("project", project), ("database", database)] {
            if name.is_empty() || name.contains(|letter: char| letter == '/' || letter.is_control())
            {
                return Err(Error::invalid(format!(
                    "invalid {what} name: it must not be empty or contain a slash"
                )));
            }
        }
        for name in [locks, fences] {
            if is_reserved_name(name) || name.is_empty() || name.len() > LONGEST_ID_BYTES {
                return Err(Error::invalid(
                    "invalid collection name: it must not be empty, contain a slash, or be \".\", \
                     \"..\" or \"__…__\"",
                ));
            }
        }
        if locks == fences {
            return Err(Error::invalid(
                "locks and fence counters must be in different collections",
            ));
        }
        Ok(Self {
            project: project.to_owned(),
            database: database.to_owned(),
            locks: locks.to_owned(),
            fences: fences.to_owned(),
            space: KeySpace::new("", LONGEST_ID_BYTES, 0)?,
        })
    }

    /// Returns the full name of the database.
    pub(super) fn database(&self) -> String {
        format!("projects/{}/databases/{}", self.project, self.database)
    }

    /// Returns the parent of the collections.
    pub(super) fn root(&self) -> String {
        format!("{}/documents", self.database())
    }

    /// Returns the routing header's value.
    pub(super) fn routing(&self) -> String {
        form_urlencoded::Serializer::new(String::new())
            .append_pair("project_id", &self.project)
            .append_pair("database_id", &self.database)
            .finish()
    }

    /// Returns the collection of locks.
    pub(super) fn locks(&self) -> &str {
        &self.locks
    }

    /// Returns whether a document is in the collection of locks.
    pub(super) fn is_lock(&self, document: &str) -> bool {
        let id = document.strip_prefix(&format!("{}/{}/", self.root(), self.locks));
        id.is_some_and(|id| !is_reserved_name(id))
    }

    /// Returns the full name of the document with the largest fence of a resource. Ids of counters
    /// begin with `fence:`.
    pub(super) fn resource(&self, resource: &Key) -> String {
        format!("{}/{}/seen:{}", self.root(), self.fences, KeySpace::hashed(resource.as_str()))
    }

    /// Returns the collections of locks and of fence counters.
    pub(super) fn collections(&self) -> [&str; 2] {
        [&self.locks, &self.fences]
    }

    /// Returns the full names of a key's documents: its lock and its fence counter.
    pub(super) fn documents(&self, key: &Key) -> Result<[String; 2]> {
        let [lock, counter] = self.ids(key)?;
        let root = self.root();
        Ok([format!("{root}/{}/{lock}", self.locks), format!("{root}/{}/{counter}", self.fences)])
    }

    /// Returns the ids of a key's documents: its lock and its fence counter.
    pub(super) fn ids(&self, key: &Key) -> Result<[String; 2]> {
        // A key that cannot be an id is stored under its hash, as other stores do with long keys.
        let lock = if is_reserved_name(key.as_str()) {
            KeySpace::hashed(key.as_str())
        } else {
            self.space.lock_key(key)?
        };
        let counter = self.space.fence_key(&lock)?;
        Ok([lock, counter])
    }
}

/// Returns whether Firestore would take this name for a path, or reserves it.
fn is_reserved_name(name: &str) -> bool {
    let is_reserved = name.len() >= 4 && name.starts_with("__") && name.ends_with("__");
    name.contains('/') || name == "." || name == ".." || is_reserved
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_that_cannot_be_ids_are_hashed_and_others_are_not() {
        let names = Names::new("p", "(default)", ["locks", "fence_counters"]).expect("valid");
        let lock = |key: &str| names.ids(&Key::new(key).expect("valid")).expect("fits")[0].clone();
        assert_eq!(lock("users/42"), "Is6-B905M1SIl3IOR6POLA");
        assert_eq!(lock("."), "zbTuKuppzGqDMxu-ltwsqg");
        assert_eq!(lock(".."), "XsH35wDzfD0LKYHQSFX8NA");
        assert_eq!(lock("__x__"), "qRewOx4-WDoNeFxzZBzIiA");
        for plain in ["invoice:42", "...", "__x", "x__", "___", "fence:a", "a b#?%2F"] {
            assert_eq!(lock(plain), plain);
        }
        let [lock, counter] = names.documents(&Key::new("a").expect("valid")).expect("fits");
        assert_eq!(lock, "projects/p/databases/(default)/documents/locks/a");
        assert_eq!(counter, "projects/p/databases/(default)/documents/fence_counters/fence:a");
        assert_eq!(names.routing(), "project_id=p&database_id=%28default%29");
    }

    #[test]
    fn collections_must_differ_and_have_valid_names() {
        for pair in [["", "b"], ["a", ""], ["a", "a"], ["a/b", "c"], ["..", "c"], ["__a__", "c"]] {
            assert!(Names::new("p", "d", pair).is_err(), "{pair:?}");
        }
        for [project, database] in [["", "d"], ["p", ""], ["p/q", "d"], ["p", "d/e"]] {
            assert!(Names::new(project, database, ["a", "b"]).is_err());
        }
    }
}
