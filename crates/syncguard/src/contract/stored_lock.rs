//! A lock as the store holds it, closed to everybody but the diagnostic helpers.

use std::fmt;

use crate::common::fence::{Fenced, Fencing};
use crate::common::key::Key;
use crate::common::lock_id::LockId;
use crate::common::time::Timestamp;

/// A live lock found in the store. Opaque: it holds a key and a lock id, and only
/// [`diagnostics`](crate::diagnostics) can open it, sanitized unless asked otherwise.
#[derive(Clone)]
pub struct StoredLock<F: Fencing = Fenced> {
    pub(crate) key: Key,
    pub(crate) lock_id: LockId,
    pub(crate) token: F::Token,
    pub(crate) acquired_at: Timestamp,
    pub(crate) expires_at: Timestamp,
}

impl<F: Fencing> StoredLock<F> {
    /// A lock, as a backend read it.
    pub fn new(
        key: Key,
        lock_id: LockId,
        token: F::Token,
        acquired_at: Timestamp,
        expires_at: Timestamp,
    ) -> Self {
        Self { key, lock_id, token, acquired_at, expires_at }
    }
}

impl<F: Fencing> fmt::Debug for StoredLock<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoredLock").field("key", &self.key).finish_non_exhaustive()
    }
}
