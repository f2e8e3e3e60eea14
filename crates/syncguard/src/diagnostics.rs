//! Looks up locks for display, monitoring and debugging.
//!
//! **A lookup protects nothing.** The lock may change hands between the lookup and your next step.
//! `release` and `extend` check ownership themselves, atomically; do not look up first.
//!
//! Results are sanitized: keys and lock ids are hashes. The `_raw` functions return the raw values;
//! anyone who reads a raw lock id can release that lock.
//!
//! ```
//! use syncguard::{Key, Locker, MemoryBackend, diagnostics};
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> syncguard::Result<()> {
//! let locker = Locker::new(MemoryBackend::new())?;
//! let guard = locker.lock("job").await?;
//! let info = diagnostics::get_by_key(locker.backend(), &Key::new("job")?).await?.expect("held");
//! assert_eq!(info.key_hash, guard.key().hash_id());
//! assert_eq!(info.fence, Some(guard.fence()));
//! assert!(diagnostics::owns(locker.backend(), &guard.lock_id()).await?);
//! # drop(guard); locker.shutdown().await
//! # }
//! ```

use crate::common::error::Result;
use crate::common::key::Key;
use crate::common::lock_id::LockId;
use crate::contract::LockBackend;
use crate::contract::outcome::ReleaseOutcome;
use crate::contract::request::{Hint, ReleaseRequest};

pub use crate::connect::explain_key;
pub use crate::contract::stored_lock::{LockInfo, LockInfoRaw};

/// Returns the live lock of a key, sanitized.
///
/// # Cancel safety
///
/// You can drop this future at any time; it only reads.
pub async fn get_by_key(backend: &impl LockBackend, key: &Key) -> Result<Option<LockInfo>> {
    Ok(backend.lookup_key(key).await?.map(Into::into))
}

/// Returns the live lock that an id holds, sanitized.
///
/// # Cancel safety
///
/// You can drop this future at any time; it only reads.
pub async fn get_by_id(backend: &impl LockBackend, lock_id: &LockId) -> Result<Option<LockInfo>> {
    Ok(backend.lookup_id(lock_id).await?.map(Into::into))
}

/// Returns the live lock of a key, with its raw key and lock id.
///
/// # Cancel safety
///
/// You can drop this future at any time; it only reads.
pub async fn get_by_key_raw(backend: &impl LockBackend, key: &Key) -> Result<Option<LockInfoRaw>> {
    Ok(backend.lookup_key(key).await?.map(Into::into))
}

/// Returns the live lock that an id holds, with its raw key and lock id.
///
/// # Cancel safety
///
/// You can drop this future at any time; it only reads.
pub async fn get_by_id_raw(
    backend: &impl LockBackend,
    lock_id: &LockId,
) -> Result<Option<LockInfoRaw>> {
    Ok(backend.lookup_id(lock_id).await?.map(Into::into))
}

/// Returns whether an id holds a live lock. Use it for display only, not before a release or
/// extend.
///
/// # Cancel safety
///
/// You can drop this future at any time; it only reads.
pub async fn owns(backend: &impl LockBackend, lock_id: &LockId) -> Result<bool> {
    Ok(backend.lookup_id(lock_id).await?.is_some())
}

/// Breaks a lock: releases it if its holder is still the one in `shown`. Returns `false` if the
/// lock has changed hands or is free.
///
/// The holder is not notified. Its guard notices at its next renewal; until then the holder
/// continues without a lock. The fence protects against its writes.
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
/// If you drop this future before it completes, the lock may or may not be released.
pub async fn break_lock(backend: &impl LockBackend, shown: &LockInfoRaw) -> Result<bool> {
    // A lock id is never used twice, so this releases the lock in `shown` or nothing.
    let release = ReleaseRequest::new(shown.lock_id).with_hint(Hint::key(shown.key.clone()));
    Ok(backend.release(&release).await? == ReleaseOutcome::Released)
}
