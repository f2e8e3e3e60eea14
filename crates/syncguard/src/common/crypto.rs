//! The cryptography provider for TLS.

#[cfg(feature = "_listener")]
use std::sync::Arc;

use rustls::crypto::{CryptoProvider, ring};

/// Installs a default provider for the process unless the program has installed one, for drivers
/// that always use the default.
#[cfg(feature = "_default_tls")]
pub(crate) fn install() {
    if CryptoProvider::get_default().is_none() {
        // If another thread installs one first, that one is used.
        drop(ring::default_provider().install_default());
    }
}

/// Returns the provider that the program has installed, or ring. Installs nothing.
#[cfg(feature = "_listener")]
pub(crate) fn provider() -> Arc<CryptoProvider> {
    CryptoProvider::get_default().cloned().unwrap_or_else(|| Arc::new(ring::default_provider()))
}
