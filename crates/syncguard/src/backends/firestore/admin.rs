//! Listing and findings of a Firestore database.

use super::record::Record;
use super::{FirestoreBackend, named};
use crate::common::error::Result;
use crate::common::fence_source::FenceSource;
use crate::common::time::is_live;
use crate::contract::BoxFuture;
use crate::contract::admin::{Admin, Cursor, Page};
use crate::contract::finding::Finding;

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

    fn fence_source(&self) -> FenceSource {
        self.shared.fences
    }
}
