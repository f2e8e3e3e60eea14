//! State that a locker, its waits and its guards share.

use std::any::Any;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::task;
use tokio_util::sync::CancellationToken;

use super::background::Background;
use super::clock::Ticker;
use super::options::LockOptions;
use super::wait_queue::WaitQueues;
use crate::common::error::{Error, Result};
use crate::common::fence::Fence;
use crate::common::fence_source::FenceSource;
use crate::common::holder::HolderInfo;
use crate::common::key::Key;
use crate::common::sharded::Sharded;
use crate::contract::LockBackend;
use crate::contract::admin::Admin;
use crate::contract::event::{EngineEvent, EngineEventKind};
use crate::contract::recorder::Recorder;

/// A locker's options and its engine. Aligned to two cache lines, which processors fetch in pairs,
/// so that threads that count references to different contexts do not slow each other down.
#[derive(Debug)]
#[repr(align(128))]
pub(super) struct Context<B> {
    pub(super) engine: Arc<Engine<B>>,
    pub(super) options: Arc<LockOptions>,
    /// Who holds the locks of this locker, unless that is not to be stored.
    pub(super) holder: Option<HolderInfo>,
}

impl<B: LockBackend> Context<B> {
    /// Reports an event about the lock of a key.
    pub(super) fn report(
        &self,
        key: &Key,
        fence: Option<Fence>,
        kind: impl FnOnce() -> EngineEventKind,
    ) {
        self.engine.recorder.engine(key, || EngineEvent {
            backend: self.engine.backend.capabilities().backend,
            key_hash: key.hash_id(),
            label: self.options.label.clone(),
            fence,
            key: None,
            kind: kind(),
        });
    }
}

/// Several copies of one context. Every lock counts a reference to its context; threads that use
/// different copies do not contend for one counter.
#[derive(Debug)]
pub(super) struct Contexts<B>(Arc<[Arc<Context<B>>]>);

impl<B> Contexts<B> {
    const COUNT: usize = 8;

    pub(super) fn new(engine: &Arc<Engine<B>>, options: LockOptions) -> Self {
        let options = Arc::new(options);
        let context = || Context {
            engine: Arc::clone(engine),
            options: Arc::clone(&options),
            holder: engine.holder.as_ref().map(HolderInfo::unshared),
        };
        Self((0..Self::COUNT).map(|_| Arc::new(context())).collect())
    }

    /// Returns the copy for the current thread.
    pub(super) fn here(&self) -> &Arc<Context<B>> {
        static THREADS: AtomicUsize = AtomicUsize::new(0);
        thread_local! {
            static THREAD: usize = THREADS.fetch_add(1, Ordering::Relaxed);
        }
        &self.0[THREAD.with(|thread| thread % Self::COUNT)]
    }
}

impl<B> Clone for Contexts<B> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

/// State that a locker shares with the lockers made from it, whatever their options.
#[derive(Debug)]
pub(super) struct Engine<B> {
    pub(super) backend: B,
    pub(super) ticker: Ticker,
    pub(super) wait_queues: WaitQueues,
    /// What primitives keep for as long as one of them exists, by name.
    pub(super) shared_states: Sharded<Key, Weak<dyn Any + Send + Sync>>,
    pub(super) background: Background,
    pub(super) poll_interval: Duration,
    pub(super) recorder: Recorder,
    pub(super) holder: Option<HolderInfo>,
    /// Whether fences have no gaps, so that one reveals another holder.
    pub(super) fences_count_grants: bool,
    /// Ends all waits.
    pub(super) shut_down: CancellationToken,
    /// The same, without the mutex that asking a token takes: every lock asks.
    is_shut_down: AtomicBool,
}

impl<B: LockBackend> Engine<B> {
    pub(super) fn new(
        backend: B,
        ticker: Ticker,
        background: Background,
        poll_interval: Duration,
        recorder: Recorder,
        holder: Option<HolderInfo>,
    ) -> Self {
        let counts = |admin: Arc<dyn Admin>| admin.fence_source() == FenceSource::Counter;
        Self {
            fences_count_grants: backend.admin().is_none_or(counts),
            backend,
            ticker,
            wait_queues: WaitQueues::new(),
            shared_states: Sharded::new(),
            background,
            poll_interval,
            recorder,
            holder,
            shut_down: CancellationToken::new(),
            is_shut_down: AtomicBool::new(false),
        }
    }
}

impl<B> Engine<B> {
    /// Takes no new locks, and ends all waits.
    pub(super) fn shut_down(&self) {
        self.is_shut_down.store(true, Ordering::SeqCst);
        self.shut_down.cancel();
    }

    pub(super) fn is_shut_down(&self) -> bool {
        self.is_shut_down.load(Ordering::SeqCst)
    }

    /// Fails if there may be no runtime at all, where a backend's first poll could panic.
    ///
    /// Inside a task there is one. Whether it is the right one is checked only when a call has to
    /// wait, because that check counts a reference that all threads share and would contend for.
    pub(super) fn check_for_a_runtime(&self) -> Result<()> {
        if task::try_id().is_some() { Ok(()) } else { self.check_runtime() }
    }

    /// Fails outside the locker's runtime: the backend's connections live there, and a call from
    /// another runtime could hang.
    pub(super) fn check_runtime(&self) -> Result<()> {
        let home = self.background.runtime().id();
        match Handle::try_current() {
            Ok(here) if here.id() == home => Ok(()),
            Ok(_) => Err(Error::invalid(
                "the locker belongs to another runtime; build one locker per runtime",
            )),
            Err(_) => Err(Error::invalid(
                "no tokio runtime here; use the locker inside the runtime it was built in",
            )),
        }
    }
}
