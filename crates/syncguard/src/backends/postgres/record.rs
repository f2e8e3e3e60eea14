//! Parses stored rows, which may be invalid.

use tokio_postgres::Row;

use super::error;
use crate::common::error::{Error, Result};
use crate::common::fence::Fence;
use crate::common::fence_source::FenceSource;
use crate::common::holder::HolderInfo;
use crate::common::key::Key;
use crate::common::lock_id::LockId;
use crate::common::time::{Timestamp, is_live};
use crate::contract::outcome::{AcquireOutcome, Lease, NotHeldReason};
use crate::contract::request::AcquireRequest;
use crate::contract::stored_lock::StoredLock;

/// Converts a time or a fence, which always fits, to the server's signed integer.
pub(super) fn integer(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

pub(super) fn millis(number: i64) -> Result<Timestamp> {
    u64::try_from(number).map(Timestamp::from_millis).map_err(|_cause| Error::foreign_lock())
}

/// Returns a column. A value of another type is an error.
pub(super) fn column<'a, T: tokio_postgres::types::FromSql<'a>>(
    row: &'a Row,
    place: usize,
) -> Result<T> {
    row.try_get(place).map_err(|_cause| error::unexpected_response())
}

pub(super) fn fence(text: &str) -> Result<Fence> {
    text.parse().map_err(|_cause| Error::foreign_lock())
}

/// Parses a stored lock and the server's time. An invalid row is an error, never a panic.
pub(super) fn stored(row: &Row) -> Result<(StoredLock, Timestamp)> {
    let foreign = |_cause| Error::foreign_lock();
    let lock_id = LockId::parse(column(row, 1)?).map_err(foreign)?;
    // The TypeScript implementation leaves the column as the holder before it has written it.
    let holder = column::<Option<&str>>(row, 6)?;
    let holder = holder.and_then(|text| HolderInfo::parse_tagged(text, &lock_id));
    let lock = StoredLock::new(
        Key::new(column::<&str>(row, 0)?).map_err(foreign)?,
        lock_id,
        fence(column(row, 2)?)?,
    )
    .acquired_at(millis(column(row, 3)?)?)
    .expires_at(millis(column(row, 4)?)?)
    .held_by(holder);
    Ok((lock, millis(column(row, 5)?)?))
}

pub(super) fn live(found: Option<(StoredLock, Timestamp)>) -> Option<StoredLock> {
    found.filter(|(lock, now)| is_live(lock.expires_at, *now)).map(|(lock, _)| lock)
}

/// Returns why nothing was changed: there is no row, or it is dead. Fails if it is not a lock.
pub(super) fn not_held_reason(row: &Row) -> Result<NotHeldReason> {
    match column::<Option<&str>>(row, 1)? {
        None => Ok(NotHeldReason::NotFound),
        Some(stored) => fence(stored).map(|_| NotHeldReason::Expired),
    }
}

/// Returns the outcome of `acquire`; `None` if the lock looked free but another transaction had the
/// key's advisory lock, or just had it.
pub(super) fn outcome(
    row: &Row,
    request: &AcquireRequest,
    fences: FenceSource,
) -> Result<Option<AcquireOutcome>> {
    if let Some(taken) = column::<Option<&str>>(row, 0)? {
        let granted = fence(taken)?;
        granted.warn_near_the_end(request.key());
        return Ok(Some(AcquireOutcome::Acquired(Lease::new(granted, millis(column(row, 1)?)?))));
    }
    let now = millis(column(row, 2)?)?;
    if let Some(held_by) = column::<Option<&str>>(row, 3)? {
        LockId::parse(held_by).map_err(|_cause| Error::foreign_lock())?;
        let (stored, expires_at) = (fence(column(row, 4)?)?, millis(column(row, 5)?)?);
        match (held_by == request.lock_id().expose(), is_live(expires_at, now)) {
            (true, true) => {
                return Ok(Some(AcquireOutcome::Acquired(Lease::new(stored, expires_at))));
            }
            (true, false) => return Ok(Some(AcquireOutcome::AlreadyUsed)),
            (false, true) => {
                return Ok(Some(AcquireOutcome::Contended {
                    expires_in: Some(expires_at.dead_in(now)),
                }));
            }
            (false, false) => {}
        }
    }
    let counter = column::<Option<i64>>(row, 6)?.unwrap_or(0);
    fences.next(u64::try_from(counter).map_err(|_cause| Error::foreign_counter())?, now)?;
    Ok(None)
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
    use tokio_postgres::NoTls;

    use super::*;
    use crate::common::ttl::Ttl;

    /// Returns a message of the server.
    fn message(kind: u8, content: &[u8]) -> Vec<u8> {
        let length = u32::try_from(content.len() + 4).expect("short").to_be_bytes();
        [&[kind], length.as_slice(), content].concat()
    }

    /// Reads what the client has sent, and answers.
    async fn answer(server: &mut DuplexStream, answer: &[u8]) {
        let mut request = [0; 4096];
        let length = server.read(&mut request).await.expect("a request");
        assert!(length < request.len(), "the request is read at once");
        server.write_all(answer).await.expect("written");
    }

    /// Splits an input into cells, and returns the answer to a query for them: each cell has a type
    /// and a content, in the binary format for numbers.
    fn row(input: &[u8]) -> Vec<u8> {
        let (mut columns, mut cells) = (Vec::new(), Vec::new());
        let mut parts = input.split(|&byte| byte == b'|');
        for _ in 0..7 {
            let (kind, content) =
                parts.next().and_then(<[u8]>::split_first).unwrap_or((&b'n', b""));
            let number = || str::from_utf8(content).ok()?.parse::<i64>().ok();
            let (oid, content): (u32, Option<Vec<u8>>) = match kind {
                b't' => (25, Some(content.to_vec())),
                b'i' => (20, Some(number().unwrap_or(i64::MIN).to_be_bytes().to_vec())),
                b'I' => (20, Some(content.to_vec())),
                b'b' => (17, Some(content.to_vec())),
                b'm' => (25, None),
                _ => (20, None),
            };
            columns.extend_from_slice(b"c\0");
            columns.extend_from_slice(&[0; 6]);
            columns.extend_from_slice(&oid.to_be_bytes());
            columns.extend_from_slice(&[0, 8, 0, 0, 0, 0, 0, 1]);
            let length =
                content.as_ref().map_or(-1, |cell| i32::try_from(cell.len()).expect("short"));
            cells.extend_from_slice(&length.to_be_bytes());
            cells.extend(content.unwrap_or_default());
        }
        [
            message(b'1', &[]),
            message(b'2', &[]),
            message(b't', &[0, 0]),
            message(b'T', &[[0, 7].as_slice(), &columns].concat()),
            message(b'D', &[[0, 7].as_slice(), &cells].concat()),
            message(b'C', b"SELECT 1\0"),
            message(b'Z', b"I"),
        ]
        .concat()
    }

    #[test]
    fn no_row_panics() {
        let seeds: [&[u8]; 5] = [
            b"tk|tWERfqnNu2ScFxRRPeY_ufw|t000000000000007|i1794769120208|i1794769150208|i1|i7",
            b"t000000000000008|i1794769150208|i1794769120208|m|m|n|n",
            b"m|n|i1794769120208|tWERfqnNu2ScFxRRPeY_ufw|t000000000000007|i1794769150208|i7",
            b"m|n|i1794769120208|tWERfqnNu2ScFxRRPeY_ufw|t000000000000007|i1|i999999999999999",
            b"bx|bx|bx|I1|m|i-1|i-1",
        ];
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        let (stream, mut server) = tokio::io::duplex(1 << 16);
        let (client, connection) = runtime.block_on(async {
            let mut config = tokio_postgres::Config::new();
            config.user("u");
            let hello = [message(b'R', &[0; 4]), message(b'Z', b"I")].concat();
            let (connected, ()) =
                tokio::join!(config.connect_raw(stream, NoTls), answer(&mut server, &hello));
            connected.expect("connected")
        });
        runtime.spawn(connection);
        let request = AcquireRequest::new(Key::new("k").expect("valid"), Ttl::DEFAULT);
        let request = request.expect("random");
        test_support::fuzz("postgres_row", env!("CARGO_MANIFEST_DIR"), seeds, |input| {
            let row = row(input);
            let rows = runtime.block_on(async {
                let (rows, ()) =
                    tokio::join!(client.query_typed("SELECT", &[]), answer(&mut server, &row));
                rows.expect("the protocol is kept")
            });
            let shape = |error: Option<&Error>| {
                error.map_or_else(String::new, |error| format!("{} ", error.message()))
            };
            [
                shape(stored(&rows[0]).err().as_ref()),
                shape(not_held_reason(&rows[0]).err().as_ref()),
                shape(outcome(&rows[0], &request, FenceSource::Clock).err().as_ref()),
            ]
            .concat()
        });
    }
}
