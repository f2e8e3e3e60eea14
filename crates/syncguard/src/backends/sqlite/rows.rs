//! The rows of the file, and what operations do to them. Every function here is called inside a
//! transaction, and reads this machine's clock there.

use rusqlite::{Connection, OptionalExtension, Row, params};

use crate::common::clock::{Clock, SystemClock};
use crate::common::error::{Error, Result as OurResult};
use crate::common::fence::Fence;
use crate::common::key::Key;
use crate::common::lock_id::LockId;
use crate::common::time::{CLEANUP_GUARD_MS, Timestamp, is_live};
use crate::contract::outcome::{Absence, Acquire, Extend, Extension, Lease, Release};
use crate::contract::request::{AcquireRequest, ExtendRequest, ReleaseRequest};
use crate::contract::stored_lock::StoredLock;

/// Why an operation did not come to its end.
pub(super) enum Trouble {
    /// SQLite failed, and with it the transaction.
    Sqlite(rusqlite::Error),
    /// The operation refused before it wrote anything; the transaction goes on.
    Refused(Error),
}

impl From<rusqlite::Error> for Trouble {
    fn from(error: rusqlite::Error) -> Self {
        Self::Sqlite(error)
    }
}

type Result<T> = std::result::Result<T, Trouble>;

/// A lock as it is stored.
struct Record {
    key: String,
    lock_id: String,
    fence: i64,
    acquired_at_ms: i64,
    expires_at_ms: i64,
}

const COLUMNS: &str = "key, lock_id, fence, acquired_at_ms, expires_at_ms";

impl Record {
    fn from_row(row: &Row<'_>) -> rusqlite::Result<Self> {
        Ok(Self {
            key: row.get(0)?,
            lock_id: row.get(1)?,
            fence: row.get(2)?,
            acquired_at_ms: row.get(3)?,
            expires_at_ms: row.get(4)?,
        })
    }

    fn by_key(db: &Connection, key: &str) -> rusqlite::Result<Option<Self>> {
        let query = format!("SELECT {COLUMNS} FROM syncguard_locks WHERE key = ?1");
        db.prepare_cached(&query)?.query_row([key], Self::from_row).optional()
    }

    fn by_id(db: &Connection, lock_id: LockId) -> rusqlite::Result<Option<Self>> {
        let query = format!("SELECT {COLUMNS} FROM syncguard_locks WHERE lock_id = ?1");
        db.prepare_cached(&query)?.query_row([lock_id.expose()], Self::from_row).optional()
    }

    /// The record as a lock; what makes no sense is an error, never a panic.
    fn open(self) -> Result<StoredLock> {
        let open = || -> OurResult<StoredLock> {
            let millis = |number| u64::try_from(number).map(Timestamp::from_millis);
            Ok(StoredLock::new(
                Key::new(self.key)?,
                LockId::parse(&self.lock_id)?,
                u64::try_from(self.fence)
                    .map_err(|_| Error::foreign_lock())
                    .and_then(Fence::new)?,
                millis(self.acquired_at_ms).map_err(|_| Error::foreign_lock())?,
                millis(self.expires_at_ms).map_err(|_| Error::foreign_lock())?,
            ))
        };
        open().map_err(|_cause| Trouble::Refused(Error::foreign_lock()))
    }
}

fn now() -> Timestamp {
    SystemClock.now()
}

/// SQLite's integers have a sign; no time and no fence of ours needs it.
fn integer(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

fn find_by_key(db: &Connection, key: &Key) -> Result<Option<StoredLock>> {
    Record::by_key(db, key.as_str())?.map(Record::open).transpose()
}

fn find_by_id(db: &Connection, lock_id: LockId) -> Result<Option<StoredLock>> {
    Record::by_id(db, lock_id)?.map(Record::open).transpose()
}

/// What an acquire can say without writing: `None` when the lock is free.
pub(super) fn try_without_writing(
    db: &Connection,
    request: &AcquireRequest,
) -> Result<Option<Acquire>> {
    let Some(held) = find_by_key(db, request.key())? else { return Ok(None) };
    let now = now();
    Ok(match (held.lock_id == request.lock_id(), is_live(held.expires_at, now)) {
        (true, true) => Some(Acquire::Acquired(Lease::new(held.token, held.expires_at))),
        (true, false) => Some(Acquire::Spent),
        (false, true) => Some(Acquire::Contended { free_in: Some(held.expires_at.dead_in(now)) }),
        (false, false) => None,
    })
}

pub(super) fn acquire(db: &Connection, request: &AcquireRequest) -> Result<Acquire> {
    if let Some(outcome) = try_without_writing(db, request)? {
        return Ok(outcome);
    }
    let (key, lock_id) = (request.key(), request.lock_id());
    if Record::by_id(db, lock_id)?.is_some() {
        return Err(Trouble::Refused(
            Error::new(
                crate::common::error::ErrorCode::Internal,
                "the lock id is already in use; nothing was changed",
            )
            .without_effect(),
        ));
    }
    let mut counter = db.prepare_cached("SELECT fence FROM syncguard_fences WHERE key = ?1")?;
    let counter: Option<i64> = counter.query_row([key.as_str()], |row| row.get(0)).optional()?;
    let counter = u64::try_from(counter.unwrap_or(0));
    let fence = counter.map_err(|_| Error::foreign_lock()).and_then(Fence::after);
    let fence = fence.map_err(Trouble::Refused)?;
    let now = now();
    let expires_at = now.expiry(request.ttl());
    db.prepare_cached(
        "INSERT INTO syncguard_fences (key, fence) VALUES (?1, ?2)
         ON CONFLICT (key) DO UPDATE SET fence = excluded.fence",
    )?
    .execute(params![key.as_str(), integer(fence.get())])?;
    db.prepare_cached(
        "INSERT OR REPLACE INTO syncguard_locks
           (key, lock_id, fence, acquired_at_ms, expires_at_ms) VALUES (?1, ?2, ?3, ?4, ?5)",
    )?
    .execute(params![
        key.as_str(),
        lock_id.expose(),
        integer(fence.get()),
        integer(now.as_millis()),
        integer(expires_at.as_millis()),
    ])?;
    Ok(Acquire::Acquired(Lease::new(fence, expires_at)))
}

/// The outcome, and the key that is free now.
pub(super) fn release(db: &Connection, request: &ReleaseRequest) -> Result<(Release, Option<Key>)> {
    let Some(held) = find_by_id(db, request.lock_id())? else {
        return Ok((Release::NotHeld(Absence::NotFound), None));
    };
    if !is_live(held.expires_at, now()) {
        return Ok((Release::NotHeld(Absence::Expired), None));
    }
    delete(db, held.lock_id)?;
    Ok((Release::Released, Some(held.key)))
}

pub(super) fn extend(db: &Connection, request: &ExtendRequest) -> Result<Extend> {
    let Some(held) = find_by_id(db, request.lock_id())? else {
        return Ok(Extend::NotHeld(Absence::NotFound));
    };
    let now = now();
    if !is_live(held.expires_at, now) {
        return Ok(Extend::NotHeld(Absence::Expired));
    }
    let expires_at = now.expiry(request.ttl());
    db.prepare_cached("UPDATE syncguard_locks SET expires_at_ms = ?2 WHERE lock_id = ?1")?
        .execute(params![request.lock_id().expose(), integer(expires_at.as_millis())])?;
    Ok(Extend::Extended(Extension::new(expires_at)))
}

/// The live lock of a key.
pub(super) fn lookup_key(db: &Connection, key: &Key) -> Result<Option<StoredLock>> {
    let found = find_by_key(db, key)?;
    Ok(found.filter(|held| is_live(held.expires_at, now())))
}

/// The live lock of an id.
pub(super) fn lookup_id(db: &Connection, lock_id: LockId) -> Result<Option<StoredLock>> {
    let found = find_by_id(db, lock_id)?;
    Ok(found.filter(|held| is_live(held.expires_at, now())))
}

/// Whether the key is locked, and what is there if it is dead.
pub(super) fn is_locked(
    db: &Connection,
    key: &Key,
) -> Result<(bool, Option<(StoredLock, Timestamp)>)> {
    let Some(held) = find_by_key(db, key)? else { return Ok((false, None)) };
    let now = now();
    let is_live = is_live(held.expires_at, now);
    Ok((is_live, (!is_live).then_some((held, now))))
}

/// Deletes a record that has been dead for long. Never a counter.
pub(super) fn clean_up(db: &Connection, lock_id: LockId) -> Result<()> {
    if let Some(held) = find_by_id(db, lock_id)?
        && now().since(held.expires_at).as_millis() > u128::from(CLEANUP_GUARD_MS)
    {
        delete(db, lock_id)?;
    }
    Ok(())
}

/// Live locks with keys after `after`, in order, and the last key when there may be more.
pub(super) fn list(db: &Connection, after: &str) -> Result<(Vec<StoredLock>, Option<String>)> {
    const PAGE: usize = 200;
    let query =
        format!("SELECT {COLUMNS} FROM syncguard_locks WHERE key > ?1 ORDER BY key LIMIT ?2");
    let mut statement = db.prepare_cached(&query)?;
    let records = statement.query_map(params![after, integer(PAGE as u64)], Record::from_row)?;
    let records = records.collect::<rusqlite::Result<Vec<_>>>()?;
    let next = (records.len() == PAGE).then(|| records[PAGE - 1].key.clone());
    let now = now();
    // A row that makes no sense is no lock; the operations on its key say so.
    let locks = records.into_iter().filter_map(|record| record.open().ok());
    Ok((locks.filter(|held| is_live(held.expires_at, now)).collect(), next))
}

fn delete(db: &Connection, lock_id: LockId) -> rusqlite::Result<usize> {
    db.prepare_cached("DELETE FROM syncguard_locks WHERE lock_id = ?1")?.execute([lock_id.expose()])
}
