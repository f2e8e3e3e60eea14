//! Why a lock is no longer held.

use std::error::Error as StdError;
use std::fmt;

/// Why a guard no longer holds its lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LostReason {
    /// The lock expired and nothing extended it.
    Expired,
    /// The lock is about to expire and no renewal has succeeded. This is reported
    /// [`stop_margin`](crate::LockOptions::stop_margin) before the expiry.
    Expiring,
    /// The store reports that another process or no process holds the lock.
    NotHeld,
    /// The store could not be reached to extend the lock before it expired.
    Unreachable,
    /// The guard was released, dropped or detached. This is not a loss: it was on purpose.
    Released,
}

impl LostReason {
    /// Returns a word for logs and labels.
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
            Self::NotHeld => "the store reports that the lock is not held",
            Self::Unreachable => "the store could not be reached before the lock expired",
            Self::Released => "the guard released the lock",
        })
    }
}

impl StdError for LostReason {}

#[cfg(feature = "serde")]
impl serde::Serialize for LostReason {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}
