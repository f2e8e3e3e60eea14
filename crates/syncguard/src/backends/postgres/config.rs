//! What can be chosen about the PostgreSQL backend.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio_postgres::config::Host;

use super::callers_pool::ClientPool;
use super::names::Names;
use super::schema;
use super::tls::{Files, SslMode};
use crate::common::error::{Error, Result};
use crate::common::key::Key;
use crate::common::url_options::UrlOptions;

const OPTIONS: &str = "locks_table, fences_table, pool_size, pooler, response_timeout_ms, \
                       connect_timeout_ms, max_connection_age_ms, cleanup_in_is_locked, sslmode, sslrootcert, sslcert, \
                       sslkey, and those of libpq that the driver knows";

/// Options of libpq that are the driver's business.
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

/// What can be chosen about a [`PostgresBackend`](super::PostgresBackend).
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
    /// Where clients come from instead, if the caller has a pool.
    pub(super) pool: Option<Arc<dyn ClientPool>>,
    pub(super) ssl_mode: SslMode,
    pub(super) files: Files,
    locks_table: String,
    fences_table: String,
    pub(super) pool_size: usize,
    pub(super) is_pooled: bool,
    pub(super) connect_timeout: Duration,
    pub(super) response_timeout: Duration,
    pub(super) max_connection_age: Duration,
    pub(super) cleanup_in_is_locked: bool,
}

impl PostgresConfig {
    /// The table of locks unless told otherwise.
    pub const DEFAULT_LOCKS_TABLE: &'static str = "syncguard_locks";
    /// The table of fence counters unless told otherwise.
    pub const DEFAULT_FENCES_TABLE: &'static str = "syncguard_fence_counters";

    /// A server by its URL: `postgres://user:password@host:5432/database`, with the options that
    /// libpq has (`sslmode`, `sslrootcert`, …) and ours: `locks_table`, `fences_table`, `pool_size`,
    /// `pooler`, `connect_timeout_ms`, `response_timeout_ms`, `max_connection_age_ms`,
    /// `cleanup_in_is_locked`. An unknown option is an error.
    ///
    /// `sslmode` is `verify-full` unless the server is on this machine: `prefer`, the default of
    /// libpq, lets whoever sits between turn TLS off.
    ///
    /// The message of the error does not repeat the URL, which may hold a password.
    pub fn from_url(url: &str) -> Result<Self> {
        let no_url = || {
            Error::invalid(
                "this is no URL of a PostgreSQL server; it looks like postgres://user@host/database",
            )
        };
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
        // The driver wants %20, not the plus sign of forms.
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
        if let Some(size) = options.take_as("pool_size", "number of connections")? {
            config = config.pool_size(size);
        }
        if let Some(is_pooled) = options.take_as("pooler", "true or false")? {
            config = config.behind_pooler(is_pooled);
        }
        if let Some(timeout) = options.take_millis("connect_timeout_ms")? {
            config = config.connect_timeout(timeout);
        }
        if let Some(timeout) = options.take_millis("response_timeout_ms")? {
            config = config.response_timeout(timeout);
        }
        if let Some(age) = options.take_millis("max_connection_age_ms")? {
            config = config.max_connection_age(age);
        }
        if let Some(enabled) = options.take_as("cleanup_in_is_locked", "true or false")? {
            config = config.cleanup_in_is_locked(enabled);
        }
        options.finish(OPTIONS)?;
        Ok(config)
    }

    /// The driver's own configuration. TLS is as by [`from_url`](Self::from_url): verified unless the
    /// server is on this machine or the driver is told to do without.
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
        // An address beside the name is where the connection goes.
        let is_here = !driver.get_hosts().is_empty()
            && driver.get_hosts().iter().all(is_here)
            && driver.get_hostaddrs().iter().all(std::net::IpAddr::is_loopback);
        let ssl_mode = match (driver.get_ssl_mode(), is_here) {
            (tokio_postgres::config::SslMode::Disable, _) => SslMode::Disable,
            (tokio_postgres::config::SslMode::Require, true) => SslMode::Require,
            (_, true) => SslMode::Prefer,
            (_, false) => SslMode::VerifyFull,
        };
        let connect_timeout =
            driver.get_connect_timeout().copied().unwrap_or(Duration::from_secs(5));
        Self {
            ssl_mode,
            driver,
            pool: None,
            files: Files::default(),
            locks_table: Self::DEFAULT_LOCKS_TABLE.to_owned(),
            fences_table: Self::DEFAULT_FENCES_TABLE.to_owned(),
            pool_size: 8,
            is_pooled: false,
            connect_timeout,
            response_timeout: Duration::from_secs(5),
            max_connection_age: Duration::from_mins(10),
            cleanup_in_is_locked: false,
        }
    }

    /// A pool of the caller's own. Waiters poll, because nothing can be listened to through it; and a
    /// release waits for a client like everybody else.
    #[must_use]
    pub fn from_pool(pool: impl ClientPool) -> Self {
        let mut config = Self::from_driver(tokio_postgres::Config::new()).behind_pooler(true);
        config.ssl_mode = SslMode::Disable;
        config.pool = Some(Arc::new(pool));
        config
    }

    /// The tables of locks and of fence counters, each perhaps with a schema and a dot before it.
    #[must_use]
    pub fn tables(mut self, locks: impl Into<String>, fences: impl Into<String>) -> Self {
        self.locks_table = locks.into();
        self.fences_table = fences.into();
        self
    }

    /// How many connections there are at most. One more is kept for releases and extends, so that
    /// acquires cannot hold them up, and one for wake-ups once somebody waits. Eight unless told
    /// otherwise.
    #[must_use]
    pub fn pool_size(mut self, size: usize) -> Self {
        self.pool_size = size;
        self
    }

    /// Says that a pooler in transaction mode stands between us and the server (PgBouncer, say):
    /// nothing is prepared, and waiters poll. It is noticed without being said, one error later.
    #[must_use]
    pub fn behind_pooler(mut self, is_pooled: bool) -> Self {
        self.is_pooled = is_pooled;
        self
    }

    /// How long connecting may take: to each host, and to each address of a name. 5 seconds by
    /// default, or the driver's own `connect_timeout` where that is set.
    #[must_use]
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// How long an operation may take, waiting inside the server included. Five seconds unless told
    /// otherwise.
    #[must_use]
    pub fn response_timeout(mut self, timeout: Duration) -> Self {
        self.response_timeout = timeout;
        self
    }

    /// How old a connection may get before it is replaced, 10 minutes by default. A DNS name that has
    /// moved to another server is noticed after this time at the latest; a server that has become
    /// read-only is noticed at once.
    #[must_use]
    pub fn max_connection_age(mut self, age: Duration) -> Self {
        self.max_connection_age = age;
        self
    }

    /// Lets `is_locked` delete a record that has been dead for a while, on the side. Off unless
    /// asked for; fence counters stay in any case.
    #[must_use]
    pub fn cleanup_in_is_locked(mut self, enabled: bool) -> Self {
        self.cleanup_in_is_locked = enabled;
        self
    }

    /// The SQL that `setup_schema` runs, for migration tools.
    pub fn schema_sql(&self) -> Result<String> {
        Ok(schema::sql(&self.names()?))
    }

    /// Refuses what cannot work, before anything is sent.
    pub(super) fn validate(&self) -> Result<()> {
        self.names()?;
        if self.pool_size == 0 {
            return Err(Error::invalid("pool_size must be at least 1"));
        }
        let shortest = Duration::from_millis(10);
        if [self.connect_timeout, self.response_timeout, self.max_connection_age]
            .iter()
            .any(|time| *time < shortest)
        {
            return Err(Error::invalid(
                "timeouts and the maximum age of connections must be at least 10 ms",
            ));
        }
        Ok(())
    }

    /// The names of the tables and of their rows.
    pub(super) fn names(&self) -> Result<Names> {
        Names::new(&self.locks_table, &self.fences_table)
    }

    /// Where the records of a key are, for people who look into the database.
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

/// What the files hold that the options name.
fn files(options: &mut UrlOptions) -> Result<Files> {
    let mut read = |name| options.take_file(name);
    Ok(Files { root: read("sslrootcert")?, certificate: read("sslcert")?, key: read("sslkey")? })
}

impl fmt::Debug for PostgresConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Where the server is may hold a password.
        f.debug_struct("PostgresConfig")
            .field("locks_table", &self.locks_table)
            .field("fences_table", &self.fences_table)
            .field("ssl_mode", &self.ssl_mode)
            .field("pool_size", &self.pool_size)
            .finish_non_exhaustive()
    }
}
