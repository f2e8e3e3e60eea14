//! The requests to a backend.

use std::any::Any;
use std::fmt;
#[cfg(feature = "_network")]
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use super::capabilities::Capabilities;
use crate::common::error::{Error, Result};
use crate::common::holder::{BreakNote, HolderInfo};
use crate::common::key::Key;
use crate::common::lock_id::LockId;
use crate::common::shard::shard_of;
use crate::common::ttl::Ttl;

/// A request to acquire a lock.
///
/// A new request generates its own [`LockId`]. Sending the same request again is a *replay*: while
/// the lock is held under that id, the replay returns the same fence and expiry as the first send.
/// So if the outcome is unknown, send the request again, or undo it with [`ReleaseRequest::undo`].
/// Do not send a request again after its lock was released.
///
/// ```
/// use syncguard::{Key, LockBackend, MemoryBackend, Ttl};
/// use syncguard::backend::{AcquireOutcome, AcquireRequest};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> syncguard::Result<()> {
/// let backend = MemoryBackend::new();
/// let request = AcquireRequest::new(Key::new("job")?, Ttl::DEFAULT)?;
/// let AcquireOutcome::Acquired(first) = backend.acquire(&request).await? else { panic!() };
/// let AcquireOutcome::Acquired(replay) = backend.acquire(&request).await? else { panic!() };
/// assert_eq!(first.fence(), replay.fence());
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct AcquireRequest {
    key: Key,
    lock_id: LockId,
    ttl: Ttl,
    holder: Option<HolderInfo>,
}

impl AcquireRequest {
    /// Creates a request with a new lock id.
    pub fn new(key: Key, ttl: Ttl) -> Result<Self> {
        Ok(Self { key, lock_id: LockId::random()?, ttl, holder: None })
    }

    /// Creates a request for a backend with these capabilities. If its store has shards, the new
    /// lock id names that of the key, so that operations by id alone ask one node.
    ///
    /// [`new`](Self::new) works with every backend too; on a store with shards, its id is looked
    /// for on all nodes, unless a hint says where the lock is.
    pub fn for_backend(capabilities: Capabilities, key: Key, ttl: Ttl) -> Result<Self> {
        let lock_id = match capabilities.shards {
            None => LockId::random()?,
            Some(shards) => LockId::random_in_shard(shard_of(&key, shards))?,
        };
        Ok(Self { key, lock_id, ttl, holder: None })
    }

    /// Sets who will hold the lock. A backend stores it with the lock, for display.
    #[must_use]
    pub fn with_holder(mut self, holder: Option<HolderInfo>) -> Self {
        self.holder = holder;
        self
    }

    /// Recreates a request of another process, for tests.
    #[cfg(feature = "conformance")]
    #[doc(hidden)]
    #[must_use]
    pub fn from_parts(key: Key, lock_id: LockId, ttl: Ttl) -> Self {
        Self { key, lock_id, ttl, holder: None }
    }

    /// Returns the key to lock.
    #[must_use]
    pub fn key(&self) -> &Key {
        &self.key
    }

    /// Returns the id that will hold the lock.
    #[must_use]
    pub fn lock_id(&self) -> LockId {
        self.lock_id
    }

    /// Returns the TTL of the lock.
    #[must_use]
    pub fn ttl(&self) -> Ttl {
        self.ttl
    }

    /// Returns who will hold the lock, unless that is not to be stored.
    #[must_use]
    pub fn holder(&self) -> Option<&HolderInfo> {
        self.holder.as_ref()
    }
}

/// A request to acquire one of several locks, whichever is free.
///
/// It has one lock id, whichever lock it gets. Unlike an [`AcquireRequest`] it must not be sent
/// again: if the outcome is unknown, undo it and make a new one.
#[derive(Clone, Debug)]
pub struct AcquireAnyRequest {
    keys: Arc<[Key]>,
    request: AcquireRequest,
}

impl AcquireAnyRequest {
    /// Creates a request with a new lock id. The locks are tried in the order of their keys here.
    pub fn new(keys: Arc<[Key]>, ttl: Ttl) -> Result<Self> {
        let first = keys.first().cloned().ok_or_else(|| Error::invalid("no key to lock"))?;
        Ok(Self { keys, request: AcquireRequest::new(first, ttl)? })
    }

    /// Creates a request for several locks, at least one, from a request for another lock.
    pub(crate) fn of(keys: &[Key], request: &AcquireRequest) -> Self {
        let request = AcquireRequest { key: keys[0].clone(), ..request.clone() };
        Self { keys: keys.into(), request }
    }

    /// Sets who will hold the lock. A backend stores it with the lock, for display.
    #[must_use]
    pub fn with_holder(mut self, holder: Option<HolderInfo>) -> Self {
        self.request = self.request.with_holder(holder);
        self
    }

    /// Returns the keys, of which there is at least one.
    #[must_use]
    pub fn keys(&self) -> &[Key] {
        &self.keys
    }

    /// Returns the request for one of the keys alone.
    #[must_use]
    pub fn for_key(&self, key: &Key) -> AcquireRequest {
        AcquireRequest { key: key.clone(), ..self.request.clone() }
    }

    /// Returns the request for the first key, which has the same lock id, TTL and holder.
    #[must_use]
    pub fn first(&self) -> &AcquireRequest {
        &self.request
    }
}

/// Data that a backend attaches to a lease and gets back with later requests about that lock, such
/// as the version of a document. It is opaque to all other code.
#[derive(Clone)]
pub struct Receipt(Arc<dyn Any + Send + Sync>);

impl Receipt {
    /// Wraps the backend's data.
    pub fn new<T: Any + Send + Sync>(note: T) -> Self {
        Self(Arc::new(note))
    }

    /// Returns the data if it is of type `T`.
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

/// Where a lock probably is, so that a backend can access it directly.
///
/// A hint never changes an outcome: a backend that does not find the lock there looks it up by id,
/// in the same transaction or script.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Hint {
    /// The key of the lock that was granted to the lock id.
    pub key: Option<Key>,
    /// The receipt of the backend.
    pub receipt: Option<Receipt>,
}

impl Hint {
    /// Creates a hint with the key.
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

/// A request to release a lock.
#[derive(Clone, Debug)]
pub struct ReleaseRequest {
    lock_id: LockId,
    hint: Hint,
    undo: bool,
    holder_age: Option<Duration>,
    break_note: Option<Arc<BreakNote>>,
}

impl ReleaseRequest {
    /// Creates a request to release the lock that `lock_id` holds.
    #[must_use]
    pub fn new(lock_id: LockId) -> Self {
        Self { lock_id, hint: Hint::default(), undo: false, holder_age: None, break_note: None }
    }

    /// Creates a request to release what an acquire of unknown outcome has acquired or may still
    /// acquire.
    ///
    /// A backend may leave a mark, so that a copy of the acquire that arrives later returns
    /// [`AcquireOutcome::AlreadyUsed`](crate::backend::AcquireOutcome::AlreadyUsed).
    #[must_use]
    pub fn undo(request: &AcquireRequest) -> Self {
        let hint = Hint::key(request.key.clone());
        Self { lock_id: request.lock_id, hint, undo: true, holder_age: None, break_note: None }
    }

    /// Sets how long ago the holder began to wait for the lock.
    ///
    /// A backend passes it on to the waiters that it notifies, so that those that began first try
    /// first; see [`Subscription::notified`](crate::backend::Subscription::notified).
    #[must_use]
    pub fn with_holder_age(mut self, age: Duration) -> Self {
        self.holder_age = Some(age);
        self
    }

    /// Returns how long ago the holder began to wait for the lock, if that is known.
    #[must_use]
    pub fn holder_age(&self) -> Option<Duration> {
        self.holder_age
    }

    /// Makes this a break: another process takes the lock away from its holder.
    ///
    /// A backend passes the note on to the holder if it can; see
    /// [`LockBackend::break_note`](crate::LockBackend::break_note).
    #[must_use]
    pub fn with_break_note(mut self, note: BreakNote) -> Self {
        self.break_note = Some(Arc::new(note));
        self
    }

    /// Returns who breaks the lock and why, if this is a break.
    #[must_use]
    pub fn break_note(&self) -> Option<&BreakNote> {
        self.break_note.as_deref()
    }

    /// Sets the hint.
    #[must_use]
    pub fn with_hint(mut self, hint: Hint) -> Self {
        self.hint = hint;
        self
    }

    /// Returns the id that holds the lock.
    #[must_use]
    pub fn lock_id(&self) -> LockId {
        self.lock_id
    }

    /// Returns where the lock probably is.
    #[must_use]
    pub fn hint(&self) -> &Hint {
        &self.hint
    }

    /// Returns whether this undoes an acquire of unknown outcome.
    #[must_use]
    pub fn is_undo(&self) -> bool {
        self.undo
    }
}

/// A request to set the expiry of a held lock, to a later or an earlier time.
#[derive(Clone, Debug)]
pub struct ExtendRequest {
    lock_id: LockId,
    ttl: Ttl,
    hint: Hint,
    answer_within: Option<Duration>,
}

impl ExtendRequest {
    /// Creates a request to set the expiry of the lock that `lock_id` holds to *now + ttl*.
    #[must_use]
    pub fn new(lock_id: LockId, ttl: Ttl) -> Self {
        Self { lock_id, ttl, hint: Hint::default(), answer_within: None }
    }

    /// Sets the hint.
    #[must_use]
    pub fn with_hint(mut self, hint: Hint) -> Self {
        self.hint = hint;
        self
    }

    /// Limits how long to wait for the response.
    ///
    /// A backend with a longer response timeout ends the attempt at this limit with
    /// [`ErrorCode::NetworkTimeout`](crate::ErrorCode::NetworkTimeout) and no longer trusts the
    /// connection, so that the next attempt uses another one.
    #[must_use]
    pub fn answer_within(mut self, limit: Duration) -> Self {
        self.answer_within = Some(limit);
        self
    }

    /// Returns how long to wait for the response, if there is a limit.
    #[must_use]
    pub fn answer_limit(&self) -> Option<Duration> {
        self.answer_within
    }

    /// Runs an attempt within that limit. Returns `None` if it takes longer.
    #[cfg(feature = "_network")]
    pub(crate) async fn bounded<T>(&self, attempt: Pin<&mut impl Future<Output = T>>) -> Option<T> {
        match self.answer_within {
            Some(limit) => tokio::time::timeout(limit, attempt).await.ok(),
            None => Some(attempt.await),
        }
    }

    /// Returns the id that holds the lock.
    #[must_use]
    pub fn lock_id(&self) -> LockId {
        self.lock_id
    }

    /// Returns the new TTL, from now.
    #[must_use]
    pub fn ttl(&self) -> Ttl {
        self.ttl
    }

    /// Returns where the lock probably is.
    #[must_use]
    pub fn hint(&self) -> &Hint {
        &self.hint
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(text: &str) -> Key {
        Key::new(text).expect("valid")
    }

    fn ttl() -> Ttl {
        Ttl::new(Duration::from_secs(7)).expect("valid")
    }

    #[test]
    fn a_request_for_several_locks_has_one_id_ttl_and_holder() {
        let holder = HolderInfo::of_this_process(Some("x"));
        let any = AcquireAnyRequest::new([key("a"), key("b")].into(), ttl()).expect("randomness");
        let any = any.with_holder(Some(holder.clone()));
        assert_eq!(any.keys(), [key("a"), key("b")]);
        let one = any.for_key(&key("b"));
        let part = AcquireAnyRequest::of(&[key("b")], any.first());
        for request in [&one, part.first()] {
            assert_eq!((request.key(), request.ttl()), (&key("b"), ttl()));
            assert!(request.lock_id() == any.first().lock_id());
            assert_eq!(request.holder(), Some(&holder));
        }
        assert_eq!(any.first().key(), &key("a"));
    }

    #[test]
    fn a_release_carries_what_it_was_given() {
        let request = AcquireRequest::new(key("k"), ttl()).expect("randomness");
        let undo = ReleaseRequest::undo(&request);
        assert!(undo.is_undo() && undo.lock_id() == request.lock_id());
        assert_eq!(undo.hint().key, Some(key("k")));
        assert_eq!((undo.holder_age(), undo.break_note()), (None, None));
        let note = BreakNote::new(None, Some("stuck"));
        let hint = Hint::key(key("k")).with_receipt(Some(Receipt::new(3_u8)));
        let release = ReleaseRequest::new(request.lock_id())
            .with_hint(hint)
            .with_holder_age(Duration::from_secs(2))
            .with_break_note(note.clone());
        assert!(!release.is_undo());
        assert_eq!(release.holder_age(), Some(Duration::from_secs(2)));
        assert_eq!(release.break_note(), Some(&note));
        let receipt = release.hint().receipt.as_ref().expect("given");
        assert_eq!(receipt.get::<u8>(), Some(&3));
    }

    #[tokio::test(start_paused = true)]
    async fn an_extend_is_answered_within_its_limit() {
        let id = LockId::random().expect("randomness");
        let plain = ExtendRequest::new(id, ttl()).with_hint(Hint::key(key("k")));
        assert_eq!((plain.ttl(), plain.answer_limit()), (ttl(), None));
        assert_eq!(plain.hint().key, Some(key("k")));
        let limited = plain.clone().answer_within(Duration::from_secs(1));
        assert_eq!(limited.answer_limit(), Some(Duration::from_secs(1)));
        #[cfg(feature = "_network")]
        for (request, answer) in [(plain, Some(5)), (limited, None)] {
            let slow = std::pin::pin!(async {
                tokio::time::sleep(Duration::from_secs(2)).await;
                5
            });
            assert_eq!(request.bounded(slow).await, answer);
        }
    }
}
