//! Leads calls to the server in charge of their keys, and follows the keys when they move.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, RedisError, RedisResult, Value};
use tokio::time::{Instant, timeout};

use super::connection::{CommandSink, Multiplexed, SharedConnection};
use super::error;
use super::nodes::{Nodes, Serving};
use super::scripts::Call;
use crate::common::backoff::random_fraction;
use crate::common::error::Result;

/// Where the calls of a shard go.
#[derive(Clone)]
pub(super) enum Route {
    /// The server in charge of all keys.
    Server(Multiplexed),
    /// The node that serves a shard.
    Shard { nodes: Arc<Nodes>, shard: usize },
    /// The caller's own connection, which reconnects by itself.
    External {
        connection: SharedConnection,
        /// For calls that no lock needs; locks use the connection's own timeouts.
        inspection_timeout: Duration,
    },
}

/// A connection to send a call on.
struct Link {
    sink: CommandSink,
    /// `None` for the caller's own connection.
    in_use: Option<InUse>,
    /// The version of the map of shards to nodes.
    version: u64,
}

/// A connection that may turn out not to work.
pub(super) struct InUse {
    server: Multiplexed,
    generation: u64,
}

impl InUse {
    /// Replaces the connection, unless another call has already done so.
    pub(super) fn replace(&self) {
        self.server.replace(self.generation);
    }
}

/// What an error means for the connection and for the call.
enum RouteRemedy {
    /// The call fails; the connection is kept.
    None,
    /// The call fails; the connection is replaced.
    Replace,
    /// Nothing was done: this server is not in charge, another may be.
    Redirect,
    /// Nothing was done: this server cannot serve now, another may be in charge by now.
    Search,
    /// Nothing was done: the keys are on the node that imports the slot, or will be.
    Ask,
    /// Nothing was done: some of the keys are on one node and some on another.
    Wait,
}

impl Route {
    /// Returns the connection to use now.
    async fn link(&self) -> RedisResult<Link> {
        match self {
            Self::Server(server) => link(server, 0).await,
            Self::Shard { nodes, shard } => {
                let serving = nodes.serving(*shard);
                match link_to(&serving).await {
                    Err(cause) => match Box::pin(nodes.other_than(&serving, *shard)).await {
                        Some(other) => link_to(&other).await,
                        None => Err(cause),
                    },
                    link => link,
                }
            }
            Self::External { connection, .. } => {
                let sink = CommandSink::External(connection.clone());
                Ok(Link { sink, in_use: None, version: 0 })
            }
        }
    }

    /// Returns whether it leads to a Cluster that this backend knows the nodes of.
    pub(super) fn is_cluster(&self) -> bool {
        match self {
            Self::Server(server) => server.resolver().is_cluster(),
            Self::Shard { .. } => true,
            Self::External { .. } => false,
        }
    }

    /// Returns the connection that a call would use, unless it is the caller's own or there is
    /// none.
    pub(super) fn in_use(&self) -> Option<InUse> {
        let server = match self {
            Self::Server(server) => server.clone(),
            Self::Shard { nodes, shard } => nodes.serving(*shard).node().ok()?.connection.clone(),
            Self::External { .. } => return None,
        };
        let generation = server.generation();
        Some(InUse { server, generation })
    }

    /// Finds the server in charge again, after another one has answered.
    async fn find_again(&self, in_use: &InUse, version: u64) {
        match self {
            Self::Shard { nodes, .. } => nodes.refresh(version).await,
            _ => in_use.replace(),
        }
    }

    /// Returns whether to look for the server in charge again, after one that cannot serve.
    fn may_search(&self, in_use: &InUse) -> bool {
        match self {
            // The nodes are not asked again at once.
            Self::Shard { .. } => true,
            _ => in_use.server.may_search(in_use.generation),
        }
    }

    /// Runs a script on the server in charge. If its keys are on two nodes while their slot moves,
    /// waits until they are on one.
    pub(super) async fn run(&self, call: &Call) -> Result<Value> {
        self.drive(call, false).await?.ok_or_else(error::unexpected_response)
    }

    /// Runs a script on the server in charge. If its keys are on two nodes while their slot moves,
    /// waits until they are on one, or returns `None` at once if they `may_be_apart`. Then nothing
    /// was changed.
    pub(super) async fn drive(&self, call: &Call, may_be_apart: bool) -> Result<Option<Value>> {
        const REDIRECTS: u32 = 3;
        const SLOT_DELAY: Duration = Duration::from_millis(40);
        let (mut redirects, mut has_searched, mut moving_since) = (0, false, None);
        loop {
            let Link { mut sink, in_use, version } =
                self.link().await.map_err(|cause| error::refused(&cause))?;
            let (mut cause, in_use) = match (sink.run(call).await, &in_use) {
                (Ok(answer), _) => return Ok(Some(answer)),
                (Err(cause), None) => return Err(error::map(&cause)),
                (Err(cause), Some(in_use)) => (cause, in_use),
            };
            let server = &in_use.server;
            if matches!(remedy(server, &cause), RouteRemedy::Ask) {
                // Rare paths are boxed, here and in the operations, to keep the future small.
                let answer = Box::pin(server.ask_the_importer(&cause, call)).await;
                match answer.map_err(|cause| error::refused(&cause))? {
                    Ok(answer) => return Ok(Some(answer)),
                    Err(other) => cause = other,
                }
            }
            match remedy(server, &cause) {
                RouteRemedy::Wait if may_be_apart => return Ok(None),
                RouteRemedy::None => {}
                RouteRemedy::Replace => in_use.replace(),
                RouteRemedy::Redirect => {
                    Box::pin(self.find_again(in_use, version)).await;
                    redirects += 1;
                    if redirects <= REDIRECTS {
                        continue;
                    }
                }
                RouteRemedy::Search => {
                    if !has_searched && self.may_search(in_use) {
                        has_searched = true;
                        Box::pin(self.find_again(in_use, version)).await;
                        continue;
                    }
                }
                RouteRemedy::Ask | RouteRemedy::Wait => {
                    let since = *moving_since.get_or_insert_with(Instant::now);
                    if since.elapsed() < server.resolver().response_timeout() {
                        tokio::time::sleep(SLOT_DELAY.mul_f64(random_fraction())).await;
                        continue;
                    }
                }
            }
            return Err(error::map(&cause));
        }
    }

    /// Runs a script for many locks. Returns `None` if the server did not run it, for example
    /// because it is not in charge.
    pub(super) async fn run_many(&self, call: &Call) -> Result<Option<Value>> {
        let link = self.link().await;
        let Link { mut sink, in_use, .. } = link.map_err(|cause| error::refused(&cause))?;
        match sink.run(call).await {
            Ok(answer) => Ok(Some(answer)),
            Err(cause) if cause.code().is_some() => Ok(None),
            Err(cause) => {
                if let Some(in_use) = in_use {
                    in_use.replace();
                }
                Err(error::map(&cause))
            }
        }
    }

    /// Runs a script that no lock needs, with a deadline even on a connection that has none.
    pub(super) async fn inspect(&self, call: &Call) -> Result<Value> {
        match self {
            Self::External { inspection_timeout, .. } => {
                let answer = timeout(*inspection_timeout, self.run(call)).await;
                answer.unwrap_or_else(|_elapsed| Err(error::timeout()))
            }
            _ => self.run(call).await,
        }
    }

    /// Sends a plain command that no lock needs.
    pub(super) async fn ask(&self, command: &Cmd) -> RedisResult<Value> {
        let mut sink = self.link().await?.sink;
        let answer = sink.send(command);
        let answer = match self {
            Self::External { inspection_timeout, .. } => timeout(*inspection_timeout, answer)
                .await
                .unwrap_or_else(|_elapsed| Err(io::Error::from(io::ErrorKind::TimedOut).into())),
            _ => answer.await,
        };
        answer?.extract_error()
    }
}

async fn link_to(serving: &Serving) -> RedisResult<Link> {
    link(&serving.node()?.connection, serving.version).await
}

async fn link(server: &Multiplexed, version: u64) -> RedisResult<Link> {
    let (generation, connection) = server.link().await?;
    let in_use = Some(InUse { server: server.clone(), generation });
    Ok(Link { sink: CommandSink::Owned(connection), in_use, version })
}

fn remedy(server: &Multiplexed, cause: &RedisError) -> RouteRemedy {
    let has_others = server.resolver().has_others();
    match cause.code() {
        Some("MOVED" | "READONLY") if has_others => RouteRemedy::Redirect,
        Some("NOREPLICAS" | "CLUSTERDOWN" | "MASTERDOWN") if has_others => RouteRemedy::Search,
        Some("ASK") if has_others => RouteRemedy::Ask,
        Some("TRYAGAIN") if has_others => RouteRemedy::Wait,
        // After READONLY, the same address may lead to another server by now.
        None | Some("NOAUTH" | "WRONGPASS" | "READONLY" | "MASTERDOWN") => RouteRemedy::Replace,
        Some(_) => RouteRemedy::None,
    }
}
