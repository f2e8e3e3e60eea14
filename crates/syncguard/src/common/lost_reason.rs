//! Why a held lock is not held any longer.

use std::error::Error as StdError;
use std::fmt;

/// Why a guard does not hold its lock any longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LostReason {
    /// Its time was over and nothing extended it.
    Expired,
    /// It is about to expire, and no renewal has succeeded:
    /// [`stop_margin`](crate::LockOptions::stop_margin) before the end.
    Expiring,
    /// The store says that someone else holds it, or no one.
    NotHeld,
    /// The store could not be asked to extend it before its time was over.
    Unreachable,
    /// The guard was released, dropped or detached. Not a loss: the lock was given back on purpose.
    Released,
}

impl LostReason {
    /// A word for logs and labels.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Expired => "expired",
            Self::Expiring => "expiring",
            Self::NotHeld => "not-held",
            Self::Unreachable => "unreachable",
            Self::Released => "released",
        }
    }
}

impl fmt::Display for LostReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Expired => "the lock expired",
            Self::Expiring => "the lock is about to expire and could not be renewed",
            Self::NotHeld => "the store says that the lock is not held",
            Self::Unreachable => "the store could not be reached before the lock expired",
            Self::Released => "the guard gave the lock back",
        })
    }
}

impl StdError for LostReason {}
