//! TLS as libpq's `sslmode` says it.

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

/// What is asked of the server's side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SslMode {
    Disable,
    /// TLS if the server offers it; whoever sits between can prevent it.
    Prefer,
    /// TLS, with whomever.
    Require,
    /// TLS with a server that somebody trusted vouches for.
    VerifyCa,
    /// The same, and its name must be the one that was asked for.
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
            _ => {
                Err(Error::invalid("sslmode is disable, prefer, require, verify-ca or verify-full"))
            }
        }
    }

    /// As far as the driver knows it.
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

/// PEM files that belong to TLS.
#[derive(Clone, Default)]
pub(super) struct Files {
    pub(super) root: Option<Vec<u8>>,
    pub(super) certificate: Option<Vec<u8>>,
    pub(super) key: Option<Vec<u8>>,
}

/// What connects with TLS in this mode.
pub(super) fn connector(mode: SslMode, files: &Files) -> Result<MakeRustlsConnect> {
    let provider = crypto::provider();
    let unreadable = |what: &str| Error::invalid(format!("{what} is no PEM file of that kind"));
    let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(|_cause| {
            Error::invalid("the process's provider of cryptography has no version of TLS")
        })?;
    // Without a root certificate `require` asks nothing, as libpq has it.
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
                Error::new(ErrorCode::ServiceUnavailable, "there are no trusted root certificates")
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
        _ => return Err(Error::invalid("\"sslcert\" and \"sslkey\" go together")),
    };
    Ok(MakeRustlsConnect::new(config))
}

/// The certificates that are trusted: of the file, or of this machine.
fn roots(file: Option<&[u8]>) -> Result<RootCertStore> {
    let mut roots = RootCertStore::empty();
    let Some(file) = file else {
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        return Ok(roots);
    };
    for certificate in CertificateDer::pem_slice_iter(file) {
        let added = certificate.ok().and_then(|certificate| roots.add(certificate).ok());
        added.ok_or_else(|| Error::invalid("sslrootcert is no PEM file of certificates"))?;
    }
    Ok(roots)
}

/// Asks less than everything: nothing at all, or only who vouches for the server.
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
