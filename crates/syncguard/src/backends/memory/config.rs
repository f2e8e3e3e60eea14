//! The configuration of the memory backend.

use std::sync::Arc;

use crate::common::clock::{Clock, MonotonicClock};
use crate::common::error::{Error, Result};
use crate::common::fence_source::FenceSource;
use crate::common::url_options::UrlOptions;

/// The configuration of a [`MemoryBackend`](super::MemoryBackend).
///
/// ```
/// use std::{sync::Arc, time::Duration};
/// use syncguard::{MemoryBackend, memory::MemoryConfig};
/// use syncguard::backend::ManualClock;
///
/// let clock = Arc::new(ManualClock::default());
/// let backend = MemoryBackend::with_config(MemoryConfig::default().clock(clock.clone()));
/// clock.advance(Duration::from_secs(60)); // locks of up to 59 seconds have expired now
/// ```
#[derive(Clone, Debug)]
pub struct MemoryConfig {
    pub(super) clock: Arc<dyn Clock>,
    pub(super) cleanup_in_is_locked: bool,
    pub(super) fences: FenceSource,
}

impl MemoryConfig {
    /// Creates a configuration from a URL: `memory:`, with the options `cleanup_in_is_locked` and
    /// `fences` (`counter` or `clock`).
    pub fn from_url(url: &str) -> Result<Self> {
        let (address, mut options) = UrlOptions::split(url)?;
        if address != "memory:" {
            return Err(Error::invalid("not a URL of the memory backend; expected memory:"));
        }
        let enabled = options.take_as("cleanup_in_is_locked", "true or false")?;
        let fences = FenceSource::take(&mut options)?;
        options.finish("cleanup_in_is_locked, fences")?;
        Ok(Self::default().cleanup_in_is_locked(enabled.unwrap_or(false)).fences(fences))
    }

    /// Sets the clock that decides whether a lock is live. A [`MonotonicClock`] by default.
    #[must_use]
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = clock;
        self
    }

    /// Lets `is_locked` delete a record that expired more than two seconds ago. Off by default;
    /// fence counters are never deleted.
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
}

impl Default for MemoryConfig {
    fn default() -> Self {
        Self {
            clock: Arc::new(MonotonicClock::new()),
            cleanup_in_is_locked: false,
            fences: FenceSource::default(),
        }
    }
}
