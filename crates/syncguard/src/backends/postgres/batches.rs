//! Operations that travel together. A lone operation uses the statement for one lock, because that
//! is faster; several use the statement for many.

use std::collections::HashMap;
use std::task::{Context, Waker as TaskWaker};

use futures_util::future::join_all;
use tokio_postgres::Row;

use super::PostgresBackend;
use super::error;
use super::listener::Channel;
use super::pool::Urgency;
use super::record::{column, fence, integer, millis, not_held_reason};
use super::statements::Value;
use super::transaction::{self, Failure, Step};
use crate::common::error::{Error, Result};
use crate::common::fence::Fence;
use crate::common::key::Key;
use crate::common::lock_id::LockId;
use crate::common::time::TIME_TOLERANCE_MS;
use crate::contract::batch::Batched;
use crate::contract::outcome::{ExtendOutcome, Extension, NotHeldReason, ReleaseOutcome};
use crate::contract::request::{AcquireRequest, ExtendRequest, ReleaseRequest};

/// The most operations of one batch. A larger batch is hardly faster per lock, and makes its first
/// callers wait longer.
pub(super) const LIMIT: usize = 64;

/// How long a batch waits for a row or an advisory lock that another transaction has, in
/// milliseconds. Then each of its operations is sent by itself, with the usual limit.
const LOCK_TIMEOUT_MS: &str = "50";

/// An acquire, with the names of its records.
pub(super) struct AcquireOperation {
    lock_key: String,
    fence_key: String,
    request: AcquireRequest,
    holder: Option<String>,
}

/// A row of the statement, and the operation, to repeat it.
pub(super) type AcquireAnswer = (AcquireOperation, Row);

impl Batched for AcquireOperation {
    type Answer = AcquireAnswer;

    fn conflict_key(&self) -> Option<&[u8]> {
        Some(self.lock_key.as_bytes())
    }
}

pub(super) struct ReleaseOperation(pub(super) ReleaseRequest, String);

impl Batched for ReleaseOperation {
    type Answer = ReleaseOutcome;

    fn conflict_key(&self) -> Option<&[u8]> {
        Some(self.1.as_bytes())
    }
}

pub(super) struct ExtendOperation {
    lock_id: String,
    ttl_ms: i64,
}

impl Batched for ExtendOperation {
    type Answer = ExtendOutcome;

    fn conflict_key(&self) -> Option<&[u8]> {
        Some(self.lock_id.as_bytes())
    }
}

/// Whether a batch is sent again, one operation at a time: the server has rolled it back, and one
/// operation may be the reason.
fn is_divisible(count: usize, failure: &Failure) -> bool {
    count > 1 && failure.is_refused
}

fn fail_all<T>(count: usize, error: &Error) -> Vec<Result<T>> {
    (0..count).map(|_| Err(error.clone())).collect()
}

impl PostgresBackend {
    pub(super) fn acquire_operation(&self, request: &AcquireRequest) -> Result<AcquireOperation> {
        let lock_key = self.shared.names.lock_key(request.key())?;
        let fence_key = self.shared.names.fence_key(&lock_key)?;
        let holder = request.holder().map(|holder| holder.tagged(&request.lock_id()));
        Ok(AcquireOperation { lock_key, fence_key, request: request.clone(), holder })
    }

    /// Acquires locks that look free and whose advisory locks are free.
    pub(super) async fn acquire_batch(
        self,
        operations: Vec<AcquireOperation>,
    ) -> Vec<Result<AcquireAnswer>> {
        let count = operations.len();
        let rows = match operations.as_slice() {
            [one] => self.acquire_one(one, false).await.map(|row| vec![Some(row)]),
            many => Box::pin(self.acquire_many(many)).await,
        };
        match rows {
            Ok(rows) => {
                let answers = operations.into_iter().zip(rows).map(|(operation, row)| {
                    row.map(|row| (operation, row)).ok_or_else(error::unexpected_response)
                });
                answers.collect()
            }
            Err(failure) if is_divisible(count, &failure) => {
                let each = operations.into_iter().map(|operation| async {
                    let row = self.acquire_one(&operation, false).await?;
                    Ok((operation, row))
                });
                join_all(each).await
            }
            Err(failure) => fail_all(count, &failure.error),
        }
    }

    /// Acquires one lock. With `waits`, waits for its advisory lock first.
    pub(super) async fn acquire_one(
        &self,
        operation: &AcquireOperation,
        waits: bool,
    ) -> Result<Row, Failure> {
        let AcquireOperation { lock_key, fence_key, request, holder } = operation;
        let lock_id = request.lock_id();
        let values = [
            Value::Text(lock_key),
            Value::Int8(integer(TIME_TOLERANCE_MS)),
            Value::Text(lock_id.expose()),
            Value::Int8(integer(request.ttl().as_millis())),
            Value::Int8(integer(Fence::MAX.get())),
            Value::Text(fence_key),
            Value::Text(request.key().as_str()),
            Value::Int8(integer(self.shared.fences.per_millisecond())),
            Value::MaybeText(holder.as_deref()),
        ];
        let statements = &self.shared.statements;
        let lock: Step<'_> = (&statements.lock_key, &values[..1]);
        let (pool, step) = (&self.shared.pool, (&statements.acquire, values.as_slice()));
        let rows = transaction::run(pool, Urgency::Ordinary, waits.then_some(lock), step).await?;
        rows.into_iter().next().ok_or_else(|| error::unexpected_response().into())
    }

    /// Returns the row of each operation, in their order.
    async fn acquire_many(
        &self,
        operations: &[AcquireOperation],
    ) -> Result<Vec<Option<Row>>, Failure> {
        let keys: Vec<&str> = operations.iter().map(|one| one.lock_key.as_str()).collect();
        let ids: Vec<_> = operations.iter().map(|one| one.request.lock_id()).collect();
        let ids: Vec<&str> = ids.iter().map(LockId::expose).collect();
        let ttls = operations.iter().map(|one| integer(one.request.ttl().as_millis()));
        let ttls: Vec<i64> = ttls.collect();
        let fence_keys: Vec<&str> = operations.iter().map(|one| one.fence_key.as_str()).collect();
        let user_keys: Vec<&str> =
            operations.iter().map(|one| one.request.key().as_str()).collect();
        let holders: Vec<Option<&str>> =
            operations.iter().map(|one| one.holder.as_deref()).collect();
        let values = [
            Value::Texts(&keys),
            Value::Int8(integer(TIME_TOLERANCE_MS)),
            Value::Texts(&ids),
            Value::Int8s(&ttls),
            Value::Int8(integer(Fence::MAX.get())),
            Value::Texts(&fence_keys),
            Value::Texts(&user_keys),
            Value::Text(LOCK_TIMEOUT_MS),
            Value::Int8(integer(self.shared.fences.per_millisecond())),
            Value::MaybeTexts(&holders),
        ];
        let step: Step<'_> = (&self.shared.statements.acquire_many, &values);
        let rows = transaction::run(&self.shared.pool, Urgency::Ordinary, None, step).await?;
        let mut placed: Vec<Option<Row>> = operations.iter().map(|_| None).collect();
        for row in rows {
            let place = usize::try_from(column::<i64>(&row, 7)?).unwrap_or(0);
            if let Some(place) = place.checked_sub(1).and_then(|place| placed.get_mut(place)) {
                *place = Some(row);
            }
        }
        Ok(placed)
    }

    pub(super) fn release_operation(request: &ReleaseRequest) -> ReleaseOperation {
        ReleaseOperation(request.clone(), request.lock_id().expose().to_owned())
    }

    /// Releases locks and notifies their waiters.
    pub(super) async fn release_batch(
        self,
        operations: Vec<ReleaseOperation>,
    ) -> Vec<Result<ReleaseOutcome>> {
        let ids: Vec<&str> = operations.iter().map(|one| one.1.as_str()).collect();
        let released = match self.delete(&ids).await {
            Err(failure) if is_divisible(ids.len(), &failure) => {
                let each = ids.chunks(1).map(|id| async {
                    let rows = self.delete(id).await;
                    rows.map(|mut rows| rows.pop().flatten()).map_err(Error::from)
                });
                join_all(each).await
            }
            Err(failure) => return fail_all(ids.len(), &failure.error),
            Ok(rows) => rows.into_iter().map(Ok).collect(),
        };
        let mut payloads = Vec::new();
        let outcomes =
            released.into_iter().zip(&operations).map(|(row, ReleaseOperation(request, _))| {
                self.released(row?.as_ref(), request, &mut payloads)
            });
        let outcomes = outcomes.collect();
        if !payloads.is_empty() {
            self.notify(payloads);
        }
        outcomes
    }

    /// Deletes locks. Returns the row of each id, in their order.
    async fn delete(&self, ids: &[&str]) -> Result<Vec<Option<Row>>, Failure> {
        let channel = self.shared.listener.channel();
        let [tolerance, key_space, any_key] = [
            Value::Int8(integer(TIME_TOLERANCE_MS)),
            Value::Int4(channel.key_space),
            Value::Int4(channel.any_key),
        ];
        let statements = &self.shared.statements;
        if let [id] = ids {
            let values = [Value::Text(id), tolerance, key_space, any_key];
            let step: Step<'_> = (&statements.release, &values);
            let rows = transaction::run(&self.shared.pool, Urgency::Urgent, None, step).await?;
            return Ok(vec![rows.into_iter().next()]);
        }
        let values =
            [Value::Texts(ids), tolerance, key_space, any_key, Value::Text(LOCK_TIMEOUT_MS)];
        let step: Step<'_> = (&statements.release_many, &values);
        let rows = transaction::run(&self.shared.pool, Urgency::Urgent, None, step).await?;
        by_id(ids, rows, 4)
    }

    /// Returns the outcome of a release, and adds the payloads of its notifications.
    fn released(
        &self,
        row: Option<&Row>,
        request: &ReleaseRequest,
        payloads: &mut Vec<String>,
    ) -> Result<ReleaseOutcome> {
        let Some(row) = row else {
            return Ok(ReleaseOutcome::NotHeld(NotHeldReason::NotFound));
        };
        if let Some(stored) = column::<Option<&str>>(row, 2)? {
            fence(stored)?;
            let reason =
                if column(row, 3)? { NotHeldReason::NotFound } else { NotHeldReason::Expired };
            return Ok(ReleaseOutcome::NotHeld(reason));
        }
        // An invalid key has no waiters.
        if let Ok(key) = Key::new(column::<&str>(row, 0)?) {
            if let Some(note) = request.break_note() {
                payloads.push(Channel::break_payload(&key, request.lock_id().hash_id(), note));
            }
            if column(row, 1)? || self.is_marked_by_the_same_session(&key) {
                payloads.push(Channel::payload(&key, request.holder_age()));
            }
        }
        Ok(ReleaseOutcome::Released)
    }

    /// Whether waiters of this backend marked the key on the connection that the release may have
    /// used: a session does not see its own marker.
    fn is_marked_by_the_same_session(&self, key: &Key) -> bool {
        self.shared.pool.shares_listening() && self.shared.listener.is_awaited(key)
    }

    /// Notifies waiters of releases, or holders of breaks. The notifications are sent when this
    /// returns, so the process may exit right after; their answer, which is empty, is awaited in
    /// the background. Only if no connection is free at once, the notifications are sent in the
    /// background too, and are lost if the process exits before
    /// [`quiesce`](crate::LockBackend::quiesce).
    fn notify(&self, payloads: Vec<String>) {
        let backend = self.clone();
        let mut notifying = Box::pin(async move {
            let channel = &backend.shared.listener.channel().name;
            let payloads: Vec<&str> = payloads.iter().map(String::as_str).collect();
            let values = [Value::Text(channel), Value::Texts(&payloads)];
            let step: Step<'_> = (&backend.shared.statements.notify, &values);
            // A lost notification only costs time.
            drop(backend.run(Urgency::Urgent, step).await);
        });
        // The connection of the release is free again, and this poll drives it.
        let mut context = Context::from_waker(TaskWaker::noop());
        if notifying.as_mut().poll(&mut context).is_pending() {
            self.shared.background.spawn(notifying);
        }
    }

    pub(super) fn extend_operation(request: &ExtendRequest) -> ExtendOperation {
        let lock_id = request.lock_id().expose().to_owned();
        ExtendOperation { lock_id, ttl_ms: integer(request.ttl().as_millis()) }
    }

    pub(super) async fn extend_batch(
        self,
        operations: Vec<ExtendOperation>,
    ) -> Vec<Result<ExtendOutcome>> {
        match self.extend_all(&operations).await {
            Ok(outcomes) => outcomes,
            Err(failure) if is_divisible(operations.len(), &failure) => {
                let each = operations.chunks(1).map(|one| async {
                    let extended = self.extend_all(one).await?.pop();
                    extended.unwrap_or_else(|| Err(error::unexpected_response()))
                });
                join_all(each).await
            }
            Err(failure) => fail_all(operations.len(), &failure.error),
        }
    }

    async fn extend_all(
        &self,
        operations: &[ExtendOperation],
    ) -> Result<Vec<Result<ExtendOutcome>>, Failure> {
        let (pool, statements) = (&self.shared.pool, &self.shared.statements);
        let tolerance = Value::Int8(integer(TIME_TOLERANCE_MS));
        let rows = if let [ExtendOperation { lock_id, ttl_ms }] = operations {
            let values = [Value::Text(lock_id), tolerance, Value::Int8(*ttl_ms)];
            let lock: Step<'_> = (&statements.lock_key_by_id, &values[..1]);
            let step: Step<'_> = (&statements.extend, &values);
            let rows = transaction::run(pool, Urgency::Urgent, Some(lock), step).await?;
            vec![rows.into_iter().next()]
        } else {
            let ids: Vec<&str> = operations.iter().map(|one| one.lock_id.as_str()).collect();
            let ttls: Vec<i64> = operations.iter().map(|one| one.ttl_ms).collect();
            let locked = [Value::Texts(&ids), Value::Text(LOCK_TIMEOUT_MS)];
            let values = [Value::Texts(&ids), tolerance, Value::Int8s(&ttls)];
            let lock: Step<'_> = (&statements.lock_keys_by_id, &locked);
            let step: Step<'_> = (&statements.extend_many, &values);
            let rows = transaction::run(pool, Urgency::Urgent, Some(lock), step).await?;
            by_id(&ids, rows, 2)?
        };
        Ok(rows.iter().map(|row| extended(row.as_ref())).collect())
    }
}

fn extended(row: Option<&Row>) -> Result<ExtendOutcome> {
    let Some(row) = row else { return Ok(ExtendOutcome::NotHeld(NotHeldReason::NotFound)) };
    if let Some(expires_at) = column::<Option<i64>>(row, 0)? {
        return Ok(ExtendOutcome::Extended(Extension::new(millis(expires_at)?)));
    }
    not_held_reason(row).map(ExtendOutcome::NotHeld)
}

/// Puts rows in the order of the ids in one of their columns.
fn by_id(ids: &[&str], rows: Vec<Row>, id_column: usize) -> Result<Vec<Option<Row>>, Failure> {
    let order: HashMap<&str, usize> = ids.iter().copied().zip(0..).collect();
    let mut placed: Vec<Option<Row>> = ids.iter().map(|_| None).collect();
    for row in rows {
        let found = order.get(column::<&str>(&row, id_column)?).copied();
        if let Some(place) = found.and_then(|found| placed.get_mut(found)) {
            *place = Some(row);
        }
    }
    Ok(placed)
}
