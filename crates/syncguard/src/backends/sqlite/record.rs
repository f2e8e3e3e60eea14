//! The rows of the lock file, and the operations on them. A function that writes must be called
//! inside a transaction. The clock is read inside each function, not when the request was made.

use rusqlite::{Connection, OptionalExtension, Row, params};

use crate::common::clock::{Clock, SystemClock};
use crate::common::error::{Error, Result as OurResult};
use crate::common::fence::Fence;
use crate::common::fence_source::FenceSource;
use crate::common::hash_id::HashId;
use crate::common::holder::{BreakNote, HolderInfo};
use crate::common::key::Key;
use crate::common::lock_id::LockId;
use crate::common::time::{CLEANUP_GUARD_MS, Timestamp, is_live};
use crate::contract::outcome::{
    AcquireOutcome, ExtendOutcome, Extension, Lease, NotHeldReason, ReleaseOutcome,
};
use crate::contract::request::{AcquireRequest, ExtendRequest, ReleaseRequest};
use crate::contract::stored_lock::StoredLock;

/// Why an operation failed.
pub(super) enum RowError {
    /// SQLite failed, which fails the transaction.
    Sqlite(rusqlite::Error),
    /// The operation failed before it wrote anything; the transaction continues.
    Refused(Error),
}

impl From<rusqlite::Error> for RowError {
    fn from(error: rusqlite::Error) -> Self {
        Self::Sqlite(error)
    }
}

type Result<T> = std::result::Result<T, RowError>;

/// A row of `syncguard_locks`.
struct Record {
    key: String,
    lock_id: String,
    fence: i64,
    acquired_at_ms: i64,
    expires_at_ms: i64,
    holder: Option<String>,
}

const COLUMNS: &str = "key, lock_id, fence, acquired_at_ms, expires_at_ms, holder";

impl Record {
    fn from_row(row: &Row<'_>) -> rusqlite::Result<Self> {
        Ok(Self {
            key: row.get(0)?,
            lock_id: row.get(1)?,
            fence: row.get(2)?,
            acquired_at_ms: row.get(3)?,
            expires_at_ms: row.get(4)?,
            holder: row.get(5)?,
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

    /// Converts the row to a lock. Invalid columns are an error, never a panic.
    fn open(self) -> Result<StoredLock> {
        let open = || -> OurResult<StoredLock> {
            let millis = |number| u64::try_from(number).map(Timestamp::from_millis);
            let lock_id = LockId::parse(&self.lock_id)?;
            let holder = self.holder.as_deref();
            let holder = holder.and_then(|text| HolderInfo::parse_tagged(text, &lock_id));
            Ok(StoredLock::new(
                Key::new(self.key)?,
                lock_id,
                u64::try_from(self.fence)
                    .map_err(|_| Error::foreign_lock())
                    .and_then(Fence::new)?,
            )
            .acquired_at(millis(self.acquired_at_ms).map_err(|_| Error::foreign_lock())?)
            .expires_at(millis(self.expires_at_ms).map_err(|_| Error::foreign_lock())?)
            .held_by(holder))
        };
        open().map_err(|_cause| RowError::Refused(Error::foreign_lock()))
    }
}

fn now() -> Timestamp {
    SystemClock.now()
}

/// Converts to SQLite's signed integers. No time and no fence of ours is too large.
fn integer(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

fn find_by_key(db: &Connection, key: &Key) -> Result<Option<StoredLock>> {
    Record::by_key(db, key.as_str())?.map(Record::open).transpose()
}

fn find_by_id(db: &Connection, lock_id: LockId) -> Result<Option<StoredLock>> {
    Record::by_id(db, lock_id)?.map(Record::open).transpose()
}

/// Returns the outcome of an acquire if it needs no write, or `None` if the lock is free.
pub(super) fn try_without_writing(
    db: &Connection,
    request: &AcquireRequest,
) -> Result<Option<AcquireOutcome>> {
    let Some(held) = find_by_key(db, request.key())? else { return Ok(None) };
    let now = now();
    Ok(match (held.lock_id == request.lock_id(), is_live(held.expires_at, now)) {
        (true, true) => Some(AcquireOutcome::Acquired(Lease::new(held.token, held.expires_at))),
        (true, false) => Some(AcquireOutcome::AlreadyUsed),
        (false, true) => {
            Some(AcquireOutcome::Contended { expires_in: Some(held.expires_at.dead_in(now)) })
        }
        (false, false) => None,
    })
}

pub(super) fn acquire(
    db: &Connection,
    request: &AcquireRequest,
    fences: FenceSource,
) -> Result<AcquireOutcome> {
    if let Some(outcome) = try_without_writing(db, request)? {
        return Ok(outcome);
    }
    let (key, lock_id) = (request.key(), request.lock_id());
    if Record::by_id(db, lock_id)?.is_some() {
        return Err(RowError::Refused(
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
    let now = now();
    let fence = counter.map_err(|_| Error::foreign_lock());
    let fence = fence.and_then(|counter| fences.next(counter, now)).map_err(RowError::Refused)?;
    let expires_at = now.expiry(request.ttl());
    db.prepare_cached(
        "INSERT INTO syncguard_fences (key, fence) VALUES (?1, ?2)
         ON CONFLICT (key) DO UPDATE SET fence = excluded.fence",
    )?
    .execute(params![key.as_str(), integer(fence.get())])?;
    db.prepare_cached(
        "INSERT OR REPLACE INTO syncguard_locks
           (key, lock_id, fence, acquired_at_ms, expires_at_ms, holder)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
    )?
    .execute(params![
        key.as_str(),
        lock_id.expose(),
        integer(fence.get()),
        integer(now.as_millis()),
        integer(expires_at.as_millis()),
        request.holder().map(|holder| holder.tagged(&lock_id)),
    ])?;
    Ok(AcquireOutcome::Acquired(Lease::new(fence, expires_at)))
}

/// Releases a lock. Returns the outcome, and the key if it is free now.
pub(super) fn release(
    db: &Connection,
    request: &ReleaseRequest,
) -> Result<(ReleaseOutcome, Option<Key>)> {
    let Some(held) = find_by_id(db, request.lock_id())? else {
        return Ok((ReleaseOutcome::NotHeld(NotHeldReason::NotFound), None));
    };
    if !is_live(held.expires_at, now()) {
        return Ok((ReleaseOutcome::NotHeld(NotHeldReason::Expired), None));
    }
    delete(db, held.lock_id)?;
    if let Some(note) = request.break_note() {
        leave_break_note(db, held.lock_id.hash_id(), note)?;
    }
    Ok((ReleaseOutcome::Released, Some(held.key)))
}

/// Stores why a lock was broken, in a table that exists from the first break on.
fn leave_break_note(db: &Connection, lock_id: HashId, note: &BreakNote) -> Result<()> {
    /// Longer than a holder takes to notice.
    const KEPT_MS: u64 = 600_000;
    db.execute_batch(
        "CREATE TABLE IF NOT EXISTS syncguard_breaks (
           lock_id_hash TEXT PRIMARY KEY, note TEXT NOT NULL, broken_at_ms INTEGER NOT NULL
         ) STRICT, WITHOUT ROWID",
    )?;
    let now_ms = now().as_millis();
    db.prepare_cached("DELETE FROM syncguard_breaks WHERE broken_at_ms < ?1")?
        .execute([integer(now_ms.saturating_sub(KEPT_MS))])?;
    db.prepare_cached("INSERT OR REPLACE INTO syncguard_breaks VALUES (?1, ?2, ?3)")?
        .execute(params![lock_id.as_str(), note.to_text(), integer(now_ms)])?;
    Ok(())
}

/// Returns why a lock was broken, if it was.
pub(super) fn break_note(db: &Connection, lock_id: HashId) -> Result<Option<BreakNote>> {
    let query = "SELECT count(*) FROM sqlite_schema WHERE name = 'syncguard_breaks'";
    if !db.query_row(query, [], |row| row.get::<_, bool>(0))? {
        return Ok(None);
    }
    let mut query =
        db.prepare_cached("SELECT note FROM syncguard_breaks WHERE lock_id_hash = ?1")?;
    let note = query.query_row([lock_id.as_str()], |row| row.get::<_, String>(0)).optional()?;
    Ok(note.map(|note| BreakNote::parse(&note)))
}

pub(super) fn extend(db: &Connection, request: &ExtendRequest) -> Result<ExtendOutcome> {
    let Some(held) = find_by_id(db, request.lock_id())? else {
        return Ok(ExtendOutcome::NotHeld(NotHeldReason::NotFound));
    };
    let now = now();
    if !is_live(held.expires_at, now) {
        return Ok(ExtendOutcome::NotHeld(NotHeldReason::Expired));
    }
    let expires_at = now.expiry(request.ttl());
    db.prepare_cached("UPDATE syncguard_locks SET expires_at_ms = ?2 WHERE lock_id = ?1")?
        .execute(params![request.lock_id().expose(), integer(expires_at.as_millis())])?;
    Ok(ExtendOutcome::Extended(Extension::new(expires_at)))
}

/// Returns the live lock of a key.
pub(super) fn lookup_key(db: &Connection, key: &Key) -> Result<Option<StoredLock>> {
    let found = find_by_key(db, key)?;
    Ok(found.filter(|held| is_live(held.expires_at, now())))
}

/// Returns the live lock with an id.
pub(super) fn lookup_id(db: &Connection, lock_id: LockId) -> Result<Option<StoredLock>> {
    let found = find_by_id(db, lock_id)?;
    Ok(found.filter(|held| is_live(held.expires_at, now())))
}

/// Returns whether the key is locked, and the record if it has expired.
pub(super) fn is_locked(
    db: &Connection,
    key: &Key,
) -> Result<(bool, Option<(StoredLock, Timestamp)>)> {
    let Some(held) = find_by_key(db, key)? else { return Ok((false, None)) };
    let now = now();
    let is_live = is_live(held.expires_at, now);
    Ok((is_live, (!is_live).then_some((held, now))))
}

/// Deletes a record that expired long enough ago. Never deletes a fence counter.
pub(super) fn clean_up(db: &Connection, lock_id: LockId) -> Result<()> {
    if let Some(held) = find_by_id(db, lock_id)?
        && now().since(held.expires_at).as_millis() > u128::from(CLEANUP_GUARD_MS)
    {
        delete(db, lock_id)?;
    }
    Ok(())
}

/// Returns a page of live locks in the order of their keys, starting behind `after`, and the last
/// key if there may be more.
pub(super) fn list(db: &Connection, after: &str) -> Result<(Vec<StoredLock>, Option<String>)> {
    const PAGE: usize = 200;
    let query =
        format!("SELECT {COLUMNS} FROM syncguard_locks WHERE key > ?1 ORDER BY key LIMIT ?2");
    let mut statement = db.prepare_cached(&query)?;
    let records = statement.query_map(params![after, integer(PAGE as u64)], Record::from_row)?;
    let records = records.collect::<rusqlite::Result<Vec<_>>>()?;
    let next = (records.len() == PAGE).then(|| records[PAGE - 1].key.clone());
    let now = now();
    // An invalid row is not listed; operations on its key report the error.
    let locks = records.into_iter().filter_map(|record| record.open().ok());
    Ok((locks.filter(|held| is_live(held.expires_at, now)).collect(), next))
}

/// Deletes the idle counters of a page in the order of their keys, starting behind `after`. Returns
/// how many, and the last key of the page if there may be more.
pub(super) fn collect_fences(
    db: &Connection,
    after: &str,
    fences: FenceSource,
    age_ms: u64,
) -> Result<(u64, Option<String>)> {
    const PAGE: usize = 500;
    let limit = integer(fences.idle_below(now(), age_ms));
    let mut page = db.prepare_cached(
        "SELECT key, fence FROM syncguard_fences WHERE key > ?1 ORDER BY key LIMIT ?2",
    )?;
    let page = page.query_map(params![after, integer(PAGE as u64)], |row| {
        Ok((row.get::<_, String>(0)?, row.get::<_, i64>(1)?))
    })?;
    let page = page.collect::<rusqlite::Result<Vec<_>>>()?;
    let mut delete = db.prepare_cached("DELETE FROM syncguard_fences WHERE key = ?1")?;
    let mut deleted = 0;
    for (key, _) in page.iter().filter(|(_, fence)| (0..limit).contains(fence)) {
        deleted += delete.execute([key])? as u64;
    }
    Ok((deleted, (page.len() == PAGE).then(|| page[PAGE - 1].0.clone())))
}

/// Checks the fence of a resource and remembers it, in a table that exists from the first check on.
/// `lock` is the hash of the lock's key, or empty.
pub(super) fn check_fence(db: &Connection, resource: &str, fence: Fence, lock: &str) -> Result<()> {
    db.execute_batch(
        "CREATE TABLE IF NOT EXISTS syncguard_resources (
           name TEXT PRIMARY KEY, fence INTEGER NOT NULL, lock TEXT NOT NULL
         ) STRICT, WITHOUT ROWID",
    )?;
    let mut seen =
        db.prepare_cached("SELECT fence, lock FROM syncguard_resources WHERE name = ?1")?;
    let seen = seen.query_row([resource], |row| Ok((row.get(0)?, row.get(1)?)));
    let (largest, other) = seen.optional()?.unwrap_or((0, String::new()));
    if !lock.is_empty() && !other.is_empty() && lock != other {
        return Err(RowError::Refused(Error::other_lock()));
    }
    if i64::from(fence) < largest {
        return Err(RowError::Refused(Error::stale_fence()));
    }
    let lock = if lock.is_empty() { &other } else { lock };
    db.prepare_cached("INSERT OR REPLACE INTO syncguard_resources VALUES (?1, ?2, ?3)")?
        .execute(params![resource, i64::from(fence), lock])?;
    Ok(())
}

fn delete(db: &Connection, lock_id: LockId) -> rusqlite::Result<usize> {
    db.prepare_cached("DELETE FROM syncguard_locks WHERE lock_id = ?1")?.execute([lock_id.expose()])
}

#[cfg(test)]
mod tests {
    use rusqlite::types::Value;

    use super::*;
    use crate::common::ttl::Ttl;

    /// Splits an input into cells, each with a type and a content.
    fn cells(input: &[u8]) -> [Value; 5] {
        let mut parts = input.split(|&byte| byte == b'|');
        [(); 5].map(|()| match parts.next().and_then(<[u8]>::split_first) {
            None => Value::Null,
            Some((b't', text)) => Value::Text(String::from_utf8_lossy(text).into_owned()),
            Some((b'i', number)) => {
                let number = str::from_utf8(number).ok().and_then(|number| number.parse().ok());
                Value::Integer(number.unwrap_or(i64::MIN))
            }
            Some((b'r', number)) => {
                let number = str::from_utf8(number).ok().and_then(|number| number.parse().ok());
                Value::Real(number.unwrap_or(f64::INFINITY))
            }
            Some((_, bytes)) => Value::Blob(bytes.to_vec()),
        })
    }

    #[test]
    fn no_row_panics() {
        let seeds: [&[u8]; 4] = [
            b"tk|tWERfqnNu2ScFxRRPeY_ufw|i7|i1794769120208|i9000000000000",
            b"tk|tWERfqnNu2ScFxRRPeY_ufw|i7|i1|i2",
            b"bk|r1.5|i-1|i-1|i9223372036854775807",
            b"tk|tWERfqnNu2ScFxRRPeY_ufw|i999999999999999|i0|i9223372036854775807",
        ];
        let db = Connection::open_in_memory().expect("SQLite");
        // As in `schema.sql`, but with cells of any type.
        db.execute_batch(
            "CREATE TABLE syncguard_locks (key, lock_id, fence, acquired_at_ms, expires_at_ms);
             CREATE TABLE syncguard_fences (key PRIMARY KEY, fence);",
        )
        .expect("tables");
        let key = Key::new("k").expect("valid");
        let lock_id = LockId::parse("WERfqnNu2ScFxRRPeY_ufw").expect("valid");
        let request = AcquireRequest::new(key.clone(), Ttl::DEFAULT).expect("random");
        test_support::fuzz("sqlite_row", env!("CARGO_MANIFEST_DIR"), seeds, |input| {
            db.execute_batch("DELETE FROM syncguard_locks; DELETE FROM syncguard_fences")
                .expect("");
            let cells = cells(input);
            let insert = "INSERT INTO syncguard_locks VALUES (?1, ?2, ?3, ?4, ?5)";
            let mut insert = db.prepare_cached(insert).expect("valid");
            insert.execute(rusqlite::params_from_iter(&cells)).expect("inserted");
            let mut counter =
                db.prepare_cached("INSERT INTO syncguard_fences VALUES ('k', ?1)").expect("valid");
            counter.execute([&cells[2]]).expect("inserted");
            let shape = |error: Option<RowError>| match error {
                None => String::new(),
                Some(RowError::Sqlite(error)) => format!("{error} "),
                Some(RowError::Refused(error)) => format!("{} ", error.message()),
            };
            let extend = ExtendRequest::new(lock_id, Ttl::DEFAULT);
            [
                shape(lookup_key(&db, &key).err()),
                shape(lookup_id(&db, lock_id).err()),
                shape(is_locked(&db, &key).err()),
                shape(list(&db, "").err()),
                shape(super::extend(&db, &extend).err()),
                shape(acquire(&db, &request, FenceSource::Counter).err()),
                shape(release(&db, &ReleaseRequest::new(lock_id)).err()),
                shape(clean_up(&db, lock_id).err()),
            ]
            .concat()
        });
    }
}
