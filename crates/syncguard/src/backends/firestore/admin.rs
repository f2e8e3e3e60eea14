//! The database for people: what is held, and what is wrong with the place.

use super::record::Record;
use super::{FirestoreBackend, named};
use crate::common::time::is_live;
use crate::contract::advice::Advice;
use crate::contract::inspect::{Cursor, Inspection, Inspector, Page};

impl Inspector for FirestoreBackend {
    fn list<'a>(&'a self, after: Option<&'a Cursor>) -> Inspection<'a, Page> {
        let after = after.map_or("", Cursor::place);
        Box::pin(async move {
            let listed = self.shared.requests.list(after).await;
            let (documents, next) = listed.map_err(|error| named(error, "list"))?;
            let now = self.shared.requests.now();
            // A malformed document is not listed; the operations on its key say so.
            let records = documents.into_iter().filter_map(|document| Record::read(document).ok());
            let locks = records.map(|record| record.lock);
            let live = locks.filter(|lock| is_live(lock.expires_at, now)).collect();
            Ok(Page::new(live, (!next.is_empty()).then(|| Cursor::new(next))))
        })
    }

    fn advice(&self) -> Inspection<'_, Vec<Advice>> {
        Box::pin(async move {
            self.shared.requests.touch().await.map_err(|error| named(error, "advice"))?;
            let mut found = Vec::new();
            if self.shared.is_emulator {
                found.push(Advice::new(
                    "emulator",
                    "this is an emulator: its locks and fences end with it",
                ));
            }
            if let Some(worst) = self.shared.requests.clock_error() {
                found.push(Advice::new(
                    "clock",
                    format!(
                        "the clock of this machine may be {} ms off firestore's: locks are granted by \
                         it; synchronize it (NTP)",
                        worst.as_millis()
                    ),
                ));
            }
            Ok(found)
        })
    }
}
