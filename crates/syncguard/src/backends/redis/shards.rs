//! Locks whose shard is not known, and what a store with shards remembers about itself.
//!
//! A lock id that was made for a store with shards names its shard. One that was made elsewhere, or
//! for one of several locks, does not, and is looked for in all shards.

use std::sync::Arc;

use tokio::task::JoinSet;

use super::layout::count_name;
use super::nodes::Nodes;
use super::route::{OwnedRoute, Route};
use super::scripts::Argument::Number;
use super::scripts::SCRIPTS;
use super::shard::Shard;
use super::{Parts, RedisBackend, error, reply};
use crate::common::error::{Error, Result};
use crate::common::holder::BreakNote;
use crate::common::lock_id::LockId;
use crate::contract::LockBackend;
use crate::contract::outcome::{ExtendOutcome, NotHeldReason, ReleaseOutcome};
use crate::contract::request::{ExtendRequest, ReleaseRequest};
use crate::contract::stored_lock::StoredLock;

impl RedisBackend {
    /// Returns the shard that has the lock of an id, if the id names it or there is only one.
    pub(super) fn shard_of_id(&self, lock_id: &LockId) -> Option<&Shard> {
        match self.shared.shards.as_slice() {
            [only] => Some(only),
            shards => shards.get(usize::from(lock_id.shard()?)),
        }
    }

    /// Releases a lock that may be in any shard. A hint only says where to begin.
    pub(super) async fn release_anywhere(
        &self,
        request: &ReleaseRequest,
    ) -> Result<ReleaseOutcome> {
        const NOT_FOUND: ReleaseOutcome = ReleaseOutcome::NotHeld(NotHeldReason::NotFound);
        let lock_id = request.lock_id();
        if request.is_undo() {
            return self.undo_anywhere(request).await;
        }
        if let Some(key) = &request.hint().key {
            match self.shard(key).release(request).await? {
                NOT_FOUND => {}
                outcome => return Ok(outcome),
            }
        }
        match self.locate(lock_id).await.map_err(error::of_id("release", lock_id))? {
            Some(shard) => shard.release(request).await,
            None => Ok(NOT_FOUND),
        }
    }

    /// Undoes a request wherever it may have arrived, or may still arrive: the key of the request
    /// is only the first of those that it was for.
    async fn undo_anywhere(&self, request: &ReleaseRequest) -> Result<ReleaseOutcome> {
        let undo = request.clone();
        let outcomes = self.in_all(move |shard| {
            let undo = undo.clone();
            async move { shard.release(&undo).await }
        });
        let mut undone = ReleaseOutcome::NotHeld(NotHeldReason::NotFound);
        let mut failure = None;
        for outcome in outcomes.await {
            match outcome {
                // A request is granted once.
                Ok(ReleaseOutcome::Released) => return Ok(ReleaseOutcome::Released),
                Ok(ReleaseOutcome::NotHeld(NotHeldReason::NotFound)) => {}
                Ok(not_held) => undone = not_held,
                Err(error) => failure = Some(error),
            }
        }
        failure.map_or(Ok(undone), Err)
    }

    pub(super) async fn extend_anywhere(&self, request: &ExtendRequest) -> Result<ExtendOutcome> {
        let lock_id = request.lock_id();
        if let Some(key) = &request.hint().key {
            match self.shard(key).extend(request).await? {
                ExtendOutcome::NotHeld(NotHeldReason::NotFound) => {}
                outcome => return Ok(outcome),
            }
        }
        match self.locate(lock_id).await.map_err(error::of_id("extend", lock_id))? {
            Some(shard) => shard.extend(request).await,
            None => Ok(ExtendOutcome::NotHeld(NotHeldReason::NotFound)),
        }
    }

    pub(super) async fn lookup_anywhere(&self, lock_id: &LockId) -> Result<Option<StoredLock>> {
        match self.locate(*lock_id).await.map_err(error::of_id("lookup", *lock_id))? {
            Some(shard) => shard.lookup_id(lock_id).await,
            None => Ok(None),
        }
    }

    pub(super) async fn break_note_anywhere(&self, lock_id: &LockId) -> Option<BreakNote> {
        let lock_id = *lock_id;
        let notes = self.in_all(move |shard| async move { shard.break_note(&lock_id).await }).await;
        notes.into_iter().flatten().next()
    }

    /// Returns the shard that has an index entry of an id. Fails if one that could not be asked may
    /// have it.
    async fn locate(&self, lock_id: LockId) -> Result<Option<Shard>> {
        let found = self.in_all(move |shard| async move {
            let index = shard.shared.names.space.index_key(&lock_id)?;
            let entry = shard.lock_key_of(&index).await?;
            Ok(entry.map(|_lock_key| shard))
        });
        let mut failure = None;
        for found in found.await {
            match found {
                Ok(Some(shard)) => return Ok(Some(shard)),
                Ok(None) => {}
                Err(error) => failure = Some(error),
            }
        }
        failure.map_or(Ok(None), Err)
    }

    /// Calls all shards at the same time.
    async fn in_all<T, F>(&self, call: impl Fn(Shard) -> F) -> Vec<T>
    where
        T: Send + 'static,
        F: Future<Output = T> + Send + 'static,
    {
        let mut calls: JoinSet<T> = self.shared.shards.iter().cloned().map(call).collect();
        let mut answers = Vec::with_capacity(self.shared.shards.len());
        while let Some(answer) = calls.join_next().await {
            // A call neither panics nor is aborted before this function ends.
            answers.extend(answer);
        }
        answers
    }
}

impl Parts {
    /// Remembers the number of shards in the store. Fails if the store has another number.
    pub(super) async fn check_count(
        &self,
        nodes: &Arc<Nodes>,
        prefix: &str,
        count: u16,
    ) -> Result<()> {
        // The record has a slot of its own, after those of the shards.
        let (nodes, shard) = (Arc::clone(nodes), usize::from(count));
        let route = Route::Owned(OwnedRoute::Shard { nodes, shard });
        let name = count_name(prefix);
        let call = SCRIPTS.shards.call(&[&name], &[Number(u64::from(count))]);
        match reply::number(&route.run(&call).await?) {
            Some(remembered) if remembered == u64::from(count) => Ok(()),
            Some(remembered) => Err(Error::invalid(format!(
                "this store has {remembered} shards, not {count}; set shards={remembered}, or use \
                 another prefix"
            ))),
            None => Err(error::unexpected_response()),
        }
    }
}
