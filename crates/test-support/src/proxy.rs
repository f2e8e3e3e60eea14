//! A TCP proxy that injects faults.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// A fault that the proxy injects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Forwards everything.
    None,
    /// Waits this long before it forwards data, in both directions.
    Delay(Duration),
    /// Forwards requests and drops the replies.
    SwallowReplies,
    /// Forwards replies and drops the requests.
    SwallowRequests,
    /// Drops everything, in both directions.
    BlackHole,
    /// Resets the connection after this many more bytes of replies.
    ResetAfter(usize),
    /// Closes its sending side towards the client and continues to read.
    HalfClose,
}

/// A proxy on a free port.
#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    fault: Arc<Mutex<Fault>>,
    to_port: Arc<AtomicU16>,
    /// All data on connections up to this number is dropped.
    stranded: Arc<AtomicU64>,
    accepted: Arc<AtomicU64>,
    /// Open connections have one receiver each, and end when the value changes.
    cuts: watch::Sender<u64>,
    accepting: JoinHandle<()>,
}

impl Proxy {
    /// Starts a proxy to a port on 127.0.0.1.
    ///
    /// # Panics
    ///
    /// Panics if there is no free port.
    pub async fn start(to_port: u16) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a free port");
        let address = listener.local_addr().expect("an address");
        let fault = Arc::new(Mutex::new(Fault::None));
        let to_port = Arc::new(AtomicU16::new(to_port));
        let (stranded, accepted) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        let cuts = watch::Sender::new(0);
        let accepting = tokio::spawn({
            let (fault, stranded) = (Arc::clone(&fault), Arc::clone(&stranded));
            let (accepted, target) = (Arc::clone(&accepted), Arc::clone(&to_port));
            let cuts = cuts.clone();
            async move {
                while let Ok((client, _)) = listener.accept().await {
                    let (fault, stranded) = (Arc::clone(&fault), Arc::clone(&stranded));
                    let number = accepted.fetch_add(1, Ordering::SeqCst) + 1;
                    let to_port = target.load(Ordering::SeqCst);
                    let cut = cuts.subscribe();
                    tokio::spawn(async move {
                        if let Ok(server) = TcpStream::connect(("127.0.0.1", to_port)).await {
                            // Only the fault delays data, not the kernel.
                            client.set_nodelay(true).expect("a socket");
                            server.set_nodelay(true).expect("a socket");
                            let is_stranded = || number <= stranded.load(Ordering::SeqCst);
                            carry(client, server, cut, &fault, is_stranded).await;
                        }
                    });
                }
            }
        });
        Self { address, fault, to_port, stranded, accepted, cuts, accepting }
    }

    /// Returns the port of the proxy.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.address.port()
    }

    /// Forwards new connections to another port on 127.0.0.1, as after a DNS change. Open
    /// connections are not affected.
    pub fn retarget(&self, to_port: u16) {
        self.to_port.store(to_port, Ordering::SeqCst);
    }

    /// Drops all data on the open connections from now on; new ones work. This simulates a network
    /// path that fails silently while another path works.
    pub fn strand(&self) {
        self.stranded.store(self.accepted.load(Ordering::SeqCst), Ordering::SeqCst);
    }

    /// Resets all open connections, and returns how many there were.
    #[expect(clippy::must_use_candidate, reason = "it is called for its effect")]
    pub fn cut(&self) -> usize {
        let open = self.cuts.receiver_count();
        self.cuts.send_modify(|cuts| *cuts += 1);
        open
    }

    /// Sets the fault for all connections; [`Fault::None`] ends it.
    ///
    /// # Panics
    ///
    /// Never panics, because no code panics while it holds the mutex.
    pub fn set(&self, fault: Fault) {
        *self.fault.lock().expect("no panic inside") = fault;
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

/// Forwards data in both directions until one side closes or a fault ends the connection.
async fn carry(
    client: TcpStream,
    server: TcpStream,
    mut cut: watch::Receiver<u64>,
    fault: &Mutex<Fault>,
    is_stranded: impl Fn() -> bool + Send + Sync,
) {
    let now = || match *fault.lock().expect("no panic inside") {
        _ if is_stranded() => Fault::BlackHole,
        fault => fault,
    };
    let (mut requests, mut replies) = (vec![0; 16_384], vec![0; 16_384]);
    let (mut client, mut server) = (client, server);
    // Dropped data is missing in the stream, so the connection cannot continue afterwards. It
    // closes when it is used again, like a connection that a firewall no longer knows.
    let mut has_gap = false;
    loop {
        tokio::select! {
            // The proxy is gone if this fails.
            _cut = cut.changed() => {
                drop(client.set_zero_linger());
                drop(server.set_zero_linger());
                return;
            }
            read = client.read(&mut requests) => {
                let Ok(count @ 1..) = read else { return };
                match now() {
                    Fault::BlackHole | Fault::SwallowRequests => {
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
                        // The connection ends with a reset, even if this write fails.
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
                    Fault::SwallowRequests | Fault::None => {}
                }
                if client.write_all(&replies[..count]).await.is_err() {
                    return;
                }
            }
        }
    }
}
