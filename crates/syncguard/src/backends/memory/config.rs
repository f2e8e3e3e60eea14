//! What can be chosen about the memory backend.

use std::sync::Arc;

use crate::common::clock::{Clock, MonotonicClock};
use crate::common::error::{Error, Result};
use crate::common::url_options::UrlOptions;

/// What can be chosen about a [`MemoryBackend`](super::MemoryBackend).
///
/// ```
/// use std::{sync::Arc, time::Duration};
/// use syncguard::{ManualClock, MemoryBackend, memory::MemoryConfig};
///
/// let clock = Arc::new(ManualClock::default());
/// let backend = MemoryBackend::with_config(MemoryConfig::default().clock(clock.clone()));
/// clock.advance(Duration::from_secs(60)); // every lock of up to 59 seconds is dead now
/// ```
#[derive(Clone, Debug)]
pub struct MemoryConfig {
    pub(super) clock: Arc<dyn Clock>,
    pub(super) cleanup_in_is_locked: bool,
}

impl MemoryConfig {
    /// By a URL, which is `memory:` with the option `cleanup_in_is_locked`.
    pub fn from_url(url: &str) -> Result<Self> {
        let (address, mut options) = UrlOptions::split(url)?;
        if address != "memory:" {
            return Err(Error::invalid("the URL of locks in memory is memory: and nothing more"));
        }
        let enabled = options.take_as("cleanup_in_is_locked", "true or false")?;
        options.finish("cleanup_in_is_locked")?;
        Ok(Self::default().cleanup_in_is_locked(enabled.unwrap_or(false)))
    }

    /// Decides liveness by this clock instead of a [`MonotonicClock`].
    #[must_use]
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = clock;
        self
    }

    /// Lets `is_locked` delete a record that has been dead for a while. Off unless asked for;
    /// fence counters stay in any case.
    #[must_use]
    pub fn cleanup_in_is_locked(mut self, enabled: bool) -> Self {
        self.cleanup_in_is_locked = enabled;
        self
    }
}

impl Default for MemoryConfig {
    fn default() -> Self {
        Self { clock: Arc::new(MonotonicClock::new()), cleanup_in_is_locked: false }
    }
}
