//! Ring 2: what every backend fulfils.

pub(crate) mod advice;
pub(crate) mod callback_queue;
pub(crate) mod capabilities;
pub(crate) mod erased;
pub(crate) mod event;
pub(crate) mod inspect;
#[cfg(any(feature = "postgres", feature = "redis"))]
pub(crate) mod listener;
pub(crate) mod outcome;
pub(crate) mod request;
pub(crate) mod stored_lock;
pub(crate) mod wake;
#[cfg(any(feature = "firestore", feature = "postgres", feature = "redis"))]
pub(crate) mod wake_desk;

use std::fmt;
use std::future::{Future, ready};
use std::sync::Arc;

use crate::common::error::Result;
use crate::common::fence::Fencing;
use crate::common::key::Key;
use crate::common::lock_id::LockId;
use capabilities::Capabilities;
use inspect::Inspector;
use outcome::{Acquire, Extend, Release};
use request::{AcquireRequest, ExtendRequest, ReleaseRequest};
use stored_lock::StoredLock;
use wake::WakeUps;

/// A store that keeps locks.
///
/// Every method is **one attempt**: no waiting for a lock, no retries (the
/// [`Locker`](crate::Locker) does that). Outcomes that a correct program must expect are values;
/// an `Err` is always trouble. Liveness is [`is_live`](crate::is_live) by the backend's time
/// authority, in every method. The conformance kit (feature `conformance`) has one test for every
/// bullet below.
///
/// Implementers write plain `async fn`. Each method may be dropped at any await point; what a
/// dropped call must leave behind is said under *Cancel safety*.
pub trait LockBackend: fmt::Debug + Send + Sync + 'static {
    /// [`Fenced`](crate::Fenced) or [`Unfenced`](crate::Unfenced).
    type Fencing: Fencing;

    /// What this backend is and can do.
    fn capabilities(&self) -> Capabilities;

    /// Takes the lock if nobody holds it.
    ///
    /// # Behavior
    ///
    /// * Free, or dead by the predicate: [`Acquire::Acquired`] with a fence larger than any before
    ///   for this key, and the expiry *now + ttl* by the time authority. Near the end of the fences
    ///   a warning is logged ([`Fence::warn_near_the_end`](crate::Fence::warn_near_the_end)).
    /// * Held by another request: [`Acquire::Contended`]; the store is only read.
    /// * Held by this very request (a replay): [`Acquire::Acquired`] with the same fence and
    ///   expiry; nothing is written.
    /// * This request's own record is dead: [`Acquire::Spent`]; it is not granted again.
    /// * The fence counter is exhausted: [`ErrorCode::Internal`](crate::ErrorCode::Internal), and
    ///   the store ends as it was.
    ///
    /// # Cancel safety
    ///
    /// A dropped acquire may still take effect. Release it by the request's id with
    /// [`ReleaseRequest::undo`], as the `Locker` does.
    fn acquire(
        &self,
        request: &AcquireRequest,
    ) -> impl Future<Output = Result<Acquire<Self::Fencing>>> + Send;

    /// Gives a lock back.
    ///
    /// # Behavior
    ///
    /// * The id holds a live lock: [`Release::Released`], and nothing of the lock is left but the
    ///   fence counter.
    /// * Anything else: [`Release::NotHeld`]; no other holder's lock is touched. At most one
    ///   release of an id answers [`Release::Released`].
    /// * A hint never changes the answer, even when it is wrong.
    ///
    /// # Cancel safety
    ///
    /// A dropped release may or may not take effect. Repeating it is harmless.
    fn release(&self, request: &ReleaseRequest) -> impl Future<Output = Result<Release>> + Send;

    /// Sets the expiry of a held lock to *now + ttl*.
    ///
    /// # Behavior
    ///
    /// * The id holds a live lock: [`Extend::Extended`] with the new expiry, which replaces the
    ///   old one and may be earlier. Fence and acquisition time stay.
    /// * Anything else: [`Extend::NotHeld`]; a dead lock is never revived.
    /// * A hint never changes the answer, even when it is wrong.
    ///
    /// # Cancel safety
    ///
    /// A dropped extend may or may not take effect. Repeating it is harmless.
    fn extend(&self, request: &ExtendRequest) -> impl Future<Output = Result<Extend>> + Send;

    /// Whether somebody holds the lock of `key`. Read-only unless the backend was configured to
    /// clean up. For display; it guards nothing.
    ///
    /// # Cancel safety
    ///
    /// Nothing is changed, dropped or not.
    fn is_locked(&self, key: &Key) -> impl Future<Output = Result<bool>> + Send;

    /// The live lock of `key`, if there is one. Read-only. Open it with
    /// [`diagnostics`](crate::diagnostics).
    ///
    /// # Cancel safety
    ///
    /// Nothing is changed, dropped or not.
    fn lookup_key(
        &self,
        key: &Key,
    ) -> impl Future<Output = Result<Option<StoredLock<Self::Fencing>>>> + Send;

    /// The live lock that `lock_id` holds, if it holds one. Read-only. Open it with
    /// [`diagnostics`](crate::diagnostics).
    ///
    /// # Cancel safety
    ///
    /// Nothing is changed, dropped or not.
    fn lookup_id(
        &self,
        lock_id: &LockId,
    ) -> impl Future<Output = Result<Option<StoredLock<Self::Fencing>>>> + Send;

    /// Asks to be told when the lock of `key` may be free; `None` where that is not offered.
    ///
    /// When this answers, the subscription works: a release that happens later is heard. So a
    /// waiter subscribes first, then tries once more, then waits. A missed wake-up costs a waiter
    /// time and nothing else; polling stays underneath.
    ///
    /// # Cancel safety
    ///
    /// A dropped call leaves no subscription behind.
    #[expect(unused_variables, reason = "the name is documentation")]
    fn wake_ups(&self, key: &Key) -> impl Future<Output = Option<WakeUps>> + Send {
        ready(None)
    }

    /// Waits for what this backend does after it has answered: notifications of releases, cleanups.
    /// A [`Locker`](crate::Locker) that shuts down calls it, so that a process that ends right after
    /// loses none of it.
    ///
    /// It takes no longer than an operation may, and reports no failure: nothing that is correct
    /// depends on it.
    ///
    /// # Cancel safety
    ///
    /// What is under way goes on, dropped or not.
    fn quiesce(&self) -> impl Future<Output = ()> + Send {
        ready(())
    }

    /// The store for people: what is held, what is missing, what is risky. `None` where that is not
    /// offered. Locking never needs it.
    fn inspector(&self) -> Option<Arc<dyn Inspector>> {
        None
    }
}

#[deny(clippy::missing_trait_methods)]
impl<B: LockBackend> LockBackend for Arc<B> {
    type Fencing = B::Fencing;

    fn capabilities(&self) -> Capabilities {
        B::capabilities(self)
    }

    fn acquire(
        &self,
        request: &AcquireRequest,
    ) -> impl Future<Output = Result<Acquire<Self::Fencing>>> + Send {
        B::acquire(self, request)
    }

    fn release(&self, request: &ReleaseRequest) -> impl Future<Output = Result<Release>> + Send {
        B::release(self, request)
    }

    fn extend(&self, request: &ExtendRequest) -> impl Future<Output = Result<Extend>> + Send {
        B::extend(self, request)
    }

    fn is_locked(&self, key: &Key) -> impl Future<Output = Result<bool>> + Send {
        B::is_locked(self, key)
    }

    fn lookup_key(
        &self,
        key: &Key,
    ) -> impl Future<Output = Result<Option<StoredLock<Self::Fencing>>>> + Send {
        B::lookup_key(self, key)
    }

    fn lookup_id(
        &self,
        lock_id: &LockId,
    ) -> impl Future<Output = Result<Option<StoredLock<Self::Fencing>>>> + Send {
        B::lookup_id(self, lock_id)
    }

    fn wake_ups(&self, key: &Key) -> impl Future<Output = Option<WakeUps>> + Send {
        B::wake_ups(self, key)
    }

    fn quiesce(&self) -> impl Future<Output = ()> + Send {
        B::quiesce(self)
    }

    fn inspector(&self) -> Option<Arc<dyn Inspector>> {
        B::inspector(self)
    }
}
