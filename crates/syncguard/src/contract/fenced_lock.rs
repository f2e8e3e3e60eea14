//! A key and its fence, with which a resource checks that a holder is the latest one.

use crate::common::fence::Fence;
use crate::common::key::Key;

/// A key and the fence under which it is, or was, held: a [`LockGuard`](crate::LockGuard), a
/// [`LockHandle`](crate::LockHandle), or a tuple of key and fence.
pub trait FencedLock {
    /// Returns the key.
    fn key(&self) -> &Key;

    /// Returns the fence.
    fn fence(&self) -> Fence;
}

impl<T: FencedLock + ?Sized> FencedLock for &T {
    fn key(&self) -> &Key {
        T::key(self)
    }

    fn fence(&self) -> Fence {
        T::fence(self)
    }
}

impl FencedLock for (&Key, Fence) {
    fn key(&self) -> &Key {
        self.0
    }

    fn fence(&self) -> Fence {
        self.1
    }
}

impl FencedLock for (Key, Fence) {
    fn key(&self) -> &Key {
        &self.0
    }

    fn fence(&self) -> Fence {
        self.1
    }
}
