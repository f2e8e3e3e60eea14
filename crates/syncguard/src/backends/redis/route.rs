//! Leads calls to the server in charge of their keys, and follows the keys when they move.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use redis::aio::{ConnectionLike, MultiplexedConnection};
use redis::{Cmd, RedisError, RedisResult, Value};
use tokio::time::{Instant, timeout};

use super::connection::{Multiplexed, SharedConnection};
use super::error;
use super::nodes::{Nodes, Serving};
use super::scripts::{Call, is_unknown};
use crate::common::backoff::random_fraction;
use crate::common::error::Result;

/// Where the calls of a shard go.
#[derive(Clone)]
pub(super) enum Route {
    Owned(OwnedRoute),
    /// The caller's own connection, which reconnects by itself.
    External {
        connection: SharedConnection,
        /// For calls that no lock needs; locks use the connection's own timeouts.
        inspection_timeout: Duration,
    },
}

/// A server that this backend connects to.
#[derive(Clone)]
pub(super) enum OwnedRoute {
    /// The server in charge of all keys.
    Server(Multiplexed),
    /// The node that serves a shard.
    Shard { nodes: Arc<Nodes>, shard: usize },
}

/// When a call that the server did not run is left to the caller, who gets `None`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum GiveUp {
    Never,
    /// If its keys are on two nodes while their slot moves.
    IfApart,
    /// If the server refused it for any reason.
    IfRefused,
}

/// A connection to send a call on.
struct Link {
    connection: MultiplexedConnection,
    in_use: InUse,
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

impl OwnedRoute {
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
        }
    }

    /// Finds the server in charge again, after another one has answered.
    async fn find_again(&self, in_use: &InUse, version: u64) {
        match self {
            Self::Server(_) => in_use.replace(),
            Self::Shard { nodes, .. } => nodes.refresh(version).await,
        }
    }

    /// Returns whether to look for the server in charge again, after one that cannot serve.
    fn may_search(&self, in_use: &InUse) -> bool {
        match self {
            Self::Server(server) => server.may_search(in_use.generation),
            // The nodes are not asked again at once.
            Self::Shard { .. } => true,
        }
    }
}

impl Route {
    /// Returns whether it leads to a Cluster that this backend knows the nodes of.
    pub(super) fn is_cluster(&self) -> bool {
        match self {
            Self::Owned(OwnedRoute::Server(server)) => server.resolver().is_cluster(),
            Self::Owned(OwnedRoute::Shard { .. }) => true,
            Self::External { .. } => false,
        }
    }

    /// Returns the connection that a call would use, unless it is the caller's own or there is
    /// none.
    pub(super) fn in_use(&self) -> Option<InUse> {
        let server = match self {
            Self::Owned(OwnedRoute::Server(server)) => server.clone(),
            Self::Owned(OwnedRoute::Shard { nodes, shard }) => {
                nodes.serving(*shard).node().ok()?.connection.clone()
            }
            Self::External { .. } => return None,
        };
        let generation = server.generation();
        Some(InUse { server, generation })
    }

    /// Runs a script on the server in charge. If its keys are on two nodes while their slot moves,
    /// waits until they are on one.
    pub(super) async fn run(&self, call: &Call) -> Result<Value> {
        self.drive(call, GiveUp::Never).await?.ok_or_else(error::unexpected_response)
    }

    /// Runs a script on the server in charge. If its keys are on two nodes while their slot moves,
    /// waits until they are on one. Returns `None` if it gave up; then nothing was changed.
    pub(super) async fn drive(&self, call: &Call, give_up: GiveUp) -> Result<Option<Value>> {
        const REDIRECTS: u32 = 3;
        const SLOT_DELAY: Duration = Duration::from_millis(40);
        let (mut redirects, mut has_searched, mut moving_since) = (0, false, None);
        loop {
            let (answer, used) = match self {
                Self::External { connection, .. } => (connection.run(call).await, None),
                Self::Owned(route) => {
                    let link = route.link().await.map_err(|cause| error::refused(&cause));
                    let Link { mut connection, in_use, version } = link?;
                    let sent = connection.req_packed_command(&call.command);
                    let mut answer = sent.await.and_then(Value::extract_error);
                    if answer.as_ref().is_err_and(is_unknown) {
                        let text = call.with_text();
                        let sent = connection.req_packed_command(&text);
                        answer = sent.await.and_then(Value::extract_error);
                    }
                    (answer, Some((route, in_use, version)))
                }
            };
            let mut cause = match answer {
                Ok(answer) => return Ok(Some(answer)),
                Err(cause)
                    if give_up == GiveUp::IfRefused
                        && cause.code().is_some()
                        && !error::map(&cause).may_have_taken_effect() =>
                {
                    return Ok(None);
                }
                Err(cause) => cause,
            };
            let Some((route, in_use, version)) = used else { return Err(error::map(&cause)) };
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
                RouteRemedy::Wait if give_up == GiveUp::IfApart => return Ok(None),
                RouteRemedy::None => {}
                RouteRemedy::Replace => in_use.replace(),
                RouteRemedy::Redirect => {
                    Box::pin(route.find_again(&in_use, version)).await;
                    redirects += 1;
                    if redirects <= REDIRECTS {
                        continue;
                    }
                }
                RouteRemedy::Search => {
                    if !has_searched && route.may_search(&in_use) {
                        has_searched = true;
                        Box::pin(route.find_again(&in_use, version)).await;
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

    /// Runs a script that no lock needs, with a deadline even on a connection that has none.
    pub(super) async fn inspect(&self, call: &Call) -> Result<Value> {
        match self {
            Self::External { inspection_timeout, .. } => {
                let answer = timeout(*inspection_timeout, self.run(call)).await;
                answer.unwrap_or_else(|_elapsed| Err(error::timeout()))
            }
            Self::Owned(_) => self.run(call).await,
        }
    }

    /// Sends a plain command that no lock needs.
    pub(super) async fn ask(&self, command: &Cmd) -> RedisResult<Value> {
        let answer = match self {
            Self::External { connection, inspection_timeout } => {
                timeout(*inspection_timeout, connection.send(command.clone()))
                    .await
                    .unwrap_or_else(|_elapsed| Err(io::Error::from(io::ErrorKind::TimedOut).into()))
            }
            Self::Owned(route) => route.link().await?.connection.req_packed_command(command).await,
        };
        answer?.extract_error()
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
