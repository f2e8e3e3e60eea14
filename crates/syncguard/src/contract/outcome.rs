//! What a backend answers. Everything a correct program must expect is a variant here.

use std::time::Duration;

use super::request::Receipt;
use crate::common::fence::{Fence, Fenced, Fencing};
use crate::common::time::Timestamp;

/// The answer to an acquire.
#[derive(Clone, Debug)]
#[must_use]
pub enum Acquire<F: Fencing = Fenced> {
    /// The lock is ours.
    Acquired(Lease<F>),
    /// Somebody else holds it.
    Contended {
        /// How long until the holder's lock is dead unless it is extended, as the time authority
        /// sees it. A waiter uses it to take over from a crashed holder at once.
        free_in: Option<Duration>,
    },
    /// This very request was granted before and that lease is over, or the request was undone.
    /// Nothing was taken; a new attempt needs a new request.
    Spent,
}

/// A granted lock.
#[derive(Clone, Debug)]
pub struct Lease<F: Fencing = Fenced> {
    token: F::Token,
    expires_at: Timestamp,
    receipt: Option<Receipt>,
}

impl<F: Fencing> Lease<F> {
    /// A lease, as a backend grants it.
    pub fn new(token: F::Token, expires_at: Timestamp) -> Self {
        Self { token, expires_at, receipt: None }
    }

    /// Adds what the backend wants to be reminded of at release and extend.
    #[must_use]
    pub fn with_receipt(mut self, receipt: Receipt) -> Self {
        self.receipt = Some(receipt);
        self
    }

    /// The fence, for code that is generic over the backend.
    #[must_use]
    pub fn try_fence(&self) -> Option<Fence> {
        F::fence(self.token)
    }

    /// When the lock expires, by the backend's time authority.
    #[must_use]
    pub fn expires_at(&self) -> Timestamp {
        self.expires_at
    }

    /// What the backend wants to be reminded of.
    #[must_use]
    pub fn receipt(&self) -> Option<&Receipt> {
        self.receipt.as_ref()
    }

    pub(crate) fn token(&self) -> F::Token {
        self.token
    }
}

impl Lease<Fenced> {
    /// The fence of this acquisition.
    ///
    /// It exists on fencing backends only; elsewhere this does not compile:
    ///
    /// ```compile_fail,E0599
    /// fn fence(lease: syncguard::Lease<syncguard::Unfenced>) -> syncguard::Fence {
    ///     lease.fence()
    /// }
    /// ```
    #[must_use]
    pub fn fence(&self) -> Fence {
        self.token
    }
}

/// Why a lock was not held, where the backend knows it without asking again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Absence {
    /// It had expired.
    Expired,
    /// There is no such lock.
    NotFound,
    /// The backend cannot tell.
    Unknown,
}

/// The answer to a release. It may be ignored: either way the lock is not ours any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Release {
    /// The lock was ours and is free now.
    Released,
    /// The lock was not ours any more.
    NotHeld(Absence),
}

/// The answer to an extend.
#[derive(Clone, Debug)]
#[must_use]
pub enum Extend {
    /// The lock is ours until the new expiry.
    Extended(Extension),
    /// The lock was not ours any more.
    NotHeld(Absence),
}

/// An extended lock.
#[derive(Clone, Debug)]
pub struct Extension {
    expires_at: Timestamp,
    receipt: Option<Receipt>,
}

impl Extension {
    /// An extension, as a backend grants it.
    #[must_use]
    pub fn new(expires_at: Timestamp) -> Self {
        Self { expires_at, receipt: None }
    }

    /// Replaces what the backend wants to be reminded of.
    #[must_use]
    pub fn with_receipt(mut self, receipt: Receipt) -> Self {
        self.receipt = Some(receipt);
        self
    }

    /// When the lock expires now, by the backend's time authority.
    #[must_use]
    pub fn expires_at(&self) -> Timestamp {
        self.expires_at
    }

    /// What the backend wants to be reminded of from now on.
    #[must_use]
    pub fn receipt(&self) -> Option<&Receipt> {
        self.receipt.as_ref()
    }
}
