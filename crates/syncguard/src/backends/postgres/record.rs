//! Parses stored rows, which may be invalid.

use tokio_postgres::Row;

use super::error;
use crate::common::error::{Error, Result};
use crate::common::fence::Fence;
use crate::common::holder::HolderInfo;
use crate::common::key::Key;
use crate::common::lock_id::LockId;
use crate::common::time::{Timestamp, is_live};
use crate::contract::outcome::{AcquireOutcome, Lease, NotHeldReason};
use crate::contract::request::AcquireRequest;
use crate::contract::stored_lock::StoredLock;

/// Converts a time or a fence, which always fits, to the server's signed integer.
pub(super) fn integer(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

pub(super) fn millis(number: i64) -> Result<Timestamp> {
    u64::try_from(number).map(Timestamp::from_millis).map_err(|_cause| Error::foreign_lock())
}

/// Returns a column. A value of another type is an error.
pub(super) fn column<'a, T: tokio_postgres::types::FromSql<'a>>(
    row: &'a Row,
    place: usize,
) -> Result<T> {
    row.try_get(place).map_err(|_cause| error::unexpected_response())
}

pub(super) fn fence(text: &str) -> Result<Fence> {
    text.parse().map_err(|_cause| Error::foreign_lock())
}

/// Parses a stored lock and the server's time. An invalid row is an error, never a panic.
pub(super) fn stored(row: &Row) -> Result<(StoredLock, Timestamp)> {
    let foreign = |_cause| Error::foreign_lock();
    let lock_id = LockId::parse(column(row, 1)?).map_err(foreign)?;
    // The TypeScript implementation leaves the column as the holder before it has written it.
    let holder = column::<Option<&str>>(row, 6)?;
    let holder = holder.and_then(|text| HolderInfo::parse_tagged(text, &lock_id));
    let lock = StoredLock::new(
        Key::new(column::<&str>(row, 0)?).map_err(foreign)?,
        lock_id,
        fence(column(row, 2)?)?,
    )
    .acquired_at(millis(column(row, 3)?)?)
    .expires_at(millis(column(row, 4)?)?)
    .held_by(holder);
    Ok((lock, millis(column(row, 5)?)?))
}

pub(super) fn live(found: Option<(StoredLock, Timestamp)>) -> Option<StoredLock> {
    found.filter(|(lock, now)| is_live(lock.expires_at, *now)).map(|(lock, _)| lock)
}

/// Returns why nothing was changed: there is no row, or it is dead. Fails if it is not a lock.
pub(super) fn absence(row: &Row) -> Result<NotHeldReason> {
    match column::<Option<&str>>(row, 1)? {
        None => Ok(NotHeldReason::NotFound),
        Some(stored) => fence(stored).map(|_| NotHeldReason::Expired),
    }
}

/// Returns the outcome of `acquire`; `None` if the lock looked free but another transaction had the
/// key's advisory lock, or just had it.
pub(super) fn outcome(rows: &[Row], request: &AcquireRequest) -> Result<Option<AcquireOutcome>> {
    let row = rows.first().ok_or_else(error::unexpected_response)?;
    if let Some(taken) = column::<Option<&str>>(row, 0)? {
        let granted = fence(taken)?;
        granted.warn_near_the_end(request.key());
        return Ok(Some(AcquireOutcome::Acquired(Lease::new(granted, millis(column(row, 1)?)?))));
    }
    let now = millis(column(row, 2)?)?;
    if let Some(held_by) = column::<Option<&str>>(row, 3)? {
        LockId::parse(held_by).map_err(|_cause| Error::foreign_lock())?;
        let (stored, expires_at) = (fence(column(row, 4)?)?, millis(column(row, 5)?)?);
        match (held_by == request.lock_id().expose(), is_live(expires_at, now)) {
            (true, true) => {
                return Ok(Some(AcquireOutcome::Acquired(Lease::new(stored, expires_at))));
            }
            (true, false) => return Ok(Some(AcquireOutcome::AlreadyUsed)),
            (false, true) => {
                return Ok(Some(AcquireOutcome::Contended {
                    expires_in: Some(expires_at.dead_in(now)),
                }));
            }
            (false, false) => {}
        }
    }
    let counter = column::<Option<i64>>(row, 6)?.unwrap_or(0);
    Fence::after(u64::try_from(counter).map_err(|_cause| Error::foreign_counter())?)?;
    Ok(None)
}
