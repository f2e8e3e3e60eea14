//! Which implementation of cryptography TLS uses.

#[cfg(any(feature = "postgres", feature = "redis"))]
use std::sync::Arc;

use rustls::crypto::{CryptoProvider, ring};

/// Chooses one for the process, unless the program has, for drivers that take no other.
#[cfg(any(feature = "firestore", feature = "redis"))]
pub(crate) fn install() {
    if CryptoProvider::get_default().is_none() {
        // If something else was faster, that one is used.
        drop(ring::default_provider().install_default());
    }
}

/// The one that the program has chosen, or ours. Chooses nothing for the process.
#[cfg(any(feature = "postgres", feature = "redis"))]
pub(crate) fn provider() -> Arc<CryptoProvider> {
    CryptoProvider::get_default().cloned().unwrap_or_else(|| Arc::new(ring::default_provider()))
}
