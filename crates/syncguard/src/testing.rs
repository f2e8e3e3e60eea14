//! Tools for tests: virtual time and injected faults.
//!
//! ```
//! use std::time::Duration;
//! use syncguard::{ErrorCode, LockOptions, LostReason, testing};
//!
//! #[tokio::main(flavor = "current_thread")]
//! async fn main() -> syncguard::Result<()> {
//!     tokio::time::pause();
//!     let options = LockOptions::default().ttl(Duration::from_secs(10));
//!     let (locker, faults) = testing::paused_locker(options)?;
//!     let guard = locker.lock("job").await?;
//!     tokio::time::advance(Duration::from_secs(11)).await;
//!     assert_eq!(guard.lost().await, LostReason::Expired);
//!
//!     faults.fail_next(ErrorCode::ServiceUnavailable);
//!     assert!(locker.try_lock("other").await.is_err_and(|error| error.is_retryable()));
//!     Ok(())
//! }
//! ```

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::backends::memory::{MemoryBackend, MemoryConfig};
use crate::common::clock::Clock;
use crate::common::error::{Error, ErrorCode, Result};
use crate::common::holder::BreakNote;
use crate::common::key::Key;
use crate::common::lock_id::LockId;
use crate::common::time::Timestamp;
use crate::contract::LockBackend;
use crate::contract::admin::Admin;
use crate::contract::capabilities::Capabilities;
use crate::contract::notifier::Subscription;
use crate::contract::outcome::{AcquireAnyOutcome, AcquireOutcome, ExtendOutcome, ReleaseOutcome};
use crate::contract::request::{AcquireAnyRequest, AcquireRequest, ExtendRequest, ReleaseRequest};
use crate::contract::stored_lock::StoredLock;
use crate::layers::Layer;
pub use crate::lock::clock::LocalClock;
use crate::lock::locker::Locker;
use crate::lock::options::LockOptions;

/// Returns a locker on a memory backend that follows tokio's clock, and a layer that injects faults
/// into that backend.
///
/// In a paused runtime (`tokio::time::pause`, or `#[tokio::test(start_paused = true)]`), time
/// passes only when you advance it, or when every task sleeps.
pub fn paused_locker(options: LockOptions) -> Result<(Locker<Faulty<MemoryBackend>>, FaultLayer)> {
    let clock = Arc::new(TokioClock(Instant::now()));
    let faults = FaultLayer::default();
    let backend = faults.layer(MemoryBackend::with_config(MemoryConfig::default().clock(clock)));
    let locker = Locker::builder(backend).clock(LocalClock::Tokio).options(options).build()?;
    Ok((locker, faults))
}

/// Tokio's clock as a wall clock.
#[derive(Debug)]
struct TokioClock(Instant);

impl Clock for TokioClock {
    fn now(&self) -> Timestamp {
        /// An arbitrary time, with as many digits as the current one.
        const START_MS: u64 = 1_700_000_000_000;
        let elapsed_ms = u64::try_from(self.0.elapsed().as_millis()).unwrap_or(u64::MAX);
        Timestamp::from_millis(START_MS.saturating_add(elapsed_ms))
    }
}

/// A layer that makes operations of a backend fail or take longer. Clones share the faults.
#[derive(Clone, Debug, Default)]
pub struct FaultLayer(Arc<Mutex<Faults>>);

#[derive(Debug, Default)]
struct Faults {
    next: VecDeque<ErrorCode>,
    always: Option<ErrorCode>,
    delay: Duration,
}

impl FaultLayer {
    /// Makes the next operation fail without effect. Each call affects one more operation.
    pub fn fail_next(&self, code: ErrorCode) {
        self.faults().next.push_back(code);
    }

    /// Makes every operation fail without effect, until you call it with `None`.
    pub fn fail_always(&self, code: impl Into<Option<ErrorCode>>) {
        self.faults().always = code.into();
    }

    /// Makes every operation take this much longer.
    pub fn delay(&self, delay: Duration) {
        self.faults().delay = delay;
    }

    fn faults(&self) -> MutexGuard<'_, Faults> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn inject(&self) -> Result<()> {
        let (delay, code) = {
            let mut faults = self.faults();
            let next = faults.next.pop_front();
            (faults.delay, next.or(faults.always))
        };
        if !delay.is_zero() {
            tokio::time::sleep(delay).await;
        }
        match code {
            Some(code) => Err(Error::new(code, "injected fault").without_effect()),
            None => Ok(()),
        }
    }
}

impl<B: LockBackend> Layer<B> for FaultLayer {
    type Backend = Faulty<B>;

    fn layer(&self, inner: B) -> Faulty<B> {
        Faulty { inner, faults: self.clone() }
    }
}

/// A backend with injected faults. [`FaultLayer`] creates it.
#[derive(Clone, Debug)]
pub struct Faulty<B> {
    inner: B,
    faults: FaultLayer,
}

#[deny(clippy::missing_trait_methods)]
impl<B: LockBackend> LockBackend for Faulty<B> {
    type Fencing = B::Fencing;

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<AcquireOutcome<B::Fencing>> {
        self.faults.inject().await?;
        self.inner.acquire(request).await
    }

    async fn acquire_any(
        &self,
        request: &AcquireAnyRequest,
    ) -> Result<AcquireAnyOutcome<B::Fencing>> {
        self.faults.inject().await?;
        self.inner.acquire_any(request).await
    }

    async fn release(&self, request: &ReleaseRequest) -> Result<ReleaseOutcome> {
        self.faults.inject().await?;
        self.inner.release(request).await
    }

    async fn extend(&self, request: &ExtendRequest) -> Result<ExtendOutcome> {
        self.faults.inject().await?;
        self.inner.extend(request).await
    }

    async fn is_locked(&self, key: &Key) -> Result<bool> {
        self.faults.inject().await?;
        self.inner.is_locked(key).await
    }

    async fn lookup_key(&self, key: &Key) -> Result<Option<StoredLock<B::Fencing>>> {
        self.faults.inject().await?;
        self.inner.lookup_key(key).await
    }

    async fn lookup_id(&self, lock_id: &LockId) -> Result<Option<StoredLock<B::Fencing>>> {
        self.faults.inject().await?;
        self.inner.lookup_id(lock_id).await
    }

    async fn subscribe(&self, key: &Key) -> Option<Subscription> {
        self.inner.subscribe(key).await
    }

    async fn watch(&self, key: &Key) -> Option<Subscription> {
        self.inner.watch(key).await
    }

    async fn waiters(&self, key: &Key) -> Option<u32> {
        self.inner.waiters(key).await
    }

    async fn break_note(&self, lock_id: &LockId) -> Option<BreakNote> {
        self.inner.break_note(lock_id).await
    }

    async fn quiesce(&self) {
        self.inner.quiesce().await;
    }

    fn admin(&self) -> Option<Arc<dyn Admin>> {
        self.inner.admin()
    }
}
