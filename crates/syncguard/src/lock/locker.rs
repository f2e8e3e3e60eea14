//! The locker: the way to take locks on a backend.

use std::fmt;
use std::future::Future;
use std::panic::catch_unwind;
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;

use super::background::Background;
use super::clock::{LocalClock, Ticker};
use super::context::{Context, Contexts, Engine};
use super::guard::{Held, LockGuard};
use super::lanes::Lanes;
use super::options::LockOptions;
use super::shared_lease::Grant;
use super::wait::Wait;
use crate::common::error::{Error, ErrorCode, Result};
use crate::common::key::Key;
use crate::common::lock_id::LockId;
use crate::contract::LockBackend;
use crate::contract::callback_queue::SinkHandle;
use crate::contract::event::EventSink;
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
        Ok(Self { contexts: Contexts::new(&self.context().engine, options) })
    }

    /// The options for the locks that this locker takes.
    #[must_use]
    pub fn options(&self) -> &LockOptions {
        &self.context().options
    }

    /// The backend.
    #[must_use]
    pub fn backend(&self) -> &B {
        &self.context().engine.backend
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
        outcome.map_err(|reason| Error::lost_lock(reason).with_key(guard.key()))
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
        self.context().engine.check_runtime()?;
        self.check_not_shut_down()?;
        let sent = self.context().engine.ticker.now();
        let backend = &self.context().engine.backend;
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
            unsettled: None,
        };
        Ok(Some(LockGuard::new(Arc::clone(self.context()), stored.key, grant, None)))
    }

    /// Takes no new locks, ends all waits with [`ErrorCode::Aborted`], and waits until all releases
    /// in the background are done, for at most ten seconds.
    ///
    /// Guards that are still held stay usable, but once the process ends their locks stay until
    /// their TTL. Then this answers [`ErrorCode::InvalidArgument`] and says how many: drop them
    /// first, or call [`release_all`](Self::release_all).
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
        let engine = &self.context().engine;
        engine.check_runtime()?;
        engine.shut_down.cancel();
        let finish = async {
            engine.background.drain().await;
            engine.backend.quiesce().await;
        };
        tokio::time::timeout(limit, finish).await.map_err(|_elapsed| {
            let left = engine.background.jobs();
            let limit_ms = limit.as_millis();
            Error::new(
                ErrorCode::NetworkTimeout,
                format!("{left} background releases were unfinished after {limit_ms} ms"),
            )
        })?;
        match engine.lanes.holders().len() {
            0 => Ok(()),
            held => Err(Error::invalid(format!(
                "{held} guards still hold their locks; drop them first, or call release_all"
            ))),
        }
    }

    /// Releases every lock that a guard of this locker, or of one that shares its backend, still
    /// holds, and answers how many there were. The releases go on in the background;
    /// [`shutdown`](Self::shutdown) waits for them.
    ///
    /// Work under those guards sees [`LostReason::Released`](crate::LostReason::Released), and the
    /// guards are inert.
    #[expect(clippy::must_use_candidate, reason = "it is called for its effect")]
    pub fn release_all(&self) -> usize {
        let holders = self.context().engine.lanes.holders();
        let count = holders.len();
        for holder in holders {
            holder.release_now();
        }
        count
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
        self.context().engine.check_for_a_runtime()?;
        self.check_not_shut_down()?;
        Ok(key)
    }

    fn check_not_shut_down(&self) -> Result<()> {
        if self.context().engine.shut_down.is_cancelled() {
            return Err(Error::shut_down());
        }
        Ok(())
    }
}

impl<B: LockBackend> Clone for Locker<B> {
    fn clone(&self) -> Self {
        Self { contexts: self.contexts.clone() }
    }
}

impl<B: LockBackend> fmt::Debug for Locker<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Locker")
            .field("backend", &self.context().engine.backend)
            .field("options", &self.context().options)
            .field("lanes", &self.context().engine.lanes)
            .field("background_jobs", &self.context().engine.background.jobs())
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

    /// Hears of waiting, holding and losing, on a thread of its own behind a bounded queue unless it
    /// [is inline](EventSink::is_inline).
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
        let engine = Engine {
            backend: self.backend,
            ticker: Ticker::new(self.clock, runtime.clone()),
            lanes: Lanes::new(),
            background: Background::new(runtime),
            poll_interval: self.poll_interval,
            observer: self.observer.map(SinkHandle::new),
            shut_down: CancellationToken::new(),
        };
        Ok(Locker { contexts: Contexts::new(&Arc::new(engine), self.options) })
    }
}
