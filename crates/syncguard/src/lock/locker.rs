//! The locker, which takes locks on a backend.

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
use super::guard::{LockGuard, LockHandle};
use super::lock_request::LockRequest;
use super::options::{LockOptions, option_setters};
use super::release_errors::{ReleaseContext, ReleaseErrors};
use super::retry::RetryPolicy;
use super::shared_lease::Grant;
use crate::common::error::{Error, ErrorCode, Result};
use crate::common::holder::HolderInfo;
use crate::common::key::Key;
use crate::common::lock_id::LockId;
use crate::common::ttl::Ttl;
use crate::contract::LockBackend;
use crate::contract::event::EventSink;
use crate::contract::outcome::ExtendOutcome;
use crate::contract::recorder::Recorder;
use crate::contract::request::{ExtendRequest, Hint};
use crate::contract::stored_lock::LockInfo;

/// Takes locks on a backend: waits for them, renews them, and releases them when their guards are
/// dropped.
///
/// A locker belongs to the runtime it was built in. Clones are cheap and share everything.
/// **Call [`shutdown`](Self::shutdown) before that runtime ends**, or releases in the background
/// are lost and their locks stay held until their TTL expires.
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
#[doc(alias = "mutex")]
#[doc(alias = "semaphore")]
#[doc(alias = "redlock")]
#[doc(alias = "lease")]
#[doc(alias = "advisory lock")]
pub struct Locker<B: LockBackend> {
    contexts: Contexts<B>,
    /// The prefix of all keys.
    scope: Option<Arc<str>>,
}

impl<B: LockBackend> Locker<B> {
    /// Creates a locker with the default options. Call it inside a tokio runtime.
    pub fn new(backend: B) -> Result<Self> {
        Self::builder(backend).build()
    }

    /// Returns a builder for a locker with other options.
    pub fn builder(backend: B) -> LockerBuilder<B> {
        LockerBuilder {
            backend,
            options: LockOptions::default(),
            clock: LocalClock::default(),
            poll_interval: Duration::from_secs(1),
            recorder: Recorder::default(),
            holder: HolderOption::Process { label: None },
        }
    }

    /// Returns a locker that shares everything with this one except the options of its locks.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use syncguard::{Locker, MemoryBackend};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> syncguard::Result<()> {
    /// let locker = Locker::new(MemoryBackend::new())?;
    /// let options = locker.options().clone().timeout(Duration::from_secs(60));
    /// let guard = locker.with_options(options)?.lock("nightly").await?;
    /// # drop(guard); locker.shutdown().await
    /// # }
    /// ```
    pub fn with_options(&self, options: LockOptions) -> Result<Self> {
        options.validate()?;
        let contexts = Contexts::new(&self.context().engine, options);
        Ok(Self { contexts, scope: self.scope.clone() })
    }

    /// Returns the options for the locks that this locker takes.
    pub fn options(&self) -> &LockOptions {
        &self.context().options
    }

    /// Returns the backend.
    #[must_use]
    pub fn backend(&self) -> &B {
        &self.context().engine.backend
    }

    /// Takes the lock if it is free: one attempt, without queueing. Returns `None` if it is held.
    ///
    /// # Cancel safety
    ///
    /// If dropped before it completes, the attempt continues in the background and a lock that it
    /// gets is released.
    pub async fn try_lock<K>(&self, key: K) -> Result<Option<LockGuard<B>>>
    where
        K: TryInto<Key>,
        Error: From<K::Error>,
    {
        self.lock(key).try_now().await
    }

    /// Takes the lock, waiting for at most `limit`. Returns `None` if it is still held then.
    ///
    /// # Cancel safety
    ///
    /// The same as that of [`lock`](Self::lock).
    pub async fn try_lock_for<K>(&self, key: K, limit: Duration) -> Result<Option<LockGuard<B>>>
    where
        K: TryInto<Key>,
        Error: From<K::Error>,
    {
        self.lock(key).try_for(limit).await
    }

    /// Takes the lock, waiting for it up to the [timeout](LockOptions::timeout). Await the request,
    /// or change its options first.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use syncguard::{Locker, MemoryBackend};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> syncguard::Result<()> {
    /// # let locker = Locker::new(MemoryBackend::new())?;
    /// let guard = locker.lock("nightly").timeout(Duration::from_secs(60)).await?;
    /// # drop(guard); locker.shutdown().await
    /// # }
    /// ```
    ///
    /// Tasks of this locker that want the same key queue in order, and only the first of them asks
    /// the store. Where the backend sends notifications, waiters poll only as a fallback.
    ///
    /// Fails with [`ErrorCode::AcquisitionTimeout`] when the timeout or the retries are used up,
    /// with [`ErrorCode::Aborted`] when the [token](LockOptions::cancel) is canceled, and with the
    /// store's own error when the store fails.
    ///
    /// # Cancel safety
    ///
    /// Dropping the request gives up the place in the queue. An attempt in progress continues in
    /// the background, and a lock that it gets is released.
    pub fn lock<K>(&self, key: K) -> LockRequest<'_, B>
    where
        K: TryInto<Key>,
        Error: From<K::Error>,
    {
        LockRequest::new(self.context(), self.key(key))
    }

    /// Takes the lock, runs `work` under it, and releases it.
    ///
    /// Returns the value of the work unchanged, whatever the release did. A release that fails is
    /// retried in the background and, if it keeps failing, reported to
    /// [`on_release_error`](LockOptions::on_release_error). If the lock is lost, the work is
    /// dropped and the error is [`ErrorCode::Aborted`].
    ///
    /// ```
    /// # use syncguard::{Locker, MemoryBackend};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> syncguard::Result<()> {
    /// # let locker = Locker::new(MemoryBackend::new())?;
    /// let total = locker.with_lock("report", |lock| async move {
    ///     println!("writing with fence {}", lock.fence());
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
        work: impl FnOnce(LockHandle<B>) -> Work,
    ) -> Result<T>
    where
        K: TryInto<Key>,
        Error: From<K::Error>,
        Work: Future<Output = T>,
    {
        self.lock(key).run(work).await
    }

    /// Runs `work` under the lock if it is free: one attempt. Returns `None` if it is held.
    ///
    /// ```
    /// # use syncguard::{Locker, MemoryBackend};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> syncguard::Result<()> {
    /// # let locker = Locker::new(MemoryBackend::new())?;
    /// match locker.try_with_lock("nightly", |_lock| async { "done" }).await? {
    ///     Some(done) => println!("{done}"),
    ///     None => println!("running elsewhere"),
    /// }
    /// # locker.shutdown().await
    /// # }
    /// ```
    ///
    /// # Cancel safety
    ///
    /// Dropping the future drops the work and releases the lock in the background.
    pub async fn try_with_lock<K, T, Work>(
        &self,
        key: K,
        work: impl FnOnce(LockHandle<B>) -> Work,
    ) -> Result<Option<T>>
    where
        K: TryInto<Key>,
        Error: From<K::Error>,
        Work: Future<Output = T>,
    {
        self.lock(key).try_run(work).await
    }

    /// Returns a locker that puts `prefix` before every key.
    ///
    /// ```
    /// # use syncguard::{Locker, MemoryBackend};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> syncguard::Result<()> {
    /// # let locker = Locker::new(MemoryBackend::new())?;
    /// let billing = locker.scoped("billing:");
    /// let guard = billing.lock("nightly").await?;
    /// assert!(locker.is_locked("billing:nightly").await?);
    /// # drop(guard); locker.shutdown().await
    /// # }
    /// ```
    #[must_use]
    pub fn scoped(&self, prefix: impl AsRef<str>) -> Self {
        let outer = self.scope.as_deref().unwrap_or_default();
        let scope = Some(format!("{outer}{}", prefix.as_ref()).into());
        Self { contexts: self.contexts.clone(), scope }
    }

    /// Returns whether any process holds the lock of a key. For display only: it protects nothing.
    ///
    /// # Cancel safety
    ///
    /// It only reads, so dropping the future changes nothing.
    pub async fn is_locked<K>(&self, key: K) -> Result<bool>
    where
        K: TryInto<Key>,
        Error: From<K::Error>,
    {
        let key = self.key(key)?;
        self.context().engine.check_runtime()?;
        self.context().engine.recorder.is_locked(self.backend(), &key).await
    }

    /// Returns the lock of a key, if any process holds it. For display only: it protects nothing.
    /// See [`diagnostics`](crate::diagnostics).
    ///
    /// # Cancel safety
    ///
    /// It only reads, so dropping the future changes nothing.
    pub async fn info<K>(&self, key: K) -> Result<Option<LockInfo>>
    where
        K: TryInto<Key>,
        Error: From<K::Error>,
    {
        let key = self.key(key)?;
        self.context().engine.check_runtime()?;
        let found = self.context().engine.recorder.lookup_key(self.backend(), &key).await;
        Ok(found?.map(Into::into))
    }

    /// Creates what the store lacks: tables on PostgreSQL, nothing on other backends. You can call
    /// it repeatedly, and from many processes at once.
    ///
    /// # Cancel safety
    ///
    /// If dropped before it completes, it may or may not have taken effect.
    pub async fn setup(&self) -> Result<()> {
        self.context().engine.check_runtime()?;
        match self.backend().admin() {
            Some(admin) => admin.setup().await,
            None => Ok(()),
        }
    }

    /// Takes over a lock that another process [detached](LockGuard::detach), by its id.
    ///
    /// Key and fence are read from the store, and the lock is extended to the TTL of the
    /// [options](LockOptions::ttl). Returns `None` if it is no longer held.
    ///
    /// # Cancel safety
    ///
    /// If dropped before it completes, the lock may have been extended and stays with its id.
    pub async fn resume(&self, lock_id: LockId) -> Result<Option<LockGuard<B>>> {
        self.context().engine.check_runtime()?;
        self.check_not_shut_down()?;
        let context = self.context();
        let Engine { backend, recorder, ticker, .. } = &*context.engine;
        let with_id = |error: Error| error.with_lock_id(lock_id);
        let Some(stored) = recorder.lookup_id(backend, &lock_id).await.map_err(with_id)? else {
            return Ok(None);
        };
        let (sent, ttl) = (ticker.now(), context.options.ttl);
        let request = ExtendRequest::new(lock_id, ttl).with_hint(Hint::key(stored.key.clone()));
        let extension = match recorder.extend(backend, &request).await.map_err(with_id)? {
            ExtendOutcome::Extended(extension) => extension,
            ExtendOutcome::NotHeld(_) => return Ok(None),
        };
        let grant = Grant {
            lock_id,
            token: stored.token,
            expires_at: extension.expires_at(),
            receipt: extension.receipt().cloned(),
            wanted_since: sent,
            sent,
            ttl,
            unsettled: None,
            also_wakes: None,
        };
        Ok(Some(LockGuard::new(Arc::clone(context), stored.key, grant, None)))
    }

    /// Refuses new locks, ends all waits with [`ErrorCode::Aborted`], and waits until all releases
    /// in the background are done, for at most 10 seconds.
    ///
    /// Guards that are still held stay usable, but if the process ends, their locks stay held until
    /// their TTL expires. In that case this returns [`ErrorCode::InvalidArgument`] with the number
    /// of guards: drop them first, or call [`release_all`](Self::release_all).
    ///
    /// # Cancel safety
    ///
    /// If dropped before it completes, the releases continue; call it again to wait for them.
    pub async fn shutdown(&self) -> Result<()> {
        self.shutdown_within(Duration::from_secs(10)).await
    }

    /// Like [`shutdown`](Self::shutdown), but waits for at most `limit`.
    ///
    /// # Cancel safety
    ///
    /// If dropped before it completes, the releases continue; call it again to wait for them.
    pub async fn shutdown_within(&self, limit: Duration) -> Result<()> {
        let engine = &self.context().engine;
        engine.check_runtime()?;
        engine.shut_down();
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
        match engine.wait_queues.holders().len() {
            0 => Ok(()),
            held => Err(Error::invalid(format!(
                "{held} guards still hold their locks; drop them first, or call release_all"
            ))),
        }
    }

    /// Releases every lock that a guard of this locker still holds, and returns how many there
    /// were. Clones, and lockers with other options or a scope, count as this locker. The releases
    /// continue in the background; [`shutdown`](Self::shutdown) waits for them.
    ///
    /// Work under those guards sees [`LostReason::Released`](crate::LostReason::Released), and the
    /// guards do nothing from then on.
    #[expect(clippy::must_use_candidate, reason = "it is called for its effect")]
    pub fn release_all(&self) -> usize {
        let holders = self.context().engine.wait_queues.holders();
        let count = holders.len();
        for holder in holders {
            holder.release_now();
        }
        count
    }

    pub(super) fn context(&self) -> &Arc<Context<B>> {
        self.contexts.here()
    }

    /// Returns a key with the prefix of this locker.
    pub(crate) fn key<K>(&self, key: K) -> Result<Key>
    where
        K: TryInto<Key>,
        Error: From<K::Error>,
    {
        let key = key.try_into()?;
        match &self.scope {
            Some(scope) => Key::new(format!("{scope}{}", key.as_str())),
            None => Ok(key),
        }
    }

    /// Returns the same locker without a prefix, for keys that have it already.
    pub(crate) fn unscoped(&self) -> Self {
        Self { contexts: self.contexts.clone(), scope: None }
    }

    /// Returns how many keys are waited for or held here.
    #[cfg(test)]
    pub(super) fn waits_and_holds(&self) -> usize {
        self.context().engine.wait_queues.len()
    }

    pub(super) fn check_not_shut_down(&self) -> Result<()> {
        if self.context().engine.is_shut_down() {
            return Err(Error::shut_down());
        }
        Ok(())
    }
}

impl<B: LockBackend> Clone for Locker<B> {
    fn clone(&self) -> Self {
        Self { contexts: self.contexts.clone(), scope: self.scope.clone() }
    }
}

impl<B: LockBackend> fmt::Debug for Locker<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Locker")
            .field("backend", &self.context().engine.backend)
            .field("options", &self.context().options)
            .field("wait_queues", &self.context().engine.wait_queues)
            .field("background_jobs", &self.context().engine.background.jobs())
            .finish()
    }
}

/// Builds a [`Locker`].
///
/// ```
/// use std::time::Duration;
/// use syncguard::{Locker, MemoryBackend};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> syncguard::Result<()> {
/// let builder = Locker::builder(MemoryBackend::new());
/// let locker = builder.ttl(Duration::from_secs(10)).renew().build()?;
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
    recorder: Recorder,
    holder: HolderOption,
}

/// Who is stored as the holder of a lock.
#[derive(Debug)]
enum HolderOption {
    Process { label: Option<String> },
    None,
}

impl<B: LockBackend> LockerBuilder<B> {
    option_setters!();

    fn options_mut(&mut self) -> &mut LockOptions {
        &mut self.options
    }

    /// Sets the options of all locks that are taken without their own options.
    pub fn options(mut self, options: LockOptions) -> Self {
        self.options = options;
        self
    }

    /// Sends events to `sink`: every operation at the backend, and every wait, hold and loss. Call
    /// it several times for several sinks.
    ///
    /// A sink runs on its own thread behind a bounded queue unless it
    /// [is inline](EventSink::is_inline).
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use syncguard::{Locker, MemoryBackend, telemetry::TracingSink};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> syncguard::Result<()> {
    /// let builder = Locker::builder(MemoryBackend::new());
    /// let locker = builder.telemetry(Arc::new(TracingSink)).build()?;
    /// # locker.shutdown().await
    /// # }
    /// ```
    pub fn telemetry(mut self, sink: Arc<dyn EventSink>) -> Self {
        self.recorder.add(sink);
        self
    }

    /// Sets the clock for validity and timeouts.
    pub fn clock(mut self, clock: LocalClock) -> Self {
        self.clock = clock;
        self
    }

    /// Sets how often a waiter asks the store although notifications work, as a fallback. 1 second
    /// by default.
    pub fn poll_interval(mut self, interval: Duration) -> Self {
        self.poll_interval = interval;
        self
    }

    /// Sets the label under which this process is shown as the [holder](HolderInfo) of a lock,
    /// such as `billing-worker`. It is stored with every lock and is not secret.
    ///
    /// Host name, process id and program are stored without a label too.
    pub fn holder(mut self, label: impl Into<String>) -> Self {
        self.holder = HolderOption::Process { label: Some(label.into()) };
        self
    }

    /// Stores nothing about the holder of a lock.
    pub fn no_holder(mut self) -> Self {
        self.holder = HolderOption::None;
        self
    }

    /// Builds the locker for the current tokio runtime.
    ///
    /// Fails with [`ErrorCode::InvalidArgument`] outside a runtime, and for invalid options.
    pub fn build(self) -> Result<Locker<B>> {
        self.options.validate()?;
        if self.poll_interval.is_zero() {
            return Err(Error::invalid("poll_interval must be greater than zero"));
        }
        let runtime = Handle::try_current()
            .map_err(|_outside| Error::invalid("a locker must be built inside a tokio runtime"))?;
        // Tokio offers no other way to check for a timer.
        catch_unwind(|| drop(tokio::time::sleep(Duration::ZERO))).map_err(|_no_timer| {
            Error::invalid("the runtime has no timer; build it with enable_time or enable_all")
        })?;
        let ticker = Ticker::new(self.clock, runtime.clone());
        let background = Background::new(runtime);
        let holder = match &self.holder {
            HolderOption::Process { label } => Some(HolderInfo::of_this_process(label.as_deref())),
            HolderOption::None => None,
        };
        let (poll_interval, recorder) = (self.poll_interval, self.recorder);
        let engine = Engine::new(self.backend, ticker, background, poll_interval, recorder, holder);
        Ok(Locker { contexts: Contexts::new(&Arc::new(engine), self.options), scope: None })
    }
}
