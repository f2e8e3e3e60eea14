//! Which implementation of cryptography TLS uses.

use rustls::crypto::{CryptoProvider, ring};

/// Chooses one, unless the program has chosen one.
pub(crate) fn install() {
    if CryptoProvider::get_default().is_none() {
        // If somebody was faster, theirs is used.
        drop(ring::default_provider().install_default());
    }
}
