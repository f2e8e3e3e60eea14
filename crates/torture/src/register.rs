//! The fenced resource: a server that stores a fence per key and refuses writes with a smaller one.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, oneshot};

/// A write that was accepted, in the order of the register.
#[derive(Clone, Debug)]
pub struct Accepted {
    /// The number of the key.
    pub key: u32,
    /// The fence.
    pub fence: u64,
    /// The lock id of the writer.
    pub id: String,
}

/// The register, in the coordinator.
#[derive(Clone, Debug, Default)]
pub struct RegisterServer(Arc<Mutex<Contents>>);

#[derive(Debug, Default)]
struct Contents {
    fences: HashMap<u32, u64>,
    accepted: Vec<Accepted>,
    refused: u64,
}

impl RegisterServer {
    /// Starts a register on a free port, and returns its address.
    pub async fn start(&self) -> std::io::Result<SocketAddr> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        let address = listener.local_addr()?;
        let register = self.clone();
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(register.clone().serve(client));
            }
        });
        Ok(address)
    }

    async fn serve(self, client: TcpStream) {
        let (read, mut write) = client.into_split();
        let mut lines = BufReader::new(read).lines();
        while let Ok(Some(line)) = lines.next_line().await {
            let mut fields = line.split(' ');
            let number = fields.next().unwrap_or_default().to_owned();
            let key = fields.next().and_then(|key| key.parse().ok());
            let fence = fields.next().and_then(|fence| fence.parse().ok());
            let (Some(key), Some(fence), Some(id)) = (key, fence, fields.next()) else { return };
            let answer = if self.write(key, fence, id) { "accepted" } else { "refused" };
            if write.write_all(format!("{number} {answer}\n").as_bytes()).await.is_err() {
                return;
            }
        }
    }

    /// Accepts a write unless one with a larger fence was accepted before.
    pub fn write(&self, key: u32, fence: u64, id: &str) -> bool {
        let mut contents = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let stored = contents.fences.entry(key).or_default();
        if fence < *stored {
            contents.refused += 1;
            return false;
        }
        *stored = fence;
        contents.accepted.push(Accepted { key, fence, id: id.to_owned() });
        true
    }

    /// Returns the accepted writes in order, and how many were refused.
    #[must_use]
    pub fn contents(&self) -> (Vec<Accepted>, u64) {
        let contents = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        (contents.accepted.clone(), contents.refused)
    }
}

/// A connection to the register.
#[derive(Clone, Debug)]
pub struct Register(mpsc::UnboundedSender<Request>);

#[derive(Debug)]
struct Request {
    line: String,
    answer: oneshot::Sender<bool>,
}

impl Register {
    /// Connects.
    pub async fn connect(address: SocketAddr) -> Option<Self> {
        let stream = TcpStream::connect(address).await.ok()?;
        stream.set_nodelay(true).ok()?;
        let (read, mut write) = stream.into_split();
        let (sender, mut requests) = mpsc::unbounded_channel::<Request>();
        let mut lines = BufReader::new(read).lines();
        tokio::spawn(async move {
            let mut waiting = HashMap::new();
            let mut next = 0_u64;
            loop {
                tokio::select! {
                    request = requests.recv() => {
                        let Some(request) = request else { return };
                        next += 1;
                        waiting.insert(next, request.answer);
                        let line = format!("{next} {}\n", request.line);
                        if write.write_all(line.as_bytes()).await.is_err() {
                            return;
                        }
                    }
                    line = lines.next_line() => {
                        let Ok(Some(line)) = line else { return };
                        let Some((number, answer)) = line.split_once(' ') else { return };
                        let number = number.parse().unwrap_or(0);
                        if let Some(waiting) = waiting.remove(&number) {
                            // The writer may be gone.
                            waiting.send(answer == "accepted").ok();
                        }
                    }
                }
            }
        });
        Some(Self(sender))
    }

    /// Writes, and returns whether the write was accepted; `None` if the register is gone.
    pub async fn write(&self, key: u32, fence: u64, id: &str) -> Option<bool> {
        let (answer, answered) = oneshot::channel();
        let line = format!("{key} {fence} {id}");
        self.0.send(Request { line, answer }).ok()?;
        answered.await.ok()
    }
}

#[cfg(test)]
mod tests {
    use super::{Register, RegisterServer};

    #[tokio::test]
    async fn a_smaller_fence_is_refused() {
        let server = RegisterServer::default();
        let register = Register::connect(server.start().await.expect("a port")).await;
        let register = register.expect("connected");
        assert_eq!(register.write(1, 5, "a").await, Some(true));
        assert_eq!(register.write(1, 4, "b").await, Some(false));
        assert_eq!(register.write(2, 4, "b").await, Some(true));
        let (accepted, refused) = server.contents();
        assert_eq!((accepted.len(), refused), (2, 1));
    }
}
