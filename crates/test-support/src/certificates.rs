//! Generates certificates for tests.

use std::path::Path;

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};

use crate::process::TempDir;

/// A certificate authority, a server certificate for this machine and a client certificate, as PEM
/// files: `ca.pem`, `server.pem`, `server.key`, `client.pem`, `client.key`.
#[derive(Debug)]
pub struct Certificates {
    folder: TempDir,
}

impl Certificates {
    /// Generates the certificates.
    ///
    /// # Panics
    ///
    /// Panics if the files cannot be written.
    #[must_use]
    pub fn new() -> Self {
        let folder = TempDir::new();
        let write = |name: &str, text: String| {
            std::fs::write(folder.path().join(name), text).expect("writable");
        };
        let key = KeyPair::generate().expect("randomness");
        let mut authority = CertificateParams::new([]).expect("no names");
        authority.distinguished_name.push(DnType::CommonName, "an authority for tests");
        authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        write("ca.pem", authority.self_signed(&key).expect("a valid key").pem());
        let issuer = Issuer::new(authority, key);
        for (who, names) in [("server", ["localhost", "127.0.0.1"]), ("client", ["app", "client"])]
        {
            let key = KeyPair::generate().expect("randomness");
            let mut params = CertificateParams::new(names.map(str::to_owned)).expect("names");
            params.distinguished_name.push(DnType::CommonName, who);
            let certificate = params.signed_by(&key, &issuer).expect("a valid key");
            write(&format!("{who}.pem"), certificate.pem());
            write(&format!("{who}.key"), key.serialize_pem());
        }
        Self { folder }
    }

    /// Returns the path of a file.
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
