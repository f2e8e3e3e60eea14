//! Locks whose keys are on two nodes of a Cluster, because their slot is moving from one to the
//! other. That can last: a slot with many keys takes minutes to move, and an interrupted move stays
//! unfinished.
//!
//! A script must declare its keys, and neither node runs a script some of whose keys are on the
//! other. So every key has a separate script here, which is sent to the node that has the key, and
//! the order of the steps gives the guarantees that a single script gives otherwise:
//!
//! * A lock that exists is extended and released through its own record, which names its holder.
//! * A new lock is first *claimed* on the node that the slot moves to, the only one where keys can
//!   be created. Its fence is drawn while it is claimed, wherever the counter is, and then *sealed*
//!   in the record. Claims exclude each other, so fences still grow from holder to holder. A claim
//!   whose owner is gone ends with its TTL, like every lock.

use redis::Value;

use super::reply::{list, number, text};
use super::scripts::Argument::{Number, Text};
use super::scripts::SCRIPTS;
use super::shard::{MARK_MS, OUTLIVES_MS, Shard};
use super::{error, record};
use crate::common::error::{Error, ErrorCode, Result};
use crate::common::fence::Fence;
use crate::common::time::TIME_TOLERANCE_MS;
use crate::contract::LockBackend;
use crate::contract::listener::holder_age_text;
use crate::contract::request::{AcquireRequest, ExtendRequest, ReleaseRequest};

impl Shard {
    /// Does what the acquire script does, with the same answers.
    pub(super) async fn acquire_scattered(&self, request: &AcquireRequest) -> Result<Value> {
        const ATTEMPTS: u32 = 3;
        let [lock_key, index_key, _fence_key] = &self.names_of(request)?;
        // The claim does not see an entry on the node that the slot leaves.
        let entry = self.index_entry(index_key).await?;
        if entry.as_deref() == Some("") {
            return Ok(Value::Array(vec![Value::Int(2)]));
        }
        let ttl_ms = request.ttl().as_millis();
        let lock_id = request.lock_id();
        let arguments = [
            Text(lock_id.expose()),
            Number(ttl_ms),
            Number(TIME_TOLERANCE_MS),
            Number(ttl_ms + OUTLIVES_MS),
            Text(&record::key_and_holder(request)),
            Text(index_key),
            Number(u64::from(entry.is_some())),
        ];
        let call = SCRIPTS.claim.call(&[lock_key], &arguments);
        for _ in 0..ATTEMPTS {
            let answer = self.shared.route.run(&call).await?;
            match list(&answer) {
                Some((3, [])) => {}
                _ if is_claim(&answer) => {
                    return self.seal(request).await;
                }
                _ => return Ok(answer),
            }
        }
        Err(Error::new(
            ErrorCode::ServiceUnavailable,
            "the Cluster slot of this lock is moving; try again",
        )
        .without_effect())
    }

    /// Gives a claimed lock its fence. The claim was written, so every error from here on may have
    /// taken effect, unless the claim was undone.
    pub(super) async fn seal(&self, request: &AcquireRequest) -> Result<Value> {
        let sealed = self.draw_and_seal(request).await;
        match sealed.map_err(Error::after_effect)? {
            // Without a fence, the lock is not granted.
            refused if matches!(list(&refused), Some((..0, _))) => {
                let undone = self.release(&ReleaseRequest::undo(request)).await;
                undone.map_err(Error::after_effect)?;
                Ok(refused)
            }
            sealed => Ok(sealed),
        }
    }

    async fn draw_and_seal(&self, request: &AcquireRequest) -> Result<Value> {
        let [lock_key, _index_key, fence_key] = &self.names_of(request)?;
        let route = &self.shared.route;
        let [fences_per_ms, counter_expiry_ms] = self.shared.fences.arguments();
        let ttl = Number(request.ttl().as_millis());
        let arguments = [Number(Fence::MAX.get()), fences_per_ms, counter_expiry_ms, ttl];
        let drawn = route.run(&SCRIPTS.draw.call(&[fence_key], &arguments)).await?;
        let Some((1, [fence])) = list(&drawn) else { return Ok(drawn) };
        let fence = text(fence).ok_or_else(error::unexpected_response)?;
        let lock_id = request.lock_id();
        let arguments = [Text(lock_id.expose()), Number(TIME_TOLERANCE_MS), Text(fence)];
        route.run(&SCRIPTS.seal.call(&[lock_key], &arguments)).await
    }

    /// Does what the extend script does, with the same answers.
    pub(super) async fn extend_scattered(
        &self,
        request: &ExtendRequest,
        [index_key, hinted]: &[String; 2],
    ) -> Result<Value> {
        let (lock_id, ttl_ms) = (request.lock_id(), request.ttl().as_millis());
        let route = &self.shared.route;
        let storage_ms = Number(ttl_ms + OUTLIVES_MS);
        let arguments =
            [Text(lock_id.expose()), Number(TIME_TOLERANCE_MS), Number(ttl_ms), storage_ms];
        let script = &SCRIPTS.extend_one;
        let mut lock_key = hinted.clone();
        let mut answer = route.run(&script.call(&[hinted], &arguments)).await?;
        if matches!(list(&answer), Some((0, []))) {
            let Some(entry) = self.lock_key_of(index_key).await? else {
                return Ok(answer);
            };
            lock_key = entry;
            answer = route.run(&script.call(&[&lock_key], &arguments)).await?;
        }
        if matches!(list(&answer), Some((1, _))) {
            let entry = SCRIPTS.index.call(&[index_key], &[Text(&lock_key), storage_ms]);
            route.run(&entry).await.map_err(Error::after_effect)?;
        }
        Ok(answer)
    }

    /// Does what the release script does, with the same answers.
    pub(super) async fn release_scattered(
        &self,
        request: &ReleaseRequest,
        [index_key, hinted]: &[String; 2],
    ) -> Result<Value> {
        let lock_id = request.lock_id();
        let route = &self.shared.route;
        let entry = self.lock_key_of(index_key).await?;
        let index = |expiry_ms| SCRIPTS.index.call(&[index_key], &[Text(""), Number(expiry_ms)]);
        // An entry refuses a late copy of the acquire, as the marker does, and leads to the lock if
        // this undo has to be repeated. Without one, the marker comes before the lock is free.
        let has_entry = entry.is_some();
        if request.is_undo() && !has_entry {
            route.run(&index(MARK_MS)).await?;
        }
        let arguments = [
            Number(TIME_TOLERANCE_MS),
            Text(self.shared.channels.prefix()),
            Text("S"),
            Text(lock_id.expose()),
            Text(&holder_age_text(request.holder_age())),
        ];
        let script = &SCRIPTS.release_one;
        let mut answer = route.run(&script.call(&[hinted], &arguments)).await?;
        if let (Value::Int(0), Some(entry)) = (&answer, entry.filter(|entry| entry != hinted)) {
            answer = route.run(&script.call(&[&entry], &arguments)).await?;
        }
        if request.is_undo() && has_entry {
            route.run(&index(MARK_MS)).await.map_err(Error::after_effect)?;
        }
        if !request.is_undo() && answer == Value::Int(1) {
            // If this fails, the stale entry expires by itself.
            drop(route.run(&index(0)).await);
        }
        Ok(answer)
    }
}

/// Returns whether an answer grants a lock that has no fence yet.
pub(super) fn is_claim(answer: &Value) -> bool {
    match list(answer) {
        Some((1, [fence, _expires])) => number(fence) == Some(0),
        _ => false,
    }
}
