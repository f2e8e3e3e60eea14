//! A backend that prints events of the lock.

use std::sync::Arc;

use syncguard::backend::{
    AcquireAnyOutcome, AcquireAnyRequest, AcquireOutcome, AcquireRequest, Admin, BreakNote,
    Capabilities, ExtendRequest, Hint, ReleaseRequest, StoredLock, Subscription,
};
use syncguard::{AnyBackend, ExtendOutcome, Key, LockBackend, LockId, ReleaseOutcome, Result};

use crate::event::Event;
use crate::output::Output;

/// Wraps a backend, and prints renewals and releases when they succeed.
#[derive(Debug)]
pub(crate) struct Reporting {
    inner: AnyBackend,
    output: Output,
    key: Key,
}

impl Reporting {
    /// Wraps a backend if events are printed, and returns it as it is otherwise.
    pub(crate) fn around(inner: AnyBackend, output: Output, key: &Key) -> AnyBackend {
        if !output.shows_events() {
            return inner;
        }
        AnyBackend::new(Self { inner, output, key: key.clone() })
    }

    /// Returns the key of a request, or that of the command if the request does not name it.
    fn key<'a>(&'a self, hint: &'a Hint) -> &'a str {
        hint.key.as_ref().unwrap_or(&self.key).as_str()
    }
}

#[deny(clippy::missing_trait_methods)]
impl LockBackend for Reporting {
    type Fencing = <AnyBackend as LockBackend>::Fencing;

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn acquire(
        &self,
        request: &AcquireRequest,
    ) -> impl Future<Output = Result<AcquireOutcome<Self::Fencing>>> + Send {
        self.inner.acquire(request)
    }

    fn acquire_any(
        &self,
        request: &AcquireAnyRequest,
    ) -> impl Future<Output = Result<AcquireAnyOutcome<Self::Fencing>>> + Send {
        self.inner.acquire_any(request)
    }

    async fn release(&self, request: &ReleaseRequest) -> Result<ReleaseOutcome> {
        let released = self.inner.release(request).await?;
        if released == ReleaseOutcome::Released {
            self.output.event(&Event::Released { key: self.key(request.hint()) });
        }
        Ok(released)
    }

    async fn extend(&self, request: &ExtendRequest) -> Result<ExtendOutcome> {
        let extended = self.inner.extend(request).await?;
        if matches!(extended, ExtendOutcome::Extended(_)) {
            self.output.event(&Event::Renewed { key: self.key(request.hint()) });
        }
        Ok(extended)
    }

    fn is_locked(&self, key: &Key) -> impl Future<Output = Result<bool>> + Send {
        self.inner.is_locked(key)
    }

    fn lookup_key(
        &self,
        key: &Key,
    ) -> impl Future<Output = Result<Option<StoredLock<Self::Fencing>>>> + Send {
        self.inner.lookup_key(key)
    }

    fn lookup_id(
        &self,
        lock_id: &LockId,
    ) -> impl Future<Output = Result<Option<StoredLock<Self::Fencing>>>> + Send {
        self.inner.lookup_id(lock_id)
    }

    fn subscribe(&self, key: &Key) -> impl Future<Output = Option<Subscription>> + Send {
        self.inner.subscribe(key)
    }

    fn watch(&self, key: &Key) -> impl Future<Output = Option<Subscription>> + Send {
        self.inner.watch(key)
    }

    fn waiters(&self, key: &Key) -> impl Future<Output = Option<u32>> + Send {
        self.inner.waiters(key)
    }

    fn break_note(&self, lock_id: &LockId) -> impl Future<Output = Option<BreakNote>> + Send {
        self.inner.break_note(lock_id)
    }

    fn quiesce(&self) -> impl Future<Output = ()> + Send {
        self.inner.quiesce()
    }

    fn admin(&self) -> Option<Arc<dyn Admin>> {
        self.inner.admin()
    }
}
