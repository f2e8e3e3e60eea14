//! TLS, with the meaning of libpq's `sslmode`.

use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, Error as TlsError, RootCertStore,
    SignatureScheme,
};
use tokio_postgres_rustls::MakeRustlsConnect;

use crate::common::crypto;
use crate::common::error::{Error, ErrorCode, Result};

/// Whether to use TLS, and how to verify the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SslMode {
    Disable,
    /// TLS if the server offers it; an attacker in the middle can prevent it.
    Prefer,
    /// TLS with any server; with a root certificate, the same as `VerifyCa`.
    Require,
    /// TLS with a server whose certificate is signed by a trusted authority.
    VerifyCa,
    /// The same, and the certificate must be for the host in the URL.
    VerifyFull,
}

impl SslMode {
    pub(super) fn parse(text: &str) -> Result<Self> {
        match text {
            "disable" => Ok(Self::Disable),
            "prefer" => Ok(Self::Prefer),
            "require" => Ok(Self::Require),
            "verify-ca" => Ok(Self::VerifyCa),
            "verify-full" => Ok(Self::VerifyFull),
            _ => Err(Error::invalid(
                "invalid sslmode; expected disable, prefer, require, verify-ca or verify-full",
            )),
        }
    }

    /// Returns the closest mode that the driver knows.
    pub(super) fn of_driver(self) -> tokio_postgres::config::SslMode {
        match self {
            Self::Disable => tokio_postgres::config::SslMode::Disable,
            Self::Prefer => tokio_postgres::config::SslMode::Prefer,
            Self::Require | Self::VerifyCa | Self::VerifyFull => {
                tokio_postgres::config::SslMode::Require
            }
        }
    }
}

/// The contents of the PEM files for TLS.
#[derive(Clone, Default)]
pub(super) struct Files {
    pub(super) root: Option<Vec<u8>>,
    pub(super) certificate: Option<Vec<u8>>,
    pub(super) key: Option<Vec<u8>>,
}

/// Creates the TLS connector for a mode.
pub(super) fn connector(mode: SslMode, files: &Files) -> Result<MakeRustlsConnect> {
    let provider = crypto::provider();
    let unreadable = |what: &str| Error::invalid(format!("{what} must be a valid PEM file"));
    let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(|_cause| Error::invalid("the crypto provider supports neither TLS 1.2 nor 1.3"))?;
    // Without a root certificate `require` verifies nothing, as in libpq.
    let asks_nothing = match mode {
        SslMode::Disable | SslMode::Prefer => true,
        SslMode::Require => files.root.is_none(),
        SslMode::VerifyCa | SslMode::VerifyFull => false,
    };
    let builder = if asks_nothing {
        let verifier = Verifier { inner: None, provider };
        builder.dangerous().with_custom_certificate_verifier(Arc::new(verifier))
    } else {
        let roots = Arc::new(roots(files.root.as_deref())?);
        let inner = WebPkiServerVerifier::builder_with_provider(roots, Arc::clone(&provider))
            .build()
            .map_err(|_cause| {
                Error::new(
                    ErrorCode::ServiceUnavailable,
                    "there are no trusted root certificates; set sslrootcert",
                )
                .without_effect()
            })?;
        if mode == SslMode::VerifyFull {
            builder.dangerous().with_custom_certificate_verifier(inner)
        } else {
            let verifier = Verifier { inner: Some(inner), provider };
            builder.dangerous().with_custom_certificate_verifier(Arc::new(verifier))
        }
    };
    let config = match (&files.certificate, &files.key) {
        (Some(certificate), Some(key)) => {
            let chain: std::result::Result<Vec<_>, _> =
                CertificateDer::pem_slice_iter(certificate).collect();
            let chain = chain.map_err(|_cause| unreadable("sslcert"))?;
            let key = PrivateKeyDer::from_pem_slice(key).map_err(|_cause| unreadable("sslkey"))?;
            builder.with_client_auth_cert(chain, key).map_err(|_cause| unreadable("sslcert"))?
        }
        (None, None) => builder.with_no_client_auth(),
        _ => return Err(Error::invalid("set both \"sslcert\" and \"sslkey\", or neither")),
    };
    Ok(MakeRustlsConnect::new(config))
}

/// Returns the trusted root certificates: those of the file, or of this machine.
fn roots(file: Option<&[u8]>) -> Result<RootCertStore> {
    let mut roots = RootCertStore::empty();
    let Some(file) = file else {
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        return Ok(roots);
    };
    for certificate in CertificateDer::pem_slice_iter(file) {
        let added = certificate.ok().and_then(|certificate| roots.add(certificate).ok());
        added.ok_or_else(|| Error::invalid("sslrootcert must be a valid PEM file"))?;
    }
    Ok(roots)
}

/// Verifies less than the whole certificate: nothing, or only who signed it.
#[derive(Debug)]
struct Verifier {
    inner: Option<Arc<WebPkiServerVerifier>>,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> std::result::Result<ServerCertVerified, TlsError> {
        let Some(inner) = &self.inner else { return Ok(ServerCertVerified::assertion()) };
        match inner.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now) {
            Err(TlsError::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            )) => Ok(ServerCertVerified::assertion()),
            verified => verified,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, TlsError> {
        rustls::crypto::verify_tls12_signature(
            message,
            cert,
            dss,
            &self.provider.signature_verification_algorithms,
        )
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, TlsError> {
        rustls::crypto::verify_tls13_signature(
            message,
            cert,
            dss,
            &self.provider.signature_verification_algorithms,
        )
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
