//! The stores. A backend knows the contract and the words; it never knows the engine.

#[cfg(feature = "firestore")]
pub mod firestore;
pub mod memory;
#[cfg(feature = "postgres")]
pub mod postgres;
#[cfg(feature = "redis")]
pub mod redis;
#[cfg(feature = "sqlite")]
pub mod sqlite;
