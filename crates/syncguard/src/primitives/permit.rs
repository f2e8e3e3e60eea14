//! A permit of a semaphore.

use std::fmt;
use std::future::Future;

use crate::common::error::Result;
use crate::common::fence::{Fence, Fenced};
use crate::common::lost_reason::LostReason;
use crate::contract::LockBackend;
use crate::contract::outcome::ReleaseOutcome;
use crate::lock::guard::{LockGuard, LockHandle};

/// A permit of a [`Semaphore`](super::Semaphore): the lock of one of its slots. Dropping it gives
/// the permit back in the background.
///
/// Like every lock it is a lease: if it is not renewed, it expires after its TTL and another
/// process gets the slot.
#[must_use = "dropping the permit gives it back at once; keep it in a named variable"]
pub struct Permit<B: LockBackend> {
    guard: LockGuard<B>,
    slot: u32,
}

impl<B: LockBackend> Permit<B> {
    pub(super) fn new(guard: LockGuard<B>, slot: u32) -> Self {
        Self { guard, slot }
    }

    /// Returns the number of the slot, from 0. No other valid permit has the same one, so it can
    /// select a license or a device.
    #[must_use]
    pub fn slot(&self) -> u32 {
        self.slot
    }

    /// Returns the fence of the slot, for code that is generic over the backend. `None` on backends
    /// without fencing.
    #[must_use]
    pub fn try_fence(&self) -> Option<Fence> {
        self.guard.try_fence()
    }

    /// Returns whether the permit is certain to be held now.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        self.guard.is_valid()
    }

    /// Waits until the permit is no longer held and returns why.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future changes nothing.
    pub async fn lost(&self) -> LostReason {
        self.guard.lost().await
    }

    /// Runs work while the permit is held: when it is lost, the work is dropped. See
    /// [`LockGuard::run`].
    ///
    /// # Cancel safety
    ///
    /// Dropping the future drops the work; the permit stays held.
    pub async fn run<T>(&self, work: impl Future<Output = T>) -> Result<T, LostReason> {
        self.guard.run(work).await
    }

    /// Gives the permit back and waits for the answer.
    ///
    /// # Cancel safety
    ///
    /// If dropped before it completes, the release continues in the background.
    pub async fn release(&self) -> Result<ReleaseOutcome> {
        self.guard.release().await
    }

    /// Returns a handle to the lock of the slot, for the work that runs under it.
    #[must_use]
    pub fn handle(&self) -> LockHandle<B> {
        self.guard.handle()
    }

    /// Returns the guard of the lock of the slot.
    pub fn guard(&self) -> &LockGuard<B> {
        &self.guard
    }
}

impl<B: LockBackend<Fencing = Fenced>> Permit<B> {
    /// Returns the fence of the slot. It grows with every holder of the *same* slot.
    #[must_use]
    pub fn fence(&self) -> Fence {
        self.guard.fence()
    }
}

impl<B: LockBackend> fmt::Debug for Permit<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Permit").field("slot", &self.slot).field("guard", &self.guard).finish()
    }
}
