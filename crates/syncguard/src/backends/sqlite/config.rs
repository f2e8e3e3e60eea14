//! The configuration of the SQLite backend.

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::common::error::{Error, Result};
use crate::common::fence_source::FenceSource;
use crate::common::key::Key;
use crate::common::url_options::UrlOptions;

/// The configuration of a [`SqliteBackend`](super::SqliteBackend).
///
/// ```
/// use std::time::Duration;
/// use syncguard::sqlite::SqliteConfig;
///
/// let config = SqliteConfig::new("/var/lib/shop/locks.db").busy_timeout(Duration::from_secs(1));
/// ```
#[derive(Clone, Debug)]
pub struct SqliteConfig {
    pub(super) path: PathBuf,
    pub(super) busy_timeout: Duration,
    pub(super) cleanup_in_is_locked: bool,
    pub(super) fences: FenceSource,
}

impl SqliteConfig {
    /// Creates a configuration for a lock file. Opening it creates the file if it does not exist.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            busy_timeout: Duration::from_secs(5),
            cleanup_in_is_locked: false,
            fences: FenceSource::default(),
        }
    }

    /// Creates a configuration from a URL: `sqlite:/path/locks.db`, with the options
    /// `busy_timeout_ms`, `cleanup_in_is_locked` and `fences` (`counter` or `clock`). An unknown
    /// option is an error.
    pub fn from_url(url: &str) -> Result<Self> {
        let (address, mut options) = UrlOptions::split(url)?;
        let path =
            address.strip_prefix("sqlite:").map(|path| path.strip_prefix("//").unwrap_or(path));
        let path = path
            .filter(|path| !path.is_empty())
            .ok_or_else(|| Error::invalid("not a SQLite URL; expected sqlite:/path/locks.db"))?;
        let path = percent_encoding::percent_decode_str(path).decode_utf8();
        let path = path.map_err(|_cause| Error::invalid("the path in the URL is not UTF-8"))?;
        let mut config = Self::new(path.as_ref());
        if let Some(timeout) = options.take_millis("busy_timeout_ms")? {
            config = config.busy_timeout(timeout);
        }
        if let Some(enabled) = options.take_as("cleanup_in_is_locked", "true or false")? {
            config = config.cleanup_in_is_locked(enabled);
        }
        config.fences = FenceSource::take(&mut options)?;
        options.finish("busy_timeout_ms, cleanup_in_is_locked, fences")?;
        Ok(config)
    }

    /// Sets how long an operation may wait while other processes write to the file. 5 seconds by
    /// default.
    #[must_use]
    pub fn busy_timeout(mut self, timeout: Duration) -> Self {
        self.busy_timeout = timeout;
        self
    }

    /// Lets `is_locked` delete a record that expired more than two seconds ago, in the background.
    /// Off by default; fence counters are never deleted.
    #[must_use]
    pub fn cleanup_in_is_locked(mut self, enabled: bool) -> Self {
        self.cleanup_in_is_locked = enabled;
        self
    }

    /// Sets where fences come from. [`FenceSource::Counter`] by default.
    #[must_use]
    pub fn fences(mut self, source: FenceSource) -> Self {
        self.fences = source;
        self
    }

    /// Returns the path of the lock file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns where the records of a key are, for a person who inspects the file.
    pub(crate) fn explain(key: &Key) -> Vec<(&'static str, String)> {
        vec![
            ("lock", format!("syncguard_locks, key = {:?}", key.as_str())),
            ("index", "syncguard_locks, by lock_id".to_owned()),
            ("fence", format!("syncguard_fences, key = {:?}", key.as_str())),
        ]
    }
}
