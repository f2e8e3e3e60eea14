//! Ring 3: the backends. They depend on the contract and the common types, never on the locker.

#[cfg(feature = "firestore")]
pub mod firestore;
pub mod memory;
#[cfg(feature = "postgres")]
pub mod postgres;
#[cfg(feature = "redis")]
pub mod redis;
#[cfg(feature = "sqlite")]
pub mod sqlite;
