//! Locks on a Redis or Valkey server, shared with everybody who reaches it.
//!
//! * One round trip per operation, by scripts; the server's clock decides.
//! * One multiplexed connection for all locks, and one more for wake-ups once somebody waits. Both
//!   connect again by themselves; a call that was under way is never repeated.
//! * Records are those of the TypeScript implementation: the two exclude each other, and release,
//!   extend and look up each other's locks.
//! * Redis 7.0 or Valkey 7.2 and newer: one server, Sentinel or Cluster, with TLS or on a socket.
//!
//! See `docs/specs/redis.md` for what can make fences go backwards here.

mod advice;
mod cluster;
mod config;
mod connection;
mod dial;
mod error;
mod record;
mod replicas;
mod scattered;
mod scripts;
mod sentinel;
mod survey;
mod topology;
mod url;
mod wake;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use redis::Value;
pub use redis::{Client, ClientTlsConfig, TlsCertificates};

use crate::common::cleanup::CleanupGate;
use crate::common::error::{Error, ErrorCode, Result};
use crate::common::fence::{Fence, Fenced};
use crate::common::key::Key;
use crate::common::lock_id::LockId;
use crate::common::time::{CLEANUP_GUARD_MS, TIME_TOLERANCE_MS, Timestamp};
use crate::contract::LockBackend;
use crate::contract::advice::Advice;
use crate::contract::capabilities::{Capabilities, TimeAuthority};
use crate::contract::inspect::{Cursor, Inspection, Inspector, Page};
use crate::contract::outcome::{Absence, Acquire, Extend, Extension, Lease, Release};
use crate::contract::request::{AcquireRequest, ExtendRequest, Hint, ReleaseRequest};
use crate::contract::stored_lock::StoredLock;
use crate::contract::wake::WakeUps;
use advice::Report;
pub use config::RedisConfig;
use config::{Names, Target};
use connection::{Connection, Multiplexed};
use replicas::{Confirmed, Replicas};
use scripts::Argument::{Number, Text};
use scripts::Scripts;
use topology::{Finder, Timeouts};
use wake::{Channels, Waker};

/// How long records outlive their tolerance, so that "expired" can be told from "not found".
const GRACE_MS: u64 = 1000;

/// Locks on a Redis server. Clones share the connection.
#[derive(Clone)]
pub struct RedisBackend {
    shared: Arc<Shared>,
}

struct Shared {
    connection: Connection,
    names: Names,
    scripts: Scripts,
    /// Nobody can be woken through a connection of the caller's own.
    waker: Option<Waker>,
    replicas: Option<Replicas>,
    is_cluster: bool,
    channels: Channels,
    cleanup: Arc<CleanupGate>,
}

impl RedisBackend {
    /// Connects to a server, and refuses one that is too old.
    ///
    /// # Cancel safety
    ///
    /// Dropped half-way, nothing is left behind.
    pub async fn connect(config: RedisConfig) -> Result<Self> {
        let names = config.names()?;
        let timeouts =
            Timeouts { connect: config.connect_timeout, response: config.response_timeout };
        let prefix = names.space.prefix();
        let (connection, finder, database) = match config.target {
            Target::Ours(topology) => {
                let (database, certificates) = (topology.database(), config.certificates);
                let finder =
                    Finder::new(*topology, certificates.as_ref(), timeouts, prefix.to_owned())?;
                let finder = Arc::new(finder);
                let connection = Multiplexed::open(Arc::clone(&finder)).await?;
                (Connection::Ours(connection), Some(finder), database)
            }
            Target::Theirs(connection) => {
                let database = connection.database();
                let inspection_timeout = config.response_timeout;
                (Connection::Theirs { connection, inspection_timeout }, None, database)
            }
        };
        let is_cluster = finder.as_ref().is_some_and(|finder| finder.is_cluster());
        let report = Report::ask(&connection).await;
        report.refuse_an_old_server()?;
        if !is_cluster {
            report.refuse_a_lone_node()?;
        }
        report.warn(config.replicas.is_some());
        let replicas = finder.clone().zip(config.replicas);
        let channels = Channels::new(names.clone(), database);
        Ok(Self {
            shared: Arc::new(Shared {
                connection,
                names,
                scripts: Scripts::new(),
                waker: finder.map(|finder| Waker::start(finder, channels.clone())),
                channels,
                replicas: replicas.map(|(finder, wanted)| Replicas::new(finder, wanted)),
                is_cluster,
                cleanup: Arc::new(CleanupGate::new(config.cleanup_in_is_locked)),
            }),
        })
    }

    /// What about this server can make locks vanish or fences go backwards. It is asked now; at
    /// [`connect`](Self::connect) the same was written to the log. What the user may not ask is not
    /// an error: the advice says what remains unknown.
    ///
    /// # Cancel safety
    ///
    /// It only reads.
    pub async fn advice(&self) -> Vec<Advice> {
        let report = Report::ask(&self.shared.connection).await;
        report.advice(self.shared.replicas.is_some())
    }

    /// The index key of an id and the lock key that the hint names; the index again without one. A
    /// hint that cannot be a lock's key is none.
    ///
    /// On a Cluster a missing hint is looked up first: while a slot moves, a script finds only keys
    /// that it has declared.
    async fn keys_of(
        &self,
        operation: &'static str,
        lock_id: &LockId,
        hint: &Hint,
    ) -> Result<[String; 2]> {
        let names = &self.shared.names;
        let index = names.space.index_key(lock_id)?;
        let mut hinted = hint.key.as_ref().and_then(|key| names.lock_key(key).ok());
        if hinted.is_none() && self.shared.is_cluster {
            hinted = Box::pin(self.lock_key_of(operation, &index)).await?;
        }
        Ok([index.clone(), hinted.unwrap_or(index)])
    }

    /// Where the lock is that an index entry leads to. The mark of an undo leads nowhere.
    async fn lock_key_of(&self, operation: &'static str, index: &str) -> Result<Option<String>> {
        let entry = self.index_entry(operation, index).await?;
        Ok(entry.filter(|lock_key| !lock_key.is_empty()))
    }

    async fn index_entry(&self, operation: &'static str, index: &str) -> Result<Option<String>> {
        let script = &self.shared.scripts.resolve;
        match self.shared.connection.run(operation, script, &[index], &[]).await? {
            Value::Nil => Ok(None),
            entry => match text(&entry) {
                Some(lock_key) => Ok(Some(lock_key.to_owned())),
                None => Err(error::unexpected_response(operation)),
            },
        }
    }

    /// Undoes an acquire that was granted but not confirmed, and returns the error to report.
    ///
    /// The grant was written, so this is the one place that decides whether it still is: only an
    /// undo that was answered takes the effect away. After any other, the caller has to undo.
    async fn undo_unconfirmed(&self, request: &AcquireRequest, error: Error) -> Error {
        match self.release(&ReleaseRequest::undo(request)).await {
            Ok(_released_or_gone) => error.without_effect(),
            Err(_undo_failed) => error.after_effect(),
        }
    }

    /// Deletes a record that was found dead, on the side.
    fn clean_up(&self, lock_key: String, lock_id: LockId) {
        let backend = self.clone();
        tokio::spawn(async move {
            let index_key = backend.shared.names.space.index_key(&lock_id)?;
            let arguments = [Text(lock_id.expose()), Number(CLEANUP_GUARD_MS)];
            let script = &backend.shared.scripts.cleanup;
            // Best effort: what is left is left to its physical expiry.
            backend
                .shared
                .connection
                .run("cleanup", script, &[&lock_key, &index_key], &arguments)
                .await
        });
    }
}

impl fmt::Debug for RedisBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisBackend")
            .field("prefix", &self.shared.names.space.prefix())
            .finish_non_exhaustive()
    }
}

/// A list that begins with a number, as most scripts answer.
fn list(answer: &Value) -> Option<(i64, &[Value])> {
    let Value::Array(items) = answer else { return None };
    match items.split_first()? {
        (Value::Int(number), rest) => Some((*number, rest)),
        _ => None,
    }
}

fn number(value: &Value) -> Option<u64> {
    match value {
        Value::Int(number) => u64::try_from(*number).ok(),
        _ => text(value)?.parse().ok(),
    }
}

fn text(value: &Value) -> Option<&str> {
    match value {
        Value::BulkString(bytes) => str::from_utf8(bytes).ok(),
        Value::SimpleString(text) => Some(text),
        _ => None,
    }
}

impl LockBackend for RedisBackend {
    type Fencing = Fenced;

    fn capabilities(&self) -> Capabilities {
        // An undo leaves a mark by which a late copy of its acquire is refused.
        Capabilities::new::<Fenced>("redis", TimeAuthority::Server).with_final_undo()
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Acquire> {
        const OPERATION: &str = "acquire";
        let (names, key, lock_id) = (&self.shared.names, request.key(), request.lock_id());
        let lock_key = names.lock_key(key)?;
        let index_key = names.space.index_key(&lock_id)?;
        let fence_key = names.space.fence_key(&lock_key)?;
        let ttl_ms = request.ttl().as_millis();
        let arguments = [
            Text(lock_id.expose()),
            Number(ttl_ms),
            Number(TIME_TOLERANCE_MS),
            Number(ttl_ms + TIME_TOLERANCE_MS + GRACE_MS),
            Text(&record::quoted(key)),
            Number(Fence::MAX.get()),
            Number(u64::from(self.shared.replicas.is_some())),
        ];
        let keys = [lock_key.as_str(), &index_key, &fence_key];
        let script = &self.shared.scripts.acquire;
        let answer = match &self.shared.replicas {
            None => {
                match self
                    .shared
                    .connection
                    .run_together(OPERATION, script, &keys, &arguments)
                    .await
                {
                    Ok(Some(claim)) if scattered::is_claim(&claim) => {
                        Box::pin(self.seal(request, [&lock_key, &fence_key])).await
                    }
                    Ok(Some(answer)) => Ok(answer),
                    Ok(None) => Box::pin(self.acquire_scattered(request, keys)).await,
                    Err(error) => Err(error),
                }
            }
            Some(replicas) => {
                let is_granted = |answer: &Value| matches!(list(answer), Some((1, _)));
                let run = replicas.run(OPERATION, script, &keys, &arguments, is_granted);
                match Box::pin(run).await {
                    Ok(Confirmed { answer, confirmation: Ok(()) }) => Ok(answer),
                    Ok(Confirmed { confirmation: Err(error), .. }) => {
                        Err(Box::pin(self.undo_unconfirmed(request, error)).await)
                    }
                    Err(error) => Err(error),
                }
            }
        };
        let answer = answer.map_err(|error| error.with_key(key))?;
        let outcome = match list(&answer) {
            Some((0, [free_in])) => number(free_in).map(|free_in_ms| {
                Ok(Acquire::Contended { free_in: Some(Duration::from_millis(free_in_ms)) })
            }),
            Some((1, [fence, expires])) => text(fence)
                .and_then(|fence| fence.parse::<Fence>().ok())
                // A claim that nobody has sealed is not granted.
                .filter(|fence| fence.get() > 0)
                .zip(number(expires))
                .map(|(fence, expires_ms)| {
                    fence.warn_near_the_end(key);
                    Ok(Acquire::Acquired(Lease::new(fence, Timestamp::from_millis(expires_ms))))
                }),
            Some((2, [])) => Some(Ok(Acquire::Spent)),
            Some((-1, [])) => Some(Err(error::foreign(OPERATION))),
            Some((-2, [])) => Some(Err(Error::new(
                ErrorCode::Internal,
                "the lock id is already in use; nothing was changed",
            )
            .without_effect())),
            Some((-3, [])) => Some(Err(Error::foreign_counter())),
            Some((-4, [])) => Some(Fence::after(Fence::MAX.get()).map(|_| Acquire::Spent)),
            _ => None,
        };
        outcome
            .unwrap_or_else(|| Err(error::unexpected_response(OPERATION)))
            .map_err(|error| error.with_key(key).with_operation("redis", OPERATION))
    }

    async fn release(&self, request: &ReleaseRequest) -> Result<Release> {
        const OPERATION: &str = "release";
        /// Longer than any request is under way.
        const MARK_MS: u64 = 60_000;
        let lock_id = request.lock_id();
        let keys = self.keys_of(OPERATION, &lock_id, request.hint()).await;
        let [index_key, hinted] = keys.map_err(|error| error.with_lock_id(lock_id))?;
        let mark_ms = if request.is_undo() { MARK_MS } else { 0 };
        let arguments = [
            Text(lock_id.expose()),
            Number(TIME_TOLERANCE_MS),
            Number(mark_ms),
            Text(&self.shared.channels.of_lock(&hinted)),
            Text(self.shared.channels.prefix()),
            Text(if self.shared.is_cluster { "SPUBLISH" } else { "PUBLISH" }),
        ];
        let keys = [index_key.as_str(), &hinted];
        let script = &self.shared.scripts.release;
        let connection = &self.shared.connection;
        let answer = match connection.run_together(OPERATION, script, &keys, &arguments).await {
            Ok(Some(answer)) => Ok(answer),
            Ok(None) => Box::pin(self.release_scattered(request, keys, mark_ms)).await,
            Err(error) => Err(error),
        };
        match answer.map_err(|error| error.with_lock_id(lock_id))? {
            Value::Int(1) => Ok(Release::Released),
            Value::Int(0) => Ok(Release::NotHeld(Absence::NotFound)),
            Value::Int(2) => Ok(Release::NotHeld(Absence::Expired)),
            Value::Int(-1) => Err(error::foreign(OPERATION).with_lock_id(lock_id)),
            _ => Err(error::unexpected_response(OPERATION).with_lock_id(lock_id)),
        }
    }

    async fn extend(&self, request: &ExtendRequest) -> Result<Extend> {
        const OPERATION: &str = "extend";
        let lock_id = request.lock_id();
        let keys = self.keys_of(OPERATION, &lock_id, request.hint()).await;
        let [index_key, hinted] = keys.map_err(|error| error.with_lock_id(lock_id))?;
        let ttl_ms = request.ttl().as_millis();
        let arguments = [
            Text(lock_id.expose()),
            Number(TIME_TOLERANCE_MS),
            Number(ttl_ms),
            Number(ttl_ms + TIME_TOLERANCE_MS + GRACE_MS),
        ];
        let keys = [index_key.as_str(), &hinted];
        let script = &self.shared.scripts.extend;
        let connection = &self.shared.connection;
        let generation = connection.generation();
        let answer = request.bounded(async {
            match connection.run_together(OPERATION, script, &keys, &arguments).await? {
                Some(answer) => Ok(answer),
                None => Box::pin(self.extend_scattered(request, keys)).await,
            }
        });
        let answer = answer.await.unwrap_or_else(|| {
            connection.distrust(generation);
            Err(error::timeout(OPERATION))
        });
        let answer = answer.map_err(|error| error.with_lock_id(lock_id))?;
        let outcome = match list(&answer) {
            Some((1, [expires])) => number(expires).map(|expires_ms| {
                Ok(Extend::Extended(Extension::new(Timestamp::from_millis(expires_ms))))
            }),
            Some((0, [])) => Some(Ok(Extend::NotHeld(Absence::NotFound))),
            Some((2, [])) => Some(Ok(Extend::NotHeld(Absence::Expired))),
            Some((-1, [])) => Some(Err(error::foreign(OPERATION))),
            _ => None,
        };
        outcome
            .unwrap_or_else(|| Err(error::unexpected_response(OPERATION)))
            .map_err(|error| error.with_lock_id(lock_id))
    }

    async fn is_locked(&self, key: &Key) -> Result<bool> {
        const OPERATION: &str = "is_locked";
        let lock_key = self.shared.names.lock_key(key)?;
        let (script, arguments) = (&self.shared.scripts.is_locked, [Number(TIME_TOLERANCE_MS)]);
        let answer = self.shared.connection.run(OPERATION, script, &[&lock_key], &arguments).await;
        let answer = answer.map_err(|error| error.with_key(key))?;
        match list(&answer) {
            Some((0, [])) => Ok(false),
            Some((live @ (0 | 1), [expired, lock_id])) => {
                let holder = text(lock_id).and_then(|id| LockId::parse(id).ok());
                let expired_ms =
                    number(expired).ok_or_else(|| error::unexpected_response(OPERATION))?;
                // Only the difference counts.
                let (expires_at, now) =
                    (Timestamp::from_millis(0), Timestamp::from_millis(expired_ms));
                if self.shared.cleanup.admits(expires_at, now)
                    && let Some(holder) = holder
                {
                    self.clean_up(lock_key, holder);
                }
                Ok(live == 1)
            }
            Some((-1, [])) => Err(error::foreign(OPERATION).with_key(key)),
            _ => Err(error::unexpected_response(OPERATION).with_key(key)),
        }
    }

    async fn lookup_key(&self, key: &Key) -> Result<Option<StoredLock>> {
        let lock_key = self.shared.names.lock_key(key)?;
        let found = self.lookup(&lock_key, "").await;
        found.map_err(|error| error.with_key(key))
    }

    async fn lookup_id(&self, lock_id: &LockId) -> Result<Option<StoredLock>> {
        let index_key = self.shared.names.space.index_key(lock_id)?;
        let found = if self.shared.is_cluster {
            self.lookup_in_two_steps(&index_key, lock_id).await
        } else {
            self.lookup(&index_key, lock_id.expose()).await
        };
        found.map_err(|error| error.with_lock_id(*lock_id))
    }

    async fn wake_ups(&self, key: &Key) -> Option<WakeUps> {
        self.shared.waker.as_ref()?.subscribe(key).await
    }

    fn inspector(&self) -> Option<Arc<dyn Inspector>> {
        Some(Arc::new(self.clone()))
    }
}

impl RedisBackend {
    /// On a Cluster, where a script finds only keys that it has declared while a slot moves.
    async fn lookup_in_two_steps(
        &self,
        index_key: &str,
        lock_id: &LockId,
    ) -> Result<Option<StoredLock>> {
        let Some(lock_key) = self.lock_key_of("lookup", index_key).await? else { return Ok(None) };
        let found = self.lookup(&lock_key, "").await?;
        Ok(found.filter(|lock| lock.lock_id == *lock_id))
    }

    async fn lookup(&self, name: &str, lock_id: &str) -> Result<Option<StoredLock>> {
        const OPERATION: &str = "lookup";
        let arguments = [Number(TIME_TOLERANCE_MS), Text(lock_id)];
        let script = &self.shared.scripts.lookup;
        match self.shared.connection.run(OPERATION, script, &[name], &arguments).await? {
            Value::Nil => Ok(None),
            Value::BulkString(json) => record::parse(&json, OPERATION).map(Some),
            Value::Int(-1) => Err(error::foreign(OPERATION)),
            _ => Err(error::unexpected_response(OPERATION)),
        }
    }
}

impl Inspector for RedisBackend {
    fn list<'a>(&'a self, after: Option<&'a Cursor>) -> Inspection<'a, Page> {
        const OPERATION: &str = "list";
        Box::pin(async move {
            let cursor = after.map_or("0", Cursor::place);
            let pattern = self.shared.names.pattern();
            let arguments = [Text(cursor), Text(&pattern), Number(TIME_TOLERANCE_MS)];
            let (script, connection) = (&self.shared.scripts.list, &self.shared.connection);
            // A name like ours, so that a Cluster knows where to look.
            let name = format!("{}:", self.shared.names.space.prefix());
            let answer = connection.inspect(OPERATION, script, &[&name], &arguments).await?;
            let Value::Array(items) = &answer else {
                return Err(error::unexpected_response(OPERATION));
            };
            let (next, records) =
                items.split_first().ok_or_else(|| error::unexpected_response(OPERATION))?;
            let next = text(next).ok_or_else(|| error::unexpected_response(OPERATION))?;
            // A record that makes no sense is no lock; the operations on its key say so.
            let parse = |item: &Value| match item {
                Value::BulkString(json) => record::parse(json, OPERATION).ok(),
                _ => None,
            };
            let next = (next != "0").then(|| Cursor::new(next));
            Ok(Page::new(records.iter().filter_map(parse).collect(), next))
        })
    }

    fn advice(&self) -> Inspection<'_, Vec<Advice>> {
        Box::pin(async move { Ok(Self::advice(self).await) })
    }
}
