//! The locker: the way to take locks on a backend.

use std::fmt;
use std::future::Future;
use std::ops::Deref;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::task;
use tokio_util::sync::CancellationToken;

use super::clock::{LocalClock, Ticker};
use super::guard::{Held, LockGuard};
use super::hold::Grant;
use super::lanes::Lanes;
use super::options::LockOptions;
use super::reaper::Reaper;
use super::wait::Wait;
use crate::common::error::{Error, ErrorCode, Result};
use crate::common::key::Key;
use crate::common::lock_id::LockId;
use crate::contract::LockBackend;
use crate::contract::event::{EngineEvent, EventSink};
use crate::contract::outcome::Extend;
use crate::contract::request::ExtendRequest;

/// Takes locks on a backend: waits, renews, and releases what is dropped.
///
/// A locker belongs to the runtime it was built in. Clones are cheap and share everything.
/// **Call [`shutdown`](Self::shutdown) before that runtime ends**, or releases that go on in the
/// background are lost and their locks stay until their TTL.
///
/// ```
/// use syncguard::{Locker, MemoryBackend};
///
/// #[tokio::main(flavor = "current_thread")]
/// async fn main() -> syncguard::Result<()> {
///     let locker = Locker::new(MemoryBackend::new())?;
///     let guard = locker.lock("invoice:42").await?;
///     println!("charging with fence {}", guard.fence());
///     drop(guard);
///     locker.shutdown().await
/// }
/// ```
pub struct Locker<B: LockBackend> {
    contexts: Contexts<B>,
}

/// The same context several times over. Every lock counts a reference to its context; threads that
/// count in different places do not slow each other down.
#[derive(Debug)]
struct Contexts<B>(Arc<[Arc<Context<B>>]>);

impl<B> Contexts<B> {
    const STRIPES: usize = 8;

    fn new(shared: &Arc<Shared<B>>, options: LockOptions) -> Self {
        let options = Arc::new(options);
        let context = || Context { shared: Arc::clone(shared), options: Arc::clone(&options) };
        Self((0..Self::STRIPES).map(|_| Arc::new(context())).collect())
    }

    /// The one for the current thread.
    fn here(&self) -> &Arc<Context<B>> {
        static THREADS: AtomicUsize = AtomicUsize::new(0);
        thread_local! {
            static THREAD: usize = THREADS.fetch_add(1, Ordering::Relaxed);
        }
        &self.0[THREAD.with(|thread| thread % Self::STRIPES)]
    }
}

/// A locker's options and what it shares with lockers of other options, behind one pointer. A cache
/// line to itself, because its references are counted in front of it.
#[derive(Debug)]
#[repr(align(64))]
pub(super) struct Context<B> {
    shared: Arc<Shared<B>>,
    pub(super) options: Arc<LockOptions>,
}

impl<B> Deref for Context<B> {
    type Target = Shared<B>;

    fn deref(&self) -> &Shared<B> {
        &self.shared
    }
}

/// What all clones of a locker, and all its guards, share.
#[derive(Debug)]
pub(super) struct Shared<B> {
    pub(super) backend: B,
    pub(super) ticker: Ticker,
    pub(super) lanes: Lanes,
    pub(super) reaper: Reaper,
    pub(super) poll_interval: Duration,
    observer: Option<Arc<dyn EventSink>>,
    /// Ends all waits.
    pub(super) shut_down: CancellationToken,
}

impl<B> Shared<B> {
    /// Tells the observer, if there is one; nothing is computed otherwise.
    pub(super) fn observe(&self, event: impl FnOnce() -> EngineEvent) {
        if let Some(observer) = &self.observer {
            // A panic in an observer must never break a lock.
            if catch_unwind(AssertUnwindSafe(|| observer.engine(&event()))).is_err() {
                tracing::debug!("an observer panicked");
            }
        }
    }

    /// Refuses to begin where there may be no runtime at all: a backend's first poll could panic.
    ///
    /// Inside a task there is one. Whether it is the right one can wait until a call has to wait:
    /// asking tokio counts a reference that all threads share, and they would meet there.
    pub(super) fn check_for_a_runtime(&self) -> Result<()> {
        if task::try_id().is_some() { Ok(()) } else { self.check_runtime() }
    }

    /// A backend's connections live in one runtime; in another one a call could hang for ever.
    pub(super) fn check_runtime(&self) -> Result<()> {
        let home = self.reaper.runtime().id();
        match Handle::try_current() {
            Ok(here) if here.id() == home => Ok(()),
            Ok(_) => Err(Error::invalid(
                "the locker belongs to another runtime; build one locker per runtime",
            )),
            Err(_) => Err(Error::invalid(
                "the locker needs the runtime it was built in; there is none here",
            )),
        }
    }
}

impl<B: LockBackend> Locker<B> {
    /// A locker with the default options. Must be called inside a tokio runtime.
    pub fn new(backend: B) -> Result<Self> {
        Self::builder(backend).build()
    }

    /// A locker with options of its own.
    pub fn builder(backend: B) -> LockerBuilder<B> {
        LockerBuilder {
            backend,
            options: LockOptions::default(),
            clock: LocalClock::default(),
            poll_interval: Duration::from_secs(1),
            observer: None,
        }
    }

    /// The same locker with other options for the locks it takes.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use syncguard::{Locker, MemoryBackend};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> syncguard::Result<()> {
    /// let locker = Locker::new(MemoryBackend::new())?;
    /// let patient = locker.with_options(locker.options().clone().timeout(Duration::from_secs(60)))?;
    /// let guard = patient.lock("nightly").await?;
    /// # drop(guard); locker.shutdown().await
    /// # }
    /// ```
    pub fn with_options(&self, options: LockOptions) -> Result<Self> {
        options.validate()?;
        Ok(Self { contexts: Contexts::new(&self.context().shared, options) })
    }

    /// The options for the locks that this locker takes.
    #[must_use]
    pub fn options(&self) -> &LockOptions {
        &self.context().options
    }

    /// The backend.
    #[must_use]
    pub fn backend(&self) -> &B {
        &self.context().backend
    }

    /// Takes the lock if it is free; one attempt, no queueing.
    ///
    /// # Cancel safety
    ///
    /// Dropped half-way, the attempt goes on in the background and a lock that it gets is released.
    pub async fn try_lock<K>(&self, key: K) -> Result<Option<LockGuard<B>>>
    where
        K: TryInto<Key>,
        Error: From<K::Error>,
    {
        let key = self.ready_for(key)?;
        Wait::new(self.context(), &key).once().await
    }

    /// Takes the lock, waiting for it up to the [timeout](LockOptions::timeout).
    ///
    /// Tasks of this locker that want the same key queue in order, and only the first of them
    /// talks to the store. Where the backend offers wake-ups nobody polls but for a slow net.
    ///
    /// Fails with [`ErrorCode::AcquisitionTimeout`] when the time or the retries are over, with
    /// [`ErrorCode::Aborted`] when the [token](LockOptions::cancel) is cancelled, and with the
    /// store's own error when there is trouble.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future gives up the place in the queue. An attempt that was under way goes on
    /// in the background and a lock that it gets is released.
    pub async fn lock<K>(&self, key: K) -> Result<LockGuard<B>>
    where
        K: TryInto<Key>,
        Error: From<K::Error>,
    {
        let key = self.ready_for(key)?;
        Wait::new(self.context(), &key).until_acquired().await
    }

    /// Takes the lock, runs `work` under it, and releases it.
    ///
    /// What the work returns is returned unchanged, whatever the release did; a release that
    /// failed is tried again in the background and reported to
    /// [`on_release_error`](LockOptions::on_release_error). When the lock is lost the work is
    /// dropped and the answer is [`ErrorCode::Aborted`].
    ///
    /// ```
    /// # use syncguard::{Locker, MemoryBackend};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> syncguard::Result<()> {
    /// # let locker = Locker::new(MemoryBackend::new())?;
    /// let total = locker.with_lock("report", |held| async move {
    ///     println!("writing with fence {}", held.fence());
    ///     6 * 7
    /// });
    /// assert_eq!(total.await?, 42);
    /// # locker.shutdown().await
    /// # }
    /// ```
    ///
    /// # Cancel safety
    ///
    /// Dropping the future drops the work and releases the lock in the background.
    pub async fn with_lock<K, T, Work>(
        &self,
        key: K,
        work: impl FnOnce(Held<B>) -> Work,
    ) -> Result<T>
    where
        K: TryInto<Key>,
        Error: From<K::Error>,
        Work: Future<Output = T>,
    {
        let mut guard = self.lock(key).await?;
        let outcome = guard.run(work(guard.held())).await;
        guard.finish().await;
        outcome.map_err(|reason| {
            Error::aborted(format!("the work was ended because its lock was lost: {reason}"))
                .with_key(guard.key())
        })
    }

    /// Takes over a lock that another process [leaked](LockGuard::leak), by its id.
    ///
    /// The lock is extended by the TTL of the [options](LockOptions::ttl) first; `None` when it is
    /// not held any more. Key and fence are then read from the store.
    ///
    /// # Cancel safety
    ///
    /// Dropped half-way, the lock may have been extended and stays with its id.
    pub async fn adopt(&self, lock_id: LockId) -> Result<Option<LockGuard<B>>> {
        self.context().check_runtime()?;
        self.check_not_shut_down()?;
        let sent = self.context().ticker.now();
        let backend = &self.context().backend;
        let with_id = |error: Error| error.with_lock_id(lock_id);
        let request = ExtendRequest::new(lock_id, self.context().options.ttl);
        let extension = match backend.extend(&request).await.map_err(with_id)? {
            Extend::Extended(extension) => extension,
            Extend::NotHeld(_) => return Ok(None),
        };
        let Some(stored) = backend.lookup_id(&lock_id).await.map_err(with_id)? else {
            return Ok(None);
        };
        let grant = Grant {
            lock_id,
            token: stored.token,
            expires_at: extension.expires_at(),
            receipt: extension.receipt().cloned(),
            sent,
            ttl: self.context().options.ttl,
            in_doubt: None,
        };
        self.context().lanes.hold(&stored.key, grant.deadline());
        Ok(Some(LockGuard::new(Arc::clone(self.context()), stored.key, grant)))
    }

    /// Takes no new locks, ends all waits with [`ErrorCode::Aborted`], and waits until all releases in the background are done, for at most ten
    /// seconds. Guards that are still held stay usable.
    ///
    /// # Cancel safety
    ///
    /// Dropped half-way, the releases go on; call it again to wait for them.
    pub async fn shutdown(&self) -> Result<()> {
        self.shutdown_within(Duration::from_secs(10)).await
    }

    /// Like [`shutdown`](Self::shutdown), with a limit of the caller's own.
    ///
    /// # Cancel safety
    ///
    /// Dropped half-way, the releases go on; call it again to wait for them.
    pub async fn shutdown_within(&self, limit: Duration) -> Result<()> {
        self.context().check_runtime()?;
        self.context().shut_down.cancel();
        let drained = tokio::time::timeout(limit, self.context().reaper.drain()).await;
        drained.map_err(|_elapsed| {
            let left = self.context().reaper.jobs();
            Error::new(
                ErrorCode::NetworkTimeout,
                format!("{left} releases were still under way after {} ms", limit.as_millis()),
            )
        })
    }

    fn context(&self) -> &Arc<Context<B>> {
        self.contexts.here()
    }

    fn ready_for<K>(&self, key: K) -> Result<Key>
    where
        K: TryInto<Key>,
        Error: From<K::Error>,
    {
        let key = key.try_into()?;
        self.context().check_for_a_runtime()?;
        self.check_not_shut_down()?;
        Ok(key)
    }

    fn check_not_shut_down(&self) -> Result<()> {
        if self.context().shut_down.is_cancelled() {
            return Err(Error::aborted("the locker has been shut down"));
        }
        Ok(())
    }
}

impl<B: LockBackend> Clone for Locker<B> {
    fn clone(&self) -> Self {
        Self { contexts: Contexts(Arc::clone(&self.contexts.0)) }
    }
}

impl<B: LockBackend> fmt::Debug for Locker<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Locker")
            .field("backend", &self.context().backend)
            .field("options", &self.context().options)
            .field("lanes", &self.context().lanes)
            .field("background_jobs", &self.context().reaper.jobs())
            .finish()
    }
}

/// Builds a [`Locker`].
///
/// ```
/// use std::time::Duration;
/// use syncguard::{LockOptions, Locker, MemoryBackend, Ttl};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> syncguard::Result<()> {
/// let locker = Locker::builder(MemoryBackend::new())
///     .options(LockOptions::default().ttl(Ttl::new(Duration::from_secs(10))?).renew())
///     .build()?;
/// # locker.shutdown().await
/// # }
/// ```
#[derive(Debug)]
#[must_use]
pub struct LockerBuilder<B> {
    backend: B,
    options: LockOptions,
    clock: LocalClock,
    poll_interval: Duration,
    observer: Option<Arc<dyn EventSink>>,
}

impl<B: LockBackend> LockerBuilder<B> {
    /// The options for locks that are taken without other ones.
    pub fn options(mut self, options: LockOptions) -> Self {
        self.options = options;
        self
    }

    /// Hears of waiting, holding and losing.
    pub fn observer(mut self, sink: Arc<dyn EventSink>) -> Self {
        self.observer = Some(sink);
        self
    }

    /// The clock that validity and timeouts are counted by.
    pub fn clock(mut self, clock: LocalClock) -> Self {
        self.clock = clock;
        self
    }

    /// How often a waiter asks the store although wake-ups work: the net below them. One second
    /// unless told otherwise.
    pub fn poll_interval(mut self, interval: Duration) -> Self {
        self.poll_interval = interval;
        self
    }

    /// Builds the locker for the current tokio runtime.
    ///
    /// Fails with [`ErrorCode::InvalidArgument`] outside a runtime, and for options that make no
    /// sense.
    pub fn build(self) -> Result<Locker<B>> {
        self.options.validate()?;
        if self.poll_interval.is_zero() {
            return Err(Error::invalid("poll_interval must be positive"));
        }
        let runtime = Handle::try_current()
            .map_err(|_outside| Error::invalid("a locker must be built inside a tokio runtime"))?;
        // Tokio has no other way to ask than to try.
        catch_unwind(|| drop(tokio::time::sleep(Duration::ZERO))).map_err(|_no_timer| {
            Error::invalid("the runtime has no timer; build it with enable_time or enable_all")
        })?;
        let shared = Shared {
            backend: self.backend,
            ticker: Ticker::new(self.clock, runtime.clone()),
            lanes: Lanes::new(),
            reaper: Reaper::new(runtime),
            poll_interval: self.poll_interval,
            observer: self.observer,
            shut_down: CancellationToken::new(),
        };
        Ok(Locker { contexts: Contexts::new(&Arc::new(shared), self.options) })
    }
}
