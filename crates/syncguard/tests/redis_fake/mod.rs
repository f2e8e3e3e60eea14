//! A fake server that speaks the Redis protocol and returns the answers that a test sets.

#![allow(dead_code, reason = "every test file uses a part of it")]

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};

type Answers = Arc<Mutex<HashMap<&'static str, String>>>;

/// A fake server. Commands for which no answer is set get `+OK`.
pub(crate) struct FakeRedis {
    port: u16,
    answers: Answers,
    asked: Arc<Mutex<Vec<String>>>,
    open: Arc<()>,
}

impl FakeRedis {
    pub(crate) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let port = listener.local_addr().expect("bound").port();
        let (answers, asked) = (Answers::default(), Arc::<Mutex<Vec<String>>>::default());
        let open = Arc::new(());
        tokio::spawn({
            let (answers, asked) = (Arc::clone(&answers), Arc::clone(&asked));
            let open = Arc::downgrade(&open);
            async move {
                while let Ok((stream, _)) = listener.accept().await {
                    let serving = serve(stream, Arc::clone(&answers), Arc::clone(&asked));
                    let open = open.upgrade();
                    tokio::spawn(async move {
                        serving.await;
                        drop(open);
                    });
                }
            }
        });
        let fake = Self { port, answers, asked, open };
        fake.answer("HELLO", "%1\r\n$6\r\nserver\r\n$5\r\nredis\r\n");
        fake
    }

    /// Returns the number of open connections.
    pub(crate) fn connections(&self) -> usize {
        Arc::strong_count(&self.open) - 1
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// Sets the answer to a command, by its first word or its first two, in the wire format.
    pub(crate) fn answer(&self, command: &'static str, answer: impl Into<String>) {
        let mut answers = self.answers.lock().unwrap_or_else(PoisonError::into_inner);
        answers.insert(command, answer.into());
    }

    /// Returns how often a command was sent, by its first words.
    pub(crate) fn count(&self, command: &str) -> usize {
        let asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        asked.iter().filter(|line| line.starts_with(command)).count()
    }

    /// Sets the answers of a sentinel about the service `shop`.
    pub(crate) fn names_primary(&self, port: u16, epoch: u64, flags: &str) {
        let fields = [
            ("name", "shop"),
            ("ip", "127.0.0.1"),
            ("port", &port.to_string()),
            ("flags", flags),
            ("config-epoch", &epoch.to_string()),
        ];
        let mut answer = format!("*1\r\n*{}\r\n", fields.len() * 2);
        for text in fields.iter().flat_map(|(name, value)| [name, value]) {
            answer += &bulk(text);
        }
        self.answer("SENTINEL MASTERS", answer);
        self.answer("ROLE", "*2\r\n$8\r\nsentinel\r\n*0\r\n");
    }

    /// Sets the answers of a node of a Cluster whose slots are all at this port.
    pub(crate) fn names_node(&self, port: u16, epoch: u64, state: &str) {
        let node = format!("*3\r\n{}:{port}\r\n{}", bulk("127.0.0.1"), bulk("id"));
        self.answer("CLUSTER KEYSLOT", ":7\r\n");
        self.answer("CLUSTER SLOTS", format!("*1\r\n*3\r\n:0\r\n:16383\r\n{node}"));
        let info = format!("cluster_state:{state}\r\ncluster_current_epoch:{epoch}\r\n");
        self.answer("CLUSTER INFO", bulk(&info));
    }
}

fn bulk(text: &str) -> String {
    format!("${}\r\n{text}\r\n", text.len())
}

async fn serve(stream: TcpStream, answers: Answers, asked: Arc<Mutex<Vec<String>>>) {
    let (read, mut write) = stream.into_split();
    let mut read = BufReader::new(read);
    loop {
        let mut words = Vec::new();
        let Some(count) = number(&mut read, '*').await else { return };
        for _ in 0..count {
            let Some(length) = number(&mut read, '$').await else { return };
            let mut word = vec![0; length + 2];
            if read.read_exact(&mut word).await.is_err() {
                return;
            }
            words.push(String::from_utf8_lossy(&word[..length]).into_owned());
        }
        let one = words[0].to_uppercase();
        let two = format!("{one} {}", words.get(1).map_or("", String::as_str)).to_uppercase();
        let answer = {
            asked.lock().unwrap_or_else(PoisonError::into_inner).push(two.clone());
            let answers = answers.lock().unwrap_or_else(PoisonError::into_inner);
            answers.get(two.as_str()).or_else(|| answers.get(one.as_str())).cloned()
        };
        // An empty answer is one that never comes.
        let answer = answer.unwrap_or_else(|| "+OK\r\n".to_owned());
        if write.write_all(answer.as_bytes()).await.is_err() {
            return;
        }
    }
}

async fn number(read: &mut BufReader<tokio::net::tcp::OwnedReadHalf>, kind: char) -> Option<usize> {
    let mut line = String::new();
    read.read_line(&mut line).await.ok()?;
    line.trim_end().strip_prefix(kind)?.parse().ok()
}
