//! A blocking API for programs without an async runtime.
//!
//! A blocking [`Locker`] owns a small runtime with one worker thread, so that renewal continues
//! while your code works. Its methods have the same names and meanings as those of
//! [`crate::Locker`] and [`crate::LockGuard`], but they block instead of returning futures.
//!
//! Use it on plain threads, in `tokio::task::spawn_blocking` and in `tokio::task::block_in_place`.
//! In async code, where blocking would stall the runtime, every call that waits fails with
//! [`ErrorCode::InvalidArgument`].
//!
//! ```
//! use syncguard::{MemoryBackend, blocking::Locker};
//!
//! let locker = Locker::new(MemoryBackend::new())?;
//! let guard = locker.lock("invoice:42")?;
//! println!("charging with fence {}", guard.fence());
//! drop(guard); // waits until it is released
//! # Ok::<(), syncguard::Error>(())
//! ```

mod guard;
mod wait;

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};

use crate::common::error::{Error, ErrorCode, Result};
use crate::common::key::Key;
use crate::common::lock_id::LockId;
use crate::contract::LockBackend;
use crate::contract::stored_lock::LockInfo;
use crate::lock::guard::LockGuard as AsyncLockGuard;
use crate::lock::lock_request::LockRequest;
use crate::lock::locker::{Locker as AsyncLocker, LockerBuilder};
use crate::lock::options::LockOptions;
pub use guard::{LockGuard, LockHandle};
use wait::{wait_for, would_stop_a_runtime};

/// Acquires locks on a backend, blocking the calling thread. See [`crate::Locker`].
///
/// Dropping the last clone waits for background releases, for at most 10 seconds.
#[derive(Clone, Debug)]
pub struct Locker<B: LockBackend> {
    // Dropped first: the last clone waits for releases and ends the runtime.
    inner: Arc<Owned<B>>,
    locker: AsyncLocker<B>,
}

#[derive(Debug)]
struct Owned<B: LockBackend> {
    locker: AsyncLocker<B>,
    /// `None` only while this value is being dropped.
    runtime: Option<Runtime>,
}

impl<B: LockBackend> Locker<B> {
    /// Creates a locker with the default options. See [`crate::Locker::new`].
    pub fn new(backend: B) -> Result<Self> {
        Self::connect(async { Ok(backend) }, |builder| builder)
    }

    /// Creates a locker on a backend that must be created inside a runtime, because it connects.
    /// Use `configure` to set options, telemetry and the clock of the [`LockerBuilder`].
    ///
    /// ```
    /// use std::time::Duration;
    /// use syncguard::{MemoryBackend, blocking::Locker};
    ///
    /// let connect = async { Ok(MemoryBackend::new()) };
    /// let ttl = Duration::from_secs(10);
    /// let locker = Locker::connect(connect, |builder| builder.ttl(ttl).renew())?;
    /// # Ok::<(), syncguard::Error>(())
    /// ```
    ///
    /// Fails with [`ErrorCode::InvalidArgument`] in async code: blocking there would stall the
    /// runtime.
    pub fn connect(
        backend: impl Future<Output = Result<B>>,
        configure: impl FnOnce(LockerBuilder<B>) -> LockerBuilder<B>,
    ) -> Result<Self> {
        refuse_in_async_code()?;
        // A worker thread, not a current-thread runtime: renewal must run while the caller works.
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("syncguard")
            .enable_all()
            .build()
            .map_err(|cause| {
                Error::new(ErrorCode::Internal, "could not start the locker's runtime")
                    .with_source(cause)
                    .without_effect()
            })?;
        let build = async { configure(AsyncLocker::builder(backend.await?)).build() };
        let locker = match wait_for(&runtime, build) {
            Ok(locker) => locker,
            Err(error) => {
                // Dropping a runtime blocks, which tokio forbids in some places.
                runtime.shutdown_background();
                return Err(error);
            }
        };
        let inner = Owned { locker: locker.clone(), runtime: Some(runtime) };
        Ok(Self { inner: Arc::new(inner), locker })
    }

    /// Returns this locker with other options. See [`crate::Locker::with_options`].
    pub fn with_options(&self, options: LockOptions) -> Result<Self> {
        let locker = self.locker.with_options(options)?;
        Ok(Self { inner: Arc::clone(&self.inner), locker })
    }

    /// Returns the options for the locks that this locker acquires.
    pub fn options(&self) -> &LockOptions {
        self.locker.options()
    }

    /// Returns the backend.
    #[must_use]
    pub fn backend(&self) -> &B {
        self.locker.backend()
    }

    /// Acquires the lock if it is free. See [`crate::Locker::try_lock`].
    pub fn try_lock<K>(&self, key: K) -> Result<Option<LockGuard<B>>>
    where
        K: TryInto<Key>,
        Error: From<K::Error>,
    {
        let guard = self.inner.block_on(self.locker.try_lock(key))??;
        Ok(guard.map(|guard| self.guard(guard)))
    }

    /// Acquires the lock, waiting for at most `limit`. Returns `None` if it is still held then. See
    /// [`crate::Locker::try_lock_for`].
    pub fn try_lock_for<K>(&self, key: K, limit: Duration) -> Result<Option<LockGuard<B>>>
    where
        K: TryInto<Key>,
        Error: From<K::Error>,
    {
        let guard = self.inner.block_on(self.locker.try_lock_for(key, limit))??;
        Ok(guard.map(|guard| self.guard(guard)))
    }

    /// Acquires the lock with options of its own, waiting until it is free.
    ///
    /// ```
    /// use std::time::Duration;
    /// use syncguard::{MemoryBackend, blocking::Locker};
    ///
    /// let locker = Locker::new(MemoryBackend::new())?;
    /// let minute = Duration::from_secs(60);
    /// let guard = locker.lock_with("deploy", |request| request.ttl(minute).timeout(minute))?;
    /// # Ok::<(), syncguard::Error>(())
    /// ```
    pub fn lock_with<K>(
        &self,
        key: K,
        configure: impl FnOnce(LockRequest<'_, B>) -> LockRequest<'_, B>,
    ) -> Result<LockGuard<B>>
    where
        K: TryInto<Key>,
        Error: From<K::Error>,
    {
        let guard = self.inner.block_on(configure(self.locker.lock(key)))??;
        Ok(self.guard(guard))
    }

    /// Acquires the lock, waiting until it is free. See [`crate::Locker::lock`].
    pub fn lock<K>(&self, key: K) -> Result<LockGuard<B>>
    where
        K: TryInto<Key>,
        Error: From<K::Error>,
    {
        let guard = self.inner.block_on(self.locker.lock(key))??;
        Ok(self.guard(guard))
    }

    /// Acquires the lock, runs `work` under it on this thread, and releases it.
    ///
    /// Work on a thread cannot be stopped when the lock is lost: let it check
    /// [`is_valid`](LockHandle::is_valid), and send the fence with every write. Returns the value
    /// of `work` unchanged, even if the release fails.
    ///
    /// ```
    /// use syncguard::{ExtendOutcome, MemoryBackend, Ttl, blocking::Locker};
    ///
    /// let locker = Locker::new(MemoryBackend::new())?;
    /// let outcome = locker.with_lock("report", |lock| {
    ///     println!("writing with fence {}", lock.fence());
    ///     lock.extend(Ttl::DEFAULT)
    /// })?;
    /// assert!(matches!(outcome?, ExtendOutcome::Extended(_)));
    /// # Ok::<(), syncguard::Error>(())
    /// ```
    pub fn with_lock<K, T>(&self, key: K, work: impl FnOnce(&LockHandle<B>) -> T) -> Result<T>
    where
        K: TryInto<Key>,
        Error: From<K::Error>,
    {
        let guard = self.lock(key)?;
        Ok(work(&guard.handle()))
    }

    /// Runs `work` under the lock if it is free, and returns `None` if it is held. See
    /// [`with_lock`](Self::with_lock).
    pub fn try_with_lock<K, T>(
        &self,
        key: K,
        work: impl FnOnce(&LockHandle<B>) -> T,
    ) -> Result<Option<T>>
    where
        K: TryInto<Key>,
        Error: From<K::Error>,
    {
        Ok(self.try_lock(key)?.map(|guard| work(&guard.handle())))
    }

    /// Returns a locker that puts `prefix` before every key. See [`crate::Locker::scoped`].
    #[must_use]
    pub fn scoped(&self, prefix: impl AsRef<str>) -> Self {
        Self { inner: Arc::clone(&self.inner), locker: self.locker.scoped(prefix) }
    }

    /// Returns whether any process holds the lock of a key. See [`crate::Locker::is_locked`].
    pub fn is_locked<K>(&self, key: K) -> Result<bool>
    where
        K: TryInto<Key>,
        Error: From<K::Error>,
    {
        self.inner.block_on(self.locker.is_locked(key))?
    }

    /// Returns the lock of a key, if any process holds it. See [`crate::Locker::info`].
    pub fn info<K>(&self, key: K) -> Result<Option<LockInfo>>
    where
        K: TryInto<Key>,
        Error: From<K::Error>,
    {
        self.inner.block_on(self.locker.info(key))?
    }

    /// Creates what the store lacks. See [`crate::Locker::setup`].
    pub fn setup(&self) -> Result<()> {
        self.inner.block_on(self.locker.setup())?
    }

    /// Takes over a lock by its id. See [`crate::Locker::resume`].
    pub fn resume(&self, lock_id: LockId) -> Result<Option<LockGuard<B>>> {
        let guard = self.inner.block_on(self.locker.resume(lock_id))??;
        Ok(guard.map(|guard| self.guard(guard)))
    }

    /// Stops acquiring locks, and waits for background releases, for at most 10 seconds. See
    /// [`crate::Locker::shutdown`].
    pub fn shutdown(&self) -> Result<()> {
        self.inner.block_on(self.locker.shutdown())?
    }

    /// Stops acquiring locks, and waits for background releases, for at most `limit`. See
    /// [`crate::Locker::shutdown_within`].
    pub fn shutdown_within(&self, limit: Duration) -> Result<()> {
        self.inner.block_on(self.locker.shutdown_within(limit))?
    }

    /// Releases every lock that a guard of this locker still holds, in the background. See
    /// [`crate::Locker::release_all`].
    #[expect(clippy::must_use_candidate, reason = "it is called for its effect")]
    pub fn release_all(&self) -> usize {
        self.locker.release_all()
    }

    fn guard(&self, guard: AsyncLockGuard<B>) -> LockGuard<B> {
        LockGuard::new(guard, &self.inner)
    }
}

impl<B: LockBackend> Owned<B> {
    fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        let runtime = self.runtime.as_ref().expect("BUG: the runtime lives as long as the locker");
        drop(runtime.spawn(work));
    }

    fn block_on<T>(&self, work: impl Future<Output = T>) -> Result<T> {
        refuse_in_async_code()?;
        let runtime = self.runtime.as_ref().expect("BUG: the runtime lives as long as the locker");
        Ok(wait_for(runtime, work))
    }
}

fn refuse_in_async_code() -> Result<()> {
    if would_stop_a_runtime() {
        return Err(Error::invalid(
            "a blocking call in async code would stall the runtime; use syncguard::Locker or \
             tokio::task::spawn_blocking",
        ));
    }
    Ok(())
}

impl<B: LockBackend> Drop for Owned<B> {
    fn drop(&mut self) {
        let Some(runtime) = self.runtime.take() else { return };
        let locker = self.locker.clone();
        // Releases that do not finish within the limit report their own errors.
        let end = move || {
            drop(wait_for(&runtime, locker.shutdown()));
            runtime.shutdown_background();
        };
        if would_stop_a_runtime() {
            // Async code must not block, so another thread does it.
            drop(std::thread::Builder::new().name("syncguard-shutdown".into()).spawn(end));
        } else {
            end();
        }
    }
}
