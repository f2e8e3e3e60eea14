//! The tables, equal to those of the TypeScript implementation.

use std::time::Duration;

use super::driver::drive;
use super::error;
use super::names::Names;
use super::pool::{Pool, Urgency};
use crate::common::backoff::reconnect_delay;
use crate::common::error::Result;

/// The statements that create what is missing, for `setup_schema` and for migration tools.
pub(super) fn sql(Names { locks, fences, .. }: &Names) -> String {
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

/// Creates what is missing. Many of us wait for each other; with another implementation that does
/// not wait, one of the two fails and tries again.
pub(super) async fn create(pool: &Pool, sql: &str) -> Result<()> {
    /// Any number will do, as long as all of us have the same.
    const TURN: i64 = 0x7379_6e63_6775_6172;
    const TRIES: u32 = 5;
    let script = format!("BEGIN; SELECT pg_advisory_xact_lock({TURN}); {sql} COMMIT");
    let mut tries = 0;
    loop {
        let mut lease = pool.get(Urgency::Ordinary).await?;
        let limit = pool.response_timeout() + Duration::from_secs(5);
        let mut driver = lease.take_driver();
        let creating = drive(driver.as_mut(), lease.client().batch_execute(&script));
        let cause = match tokio::time::timeout(limit, creating).await {
            Err(_elapsed) => return Err(error::timeout()),
            Ok(None) => return Err(error::lost()),
            // The connection may have prepared nothing, so it ends here.
            Ok(Some(Ok(()))) => return Ok(()),
            Ok(Some(Err(cause))) => cause,
        };
        // The same table, type or index at the same moment.
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
