//! What tests with real servers need: the servers, started on free ports in temporary directories,
//! and a TCP proxy that misbehaves on demand.

mod certificates;
mod firestore;
mod postgres;
mod process;
mod proxy;
mod redis;

pub use certificates::Certificates;
pub use firestore::FirestoreEmulator;
pub use postgres::{PgBouncer, PostgresOptions, PostgresServer};
pub use process::{TempDir, find_program};
pub use proxy::{Fault, Proxy};
pub use redis::{RedisCluster, RedisOptions, RedisSentinel, RedisServer};
