//! A backend whose type is known only at run time.

use std::fmt;
use std::sync::Arc;

use super::BoxFuture;
use super::LockBackend;
use super::admin::Admin;
use super::capabilities::Capabilities;
use super::notifier::Subscription;
use super::outcome::{AcquireAnyOutcome, AcquireOutcome, ExtendOutcome, ReleaseOutcome};
use super::request::{AcquireAnyRequest, AcquireRequest, ExtendRequest, ReleaseRequest};
use super::stored_lock::StoredLock;
use crate::common::error::Result;
use crate::common::fence::{Fenced, Fencing};
use crate::common::holder::BreakNote;
use crate::common::key::Key;
use crate::common::lock_id::LockId;

/// An object-safe [`LockBackend`], with boxed futures.
trait DynLockBackend<F: Fencing>: fmt::Debug + Send + Sync + 'static {
    fn capabilities(&self) -> Capabilities;
    fn acquire<'a>(
        &'a self,
        request: &'a AcquireRequest,
    ) -> BoxFuture<'a, Result<AcquireOutcome<F>>>;
    fn acquire_any<'a>(
        &'a self,
        request: &'a AcquireAnyRequest,
    ) -> BoxFuture<'a, Result<AcquireAnyOutcome<F>>>;
    fn release<'a>(&'a self, request: &'a ReleaseRequest) -> BoxFuture<'a, Result<ReleaseOutcome>>;
    fn extend<'a>(&'a self, request: &'a ExtendRequest) -> BoxFuture<'a, Result<ExtendOutcome>>;
    fn is_locked<'a>(&'a self, key: &'a Key) -> BoxFuture<'a, Result<bool>>;
    fn lookup_key<'a>(&'a self, key: &'a Key) -> BoxFuture<'a, Result<Option<StoredLock<F>>>>;
    fn lookup_id<'a>(&'a self, lock_id: &'a LockId)
    -> BoxFuture<'a, Result<Option<StoredLock<F>>>>;
    fn subscribe<'a>(&'a self, key: &'a Key) -> BoxFuture<'a, Option<Subscription>>;
    fn watch<'a>(&'a self, key: &'a Key) -> BoxFuture<'a, Option<Subscription>>;
    fn waiters<'a>(&'a self, key: &'a Key) -> BoxFuture<'a, Option<u32>>;
    fn break_note<'a>(&'a self, lock_id: &'a LockId) -> BoxFuture<'a, Option<BreakNote>>;
    fn quiesce(&self) -> BoxFuture<'_, ()>;
    fn admin(&self) -> Option<Arc<dyn Admin>>;
}

impl<B: LockBackend> DynLockBackend<B::Fencing> for B {
    fn capabilities(&self) -> Capabilities {
        LockBackend::capabilities(self)
    }

    fn acquire<'a>(
        &'a self,
        request: &'a AcquireRequest,
    ) -> BoxFuture<'a, Result<AcquireOutcome<B::Fencing>>> {
        Box::pin(LockBackend::acquire(self, request))
    }

    fn acquire_any<'a>(
        &'a self,
        request: &'a AcquireAnyRequest,
    ) -> BoxFuture<'a, Result<AcquireAnyOutcome<B::Fencing>>> {
        Box::pin(LockBackend::acquire_any(self, request))
    }

    fn release<'a>(&'a self, request: &'a ReleaseRequest) -> BoxFuture<'a, Result<ReleaseOutcome>> {
        Box::pin(LockBackend::release(self, request))
    }

    fn extend<'a>(&'a self, request: &'a ExtendRequest) -> BoxFuture<'a, Result<ExtendOutcome>> {
        Box::pin(LockBackend::extend(self, request))
    }

    fn is_locked<'a>(&'a self, key: &'a Key) -> BoxFuture<'a, Result<bool>> {
        Box::pin(LockBackend::is_locked(self, key))
    }

    fn lookup_key<'a>(
        &'a self,
        key: &'a Key,
    ) -> BoxFuture<'a, Result<Option<StoredLock<B::Fencing>>>> {
        Box::pin(LockBackend::lookup_key(self, key))
    }

    fn lookup_id<'a>(
        &'a self,
        lock_id: &'a LockId,
    ) -> BoxFuture<'a, Result<Option<StoredLock<B::Fencing>>>> {
        Box::pin(LockBackend::lookup_id(self, lock_id))
    }

    fn subscribe<'a>(&'a self, key: &'a Key) -> BoxFuture<'a, Option<Subscription>> {
        Box::pin(LockBackend::subscribe(self, key))
    }

    fn watch<'a>(&'a self, key: &'a Key) -> BoxFuture<'a, Option<Subscription>> {
        Box::pin(LockBackend::watch(self, key))
    }

    fn waiters<'a>(&'a self, key: &'a Key) -> BoxFuture<'a, Option<u32>> {
        Box::pin(LockBackend::waiters(self, key))
    }

    fn break_note<'a>(&'a self, lock_id: &'a LockId) -> BoxFuture<'a, Option<BreakNote>> {
        Box::pin(LockBackend::break_note(self, lock_id))
    }

    fn quiesce(&self) -> BoxFuture<'_, ()> {
        Box::pin(LockBackend::quiesce(self))
    }

    fn admin(&self) -> Option<Arc<dyn Admin>> {
        LockBackend::admin(self)
    }
}

/// A backend that you choose at run time.
///
/// It preserves fencing: `AnyBackend` is `AnyBackend<Fenced>`, so its guards still have a plain
/// `fence()`.
///
/// ```
/// use syncguard::{AnyBackend, Locker, MemoryBackend};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> syncguard::Result<()> {
/// let backend: AnyBackend = AnyBackend::new(MemoryBackend::new());
/// let locker = Locker::new(backend)?;
/// let guard = locker.lock("job").await?;
/// assert_eq!(guard.fence().get(), 1);
/// # drop(guard); locker.shutdown().await
/// # }
/// ```
pub struct AnyBackend<F: Fencing = Fenced>(Arc<dyn DynLockBackend<F>>);

impl<F: Fencing> AnyBackend<F> {
    /// Erases the type of a backend.
    pub fn new<B: LockBackend<Fencing = F>>(backend: B) -> Self {
        Self(Arc::new(backend))
    }
}

impl<F: Fencing> Clone for AnyBackend<F> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<F: Fencing> fmt::Debug for AnyBackend<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("AnyBackend").field(&self.0).finish()
    }
}

#[deny(clippy::missing_trait_methods)]
impl<F: Fencing> LockBackend for AnyBackend<F> {
    type Fencing = F;

    fn capabilities(&self) -> Capabilities {
        self.0.capabilities()
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<AcquireOutcome<F>> {
        self.0.acquire(request).await
    }

    async fn acquire_any(&self, request: &AcquireAnyRequest) -> Result<AcquireAnyOutcome<F>> {
        self.0.acquire_any(request).await
    }

    async fn release(&self, request: &ReleaseRequest) -> Result<ReleaseOutcome> {
        self.0.release(request).await
    }

    async fn extend(&self, request: &ExtendRequest) -> Result<ExtendOutcome> {
        self.0.extend(request).await
    }

    async fn is_locked(&self, key: &Key) -> Result<bool> {
        self.0.is_locked(key).await
    }

    async fn lookup_key(&self, key: &Key) -> Result<Option<StoredLock<F>>> {
        self.0.lookup_key(key).await
    }

    async fn lookup_id(&self, lock_id: &LockId) -> Result<Option<StoredLock<F>>> {
        self.0.lookup_id(lock_id).await
    }

    async fn subscribe(&self, key: &Key) -> Option<Subscription> {
        self.0.subscribe(key).await
    }

    async fn watch(&self, key: &Key) -> Option<Subscription> {
        self.0.watch(key).await
    }

    async fn waiters(&self, key: &Key) -> Option<u32> {
        self.0.waiters(key).await
    }

    async fn break_note(&self, lock_id: &LockId) -> Option<BreakNote> {
        self.0.break_note(lock_id).await
    }

    async fn quiesce(&self) {
        self.0.quiesce().await;
    }

    fn admin(&self) -> Option<Arc<dyn Admin>> {
        self.0.admin()
    }
}
