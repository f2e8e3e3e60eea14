//! Acquires one of several locks in one transaction.

use rusqlite::Connection;

use super::record::{self, RowError};
use crate::common::fence_source::FenceSource;
use crate::contract::acquire_any::Soonest;
use crate::contract::outcome::{AcquireAnyOutcome, AcquireOutcome};
use crate::contract::request::AcquireAnyRequest;

/// Returns the outcome if it needs no write, or `None` if one of the locks is free.
pub(super) fn try_without_writing(
    db: &Connection,
    request: &AcquireAnyRequest,
) -> Result<Option<AcquireAnyOutcome>, RowError> {
    let mut soonest = Soonest::default();
    for key in request.keys() {
        match record::try_without_writing(db, &request.for_key(key))? {
            Some(AcquireOutcome::Contended { expires_in }) => soonest.add(expires_in),
            _ => return Ok(None),
        }
    }
    Ok(Some(soonest.contended()))
}

pub(super) fn acquire(
    db: &Connection,
    request: &AcquireAnyRequest,
    fences: FenceSource,
) -> Result<AcquireAnyOutcome, RowError> {
    let mut soonest = Soonest::default();
    for key in request.keys() {
        match record::acquire(db, &request.for_key(key), fences)? {
            AcquireOutcome::Acquired(lease) => {
                return Ok(AcquireAnyOutcome::Acquired { key: key.clone(), lease });
            }
            AcquireOutcome::Contended { expires_in } => soonest.add(expires_in),
            AcquireOutcome::AlreadyUsed => soonest.add(None),
        }
    }
    Ok(soonest.contended())
}
