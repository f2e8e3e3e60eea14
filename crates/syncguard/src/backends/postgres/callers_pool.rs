//! Connections from the caller's own pool.

use std::error::Error as StdError;
use std::future::Future;
use std::ops::Deref;
use std::pin::Pin;

use tokio_postgres::Client;

/// Your own pool, for [`PostgresConfig::from_pool`](super::PostgresConfig::from_pool).
///
/// The backend borrows a client for one operation at a time; holding or waiting for a lock occupies
/// none. It prepares nothing on the client and leaves no setting behind, so the pool may lend it to
/// other code.
pub trait ClientPool: Send + Sync + 'static {
    /// Lends a client for exclusive use until it is dropped.
    fn get(&self) -> Loan<'_>;
}

/// A future that returns a client of the pool.
pub type Loan<'a> = Pin<
    Box<
        dyn Future<Output = Result<Box<dyn PooledClient>, Box<dyn StdError + Send + Sync>>>
            + Send
            + 'a,
    >,
>;

/// A client that a pool has lent. Dropping it returns it to the pool.
pub trait PooledClient: Deref<Target = Client> + Send + Sync {
    /// Closes the client instead of returning it, because an operation on it did not complete.
    fn discard(self: Box<Self>);
}
