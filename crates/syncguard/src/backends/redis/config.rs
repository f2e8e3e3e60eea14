//! What can be chosen about the Redis backend.

use std::fmt;
use std::time::Duration;

use redis::Client;

use super::error;
use crate::common::error::{Error, Result};
use crate::common::key::Key;
use crate::common::storage_key::KeySpace;

/// What can be chosen about a [`RedisBackend`](super::RedisBackend).
///
/// ```
/// use std::time::Duration;
/// use syncguard::redis::RedisConfig;
///
/// let config = RedisConfig::from_url("redis://127.0.0.1:6379/0")?
///     .prefix("shop")
///     .response_timeout(Duration::from_secs(1));
/// # Ok::<(), syncguard::Error>(())
/// ```
#[derive(Clone)]
pub struct RedisConfig {
    pub(super) client: Client,
    prefix: String,
    pub(super) connect_timeout: Duration,
    pub(super) response_timeout: Duration,
    pub(super) cleanup_in_is_locked: bool,
}

impl RedisConfig {
    /// The prefix that records have unless told otherwise.
    pub const DEFAULT_PREFIX: &'static str = "syncguard";
    /// The longest name of a record, in bytes.
    pub const LIMIT_BYTES: usize = 1000;
    /// What is kept free of it: `":id:"` and a lock id.
    pub const RESERVE_BYTES: usize = 26;

    /// A server by its URL: `redis://user:password@host:port/database`, or `redis+unix:///path`.
    ///
    /// The message of the error does not repeat the URL, which may hold a password.
    pub fn from_url(url: &str) -> Result<Self> {
        let client = Client::open(url).map_err(|cause| {
            Error::invalid("this is no URL of a Redis server; it looks like redis://host:6379/0")
                .with_source(error::cause(&cause))
        })?;
        Ok(Self::from_client(client))
    }

    /// A client of the caller's own.
    #[must_use]
    pub fn from_client(client: Client) -> Self {
        Self {
            client,
            prefix: Self::DEFAULT_PREFIX.to_owned(),
            connect_timeout: Duration::from_secs(2),
            response_timeout: Duration::from_secs(2),
            cleanup_in_is_locked: false,
        }
    }

    /// What the names of all records begin with. Two prefixes on one server must not be such that
    /// one followed by a colon begins the other.
    #[must_use]
    pub fn prefix(mut self, prefix: impl Into<String>) -> Self {
        self.prefix = prefix.into();
        self
    }

    /// How long connecting may take. Two seconds unless told otherwise.
    #[must_use]
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// How long an answer may take. Two seconds unless told otherwise.
    #[must_use]
    pub fn response_timeout(mut self, timeout: Duration) -> Self {
        self.response_timeout = timeout;
        self
    }

    /// Lets `is_locked` delete a record that has been dead for a while, on the side. Off unless
    /// asked for; fence counters stay in any case.
    #[must_use]
    pub fn cleanup_in_is_locked(mut self, enabled: bool) -> Self {
        self.cleanup_in_is_locked = enabled;
        self
    }

    /// The names of this prefix; refuses a prefix whose names could be taken for fence counters.
    pub(super) fn names(&self) -> Result<Names> {
        if self.prefix.contains("fence:") || self.prefix.ends_with("fence") {
            return Err(Error::invalid(
                "prefix must not contain \"fence:\" or end with \"fence\": its locks could be \
                 taken for fence counters",
            ));
        }
        if self.connect_timeout.is_zero() || self.response_timeout.is_zero() {
            return Err(Error::invalid("timeouts must be positive"));
        }
        let space = KeySpace::new(self.prefix.as_str(), Self::LIMIT_BYTES, Self::RESERVE_BYTES)?;
        let reserved = match space.prefix() {
            "" => "fence:".to_owned(),
            prefix => format!("fence:{prefix}:"),
        };
        // A prefix so long that not even an index key fits is refused now, not at every lock.
        space.index_key(&crate::LockId::parse("AAAAAAAAAAAAAAAAAAAAAA")?)?;
        Ok(Names { space, reserved })
    }
}

impl fmt::Debug for RedisConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The client knows the password.
        f.debug_struct("RedisConfig")
            .field("prefix", &self.prefix)
            .field("connect_timeout", &self.connect_timeout)
            .field("response_timeout", &self.response_timeout)
            .finish_non_exhaustive()
    }
}

/// The names of one prefix.
#[derive(Debug)]
pub(super) struct Names {
    pub(super) space: KeySpace,
    /// User keys that begin with this would be another key's fence counter.
    reserved: String,
}

impl Names {
    /// Where the lock of `key` is stored, unless the key is reserved.
    pub(super) fn lock_key(&self, key: &Key) -> Result<String> {
        if key.as_str().starts_with(&self.reserved) {
            return Err(Error::invalid(
                "keys that begin with \"fence:\" and the prefix are reserved for fence counters",
            )
            .with_key(key));
        }
        self.space.lock_key(key)
    }
}
