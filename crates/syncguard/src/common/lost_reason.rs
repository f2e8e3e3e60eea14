//! Why a lock is no longer held.

use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;

use super::holder::{BreakNote, HolderInfo};

/// Why a guard no longer holds its lock.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LostReason {
    /// The lock expired and nothing extended it.
    Expired,
    /// The lock is about to expire and no renewal has succeeded. This is reported
    /// [`stop_margin`](crate::LockOptions::stop_margin) before the expiry.
    Expiring,
    /// The store reports that another process or no process holds the lock.
    NotHeld,
    /// Another process broke the lock. It is [`NotHeld`](Self::NotHeld) where the store cannot pass
    /// that on.
    Broken {
        /// Who broke it.
        by: Option<HolderInfo>,
        /// The reason that was given.
        reason: Option<Arc<str>>,
    },
    /// The store could not be reached to extend the lock before it expired.
    Unreachable,
    /// The guard was released, dropped or detached. This is not a loss: it was on purpose.
    Released,
}

impl LostReason {
    /// Returns a word for logs and labels.
    #[must_use]
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::Expired => "expired",
            Self::Expiring => "expiring",
            Self::NotHeld => "not-held",
            Self::Broken { .. } => "broken",
            Self::Unreachable => "unreachable",
            Self::Released => "released",
        }
    }
}

impl fmt::Display for LostReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Broken { .. } => "the lock was broken",
            Self::Expired => "the lock expired",
            Self::Expiring => "the lock is about to expire and could not be renewed",
            Self::NotHeld => "the store reports that the lock is not held",
            Self::Unreachable => "the store could not be reached before the lock expired",
            Self::Released => "the guard released the lock",
        })?;
        if let Self::Broken { by: Some(by), .. } = self {
            write!(f, " by {by}")?;
        }
        match self {
            Self::Broken { reason: Some(reason), .. } => write!(f, ": {reason}"),
            _ => Ok(()),
        }
    }
}

impl From<BreakNote> for LostReason {
    fn from(note: BreakNote) -> Self {
        Self::Broken { by: note.by, reason: note.reason }
    }
}

impl StdError for LostReason {}

#[cfg(feature = "serde")]
impl serde::Serialize for LostReason {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_broken_lock_is_reported_with_who_broke_it_and_why() {
        let by = HolderInfo::parse("web-3/7/syncguard").expect("valid");
        for (by, reason, text) in [
            (None, None, "the lock was broken"),
            (None, Some("stuck"), "the lock was broken: stuck"),
            (Some(by.clone()), None, "the lock was broken by web-3, pid 7, syncguard"),
            (Some(by), Some("stuck"), "the lock was broken by web-3, pid 7, syncguard: stuck"),
        ] {
            let reason = reason.map(Arc::from);
            assert_eq!(LostReason::Broken { by, reason }.to_string(), text);
        }
        assert_eq!(LostReason::Expired.to_string(), "the lock expired");
    }
}
