//! Listing and findings of a Firestore database.

use std::time::Duration;

use super::record::Record;
use super::requests::{self, Commit};
use super::{FirestoreBackend, fenced, named};
use crate::common::error::Result;
use crate::common::fence::Fence;
use crate::common::fence_source::FenceSource;
use crate::common::key::Key;
use crate::common::storage_key::KeySpace;
use crate::common::time::is_live;
use crate::contract::BoxFuture;
use crate::contract::admin::{Admin, Cursor, Page};
use crate::contract::finding::Finding;

impl FirestoreBackend {
    async fn collect_idle_fences(&self, age_ms: u64) -> Result<u64> {
        const PAGE: i32 = 200;
        let requests = &self.shared.requests;
        // If the clock is off, a counter may only look idle.
        requests.approve_clock().await?;
        let limit = Fence::new(self.shared.fences.idle_below(requests.now(), age_ms))?;
        let mut deleted = 0;
        loop {
            let page = requests.counters_below(limit, PAGE).await?;
            let deletions: Vec<_> = page
                .iter()
                .filter_map(|counter| Some(requests::delete(&counter.name, counter.update_time?)))
                .collect();
            let count = deletions.len() as u64;
            let mut done = 0;
            match requests.commit(deletions.clone()).await? {
                Commit::Done(_) => done = count,
                // A counter was used meanwhile. Delete the others one by one.
                Commit::Conflict(_) => {
                    for deletion in deletions {
                        let outcome = requests.commit(vec![deletion]).await?;
                        done += u64::from(matches!(outcome, Commit::Done(_)));
                    }
                }
            }
            deleted += done;
            if done == 0 || page.len() < PAGE as usize {
                return Ok(deleted);
            }
        }
    }
}

impl Admin for FirestoreBackend {
    fn list<'a>(&'a self, after: Option<&'a Cursor>) -> BoxFuture<'a, Result<Page>> {
        let after = after.map_or("", Cursor::place);
        Box::pin(async move {
            let listed = self.shared.requests.list(after).await;
            let (documents, next) = listed.map_err(|error| named(error, "list"))?;
            let now = self.shared.requests.now();
            // A malformed document is not listed; operations on its key report the error.
            let records = documents.into_iter().filter_map(|document| Record::read(document).ok());
            let locks = records.map(|record| record.lock);
            let live = locks.filter(|lock| is_live(lock.expires_at, now)).collect();
            Ok(Page::new(live, (!next.is_empty()).then(|| Cursor::new(next))))
        })
    }

    fn findings(&self) -> BoxFuture<'_, Result<Vec<Finding>>> {
        Box::pin(async move {
            self.shared.requests.touch().await.map_err(|error| named(error, "findings"))?;
            let mut found = Vec::new();
            if self.shared.is_emulator {
                let text = match self.shared.fences {
                    FenceSource::Counter => {
                        "this is an emulator: its locks and fences are lost when it stops"
                    }
                    FenceSource::Clock => "this is an emulator: its locks are lost when it stops",
                };
                found.push(Finding::new("emulator", text));
            }
            if let Some(worst) = self.shared.requests.clock_error() {
                found.push(Finding::new(
                    "clock",
                    format!(
                        "the clock of this machine may differ from Firestore's by {} ms, and locks \
                         are granted by it; synchronize it (NTP)",
                        worst.as_millis()
                    ),
                ));
            }
            Ok(found)
        })
    }

    fn collect_fences(&self, idle: Duration) -> BoxFuture<'_, Result<u64>> {
        Box::pin(async move {
            let age_ms = self.shared.fences.collectable_age_ms(idle)?;
            let collected = self.collect_idle_fences(age_ms).await;
            collected.map_err(|error| named(error, "collect_fences"))
        })
    }

    fn check_fence<'a>(
        &'a self,
        resource: &'a Key,
        fence: Fence,
        key: Option<&'a Key>,
    ) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move {
            let document = self.shared.names.resource(resource);
            let lock = key.map_or_else(String::new, |key| KeySpace::hashed(key.as_str()));
            let requests = &self.shared.requests;
            let checked = fenced::commit(requests, &document, fence, &lock, &[]).await;
            checked.map_err(|error| named(error, "check_fence"))
        })
    }

    fn fence_source(&self) -> FenceSource {
        self.shared.fences
    }
}
