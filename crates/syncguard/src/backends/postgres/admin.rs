//! Listing, findings and the creation of the tables.

use std::time::Duration;

use tokio_postgres::types::Type;

use super::driver::drive;
use super::names::Names;
use super::pool::{Pool, Urgency};
use super::record::{column, integer, live, stored};
use super::statements::{Sql, Value};
use super::transaction::{self, Step};
use super::{PostgresBackend, error, named};
use crate::common::backoff::reconnect_delay;
use crate::common::error::{Error, Result};
use crate::common::fence::Fence;
use crate::common::fence_source::FenceSource;
use crate::common::key::Key;
use crate::common::storage_key::KeySpace;
use crate::contract::BoxFuture;
use crate::contract::admin::{Admin, Cursor, Page};
use crate::contract::finding::Finding;

impl Admin for PostgresBackend {
    fn list<'a>(&'a self, after: Option<&'a Cursor>) -> BoxFuture<'a, Result<Page>> {
        const PAGE: usize = 200;
        let after = after.map_or("", Cursor::place);
        Box::pin(async move {
            let values = [Value::Text(after)];
            let step: Step<'_> = (&self.shared.statements.list, &values);
            let rows = self.read(Urgency::Ordinary, step).await;
            let rows = rows.map_err(|error| named(error, "list"))?;
            let next = match rows.last() {
                Some(row) if rows.len() == PAGE => Some(Cursor::new(column::<&str>(row, 7)?)),
                _ => None,
            };
            // An invalid row is not a lock; operations on its key report it.
            let locks = rows.iter().filter_map(|row| live(stored(row).ok()));
            Ok(Page::new(locks.collect(), next))
        })
    }

    fn findings(&self) -> BoxFuture<'_, Result<Vec<Finding>>> {
        Box::pin(Self::findings(self))
    }

    fn collect_fences(&self, idle: Duration) -> BoxFuture<'_, Result<u64>> {
        Box::pin(async move {
            let fences = self.shared.fences;
            let age_ms = integer(fences.collectable_age_ms(idle)?);
            let (mut deleted, mut after) = (0, Some(String::new()));
            while let Some(key) = after {
                let per_ms = Value::Int8(integer(fences.per_millisecond()));
                let values = [Value::Text(&key), Value::Int8(age_ms), per_ms];
                let step: Step<'_> = (&self.shared.statements.collect_fences, &values);
                let rows = self.run(Urgency::Ordinary, step).await;
                let rows = rows.map_err(|error| named(error, "collect_fences"))?;
                let row = rows.first().ok_or_else(error::unexpected_response)?;
                deleted += u64::try_from(column::<i64>(row, 1)?).unwrap_or(0);
                after = column::<Option<String>>(row, 0)?;
            }
            Ok(deleted)
        })
    }

    fn check_fence<'a>(
        &'a self,
        resource: &'a Key,
        fence: Fence,
        key: Option<&'a Key>,
    ) -> BoxFuture<'a, Result<()>> {
        // Keys of counters begin with "fence:".
        let name = format!("seen:{}", resource.as_str());
        let lock = key.map(|key| KeySpace::hashed(key.as_str()));
        Box::pin(async move {
            let lock = lock.as_deref();
            let values =
                [Value::Text(&name), Value::Int8(i64::from(fence)), Value::MaybeText(lock)];
            let step: Step<'_> = (&self.shared.statements.check_fence, &values);
            let rows = self.run(Urgency::Ordinary, step).await;
            let rows = rows.map_err(|error| named(error, "check_fence"))?;
            let row = rows.first().ok_or_else(error::unexpected_response)?;
            if column::<bool>(row, 0)? {
                return Ok(());
            }
            let other = column::<Option<&str>>(row, 1)?;
            let is_other = lock.is_some() && other.is_some() && lock != other;
            let refused = if is_other { Error::other_lock() } else { Error::stale_fence() };
            Err(named(refused, "check_fence"))
        })
    }

    fn fence_source(&self) -> FenceSource {
        self.shared.fences
    }

    fn setup(&self) -> BoxFuture<'_, Result<()>> {
        Box::pin(self.setup_schema())
    }
}

const QUESTION: &str = "
    SELECT current_setting('fsync'), current_setting('full_page_writes'),
      (SELECT reset_val FROM pg_settings WHERE name = 'synchronous_commit'),
      (SELECT count(*) FROM pg_stat_replication
       WHERE sync_state NOT IN ('sync', 'quorum')),
      (SELECT relpersistence::text FROM pg_class WHERE oid = to_regclass($1)),
      (SELECT relpersistence::text FROM pg_class WHERE oid = to_regclass($2)),
      pg_is_in_recovery(),
      (SELECT count(*) FROM pg_stat_replication WHERE sync_state IS NULL)";

/// Asks the server for its settings and returns the findings.
pub(super) async fn ask(
    pool: &Pool,
    [locks, fences]: &[String; 2],
    source: FenceSource,
) -> Result<Vec<Finding>> {
    let question = Sql::new(QUESTION.to_owned(), &[Type::TEXT, Type::TEXT]);
    let step: Step<'_> = (&question, &[Value::Text(locks), Value::Text(fences)]);
    let rows = transaction::run(pool, Urgency::Ordinary, None, step).await?;
    let row = rows.first().ok_or_else(error::unexpected_response)?;
    let (mut found, mut loses_counters) = (Vec::new(), false);
    // With a clock, only locks are lost.
    let is_counted = source == FenceSource::Counter;
    let repeats = if is_counted { " and repeat their fences" } else { "" };
    if column::<&str>(row, 0)? == "off" {
        loses_counters = true;
        found.push(Finding::new(
            "fsync",
            format!(
                "PostgreSQL does not flush commits to disk (fsync = off): a crash of the machine \
                 can lose locks{repeats}; set \"fsync = on\""
            ),
        ));
    }
    if column::<&str>(row, 1)? == "off" {
        found.push(Finding::new(
            "full_page_writes",
            "PostgreSQL does not protect its data from partial writes (full_page_writes = off): a \
             crash of the machine can damage it; set \"full_page_writes = on\"",
        ));
    }
    if ["off", "local"].contains(&column::<&str>(row, 2)?) {
        found.push(Finding::new(
            "synchronous_commit",
            "PostgreSQL confirms commits before they are durable (synchronous_commit): syncguard \
             raises it for its own grants and extends, other programs do not; set \
             \"synchronous_commit = on\"",
        ));
    }
    if column::<i64>(row, 3)? > 0 {
        loses_counters = true;
        found.push(Finding::new(
            "standby",
            format!(
                "a PostgreSQL standby is asynchronous: a failover to it can lose the last \
                 locks{repeats}; add it to synchronous_standby_names"
            ),
        ));
    }
    if column::<i64>(row, 7)? > 0 {
        found.push(Finding::new(
            "standby",
            "the PostgreSQL user may not see whether a standby is asynchronous, in which case a \
             failover to it can lose locks; run GRANT pg_read_all_stats",
        ));
    }
    let persistence = [column::<Option<&str>>(row, 4)?, column::<Option<&str>>(row, 5)?];
    if persistence.contains(&Some("u")) {
        loses_counters = true;
        let restart = if is_counted { ", and fences start again" } else { "" };
        found.push(Finding::new(
            "unlogged",
            format!(
                "a PostgreSQL table is UNLOGGED: after a crash of the server it is empty{restart}; \
                 run ALTER TABLE … SET LOGGED"
            ),
        ));
    }
    if persistence.contains(&None) {
        found.push(Finding::new(
            "tables",
            "the PostgreSQL tables are missing; run setup_schema or `syncguard setup`",
        ));
    }
    if column::<bool>(row, 6)? {
        found.push(Finding::new(
            "recovery",
            "this PostgreSQL server is a read-only standby; connect to the primary",
        ));
    }
    if is_counted && loses_counters {
        found.push(Finding::lost_counters());
    }
    Ok(found)
}

/// Returns the statements that create what is missing, for `setup_schema` and for migration tools.
pub(super) fn schema_sql(Names { locks, fences, .. }: &Names) -> String {
    let (lock_table, fence_table) = (locks.quoted(), fences.quoted());
    let (by_id, by_expiry) = (locks.index("lock_id"), locks.index("expires"));
    format!(
        "CREATE TABLE IF NOT EXISTS {lock_table} (
  key text PRIMARY KEY,
  lock_id text NOT NULL,
  expires_at_ms bigint NOT NULL,
  acquired_at_ms bigint NOT NULL,
  fence text NOT NULL,
  user_key text NOT NULL
);
ALTER TABLE {lock_table} ADD COLUMN IF NOT EXISTS holder text;
CREATE UNIQUE INDEX IF NOT EXISTS {by_id} ON {lock_table} (lock_id);
CREATE INDEX IF NOT EXISTS {by_expiry} ON {lock_table} (expires_at_ms);
CREATE TABLE IF NOT EXISTS {fence_table} (
  fence_key text PRIMARY KEY,
  fence bigint NOT NULL DEFAULT 0,
  key_debug text
);
"
    )
}

/// Creates what is missing. Concurrent calls wait for each other. Another implementation does not
/// wait: if the two meet, this one may fail, and tries again.
pub(super) async fn create(pool: &Pool, sql: &str) -> Result<()> {
    /// The advisory lock for creating tables: an arbitrary number, the same in every process.
    const SETUP_LOCK: i64 = 0x7379_6e63_6775_6172;
    const TRIES: u32 = 5;
    let script = format!("BEGIN; SELECT pg_advisory_xact_lock({SETUP_LOCK}); {sql} COMMIT");
    let mut tries = 0;
    loop {
        let mut lease = pool.get(Urgency::Ordinary).await?;
        let limit = pool.response_timeout() + Duration::from_secs(5);
        let mut driver = lease.take_driver();
        let creating = drive(driver.as_mut(), lease.client().batch_execute(&script));
        let cause = match tokio::time::timeout(limit, creating).await {
            Err(_elapsed) => return Err(error::timeout()),
            Ok(None) => return Err(error::lost()),
            // The connection may have prepared nothing, so it is closed.
            Ok(Some(Ok(()))) => return Ok(()),
            Ok(Some(Err(cause))) => cause,
        };
        // Another session created the same table, type or index at the same time.
        let is_race = cause
            .code()
            .is_some_and(|state| ["23505", "42P07", "42710", "40P01"].contains(&state.code()));
        tries += 1;
        if !is_race || tries == TRIES {
            return Err(error::map(&cause));
        }
        tokio::time::sleep(reconnect_delay(tries)).await;
    }
}
