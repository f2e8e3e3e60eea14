//! The configuration of the Firestore backend.

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
use crate::common::fence_source::FenceSource;
use crate::common::key::Key;
use crate::common::network_options::{NetworkOptions, network_setters};
use crate::common::url_options::UrlOptions;

const OPTIONS: &str = "locks_collection, fences_collection, emulator, clock_check, \
                       response_timeout_ms, connect_timeout_ms, cleanup_in_is_locked, \
                       fences";

/// The service that sends requests to Firestore.
pub(super) type Transport = BoxCloneSyncService<http::Request<Body>, http::Response<Body>, Status>;

/// The configuration of a [`FirestoreBackend`](super::FirestoreBackend).
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
    /// Host and port of an emulator, to use instead of the real service.
    pub(super) emulator: Option<String>,
    pub(super) credentials: Option<Credentials>,
    /// The caller's channel, to use instead of one that the backend opens.
    pub(super) transport: Option<Transport>,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) clock_limits: Option<Limits>,
    pub(super) network: NetworkOptions,
    pub(super) fences: FenceSource,
}

impl FirestoreConfig {
    /// The default database.
    pub const DEFAULT_DATABASE: &'static str = "(default)";
    /// The default collection of locks.
    pub const DEFAULT_LOCKS_COLLECTION: &'static str = "locks";
    /// The default collection of fence counters.
    pub const DEFAULT_FENCES_COLLECTION: &'static str = "fence_counters";

    /// Creates a configuration for a project's default database.
    ///
    /// It uses [Application Default Credentials][ADC]. If the environment variable
    /// `FIRESTORE_EMULATOR_HOST` is set, it uses that emulator, without credentials.
    ///
    /// [ADC]: https://cloud.google.com/docs/authentication/application-default-credentials
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
            network: NetworkOptions::new(Duration::from_secs(5)),
            fences: FenceSource::default(),
        }
    }

    /// Creates a configuration from a URL: `firestore://project` or `firestore://project/database`.
    /// Without a project, as in `firestore:`, the environment variable `GOOGLE_CLOUD_PROJECT` names
    /// it.
    ///
    /// The options are `locks_collection`, `fences_collection`, `emulator` (host and port),
    /// `clock_check` (`true` or `false`), `connect_timeout_ms`, `response_timeout_ms`,
    /// `cleanup_in_is_locked` and `fences` (`counter` or `clock`). An unknown option is an error.
    pub fn from_url(url: &str) -> Result<Self> {
        let (address, mut options) = UrlOptions::split(url)?;
        let path = address.strip_prefix("firestore:").ok_or_else(|| {
            Error::invalid("not a Firestore URL; expected firestore://project/database")
        })?;
        let path = path.strip_prefix("//").unwrap_or(path).trim_end_matches('/');
        let (project, database) = path.split_once('/').unwrap_or((path, Self::DEFAULT_DATABASE));
        let project = if project.is_empty() {
            std::env::var("GOOGLE_CLOUD_PROJECT").map_err(|_cause| {
                Error::invalid(
                    "the Firestore URL has no project, and GOOGLE_CLOUD_PROJECT is not set; \
                     expected firestore://project/database",
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
        config.network.take(&mut options)?;
        config.fences = FenceSource::take(&mut options)?;
        options.finish(OPTIONS)?;
        config.validate()?;
        Ok(config)
    }

    /// Sets the database. [`DEFAULT_DATABASE`](Self::DEFAULT_DATABASE) by default.
    #[must_use]
    pub fn database(mut self, database: impl Into<String>) -> Self {
        self.database = database.into();
        self
    }

    /// Sets the collections of locks and of fence counters. They must differ.
    #[must_use]
    pub fn collections(mut self, locks: impl Into<String>, fences: impl Into<String>) -> Self {
        self.locks_collection = locks.into();
        self.fences_collection = fences.into();
        self
    }

    /// Connects to an emulator instead, by host and port as in `FIRESTORE_EMULATOR_HOST`, without
    /// TLS and without credentials.
    #[must_use]
    pub fn emulator(mut self, host: impl Into<String>) -> Self {
        self.emulator = Some(host.into());
        self
    }

    /// Sets your own credentials, to use instead of Application Default Credentials.
    ///
    /// Install a rustls `CryptoProvider` before you build them: `google-cloud-auth` then requests a
    /// token at once, and panics without a provider.
    ///
    /// ```no_run
    /// use syncguard::firestore::FirestoreConfig;
    /// use syncguard::firestore::google_cloud_auth::credentials::{Builder, impersonated};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// // An error means that a provider is already installed.
    /// drop(rustls::crypto::ring::default_provider().install_default());
    /// let source = Builder::default().build()?;
    /// let credentials = impersonated::Builder::from_source_credentials(source)
    ///     .with_target_principal("locks@my-project.iam.gserviceaccount.com")
    ///     .build()?;
    /// let config = FirestoreConfig::new("my-project").credentials(credentials);
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn credentials(mut self, credentials: Credentials) -> Self {
        self.credentials = Some(credentials);
        self
    }

    /// Sets your own channel: a `tonic` channel, or a service around one that counts or traces
    /// requests. Credentials are sent as without it.
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

    /// Sets the clock that decides whether a lock is live. This machine's clock by default.
    #[must_use]
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = clock;
        self
    }

    /// Sets how far the clock may differ from the server's, including the uncertainty of the
    /// comparison. Above `warn`, the backend logs a warning; above `refuse`, it grants and extends
    /// nothing.
    ///
    /// 250 and 500 milliseconds by default: two clients may be off in opposite directions, and the
    /// tolerance is one second.
    #[must_use]
    pub fn clock_limits(mut self, warn: Duration, refuse: Duration) -> Self {
        self.clock_limits = Some(Limits { warn, refuse });
        self
    }

    /// Turns the clock check off. You must then ensure that all clocks are synchronized.
    #[must_use]
    pub fn without_clock_check(mut self) -> Self {
        self.clock_limits = None;
        self
    }

    /// Sets where fences come from. [`FenceSource::Counter`] by default. The clock is that of this
    /// machine; without the clock check, nothing ensures that it is right.
    #[must_use]
    pub fn fences(mut self, source: FenceSource) -> Self {
        self.fences = source;
        self
    }

    network_setters!(
        "5 seconds by default.",
        "This is per request: an operation is one or two of them, or a few when others use the \
         same lock. 5 seconds by default."
    );

    /// Checks the configuration before anything is sent.
    pub(super) fn validate(&self) -> Result<()> {
        self.network.validate()?;
        if self.clock_limits.is_some_and(|limits| limits.refuse.is_zero()) {
            return Err(Error::invalid("the clock limit must be greater than zero"));
        }
        self.names().map(drop)
    }

    /// Returns the names of the documents.
    pub(super) fn names(&self) -> Result<Names> {
        let collections = [self.locks_collection.as_str(), &self.fences_collection];
        Names::new(&self.project, &self.database, collections)
    }

    /// Returns where the records of a key are, for a person who inspects the database.
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

/// Erases the type of a channel.
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
