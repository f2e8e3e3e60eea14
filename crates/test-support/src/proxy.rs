//! A TCP proxy that injects faults.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::rewriter::Rewriter;

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
    /// Sends the requests of each connection that begins now to the server a second time, this much
    /// later, over a connection of their own whose replies are dropped. It lasts until the
    /// connection ends; what was received by then is still sent.
    Duplicate(Duration),
}

/// A proxy on a free port.
#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    shared: Arc<Shared>,
    /// Open connections have one receiver each, and end when the value changes.
    cuts: watch::Sender<u64>,
    accepting: JoinHandle<()>,
}

/// What all connections of a proxy share.
#[derive(Debug)]
struct Shared {
    fault: Mutex<Fault>,
    to_port: AtomicU16,
    /// All data on connections up to this number is dropped.
    stranded: AtomicU64,
    accepted: AtomicU64,
    duplicates: AtomicU64,
    rewriter: Mutex<Rewriter>,
}

impl Shared {
    fn fault(&self) -> Fault {
        *self.fault.lock().expect("no panic inside")
    }

    /// Connects to the server.
    async fn connect(&self) -> Option<TcpStream> {
        let server = TcpStream::connect(("127.0.0.1", self.to_port.load(Ordering::SeqCst))).await;
        let server = server.ok()?;
        // Only the fault delays data, not the kernel.
        server.set_nodelay(true).expect("a socket");
        Some(server)
    }
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
        let shared = Arc::new(Shared {
            fault: Mutex::new(Fault::None),
            to_port: AtomicU16::new(to_port),
            stranded: AtomicU64::new(0),
            accepted: AtomicU64::new(0),
            duplicates: AtomicU64::new(0),
            rewriter: Mutex::default(),
        });
        let cuts = watch::Sender::new(0);
        let accepting = tokio::spawn({
            let (shared, cuts) = (Arc::clone(&shared), cuts.clone());
            async move {
                while let Ok((client, _)) = listener.accept().await {
                    client.set_nodelay(true).expect("a socket");
                    let number = shared.accepted.fetch_add(1, Ordering::SeqCst) + 1;
                    let (shared, cut) = (Arc::clone(&shared), cuts.subscribe());
                    tokio::spawn(async move {
                        if let Some(server) = shared.connect().await {
                            carry(client, server, cut, &shared, number).await;
                        }
                    });
                }
            }
        });
        Self { address, shared, cuts, accepting }
    }

    /// Returns the port of the proxy.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.address.port()
    }

    /// Forwards new connections to another port on 127.0.0.1, as after a DNS change. Open
    /// connections are not affected.
    pub fn retarget(&self, to_port: u16) {
        self.shared.to_port.store(to_port, Ordering::SeqCst);
    }

    /// Drops all data on the open connections from now on; new ones work. This simulates a network
    /// path that fails silently while another path works.
    pub fn strand(&self) {
        let accepted = self.shared.accepted.load(Ordering::SeqCst);
        self.shared.stranded.store(accepted, Ordering::SeqCst);
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
        *self.shared.fault.lock().expect("no panic inside") = fault;
    }

    /// Returns how many times data of requests was [sent twice](Fault::Duplicate).
    #[must_use]
    pub fn duplicates(&self) -> u64 {
        self.shared.duplicates.load(Ordering::SeqCst)
    }

    /// Replaces texts in the requests of connections that begin from now on. A text must not be at
    /// the end of a request.
    ///
    /// # Panics
    ///
    /// Panics if a text and its replacement differ in length: requests contain their length.
    pub fn rewrite(&self, texts: &[(&str, &str)]) {
        *self.shared.rewriter.lock().expect("no panic inside") = Rewriter::new(texts);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

/// Sends requests when they are due, over a connection of their own, and drops the replies.
async fn duplicate(
    shared: Arc<Shared>,
    delay: Duration,
    mut requests: mpsc::UnboundedReceiver<(Instant, Vec<u8>)>,
) {
    let Some(mut server) = shared.connect().await else { return };
    let (mut replies, mut server) = server.split();
    let send = async {
        while let Some((received, data)) = requests.recv().await {
            tokio::time::sleep_until(received + delay).await;
            if server.write_all(&data).await.is_err() {
                return;
            }
            shared.duplicates.fetch_add(1, Ordering::SeqCst);
        }
    };
    let mut nowhere = tokio::io::sink();
    tokio::select! {
        () = send => {}
        _ended = tokio::io::copy(&mut replies, &mut nowhere) => {}
    }
}

/// Forwards data in both directions until one side closes or a fault ends the connection.
async fn carry(
    client: TcpStream,
    server: TcpStream,
    mut cut: watch::Receiver<u64>,
    shared: &Arc<Shared>,
    number: u64,
) {
    let now = || match shared.fault() {
        _ if number <= shared.stranded.load(Ordering::SeqCst) => Fault::BlackHole,
        fault => fault,
    };
    let duplicates = match now() {
        Fault::Duplicate(delay) => {
            let (sender, requests) = mpsc::unbounded_channel();
            tokio::spawn(duplicate(Arc::clone(shared), delay, requests));
            Some(sender)
        }
        _ => None,
    };
    let mut rewriter = shared.rewriter.lock().expect("no panic inside").clone();
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
                let data = rewriter.rewrite(&requests[..count]);
                if let Some(duplicates) = &duplicates {
                    // The second connection may have ended.
                    drop(duplicates.send((Instant::now(), data.to_vec())));
                }
                if server.write_all(&data).await.is_err() {
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
                        *shared.fault.lock().expect("no panic inside") =
                            Fault::ResetAfter(bytes - count);
                    }
                    Fault::HalfClose => {
                        drop(client.shutdown().await);
                        continue;
                    }
                    Fault::SwallowRequests | Fault::Duplicate(_) | Fault::None => {}
                }
                if client.write_all(&replies[..count]).await.is_err() {
                    return;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Starts a server that answers each byte with `.`, and returns its port and what each of its
    /// connections received.
    async fn server() -> (u16, Arc<Mutex<Vec<Vec<u8>>>>) {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a free port");
        let port = listener.local_addr().expect("an address").port();
        let received: Arc<Mutex<Vec<Vec<u8>>>> = Arc::default();
        tokio::spawn({
            let received = Arc::clone(&received);
            async move {
                while let Ok((mut client, _)) = listener.accept().await {
                    let received = Arc::clone(&received);
                    let number = {
                        let mut all = received.lock().expect("no panic");
                        all.push(Vec::new());
                        all.len() - 1
                    };
                    tokio::spawn(async move {
                        while let Ok(byte) = client.read_u8().await {
                            received.lock().expect("no panic")[number].push(byte);
                            drop(client.write_u8(b'.').await);
                        }
                    });
                }
            }
        });
        (port, received)
    }

    #[tokio::test]
    async fn requests_are_sent_twice_and_answered_once() {
        let (port, received) = server().await;
        let proxy = Proxy::start(port).await;
        let mut before = TcpStream::connect(("127.0.0.1", proxy.port())).await.expect("connects");
        before.write_all(b"x").await.expect("sent");
        assert_eq!(before.read_u8().await.expect("answered"), b'.');
        proxy.set(Fault::Duplicate(Duration::from_millis(20)));
        let mut client = TcpStream::connect(("127.0.0.1", proxy.port())).await.expect("connects");
        client.write_all(b"abc").await.expect("sent");
        let mut answers = [0; 3];
        client.read_exact(&mut answers).await.expect("answered");
        // The connection ends, and its requests arrive again all the same.
        proxy.cut();
        let started = Instant::now();
        while proxy.duplicates() == 0 || received.lock().expect("no panic").len() < 3 {
            assert!(started.elapsed() < Duration::from_secs(10), "they are not sent again");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let is_complete = || {
            let mut received = received.lock().expect("no panic").clone();
            received.sort();
            received == [b"abc".to_vec(), b"abc".to_vec(), b"x".to_vec()]
        };
        while !is_complete() {
            assert!(started.elapsed() < Duration::from_secs(10), "{received:?}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert!(client.read_u8().await.is_err(), "there is no second answer");
    }

    #[tokio::test]
    async fn texts_in_requests_are_replaced() {
        let (port, received) = server().await;
        let proxy = Proxy::start(port).await;
        proxy.rewrite(&[("fence = 1", "fence > 1")]);
        let mut client = TcpStream::connect(("127.0.0.1", proxy.port())).await.expect("connects");
        client.write_all(b"WHERE fence = 1;").await.expect("sent");
        let mut answers = [0; 16];
        client.read_exact(&mut answers).await.expect("answered");
        assert_eq!(received.lock().expect("no panic")[0], b"WHERE fence > 1;");
    }
}
