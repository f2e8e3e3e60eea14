//! Listing and findings of a lock file.

use super::{SqliteBackend, file_system, record};
use crate::common::error::Result;
use crate::common::fence_source::FenceSource;
use crate::contract::BoxFuture;
use crate::contract::admin::{Admin, Cursor, Page};
use crate::contract::finding::Finding;

impl Admin for SqliteBackend {
    fn list<'a>(&'a self, after: Option<&'a Cursor>) -> BoxFuture<'a, Result<Page>> {
        let after = after.map_or_else(String::new, |cursor| cursor.place().to_owned());
        Box::pin(async move {
            let (locks, next) = self.read("list", move |db| record::list(db, &after)).await?;
            Ok(Page::new(locks, next.map(Cursor::new)))
        })
    }

    fn findings(&self) -> BoxFuture<'_, Result<Vec<Finding>>> {
        let found = file_system::findings(&self.shared.path);
        Box::pin(async move { Ok(found) })
    }

    fn fence_source(&self) -> FenceSource {
        self.shared.fences
    }
}
