//! A TCP proxy that misbehaves on demand.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

/// What the proxy does to traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Nothing: it passes everything on.
    None,
    /// It waits this long before it passes anything on, in both directions.
    Delay(Duration),
    /// It passes requests on and swallows the replies.
    SwallowReplies,
    /// It swallows everything, in both directions.
    BlackHole,
    /// It resets the connection after this many more bytes of replies.
    ResetAfter(usize),
    /// It closes its sending side towards the client and goes on reading.
    HalfClose,
}

/// A proxy on a free port.
#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    fault: Arc<Mutex<Fault>>,
    to_port: Arc<AtomicU16>,
    /// Connections up to this number lead nowhere.
    stranded: Arc<AtomicU64>,
    accepted: Arc<AtomicU64>,
    accepting: JoinHandle<()>,
}

impl Proxy {
    /// Starts a proxy to a port on 127.0.0.1.
    ///
    /// # Panics
    ///
    /// When there is no free port.
    pub async fn start(to_port: u16) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a free port");
        let address = listener.local_addr().expect("an address");
        let fault = Arc::new(Mutex::new(Fault::None));
        let to_port = Arc::new(AtomicU16::new(to_port));
        let (stranded, accepted) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        let accepting = tokio::spawn({
            let (fault, stranded) = (Arc::clone(&fault), Arc::clone(&stranded));
            let (accepted, target) = (Arc::clone(&accepted), Arc::clone(&to_port));
            async move {
                while let Ok((client, _)) = listener.accept().await {
                    let (fault, stranded) = (Arc::clone(&fault), Arc::clone(&stranded));
                    let number = accepted.fetch_add(1, Ordering::SeqCst) + 1;
                    let to_port = target.load(Ordering::SeqCst);
                    tokio::spawn(async move {
                        if let Ok(server) = TcpStream::connect(("127.0.0.1", to_port)).await {
                            // What it holds back, it holds back on purpose.
                            client.set_nodelay(true).expect("a socket");
                            server.set_nodelay(true).expect("a socket");
                            carry(client, server, &fault, || {
                                number <= stranded.load(Ordering::SeqCst)
                            })
                            .await;
                        }
                    });
                }
            }
        });
        Self { address, fault, to_port, stranded, accepted, accepting }
    }

    /// The port of the proxy.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.address.port()
    }

    /// Sends new connections to another port on 127.0.0.1, like a DNS name that has moved. Those that
    /// are open stay where they are.
    pub fn retarget(&self, to_port: u16) {
        self.to_port.store(to_port, Ordering::SeqCst);
    }

    /// Swallows everything on the connections that there are, for good; new ones work. So does a path
    /// look that has died without a word, when there is another.
    pub fn strand(&self) {
        self.stranded.store(self.accepted.load(Ordering::SeqCst), Ordering::SeqCst);
    }

    /// Misbehaves from now on, on all connections, or behaves again.
    ///
    /// # Panics
    ///
    /// Never; a panic elsewhere does not poison the proxy.
    pub fn set(&self, fault: Fault) {
        *self.fault.lock().expect("no panic inside") = fault;
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

/// Carries bytes both ways until one side ends or a fault ends it.
async fn carry(
    client: TcpStream,
    server: TcpStream,
    fault: &Mutex<Fault>,
    is_stranded: impl Fn() -> bool + Send + Sync,
) {
    let now = || match *fault.lock().expect("no panic inside") {
        _ if is_stranded() => Fault::BlackHole,
        fault => fault,
    };
    let (mut requests, mut replies) = (vec![0; 16_384], vec![0; 16_384]);
    let (mut client, mut server) = (client, server);
    // What was swallowed is missing in the stream, so the connection cannot go on afterwards: like
    // one whose firewall has forgotten it, it ends when it is used again.
    let mut has_gap = false;
    loop {
        tokio::select! {
            read = client.read(&mut requests) => {
                let Ok(count @ 1..) = read else { return };
                match now() {
                    Fault::BlackHole => {
                        has_gap = true;
                        continue;
                    }
                    Fault::SwallowReplies => {}
                    _ if has_gap => return,
                    Fault::Delay(by) => tokio::time::sleep(by).await,
                    _ => {}
                }
                if server.write_all(&requests[..count]).await.is_err() {
                    return;
                }
            }
            read = server.read(&mut replies) => {
                let Ok(count @ 1..) = read else { return };
                match now() {
                    Fault::BlackHole | Fault::SwallowReplies => {
                        has_gap = true;
                        continue;
                    }
                    _ if has_gap => return,
                    Fault::Delay(by) => tokio::time::sleep(by).await,
                    Fault::ResetAfter(bytes) if bytes < count => {
                        // Whatever happens to the part, the connection ends here, with a reset.
                        drop(client.write_all(&replies[..bytes]).await);
                        drop(client.set_zero_linger());
                        return;
                    }
                    Fault::ResetAfter(bytes) => {
                        *fault.lock().expect("no panic inside") = Fault::ResetAfter(bytes - count);
                    }
                    Fault::HalfClose => {
                        drop(client.shutdown().await);
                        continue;
                    }
                    Fault::None => {}
                }
                if client.write_all(&replies[..count]).await.is_err() {
                    return;
                }
            }
        }
    }
}
