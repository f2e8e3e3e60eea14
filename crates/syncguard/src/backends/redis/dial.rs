//! Opens connections over TCP, TLS or a Unix socket.
//!
//! The driver could open them too, but its TLS uses the process's default crypto provider and reads
//! the machine's certificates every time.

use std::io;
use std::sync::Arc;

use redis::aio::MultiplexedConnection;
use redis::{
    AsyncConnectionConfig, Client, ConnectionAddr, ConnectionInfo, ErrorKind, RedisResult,
    TlsCertificates,
};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::task::{AbortHandle, JoinSet};
use tokio_rustls::TlsConnector;

use crate::common::crypto;
use crate::common::error::{Error, Result};

/// A connection, and the task that does its I/O.
#[derive(Clone)]
pub(super) struct Dialed {
    pub(super) connection: MultiplexedConnection,
    /// `None` if the driver has started the task by itself.
    driver: Option<AbortHandle>,
}

impl Dialed {
    /// Returns whether the stream has ended, as far as it is known without sending anything. A
    /// server may close a connection that is idle.
    pub(super) fn is_closed(&self) -> bool {
        self.driver.as_ref().is_some_and(AbortHandle::is_finished)
    }
}

/// Opens connections.
pub(super) struct Dialer {
    tls: Option<TlsConnector>,
}

impl Dialer {
    /// Reads the certificates once; sends nothing.
    pub(super) fn new(is_tls: bool, certificates: Option<&TlsCertificates>) -> Result<Self> {
        let tls = match (is_tls, certificates) {
            (false, None) => None,
            (false, Some(_)) => return Err(Error::invalid("certificates require a rediss:// URL")),
            (true, certificates) => Some(TlsConnector::from(Arc::new(tls(certificates)?))),
        };
        Ok(Self { tls })
    }

    /// Opens a connection and logs in. It has no timeout; the caller sets one.
    pub(super) async fn open(
        &self,
        server: &ConnectionInfo,
        config: AsyncConnectionConfig,
    ) -> RedisResult<Dialed> {
        if has_own_tls(server) {
            let client = Client::open(server.clone())?;
            let connection = client.get_multiplexed_async_connection_with_config(&config).await?;
            return Ok(Dialed { connection, driver: None });
        }
        let stream = self.stream(server.addr()).await?;
        let (connection, driver) =
            MultiplexedConnection::new_with_config(server.redis_settings(), stream, config).await?;
        // The task ends with the last clone of the connection, even if answers are outstanding, or
        // with the stream.
        let driver = Some(tokio::spawn(driver).abort_handle());
        Ok(Dialed { connection, driver })
    }

    /// Opens the stream for a connection.
    pub(super) async fn stream(&self, address: &ConnectionAddr) -> RedisResult<Box<dyn Stream>> {
        match address {
            ConnectionAddr::Tcp(host, port) => Ok(Box::new(tcp(host, *port).await?)),
            ConnectionAddr::TcpTls { host, port, insecure: false, .. } => {
                let no_tls = || (ErrorKind::InvalidClientConfig, "TLS was not prepared");
                let tls = self.tls.as_ref().ok_or_else(no_tls)?;
                let name = ServerName::try_from(host.clone())?;
                let stream = tcp(host, *port).await?;
                Ok(Box::new(tls.connect(name, stream).await?))
            }
            #[cfg(unix)]
            ConnectionAddr::Unix(path) => {
                Ok(Box::new(tokio::net::UnixStream::connect(path).await?))
            }
            _ => Err((ErrorKind::InvalidClientConfig, "unsupported kind of address").into()),
        }
    }
}

/// Returns whether the caller's own client has certificates. Only the driver can read them, so it
/// opens these connections, with the process's default crypto provider.
pub(super) fn has_own_tls(server: &ConnectionInfo) -> bool {
    matches!(server.addr(), ConnectionAddr::TcpTls { tls_params: Some(_), .. })
}

/// Returns the same server without the certificates of the caller's client.
pub(super) fn without_own_tls(server: ConnectionInfo) -> ConnectionInfo {
    match server.addr().clone() {
        ConnectionAddr::TcpTls { host, port, insecure, .. } => {
            server.set_addr(ConnectionAddr::TcpTls { host, port, insecure, tls_params: None })
        }
        _ => server,
    }
}

/// Connects to the address of the host that answers first.
async fn tcp(host: &str, port: u16) -> io::Result<TcpStream> {
    let mut attempts = JoinSet::new();
    for address in tokio::net::lookup_host((host, port)).await? {
        attempts.spawn(TcpStream::connect(address));
    }
    let mut failure = io::Error::from(io::ErrorKind::NotFound);
    while let Some(connected) = attempts.join_next().await {
        match connected {
            Ok(Ok(stream)) => {
                stream.set_nodelay(true)?;
                return Ok(stream);
            }
            Ok(Err(cause)) => failure = cause,
            Err(_ended) => {}
        }
    }
    Err(failure)
}

fn tls(certificates: Option<&TlsCertificates>) -> Result<ClientConfig> {
    let unreadable = |what: &str| Error::invalid(format!("{what} must be a valid PEM file"));
    let mut roots = RootCertStore::empty();
    match certificates.and_then(|certificates| certificates.root_cert.as_deref()) {
        None => {
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        }
        Some(file) => {
            for certificate in CertificateDer::pem_slice_iter(file) {
                let added = certificate.ok().and_then(|found| roots.add(found).ok());
                added.ok_or_else(|| unreadable("the root certificate (tls_ca)"))?;
            }
            if roots.is_empty() {
                return Err(unreadable("the root certificate (tls_ca)"));
            }
        }
    }
    let builder = ClientConfig::builder_with_provider(crypto::provider())
        .with_safe_default_protocol_versions()
        .map_err(|_cause| Error::invalid("the crypto provider supports neither TLS 1.2 nor 1.3"))?
        .with_root_certificates(roots);
    let Some(own) = certificates.and_then(|certificates| certificates.client_tls.as_ref()) else {
        return Ok(builder.with_no_client_auth());
    };
    let chain =
        CertificateDer::pem_slice_iter(&own.client_cert).collect::<std::result::Result<_, _>>();
    let chain = chain.map_err(|_cause| unreadable("the client certificate (tls_cert)"))?;
    let key = PrivateKeyDer::from_pem_slice(&own.client_key)
        .map_err(|_cause| unreadable("the client key (tls_key)"))?;
    builder
        .with_client_auth_cert(chain, key)
        .map_err(|_cause| unreadable("the client certificate (tls_cert)"))
}

/// A stream that a connection can use.
pub(super) trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}
