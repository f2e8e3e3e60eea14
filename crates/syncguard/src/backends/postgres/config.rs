//! The configuration of the PostgreSQL backend.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio_postgres::config::Host;

use super::admin;
use super::callers_pool::ClientPool;
use super::names::Names;
use super::tls::{Files, SslMode};
use crate::common::error::{Error, Result};
use crate::common::fence_source::FenceSource;
use crate::common::key::Key;
use crate::common::network_options::{NetworkOptions, network_setters};
use crate::common::url_options::UrlOptions;

const OPTIONS: &str = "locks_table, fences_table, pool_size, pooler, response_timeout_ms, \
                       connect_timeout_ms, max_connection_age_ms, cleanup_in_is_locked, fences, \
                       sslmode, sslrootcert, sslcert, sslkey, and the libpq options that the driver knows";

/// The libpq options that are passed to the driver.
const DRIVER_OPTIONS: [&str; 18] = [
    "user",
    "password",
    "dbname",
    "host",
    "hostaddr",
    "port",
    "application_name",
    "options",
    "target_session_attrs",
    "channel_binding",
    "keepalives",
    "keepalives_idle",
    "keepalives_interval",
    "keepalives_retries",
    "tcp_user_timeout",
    "load_balance_hosts",
    "sslnegotiation",
    "connect_timeout",
];

/// The configuration of a [`PostgresBackend`](super::PostgresBackend).
///
/// ```
/// use syncguard::postgres::PostgresConfig;
///
/// let config = PostgresConfig::from_url("postgres://app@localhost/shop")?
///     .tables("billing.locks", "billing.fences")
///     .pool_size(4);
/// # Ok::<(), syncguard::Error>(())
/// ```
#[derive(Clone)]
pub struct PostgresConfig {
    pub(super) driver: tokio_postgres::Config,
    /// The caller's own pool, if clients come from there.
    pub(super) pool: Option<Arc<dyn ClientPool>>,
    pub(super) ssl_mode: SslMode,
    pub(super) files: Files,
    locks_table: String,
    fences_table: String,
    pub(super) pool_size: usize,
    pub(super) is_pooled: bool,
    pub(super) network: NetworkOptions,
    pub(super) max_connection_age: Duration,
    pub(super) fences: FenceSource,
}

impl PostgresConfig {
    /// The default table of locks.
    pub const DEFAULT_LOCKS_TABLE: &'static str = "syncguard_locks";
    /// The default table of fence counters.
    pub const DEFAULT_FENCES_TABLE: &'static str = "syncguard_fence_counters";

    /// Creates a configuration from a URL: `postgres://user:password@host:5432/database`, with
    /// libpq's options (`sslmode`, `sslrootcert`, …) and these: `locks_table`, `fences_table`,
    /// `pool_size`, `pooler`, `connect_timeout_ms`, `response_timeout_ms`,
    /// `max_connection_age_ms`, `cleanup_in_is_locked`, `fences` (`counter` or `clock`). An unknown
    /// option is an error.
    ///
    /// The default `sslmode` is `verify-full`, or `prefer` if the server is on this machine.
    /// `prefer`, libpq's default, lets an attacker in the middle turn TLS off.
    ///
    /// Error messages do not repeat the URL, which may contain a password.
    pub fn from_url(url: &str) -> Result<Self> {
        let no_url =
            || Error::invalid("not a PostgreSQL URL; expected postgres://user@host/database");
        let (address, mut options) = UrlOptions::split(url)?;
        if !address.starts_with("postgres://") && !address.starts_with("postgresql://") {
            return Err(no_url());
        }
        let mut query = form_urlencoded::Serializer::new(String::new());
        for name in DRIVER_OPTIONS {
            if let Some(value) = options.take(name)? {
                query.append_pair(name, &value);
            }
        }
        // The driver needs %20, not the plus sign of forms.
        let query = query.finish().replace('+', "%20");
        let driver: tokio_postgres::Config =
            format!("{address}?{query}").parse().map_err(|_cause| no_url())?;
        let mut config = Self::from_driver(driver);
        if let Some(mode) = options.take("sslmode")? {
            config.ssl_mode = SslMode::parse(&mode)?;
        }
        config.files = files(&mut options)?;
        let locks_table = options.take("locks_table")?;
        let fences_table = options.take("fences_table")?;
        config = config.tables(
            locks_table.as_deref().unwrap_or(Self::DEFAULT_LOCKS_TABLE),
            fences_table.as_deref().unwrap_or(Self::DEFAULT_FENCES_TABLE),
        );
        if let Some(size) = options.take_as("pool_size", "a number of connections")? {
            config = config.pool_size(size);
        }
        if let Some(is_pooled) = options.take_as("pooler", "true or false")? {
            config = config.behind_pooler(is_pooled);
        }
        config.network.take(&mut options)?;
        config.fences = FenceSource::take(&mut options)?;
        if let Some(age) = options.take_millis("max_connection_age_ms")? {
            config = config.max_connection_age(age);
        }
        options.finish(OPTIONS)?;
        Ok(config)
    }

    /// Creates a configuration from the driver's. TLS has the same defaults as in
    /// [`from_url`](Self::from_url): the server is verified, unless it is on this machine or the
    /// driver's configuration disables TLS.
    #[must_use]
    pub fn from_driver(driver: tokio_postgres::Config) -> Self {
        let is_here = |host: &Host| match host {
            Host::Tcp(name) => {
                let address = name.parse::<std::net::IpAddr>();
                name == "localhost" || address.is_ok_and(|address| address.is_loopback())
            }
            #[cfg(unix)]
            Host::Unix(_) => true,
        };
        // If there is an address beside the name, the connection goes to the address.
        let is_here = !driver.get_hosts().is_empty()
            && driver.get_hosts().iter().all(is_here)
            && driver.get_hostaddrs().iter().all(std::net::IpAddr::is_loopback);
        let ssl_mode = match (driver.get_ssl_mode(), is_here) {
            (tokio_postgres::config::SslMode::Disable, _) => SslMode::Disable,
            (tokio_postgres::config::SslMode::Require, true) => SslMode::Require,
            (_, true) => SslMode::Prefer,
            (_, false) => SslMode::VerifyFull,
        };
        let mut network = NetworkOptions::new(Duration::from_secs(5));
        if let Some(timeout) = driver.get_connect_timeout() {
            network.connect_timeout = *timeout;
        }
        Self {
            ssl_mode,
            driver,
            pool: None,
            files: Files::default(),
            locks_table: Self::DEFAULT_LOCKS_TABLE.to_owned(),
            fences_table: Self::DEFAULT_FENCES_TABLE.to_owned(),
            pool_size: 8,
            is_pooled: false,
            network,
            max_connection_age: Duration::from_mins(10),
            fences: FenceSource::default(),
        }
    }

    /// Uses your own pool. Waiters poll, because the backend cannot listen through it, and a
    /// release waits for a client like any other operation.
    #[must_use]
    pub fn from_pool(pool: impl ClientPool) -> Self {
        let mut config = Self::from_driver(tokio_postgres::Config::new()).behind_pooler(true);
        config.ssl_mode = SslMode::Disable;
        config.pool = Some(Arc::new(pool));
        config
    }

    /// Sets the tables of locks and of fence counters, each optionally with `schema.` in front.
    #[must_use]
    pub fn tables(mut self, locks: impl Into<String>, fences: impl Into<String>) -> Self {
        self.locks_table = locks.into();
        self.fences_table = fences.into();
        self
    }

    /// Sets the maximum number of connections, 8 by default. One more is reserved for releases and
    /// extends, so that acquires cannot delay them, and one is for notifications once a task waits.
    #[must_use]
    pub fn pool_size(mut self, size: usize) -> Self {
        self.pool_size = size;
        self
    }

    /// Sets whether a pooler in transaction mode, such as PgBouncer, is in front of the server. If
    /// so, nothing is prepared, and waiters poll. If you omit it, syncguard detects the pooler when
    /// it connects.
    #[must_use]
    pub fn behind_pooler(mut self, is_pooled: bool) -> Self {
        self.is_pooled = is_pooled;
        self
    }

    network_setters!(
        "It applies to each host, and to each address of a name. 5 seconds by default, or the \
         driver's own `connect_timeout` if that is set.",
        "Waits inside the server count. 5 seconds by default."
    );

    /// Sets the age at which a connection is replaced, 10 minutes by default. After this time at
    /// the latest, the backend notices that a DNS name has moved to another server; it notices at
    /// once that a server has become read-only.
    #[must_use]
    pub fn max_connection_age(mut self, age: Duration) -> Self {
        self.max_connection_age = age;
        self
    }

    /// Sets where fences come from. [`FenceSource::Counter`] by default.
    #[must_use]
    pub fn fences(mut self, source: FenceSource) -> Self {
        self.fences = source;
        self
    }

    /// Returns the SQL that `setup_schema` runs, for migration tools.
    pub fn schema_sql(&self) -> Result<String> {
        Ok(admin::schema_sql(&self.names()?))
    }

    /// Checks the configuration before anything is sent.
    pub(super) fn validate(&self) -> Result<()> {
        self.names()?;
        if self.pool_size == 0 {
            return Err(Error::invalid("pool_size must be at least 1"));
        }
        if self.max_connection_age < Duration::from_millis(10) {
            return Err(Error::invalid("max_connection_age must be at least 10 ms"));
        }
        self.network.validate()
    }

    /// Returns the names of the tables and of their rows.
    pub(super) fn names(&self) -> Result<Names> {
        Names::new(&self.locks_table, &self.fences_table)
    }

    /// Returns where a key's records are, for people who inspect the database.
    pub(crate) fn explain(&self, key: &Key) -> Result<Vec<(&'static str, String)>> {
        let names = self.names()?;
        let (locks, fences) = (names.locks.quoted(), names.fences.quoted());
        let lock_key = names.lock_key(key)?;
        let fence_key = names.fence_key(&lock_key)?;
        let literal = |text: &str| format!("'{}'", text.replace('\'', "''"));
        Ok(vec![
            ("lock", format!("{locks}, key = {}", literal(&lock_key))),
            ("index", format!("{locks}, by lock_id")),
            ("fence", format!("{fences}, fence_key = {}", literal(&fence_key))),
        ])
    }
}

/// Reads the files that the options name.
fn files(options: &mut UrlOptions) -> Result<Files> {
    let mut read = |name| options.take_file(name);
    Ok(Files { root: read("sslrootcert")?, certificate: read("sslcert")?, key: read("sslkey")? })
}

impl fmt::Debug for PostgresConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The driver's configuration may contain a password.
        f.debug_struct("PostgresConfig")
            .field("locks_table", &self.locks_table)
            .field("fences_table", &self.fences_table)
            .field("ssl_mode", &self.ssl_mode)
            .field("pool_size", &self.pool_size)
            .finish_non_exhaustive()
    }
}
