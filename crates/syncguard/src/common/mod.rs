//! Ring 1: the words. No async, no I/O; everything else is built from these.

pub(crate) mod backoff;
pub(crate) mod cleanup;
pub(crate) mod clock;
#[cfg(any(feature = "firestore", feature = "postgres", feature = "redis"))]
pub(crate) mod crypto;
pub(crate) mod error;
pub(crate) mod fence;
pub(crate) mod hash_id;
pub(crate) mod key;
pub(crate) mod lock_id;
pub(crate) mod lost_reason;
pub(crate) mod randomness;
pub(crate) mod sharded;
pub(crate) mod storage_key;
pub(crate) mod time;
pub(crate) mod ttl;
pub(crate) mod uptime;
pub(crate) mod url_options;
