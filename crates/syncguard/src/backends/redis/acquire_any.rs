//! Acquires one of several locks in one script.

use redis::Value;

use super::route::GiveUp;
use super::scripts::Argument::{Number, Text};
use super::scripts::SCRIPTS;
use super::shard::Shard;
use super::{error, record, reply};
use crate::common::error::Result;
use crate::common::key::Key;
use crate::contract::acquire_any::look_then_acquire;
use crate::contract::outcome::{AcquireAnyOutcome, AcquireOutcome};
use crate::contract::request::AcquireAnyRequest;

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
        let mut names_of = vec![names.space.index_key(&lock_id)?];
        for key in request.keys() {
            let lock_key = names.lock_key(key)?;
            let fence_key = names.space.fence_key(&lock_key)?;
            names_of.extend([lock_key, fence_key]);
        }
        let keys: Vec<&str> = names_of.iter().map(String::as_str).collect();
        let user_key = |key: &Key| record::with_holder(key, first.holder());
        let user_keys: Vec<String> = request.keys().iter().map(user_key).collect();
        let mut arguments = self.acquire_arguments().to_vec();
        arguments.extend([Text(lock_id.expose()), Number(first.ttl().as_millis())]);
        arguments.extend(user_keys.iter().map(|key| Text(key)));
        let call = SCRIPTS.acquire_any.call(&keys, &arguments);
        match self.shared.route.drive(&call, GiveUp::IfApart).await? {
            Some(answer) => outcome(&answer, request),
            // The keys are on two nodes while their slot moves; nothing was changed.
            None => Box::pin(look_then_acquire(self, request)).await,
        }
    }
}

/// Reads the reply, which is that of an acquire with the place of the lock at its end.
fn outcome(answer: &Value, request: &AcquireAnyRequest) -> Result<AcquireAnyOutcome> {
    let unexpected = error::unexpected_response;
    let (granted, place) = match answer {
        Value::Array(items) if items.len() == 4 => {
            let place = reply::number(&items[3]).and_then(|place| usize::try_from(place).ok());
            (Value::Array(items[..3].to_vec()), Some(place.ok_or_else(unexpected)?))
        }
        answer => (answer.clone(), None),
    };
    match reply::acquire(&granted)? {
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
