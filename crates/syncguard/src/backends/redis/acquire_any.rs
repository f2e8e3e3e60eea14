//! Acquires one of several locks in one script.

use redis::Value;

use super::scripts::Argument::{self, Number, Text};
use super::shard::{GRACE_MS, Shard};
use super::{error, record, reply};
use crate::common::error::Result;
use crate::common::fence::Fence;
use crate::common::time::TIME_TOLERANCE_MS;
use crate::contract::acquire_any::look_then_acquire;
use crate::contract::outcome::{AcquireAnyOutcome, AcquireOutcome};
use crate::contract::request::AcquireAnyRequest;

const OPERATION: &str = "acquire";

impl Shard {
    pub(super) async fn acquire_any_in_script(
        &self,
        request: &AcquireAnyRequest,
    ) -> Result<AcquireAnyOutcome> {
        if self.shared.replicas.is_some() {
            // Replicas confirm the writes of one acquire.
            return Box::pin(look_then_acquire(self, request)).await;
        }
        let (names, first) = (&self.shared.names, request.first());
        let lock_id = first.lock_id();
        let index_key = names.space.index_key(&lock_id)?;
        let locks = request.keys().iter().map(|key| names.lock_key(key));
        let locks = locks.collect::<Result<Vec<String>>>()?;
        let fences = locks.iter().map(|lock_key| names.space.fence_key(lock_key));
        let fences = fences.collect::<Result<Vec<String>>>()?;
        let keys: Vec<&str> =
            std::iter::once(&index_key).chain(&locks).chain(&fences).map(String::as_str).collect();
        let user_keys: Vec<String> =
            request.keys().iter().map(|key| record::quoted(key.as_str())).collect();
        let ttl_ms = first.ttl().as_millis();
        let holder = record::holder_field(first);
        let mut arguments: Vec<Argument<'_>> = vec![
            Text(lock_id.expose()),
            Number(ttl_ms),
            Number(TIME_TOLERANCE_MS),
            Number(ttl_ms + TIME_TOLERANCE_MS + GRACE_MS),
            Text(&holder),
            Number(Fence::MAX.get()),
            Number(0),
        ];
        arguments.extend(self.shared.fences.arguments(first.ttl()));
        arguments.extend(user_keys.iter().map(|key| Text(key)));
        let script = &self.shared.scripts.acquire_any;
        let connection = &self.shared.connection;
        match connection.run_together(OPERATION, script, &keys, &arguments).await? {
            Some(answer) => outcome(&answer, request),
            // The keys are on two nodes while their slot moves; nothing was changed.
            None => Box::pin(look_then_acquire(self, request)).await,
        }
    }
}

/// Reads the reply, which is that of an acquire with the place of the lock at its end.
fn outcome(answer: &Value, request: &AcquireAnyRequest) -> Result<AcquireAnyOutcome> {
    let unexpected = || error::unexpected_response(OPERATION);
    let (granted, place) = match answer {
        Value::Array(items) if items.len() == 4 => {
            let place = reply::number(&items[3]).and_then(|place| usize::try_from(place).ok());
            (Value::Array(items[..3].to_vec()), Some(place.ok_or_else(unexpected)?))
        }
        answer => (answer.clone(), None),
    };
    let outcome = reply::acquire(&granted);
    match outcome.map_err(|error| error.with_operation("redis", OPERATION))? {
        AcquireOutcome::Acquired(lease) => {
            let place = place.and_then(|place| place.checked_sub(1)).ok_or_else(unexpected)?;
            let key = request.keys().get(place).ok_or_else(unexpected)?;
            lease.fence().warn_near_the_end(key);
            Ok(AcquireAnyOutcome::Acquired { key: key.clone(), lease })
        }
        AcquireOutcome::Contended { expires_in } => Ok(AcquireAnyOutcome::Contended { expires_in }),
        AcquireOutcome::AlreadyUsed => Ok(AcquireAnyOutcome::Contended { expires_in: None }),
    }
}
