//! Ring 2: the contract that every backend implements.

pub(crate) mod acquire_any;
pub(crate) mod admin;
#[cfg(feature = "_listener")]
pub(crate) mod batch;
pub(crate) mod break_notes;
pub(crate) mod callback_queue;
pub(crate) mod capabilities;
pub(crate) mod detach;
pub(crate) mod erased;
pub(crate) mod event;
pub(crate) mod fence_gate;
pub(crate) mod fenced_lock;
pub(crate) mod finding;
#[cfg(feature = "_listener")]
pub(crate) mod listener;
#[cfg(feature = "_network")]
pub(crate) mod listener_handle;
pub(crate) mod notifier;
pub(crate) mod outcome;
pub(crate) mod recorder;
pub(crate) mod request;
pub(crate) mod stored_lock;

use std::fmt;
use std::future::{Future, ready};
use std::pin::Pin;
use std::sync::Arc;

use crate::common::error::Result;
use crate::common::fence::Fencing;
use crate::common::holder::BreakNote;
use crate::common::key::Key;
use crate::common::lock_id::LockId;
use admin::Admin;
use capabilities::Capabilities;
use notifier::Subscription;
use outcome::{AcquireAnyOutcome, AcquireOutcome, ExtendOutcome, ReleaseOutcome};
use request::{AcquireAnyRequest, AcquireRequest, ExtendRequest, ReleaseRequest};
use stored_lock::StoredLock;

/// A boxed future, for traits that are used as `dyn`.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// A store that keeps locks.
///
/// Every method makes **one attempt**: it does not wait for a lock and does not retry. The
/// [`Locker`](crate::Locker) does that. Outcomes that a correct program must expect are values; an
/// `Err` is always a failure. Every method decides whether a lock is live with
/// [`is_live`](crate::backend::is_live), by the backend's time authority. The conformance kit
/// (feature `conformance`) has one test for every item in the lists below.
///
/// You implement the methods as plain `async fn`. Callers may drop each future at any await point;
/// the *Cancel safety* sections define what a dropped call may leave behind.
pub trait LockBackend: fmt::Debug + Send + Sync + 'static {
    /// [`Fenced`](crate::backend::Fenced) or [`Unfenced`](crate::backend::Unfenced).
    type Fencing: Fencing;

    /// Returns the properties of this backend.
    fn capabilities(&self) -> Capabilities;

    /// Acquires the lock if it is free.
    ///
    /// # Behavior
    ///
    /// * The lock is free or dead: returns [`AcquireOutcome::Acquired`] with a fence larger than
    ///   any before for this key, and the expiry *now + ttl* by the time authority. Close to the
    ///   largest fence it logs a warning
    ///   ([`Fence::warn_near_the_end`](crate::Fence::warn_near_the_end)).
    /// * Another request holds the lock: returns [`AcquireOutcome::Contended`]; the store is only
    ///   read.
    /// * This request already holds the lock (a replay): returns [`AcquireOutcome::Acquired`] with
    ///   the same fence and expiry; nothing is written.
    /// * This request's own record is dead: returns [`AcquireOutcome::AlreadyUsed`]; the lock is
    ///   not granted again.
    /// * The fence counter is exhausted: fails with
    ///   [`ErrorCode::Internal`](crate::ErrorCode::Internal) and leaves the store unchanged.
    ///
    /// # Cancel safety
    ///
    /// A dropped acquire may still take effect. Release it with [`ReleaseRequest::undo`], as the
    /// `Locker` does.
    fn acquire(
        &self,
        request: &AcquireRequest,
    ) -> impl Future<Output = Result<AcquireOutcome<Self::Fencing>>> + Send;

    /// Acquires one of several locks, if one of them is free.
    ///
    /// # Behavior
    ///
    /// * One of the locks is free or dead: acquires the first such lock, as
    ///   [`acquire`](Self::acquire) does, and returns [`AcquireAnyOutcome::Acquired`] with its key.
    ///   No other lock changes.
    /// * Other requests hold all of them: returns [`AcquireAnyOutcome::Contended`]; the store is
    ///   only read.
    /// * If another request takes a lock at the same moment, it may return `Contended` although one
    ///   of the others is free.
    ///
    /// By default it looks at all locks at the same time, then acquires a free one. A backend that
    /// can do both in one script or statement does.
    ///
    /// # Cancel safety
    ///
    /// The same as that of [`acquire`](Self::acquire).
    fn acquire_any(
        &self,
        request: &AcquireAnyRequest,
    ) -> impl Future<Output = Result<AcquireAnyOutcome<Self::Fencing>>> + Send {
        acquire_any::look_then_acquire(self, request)
    }

    /// Releases a lock.
    ///
    /// # Behavior
    ///
    /// * The id holds a live lock: returns [`ReleaseOutcome::Released`]; only the fence counter of
    ///   the lock remains.
    /// * Otherwise: returns [`ReleaseOutcome::NotHeld`]; no other holder's lock changes. At most
    ///   one release of an id returns [`ReleaseOutcome::Released`], unless the store loses it.
    /// * A hint never changes the outcome, even if it is wrong.
    ///
    /// # Cancel safety
    ///
    /// A dropped release may or may not take effect. Repeating it is harmless.
    fn release(
        &self,
        request: &ReleaseRequest,
    ) -> impl Future<Output = Result<ReleaseOutcome>> + Send;

    /// Sets the expiry of a held lock to *now + ttl*.
    ///
    /// # Behavior
    ///
    /// * The id holds a live lock: returns [`ExtendOutcome::Extended`] with the new expiry, which
    ///   replaces the old one and may be earlier. Fence and acquisition time do not change.
    /// * Otherwise: returns [`ExtendOutcome::NotHeld`]; a dead lock is never revived.
    /// * A hint never changes the outcome, even if it is wrong.
    ///
    /// # Cancel safety
    ///
    /// A dropped extend may or may not take effect. Repeating it is harmless.
    fn extend(&self, request: &ExtendRequest)
    -> impl Future<Output = Result<ExtendOutcome>> + Send;

    /// Returns whether the lock of `key` is held.
    ///
    /// It only reads, unless you configured the backend to clean up. Use it for display: the lock
    /// may change hands at any time.
    ///
    /// # Cancel safety
    ///
    /// You can drop this future at any time; it changes no live lock.
    fn is_locked(&self, key: &Key) -> impl Future<Output = Result<bool>> + Send;

    /// Returns the live lock of `key`, if there is one. Read it with
    /// [`diagnostics`](crate::diagnostics).
    ///
    /// # Cancel safety
    ///
    /// You can drop this future at any time; it only reads.
    fn lookup_key(
        &self,
        key: &Key,
    ) -> impl Future<Output = Result<Option<StoredLock<Self::Fencing>>>> + Send;

    /// Returns the live lock that `lock_id` holds, if there is one. Read it with
    /// [`diagnostics`](crate::diagnostics).
    ///
    /// # Cancel safety
    ///
    /// You can drop this future at any time; it only reads.
    fn lookup_id(
        &self,
        lock_id: &LockId,
    ) -> impl Future<Output = Result<Option<StoredLock<Self::Fencing>>>> + Send;

    /// Subscribes to notifications that the lock of `key` may be free. Returns `None` if the
    /// backend does not support it, or cannot subscribe at the moment.
    ///
    /// When this returns, the subscription is active: it receives every later release. So a waiter
    /// subscribes first, then tries once more, then waits. A missed notification only costs time,
    /// because waiters also poll.
    ///
    /// # Cancel safety
    ///
    /// A dropped call leaves no subscription behind.
    #[expect(unused_variables, reason = "the name is documentation")]
    fn subscribe(&self, key: &Key) -> impl Future<Output = Option<Subscription>> + Send {
        ready(None)
    }

    /// Subscribes to changes of hands: the lock of `key` may have been released, broken, taken over
    /// or deleted. Returns `None` if the backend does not support it, or cannot subscribe at the
    /// moment.
    ///
    /// The holder of a lock uses it to notice a loss at once. When this returns, the subscription
    /// is active, so a holder subscribes first, then looks. A notification proves nothing, and a
    /// missed one only costs time: the holder also notices at its next renewal. Unlike
    /// [`subscribe`](Self::subscribe), it does not count as waiting.
    ///
    /// # Cancel safety
    ///
    /// A dropped call leaves no subscription behind.
    #[expect(unused_variables, reason = "the name is documentation")]
    fn watch(&self, key: &Key) -> impl Future<Output = Option<Subscription>> + Send {
        ready(None)
    }

    /// Returns how many processes wait for the lock of `key`, if the store knows that without much
    /// work. For display only.
    ///
    /// # Cancel safety
    ///
    /// You can drop this future at any time; it only reads.
    #[expect(unused_variables, reason = "the name is documentation")]
    fn waiters(&self, key: &Key) -> impl Future<Output = Option<u32>> + Send {
        ready(None)
    }

    /// Returns who broke the lock that `lock_id` held and why, if a
    /// [break](ReleaseRequest::with_break_note) left a note. Notes are kept for a minute or longer.
    ///
    /// # Cancel safety
    ///
    /// You can drop this future at any time; it only reads.
    #[expect(unused_variables, reason = "the name is documentation")]
    fn break_note(&self, lock_id: &LockId) -> impl Future<Output = Option<BreakNote>> + Send {
        ready(None)
    }

    /// Waits for the work that this backend does in the background after an operation has returned:
    /// notifications of releases and cleanups.
    ///
    /// A [`Locker`](crate::Locker) calls it when it shuts down, so that a process that exits right
    /// after loses none of this work. It takes no longer than an operation may, and reports no
    /// failure, because correctness does not depend on it.
    ///
    /// # Cancel safety
    ///
    /// If you drop this future, the background work continues.
    fn quiesce(&self) -> impl Future<Output = ()> + Send {
        ready(())
    }

    /// Returns an interface for administration: list locks, set up the store, find risky settings.
    /// Returns `None` if the backend has none. Locking never needs it.
    fn admin(&self) -> Option<Arc<dyn Admin>> {
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
    ) -> impl Future<Output = Result<AcquireOutcome<Self::Fencing>>> + Send {
        B::acquire(self, request)
    }

    fn acquire_any(
        &self,
        request: &AcquireAnyRequest,
    ) -> impl Future<Output = Result<AcquireAnyOutcome<Self::Fencing>>> + Send {
        B::acquire_any(self, request)
    }

    fn release(
        &self,
        request: &ReleaseRequest,
    ) -> impl Future<Output = Result<ReleaseOutcome>> + Send {
        B::release(self, request)
    }

    fn extend(
        &self,
        request: &ExtendRequest,
    ) -> impl Future<Output = Result<ExtendOutcome>> + Send {
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

    fn subscribe(&self, key: &Key) -> impl Future<Output = Option<Subscription>> + Send {
        B::subscribe(self, key)
    }

    fn watch(&self, key: &Key) -> impl Future<Output = Option<Subscription>> + Send {
        B::watch(self, key)
    }

    fn waiters(&self, key: &Key) -> impl Future<Output = Option<u32>> + Send {
        B::waiters(self, key)
    }

    fn break_note(&self, lock_id: &LockId) -> impl Future<Output = Option<BreakNote>> + Send {
        B::break_note(self, lock_id)
    }

    fn quiesce(&self) -> impl Future<Output = ()> + Send {
        B::quiesce(self)
    }

    fn admin(&self) -> Option<Arc<dyn Admin>> {
        B::admin(self)
    }
}
