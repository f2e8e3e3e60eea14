//! What can make locks vanish or fences go backwards on this server.

use tokio_postgres::types::Type;

use super::pool::{Pool, Urgency};
use super::statements::{Sql, Value};
use super::transaction::{self, Step};
use super::{column, error};
use crate::common::error::Result;
use crate::contract::advice::Advice;

const QUESTION: &str = "
    SELECT current_setting('fsync'), current_setting('full_page_writes'),
      (SELECT reset_val FROM pg_settings WHERE name = 'synchronous_commit'),
      (SELECT count(*) FROM pg_stat_replication
       WHERE sync_state NOT IN ('sync', 'quorum')),
      (SELECT relpersistence::text FROM pg_class WHERE oid = to_regclass($1)),
      (SELECT relpersistence::text FROM pg_class WHERE oid = to_regclass($2)),
      pg_is_in_recovery(),
      (SELECT count(*) FROM pg_stat_replication WHERE sync_state IS NULL)";

/// Asks the server.
pub(super) async fn ask(pool: &Pool, locks: &str, fences: &str) -> Result<Vec<Advice>> {
    let question = Sql { text: QUESTION.to_owned(), types: &[Type::TEXT, Type::TEXT] };
    let step: Step<'_> = (&question, &[Value::Text(locks), Value::Text(fences)]);
    let [rows, _] = transaction::run(pool, Urgency::Ordinary, [Some(step), None]).await?;
    let row = rows.first().ok_or_else(error::unexpected_response)?;
    let mut found = Vec::new();
    if column::<&str>(row, 0)? == "off" {
        found.push(Advice::new(
            "fsync",
            "postgres does not flush what it commits (fsync = off): a crash of the machine can lose \
             locks and repeat fences; set it to on",
        ));
    }
    if column::<&str>(row, 1)? == "off" {
        found.push(Advice::new(
            "full_page_writes",
            "postgres may come back damaged after a crash of the machine (full_page_writes = off); \
             set it to on",
        ));
    }
    if ["off", "local"].contains(&column::<&str>(row, 2)?) {
        found.push(Advice::new(
            "synchronous_commit",
            "postgres confirms before it has flushed (synchronous_commit): grants and extends raise \
             it for themselves, releases and other programs do not",
        ));
    }
    if column::<i64>(row, 3)? > 0 {
        found.push(Advice::new(
            "standby",
            "a standby follows asynchronously: a failover to it can lose the last locks and repeat \
             their fences; name it in synchronous_standby_names",
        ));
    }
    if column::<i64>(row, 7)? > 0 {
        found.push(Advice::new(
            "standby",
            "a standby follows, and this user may not see whether asynchronously, which would be \
             dangerous; GRANT pg_read_all_stats to see it",
        ));
    }
    let persistence = [column::<Option<&str>>(row, 4)?, column::<Option<&str>>(row, 5)?];
    if persistence.contains(&Some("u")) {
        found.push(Advice::new(
            "unlogged",
            "a table is UNLOGGED: after a crash of the server it is empty, and fences begin again; \
             ALTER TABLE … SET LOGGED",
        ));
    }
    if persistence.contains(&None) {
        found.push(Advice::new(
            "tables",
            "the tables are missing; run setup_schema, or `syncguard setup`",
        ));
    }
    if column::<bool>(row, 6)? {
        found.push(Advice::new(
            "recovery",
            "this postgres is a standby and cannot be written to; connect to the primary",
        ));
    }
    Ok(found)
}
