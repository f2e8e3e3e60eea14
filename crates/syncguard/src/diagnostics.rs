//! Who holds what: lookups for display, monitoring and debugging.
//!
//! **They guard nothing.** Between the answer and whatever you do next the lock may have changed
//! hands. `release` and `extend` check ownership themselves, atomically; never look up first.
//!
//! Answers are sanitized: keys and lock ids are hashes. The `_raw` forms show them, and whoever
//! reads a raw lock id can release that lock.
//!
//! ```
//! use syncguard::{Key, Locker, MemoryBackend, diagnostics};
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> syncguard::Result<()> {
//! let locker = Locker::new(MemoryBackend::new())?;
//! let guard = locker.lock("job").await?;
//! let info = diagnostics::get_by_key(locker.backend(), &Key::new("job")?).await?.expect("held");
//! assert_eq!(info.key_hash, guard.key().hash());
//! assert_eq!(info.fence, Some(guard.fence()));
//! assert!(diagnostics::owns(locker.backend(), &guard.lock_id()).await?);
//! # drop(guard); locker.shutdown().await
//! # }
//! ```

use crate::common::error::Result;
use crate::common::fence::{Fence, Fencing};
use crate::common::hash_id::HashId;
use crate::common::key::Key;
use crate::common::lock_id::LockId;
use crate::common::time::Timestamp;
use crate::contract::LockBackend;
use crate::contract::outcome::Release;
use crate::contract::request::{Hint, ReleaseRequest};
use crate::contract::stored_lock::StoredLock;

/// A live lock, sanitized.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(rename_all = "camelCase"))]
#[non_exhaustive]
pub struct LockInfo {
    /// The hash of the key.
    pub key_hash: HashId,
    /// The hash of the lock id.
    pub lock_id_hash: HashId,
    /// When it was acquired, by the backend's time authority.
    #[cfg_attr(feature = "serde", serde(rename = "acquiredAtMs"))]
    pub acquired_at: Timestamp,
    /// When it expires, by the backend's time authority.
    #[cfg_attr(feature = "serde", serde(rename = "expiresAtMs"))]
    pub expires_at: Timestamp,
    /// Its fence, on a backend that fences.
    pub fence: Option<Fence>,
}

/// A live lock with its raw key and lock id. Sensitive: for debugging only.
///
/// `Debug` still shows neither.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LockInfoRaw {
    /// The sanitized part.
    pub info: LockInfo,
    /// The key.
    pub key: Key,
    /// The lock id. Whoever has it can release the lock.
    pub lock_id: LockId,
}

impl<F: Fencing> From<StoredLock<F>> for LockInfo {
    fn from(stored: StoredLock<F>) -> Self {
        Self {
            key_hash: stored.key.hash(),
            lock_id_hash: stored.lock_id.hash(),
            acquired_at: stored.acquired_at,
            expires_at: stored.expires_at,
            fence: F::fence(stored.token),
        }
    }
}

impl<F: Fencing> From<StoredLock<F>> for LockInfoRaw {
    fn from(stored: StoredLock<F>) -> Self {
        let (key, lock_id) = (stored.key.clone(), stored.lock_id);
        Self { info: stored.into(), key, lock_id }
    }
}

/// The live lock of a key, sanitized.
///
/// # Cancel safety
///
/// Nothing is changed, dropped or not.
pub async fn get_by_key(backend: &impl LockBackend, key: &Key) -> Result<Option<LockInfo>> {
    Ok(backend.lookup_key(key).await?.map(Into::into))
}

/// The live lock that an id holds, sanitized.
///
/// # Cancel safety
///
/// Nothing is changed, dropped or not.
pub async fn get_by_id(backend: &impl LockBackend, lock_id: &LockId) -> Result<Option<LockInfo>> {
    Ok(backend.lookup_id(lock_id).await?.map(Into::into))
}

/// The live lock of a key with its raw key and lock id.
///
/// # Cancel safety
///
/// Nothing is changed, dropped or not.
pub async fn get_by_key_raw(backend: &impl LockBackend, key: &Key) -> Result<Option<LockInfoRaw>> {
    Ok(backend.lookup_key(key).await?.map(Into::into))
}

/// The live lock that an id holds with its raw key and lock id.
///
/// # Cancel safety
///
/// Nothing is changed, dropped or not.
pub async fn get_by_id_raw(
    backend: &impl LockBackend,
    lock_id: &LockId,
) -> Result<Option<LockInfoRaw>> {
    Ok(backend.lookup_id(lock_id).await?.map(Into::into))
}

/// Whether an id holds a live lock. For display: never ask this before a release or extend.
///
/// # Cancel safety
///
/// Nothing is changed, dropped or not.
pub async fn owns(backend: &impl LockBackend, lock_id: &LockId) -> Result<bool> {
    Ok(backend.lookup_id(lock_id).await?.is_some())
}

/// Breaks a lock: takes it from its holder, if it is still the one that was shown. Answers whether
/// it was.
///
/// The holder is not asked. Its guard learns of it at its next renewal; until then it works on
/// without a lock, which is what the fence is for.
///
/// ```
/// use syncguard::{Key, Locker, MemoryBackend, diagnostics};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> syncguard::Result<()> {
/// let locker = Locker::new(MemoryBackend::new())?;
/// let guard = locker.lock("stuck").await?;
/// let key = Key::new("stuck")?;
/// let shown = diagnostics::get_by_key_raw(locker.backend(), &key).await?.expect("held");
/// assert!(diagnostics::break_lock(locker.backend(), &shown).await?);
/// assert!(locker.try_lock("stuck").await?.is_some());
/// # drop(guard); locker.shutdown().await
/// # }
/// ```
///
/// # Cancel safety
///
/// Dropped, it may or may not have happened.
pub async fn break_lock(backend: &impl LockBackend, shown: &LockInfoRaw) -> Result<bool> {
    // A lock id is never used twice, so this deletes what was shown or nothing.
    let release = ReleaseRequest::new(shown.lock_id).with_hint(Hint::key(shown.key.clone()));
    Ok(backend.release(&release).await? == Release::Released)
}
