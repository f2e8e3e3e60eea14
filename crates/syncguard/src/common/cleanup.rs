//! Decides when `is_locked` may delete a dead record.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use super::time::{CLEANUP_GUARD_MS, Timestamp};

/// Decides whether a dead record may be deleted now: only if cleanup is enabled, only well after
/// the record's expiry, and not too often.
#[derive(Debug, Default)]
pub(crate) struct CleanupGate {
    enabled: bool,
    last: Mutex<Option<Instant>>,
}

impl CleanupGate {
    /// The shortest time between two cleanups.
    const INTERVAL: Duration = Duration::from_millis(100);

    pub(crate) fn new(enabled: bool) -> Self {
        Self { enabled, last: Mutex::new(None) }
    }

    /// Returns whether to delete a record that expired at `expires_at`. If so, it starts the
    /// interval until the next cleanup.
    pub(crate) fn admits(&self, expires_at: Timestamp, now: Timestamp) -> bool {
        if !self.enabled || now.since(expires_at) <= Duration::from_millis(CLEANUP_GUARD_MS) {
            return false;
        }
        let Ok(mut last) = self.last.try_lock() else {
            return false;
        };
        if last.is_some_and(|last| last.elapsed() < Self::INTERVAL) {
            return false;
        }
        *last = Some(Instant::now());
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn admits_only_old_records_only_when_enabled_and_not_twice_in_a_row() {
        let now = Timestamp::from_millis(100_000);
        let guard_edge = Timestamp::from_millis(100_000 - CLEANUP_GUARD_MS);
        let old = Timestamp::from_millis(100_000 - CLEANUP_GUARD_MS - 1);
        assert!(!CleanupGate::new(false).admits(old, now));
        let gate = CleanupGate::new(true);
        assert!(!gate.admits(guard_edge, now));
        assert!(gate.admits(old, now));
        assert!(!gate.admits(old, now));
    }
}
