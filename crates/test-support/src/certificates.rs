//! Certificates that are made for a test.

use std::path::Path;

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};

use crate::process::TempDir;

/// An authority, a certificate for a server on this machine and one for a client, as PEM files:
/// `ca.pem`, `server.pem`, `server.key`, `client.pem`, `client.key`.
#[derive(Debug)]
pub struct Certificates {
    folder: TempDir,
}

impl Certificates {
    /// Makes them.
    ///
    /// # Panics
    ///
    /// When there is no room for them.
    #[must_use]
    pub fn new() -> Self {
        let folder = TempDir::new();
        let write = |name: &str, text: String| {
            std::fs::write(folder.path().join(name), text).expect("a file of ours");
        };
        let key = KeyPair::generate().expect("randomness");
        let mut authority = CertificateParams::new([]).expect("no names");
        authority.distinguished_name.push(DnType::CommonName, "an authority for tests");
        authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        write("ca.pem", authority.self_signed(&key).expect("a key of ours").pem());
        let issuer = Issuer::new(authority, key);
        for (who, names) in [("server", ["localhost", "127.0.0.1"]), ("client", ["app", "client"])]
        {
            let key = KeyPair::generate().expect("randomness");
            let mut params = CertificateParams::new(names.map(str::to_owned)).expect("names");
            params.distinguished_name.push(DnType::CommonName, who);
            let certificate = params.signed_by(&key, &issuer).expect("a key of ours");
            write(&format!("{who}.pem"), certificate.pem());
            write(&format!("{who}.key"), key.serialize_pem());
        }
        Self { folder }
    }

    /// Where one of the files is.
    #[must_use]
    pub fn path(&self, name: &str) -> String {
        Path::new(self.folder.path()).join(name).display().to_string()
    }
}

impl Default for Certificates {
    fn default() -> Self {
        Self::new()
    }
}
