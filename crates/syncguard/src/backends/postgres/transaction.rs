//! Transactions that are sent at once, in one round trip.

use std::time::Duration;

use tokio_postgres::Row;

use super::driver::drive;
use super::error;
use super::error::Remedy;
use super::pool::{ConnectionGuard, Pool, Urgency};
use super::statements::{Sql, Value};
use crate::common::error::{Error, Result};

/// A statement and its parameters.
pub(super) type Step<'a> = (&'a Sql, &'a [Value<'a>]);

/// Why a transaction failed.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) error: Error,
    /// Whether the server has refused a statement, for a reason that lies in what was asked, and
    /// has rolled it back.
    pub(super) is_refused: bool,
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self { error, is_refused: false }
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        failure.error
    }
}

/// Raises `synchronous_commit` where a crash could lose a grant; never lowers it.
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

/// Returns a row if the session began with our settings. A pooler may accept and drop them.
pub(super) const IS_OURS: &str =
    "SELECT FROM (SELECT) AS one WHERE current_setting('plan_cache_mode') = 'force_generic_plan'";

/// For our own session.
pub(super) const KEEP_GRANTS: &str = keep_grants!(false);
/// For one transaction.
const KEEP_GRANT: &str = keep_grants!(true);

/// Returns the settings with which our own sessions begin, so that transactions need not set them:
///
/// * the isolation level;
/// * how long the server may take, so that a statement whose client has given up does not wait
///   forever;
/// * that no statement is planned twice, because no key has a better plan than the others;
/// * that tables are read by index. They are small when they are planned for, and then grow.
///
/// A pooler refuses such settings, and is detected by that.
pub(super) fn session_options(limit: Duration) -> String {
    let [lock_ms, limit_ms] = limits(limit);
    format!(
        "-c default_transaction_isolation=read\\ committed -c default_transaction_read_only=off \
         -c lock_timeout={lock_ms} -c statement_timeout={limit_ms} \
         -c plan_cache_mode=force_generic_plan -c enable_seqscan=off"
    )
}

/// Returns the same for one transaction, in sessions that are shared with other clients.
fn opening(limit: Duration) -> String {
    let [lock_ms, limit_ms] = limits(limit);
    format!(
        "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE; SET LOCAL lock_timeout = {lock_ms}; \
         SET LOCAL statement_timeout = {limit_ms}; SET LOCAL enable_seqscan = off; {KEEP_GRANT}"
    )
}

/// Returns the timeouts for locks and for statements. That for locks is shorter, to distinguish it
/// from a slow statement. Zero would mean no timeout.
fn limits(limit: Duration) -> [u128; 2] {
    let limit_ms = limit.as_millis().max(1);
    [(limit_ms * 4 / 5).max(1), limit_ms]
}

/// Runs a statement, after another one if there is one, in one transaction. Returns its rows.
///
/// The connection returns to the pool only if all answers have come. If the call is dropped or
/// takes too long, the connection is closed.
pub(super) async fn run(
    pool: &Pool,
    urgency: Urgency,
    before: Option<Step<'_>>,
    step: Step<'_>,
) -> Result<Vec<Row>, Failure> {
    let mut has_tried = false;
    loop {
        let mut connection = pool.get(urgency).await?;
        // The server gives up first, and reports why.
        let limit = pool.response_timeout() + Duration::from_millis(500);
        let mut driver = connection.take_driver();
        let rows = async {
            match before {
                // A single statement is a transaction by itself.
                None if !pool.is_pooled() => connection.query(step).await,
                _ => run_pipelined(&connection, pool, before, step).await,
            }
        };
        let answer = tokio::time::timeout(limit, drive(driver.as_mut(), rows)).await;
        connection.put_driver_back(driver);
        match answer {
            // The server would have given up and reported it, so the path to it is dead.
            Err(_elapsed) => {
                pool.replace_all(connection);
                return Err(error::timeout().into());
            }
            Ok(None) => return Err(error::lost().into()),
            Ok(Some(Ok(rows))) => {
                connection.give_back();
                return Ok(rows);
            }
            Ok(Some(Err(cause))) => {
                let is_first = !std::mem::replace(&mut has_tried, true);
                match error::remedy(&cause) {
                    // Nothing was done. Try again without the column.
                    Remedy::None
                        if error::is_missing_column(&cause) && connection.stores_holders() =>
                    {
                        pool.note_holders(false);
                        if is_first {
                            continue;
                        }
                    }
                    // The transaction is over, and the connection still works.
                    Remedy::None => connection.give_back(),
                    // Nothing was done. Try again with new prepared statements, or without any.
                    Remedy::PrepareAgain if is_first => {
                        pool.replace_all(connection);
                        continue;
                    }
                    Remedy::PrepareNothing if is_first => {
                        pool.note_pooler();
                        continue;
                    }
                    Remedy::FindPrimary | Remedy::PrepareAgain => pool.note_read_only(connection),
                    // The connection is closed when it is dropped.
                    Remedy::Replace | Remedy::PrepareNothing => {}
                }
                let is_refused = error::remedy(&cause) == Remedy::None && !error::is_late(&cause);
                return Err(Failure { error: error::map(&cause), is_refused });
            }
        }
    }
}

/// Sends a whole transaction before the first answer.
async fn run_pipelined(
    connection: &ConnectionGuard<'_>,
    pool: &Pool,
    before: Option<Step<'_>>,
    step: Step<'_>,
) -> Result<Vec<Row>, tokio_postgres::Error> {
    let opening = if pool.is_pooled() { &opening(pool.response_timeout()) } else { "BEGIN" };
    let before = async {
        match before {
            Some(before) => connection.query(before).await.map(drop),
            None => Ok(()),
        }
    };
    let (begun, before, rows, committed) = tokio::join!(
        biased;
        connection.client().batch_execute(opening),
        before,
        connection.query(step),
        connection.client().batch_execute("COMMIT"),
    );
    // A failed statement has rolled back everything, whatever COMMIT returns.
    begun?;
    before?;
    let rows = rows?;
    committed?;
    Ok(rows)
}
