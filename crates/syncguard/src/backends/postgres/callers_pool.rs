//! Connections that the caller's own pool lends.

use std::error::Error as StdError;
use std::future::Future;
use std::ops::Deref;
use std::pin::Pin;

use tokio_postgres::Client;

/// A pool of the caller's own: what [`PostgresConfig::from_pool`](super::PostgresConfig::from_pool)
/// needs to know of it.
///
/// A client is used for one operation at a time, and for nothing while a lock is held or waited for.
/// Nothing is prepared on it and no setting stays behind, so the pool may share it with everybody.
pub trait ClientPool: Send + Sync + 'static {
    /// A client that nobody else uses until it is dropped.
    fn get(&self) -> Loan<'_>;
}

/// A client that is on its way.
pub type Loan<'a> = Pin<
    Box<
        dyn Future<Output = Result<Box<dyn PooledClient>, Box<dyn StdError + Send + Sync>>>
            + Send
            + 'a,
    >,
>;

/// A client that a pool has lent. Dropped, it goes back.
pub trait PooledClient: Deref<Target = Client> + Send + Sync {
    /// Closes it instead of giving it back, because an operation on it was given up half-way.
    fn discard(self: Box<Self>);
}
