//! The file: opened, created, checked, and opened again when somebody has put another in its place.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rusqlite::{Connection, OpenFlags, TransactionBehavior};

use super::error;
use crate::common::backoff::random_fraction;
use crate::common::error::{Error, ErrorCode, Result};

/// Marks a file as ours, in its header.
const APPLICATION_ID: i32 = i32::from_be_bytes(*b"SGLK");
/// The version of `schema.sql`.
const SCHEMA_VERSION: i32 = 1;

/// The file and the connection to it.
#[derive(Debug)]
pub(super) struct LockFile {
    path: PathBuf,
    open: Option<(Connection, Identity)>,
}

/// Which file it is, whatever its name.
type Identity = (u64, u64);

impl LockFile {
    pub(super) fn new(path: PathBuf) -> Self {
        Self { path, open: None }
    }

    /// The connection to the file that is at the path now.
    pub(super) fn connection(&mut self, give_up_at: Instant) -> Result<&mut Connection> {
        let is_current =
            self.open.as_ref().is_some_and(|(_, opened)| identity(&self.path) == Some(*opened));
        if !is_current {
            if self.open.take().is_some() {
                tracing::warn!(
                    "the lock file was replaced; locks that were in the old one are lost"
                );
            }
            let connection = patiently(give_up_at, || open(&self.path))?;
            let identity = identity(&self.path).ok_or_else(replaced)?;
            self.open = Some((connection, identity));
        }
        self.open.as_mut().map(|(connection, _)| connection).ok_or_else(replaced)
    }
}

fn replaced() -> Error {
    let message = "the lock file was deleted while it was opened";
    Error::new(ErrorCode::ServiceUnavailable, message).without_effect()
}

#[cfg(unix)]
fn identity(path: &Path) -> Option<Identity> {
    use std::os::unix::fs::MetadataExt;
    let metadata = std::fs::metadata(path).ok()?;
    Some((metadata.dev(), metadata.ino()))
}

#[cfg(not(unix))]
fn identity(path: &Path) -> Option<Identity> {
    std::fs::metadata(path).ok().map(|_| (0, 0))
}

/// Whether the file is on another machine's disk, where neither its locks nor wake-ups are reliable.
#[cfg(target_os = "linux")]
pub(super) fn is_remote(path: &Path) -> bool {
    /// NFS, SMB (three generations), 9p, AFS, Ceph, FUSE (sshfs and others).
    const REMOTE: [u32; 8] = [
        0x6969,
        0x517B,
        0xFF53_4D42,
        0xFE53_4D42,
        0x0102_1997,
        0x5346_414F,
        0x00C3_6400,
        0x6573_5546,
    ];
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let found = rustix::fs::statfs(folder.unwrap_or(Path::new(".")));
    // Only the lower half is the number that is documented.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the lower half")]
    found.is_ok_and(|found| REMOTE.contains(&(found.f_type as u32)))
}

#[cfg(not(target_os = "linux"))]
pub(super) fn is_remote(_path: &Path) -> bool {
    false
}

/// A short sleep between two tries, of random length, so that no process is always too late.
pub(super) fn pause() {
    const SHORTEST: Duration = Duration::from_micros(100);
    const SPREAD: Duration = Duration::from_micros(900);
    std::thread::sleep(SHORTEST + SPREAD.mul_f64(random_fraction()));
}

/// Tries again while the file is busy.
fn patiently<T>(give_up_at: Instant, mut act: impl FnMut() -> Result<T>) -> Result<T> {
    loop {
        match act() {
            Err(error)
                if error.code() == ErrorCode::NetworkTimeout && Instant::now() < give_up_at =>
            {
                pause();
            }
            outcome => return outcome,
        }
    }
}

fn open(path: &Path) -> Result<Connection> {
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE
        | OpenFlags::SQLITE_OPEN_CREATE
        | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let failed = |cause: rusqlite::Error| error::map(&cause);
    let mut db = Connection::open_with_flags(path, flags).map_err(failed)?;
    // We wait ourselves, in slices, so that a release is never behind another's patience.
    db.busy_timeout(Duration::ZERO).map_err(failed)?;
    // SQLite opens a file that may not be written for reading, without a word.
    if db.is_readonly("main").map_err(failed)? {
        return Err(error::map(&rusqlite::Error::SqliteFailure(
            rusqlite::ffi::Error::new(rusqlite::ffi::SQLITE_READONLY),
            None,
        )));
    }
    // In one snapshot, because another process may be creating the tables.
    let has_tables = is_ours(&*db.unchecked_transaction().map_err(failed)?)?;
    let mode: String = db
        .pragma_update_and_check(None, "journal_mode", "WAL", |row| row.get(0))
        .map_err(failed)?;
    if !mode.eq_ignore_ascii_case("wal") {
        let message = "the file system of the lock file cannot do what SQLite's WAL needs";
        return Err(Error::invalid(message));
    }
    if !has_tables {
        create(&mut db)?;
    }
    db.pragma_update(None, "synchronous", "FULL").map_err(failed)?;
    Ok(db)
}

/// Whether the file has our tables. Refuses a file of another program, or of a later version. To be
/// asked inside a transaction.
fn is_ours(db: &Connection) -> Result<bool> {
    let number = |name: &str| -> Result<i32> {
        db.pragma_query_value(None, name, |row| row.get(0)).map_err(|cause| error::map(&cause))
    };
    match (number("application_id")?, number("user_version")?) {
        (APPLICATION_ID, SCHEMA_VERSION) => Ok(true),
        (APPLICATION_ID, _) => {
            Err(Error::invalid("the lock file was written by a later version of this library"))
        }
        _ => {
            let tables = "SELECT count(*) FROM sqlite_schema";
            let tables: i64 =
                db.query_row(tables, [], |row| row.get(0)).map_err(|cause| error::map(&cause))?;
            if tables > 0 {
                return Err(Error::invalid(
                    "this file is the database of another program; locks need a file of their own",
                ));
            }
            Ok(false)
        }
    }
}

/// Creates the tables, unless another process was faster.
fn create(db: &mut Connection) -> Result<()> {
    let failed = |cause: rusqlite::Error| error::map(&cause);
    let transaction =
        db.transaction_with_behavior(TransactionBehavior::Immediate).map_err(failed)?;
    if !is_ours(&transaction)? {
        transaction.execute_batch(include_str!("schema.sql")).map_err(failed)?;
        transaction.pragma_update(None, "application_id", APPLICATION_ID).map_err(failed)?;
        transaction.pragma_update(None, "user_version", SCHEMA_VERSION).map_err(failed)?;
    }
    transaction.commit().map_err(failed)
}
