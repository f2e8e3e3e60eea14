//! The configuration of the Redis backend.

use std::fmt;
use std::time::Duration;

use redis::aio::ConnectionLike;
use redis::{
    Client, ClientTlsConfig, ConnectionAddr, ConnectionInfo, IntoConnectionInfo, ProtocolVersion,
    RedisConnectionInfo, TlsCertificates,
};
use unicode_normalization::UnicodeNormalization;

use super::cluster;
use super::connection::SharedConnection;
use super::error;
use super::layout::Layout;
use super::names::Names;
use super::scripts::Argument;
use super::sentinel::Sentinel;
use super::topology::Topology;
use crate::common::error::{Error, Result};
use crate::common::fence_source::FenceSource;
use crate::common::key::Key;
use crate::common::lock_id::LockId;
use crate::common::network_options::{NetworkOptions, network_setters};
use crate::common::shard::MAX_SHARDS;
use crate::common::url_options::UrlOptions;

/// The configuration of a [`RedisBackend`](super::RedisBackend).
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
    pub(super) source: ConnectionSource,
    pub(super) certificates: Option<TlsCertificates>,
    prefix: String,
    pub(super) shards: Option<u16>,
    pub(super) replicas: Option<(u32, Duration)>,
    pub(super) fences: Fences,
    pub(super) network: NetworkOptions,
}

impl RedisConfig {
    /// The default prefix of record names.
    pub const DEFAULT_PREFIX: &'static str = "syncguard";
    /// The maximum length of a record name, in bytes.
    pub const LIMIT_BYTES: usize = 1000;
    /// How many of these bytes are reserved for `":id:"` and a lock id.
    pub const RESERVE_BYTES: usize = 26;

    /// How long replicas may take to confirm a lock, if the URL does not set it.
    pub(super) const DEFAULT_REPLICA_TIMEOUT: Duration = Duration::from_millis(500);

    /// Creates a configuration from a URL.
    ///
    /// | URL | connects to |
    /// |---|---|
    /// | `redis://user:password@host:6379/0` | one server over TCP |
    /// | `rediss://host:6379/0` | one server over TLS |
    /// | `redis+unix:///path?db=0&user=u&pass=p` | one server over a Unix socket |
    /// | `redis+sentinel://user:password@host:26379,host:26379/service/0` | a service's primary |
    /// | `redis+cluster://user:password@host:7000,host:7001` | a Cluster; the prefix has a tag |
    /// | `redis+cluster://host:7000,host:7001?shards=256` | all of a Cluster, in [shards](Self::shards) |
    ///
    /// `rediss+sentinel` and `rediss+cluster` use TLS. Options in the query: `prefix`, `shards`,
    /// `connect_timeout_ms`, `response_timeout_ms`, `cleanup_in_is_locked`, `fences` (`counter` or
    /// `clock`), `fence_expiry_ms`, `wait_for_replicas`, `wait_for_replicas_ms`, `tls_ca`,
    /// `tls_cert`, `tls_key` (files), `sentinel_user`, `sentinel_password`. An unknown option is an
    /// error.
    ///
    /// Error messages do not repeat the URL, which may contain a password.
    pub fn from_url(url: &str) -> Result<Self> {
        parse_url(url)
    }

    /// Opens new connections with the settings of your own client: one for locks, and one for
    /// notifications once a task waits.
    ///
    /// If the client has certificates, only the driver can read them, and its TLS needs a default
    /// crypto provider of the process; `connect` installs ring if there is none.
    #[must_use]
    pub fn from_client(client: &Client) -> Self {
        let info = client.get_connection_info();
        let settings = info.redis_settings().clone().set_protocol(ProtocolVersion::RESP3);
        let info = info.clone().set_redis_settings(settings);
        Self::new(ConnectionSource::Owned(Box::new(Topology::Single(info))))
    }

    /// Uses your own connection as it is, with its timeouts, retries and reconnection;
    /// `response_timeout` bounds only `connect`, `findings` and listing. Waiters poll, because the
    /// backend cannot subscribe on it, and it cannot wait for replicas.
    ///
    /// If it is a cluster connection, turn off its retries: a repeated release reports that there
    /// was nothing to release. Its releases do not wake waiters. `connect` cannot check that the
    /// prefix has a tag; without one, every lock fails with
    /// [`InvalidArgument`](crate::ErrorCode::InvalidArgument).
    #[must_use]
    pub fn from_connection<C>(connection: C) -> Self
    where
        C: ConnectionLike + Clone + Send + Sync + 'static,
    {
        Self::new(ConnectionSource::External(SharedConnection::new(connection)))
    }

    pub(super) fn new(source: ConnectionSource) -> Self {
        Self {
            source,
            certificates: None,
            prefix: Self::DEFAULT_PREFIX.to_owned(),
            shards: None,
            replicas: None,
            fences: Fences::default(),
            network: NetworkOptions::new(Duration::from_secs(2)),
        }
    }

    /// Sets the root certificate to trust, and the client certificate to show to the server. By
    /// default, the machine's root certificates are trusted.
    #[must_use]
    pub fn certificates(mut self, certificates: TlsCertificates) -> Self {
        self.certificates = Some(certificates);
        self
    }

    /// Grants a lock only if this many replicas confirm it within `timeout`. Otherwise the lock is
    /// undone and the acquire fails with [`ServiceUnavailable`](crate::ErrorCode). If the undo
    /// fails too, the error [may have taken effect](crate::Error::may_have_taken_effect), and a
    /// [`Locker`](crate::Locker) keeps undoing.
    ///
    /// Each acquire costs a second round trip, on a few separate connections. This reduces what a
    /// failover can lose but does not make it safe: the promoted replica need not be one that
    /// confirmed.
    #[must_use]
    pub fn wait_for_replicas(mut self, replicas: u32, timeout: Duration) -> Self {
        self.replicas = Some((replicas, timeout));
        self
    }

    /// Sets where fences come from. [`FenceSource::Counter`] by default.
    #[must_use]
    pub fn fences(mut self, source: FenceSource) -> Self {
        self.fences.source = source;
        self
    }

    /// Sets how long an idle fence counter is kept with [`FenceSource::Clock`]: 7 days by default,
    /// and at least twice the longest TTL, so 48 hours. Every grant starts the time again. With
    /// [`FenceSource::Counter`], counters never expire.
    #[must_use]
    pub fn fence_expiry(mut self, expiry: Duration) -> Self {
        self.fences.expiry = Some(expiry);
        self
    }

    /// Sets the prefix of all record names. It is normalized to Unicode NFC, as keys are. Of two
    /// prefixes on one server, neither may begin with the other and a colon.
    #[must_use]
    pub fn prefix(mut self, prefix: impl Into<String>) -> Self {
        self.prefix = prefix.into().nfc().collect();
        self
    }

    /// Distributes the locks over a Cluster: the key of a lock decides in which of this many shards
    /// its records are, and every node serves the shards whose slots it has. 1 to 1024; a few dozen
    /// for each node that the Cluster may ever have.
    ///
    /// All programs that share the locks set the same number. The first one that connects writes it
    /// to the store, and a backend with another number fails to connect with
    /// [`InvalidArgument`](crate::ErrorCode::InvalidArgument). The prefix must not have a tag.
    ///
    /// Without this, all locks are in one slot, which is what programs of other languages expect.
    #[must_use]
    pub fn shards(mut self, shards: u16) -> Self {
        self.shards = Some(shards);
        self
    }

    network_setters!("2 seconds by default.", "2 seconds by default.");

    /// Returns the names of a key's records, for people who inspect the store.
    pub(crate) fn explain(&self, key: &Key) -> Result<Vec<(&'static str, String)>> {
        self.validate()?;
        let layout = self.layout()?;
        let names = &layout.shards()[layout.place_of(key)];
        let lock_key = names.lock_key(key)?;
        let fence_key = names.space.fence_key(&lock_key)?;
        let index = names.space.index_key(&LockId::parse("AAAAAAAAAAAAAAAAAAAAAA")?)?;
        let index = index.replace("AAAAAAAAAAAAAAAAAAAAAA", "<lock id>");
        Ok(vec![("lock", lock_key), ("index", index), ("fence", fence_key)])
    }

    /// Checks the configuration before anything is sent.
    pub(super) fn validate(&self) -> Result<()> {
        if self.prefix.contains("fence:") || self.prefix.ends_with("fence") {
            return Err(Error::invalid(
                "prefix must not contain \"fence:\" or end with \"fence\": its locks could be \
                 mistaken for fence counters",
            ));
        }
        self.network.validate()?;
        self.fences.validate()?;
        if let Some((replicas, timeout)) = self.replicas {
            if replicas == 0 || timeout < Duration::from_millis(1) {
                return Err(Error::invalid(
                    "wait_for_replicas must be at least 1, with a timeout of at least 1 ms",
                ));
            }
            if matches!(self.source, ConnectionSource::External(_)) {
                return Err(Error::invalid(
                    "wait_for_replicas does not work with from_connection; use from_client or \
                     from_url",
                ));
            }
        }
        let is_cluster =
            matches!(&self.source, ConnectionSource::Owned(topology) if topology.is_cluster());
        if let Some(shards) = self.shards {
            return self.validate_shards(shards, is_cluster);
        }
        let names = Names::with_prefix(&self.prefix)?;
        if is_cluster {
            cluster::refuse_without_tag(names.space.prefix())?;
        }
        Ok(())
    }

    fn validate_shards(&self, shards: u16, is_cluster: bool) -> Result<()> {
        if !(1..=MAX_SHARDS).contains(&shards) {
            return Err(Error::invalid(format!("shards must be 1 to {MAX_SHARDS}")));
        }
        if !is_cluster {
            return Err(Error::invalid(
                "shards are for a Redis Cluster; use a redis+cluster:// URL, or remove shards",
            ));
        }
        if self.prefix.contains(['{', '}']) {
            return Err(Error::invalid(
                "with shards the prefix must not contain braces: every shard has its own tag",
            ));
        }
        // The number of the last shard is the longest.
        let longest = format!("{{{}:{shards}-{}}}", self.base_prefix(), u32::MAX);
        Names::with_prefix(&longest).map(drop)
    }

    /// Returns the prefix without colons at its end.
    pub(super) fn base_prefix(&self) -> &str {
        self.prefix.trim_end_matches(':')
    }

    /// Returns the names of the records. Fails if the prefix leaves no room for them.
    pub(super) fn layout(&self) -> Result<Layout> {
        match self.shards {
            Some(shards) => Layout::sharded(self.base_prefix(), shards),
            None => Ok(Layout::whole(Names::with_prefix(&self.prefix)?)),
        }
    }
}

impl fmt::Debug for RedisConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The source may contain a password.
        f.debug_struct("RedisConfig")
            .field("prefix", &self.prefix)
            .field("shards", &self.shards)
            .field("network", &self.network)
            .finish_non_exhaustive()
    }
}

/// Where fences come from, and how long an idle counter is kept.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Fences {
    pub(super) source: FenceSource,
    /// `None` for the default.
    pub(super) expiry: Option<Duration>,
}

impl Fences {
    const DEFAULT_EXPIRY: Duration = Duration::from_hours(7 * 24);

    fn validate(self) -> Result<()> {
        let Some(expiry) = self.expiry else { return Ok(()) };
        if self.source == FenceSource::Counter {
            return Err(Error::invalid(
                "fence_expiry needs fences from the clock: a counter that expires would start at 1 \
                 again; set fences=clock",
            ));
        }
        FenceSource::check_age(expiry)
    }

    /// Returns the arguments of the scripts that draw a fence: fences per millisecond of the clock,
    /// and the least expiry of the counter in milliseconds.
    pub(super) fn arguments(self) -> [Argument<'static>; 2] {
        let expiry = self.expiry.unwrap_or(Self::DEFAULT_EXPIRY);
        let expiry_ms = match self.source {
            FenceSource::Counter => 0,
            FenceSource::Clock => u64::try_from(expiry.as_millis()).unwrap_or(u64::MAX),
        };
        [Argument::Number(self.source.per_millisecond()), Argument::Number(expiry_ms)]
    }
}

/// Where connections come from.
#[derive(Clone)]
pub(super) enum ConnectionSource {
    /// Connections that this backend opens.
    Owned(Box<Topology>),
    /// A connection that the caller has opened.
    External(SharedConnection),
}

const OPTIONS: &str = "prefix, shards, connect_timeout_ms, response_timeout_ms, \
                       cleanup_in_is_locked, \
                       fences, fence_expiry_ms, tls_ca, tls_cert, tls_key, wait_for_replicas, \
                       wait_for_replicas_ms, sentinel_user, sentinel_password";

/// Parses a URL. Error messages do not repeat it, because it may contain a password.
fn parse_url(url: &str) -> Result<RedisConfig> {
    let (address, mut options) = UrlOptions::split(url)?;
    let (scheme, rest) = address.split_once("://").ok_or_else(no_url)?;
    let (scheme, kind) = scheme.split_once('+').unwrap_or((scheme, ""));
    let topology = match kind {
        "cluster" => {
            let nodes = hosts(scheme, rest, 6379)?;
            if nodes.iter().any(|node| node.redis_settings().db() != 0) {
                return Err(Error::invalid(
                    "a Redis Cluster has no databases; remove the database from the URL",
                ));
            }
            Topology::Cluster(nodes)
        }
        "sentinel" => Topology::Sentinel(sentinel(scheme, rest, &mut options)?),
        _ => Topology::Single(single(address, &mut options)?),
    };
    let mut config = RedisConfig::new(ConnectionSource::Owned(Box::new(topology)));
    if let Some(prefix) = options.take("prefix")? {
        config = config.prefix(prefix);
    }
    config.shards = options.take_as::<u16>("shards", "a number of shards")?;
    config.network.take(&mut options)?;
    config.fences.source = FenceSource::take(&mut options)?;
    config.fences.expiry = options.take_millis("fence_expiry_ms")?;
    let replicas = options.take_as::<u32>("wait_for_replicas", "a number of replicas")?;
    let node_timeout = options.take_millis("wait_for_replicas_ms")?;
    if node_timeout.is_some() && replicas.is_none() {
        return Err(Error::invalid("\"wait_for_replicas_ms\" requires \"wait_for_replicas\""));
    }
    if let Some(replicas) = replicas {
        let node_timeout = node_timeout.unwrap_or(RedisConfig::DEFAULT_REPLICA_TIMEOUT);
        config = config.wait_for_replicas(replicas, node_timeout);
    }
    if let Some(certificates) = certificates(&mut options)? {
        config = config.certificates(certificates);
    }
    options.finish(OPTIONS)?;
    Ok(config)
}

fn no_url() -> Error {
    Error::invalid("not a Redis URL; expected redis://host:6379/0")
}

fn info(url: impl IntoConnectionInfo) -> Result<ConnectionInfo> {
    let info =
        url.into_connection_info().map_err(|cause| no_url().with_source(error::cause(&cause)))?;
    let settings = info.redis_settings().clone().set_protocol(ProtocolVersion::RESP3);
    Ok(info.set_redis_settings(settings))
}

/// Parses the URL of one server. On a socket the login and the database are options, as in the
/// driver's URLs.
fn single(address: &str, options: &mut UrlOptions) -> Result<ConnectionInfo> {
    let server = info(address)?;
    let mut settings = server.redis_settings().clone();
    if matches!(server.addr(), ConnectionAddr::Unix(_)) {
        if let Some(database) = options.take_as("db", "a database number")? {
            settings = settings.set_db(database);
        }
        if let Some(user) = options.take("user")? {
            settings = settings.set_username(user);
        }
        if let Some(password) = options.take("pass")? {
            settings = settings.set_password(password);
        }
    }
    Ok(server.set_redis_settings(settings))
}

/// Splits `login@host,host/path`.
fn authority(rest: &str) -> (&str, &str, &str) {
    let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
    let (login, hosts) = authority.rsplit_once('@').unwrap_or(("", authority));
    (login, hosts, path)
}

/// Parses several hosts that share a scheme, login and path.
fn hosts(scheme: &str, rest: &str, default_port: u16) -> Result<Vec<ConnectionInfo>> {
    let (login, hosts, path) = authority(rest);
    let node = |host: &str| {
        let has_port = host.rsplit_once(':').is_some_and(|(_, port)| !port.ends_with(']'));
        let port = if has_port { String::new() } else { format!(":{default_port}") };
        info(format!("{scheme}://{login}@{host}{port}/{path}"))
    };
    hosts.split(',').map(node).collect()
}

/// Parses `login@sentinel,sentinel/service/database`; the login is for the primary.
fn sentinel(scheme: &str, rest: &str, options: &mut UrlOptions) -> Result<Sentinel> {
    let (login_of_primary, addresses, path) = authority(rest);
    let (service, database) = path.split_once('/').unwrap_or((path, ""));
    if service.is_empty() {
        return Err(Error::invalid(
            "the URL has no Sentinel service; expected redis+sentinel://host:26379/service/0",
        ));
    }
    let mut login = RedisConnectionInfo::default();
    if let Some(user) = options.take("sentinel_user")? {
        login = login.set_username(user);
    }
    if let Some(password) = options.take("sentinel_password")? {
        login = login.set_password(password);
    }
    let sentinels = hosts(scheme, addresses, 26379)?;
    let primary = info(format!("{scheme}://{login_of_primary}@primary/{database}"))?;
    Ok(Sentinel {
        nodes: sentinels.into_iter().map(|node| node.set_redis_settings(login.clone())).collect(),
        service: service.to_owned(),
        primary: primary.redis_settings().clone(),
    })
}

/// Reads the certificates from the files that the options name.
fn certificates(options: &mut UrlOptions) -> Result<Option<TlsCertificates>> {
    let mut read = |name| options.take_file(name);
    let (root_cert, client_cert, client_key) =
        (read("tls_ca")?, read("tls_cert")?, read("tls_key")?);
    let client_tls = match (client_cert, client_key) {
        (Some(client_cert), Some(client_key)) => Some(ClientTlsConfig { client_cert, client_key }),
        (None, None) => None,
        _ => return Err(Error::invalid("set both \"tls_cert\" and \"tls_key\", or neither")),
    };
    let is_given = root_cert.is_some() || client_tls.is_some();
    Ok(is_given.then_some(TlsCertificates { client_tls, root_cert }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_is_normalized_when_it_is_configured() {
        let config = RedisConfig::from_url("redis://h?prefix=cafe%CC%81").expect("a URL");
        let layout = config.layout().expect("valid");
        assert_eq!(layout.shards()[0].space.prefix(), "caf\u{e9}");
    }

    fn topology(url: &str) -> Topology {
        match parse_url(url).expect(url).source {
            ConnectionSource::Owned(topology) => *topology,
            ConnectionSource::External(_) => unreachable!("from a URL"),
        }
    }

    #[test]
    fn cluster_and_sentinel_urls_have_several_hosts() {
        let Topology::Cluster(nodes) =
            topology("rediss+cluster://me:p%40@a:7000,[::1]:7001,c/?prefix=%7Bx%7D")
        else {
            panic!("a cluster");
        };
        let shown: Vec<_> = nodes.iter().map(|node| node.addr().to_string()).collect();
        assert_eq!(shown, ["a:7000", "::1:7001", "c:6379"]);
        assert!(nodes.iter().all(|node| node.redis_settings().password() == Some("p@")));
        let Topology::Sentinel(found) =
            topology("redis+sentinel://:secret@a,b:26380/shop/3?sentinel_password=other")
        else {
            panic!("sentinels");
        };
        assert_eq!(found.service, "shop");
        assert_eq!(found.primary.db(), 3);
        assert_eq!(found.primary.password(), Some("secret"));
        let logins = found.nodes.iter().map(|node| node.redis_settings().password());
        assert!(logins.into_iter().all(|password| password == Some("other")));
        let shown: Vec<_> = found.nodes.iter().map(|node| node.addr().to_string()).collect();
        assert_eq!(shown, ["a:26379", "b:26380"]);
    }

    #[test]
    fn sockets_take_their_login_from_the_options() {
        let Topology::Single(info) = topology("redis+unix:///run/redis.sock?db=2&pass=x") else {
            panic!("one server");
        };
        assert_eq!(info.redis_settings().db(), 2);
        assert_eq!(info.redis_settings().password(), Some("x"));
    }

    #[test]
    fn invalid_urls_are_refused_without_repeating_them() {
        for url in [
            "",
            "canary",
            "redis:canary",
            "redis://canary:6379/x",
            "redis://h/0?canary=1",
            "redis://h/0?tls_ca=/canary/nowhere",
            "redis://h/0?tls_cert=/dev/null",
            "redis://h/0?connect_timeout_ms=canary",
            "redis+cluster://h:7000/canary",
            "redis+cluster://h:7000/1",
            "redis+sentinel://canary",
            "http://canary/",
        ] {
            let error = parse_url(url).expect_err(url);
            assert_eq!(error.code(), crate::common::error::ErrorCode::InvalidArgument, "{url}");
            let shown = format!("{error}");
            assert!(!shown.contains("canary"), "{shown}");
        }
    }
}
