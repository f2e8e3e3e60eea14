//! What can be chosen about the Redis backend.

use std::fmt;
use std::time::Duration;

use redis::aio::ConnectionLike;
use redis::{Client, ProtocolVersion, TlsCertificates};
use unicode_normalization::UnicodeNormalization;

use super::cluster;
use super::connection::SharedConnection;
use super::topology::Topology;
use super::url;
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
    pub(super) target: Target,
    pub(super) certificates: Option<TlsCertificates>,
    prefix: String,
    pub(super) replicas: Option<(u32, Duration)>,
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

    /// How long replicas have to confirm a lock, when a URL does not say it.
    pub(super) const DEFAULT_REPLICA_TIMEOUT: Duration = Duration::from_millis(500);

    /// A server by its URL.
    ///
    /// | URL | |
    /// |---|---|
    /// | `redis://user:password@host:6379/0` | one server, TCP |
    /// | `rediss://host:6379/0` | the same with TLS |
    /// | `redis+unix:///path?db=0&user=u&pass=p` | a socket |
    /// | `redis+sentinel://user:password@host:26379,host:26379/service/0` | the primary of a service |
    /// | `redis+cluster://user:password@host:7000,host:7001` | a Cluster; the prefix needs a `{tag}` |
    ///
    /// `rediss+sentinel` and `rediss+cluster` are the same with TLS. Options in the query: `prefix`,
    /// `connect_timeout_ms`, `response_timeout_ms`, `cleanup_in_is_locked`, `wait_for_replicas`,
    /// `wait_for_replicas_ms`, `tls_ca`, `tls_cert`, `tls_key` (files), `sentinel_user`,
    /// `sentinel_password`. An unknown option is an error.
    ///
    /// The message of the error does not repeat the URL, which may hold a password.
    pub fn from_url(url: &str) -> Result<Self> {
        url::parse(url)
    }

    /// A client of the caller's own. It connects anew: once for locks, once more for wake-ups.
    ///
    /// If the client brings certificates, only the driver can read them. Its TLS takes the provider
    /// of cryptography from the process; `connect` installs ring if there is none.
    #[must_use]
    pub fn from_client(client: &Client) -> Self {
        let info = client.get_connection_info();
        let settings = info.redis_settings().clone().set_protocol(ProtocolVersion::RESP3);
        let info = info.clone().set_redis_settings(settings);
        Self::new(Target::Ours(Box::new(Topology::Single(info))))
    }

    /// A connection of the caller's own, used as it is: with its timeouts, its retries and its way
    /// of connecting again. Waiters poll, because nothing can be subscribed to on it.
    ///
    /// Retries of a cluster connection must be off: a release that is repeated answers that there
    /// was nothing to release.
    #[must_use]
    pub fn from_connection<C>(connection: C) -> Self
    where
        C: ConnectionLike + Clone + Send + Sync + 'static,
    {
        Self::new(Target::Theirs(SharedConnection::new(connection)))
    }

    pub(super) fn new(target: Target) -> Self {
        Self {
            target,
            certificates: None,
            prefix: Self::DEFAULT_PREFIX.to_owned(),
            replicas: None,
            connect_timeout: Duration::from_secs(2),
            response_timeout: Duration::from_secs(2),
            cleanup_in_is_locked: false,
        }
    }

    /// Trusts a root certificate of one's own, or shows a certificate to the server. Without, the
    /// machine's root certificates are trusted.
    #[must_use]
    pub fn certificates(mut self, certificates: TlsCertificates) -> Self {
        self.certificates = Some(certificates);
        self
    }

    /// Grants a lock only when so many replicas have confirmed it within this time; otherwise it is
    /// undone and the acquire fails with [`ServiceUnavailable`](crate::ErrorCode). If the undo fails
    /// too, the error [may have taken effect](crate::Error::may_have_taken_effect), and a
    /// [`Locker`](crate::Locker) goes on undoing.
    ///
    /// It costs a second round trip per acquire, on a few connections of its own. It narrows what a
    /// failover can lose; it does not make a failover safe, because the replica that is promoted
    /// need not be one that confirmed.
    #[must_use]
    pub fn wait_for_replicas(mut self, replicas: u32, timeout: Duration) -> Self {
        self.replicas = Some((replicas, timeout));
        self
    }

    /// What the names of all records begin with, in Unicode NFC: another form is normalized here,
    /// as keys are. Two prefixes on one server must not be such that one followed by a colon begins
    /// the other.
    #[must_use]
    pub fn prefix(mut self, prefix: impl Into<String>) -> Self {
        self.prefix = prefix.into().nfc().collect();
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

    /// Lets `is_locked` delete a record that expired more than two seconds ago, in the background.
    /// Off by default; fence counters stay in any case.
    ///
    /// On Redis this deletes nothing that this library or the TypeScript implementation wrote:
    /// the server itself removes such a record two seconds after its expiry at the latest. It only
    /// removes records that something else has made permanent or given a longer life.
    #[must_use]
    pub fn cleanup_in_is_locked(mut self, enabled: bool) -> Self {
        self.cleanup_in_is_locked = enabled;
        self
    }

    /// What the records of a key are called, for people who look into the store.
    pub(crate) fn explain(&self, key: &Key) -> Result<Vec<(&'static str, String)>> {
        let names = self.names()?;
        let lock_key = names.lock_key(key)?;
        let fence_key = names.space.fence_key(&lock_key)?;
        let index = names.space.index_key(&crate::LockId::parse("AAAAAAAAAAAAAAAAAAAAAA")?)?;
        let index = index.replace("AAAAAAAAAAAAAAAAAAAAAA", "<lock id>");
        Ok(vec![("lock", lock_key), ("index", index), ("fence", fence_key)])
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
        if let Some((replicas, timeout)) = self.replicas {
            if replicas == 0 || timeout < Duration::from_millis(1) {
                return Err(Error::invalid("wait_for_replicas needs a replica and a millisecond"));
            }
            if matches!(self.target, Target::Theirs(_)) {
                return Err(Error::invalid(
                    "wait_for_replicas needs connections of its own; use from_client or from_url",
                ));
            }
        }
        let space = KeySpace::new(self.prefix.as_str(), Self::LIMIT_BYTES, Self::RESERVE_BYTES)?;
        let reserved = match space.prefix() {
            "" => "fence:".to_owned(),
            prefix => format!("fence:{prefix}:"),
        };
        if matches!(&self.target, Target::Ours(topology) if topology.is_cluster()) {
            cluster::refuse_without_tag(space.prefix())?;
        }
        // A prefix so long that not even an index key fits is refused now, not at every lock.
        space.index_key(&crate::LockId::parse("AAAAAAAAAAAAAAAAAAAAAA")?)?;
        Ok(Names { space, reserved })
    }
}

impl fmt::Debug for RedisConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Where the server is may hold a password.
        f.debug_struct("RedisConfig")
            .field("prefix", &self.prefix)
            .field("connect_timeout", &self.connect_timeout)
            .field("response_timeout", &self.response_timeout)
            .finish_non_exhaustive()
    }
}

/// What to talk to.
#[derive(Clone)]
pub(super) enum Target {
    /// Connections that this backend opens.
    Ours(Box<Topology>),
    /// A connection that the caller has opened.
    Theirs(SharedConnection),
}

/// The names of one prefix.
#[derive(Clone, Debug)]
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

    /// What the names of all records look like, for `SCAN`.
    pub(super) fn pattern(&self) -> String {
        let mut pattern = String::new();
        for letter in self.space.prefix().chars() {
            if matches!(letter, '*' | '?' | '[' | ']' | '\\' | '^' | '-') {
                pattern.push('\\');
            }
            pattern.push(letter);
        }
        let separator = if pattern.is_empty() { "" } else { ":" };
        pattern + separator + "*"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_is_normalized_when_it_is_configured() {
        let config = RedisConfig::from_url("redis://h?prefix=cafe%CC%81").expect("a URL");
        assert_eq!(config.names().expect("valid").space.prefix(), "caf\u{e9}");
    }
}
