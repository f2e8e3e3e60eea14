//! Support for tests with real servers: servers on free ports with temporary directories, a TCP
//! proxy that injects faults, and a browser.

mod browser;
mod certificates;
mod clock;
mod figure;
mod firestore;
mod fuzz;
mod postgres;
mod process;
mod proxy;
mod redis;
mod rewriter;

pub use browser::Browser;
pub use certificates::Certificates;
pub use figure::figure;
pub use firestore::FirestoreEmulator;
pub use fuzz::fuzz;
pub use postgres::{PgBouncer, PostgresOptions, PostgresServer};
pub use process::{TempDir, find_program};
pub use proxy::{Fault, Proxy};
pub use redis::{Migration, RedisCluster, RedisOptions, RedisSentinel, RedisServer};
