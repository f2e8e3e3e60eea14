//! Fences for your own tables: a write that comes too late is refused.

use tokio_postgres::Transaction;
use tokio_postgres::error::SqlState;

use super::error;
use super::names::TableName;
use super::statements::Value;
use crate::common::error::{Error, Result};
use crate::contract::fenced_lock::FencedLock;

/// A table that remembers the largest fence seen for each key, so that the late write of a paused
/// holder is refused in the same transaction.
///
/// ```no_run
/// use syncguard::postgres::{FencedTable, tokio_postgres};
/// use syncguard::{LockGuard, PostgresBackend};
///
/// # async fn write(client: &mut tokio_postgres::Client, guard: LockGuard<PostgresBackend>) -> Result<(), Box<dyn std::error::Error>> {
/// let fenced = FencedTable::new("syncguard_fenced")?;
/// client.batch_execute(&fenced.schema_sql()).await?; // once, or in a migration
/// let transaction = client.transaction().await?;
/// fenced.check(&transaction, &guard).await?; // fails if a later holder has written
/// transaction.execute("UPDATE invoices SET paid = true WHERE id = 42", &[]).await?;
/// transaction.commit().await?;
/// # Ok(())
/// # }
/// ```
///
/// If your own table has a `fence` column, you do not need this one. Run
/// `UPDATE invoices SET paid = true, fence = $2 WHERE id = $1 AND fence <= $2`; if no row changes,
/// the write is refused.
#[derive(Clone, Debug)]
pub struct FencedTable {
    table: TableName,
}

impl FencedTable {
    /// The SQLSTATE with which [`check_sql`](Self::check_sql) fails if the fence is stale.
    pub const STALE_FENCE: &'static str = "22P02";

    /// Creates a value for the table of this name, optionally with `schema.` in front.
    pub fn new(table: &str) -> Result<Self> {
        Ok(Self { table: TableName::parse(table)? })
    }

    /// Returns the SQL that creates the table.
    #[must_use]
    pub fn schema_sql(&self) -> String {
        let table = self.table.quoted();
        format!(
            "CREATE TABLE IF NOT EXISTS {table} (key text PRIMARY KEY, fence bigint NOT NULL);\n"
        )
    }

    /// Checks that no later holder has written, and remembers the fence. If a later holder has, it
    /// fails with [`Aborted`](crate::ErrorCode::Aborted), and
    /// [`is_stale_fence`](Error::is_stale_fence) is true. PostgreSQL then commits nothing of your
    /// transaction, or of the savepoint that you pass, even if you ignore the error. Until your
    /// transaction ends, no later holder can pass the check.
    ///
    /// It takes a transaction, because a check that commits by itself protects nothing:
    ///
    /// ```compile_fail,E0308
    /// # use syncguard::postgres::{FencedTable, tokio_postgres};
    /// # use syncguard::{LockGuard, PostgresBackend};
    /// # async fn write(fenced: &FencedTable, client: &mut tokio_postgres::Client, guard: LockGuard<PostgresBackend>) {
    /// fenced.check(client, &guard).await;
    /// # }
    /// ```
    ///
    /// At the isolation level SERIALIZABLE or REPEATABLE READ, a holder whose transaction began
    /// before the check of a later one gets a serialization failure
    /// ([`ServiceUnavailable`](crate::ErrorCode::ServiceUnavailable)) instead, and is refused when
    /// it tries again. Either way nothing is written.
    ///
    /// # Cancel safety
    ///
    /// The check is part of your transaction, and has no effect unless you commit it.
    pub async fn check(
        &self,
        transaction: &Transaction<'_>,
        lock: &(impl FencedLock + Sync),
    ) -> Result<()> {
        let (key, fence) = (lock.key(), lock.fence());
        let (name, number) = (Value::Text(key.as_str()), Value::Int8(i64::from(fence)));
        let checked = transaction.execute(&self.check_sql(), &[&name, &number]).await;
        checked.map(drop).map_err(|cause| {
            let state = cause.code().map(SqlState::code);
            let is_stale = state == Some(Self::STALE_FENCE);
            let error = if is_stale { Error::stale_fence() } else { error::map(&cause) };
            error.with_key(key)
        })
    }

    /// Returns the statement of [`check`](Self::check), for other drivers such as sqlx and diesel.
    /// `$1` is the key ([`Key::as_str`](crate::Key::as_str)), `$2` the fence as a `bigint`
    /// (`i64::from(fence)`). Run it in the transaction of your write. If the fence is stale, it
    /// fails with the SQLSTATE [`STALE_FENCE`](Self::STALE_FENCE): roll back.
    #[must_use]
    pub fn check_sql(&self) -> String {
        let table = self.table.quoted();
        // An error ends the transaction, so that a refusal cannot be ignored. A statement chooses
        // its message with a text that is not a number. The text depends on the row, because
        // PostgreSQL computes constants before it runs the statement.
        format!(
            "INSERT INTO {table} AS seen (key, fence) VALUES ($1, $2)
             ON CONFLICT (key) DO UPDATE SET fence = CASE
               WHEN seen.fence <= excluded.fence THEN excluded.fence
               ELSE (left(seen.key, 0) || 'the fence is stale: a later holder has written')::bigint
             END"
        )
    }
}

/// A trigger that refuses stale fences in a table of yours, for programs in any language: pure SQL.
///
/// * The table has a column `fence bigint NOT NULL DEFAULT 0`. Every row remembers the largest
///   fence that wrote it.
/// * Each transaction states its fence once, with [`set_sql`](Self::set_sql). An insert, update or
///   delete without one, or with a fence below that of the row, fails with the SQLSTATE
///   [`NO_FENCE`](Self::NO_FENCE) or [`STALE_FENCE`](Self::STALE_FENCE), and the transaction writes
///   nothing.
/// * A new row has no earlier fence: where stale holders must not insert, use a [`FencedTable`].
///
/// ```no_run
/// use syncguard::postgres::{FenceTrigger, tokio_postgres};
/// use syncguard::{LockGuard, PostgresBackend};
///
/// # async fn write(client: &mut tokio_postgres::Client, guard: LockGuard<PostgresBackend>) -> Result<(), Box<dyn std::error::Error>> {
/// client.batch_execute(&FenceTrigger::new("invoices")?.create_sql()).await?; // in a migration
/// let transaction = client.transaction().await?;
/// transaction.execute(FenceTrigger::set_sql(), &[&guard.fence().to_string()]).await?;
/// transaction.execute("UPDATE invoices SET paid = true WHERE id = 42", &[]).await?;
/// transaction.commit().await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct FenceTrigger {
    table: TableName,
}

impl FenceTrigger {
    /// The SQLSTATE of a write with a fence below that of the row.
    pub const STALE_FENCE: &'static str = "SG001";
    /// The SQLSTATE of a write in a transaction without a fence, or with an invalid one.
    pub const NO_FENCE: &'static str = "SG002";

    /// Creates a value for the trigger of a table, optionally with `schema.` in front.
    pub fn new(table: &str) -> Result<Self> {
        Ok(Self { table: TableName::parse(table)? })
    }

    /// Returns the SQL that creates the trigger and its function. It fails, and creates no trigger,
    /// if the table has no column `fence`.
    #[must_use]
    pub fn create_sql(&self) -> String {
        include_str!("sql/fence_trigger.sql").replace("{table}", &self.table.quoted())
    }

    /// Returns the statement that sets the fence of a transaction. `$1` is the fence as text
    /// (`fence.to_string()`).
    #[must_use]
    pub const fn set_sql() -> &'static str {
        "SELECT set_config('syncguard.fence', $1, true)"
    }
}
