//! What is asked of a backend.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::common::error::Result;
use crate::common::key::Key;
use crate::common::lock_id::LockId;
use crate::common::ttl::Ttl;

/// A request to take a lock.
///
/// It draws its [`LockId`] when it is made. Sending the same value again is a *replay*: while the
/// lock is held under that id, it is granted what the first sending was granted, and nothing more.
/// So an unknown outcome can be resolved by sending the request again, or undone with
/// [`ReleaseRequest::undo`]. Once a request's lock was released, do not send it again.
///
/// ```
/// use syncguard::{Acquire, AcquireRequest, Key, LockBackend, MemoryBackend, Ttl};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> syncguard::Result<()> {
/// let backend = MemoryBackend::new();
/// let request = AcquireRequest::new(Key::new("job")?, Ttl::DEFAULT)?;
/// let Acquire::Acquired(first) = backend.acquire(&request).await? else { panic!() };
/// let Acquire::Acquired(replay) = backend.acquire(&request).await? else { panic!() };
/// assert_eq!(first.fence(), replay.fence());
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct AcquireRequest {
    key: Key,
    lock_id: LockId,
    ttl: Ttl,
}

impl AcquireRequest {
    /// A new request, with a lock id of its own.
    pub fn new(key: Key, ttl: Ttl) -> Result<Self> {
        Ok(Self { key, lock_id: LockId::random()?, ttl })
    }

    /// A request that was made in another process, for tests that carry it from there.
    #[cfg(feature = "conformance")]
    #[doc(hidden)]
    #[must_use]
    pub fn carried(key: Key, lock_id: LockId, ttl: Ttl) -> Self {
        Self { key, lock_id, ttl }
    }

    /// What to lock.
    #[must_use]
    pub fn key(&self) -> &Key {
        &self.key
    }

    /// The id under which it will be held.
    #[must_use]
    pub fn lock_id(&self) -> LockId {
        self.lock_id
    }

    /// For how long.
    #[must_use]
    pub fn ttl(&self) -> Ttl {
        self.ttl
    }
}

/// Something a backend wants to be reminded of when it is asked about a lock again, such as a
/// document's version. Opaque to everybody else.
#[derive(Clone)]
pub struct Receipt(Arc<dyn Any + Send + Sync>);

impl Receipt {
    /// Wraps what the backend wants to remember.
    pub fn new<T: Any + Send + Sync>(note: T) -> Self {
        Self(Arc::new(note))
    }

    /// Reads it back, if it is of this type.
    #[must_use]
    pub fn get<T: Any + Send + Sync>(&self) -> Option<&T> {
        self.0.downcast_ref()
    }
}

impl fmt::Debug for Receipt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Receipt")
    }
}

/// Where a lock probably is, so that a backend can go straight to it.
///
/// A hint never changes an answer: a backend that does not find the lock there looks it up by id,
/// in the same transaction or script.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Hint {
    /// The key that the lock id was granted for.
    pub key: Option<Key>,
    /// What the backend wanted to be reminded of.
    pub receipt: Option<Receipt>,
}

impl Hint {
    /// A hint that names the key.
    #[must_use]
    pub fn key(key: Key) -> Self {
        Self { key: Some(key), receipt: None }
    }

    /// Adds the backend's receipt.
    #[must_use]
    pub fn with_receipt(mut self, receipt: Option<Receipt>) -> Self {
        self.receipt = receipt;
        self
    }
}

/// A request to give a lock back.
#[derive(Clone, Debug)]
pub struct ReleaseRequest {
    lock_id: LockId,
    hint: Hint,
    undo: bool,
}

impl ReleaseRequest {
    /// Releases the lock that `lock_id` holds.
    #[must_use]
    pub fn new(lock_id: LockId) -> Self {
        Self { lock_id, hint: Hint::default(), undo: false }
    }

    /// Releases what an acquire of unknown outcome may have taken, now or later.
    ///
    /// A backend may leave a mark by which a copy of the acquire that arrives after this is
    /// refused as [`Acquire::Spent`](crate::Acquire::Spent).
    #[must_use]
    pub fn undo(request: &AcquireRequest) -> Self {
        Self { lock_id: request.lock_id, hint: Hint::key(request.key.clone()), undo: true }
    }

    /// Adds a hint.
    #[must_use]
    pub fn with_hint(mut self, hint: Hint) -> Self {
        self.hint = hint;
        self
    }

    /// The id that holds the lock.
    #[must_use]
    pub fn lock_id(&self) -> LockId {
        self.lock_id
    }

    /// Where the lock probably is.
    #[must_use]
    pub fn hint(&self) -> &Hint {
        &self.hint
    }

    /// Whether this undoes an acquire of unknown outcome.
    #[must_use]
    pub fn is_undo(&self) -> bool {
        self.undo
    }
}

/// A request to let a held lock live longer, or shorter.
#[derive(Clone, Debug)]
pub struct ExtendRequest {
    lock_id: LockId,
    ttl: Ttl,
    hint: Hint,
    answer_within: Option<Duration>,
}

impl ExtendRequest {
    /// Sets the expiry of the lock that `lock_id` holds to *now + ttl*.
    #[must_use]
    pub fn new(lock_id: LockId, ttl: Ttl) -> Self {
        Self { lock_id, ttl, hint: Hint::default(), answer_within: None }
    }

    /// Adds a hint.
    #[must_use]
    pub fn with_hint(mut self, hint: Hint) -> Self {
        self.hint = hint;
        self
    }

    /// Limits how long an answer is worth waiting for.
    ///
    /// A backend with a longer response timeout ends the attempt by then with
    /// [`ErrorCode::NetworkTimeout`](crate::ErrorCode::NetworkTimeout) and does not trust the connection
    /// any longer, so that the next attempt uses another one.
    #[must_use]
    pub fn answer_within(mut self, limit: Duration) -> Self {
        self.answer_within = Some(limit);
        self
    }

    /// How long an answer is worth waiting for, if the caller says so.
    #[must_use]
    pub fn answer_limit(&self) -> Option<Duration> {
        self.answer_within
    }

    /// Runs an attempt within that limit; `None` when it has passed.
    #[cfg(any(feature = "firestore", feature = "postgres", feature = "redis"))]
    pub(crate) async fn bounded<T>(&self, attempt: impl Future<Output = T>) -> Option<T> {
        match self.answer_within {
            Some(limit) => tokio::time::timeout(limit, attempt).await.ok(),
            None => Some(attempt.await),
        }
    }

    /// The id that holds the lock.
    #[must_use]
    pub fn lock_id(&self) -> LockId {
        self.lock_id
    }

    /// For how long from now.
    #[must_use]
    pub fn ttl(&self) -> Ttl {
        self.ttl
    }

    /// Where the lock probably is.
    #[must_use]
    pub fn hint(&self) -> &Hint {
        &self.hint
    }
}
