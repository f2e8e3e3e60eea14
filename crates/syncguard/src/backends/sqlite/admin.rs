//! Listing and findings of a lock file.

use std::time::Duration;

use rusqlite::Connection;

use super::worker::{Done, Kind};
use super::{SqliteBackend, file_system, record};
use crate::common::error::Result;
use crate::common::fence::Fence;
use crate::common::fence_source::FenceSource;
use crate::common::key::Key;
use crate::common::storage_key::KeySpace;
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

    fn collect_fences(&self, idle: Duration) -> BoxFuture<'_, Result<u64>> {
        Box::pin(async move {
            let fences = self.shared.fences;
            let age_ms = fences.collectable_age_ms(idle)?;
            let (mut deleted, mut after) = (0, Some(String::new()));
            while let Some(key) = after {
                let page = move |db: &Connection| {
                    record::collect_fences(db, &key, fences, age_ms).map(Done::of)
                };
                let (count, next) = self.write("collect_fences", Kind::Write, page).await?;
                deleted += count;
                after = next;
            }
            Ok(deleted)
        })
    }

    fn check_fence<'a>(
        &'a self,
        resource: &'a Key,
        fence: Fence,
        key: Option<&'a Key>,
    ) -> BoxFuture<'a, Result<()>> {
        let resource = resource.clone();
        let lock = key.map_or_else(String::new, |key| KeySpace::hashed(key.as_str()));
        Box::pin(async move {
            let check = move |db: &Connection| {
                record::check_fence(db, resource.as_str(), fence, &lock).map(Done::of)
            };
            self.write("check_fence", Kind::Write, check).await
        })
    }

    fn fence_source(&self) -> FenceSource {
        self.shared.fences
    }
}
