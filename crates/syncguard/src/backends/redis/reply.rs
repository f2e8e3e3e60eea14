//! Reads the replies of the scripts, which may come from another version or be invalid.

use std::time::Duration;

use redis::Value;

use super::{error, record};
use crate::common::error::{Error, ErrorCode, Result};
use crate::common::fence::Fence;
use crate::common::lock_id::LockId;
use crate::common::time::Timestamp;
use crate::contract::outcome::{
    AcquireOutcome, ExtendOutcome, Extension, Lease, NotHeldReason, ReleaseOutcome,
};
use crate::contract::stored_lock::StoredLock;

/// Splits a list that begins with a number, which is what most scripts return.
pub(super) fn list(answer: &Value) -> Option<(i64, &[Value])> {
    let Value::Array(items) = answer else { return None };
    match items.split_first()? {
        (Value::Int(number), rest) => Some((*number, rest)),
        _ => None,
    }
}

pub(super) fn number(value: &Value) -> Option<u64> {
    match value {
        Value::Int(number) => u64::try_from(*number).ok(),
        _ => text(value)?.parse().ok(),
    }
}

pub(super) fn text(value: &Value) -> Option<&str> {
    match value {
        Value::BulkString(bytes) => str::from_utf8(bytes).ok(),
        Value::SimpleString(text) => Some(text),
        _ => None,
    }
}

/// Reads a fence, which is a number, or text if it comes from a record.
fn fence(value: &Value) -> Option<Fence> {
    match value {
        Value::Int(number) => Fence::new(u64::try_from(*number).ok()?).ok(),
        _ => text(value)?.parse().ok(),
    }
}

/// Reads the reply to an acquire. A reply that is none of the script's is an error.
pub(super) fn acquire(answer: &Value) -> Result<AcquireOutcome> {
    let outcome = match list(answer) {
        Some((0, [expires_in])) => number(expires_in).map(|free_in_ms| {
            Ok(AcquireOutcome::Contended { expires_in: Some(Duration::from_millis(free_in_ms)) })
        }),
        Some((1, [fence, expires])) => self::fence(fence)
            // A claim that is not sealed is not a grant.
            .filter(|fence| fence.get() > 0)
            .zip(number(expires))
            .map(|(fence, expires_ms)| {
                let expires_at = Timestamp::from_millis(expires_ms);
                Ok(AcquireOutcome::Acquired(Lease::new(fence, expires_at)))
            }),
        Some((2, [])) => Some(Ok(AcquireOutcome::AlreadyUsed)),
        Some((-1, [])) => Some(Err(error::foreign())),
        Some((-2, [])) => Some(Err(Error::new(
            ErrorCode::Internal,
            "the lock id is already in use; nothing was changed",
        )
        .without_effect())),
        Some((-3, [])) => Some(Err(Error::foreign_counter())),
        Some((-4, [])) => Some(Fence::after(Fence::MAX.get()).map(|_| AcquireOutcome::AlreadyUsed)),
        _ => None,
    };
    outcome.unwrap_or_else(|| Err(error::unexpected_response()))
}

pub(super) fn release(answer: &Value) -> Result<ReleaseOutcome> {
    match answer {
        Value::Int(1) => Ok(ReleaseOutcome::Released),
        Value::Int(0) => Ok(ReleaseOutcome::NotHeld(NotHeldReason::NotFound)),
        Value::Int(2) => Ok(ReleaseOutcome::NotHeld(NotHeldReason::Expired)),
        Value::Int(-1) => Err(error::foreign()),
        _ => Err(error::unexpected_response()),
    }
}

pub(super) fn extend(answer: &Value) -> Result<ExtendOutcome> {
    let outcome = match list(answer) {
        Some((1, [expires])) => number(expires).map(|expires_ms| {
            Ok(ExtendOutcome::Extended(Extension::new(Timestamp::from_millis(expires_ms))))
        }),
        Some((0, [])) => Some(Ok(ExtendOutcome::NotHeld(NotHeldReason::NotFound))),
        Some((2, [])) => Some(Ok(ExtendOutcome::NotHeld(NotHeldReason::Expired))),
        Some((-1, [])) => Some(Err(error::foreign())),
        _ => None,
    };
    outcome.unwrap_or_else(|| Err(error::unexpected_response()))
}

/// The reply to `is_locked`.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) is_live: bool,
    /// How long ago the record expired, and its holder.
    pub(super) expired: Option<(Timestamp, LockId)>,
}

pub(super) fn is_locked(answer: &Value) -> Result<Found> {
    match list(answer) {
        Some((0, [])) => Ok(Found { is_live: false, expired: None }),
        Some((live @ (0 | 1), [expired, lock_id])) => {
            let holder = text(lock_id).and_then(|id| LockId::parse(id).ok());
            let expired_ms = number(expired).ok_or_else(error::unexpected_response)?;
            let expired = holder.map(|holder| (Timestamp::from_millis(expired_ms), holder));
            Ok(Found { is_live: live == 1, expired })
        }
        Some((-1, [])) => Err(error::foreign()),
        _ => Err(error::unexpected_response()),
    }
}

pub(super) fn lookup(answer: &Value) -> Result<Option<StoredLock>> {
    match answer {
        Value::Nil => Ok(None),
        Value::BulkString(json) => record::parse(json).map(Some),
        Value::Int(-1) => Err(error::foreign()),
        _ => Err(error::unexpected_response()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_reply_panics() {
        let seeds: [&[u8]; 9] = [
            b"*2\r\n:0\r\n:1500\r\n",
            b"*3\r\n:1\r\n$15\r\n000000000000007\r\n$13\r\n1794769120208\r\n",
            b"*1\r\n:2\r\n",
            b"*1\r\n:-4\r\n",
            b"*2\r\n:1\r\n:1794769120208\r\n",
            b"*3\r\n:0\r\n:2500\r\n$22\r\nWERfqnNu2ScFxRRPeY_ufw\r\n",
            b":1\r\n",
            b"$-1\r\n",
            b"+OK\r\n",
        ];
        test_support::fuzz("redis_reply", env!("CARGO_MANIFEST_DIR"), seeds, |bytes| {
            let Ok(value) = redis::parse_redis_value(bytes) else { return "no reply".to_owned() };
            let granted = acquire(&value);
            if let Ok(AcquireOutcome::Acquired(lease)) = &granted {
                assert!(lease.fence().get() > 0, "a claim counted as a grant");
            }
            let shape = |is_ok: bool, error: Option<&Error>| {
                format!("{is_ok} {}", error.map_or("", |error| error.message()))
            };
            [
                shape(granted.is_ok(), granted.as_ref().err()),
                shape(release(&value).is_ok(), release(&value).as_ref().err()),
                shape(extend(&value).is_ok(), extend(&value).as_ref().err()),
                shape(is_locked(&value).is_ok(), is_locked(&value).as_ref().err()),
                shape(lookup(&value).is_ok(), lookup(&value).as_ref().err()),
            ]
            .concat()
        });
    }
}
