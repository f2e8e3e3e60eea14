//! The lock file: opens it, creates it, checks it, and opens it again when it was replaced.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rusqlite::{Connection, OpenFlags, TransactionBehavior};
#[cfg(unix)]
use rusqlite::{DEFAULT_NAME, FileControl};

use super::error;
use crate::common::backoff::random_fraction;
use crate::common::error::{Error, ErrorCode, Result};

/// Marks a lock file of syncguard, in the file's header.
const APPLICATION_ID: i32 = i32::from_be_bytes(*b"SGLK");
/// The version of `schema.sql`.
const SCHEMA_VERSION: i32 = 1;

/// The lock file and the connection to it.
#[derive(Debug)]
pub(super) struct LockFile {
    path: PathBuf,
    open: Option<OpenFile>,
}

/// A connection and the identity of its file.
#[derive(Debug)]
struct OpenFile {
    db: Connection,
    identity: Identity,
}

/// Device and inode, which identify a file regardless of its name.
type Identity = (u64, u64);

impl LockFile {
    pub(super) fn new(path: PathBuf) -> Self {
        Self { path, open: None }
    }

    /// Returns the connection to the file that is at the path now. Calls `on_replaced` if that is
    /// another file than before.
    pub(super) fn connection(
        &mut self,
        give_up_at: Instant,
        on_replaced: impl FnOnce(),
    ) -> Result<&mut Connection> {
        if !self.is_current() {
            if self.open.take().is_some() {
                tracing::warn!("the lock file was replaced; the locks in the old file are lost");
                on_replaced();
            }
            let path = &self.path;
            let opened = retry_until(give_up_at, || Ok(OpenFile::identify(open(path)?, path)))?;
            self.open = Some(opened);
        }
        self.open.as_mut().map(|open| &mut open.db).ok_or_else(replaced)
    }

    /// Returns whether the connection still uses the file at the path.
    pub(super) fn is_current(&self) -> bool {
        self.open.as_ref().is_some_and(|open| open.is_at(&self.path))
    }
}

impl OpenFile {
    /// Identifies the file that SQLite opened. Returns `None` if it is no longer the file at the
    /// path, because other processes would then lock in another file.
    fn identify(db: Connection, path: &Path) -> Option<Self> {
        // SQLite resolves symbolic links once, so use the name that it resolved.
        let resolved = db.path().map_or_else(|| path.to_owned(), PathBuf::from);
        let opened = Self { identity: identity(&resolved)?, db };
        opened.is_at(path).then_some(opened)
    }

    fn is_at(&self, path: &Path) -> bool {
        // SQLite compares the inode of its own descriptor, so the identity of a wrong file cannot
        // pass. Our comparison adds the device, and follows links in the path.
        !has_moved(&self.db) && identity(path) == Some(self.identity)
    }
}

fn replaced() -> Error {
    let message = "the lock file was deleted or replaced while it was being opened; try again";
    Error::new(ErrorCode::ServiceUnavailable, message).without_effect()
}

/// Returns whether the file of this connection is no longer found under its name.
#[cfg(unix)]
fn has_moved(db: &Connection) -> bool {
    let mut has_moved = 0;
    let asked = db.file_control(DEFAULT_NAME, FileControl::HasMoved(&mut has_moved));
    asked.is_err() || has_moved != 0
}

#[cfg(not(unix))]
fn has_moved(_db: &Connection) -> bool {
    false
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

/// Sleeps for a short random time between two attempts. The randomness keeps any one process from
/// always being too late.
pub(super) fn pause() {
    const SHORTEST: Duration = Duration::from_micros(100);
    const SPREAD: Duration = Duration::from_micros(900);
    std::thread::sleep(SHORTEST + SPREAD.mul_f64(random_fraction()));
}

/// Retries `act` while the file is busy or `act` returns `None`, until `give_up_at`.
fn retry_until<T>(give_up_at: Instant, mut act: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    loop {
        let error = match act() {
            Ok(Some(done)) => return Ok(done),
            Ok(None) => replaced(),
            Err(error) if error.code() == ErrorCode::NetworkTimeout => error,
            Err(error) => return Err(error),
        };
        if Instant::now() >= give_up_at {
            return Err(error);
        }
        pause();
    }
}

fn open(path: &Path) -> Result<Connection> {
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE
        | OpenFlags::SQLITE_OPEN_CREATE
        | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let failed = |cause: rusqlite::Error| error::map(&cause);
    let mut db = Connection::open_with_flags(path, flags).map_err(failed)?;
    // The worker waits in short slices instead, so that a release never waits behind another
    // operation's timeout.
    db.busy_timeout(Duration::ZERO).map_err(failed)?;
    // SQLite silently opens a file without write permission as read-only.
    if db.is_readonly("main").map_err(failed)? {
        return Err(error::map(&rusqlite::Error::SqliteFailure(
            rusqlite::ffi::Error::new(rusqlite::ffi::SQLITE_READONLY),
            None,
        )));
    }
    // The transaction makes it one snapshot, because another process may be creating the tables.
    let has_tables = is_ours(&*db.unchecked_transaction().map_err(failed)?)?;
    let mode: String = db
        .pragma_update_and_check(None, "journal_mode", "WAL", |row| row.get(0))
        .map_err(failed)?;
    if !mode.eq_ignore_ascii_case("wal") {
        let message = "the file system of the lock file does not support WAL; use a local disk";
        return Err(Error::invalid(message));
    }
    if !has_tables {
        create(&mut db)?;
    } else if !has_holder_column(&db).map_err(failed)? {
        add_holder_column(&mut db).map_err(failed)?;
    }
    db.pragma_update(None, "synchronous", "FULL").map_err(failed)?;
    // The first process that opens the file reads the whole log, so keep it short for commands that
    // run once.
    db.pragma_update(None, "wal_autocheckpoint", 128).map_err(failed)?;
    Ok(db)
}

/// Returns whether the file has our tables. Fails for a file of another program or of another
/// version. Call it inside a transaction.
fn is_ours(db: &Connection) -> Result<bool> {
    let number = |name: &str| -> Result<i32> {
        db.pragma_query_value(None, name, |row| row.get(0)).map_err(|cause| error::map(&cause))
    };
    match (number("application_id")?, number("user_version")?) {
        (APPLICATION_ID, SCHEMA_VERSION) => Ok(true),
        (APPLICATION_ID, _) => Err(Error::invalid(
            "the lock file was written by a later version of syncguard; upgrade",
        )),
        _ => {
            let tables = "SELECT count(*) FROM sqlite_schema";
            let tables: i64 =
                db.query_row(tables, [], |row| row.get(0)).map_err(|cause| error::map(&cause))?;
            if tables > 0 {
                return Err(Error::invalid(
                    "the file is a database of another program; use a separate file for locks",
                ));
            }
            Ok(false)
        }
    }
}

/// Returns whether locks are stored with their holders.
fn has_holder_column(db: &Connection) -> rusqlite::Result<bool> {
    let query = "SELECT count(*) FROM pragma_table_info('syncguard_locks') WHERE name = 'holder'";
    db.query_row(query, [], |row| row.get(0))
}

/// Upgrades a file of an earlier release, which continues to work with it, unless another process
/// has just done so.
fn add_holder_column(db: &mut Connection) -> rusqlite::Result<()> {
    let transaction = db.transaction_with_behavior(TransactionBehavior::Immediate)?;
    if !has_holder_column(&transaction)? {
        transaction.execute_batch("ALTER TABLE syncguard_locks ADD COLUMN holder TEXT")?;
    }
    transaction.commit()
}

/// Creates the tables, unless another process has created them.
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

#[cfg(all(test, unix))]
mod tests {
    use std::fs;

    use super::*;

    /// A directory that is deleted when the test ends.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let name = format!("syncguard-{name}-{}", std::process::id());
            let folder = Self(std::env::temp_dir().join(name));
            fs::create_dir_all(&folder.0).expect("created");
            folder
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            drop(fs::remove_dir_all(&self.0));
        }
    }

    #[test]
    fn a_connection_to_a_replaced_file_is_not_used() {
        let folder = Folder::new("replaced");
        let [path, other, link] = ["a.db", "b.db", "link.db"].map(|name| folder.0.join(name));
        drop(open(&other).expect("opens"));
        let opened = OpenFile::identify(open(&path).expect("opens"), &path).expect("at the path");
        assert!(opened.is_at(&path));
        // The file is replaced between opening and identifying it.
        let db = open(&path).expect("opens");
        fs::rename(&other, &path).expect("renamed");
        assert!(OpenFile::identify(db, &path).is_none(), "another file is at the path");
        assert!(!opened.is_at(&path));
        // The identity of the new file does not make the old connection valid.
        let identity = identity(&path).expect("there");
        let mistaken = OpenFile { db: opened.db, identity };
        assert!(!mistaken.is_at(&path), "SQLite knows its own descriptor");
        // The link now leads to another file, although the first file has not moved.
        std::os::unix::fs::symlink(&path, &link).expect("linked");
        let db = open(&link).expect("opens");
        drop(open(&other).expect("opens"));
        fs::remove_file(&link).expect("removed");
        std::os::unix::fs::symlink(&other, &link).expect("linked");
        assert!(OpenFile::identify(db, &link).is_none(), "the link leads elsewhere");
    }
}
