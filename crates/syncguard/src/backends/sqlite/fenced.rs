//! Fences for your own tables: a write that comes too late is refused.

use rusqlite::{Transaction, params};

use super::error;
use crate::common::error::{Error, Result};
use crate::common::sql_name;
use crate::contract::fenced_lock::FencedLock;

/// A table that remembers the largest fence seen for each key, so that the late write of a paused
/// holder is refused in the same transaction. It is in the database of your data, which need not be
/// the lock file.
///
/// ```
/// use syncguard::sqlite::{FencedTable, rusqlite};
/// use syncguard::{Fence, Key};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let fenced = FencedTable::new("syncguard_fenced")?;
/// let mut db = rusqlite::Connection::open_in_memory()?;
/// db.execute_batch(&fenced.schema_sql())?; // once, or in a migration
/// db.execute_batch("CREATE TABLE invoices (id INTEGER PRIMARY KEY, paid INTEGER)")?;
///
/// let guard = (Key::new("invoice:42")?, Fence::new(34)?); // or a LockGuard
/// let transaction = db.transaction()?;
/// fenced.check(&transaction, &guard)?; // fails if a later holder has written
/// transaction.execute("INSERT INTO invoices VALUES (42, 1)", [])?;
/// transaction.commit()?;
///
/// let paused = (Key::new("invoice:42")?, Fence::new(33)?);
/// let transaction = db.transaction()?;
/// assert!(fenced.check(&transaction, &paused).is_err_and(|error| error.is_stale_fence()));
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct FencedTable {
    table: String,
}

impl FencedTable {
    /// Creates a value for the table of this name: letters, digits and underscores.
    pub fn new(table: &str) -> Result<Self> {
        sql_name::check(table)?;
        Ok(Self { table: table.to_owned() })
    }

    /// Returns the SQL that creates the table.
    #[must_use]
    pub fn schema_sql(&self) -> String {
        format!(
            "CREATE TABLE IF NOT EXISTS \"{}\" (key TEXT PRIMARY KEY, fence INTEGER NOT NULL) \
             STRICT, WITHOUT ROWID;\n",
            self.table
        )
    }

    /// Checks that no later holder has written, and remembers the fence. If a later holder has, it
    /// fails with [`Aborted`](crate::ErrorCode::Aborted), and
    /// [`is_stale_fence`](Error::is_stale_fence) is true: roll your transaction back. Until it
    /// ends, no later holder can pass the check.
    ///
    /// It takes a transaction, because a check that commits by itself protects nothing.
    pub fn check(&self, transaction: &Transaction<'_>, lock: &impl FencedLock) -> Result<()> {
        let (key, fence) = (lock.key(), lock.fence());
        let changed = transaction
            .prepare_cached(&self.check_sql())
            .and_then(|mut check| check.execute(params![key.as_str(), i64::from(fence)]));
        match changed.map_err(|cause| error::map_check(&cause).with_key(key))? {
            0 => Err(Error::stale_fence().with_key(key)),
            _ => Ok(()),
        }
    }

    /// Returns the statement of [`check`](Self::check), for other drivers such as sqlx and diesel.
    /// `?1` is the key ([`Key::as_str`](crate::Key::as_str)), `?2` the fence (`i64::from(fence)`).
    /// Run it in the transaction of your write; if it changes no row, the fence is stale: roll
    /// back.
    #[must_use]
    pub fn check_sql(&self) -> String {
        format!(
            "INSERT INTO \"{}\" AS seen (key, fence) VALUES (?1, ?2)
             ON CONFLICT (key) DO UPDATE SET fence = excluded.fence
               WHERE seen.fence <= excluded.fence",
            self.table
        )
    }
}
