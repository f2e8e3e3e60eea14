//! Fences for the user's own tables: a write that comes too late is refused.

use tokio_postgres::Transaction;

use super::error;
use super::names::TableName;
use super::statements::Value;
use crate::common::error::{Error, Result};
use crate::common::fence::Fence;
use crate::common::key::Key;

/// A table that remembers the largest fence that was seen for each resource, so that the write of a
/// holder that was paused and came back late is refused in the same transaction.
///
/// ```no_run
/// use syncguard::postgres::{FencedTable, tokio_postgres};
/// use syncguard::{Fence, Key};
///
/// # async fn write(client: &mut tokio_postgres::Client, key: &Key, fence: Fence) -> Result<(), Box<dyn std::error::Error>> {
/// let fenced = FencedTable::new("syncguard_fenced")?;
/// client.batch_execute(&fenced.schema_sql()).await?; // once, or in a migration
/// let transaction = client.transaction().await?;
/// fenced.check(&transaction, key, fence).await?; // ends here if a later holder has written
/// transaction.execute("UPDATE invoices SET paid = true WHERE id = 42", &[]).await?;
/// transaction.commit().await?;
/// # Ok(())
/// # }
/// ```
///
/// A table with a `fence` column of its own needs no such table:
/// `UPDATE invoices SET paid = true, fence = $2 WHERE id = $1 AND fence <= $2`, and no row changed
/// means refused.
#[derive(Clone, Debug)]
pub struct FencedTable {
    table: TableName,
}

impl FencedTable {
    /// A table by its name, perhaps with a schema and a dot before it.
    pub fn new(table: &str) -> Result<Self> {
        Ok(Self { table: TableName::parse(table)? })
    }

    /// The SQL that creates it.
    #[must_use]
    pub fn schema_sql(&self) -> String {
        let table = self.table.quoted();
        format!(
            "CREATE TABLE IF NOT EXISTS {table} (key text PRIMARY KEY, fence bigint NOT NULL);\n"
        )
    }

    /// Refuses a holder that is not the latest one, with an error of the code
    /// [`Aborted`](crate::ErrorCode::Aborted) for which [`is_stale_fence`](Error::is_stale_fence) is
    /// true; remembers it otherwise. What follows in the transaction is committed only if it still is.
    ///
    /// It takes a transaction, because a check that commits by itself protects nothing:
    ///
    /// ```compile_fail,E0308
    /// # use syncguard::postgres::{FencedTable, tokio_postgres};
    /// # use syncguard::{Fence, Key};
    /// # async fn write(fenced: &FencedTable, client: &mut tokio_postgres::Client, key: &Key, fence: Fence) {
    /// fenced.check(client, key, fence).await;
    /// # }
    /// ```
    ///
    /// # Cancel safety
    ///
    /// It is a part of the caller's transaction.
    pub async fn check(
        &self,
        transaction: &Transaction<'_>,
        key: &Key,
        fence: Fence,
    ) -> Result<()> {
        let table = self.table.quoted();
        let remember = format!(
            "INSERT INTO {table} AS seen (key, fence) VALUES ($1, $2)
             ON CONFLICT (key) DO UPDATE SET fence = excluded.fence
               WHERE seen.fence <= excluded.fence"
        );
        let (name, number) = (Value::Text(key.as_str()), Value::Int8(super::integer(fence.get())));
        let changed = transaction.execute(&remember, &[&name, &number]).await;
        match changed.map_err(|cause| error::map(&cause).with_key(key))? {
            0 => Err(Error::stale_fence().with_key(key)),
            _ => Ok(()),
        }
    }
}
