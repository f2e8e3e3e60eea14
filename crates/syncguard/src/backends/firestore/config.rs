//! What can be chosen about the Firestore backend.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use google_cloud_auth::credentials::Credentials;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::{Service, http};
use tower::BoxError;
use tower::util::BoxCloneSyncService;

use super::clock_check::Limits;
use super::names::Names;
use crate::common::clock::{Clock, SystemClock};
use crate::common::error::{Error, Result};
use crate::common::key::Key;
use crate::common::url_options::UrlOptions;

const OPTIONS: &str = "locks_collection, fences_collection, emulator, clock_check, \
                       response_timeout_ms, connect_timeout_ms, cleanup_in_is_locked";

/// What carries requests to Firestore.
pub(super) type Transport = BoxCloneSyncService<http::Request<Body>, http::Response<Body>, Status>;

/// What can be chosen about a [`FirestoreBackend`](super::FirestoreBackend).
///
/// ```
/// use syncguard::firestore::FirestoreConfig;
///
/// let config = FirestoreConfig::new("my-project")
///     .database("locks")
///     .collections("locks", "fence_counters");
/// # let _ = config;
/// ```
#[derive(Clone)]
pub struct FirestoreConfig {
    project: String,
    database: String,
    locks_collection: String,
    fences_collection: String,
    /// Host and port, if it is not the real one.
    pub(super) emulator: Option<String>,
    pub(super) credentials: Option<Credentials>,
    /// Instead of a channel of our own.
    pub(super) transport: Option<Transport>,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) clock_limits: Option<Limits>,
    pub(super) connect_timeout: Duration,
    pub(super) response_timeout: Duration,
    pub(super) cleanup_in_is_locked: bool,
}

impl FirestoreConfig {
    /// The database unless told otherwise.
    pub const DEFAULT_DATABASE: &'static str = "(default)";
    /// The collection of locks unless told otherwise.
    pub const DEFAULT_LOCKS_COLLECTION: &'static str = "locks";
    /// The collection of fence counters unless told otherwise.
    pub const DEFAULT_FENCES_COLLECTION: &'static str = "fence_counters";

    /// A project's default database. Credentials are found as every Google client finds them; where
    /// the environment has `FIRESTORE_EMULATOR_HOST`, that is used, without credentials.
    #[must_use]
    pub fn new(project: impl Into<String>) -> Self {
        let emulator = std::env::var("FIRESTORE_EMULATOR_HOST").ok();
        Self {
            project: project.into(),
            database: Self::DEFAULT_DATABASE.to_owned(),
            locks_collection: Self::DEFAULT_LOCKS_COLLECTION.to_owned(),
            fences_collection: Self::DEFAULT_FENCES_COLLECTION.to_owned(),
            emulator: emulator.filter(|host| !host.is_empty()),
            credentials: None,
            transport: None,
            clock: Arc::new(SystemClock),
            clock_limits: Some(Limits::default()),
            connect_timeout: Duration::from_secs(5),
            response_timeout: Duration::from_secs(5),
            cleanup_in_is_locked: false,
        }
    }

    /// A database by its URL: `firestore://project`, or `firestore://project/database`. Without a
    /// project, as in `firestore:`, the environment's `GOOGLE_CLOUD_PROJECT` names it.
    ///
    /// Options: `locks_collection`, `fences_collection`, `emulator` (host and port), `clock_check`
    /// (`true` or `false`), `connect_timeout_ms`, `response_timeout_ms`, `cleanup_in_is_locked`. An
    /// unknown one is an error.
    pub fn from_url(url: &str) -> Result<Self> {
        let (address, mut options) = UrlOptions::split(url)?;
        let path = address.strip_prefix("firestore:").ok_or_else(|| {
            Error::invalid(
                "this is no URL of Firestore; it looks like firestore://project/database",
            )
        })?;
        let path = path.strip_prefix("//").unwrap_or(path).trim_end_matches('/');
        let (project, database) = path.split_once('/').unwrap_or((path, Self::DEFAULT_DATABASE));
        let project = if project.is_empty() {
            std::env::var("GOOGLE_CLOUD_PROJECT").map_err(|_cause| {
                Error::invalid(
                    "the URL names no project, and neither does GOOGLE_CLOUD_PROJECT; it looks like \
                     firestore://project/database",
                )
            })?
        } else {
            project.to_owned()
        };
        let mut config = Self::new(project).database(database);
        let locks = options.take("locks_collection")?;
        let fences = options.take("fences_collection")?;
        config = config.collections(
            locks.as_deref().unwrap_or(Self::DEFAULT_LOCKS_COLLECTION),
            fences.as_deref().unwrap_or(Self::DEFAULT_FENCES_COLLECTION),
        );
        if let Some(host) = options.take("emulator")? {
            config = config.emulator(host);
        }
        if options.take_as("clock_check", "true or false")? == Some(false) {
            config = config.without_clock_check();
        }
        if let Some(timeout) = options.take_millis("connect_timeout_ms")? {
            config = config.connect_timeout(timeout);
        }
        if let Some(timeout) = options.take_millis("response_timeout_ms")? {
            config = config.response_timeout(timeout);
        }
        if let Some(enabled) = options.take_as("cleanup_in_is_locked", "true or false")? {
            config = config.cleanup_in_is_locked(enabled);
        }
        options.finish(OPTIONS)?;
        config.names()?;
        Ok(config)
    }

    /// Another database than the default one.
    #[must_use]
    pub fn database(mut self, database: impl Into<String>) -> Self {
        self.database = database.into();
        self
    }

    /// The collections of locks and of fence counters. They must differ.
    #[must_use]
    pub fn collections(mut self, locks: impl Into<String>, fences: impl Into<String>) -> Self {
        self.locks_collection = locks.into();
        self.fences_collection = fences.into();
        self
    }

    /// An emulator by its host and port, as `FIRESTORE_EMULATOR_HOST` names it: without TLS and
    /// without credentials.
    #[must_use]
    pub fn emulator(mut self, host: impl Into<String>) -> Self {
        self.emulator = Some(host.into());
        self
    }

    /// Credentials of the caller's own, instead of those that every Google client finds. Install a
    /// rustls `CryptoProvider` before you build them; `google-cloud-auth` panics without one.
    #[must_use]
    pub fn credentials(mut self, credentials: Credentials) -> Self {
        self.credentials = Some(credentials);
        self
    }

    /// A channel of the caller's own: a `tonic` one, or anything around it, to count requests or to
    /// trace them. Whether it needs credentials is as without it.
    #[must_use]
    pub fn channel<C>(mut self, channel: C) -> Self
    where
        C: Service<http::Request<Body>, Response = http::Response<Body>>,
        C: Clone + Send + Sync + 'static,
        C::Error: Into<BoxError>,
        C::Future: Send + 'static,
    {
        self.transport = Some(boxed(channel));
        self
    }

    /// The clock that decides whether a lock is alive: this machine's unless told otherwise.
    #[must_use]
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = clock;
        self
    }

    /// How far the clock may be off the server's, the uncertainty of the comparison included: above
    /// the first a warning is logged, above the second nothing is granted or extended. 250 and 500
    /// milliseconds unless told otherwise: two clients may err in opposite directions, and the
    /// tolerance is a second.
    #[must_use]
    pub fn clock_limits(mut self, warn: Duration, refuse: Duration) -> Self {
        self.clock_limits = Some(Limits { warn, refuse });
        self
    }

    /// Trusts the clock without looking. Then somebody else must.
    #[must_use]
    pub fn without_clock_check(mut self) -> Self {
        self.clock_limits = None;
        self
    }

    /// How long connecting may take. Five seconds unless told otherwise.
    #[must_use]
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// How long one request may take; an operation is one or two of them, or a few when others are
    /// at the same lock. Five seconds unless told otherwise.
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

    /// The names of the documents; refuses what makes no sense.
    pub(super) fn names(&self) -> Result<Names> {
        let possible = Duration::from_millis(10)..=Duration::from_hours(1);
        if !possible.contains(&self.connect_timeout) || !possible.contains(&self.response_timeout) {
            return Err(Error::invalid("timeouts must be between 10 ms and an hour"));
        }
        if self.clock_limits.is_some_and(|limits| limits.refuse.is_zero()) {
            return Err(Error::invalid("no clock is never off at all; allow some milliseconds"));
        }
        let collections = [self.locks_collection.as_str(), &self.fences_collection];
        Names::new(&self.project, &self.database, collections)
    }

    /// Where the records of a key are, for people who look into the database.
    pub(crate) fn explain(&self, key: &Key) -> Result<Vec<(&'static str, String)>> {
        let names = self.names()?;
        let ([lock, counter], [locks, fences]) = (names.ids(key)?, names.collections());
        Ok(vec![
            ("lock", format!("{locks}/{lock}")),
            ("index", format!("{locks}, by lockId")),
            ("fence", format!("{fences}/{counter}")),
        ])
    }
}

/// Any channel, as one type.
pub(super) fn boxed<C>(channel: C) -> Transport
where
    C: Service<http::Request<Body>, Response = http::Response<Body>>,
    C: Clone + Send + Sync + 'static,
    C::Error: Into<BoxError>,
    C::Future: Send + 'static,
{
    BoxCloneSyncService::new(tower::ServiceExt::map_err(channel, |cause| {
        Status::from_error(cause.into())
    }))
}

impl fmt::Debug for FirestoreConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FirestoreConfig")
            .field("project", &self.project)
            .field("database", &self.database)
            .field("locks_collection", &self.locks_collection)
            .field("fences_collection", &self.fences_collection)
            .field("emulator", &self.emulator)
            .finish_non_exhaustive()
    }
}
