//! Listing and findings of the memory backend.

use std::future::ready;
use std::sync::PoisonError;
use std::time::Duration;

use super::MemoryBackend;
use crate::common::error::{Error, Result};
use crate::common::fence::Fence;
use crate::common::fence_source::FenceSource;
use crate::common::key::Key;
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

    fn collect_fences(&self, idle: Duration) -> BoxFuture<'_, Result<u64>> {
        let age_ms = self.fences.collectable_age_ms(idle);
        let now = self.now();
        Box::pin(ready(
            age_ms
                .map(|age_ms| self.store.shards.collect(self.fences.idle_below(now, age_ms), now)),
        ))
    }

    fn check_fence<'a>(
        &'a self,
        resource: &'a Key,
        fence: Fence,
        key: Option<&'a Key>,
    ) -> BoxFuture<'a, Result<()>> {
        let mut resources = self.store.resources.lock().unwrap_or_else(PoisonError::into_inner);
        let (largest, lock) = resources.get(resource).cloned().unwrap_or((fence, None));
        if let (Some(lock), Some(key)) = (&lock, key)
            && lock != key
        {
            return Box::pin(ready(Err(Error::other_lock())));
        }
        if fence < largest {
            return Box::pin(ready(Err(Error::stale_fence())));
        }
        resources.insert(resource.clone(), (fence, key.cloned().or(lock)));
        Box::pin(ready(Ok(())))
    }

    fn fence_source(&self) -> FenceSource {
        self.fences
    }
}
