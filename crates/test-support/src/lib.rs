//! Support for tests with real servers: servers on free ports with temporary directories, and a TCP
//! proxy that injects faults.

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
