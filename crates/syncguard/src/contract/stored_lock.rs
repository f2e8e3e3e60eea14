//! A lock as the store holds it. Only the diagnostic functions can read it.

use std::fmt;

use crate::common::fence::{Fence, Fenced, Fencing};
use crate::common::hash_id::HashId;
use crate::common::holder::HolderInfo;
use crate::common::key::Key;
use crate::common::lock_id::LockId;
use crate::common::time::Timestamp;

/// A live lock found in the store.
///
/// It is opaque because it contains a key and a lock id. Read it with
/// [`diagnostics`](crate::diagnostics), which sanitizes both unless you ask for the raw values.
#[derive(Clone)]
pub struct StoredLock<F: Fencing = Fenced> {
    pub(crate) key: Key,
    pub(crate) lock_id: LockId,
    pub(crate) token: F::Token,
    pub(crate) acquired_at: Timestamp,
    pub(crate) expires_at: Timestamp,
    pub(crate) holder: Option<HolderInfo>,
}

impl<F: Fencing> StoredLock<F> {
    /// Creates a lock of `key` that `lock_id` holds with this fence (`()` on a backend without
    /// fences). Set the times that the record has with the methods below.
    pub fn new(key: Key, lock_id: LockId, token: F::Token) -> Self {
        let never = Timestamp::from_millis(0);
        Self { key, lock_id, token, acquired_at: never, expires_at: never, holder: None }
    }

    /// Sets when the lock was acquired, by the time authority.
    #[must_use]
    pub fn acquired_at(mut self, at: Timestamp) -> Self {
        self.acquired_at = at;
        self
    }

    /// Sets when the lock expires, by the time authority.
    #[must_use]
    pub fn expires_at(mut self, at: Timestamp) -> Self {
        self.expires_at = at;
        self
    }

    /// Sets who holds the lock, if the record says so.
    #[must_use]
    pub fn held_by(mut self, holder: Option<HolderInfo>) -> Self {
        self.holder = holder;
        self
    }
}

impl<F: Fencing> fmt::Debug for StoredLock<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoredLock").field("key", &self.key).finish_non_exhaustive()
    }
}

/// A live lock, sanitized: it holds hashes, which you can log.
///
/// Compare its times with each other, not with your clock. With the feature `serde`, it serializes
/// as `keyHash`, `lockIdHash`, `acquiredAtMs`, `expiresAtMs`, `fence` (a string of 15 digits),
/// `holder` and `waiters`.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(rename_all = "camelCase"))]
#[non_exhaustive]
pub struct LockInfo {
    /// The hash of the key.
    pub key_hash: HashId,
    /// The hash of the lock id.
    pub lock_id_hash: HashId,
    /// When the lock was acquired, by the backend's time authority. Extensions do not change it.
    #[cfg_attr(feature = "serde", serde(rename = "acquiredAtMs"))]
    pub acquired_at: Timestamp,
    /// When the lock expires, by the backend's time authority.
    #[cfg_attr(feature = "serde", serde(rename = "expiresAtMs"))]
    pub expires_at: Timestamp,
    /// The fence of the lock, on a backend that fences.
    pub fence: Option<Fence>,
    /// Who holds the lock, if the record says so. For display only: any program that can write to
    /// the store can write it.
    pub holder: Option<HolderInfo>,
    /// How many processes wait for the lock, where the store knows it: only from
    /// [`get_by_key`](crate::diagnostics::get_by_key).
    pub waiters: Option<u32>,
}

/// A live lock with its raw key and lock id. It is sensitive: use it for debugging only.
///
/// `Debug` shows neither of them; [`Key::as_str`] and [`LockId::expose`] do.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LockInfoRaw {
    /// The sanitized part.
    pub info: LockInfo,
    /// The key.
    pub key: Key,
    /// The lock id. Anyone who has it can release the lock.
    pub lock_id: LockId,
}

impl<F: Fencing> From<StoredLock<F>> for LockInfo {
    fn from(stored: StoredLock<F>) -> Self {
        Self {
            key_hash: stored.key.hash_id(),
            lock_id_hash: stored.lock_id.hash_id(),
            acquired_at: stored.acquired_at,
            expires_at: stored.expires_at,
            fence: F::fence(stored.token),
            holder: stored.holder,
            waiters: None,
        }
    }
}

impl<F: Fencing> From<StoredLock<F>> for LockInfoRaw {
    fn from(stored: StoredLock<F>) -> Self {
        let (key, lock_id) = (stored.key.clone(), stored.lock_id);
        Self { info: stored.into(), key, lock_id }
    }
}
