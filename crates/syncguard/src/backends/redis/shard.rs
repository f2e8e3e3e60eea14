//! The locks of one shard: all records that are in one slot of a Cluster. A store without shards
//! is one shard.

use std::fmt;
use std::pin::pin;
use std::sync::{Arc, OnceLock};

use redis::Value;

use super::batches::{Batches, Operation};
use super::config::Fences;
use super::listener::{Channels, PushSource, RedisListener};
use super::names::Names;
use super::replicas::{Confirmed, ReplicaRoute};
use super::route::Route;
use super::scripts::Argument::{self, Number, Text};
use super::scripts::{Item, SCRIPTS};
use super::{error, record, reply, scattered};
use crate::common::cleanup::CleanupGate;
use crate::common::error::{Error, ErrorCode, Result};
use crate::common::fence::{Fence, Fenced};
use crate::common::holder::BreakNote;
use crate::common::key::Key;
use crate::common::lock_id::LockId;
use crate::common::time::{CLEANUP_GUARD_MS, TIME_TOLERANCE_MS, Timestamp};
use crate::contract::LockBackend;
use crate::contract::capabilities::{Capabilities, TimeAuthority};
use crate::contract::listener::holder_age_text;
use crate::contract::notifier::Subscription;
use crate::contract::outcome::{AcquireAnyOutcome, AcquireOutcome, ExtendOutcome, ReleaseOutcome};
use crate::contract::request::{
    AcquireAnyRequest, AcquireRequest, ExtendRequest, Hint, ReleaseRequest,
};
use crate::contract::stored_lock::StoredLock;

/// How long records outlive their TTL.
pub(super) const OUTLIVES_MS: u64 = TIME_TOLERANCE_MS + GRACE_MS;
/// How long records outlive their tolerance, to distinguish "expired" from "not found".
const GRACE_MS: u64 = 1000;

/// How long the marker of an undo is kept: longer than any request takes to arrive.
pub(super) const MARK_MS: u64 = 60_000;

/// The locks of one shard. Clones share everything.
#[derive(Clone)]
pub(super) struct Shard {
    pub(super) shared: Arc<ShardInner>,
}

pub(super) struct ShardInner {
    pub(super) route: Route,
    pub(super) names: Names,
    /// `None` with the caller's own connection, on which the backend cannot subscribe.
    pub(super) listener: Option<LazyListener>,
    pub(super) replicas: Option<ReplicaRoute>,
    pub(super) fences: Fences,
    pub(super) is_cluster: bool,
    pub(super) channels: Channels,
    pub(super) cleanup: Arc<CleanupGate>,
    pub(super) batches: Batches,
}

/// A listener that starts when the first waiter comes, because most shards may have none.
pub(super) struct LazyListener {
    source: PushSource,
    listener: OnceLock<RedisListener>,
}

impl LazyListener {
    pub(super) fn new(source: PushSource) -> Self {
        Self { source, listener: OnceLock::new() }
    }

    pub(super) fn started(&self, channels: &Channels) -> &RedisListener {
        let start = || RedisListener::start(self.source.clone(), channels.clone());
        self.listener.get_or_init(start)
    }
}

impl Shard {
    /// Returns the index key of an id and the lock key from the hint, or the index key twice if
    /// there is no hint. A hint that cannot be a lock's key is ignored.
    ///
    /// On a Cluster, where a script finds only declared keys while a slot moves, the index is asked
    /// first if there is no hint, or if it `may_be_wrong`: that of an undo names the first of
    /// several locks, not the one that was granted.
    async fn keys_of(
        &self,
        lock_id: &LockId,
        hint: &Hint,
        may_be_wrong: bool,
    ) -> Result<[String; 2]> {
        let names = &self.shared.names;
        let index = names.space.index_key(lock_id)?;
        let mut hinted = hint.key.as_ref().and_then(|key| names.lock_key(key).ok());
        if self.shared.is_cluster && (hinted.is_none() || may_be_wrong) {
            let entry = Box::pin(self.lock_key_of(&index)).await?;
            hinted = entry.or(hinted);
        }
        let hinted = hinted.unwrap_or_else(|| index.clone());
        Ok([index, hinted])
    }

    /// Returns the lock key in an index entry. The marker of an undo contains none.
    pub(super) async fn lock_key_of(&self, index: &str) -> Result<Option<String>> {
        let entry = self.index_entry(index).await?;
        Ok(entry.filter(|lock_key| !lock_key.is_empty()))
    }

    pub(super) async fn index_entry(&self, index: &str) -> Result<Option<String>> {
        match self.shared.route.run(&SCRIPTS.resolve.call(&[index], &[])).await? {
            Value::Nil => Ok(None),
            entry => match reply::text(&entry) {
                Some(lock_key) => Ok(Some(lock_key.to_owned())),
                None => Err(error::unexpected_response()),
            },
        }
    }

    /// Returns the arguments of the scripts that acquire locks, as far as all calls share them.
    pub(super) fn acquire_arguments(&self) -> [Argument<'static>; 6] {
        let [fences_per_ms, counter_expiry_ms] = self.shared.fences.arguments();
        [
            Number(TIME_TOLERANCE_MS),
            Number(Fence::MAX.get()),
            fences_per_ms,
            counter_expiry_ms,
            Number(OUTLIVES_MS),
            Number(u64::from(self.shared.replicas.is_some())),
        ]
    }

    /// Returns the names of the lock, of the index of the lock id, and of the fence counter.
    pub(super) fn names_of(&self, request: &AcquireRequest) -> Result<[String; 3]> {
        let names = &self.shared.names;
        let lock_key = names.lock_key(request.key())?;
        let index_key = names.space.index_key(&request.lock_id())?;
        let fence_key = names.space.fence_key(&lock_key)?;
        Ok([lock_key, index_key, fence_key])
    }

    fn acquire_item(&self, request: &AcquireRequest) -> Result<Item> {
        let [lock_key, index_key, fence_key] = self.names_of(request)?;
        Ok(Item::new([
            Text(&lock_key),
            Text(&index_key),
            Text(&fence_key),
            Text(request.lock_id().expose()),
            Number(request.ttl().as_millis()),
            Text(&record::key_and_holder(request)),
        ]))
    }

    fn release_item(&self, request: &ReleaseRequest, [index_key, hinted]: &[String; 2]) -> Item {
        let age = if request.is_undo() {
            "undo".to_owned()
        } else {
            holder_age_text(request.holder_age())
        };
        Item::new([
            Text(index_key),
            Text(hinted),
            Text(request.lock_id().expose()),
            Text(&self.shared.channels.of_lock(hinted)),
            Text(&age),
        ])
    }

    /// Acquires a lock and waits until replicas have confirmed it.
    async fn acquire_confirmed(
        &self,
        replicas: &ReplicaRoute,
        request: &AcquireRequest,
        item: Item,
    ) -> Result<Value> {
        let call = self.call(Operation::Acquire, &[item]);
        let is_granted = |answer: &Value| matches!(reply::list(answer), Some((1, _)));
        let Confirmed { answer, confirmation } = replicas.run(&call, is_granted).await?;
        match confirmation {
            Ok(()) => Ok(answer),
            Err(error) => Err(self.undo_unconfirmed(request, error).await),
        }
    }

    /// Undoes an acquire that was granted but not confirmed, and returns the error to report.
    ///
    /// The grant was written, so the error is without effect only if the undo has found it. It may
    /// not, for example if the primary has changed. Then the caller has to undo.
    async fn undo_unconfirmed(&self, request: &AcquireRequest, error: Error) -> Error {
        match self.release(&ReleaseRequest::undo(request)).await {
            Ok(ReleaseOutcome::Released) => error.without_effect(),
            _ => error.after_effect(),
        }
    }

    /// Deletes a dead record in the background.
    fn clean_up(&self, lock_key: String, lock_id: LockId) {
        let backend = self.clone();
        tokio::spawn(async move {
            let index_key = backend.shared.names.space.index_key(&lock_id)?;
            let arguments = [Text(lock_id.expose()), Number(CLEANUP_GUARD_MS)];
            let call = SCRIPTS.cleanup.call(&[&lock_key, &index_key], &arguments);
            // Best effort: if it fails, the record stays until its physical expiry.
            backend.shared.route.run(&call).await
        });
    }
}

fn extend_item(request: &ExtendRequest, [index_key, hinted]: &[String; 2]) -> Item {
    Item::new([
        Text(index_key),
        Text(hinted),
        Text(request.lock_id().expose()),
        Number(request.ttl().as_millis()),
    ])
}

impl fmt::Debug for Shard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shard").finish_non_exhaustive()
    }
}

impl LockBackend for Shard {
    type Fencing = Fenced;

    fn capabilities(&self) -> Capabilities {
        // An undo leaves a marker, by which a late copy of its acquire is refused.
        Capabilities::new::<Fenced>("redis", TimeAuthority::Server).with_final_undo()
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<AcquireOutcome> {
        let item = self.acquire_item(request)?;
        let answer = match &self.shared.replicas {
            None => match self.run_batched(Operation::Acquire, item).await {
                Ok(Some(claim)) if scattered::is_claim(&claim) => {
                    Box::pin(self.seal(request)).await
                }
                Ok(Some(answer)) => Ok(answer),
                Ok(None) => Box::pin(self.acquire_scattered(request)).await,
                Err(error) => Err(error),
            },
            Some(replicas) => Box::pin(self.acquire_confirmed(replicas, request, item)).await,
        };
        let outcome = answer.and_then(|answer| reply::acquire(&answer));
        if let Ok(AcquireOutcome::Acquired(lease)) = &outcome {
            lease.fence().warn_near_the_end(request.key());
        }
        outcome.map_err(error::of_key("acquire", request.key()))
    }

    async fn acquire_any(&self, request: &AcquireAnyRequest) -> Result<AcquireAnyOutcome> {
        let outcome = self.acquire_any_in_script(request).await;
        outcome.map_err(error::in_operation("acquire"))
    }

    async fn release(&self, request: &ReleaseRequest) -> Result<ReleaseOutcome> {
        let failed = |error| error::of_id("release", request.lock_id())(error);
        let keys = self.keys_of(&request.lock_id(), request.hint(), request.is_undo()).await;
        let keys = keys.map_err(failed)?;
        if let Some(note) = request.break_note() {
            Box::pin(self.leave_break_note(&request.lock_id(), note)).await;
        }
        let item = self.release_item(request, &keys);
        let answer = match self.run_batched(Operation::Release, item).await {
            Ok(Some(answer)) => Ok(answer),
            Ok(None) => Box::pin(self.release_scattered(request, &keys)).await,
            Err(error) => Err(error),
        };
        let answer = answer.and_then(|answer| reply::release(&answer));
        answer
            .map_err(|error| match error.code() {
                // The script releases the lock even if there is no memory for the marker of an
                // undo.
                ErrorCode::RateLimited if request.is_undo() => error.after_effect(),
                _ => error,
            })
            .map_err(failed)
    }

    async fn extend(&self, request: &ExtendRequest) -> Result<ExtendOutcome> {
        let failed = |error| error::of_id("extend", request.lock_id())(error);
        let keys = self.keys_of(&request.lock_id(), request.hint(), false).await.map_err(failed)?;
        let in_use = self.shared.route.in_use();
        let answer = pin!(async {
            let item = extend_item(request, &keys);
            match self.run_batched(Operation::Extend, item).await? {
                Some(answer) => Ok(answer),
                None => Box::pin(self.extend_scattered(request, &keys)).await,
            }
        });
        let answer = request.bounded(answer).await.unwrap_or_else(|| {
            if let Some(in_use) = in_use {
                // It did not answer in time.
                in_use.replace();
            }
            Err(error::timeout())
        });
        answer.and_then(|answer| reply::extend(&answer)).map_err(failed)
    }

    async fn is_locked(&self, key: &Key) -> Result<bool> {
        let lock_key = self.shared.names.lock_key(key)?;
        let call = SCRIPTS.is_locked.call(&[&lock_key], &[Number(TIME_TOLERANCE_MS)]);
        let answer = self.shared.route.run(&call).await;
        let found = answer.and_then(|answer| reply::is_locked(&answer));
        let found = found.map_err(error::of_key("is_locked", key))?;
        if let Some((expired_for, lock_id)) = found.expired
            // Only the difference matters.
            && self.shared.cleanup.admits(Timestamp::from_millis(0), expired_for)
        {
            self.clean_up(lock_key, lock_id);
        }
        Ok(found.is_live)
    }

    async fn lookup_key(&self, key: &Key) -> Result<Option<StoredLock>> {
        let lock_key = self.shared.names.lock_key(key)?;
        let found = self.lookup(&lock_key, "").await;
        found.map_err(error::of_key("lookup", key))
    }

    async fn lookup_id(&self, lock_id: &LockId) -> Result<Option<StoredLock>> {
        let index_key = self.shared.names.space.index_key(lock_id)?;
        let found = if self.shared.is_cluster {
            self.lookup_in_two_steps(&index_key, lock_id).await
        } else {
            self.lookup(&index_key, lock_id.expose()).await
        };
        found.map_err(error::of_id("lookup", *lock_id))
    }

    async fn subscribe(&self, key: &Key) -> Option<Subscription> {
        self.listener()?.subscribe(key).await
    }

    async fn watch(&self, key: &Key) -> Option<Subscription> {
        self.listener()?.watch(key).await
    }

    async fn waiters(&self, key: &Key) -> Option<u32> {
        let channel = self.shared.channels.of_lock(&self.shared.names.lock_key(key).ok()?);
        let count = if self.shared.is_cluster { "SHARDNUMSUB" } else { "NUMSUB" };
        let mut command = redis::cmd("PUBSUB");
        command.arg(count).arg(channel);
        match self.shared.route.ask(&command).await.ok()? {
            Value::Array(answer) => u32::try_from(reply::number(answer.get(1)?)?).ok(),
            Value::Map(answer) => u32::try_from(reply::number(&answer.first()?.1)?).ok(),
            _ => None,
        }
    }

    async fn break_note(&self, lock_id: &LockId) -> Option<BreakNote> {
        let marker = self.shared.names.break_marker(lock_id).ok()?;
        let note = self.index_entry(&marker).await.ok()??;
        Some(BreakNote::parse(&note))
    }
}

impl Shard {
    fn listener(&self) -> Option<&RedisListener> {
        Some(self.shared.listener.as_ref()?.started(&self.shared.channels))
    }

    /// Writes why a lock is broken, before it is: its holder looks for the note when it misses the
    /// lock. If the lock is not held, the note expires unread.
    async fn leave_break_note(&self, lock_id: &LockId, note: &BreakNote) {
        /// Longer than a holder takes to notice.
        const KEPT_MS: u64 = 600_000;
        let Ok(marker) = self.shared.names.break_marker(lock_id) else { return };
        let call = SCRIPTS.index.call(&[&marker], &[Text(&note.to_text()), Number(KEPT_MS)]);
        // Without the note, the holder learns only that the lock is gone.
        drop(self.shared.route.run(&call).await);
    }

    /// Looks up a lock id on a Cluster, where a script finds only declared keys while a slot moves.
    async fn lookup_in_two_steps(
        &self,
        index_key: &str,
        lock_id: &LockId,
    ) -> Result<Option<StoredLock>> {
        let Some(lock_key) = self.lock_key_of(index_key).await? else { return Ok(None) };
        let found = self.lookup(&lock_key, "").await?;
        Ok(found.filter(|lock| lock.lock_id == *lock_id))
    }

    async fn lookup(&self, name: &str, lock_id: &str) -> Result<Option<StoredLock>> {
        let call = SCRIPTS.lookup.call(&[name], &[Number(TIME_TOLERANCE_MS), Text(lock_id)]);
        reply::lookup(&self.shared.route.run(&call).await?)
    }
}
