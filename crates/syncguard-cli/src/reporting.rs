//! A backend that tells what happens to the lock.

use std::sync::Arc;

use syncguard::{
    Acquire, AcquireRequest, AnyBackend, Capabilities, Extend, ExtendRequest, Inspector, Key,
    LockBackend, LockId, Release, ReleaseRequest, Result, StoredLock, WakeUps,
};

use crate::event::Event;
use crate::output::Output;

/// Tells of renewals and releases as they are answered.
#[derive(Debug)]
pub(crate) struct Reporting {
    inner: AnyBackend,
    output: Output,
    key: Key,
}

impl Reporting {
    /// Puts itself around a backend, if anybody wants to know.
    pub(crate) fn around(inner: AnyBackend, output: Output, key: &Key) -> AnyBackend {
        if !output.tells_events() {
            return inner;
        }
        AnyBackend::new(Self { inner, output, key: key.clone() })
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
    ) -> impl Future<Output = Result<Acquire<Self::Fencing>>> + Send {
        self.inner.acquire(request)
    }

    async fn release(&self, request: &ReleaseRequest) -> Result<Release> {
        let released = self.inner.release(request).await?;
        if released == Release::Released {
            self.output.event(&Event::Released { key: self.key.as_str() });
        }
        Ok(released)
    }

    async fn extend(&self, request: &ExtendRequest) -> Result<Extend> {
        let extended = self.inner.extend(request).await?;
        if matches!(extended, Extend::Extended(_)) {
            self.output.event(&Event::Renewed { key: self.key.as_str() });
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

    fn wake_ups(&self, key: &Key) -> impl Future<Output = Option<WakeUps>> + Send {
        self.inner.wake_ups(key)
    }

    fn quiesce(&self) -> impl Future<Output = ()> + Send {
        self.inner.quiesce()
    }

    fn inspector(&self) -> Option<Arc<dyn Inspector>> {
        self.inner.inspector()
    }
}
