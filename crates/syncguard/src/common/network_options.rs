//! The options of every backend with a server.

use std::ops::RangeInclusive;
use std::time::Duration;

use super::error::{Error, Result};
use super::url_options::UrlOptions;

/// Timeouts, and whether `is_locked` cleans up.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NetworkOptions {
    pub(crate) connect_timeout: Duration,
    pub(crate) response_timeout: Duration,
    pub(crate) cleanup_in_is_locked: bool,
}

impl NetworkOptions {
    /// Creates options with one timeout for connecting and for responses, without cleanup.
    pub(crate) const fn new(timeout: Duration) -> Self {
        Self { connect_timeout: timeout, response_timeout: timeout, cleanup_in_is_locked: false }
    }

    /// Takes these options from a URL.
    pub(crate) fn take(&mut self, options: &mut UrlOptions) -> Result<()> {
        if let Some(timeout) = options.take_millis("connect_timeout_ms")? {
            self.connect_timeout = timeout;
        }
        if let Some(timeout) = options.take_millis("response_timeout_ms")? {
            self.response_timeout = timeout;
        }
        if let Some(enabled) = options.take_as("cleanup_in_is_locked", "true or false")? {
            self.cleanup_in_is_locked = enabled;
        }
        Ok(())
    }

    /// Fails if a timeout is out of range.
    pub(crate) fn validate(&self) -> Result<()> {
        const TIMEOUTS: RangeInclusive<Duration> =
            Duration::from_millis(10)..=Duration::from_hours(24);
        if TIMEOUTS.contains(&self.connect_timeout) && TIMEOUTS.contains(&self.response_timeout) {
            return Ok(());
        }
        Err(Error::invalid("timeouts must be between 10 ms and 24 hours"))
    }
}

/// Defines the setters of these options, for a configuration with a `network` field. The literals
/// add what is specific to the backend, such as the default.
macro_rules! network_setters {
    ($connect:literal, $response:literal) => {
        /// Sets how long connecting may take.
        #[doc = $connect]
        #[must_use]
        pub fn connect_timeout(mut self, timeout: Duration) -> Self {
            self.network.connect_timeout = timeout;
            self
        }

        /// Sets how long the server may take to respond.
        #[doc = $response]
        #[must_use]
        pub fn response_timeout(mut self, timeout: Duration) -> Self {
            self.network.response_timeout = timeout;
            self
        }

        /// Lets `is_locked` delete a record that expired more than two seconds ago, in the
        /// background. Off by default; fence counters are never deleted.
        #[must_use]
        pub fn cleanup_in_is_locked(mut self, enabled: bool) -> Self {
            self.network.cleanup_in_is_locked = enabled;
            self
        }
    };
}
pub(crate) use network_setters;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_options_are_taken_and_both_timeouts_have_bounds() {
        let url = "x:?connect_timeout_ms=20&response_timeout_ms=30&cleanup_in_is_locked=true";
        let (_, mut options) = UrlOptions::split(url).expect("a URL");
        let mut network = NetworkOptions::new(Duration::from_secs(1));
        network.take(&mut options).expect("valid");
        options.finish("").expect("nothing is left");
        assert_eq!(network.connect_timeout, Duration::from_millis(20));
        assert_eq!(network.response_timeout, Duration::from_millis(30));
        assert!(network.cleanup_in_is_locked);
        for (connect_ms, response_ms, is_valid) in
            [(10, 86_400_000, true), (9, 10, false), (10, 9, false), (86_400_001, 10, false)]
        {
            network.connect_timeout = Duration::from_millis(connect_ms);
            network.response_timeout = Duration::from_millis(response_ms);
            assert_eq!(network.validate().is_ok(), is_valid, "{connect_ms} {response_ms}");
        }
    }
}
