//! The outcomes of a backend's operations. Everything a correct program must expect is a variant.

use std::time::Duration;

use super::request::Receipt;
use crate::common::fence::{Fence, Fenced, Fencing};
use crate::common::key::Key;
use crate::common::time::Timestamp;

/// The outcome of an acquire.
#[derive(Clone, Debug)]
#[must_use]
pub enum AcquireOutcome<F: Fencing = Fenced> {
    /// The request holds the lock.
    Acquired(Lease<F>),
    /// Another request holds the lock.
    Contended {
        /// How long until the holder's lock is dead unless it is extended, by the time authority. A
        /// waiter uses it to take over from a crashed holder at once.
        expires_in: Option<Duration>,
    },
    /// This request was granted before and that lease is over, or the request was undone. The lock
    /// is not acquired; a new attempt needs a new request.
    AlreadyUsed,
}

/// The outcome of an acquire of one of several locks.
#[derive(Clone, Debug)]
#[must_use]
pub enum AcquireAnyOutcome<F: Fencing = Fenced> {
    /// The request holds the lock of this key.
    Acquired {
        /// The key of the lock.
        key: Key,
        /// The lease of the lock.
        lease: Lease<F>,
    },
    /// Other requests hold all of the locks.
    Contended {
        /// How long until the first of them is dead unless it is extended, if that is known.
        expires_in: Option<Duration>,
    },
}

/// A granted lock.
#[derive(Clone, Debug)]
pub struct Lease<F: Fencing = Fenced> {
    token: F::Token,
    expires_at: Timestamp,
    receipt: Option<Receipt>,
}

impl<F: Fencing> Lease<F> {
    /// Creates a lease. A backend calls it when it grants a lock.
    pub fn new(token: F::Token, expires_at: Timestamp) -> Self {
        Self { token, expires_at, receipt: None }
    }

    /// Adds a receipt that the backend gets back with release and extend.
    #[must_use]
    pub fn with_receipt(mut self, receipt: Receipt) -> Self {
        self.receipt = Some(receipt);
        self
    }

    /// Returns the fence, for code that is generic over the backend.
    #[must_use]
    pub fn try_fence(&self) -> Option<Fence> {
        F::fence(self.token)
    }

    /// Returns when the lock expires, by the backend's time authority.
    #[must_use]
    pub fn expires_at(&self) -> Timestamp {
        self.expires_at
    }

    /// Returns the backend's receipt.
    #[must_use]
    pub fn receipt(&self) -> Option<&Receipt> {
        self.receipt.as_ref()
    }

    pub(crate) fn token(&self) -> F::Token {
        self.token
    }
}

impl Lease<Fenced> {
    /// Returns the fence of this acquisition.
    ///
    /// It exists only on backends that fence; on others this does not compile:
    ///
    /// ```compile_fail,E0599
    /// use syncguard::Fence;
    /// use syncguard::backend::{Lease, Unfenced};
    ///
    /// fn fence(lease: Lease<Unfenced>) -> Fence {
    ///     lease.fence()
    /// }
    /// ```
    #[must_use]
    pub fn fence(&self) -> Fence {
        self.token
    }
}

/// Why a lock was not held, if the backend knows it without another request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NotHeldReason {
    /// The lock had expired.
    Expired,
    /// There is no such lock.
    NotFound,
    /// The backend does not know.
    Unknown,
}

/// The outcome of a release. You may ignore it: in both cases the lock is no longer yours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReleaseOutcome {
    /// The lock was held and is now free.
    Released,
    /// The lock was no longer held under this id.
    NotHeld(NotHeldReason),
}

/// The outcome of an extend.
#[derive(Clone, Debug)]
#[must_use]
pub enum ExtendOutcome {
    /// The lock is held until the new expiry.
    Extended(Extension),
    /// The lock was no longer held under this id.
    NotHeld(NotHeldReason),
}

/// An extended lock.
#[derive(Clone, Debug)]
pub struct Extension {
    expires_at: Timestamp,
    receipt: Option<Receipt>,
}

impl Extension {
    /// Creates an extension. A backend calls it when it extends a lock.
    #[must_use]
    pub fn new(expires_at: Timestamp) -> Self {
        Self { expires_at, receipt: None }
    }

    /// Adds a receipt that replaces the backend's previous one.
    #[must_use]
    pub fn with_receipt(mut self, receipt: Receipt) -> Self {
        self.receipt = Some(receipt);
        self
    }

    /// Returns the new expiry of the lock, by the backend's time authority.
    #[must_use]
    pub fn expires_at(&self) -> Timestamp {
        self.expires_at
    }

    /// Returns the backend's new receipt.
    #[must_use]
    pub fn receipt(&self) -> Option<&Receipt> {
        self.receipt.as_ref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_backend_attaches_comes_back() {
        let at = Timestamp::from_millis(7);
        let lease: Lease = Lease::new(Fence::FIRST, at).with_receipt(Receipt::new(1_u8));
        assert_eq!(lease.try_fence(), Some(Fence::FIRST));
        assert_eq!(lease.receipt().and_then(Receipt::get::<u8>), Some(&1));
        let extension = Extension::new(at).with_receipt(Receipt::new(2_u8));
        assert_eq!(extension.receipt().and_then(Receipt::get::<u8>), Some(&2));
        assert_eq!(extension.receipt().and_then(Receipt::get::<u16>), None);
    }
}
