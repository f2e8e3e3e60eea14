//! Listing and findings of the memory backend.

use std::future::ready;

use super::MemoryBackend;
use crate::common::error::Result;
use crate::common::fence_source::FenceSource;
use crate::common::time::is_live;
use crate::contract::BoxFuture;
use crate::contract::admin::{Admin, Cursor, Page};
use crate::contract::finding::Finding;

impl Admin for MemoryBackend {
    fn list<'a>(&'a self, _after: Option<&'a Cursor>) -> BoxFuture<'a, Result<Page>> {
        let now = self.now();
        let locks = self.store.shards.locks().into_iter();
        let live = locks.filter(|lock| is_live(lock.expires_at, now)).collect();
        Box::pin(ready(Ok(Page::new(live, None))))
    }

    fn findings(&self) -> BoxFuture<'_, Result<Vec<Finding>>> {
        let text = match self.fences {
            FenceSource::Counter => {
                "locks in memory exclude no other process, and fences start at 1 again after a \
                 restart"
            }
            FenceSource::Clock => "locks in memory exclude no other process",
        };
        Box::pin(ready(Ok(vec![Finding::new("memory", text)])))
    }

    fn fence_source(&self) -> FenceSource {
        self.fences
    }
}
