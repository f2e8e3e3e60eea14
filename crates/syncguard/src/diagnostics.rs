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
use crate::common::holder::{BreakNote, HolderInfo};
use crate::common::key::Key;
use crate::common::lock_id::LockId;
use crate::contract::LockBackend;
use crate::contract::outcome::ReleaseOutcome;
use crate::contract::request::{Hint, ReleaseRequest};

pub use crate::connect::explain_key;
pub use crate::contract::stored_lock::{LockInfo, LockInfoRaw};

/// Returns the live lock of a key, sanitized, with its holder and the number of its waiters where
/// the store knows them.
///
/// # Cancel safety
///
/// You can drop this future at any time; it only reads.
pub async fn get_by_key(backend: &impl LockBackend, key: &Key) -> Result<Option<LockInfo>> {
    let Some(stored) = backend.lookup_key(key).await? else { return Ok(None) };
    Ok(Some(LockInfo { waiters: backend.waiters(key).await, ..stored.into() }))
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
/// The guard of the holder notices at its next renewal, or at once where the store sends
/// notifications; until then the holder continues without a lock. The fence protects against its
/// writes. [`break_lock_with`] leaves a note for the holder.
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
    let by = HolderInfo::of_this_process(None);
    break_lock_with(backend, shown, BreakNote::new(Some(by), None)).await
}

/// Breaks a lock as [`break_lock`] does, with a note of who does it and why. The guard of the
/// holder ends with [`LostReason::Broken`](crate::LostReason::Broken), on every backend except
/// Firestore; on PostgreSQL only if the guard is renewed and the connection is not through a
/// pooler.
///
/// # Cancel safety
///
/// If you drop this future before it completes, the lock may or may not be released.
pub async fn break_lock_with(
    backend: &impl LockBackend,
    shown: &LockInfoRaw,
    note: BreakNote,
) -> Result<bool> {
    // A lock id is never used twice, so this releases the lock in `shown` or nothing.
    let release = ReleaseRequest::new(shown.lock_id)
        .with_hint(Hint::key(shown.key.clone()))
        .with_break_note(note);
    Ok(backend.release(&release).await? == ReleaseOutcome::Released)
}
