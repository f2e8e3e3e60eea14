//! The same locks for programs without an async runtime.
//!
//! A [`Locker`] here owns a small runtime with one worker thread, so that renewal goes on while
//! the caller works. The names and the meanings are those of [`crate::Locker`] and
//! [`crate::LockGuard`]; only the waiting is different: it blocks.
//!
//! Use it on plain threads, in `tokio::task::spawn_blocking` and in `tokio::task::block_in_place`. In
//! async code, where blocking would stop the runtime, every call that waits fails with
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
mod handle;
mod wait;

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};

use crate::common::error::{Error, ErrorCode, Result};
use crate::common::key::Key;
use crate::common::lock_id::LockId;
use crate::contract::LockBackend;
use crate::lock::options::LockOptions;
pub use guard::LockGuard;
pub use handle::LockHandle;
use wait::{wait_for, would_stop_a_runtime};

/// Takes locks on a backend, blocking the calling thread. See [`crate::Locker`].
///
/// Dropping the last clone waits for releases in the background, for at most ten seconds.
#[derive(Clone, Debug)]
pub struct Locker<B: LockBackend> {
    // Declared before the runtime: its drop needs it.
    inner: Arc<Owned<B>>,
    locker: crate::Locker<B>,
}

#[derive(Debug)]
struct Owned<B: LockBackend> {
    locker: crate::Locker<B>,
    /// Only empty while it is being dropped.
    runtime: Option<Runtime>,
}

impl<B: LockBackend> Locker<B> {
    /// A locker with the default options. See [`crate::Locker::new`].
    pub fn new(backend: B) -> Result<Self> {
        Self::connect(async { Ok(backend) }, LockOptions::default())
    }

    /// A locker on a backend that must be made inside a runtime, because it connects.
    ///
    /// ```
    /// use syncguard::{LockOptions, MemoryBackend, blocking::Locker};
    ///
    /// let connect = async { Ok(MemoryBackend::new()) };
    /// let locker = Locker::connect(connect, LockOptions::default())?;
    /// # Ok::<(), syncguard::Error>(())
    /// ```
    ///
    /// Fails with [`ErrorCode::InvalidArgument`] in async code: blocking there would stop its
    /// runtime.
    pub fn connect(backend: impl Future<Output = Result<B>>, options: LockOptions) -> Result<Self> {
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
        let build = async { crate::Locker::builder(backend.await?).options(options).build() };
        let locker = match wait_for(&runtime, build) {
            Ok(locker) => locker,
            Err(error) => {
                // Dropping a runtime waits for it, which tokio forbids in some places.
                runtime.shutdown_background();
                return Err(error);
            }
        };
        let inner = Owned { locker: locker.clone(), runtime: Some(runtime) };
        Ok(Self { inner: Arc::new(inner), locker })
    }

    /// The same locker with other options. See [`crate::Locker::with_options`].
    pub fn with_options(&self, options: LockOptions) -> Result<Self> {
        let locker = self.locker.with_options(options)?;
        Ok(Self { inner: Arc::clone(&self.inner), locker })
    }

    /// The options for the locks that this locker takes.
    #[must_use]
    pub fn options(&self) -> &LockOptions {
        self.locker.options()
    }

    /// The backend.
    #[must_use]
    pub fn backend(&self) -> &B {
        self.locker.backend()
    }

    /// Takes the lock if it is free. See [`crate::Locker::try_lock`].
    pub fn try_lock<K>(&self, key: K) -> Result<Option<LockGuard<B>>>
    where
        K: TryInto<Key>,
        Error: From<K::Error>,
    {
        let guard = self.inner.block_on(self.locker.try_lock(key))??;
        Ok(guard.map(|guard| self.guard(guard)))
    }

    /// Takes the lock, waiting for it. See [`crate::Locker::lock`].
    pub fn lock<K>(&self, key: K) -> Result<LockGuard<B>>
    where
        K: TryInto<Key>,
        Error: From<K::Error>,
    {
        let guard = self.inner.block_on(self.locker.lock(key))??;
        Ok(self.guard(guard))
    }

    /// Takes the lock, runs `work` under it on this thread, and releases it.
    ///
    /// Work on a thread cannot be ended when the lock is lost: let it ask
    /// [`is_valid`](LockHandle::is_valid), and send the fence with every write. What the work returns
    /// is returned unchanged, whatever the release did.
    ///
    /// ```
    /// use syncguard::{Extend, MemoryBackend, Ttl, blocking::Locker};
    ///
    /// let locker = Locker::new(MemoryBackend::new())?;
    /// let outcome = locker.with_lock("report", |lock| {
    ///     println!("writing with fence {}", lock.fence());
    ///     lock.extend(Ttl::DEFAULT)
    /// })?;
    /// assert!(matches!(outcome?, Extend::Extended(_)));
    /// # Ok::<(), syncguard::Error>(())
    /// ```
    pub fn with_lock<K, T>(&self, key: K, work: impl FnOnce(&LockHandle<B>) -> T) -> Result<T>
    where
        K: TryInto<Key>,
        Error: From<K::Error>,
    {
        let guard = self.lock(key)?;
        Ok(work(&guard))
    }

    /// Takes over a lock by its id. See [`crate::Locker::adopt`].
    pub fn adopt(&self, lock_id: LockId) -> Result<Option<LockGuard<B>>> {
        let guard = self.inner.block_on(self.locker.adopt(lock_id))??;
        Ok(guard.map(|guard| self.guard(guard)))
    }

    /// Waits for releases in the background. See [`crate::Locker::shutdown_within`].
    pub fn shutdown_within(&self, limit: Duration) -> Result<()> {
        self.inner.block_on(self.locker.shutdown_within(limit))?
    }

    fn guard(&self, guard: crate::LockGuard<B>) -> LockGuard<B> {
        LockGuard::new(guard, &self.inner)
    }
}

impl<B: LockBackend> Owned<B> {
    fn block_on<T>(&self, work: impl Future<Output = T>) -> Result<T> {
        refuse_in_async_code()?;
        let runtime = self.runtime.as_ref().expect("BUG: the runtime lives as long as the locker");
        Ok(wait_for(runtime, work))
    }
}

fn refuse_in_async_code() -> Result<()> {
    if would_stop_a_runtime() {
        return Err(Error::invalid(
            "a blocking call in async code would stop its runtime; use syncguard::Locker there, or \
             tokio::task::spawn_blocking",
        ));
    }
    Ok(())
}

impl<B: LockBackend> Drop for Owned<B> {
    fn drop(&mut self) {
        let Some(runtime) = self.runtime.take() else { return };
        let locker = self.locker.clone();
        // What is left after the limit is reported by the releases themselves.
        let end = move || {
            drop(wait_for(&runtime, locker.shutdown()));
            runtime.shutdown_background();
        };
        if would_stop_a_runtime() {
            // Async code must not wait, so it happens beside it.
            drop(std::thread::Builder::new().name("syncguard-shutdown".into()).spawn(end));
        } else {
            end();
        }
    }
}
