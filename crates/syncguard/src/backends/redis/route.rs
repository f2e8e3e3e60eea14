//! Leads calls to the server in charge of their keys, and follows the keys when they move.

use std::sync::Arc;
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{RedisError, RedisResult, Value};
use tokio::time::Instant;

use super::connection::{CommandSink, Multiplexed};
use super::error;
use super::nodes::{Nodes, Serving};
use super::scripts::{Argument, Script};
use crate::common::backoff::random_fraction;
use crate::common::error::Result;

/// Where the calls of a shard go.
#[derive(Clone)]
pub(super) enum Route {
    /// The server in charge of all keys.
    Server(Multiplexed),
    /// The node that serves a shard.
    Shard { nodes: Arc<Nodes>, shard: usize },
}

/// A connection to send a call on.
pub(super) struct Link {
    pub(super) connection: MultiplexedConnection,
    pub(super) in_use: InUse,
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
enum Remedy {
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
    pub(super) async fn link(&self) -> RedisResult<Link> {
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
        }
    }

    /// Returns the connection that a call would use, if there is one.
    pub(super) fn in_use(&self) -> Option<InUse> {
        let server = match self {
            Self::Server(server) => server.clone(),
            Self::Shard { nodes, shard } => nodes.serving(*shard).node().ok()?.connection.clone(),
        };
        let generation = server.generation();
        Some(InUse { server, generation })
    }

    /// Finds the server in charge again, after another one has answered.
    async fn find_again(&self, link: &Link) {
        match self {
            Self::Server(_) => link.in_use.replace(),
            Self::Shard { nodes, .. } => nodes.refresh(link.version).await,
        }
    }

    /// Returns whether to look for the server in charge again, after one that cannot serve.
    fn may_search(&self, link: &Link) -> bool {
        match self {
            Self::Server(server) => server.may_search(link.in_use.generation),
            // The nodes are not asked again at once.
            Self::Shard { .. } => true,
        }
    }

    /// Runs a script on the server in charge. If its keys are on two nodes, waits until they are on
    /// one, or returns `None` at once if they `may_be_apart`.
    pub(super) async fn drive(
        &self,
        operation: &'static str,
        script: &Script,
        keys: &[&str],
        arguments: &[Argument<'_>],
        may_be_apart: bool,
    ) -> Result<Option<Value>> {
        const REDIRECTS: u32 = 3;
        const SLOT_DELAY: Duration = Duration::from_millis(40);
        let (mut redirects, mut has_searched, mut moving_since) = (0, false, None);
        loop {
            let link = self.link().await.map_err(|cause| error::refused(&cause, operation))?;
            let server = &link.in_use.server;
            let mut sink = CommandSink::Owned(link.connection.clone());
            let mut answer = script.run(&mut sink, keys, arguments).await;
            if let Err(cause) = &answer
                && matches!(remedy(server, cause), Remedy::Ask)
            {
                // Rare paths are boxed, here and in the operations, to keep the future small.
                answer = Box::pin(server.ask_the_importer(cause, script, keys, arguments))
                    .await
                    .map_err(|cause| error::refused(&cause, operation))?;
            }
            let cause = match answer {
                Ok(answer) => return Ok(Some(answer)),
                Err(cause) => cause,
            };
            match remedy(server, &cause) {
                Remedy::Wait if may_be_apart => return Ok(None),
                Remedy::None => {}
                Remedy::Replace => link.in_use.replace(),
                Remedy::Redirect => {
                    Box::pin(self.find_again(&link)).await;
                    redirects += 1;
                    if redirects <= REDIRECTS {
                        continue;
                    }
                }
                Remedy::Search => {
                    if !has_searched && self.may_search(&link) {
                        has_searched = true;
                        Box::pin(self.find_again(&link)).await;
                        continue;
                    }
                }
                Remedy::Ask | Remedy::Wait => {
                    let since = *moving_since.get_or_insert_with(Instant::now);
                    if since.elapsed() < server.resolver().response_timeout() {
                        tokio::time::sleep(SLOT_DELAY.mul_f64(random_fraction())).await;
                        continue;
                    }
                }
            }
            return Err(error::map(&cause, operation));
        }
    }
}

async fn link_to(serving: &Serving) -> RedisResult<Link> {
    link(&serving.node()?.connection, serving.version).await
}

async fn link(server: &Multiplexed, version: u64) -> RedisResult<Link> {
    let (generation, connection) = server.link().await?;
    let in_use = InUse { server: server.clone(), generation };
    Ok(Link { connection, in_use, version })
}

fn remedy(server: &Multiplexed, cause: &RedisError) -> Remedy {
    let has_others = server.resolver().has_others();
    match cause.code() {
        Some("MOVED" | "READONLY") if has_others => Remedy::Redirect,
        Some("NOREPLICAS" | "CLUSTERDOWN" | "MASTERDOWN") if has_others => Remedy::Search,
        Some("ASK") if has_others => Remedy::Ask,
        Some("TRYAGAIN") if has_others => Remedy::Wait,
        // After READONLY, the same address may lead to another server by now.
        None | Some("NOAUTH" | "WRONGPASS" | "READONLY" | "MASTERDOWN") => Remedy::Replace,
        Some(_) => Remedy::None,
    }
}
