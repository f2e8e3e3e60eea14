//! Connects to any backend by its URL.

#[cfg(feature = "firestore")]
use crate::backends::firestore::{FirestoreBackend, FirestoreConfig};
use crate::backends::memory::{MemoryBackend, MemoryConfig};
#[cfg(feature = "postgres")]
use crate::backends::postgres::{PostgresBackend, PostgresConfig};
#[cfg(feature = "redis")]
use crate::backends::redis::{RedisBackend, RedisConfig};
#[cfg(feature = "sqlite")]
use crate::backends::sqlite::{SqliteBackend, SqliteConfig};
use crate::common::error::{Error, Result};
use crate::common::key::Key;
use crate::contract::erased::AnyBackend;

/// Connects to the backend that a URL names.
///
/// | URL | feature | backend |
/// |---|---|---|
/// | `memory:` | | locks in this process; every call creates a new store |
/// | `sqlite:/path/locks.db` | `sqlite` | a file on this machine |
/// | `redis://`, `rediss://`, `redis+unix://`, `redis+sentinel://`, `redis+cluster://` | `redis` | see `RedisConfig::from_url` |
/// | `postgres://user@host/database` | `postgres` | see `PostgresConfig::from_url` |
/// | `firestore://project/database` | `firestore` | see `FirestoreConfig::from_url` |
///
/// Options go in the query string; an unknown option is an error. Error messages do not repeat the
/// URL, which may contain a password.
///
/// ```
/// use syncguard::Locker;
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> syncguard::Result<()> {
/// let url = std::env::var("SYNCGUARD_URL").unwrap_or("memory:".to_owned());
/// let locker = Locker::new(syncguard::connect(&url).await?)?;
/// let guard = locker.lock("invoice:42").await?;
/// # drop(guard); locker.shutdown().await
/// # }
/// ```
///
/// # Cancel safety
///
/// If you drop this future before it completes, no lock is left behind; a file may have been
/// created.
pub async fn connect(url: &str) -> Result<AnyBackend> {
    Ok(match Target::parse(url)? {
        Target::Memory(config) => AnyBackend::new(MemoryBackend::with_config(config)),
        #[cfg(feature = "firestore")]
        Target::Firestore(config) => AnyBackend::new(FirestoreBackend::connect(*config).await?),
        #[cfg(feature = "postgres")]
        Target::Postgres(config) => AnyBackend::new(PostgresBackend::connect(*config).await?),
        #[cfg(feature = "redis")]
        Target::Redis(config) => AnyBackend::new(RedisBackend::connect(*config).await?),
        #[cfg(feature = "sqlite")]
        Target::Sqlite(config) => AnyBackend::new(SqliteBackend::open(config).await?),
    })
}

/// Returns where the records of a key are in the store that a URL names, so that you can inspect
/// them: pairs of a record's kind and its place. It needs no connection.
///
/// ```
/// use syncguard::Key;
///
/// # fn main() -> syncguard::Result<()> {
/// # #[cfg(feature = "redis")] {
/// let url = "redis://localhost/0?prefix=shop";
/// let places = syncguard::diagnostics::explain_key(url, &Key::new("a")?)?;
/// assert_eq!(places[0], ("lock", "shop:a".to_owned()));
/// # }
/// # Ok(())
/// # }
/// ```
pub fn explain_key(url: &str, key: &Key) -> Result<Vec<(&'static str, String)>> {
    match Target::parse(url)? {
        Target::Memory(_) => {
            Ok(vec![("lock", format!("in this process, key = {:?}", key.as_str()))])
        }
        #[cfg(feature = "firestore")]
        Target::Firestore(config) => config.explain(key),
        #[cfg(feature = "postgres")]
        Target::Postgres(config) => config.explain(key),
        #[cfg(feature = "redis")]
        Target::Redis(config) => config.explain(key),
        #[cfg(feature = "sqlite")]
        Target::Sqlite(_) => Ok(SqliteConfig::explain(key)),
    }
}

/// The backend that a URL names, with its configuration.
enum Target {
    #[cfg(feature = "firestore")]
    Firestore(Box<FirestoreConfig>),
    Memory(MemoryConfig),
    #[cfg(feature = "postgres")]
    Postgres(Box<PostgresConfig>),
    #[cfg(feature = "redis")]
    Redis(Box<RedisConfig>),
    #[cfg(feature = "sqlite")]
    Sqlite(SqliteConfig),
}

impl Target {
    fn parse(url: &str) -> Result<Self> {
        let scheme = url.split(':').next().unwrap_or_default();
        let family = scheme.split('+').next().unwrap_or_default();
        match family {
            #[cfg(feature = "firestore")]
            "firestore" => Ok(Self::Firestore(Box::new(FirestoreConfig::from_url(url)?))),
            "memory" => Ok(Self::Memory(MemoryConfig::from_url(url)?)),
            #[cfg(feature = "postgres")]
            "postgres" | "postgresql" => {
                Ok(Self::Postgres(Box::new(PostgresConfig::from_url(url)?)))
            }
            #[cfg(feature = "redis")]
            "redis" | "rediss" | "valkey" | "valkeys" | "unix" => {
                Ok(Self::Redis(Box::new(RedisConfig::from_url(url)?)))
            }
            #[cfg(feature = "sqlite")]
            "sqlite" => Ok(Self::Sqlite(SqliteConfig::from_url(url)?)),
            #[cfg(not(feature = "firestore"))]
            "firestore" => Err(missing("firestore")),
            #[cfg(not(feature = "postgres"))]
            "postgres" | "postgresql" => Err(missing("postgres")),
            #[cfg(not(feature = "redis"))]
            "redis" | "rediss" | "valkey" | "valkeys" | "unix" => Err(missing("redis")),
            #[cfg(not(feature = "sqlite"))]
            "sqlite" => Err(missing("sqlite")),
            _ => Err(Error::invalid(
                "unknown backend in the URL; expected memory:, sqlite:, redis://, rediss://, \
                 redis+unix://, redis+sentinel://, redis+cluster://, postgres:// or firestore://",
            )),
        }
    }
}

#[cfg(not(all(
    feature = "firestore",
    feature = "postgres",
    feature = "redis",
    feature = "sqlite"
)))]
fn missing(feature: &str) -> Error {
    Error::invalid(format!(
        "the URL needs the feature \"{feature}\" of syncguard; rebuild this program with it"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorCode;

    #[tokio::test]
    async fn invalid_urls_are_refused_without_repeating_them() {
        for url in ["", "canary", "canary://x", "memory:?canary=1", "memory:canary", "redi:/x"] {
            let error = connect(url).await.expect_err(url);
            assert_eq!(error.code(), ErrorCode::InvalidArgument, "{url}");
            let shown = error.to_string();
            assert!(!shown.contains("canary"), "{shown}");
        }
        assert!(connect("memory:").await.is_ok());
    }
}
