//! Ring 1: common types. No async, no network I/O; everything else builds on them.

pub(crate) mod backoff;
pub(crate) mod cleanup;
pub(crate) mod clock;
#[cfg(feature = "_network")]
pub(crate) mod crypto;
pub(crate) mod error;
pub(crate) mod fence;
pub(crate) mod fence_source;
pub(crate) mod hash_id;
pub(crate) mod holder;
pub(crate) mod join;
pub(crate) mod key;
pub(crate) mod lock_id;
pub(crate) mod lost_reason;
#[cfg(feature = "_network")]
pub(crate) mod network_options;
pub(crate) mod randomness;
pub(crate) mod sharded;
#[cfg(feature = "_sql")]
pub(crate) mod sql_name;
pub(crate) mod storage_key;
pub(crate) mod sync;
pub(crate) mod time;
pub(crate) mod ttl;
pub(crate) mod uptime;
pub(crate) mod url_options;
