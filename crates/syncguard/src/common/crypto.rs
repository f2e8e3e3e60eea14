//! Which implementation of cryptography TLS uses.

#[cfg(feature = "redis")]
use std::sync::Arc;

use rustls::crypto::{CryptoProvider, ring};

/// Chooses one, unless the program has chosen one.
pub(crate) fn install() {
    if CryptoProvider::get_default().is_none() {
        // If somebody was faster, theirs is used.
        drop(ring::default_provider().install_default());
    }
}

/// The one that the program has chosen, or ours. Chooses nothing for the process.
#[cfg(feature = "redis")]
pub(crate) fn provider() -> Arc<CryptoProvider> {
    CryptoProvider::get_default().cloned().unwrap_or_else(|| Arc::new(ring::default_provider()))
}
