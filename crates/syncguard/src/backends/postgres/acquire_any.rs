//! Acquires one of several locks in one statement.

use std::time::Duration;

use super::pool::Urgency;
use super::record::{column, fence, integer, millis};
use super::statements::Value;
use super::{PostgresBackend, error};
use crate::common::error::Result;
use crate::common::fence::Fence;
use crate::common::key::Key;
use crate::common::time::TIME_TOLERANCE_MS;
use crate::contract::acquire_any::look_then_acquire;
use crate::contract::outcome::{AcquireAnyOutcome, Lease};
use crate::contract::request::AcquireAnyRequest;

impl PostgresBackend {
    pub(super) async fn try_acquire_any(
        &self,
        request: &AcquireAnyRequest,
    ) -> Result<AcquireAnyOutcome> {
        let (names, first) = (&self.shared.names, request.first());
        let keys = request.keys().iter().map(|key| names.lock_key(key));
        let keys = keys.collect::<Result<Vec<String>>>()?;
        let counters = keys.iter().map(|key| names.fence_key(key));
        let counters = counters.collect::<Result<Vec<String>>>()?;
        let user_keys: Vec<&str> = request.keys().iter().map(Key::as_str).collect();
        let lock_keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        let fence_keys: Vec<&str> = counters.iter().map(String::as_str).collect();
        let lock_id = first.lock_id();
        let holder = first.holder().map(|holder| holder.tagged(&lock_id));
        let values = [
            Value::Texts(&lock_keys),
            Value::Int8(integer(TIME_TOLERANCE_MS)),
            Value::Text(lock_id.expose()),
            Value::Int8(integer(first.ttl().as_millis())),
            Value::Int8(integer(Fence::MAX.get())),
            Value::Texts(&fence_keys),
            Value::Texts(&user_keys),
            Value::Int8(integer(self.shared.fences.per_millisecond())),
            Value::MaybeText(holder.as_deref()),
        ];
        let statements = &self.shared.statements;
        let rows = self.run(Urgency::Ordinary, (&statements.acquire_any, &values)).await?;
        let row = rows.first().ok_or_else(error::unexpected_response)?;
        if let Some(place) = column::<Option<i64>>(row, 0)? {
            let place = usize::try_from(place).ok().and_then(|place| place.checked_sub(1));
            let key = place.and_then(|place| request.keys().get(place));
            let key = key.ok_or_else(error::unexpected_response)?.clone();
            let lease = Lease::new(fence(column(row, 1)?)?, millis(column(row, 2)?)?);
            lease.fence().warn_near_the_end(&key);
            return Ok(AcquireAnyOutcome::Acquired { key, lease });
        }
        if column::<bool>(row, 4)? {
            // Another transaction took it after this one had its snapshot, or its counter cannot
            // advance. Single acquires find out.
            return Box::pin(look_then_acquire(self, request)).await;
        }
        let expires_in = column::<Option<i64>>(row, 3)?;
        let expires_in = expires_in.and_then(|ms| u64::try_from(ms).ok());
        Ok(AcquireAnyOutcome::Contended { expires_in: expires_in.map(Duration::from_millis) })
    }
}
