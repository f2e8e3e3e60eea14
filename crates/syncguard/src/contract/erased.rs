//! A backend whose type is only known at run time.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use super::LockBackend;
use super::capabilities::Capabilities;
use super::inspect::Inspector;
use super::outcome::{Acquire, Extend, Release};
use super::request::{AcquireRequest, ExtendRequest, ReleaseRequest};
use super::stored_lock::StoredLock;
use super::wake::WakeUps;
use crate::common::error::Result;
use crate::common::fence::{Fenced, Fencing};
use crate::common::key::Key;
use crate::common::lock_id::LockId;

type Boxed<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// [`LockBackend`] with boxed futures, so that it can be a trait object.
trait DynLockBackend<F: Fencing>: fmt::Debug + Send + Sync + 'static {
    fn capabilities(&self) -> Capabilities;
    fn acquire<'a>(&'a self, request: &'a AcquireRequest) -> Boxed<'a, Result<Acquire<F>>>;
    fn release<'a>(&'a self, request: &'a ReleaseRequest) -> Boxed<'a, Result<Release>>;
    fn extend<'a>(&'a self, request: &'a ExtendRequest) -> Boxed<'a, Result<Extend>>;
    fn is_locked<'a>(&'a self, key: &'a Key) -> Boxed<'a, Result<bool>>;
    fn lookup_key<'a>(&'a self, key: &'a Key) -> Boxed<'a, Result<Option<StoredLock<F>>>>;
    fn lookup_id<'a>(&'a self, lock_id: &'a LockId) -> Boxed<'a, Result<Option<StoredLock<F>>>>;
    fn wake_ups<'a>(&'a self, key: &'a Key) -> Boxed<'a, Option<WakeUps>>;
    fn quiesce(&self) -> Boxed<'_, ()>;
    fn inspector(&self) -> Option<Arc<dyn Inspector>>;
}

impl<B: LockBackend> DynLockBackend<B::Fencing> for B {
    fn capabilities(&self) -> Capabilities {
        LockBackend::capabilities(self)
    }

    fn acquire<'a>(
        &'a self,
        request: &'a AcquireRequest,
    ) -> Boxed<'a, Result<Acquire<B::Fencing>>> {
        Box::pin(LockBackend::acquire(self, request))
    }

    fn release<'a>(&'a self, request: &'a ReleaseRequest) -> Boxed<'a, Result<Release>> {
        Box::pin(LockBackend::release(self, request))
    }

    fn extend<'a>(&'a self, request: &'a ExtendRequest) -> Boxed<'a, Result<Extend>> {
        Box::pin(LockBackend::extend(self, request))
    }

    fn is_locked<'a>(&'a self, key: &'a Key) -> Boxed<'a, Result<bool>> {
        Box::pin(LockBackend::is_locked(self, key))
    }

    fn lookup_key<'a>(&'a self, key: &'a Key) -> Boxed<'a, Result<Option<StoredLock<B::Fencing>>>> {
        Box::pin(LockBackend::lookup_key(self, key))
    }

    fn lookup_id<'a>(
        &'a self,
        lock_id: &'a LockId,
    ) -> Boxed<'a, Result<Option<StoredLock<B::Fencing>>>> {
        Box::pin(LockBackend::lookup_id(self, lock_id))
    }

    fn wake_ups<'a>(&'a self, key: &'a Key) -> Boxed<'a, Option<WakeUps>> {
        Box::pin(LockBackend::wake_ups(self, key))
    }

    fn quiesce(&self) -> Boxed<'_, ()> {
        Box::pin(LockBackend::quiesce(self))
    }

    fn inspector(&self) -> Option<Arc<dyn Inspector>> {
        LockBackend::inspector(self)
    }
}

/// Any backend, chosen at run time; a backend itself.
///
/// Erasure keeps the promise of fencing: `AnyBackend` is `AnyBackend<Fenced>`, so a guard over it
/// still has a plain `fence()`.
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

    async fn acquire(&self, request: &AcquireRequest) -> Result<Acquire<F>> {
        self.0.acquire(request).await
    }

    async fn release(&self, request: &ReleaseRequest) -> Result<Release> {
        self.0.release(request).await
    }

    async fn extend(&self, request: &ExtendRequest) -> Result<Extend> {
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

    async fn wake_ups(&self, key: &Key) -> Option<WakeUps> {
        self.0.wake_ups(key).await
    }

    async fn quiesce(&self) {
        self.0.quiesce().await;
    }

    fn inspector(&self) -> Option<Arc<dyn Inspector>> {
        self.0.inspector()
    }
}
