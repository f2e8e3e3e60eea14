//! A transaction that is sent at once and answered at once: one round trip.

use std::time::Duration;

use tokio_postgres::Row;

use super::driver::drive;
use super::error;
use super::error::Remedy;
use super::pool::{Lease, Pool, Urgency};
use super::statements::{Sql, Value};
use crate::common::error::Result;

/// A statement and its parameters.
pub(super) type Step<'a> = (&'a Sql, &'a [Value<'a>]);

/// Raises `synchronous_commit` where it would let a grant be forgotten; never lowers it.
macro_rules! keep_grants {
    ($is_local:literal) => {
        concat!(
            "SELECT set_config('synchronous_commit', CASE \
             WHEN current_setting('synchronous_commit') IN ('off', 'local') THEN 'on' \
             ELSE current_setting('synchronous_commit') END, ",
            $is_local,
            ")"
        )
    };
}

/// Whether a session began with the settings that it was to begin with. A pooler may have let them
/// pass and forgotten them.
pub(super) const IS_OURS: &str =
    "SELECT FROM (SELECT) AS one WHERE current_setting('plan_cache_mode') = 'force_generic_plan'";

/// For a session of our own.
pub(super) const KEEP_GRANTS: &str = keep_grants!(false);
/// For one transaction.
const KEEP_GRANT: &str = keep_grants!(true);

/// What a session of ours begins with, so that its transactions need not say it: the isolation, how
/// long the server may take, so that a statement whose client has given up does not wait for ever,
/// and that no statement is planned twice, because none has a better plan for some keys. A pooler refuses such words, and is noticed by that.
pub(super) fn session_options(limit: Duration) -> String {
    let [lock_ms, limit_ms] = limits(limit);
    format!(
        "-c default_transaction_isolation=read\\ committed -c default_transaction_read_only=off \
         -c lock_timeout={lock_ms} -c statement_timeout={limit_ms} \
         -c plan_cache_mode=force_generic_plan"
    )
}

/// The same for one transaction, where sessions are shared with strangers.
fn opening(limit: Duration) -> String {
    let [lock_ms, limit_ms] = limits(limit);
    format!(
        "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE; SET LOCAL lock_timeout = {lock_ms}; \
         SET LOCAL statement_timeout = {limit_ms}; {KEEP_GRANT}"
    )
}

/// Waiting for a lock ends first, so that it can be told from a slow statement. Zero would be none.
fn limits(limit: Duration) -> [u128; 2] {
    let limit_ms = limit.as_millis().max(1);
    [(limit_ms * 4 / 5).max(1), limit_ms]
}

/// Runs one or two statements in one transaction; answers with the rows of each.
///
/// A connection goes back to the pool only when all answers have come; when this is dropped or takes
/// too long, it is closed.
pub(super) async fn run(
    pool: &Pool,
    urgency: Urgency,
    steps: [Option<Step<'_>>; 2],
) -> Result<[Vec<Row>; 2]> {
    let mut has_tried = false;
    loop {
        let mut lease = pool.get(urgency).await?;
        // The server gives up first, and says why.
        let limit = pool.response_timeout() + Duration::from_millis(500);
        let mut driver = lease.take_driver();
        let attempt = drive(driver.as_mut(), attempt(&lease, pool, steps));
        let answer = tokio::time::timeout(limit, attempt).await;
        lease.put_driver_back(driver);
        match answer {
            // The server would have given up before, and said so: the path to it has died.
            Err(_elapsed) => {
                pool.replace_all(lease);
                return Err(error::timeout());
            }
            Ok(None) => return Err(error::lost()),
            Ok(Some(Ok(rows))) => {
                lease.give_back();
                return Ok(rows);
            }
            Ok(Some(Err(cause))) => {
                let is_first = !std::mem::replace(&mut has_tried, true);
                match error::remedy(&cause) {
                    // The transaction is over, so the connection is as good as before.
                    Remedy::None => lease.give_back(),
                    // Nothing was done. With new statements, or without any, it will be.
                    Remedy::PrepareAgain if is_first => {
                        pool.replace_all(lease);
                        continue;
                    }
                    Remedy::PrepareNothing if is_first => {
                        pool.note_pooler();
                        continue;
                    }
                    Remedy::FindPrimary | Remedy::PrepareAgain => pool.note_read_only(lease),
                    // Dropped, it is closed.
                    Remedy::Replace | Remedy::PrepareNothing => {}
                }
                return Err(error::map(&cause));
            }
        }
    }
}

async fn attempt(
    lease: &Lease<'_>,
    pool: &Pool,
    [first, second]: [Option<Step<'_>>; 2],
) -> Result<[Vec<Row>; 2], tokio_postgres::Error> {
    if second.is_none() && !pool.is_pooled() {
        // A statement alone is a transaction.
        return Ok([run_step(lease, first).await?, Vec::new()]);
    }
    let opening = if pool.is_pooled() { &opening(pool.response_timeout()) } else { "BEGIN" };
    // In this order, and all before the first answer.
    let (begun, first, second, committed) = tokio::join!(
        biased;
        lease.client().batch_execute(opening),
        run_step(lease, first),
        run_step(lease, second),
        lease.client().batch_execute("COMMIT"),
    );
    begun?;
    // A statement that failed has undone everything, whatever the end says.
    let rows = [first?, second?];
    committed?;
    Ok(rows)
}

async fn run_step(
    lease: &Lease<'_>,
    step: Option<Step<'_>>,
) -> Result<Vec<Row>, tokio_postgres::Error> {
    match step {
        Some((sql, values)) => lease.query(sql, values).await,
        None => Ok(Vec::new()),
    }
}
