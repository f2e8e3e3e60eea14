//! A transaction that is sent at once and answered at once: one round trip.

use std::time::Duration;

use tokio_postgres::Row;

use super::error;
use super::pool::{Lease, Parameter, Pool, Urgency};
use super::statements::Sql;
use crate::common::error::Result;

/// A statement and its parameters.
pub(super) type Step<'a> = (&'a Sql, &'a [Parameter<'a>]);

/// What a transaction begins with: its isolation, and how long the server may take, so that a
/// statement whose client has given up does not wait for ever.
fn begin(limit: Duration) -> String {
    let limit_ms = limit.as_millis().max(1);
    // Waiting for a lock ends first, so that it can be told from a slow statement. Zero means none.
    let lock_ms = (limit_ms * 4 / 5).max(1);
    format!(
        "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE; SET LOCAL lock_timeout = {lock_ms}; \
         SET LOCAL statement_timeout = {limit_ms}"
    )
}

/// Runs up to two statements in one transaction, and one more after it whose answer does not matter.
///
/// A connection goes back to the pool only when all answers have come; when this is dropped or takes
/// too long, it is closed.
pub(super) async fn run(
    pool: &Pool,
    urgency: Urgency,
    steps: [Option<Step<'_>>; 2],
    afterwards: Option<Step<'_>>,
) -> Result<[Vec<Row>; 2]> {
    let mut has_tried = false;
    loop {
        let lease = pool.get(urgency).await?;
        // The server gives up first, and says why.
        let limit = pool.response_timeout() + Duration::from_millis(500);
        let attempt = attempt(&lease, pool.response_timeout(), steps, afterwards);
        match tokio::time::timeout(limit, attempt).await {
            Err(_elapsed) => return Err(error::timeout()),
            Ok(Ok(rows)) => {
                lease.give_back();
                return Ok(rows);
            }
            // Nothing was done; without preparing it will be.
            Ok(Err(cause)) if error::is_poolers(&cause) && !has_tried => {
                has_tried = true;
                pool.note_pooler();
            }
            Ok(Err(cause)) => {
                // The transaction is over, so the connection is as good as before.
                lease.give_back();
                return Err(error::map(&cause));
            }
        }
    }
}

async fn attempt(
    lease: &Lease<'_>,
    limit: Duration,
    [first, second]: [Option<Step<'_>>; 2],
    afterwards: Option<Step<'_>>,
) -> Result<[Vec<Row>; 2], tokio_postgres::Error> {
    let begin = begin(limit);
    // In this order, and all before the first answer.
    let (begun, first, second, committed, _told) = tokio::join!(
        biased;
        lease.client().batch_execute(&begin),
        step(lease, first),
        step(lease, second),
        lease.client().batch_execute("COMMIT"),
        step(lease, afterwards),
    );
    begun?;
    // A statement that failed has undone everything, whatever the end says.
    let rows = [first?, second?];
    committed?;
    Ok(rows)
}

async fn step(
    lease: &Lease<'_>,
    step: Option<Step<'_>>,
) -> Result<Vec<Row>, tokio_postgres::Error> {
    match step {
        Some((sql, parameters)) => lease.query(sql, parameters).await,
        None => Ok(Vec::new()),
    }
}
