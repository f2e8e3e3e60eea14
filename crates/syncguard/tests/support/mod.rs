//! Shared by the engine's tests: a backend that fails on demand, on virtual time.

#![allow(dead_code, reason = "every test file uses a part of it")]

use std::collections::VecDeque;
use std::future::pending;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use syncguard::backend::{
    AcquireOutcome, AcquireRequest, Admin, Capabilities, Clock, ExtendRequest, Fenced, Notifier,
    ReleaseRequest, StoredLock, Subscription, TimeAuthority,
};
use syncguard::memory::MemoryConfig;
use syncguard::testing::LocalClock;
use syncguard::{
    Error, ErrorCode, ExtendOutcome, FenceSource, Key, LockBackend, LockId, LockOptions, Locker,
    MemoryBackend, ReleaseOutcome, Result, RetryPolicy, Timestamp, Ttl,
};
use tokio::time::Instant;

/// Which operation was called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Call {
    Acquire,
    Release,
    Extend,
}

/// What goes wrong with one call.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Fault {
    /// Nothing.
    None,
    /// It fails without effect, which the caller cannot know.
    Fails(ErrorCode),
    /// It takes effect and its answer is lost.
    LosesReply(ErrorCode),
    /// It is never answered and has no effect.
    Hangs,
    /// It takes effect and is never answered.
    HangsAfter,
    /// It takes effect after a while.
    Delayed(Duration),
    /// It takes effect after holding up the whole thread.
    Blocks(Duration),
    /// It panics.
    Panics,
}

/// The wall clock of virtual time.
#[derive(Debug)]
pub(crate) struct VirtualClock(Instant);

impl Clock for VirtualClock {
    fn now(&self) -> Timestamp {
        let elapsed_ms = u64::try_from(self.0.elapsed().as_millis()).expect("small");
        Timestamp::from_millis(1_763_232_000_000 + elapsed_ms)
    }
}

/// The memory backend on virtual time, with faults and a log of the calls.
#[derive(Clone, Debug)]
pub(crate) struct Faulty {
    pub(crate) inner: MemoryBackend,
    state: Arc<Mutex<State>>,
    has_wake_ups: bool,
    /// Never notifies.
    silence: Option<Notifier>,
    lookups_take: Duration,
    /// What holders that watch their locks are notified by.
    pub(crate) changes: Option<Notifier>,
}

#[derive(Debug, Default)]
struct State {
    faults: [VecDeque<Fault>; 3],
    always: [Option<Fault>; 3],
    calls: Vec<(Call, Instant)>,
    acquire_ids: Vec<LockId>,
    lookups: Vec<Instant>,
    subscriptions: Vec<Instant>,
}

impl Faulty {
    /// Creates a backend without faults, with notifications.
    pub(crate) fn new() -> Self {
        let clock = Arc::new(VirtualClock(Instant::now()));
        Self {
            inner: MemoryBackend::with_config(MemoryConfig::default().clock(clock)),
            state: Arc::default(),
            has_wake_ups: true,
            silence: None,
            lookups_take: Duration::ZERO,
            changes: None,
        }
    }

    /// Takes fences from the clock.
    pub(crate) fn with_clock_fences() -> Self {
        let clock = Arc::new(VirtualClock(Instant::now()));
        let config = MemoryConfig::default().clock(clock).fences(FenceSource::Clock);
        Self { inner: MemoryBackend::with_config(config), ..Self::new() }
    }

    /// Makes every lookup take this long.
    pub(crate) fn with_slow_lookups(self, lookups_take: Duration) -> Self {
        Self { lookups_take, ..self }
    }

    /// Creates a backend that promises notifications and sends none, as beside clients that send
    /// none.
    pub(crate) fn silent() -> Self {
        Self { silence: Some(Notifier::new()), ..Self::new() }
    }

    /// Creates a backend whose holders can watch their locks.
    pub(crate) fn watched() -> Self {
        Self { changes: Some(Notifier::new()), ..Self::new() }
    }

    /// Creates a backend without notifications, so that waiters have to poll.
    pub(crate) fn polling() -> Self {
        Self { has_wake_ups: false, ..Self::new() }
    }

    /// Makes the next call of this kind fail this way; several faults queue up.
    pub(crate) fn fail_next(&self, call: Call, fault: Fault) {
        self.state.lock().expect("no panic inside").faults[call as usize].push_back(fault);
    }

    /// Makes every call of this kind fail this way from now on; `None` stops that.
    pub(crate) fn fail_always(&self, call: Call, fault: Option<Fault>) {
        self.state.lock().expect("no panic inside").always[call as usize] = fault;
    }

    /// Returns when locks were looked up by their ids.
    pub(crate) fn lookups(&self) -> Vec<Instant> {
        self.state.lock().expect("no panic inside").lookups.clone()
    }

    /// Returns when waiters asked for notifications.
    pub(crate) fn subscriptions(&self) -> Vec<Instant> {
        self.state.lock().expect("no panic inside").subscriptions.clone()
    }

    /// Returns how often an operation was called.
    pub(crate) fn count(&self, call: Call) -> usize {
        self.times(call).len()
    }

    /// Returns when an operation was called.
    pub(crate) fn times(&self, call: Call) -> Vec<Instant> {
        let state = self.state.lock().expect("no panic inside");
        state.calls.iter().filter(|(kind, _)| *kind == call).map(|(_, at)| *at).collect()
    }

    /// Returns all calls in order.
    pub(crate) fn calls(&self) -> Vec<Call> {
        let state = self.state.lock().expect("no panic inside");
        state.calls.iter().map(|(kind, _)| *kind).collect()
    }

    /// Returns the lock ids of the acquires so far.
    pub(crate) fn acquire_ids(&self) -> Vec<LockId> {
        self.state.lock().expect("no panic inside").acquire_ids.clone()
    }

    async fn faulty<T>(&self, call: Call, operation: impl Future<Output = Result<T>>) -> Result<T> {
        let fault = {
            let mut state = self.state.lock().expect("no panic inside");
            state.calls.push((call, Instant::now()));
            let next = state.faults[call as usize].pop_front();
            next.or(state.always[call as usize]).unwrap_or(Fault::None)
        };
        let lost = |code| Error::new(code, "made to fail");
        match fault {
            Fault::None => operation.await,
            Fault::Fails(code) => Err(lost(code)),
            Fault::LosesReply(code) => {
                operation.await?;
                Err(lost(code))
            }
            Fault::Hangs => pending().await,
            Fault::HangsAfter => {
                operation.await?;
                pending().await
            }
            Fault::Delayed(by) => {
                tokio::time::sleep(by).await;
                operation.await
            }
            Fault::Blocks(time) => {
                std::thread::sleep(time);
                operation.await
            }
            Fault::Panics => panic!("made to panic"),
        }
    }
}

impl LockBackend for Faulty {
    type Fencing = Fenced;

    fn capabilities(&self) -> Capabilities {
        Capabilities::new::<Fenced>("faulty", TimeAuthority::Server)
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<AcquireOutcome> {
        self.state.lock().expect("no panic inside").acquire_ids.push(request.lock_id());
        self.faulty(Call::Acquire, self.inner.acquire(request)).await
    }

    async fn release(&self, request: &ReleaseRequest) -> Result<ReleaseOutcome> {
        self.faulty(Call::Release, self.inner.release(request)).await
    }

    async fn extend(&self, request: &ExtendRequest) -> Result<ExtendOutcome> {
        self.faulty(Call::Extend, self.inner.extend(request)).await
    }

    async fn is_locked(&self, key: &Key) -> Result<bool> {
        self.inner.is_locked(key).await
    }

    async fn lookup_key(&self, key: &Key) -> Result<Option<StoredLock>> {
        tokio::time::sleep(self.lookups_take).await;
        self.inner.lookup_key(key).await
    }

    async fn lookup_id(&self, lock_id: &LockId) -> Result<Option<StoredLock>> {
        self.state.lock().expect("no panic inside").lookups.push(Instant::now());
        self.inner.lookup_id(lock_id).await
    }

    fn admin(&self) -> Option<Arc<dyn Admin>> {
        self.inner.admin()
    }

    async fn subscribe(&self, key: &Key) -> Option<Subscription> {
        self.state.lock().expect("no panic inside").subscriptions.push(Instant::now());
        if let Some(silence) = &self.silence {
            return Some(silence.subscribe(key));
        }
        if self.has_wake_ups { self.inner.subscribe(key).await } else { None }
    }

    async fn watch(&self, key: &Key) -> Option<Subscription> {
        Some(self.changes.as_ref()?.subscribe(key))
    }
}

/// Returns a locker on virtual time.
pub(crate) fn locker(backend: &Faulty, options: LockOptions) -> Locker<Faulty> {
    let builder = Locker::builder(backend.clone()).clock(LocalClock::Tokio);
    builder.options(options).build().expect("inside a runtime")
}

/// Returns a locker on virtual time whose waiters do not poll: one that asks by chance just before
/// or after a change is served at another time.
pub(crate) fn locker_without_polls(backend: &Faulty, options: LockOptions) -> Locker<Faulty> {
    let never = Duration::from_mins(1);
    let options = options.retry(RetryPolicy::default().delay(never));
    let builder = Locker::builder(backend.clone()).clock(LocalClock::Tokio);
    builder.options(options).poll_interval(never).build().expect("inside a runtime")
}

/// Shuts down a locker. Reports come from threads, which take real time while the clock is virtual.
pub(crate) async fn shut_down(locker: &Locker<Faulty>) {
    for _ in 0..1_000 {
        if locker.shutdown().await.is_ok() {
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    panic!("background work does not end: {locker:?}");
}

pub(crate) fn key(text: &str) -> Key {
    Key::new(text).expect("a valid key")
}

pub(crate) fn ttl_ms(ms: u64) -> Ttl {
    Ttl::new(Duration::from_millis(ms)).expect("a valid TTL")
}

pub(crate) const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// Collects what `on_release_error` receives.
#[derive(Clone, Debug, Default)]
pub(crate) struct Reports(Arc<Mutex<Vec<ErrorCode>>>);

impl Reports {
    /// Returns the codes so far.
    pub(crate) fn codes(&self) -> Vec<ErrorCode> {
        self.0.lock().expect("no panic inside").clone()
    }

    /// Waits for a report, which comes from a thread, and returns its code.
    pub(crate) fn next(&self) -> ErrorCode {
        for _ in 0..10_000 {
            if let [code] = self.codes()[..] {
                return code;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        panic!("no report, or several: {:?}", self.codes());
    }

    /// Returns options that report here.
    pub(crate) fn options(&self) -> LockOptions {
        let reports = self.clone();
        LockOptions::default().on_release_error(move |error, _context| {
            reports.0.lock().expect("no panic inside").push(error.code());
        })
    }
}
