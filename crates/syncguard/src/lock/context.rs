//! What a locker, its waits and its guards share.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::task;
use tokio_util::sync::CancellationToken;

use super::background::Background;
use super::clock::Ticker;
use super::lanes::Lanes;
use super::options::LockOptions;
use crate::common::error::{Error, Result};
use crate::contract::callback_queue::SinkHandle;
use crate::contract::event::EngineEvent;

/// A locker's options, and the engine behind it. A cache line to itself, because its references are
/// counted in front of it.
#[derive(Debug)]
#[repr(align(64))]
pub(super) struct Context<B> {
    pub(super) engine: Arc<Engine<B>>,
    pub(super) options: Arc<LockOptions>,
}

/// The same context several times over. Every lock counts a reference to its context; threads that
/// count in different places do not slow each other down.
#[derive(Debug)]
pub(super) struct Contexts<B>(Arc<[Arc<Context<B>>]>);

impl<B> Contexts<B> {
    const COUNT: usize = 8;

    pub(super) fn new(engine: &Arc<Engine<B>>, options: LockOptions) -> Self {
        let options = Arc::new(options);
        let context = || Context { engine: Arc::clone(engine), options: Arc::clone(&options) };
        Self((0..Self::COUNT).map(|_| Arc::new(context())).collect())
    }

    /// The one for the current thread.
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

/// What lockers of all options on one backend share.
#[derive(Debug)]
pub(super) struct Engine<B> {
    pub(super) backend: B,
    pub(super) ticker: Ticker,
    pub(super) lanes: Lanes,
    pub(super) background: Background,
    pub(super) poll_interval: Duration,
    pub(super) observer: Option<SinkHandle>,
    /// Ends all waits.
    pub(super) shut_down: CancellationToken,
}

impl<B> Engine<B> {
    /// Tells the observer, if there is one; nothing is computed otherwise.
    pub(super) fn observe(&self, event: impl FnOnce() -> EngineEvent) {
        if let Some(observer) = &self.observer {
            observer.engine(event());
        }
    }

    /// Refuses to begin where there may be no runtime at all: a backend's first poll could panic.
    ///
    /// Inside a task there is one. Whether it is the right one can wait until a call has to wait:
    /// asking tokio counts a reference that all threads share, and they would meet there.
    pub(super) fn check_for_a_runtime(&self) -> Result<()> {
        if task::try_id().is_some() { Ok(()) } else { self.check_runtime() }
    }

    /// A backend's connections live in one runtime; in another one a call could hang.
    pub(super) fn check_runtime(&self) -> Result<()> {
        let home = self.background.runtime().id();
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
