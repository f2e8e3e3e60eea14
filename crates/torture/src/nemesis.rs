//! Carries out the faults of a plan, each in a task of its own, so that they overlap.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use test_support::{Fault, Proxy};
use tokio::sync::Mutex as AsyncMutex;

use crate::bug::Bug;
use crate::client::ClientOptions;
use crate::history::{Allowance, FaultSpan, Micros, now};
use crate::plan::{Deployment, Kind, Plan, Planned};
use crate::process::{ClientProcess, SharedHistory};
use crate::register::Accepted;
use crate::store::{Effect, Store};

/// What the faults amounted to.
#[derive(Clone, Copy, Debug, Default)]
pub struct Damage {
    /// Processes that were killed.
    pub kills: u64,
    /// Times that processes were stopped.
    pub stops: u64,
    /// Connections that were reset.
    pub cuts: u64,
    /// Failovers.
    pub failovers: u64,
    /// Times that data of requests was sent twice.
    pub duplicates: u64,
    /// Faults in sum.
    pub faults: u64,
}

/// Everything that faults hit.
#[derive(Debug)]
pub struct Nemesis {
    plan: Plan,
    /// Only one fault at a time hits the servers.
    store: AsyncMutex<Store>,
    url: String,
    client_urls: Vec<String>,
    /// `None` while a client is being restarted or stopped.
    clients: Vec<AsyncMutex<Option<ClientProcess>>>,
    /// Only one fault at a time hits the network of a client.
    proxies: Vec<AsyncMutex<Proxy>>,
    starts: Mutex<Vec<usize>>,
    history: SharedHistory,
    damage: Mutex<Damage>,
    register: std::net::SocketAddr,
    bug: Option<Bug>,
    directory: PathBuf,
    logs: Mutex<Vec<PathBuf>>,
}

impl Nemesis {
    /// Starts the clients of a plan.
    pub async fn start(
        plan: Plan,
        (store, proxies): (Store, Vec<Proxy>),
        register: std::net::SocketAddr,
        bug: Option<Bug>,
        directory: PathBuf,
    ) -> std::io::Result<Arc<Self>> {
        let clients = plan.deployment.clients();
        let nemesis = Self {
            url: store.url(),
            client_urls: (0..clients).map(|client| store.client_url(proxies.get(client))).collect(),
            store: AsyncMutex::new(store),
            clients: (0..clients).map(|_| AsyncMutex::new(None)).collect(),
            proxies: proxies.into_iter().map(AsyncMutex::new).collect(),
            starts: Mutex::new(vec![0; clients]),
            history: SharedHistory::default(),
            damage: Mutex::default(),
            register,
            bug,
            directory,
            logs: Mutex::default(),
            plan,
        };
        nemesis.history.watch_lags();
        nemesis.history.watch_clock();
        for client in 0..clients {
            *nemesis.clients[client].lock().await = Some(nemesis.start_client(client)?);
        }
        Ok(Arc::new(nemesis))
    }

    /// Returns the history.
    #[must_use]
    pub fn history(&self) -> &SharedHistory {
        &self.history
    }

    /// Returns what the faults amounted to so far.
    #[must_use]
    pub fn damage(&self) -> Damage {
        *self.damage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the log files of all clients.
    #[must_use]
    pub fn logs(&self) -> Vec<PathBuf> {
        self.logs.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns the URL of the store.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    fn start_client(&self, client: usize) -> std::io::Result<ClientProcess> {
        let start = {
            let mut starts = self.starts.lock().unwrap_or_else(PoisonError::into_inner);
            starts[client] += 1;
            starts[client]
        };
        let is_alone = self.plan.deployment.clients() == 1;
        let options = ClientOptions {
            url: self.client_urls[client].clone(),
            seed: self.plan.client_seed(client, start),
            lockers: if is_alone { 4 } else { 2 },
            tasks: 8,
            register: self.register,
            has_resource: self.plan.deployment.has_resource(),
            bug: self.bug,
        };
        let process = ClientProcess::start(client, &options, &self.history, &self.directory)?;
        let mut logs = self.logs.lock().unwrap_or_else(PoisonError::into_inner);
        logs.push(process.log().to_owned());
        Ok(process)
    }

    /// Carries out all faults. Ends when they are over.
    pub async fn strike(self: &Arc<Self>) {
        let begin = Instant::now();
        let mut faults = Vec::new();
        for fault in self.plan.faults.clone() {
            tokio::time::sleep(fault.at.saturating_sub(begin.elapsed())).await;
            let nemesis = Arc::clone(self);
            faults.push(tokio::spawn(async move { nemesis.inject(fault).await }));
        }
        for fault in faults {
            // A panic of a fault is printed, and counts as no fault.
            drop(fault.await);
        }
    }

    async fn inject(&self, fault: Planned) {
        let effect = match fault.kind {
            Kind::KillClient | Kind::StopClient | Kind::FullDisk | Kind::SkewClock => {
                let Some(effect) = self.hit_client(&fault).await else { return };
                effect
            }
            Kind::CutStorm
            | Kind::BlackHole
            | Kind::LoseReplies
            | Kind::LoseRequests
            | Kind::Delay
            | Kind::Duplicate
            | Kind::Reset => self.hit_network(&fault).await,
            _ => self.hit_servers(fault).await,
        };
        let mut damage = self.damage.lock().unwrap_or_else(PoisonError::into_inner);
        damage.faults += 1;
        damage.kills += effect.kills;
        damage.stops += effect.stops;
        damage.failovers += effect.failovers;
        damage.cuts += effect.cuts;
        damage.duplicates += effect.duplicates;
    }

    /// Notes the begin of a fault. It ends when the value is dropped.
    fn note(&self, fault: &Planned, client: Option<usize>) -> OpenFault<'_> {
        // Replication on Redis is asynchronous: a release or an extend may be lost.
        let allows = match (fault.kind, self.plan.deployment) {
            (
                Kind::Failover,
                Deployment::RedisSentinel | Deployment::RedisCluster | Deployment::RedisShards,
            ) => Allowance::LostWrites,
            // PostgreSQL answers a release before it is on the disk or on a standby.
            (
                Kind::KillServer | Kind::Failover,
                Deployment::Postgres | Deployment::PgBouncer | Deployment::PostgresStandby,
            ) => Allowance::LostReleases,
            // A lock may be evicted. Fence counters do not expire, so they are not. A clock that
            // jumps ahead ends locks, and one that jumps back keeps them.
            (Kind::Evict | Kind::JumpClock, _) => Allowance::Expiry,
            (Kind::ReplaceFile, _) => Allowance::LostStore,
            (Kind::Duplicate, _) => Allowance::Repetition,
            _ => Allowance::Nothing,
        };
        let mut history = self.history.get();
        let name = fault.kind.to_string();
        history.faults.push(FaultSpan { name, client, from: now(), to: Micros::MAX, allows });
        OpenFault { history: &self.history, number: history.faults.len() - 1 }
    }

    /// Hits a client, unless another fault does.
    async fn hit_client(&self, fault: &Planned) -> Option<Effect> {
        let mut client = self.clients[fault.client].try_lock().ok()?;
        let process = client.as_mut()?;
        let _noted = self.note(fault, Some(fault.client));
        match fault.kind {
            Kind::KillClient => {
                let process = client.take()?;
                drop(tokio::task::spawn_blocking(|| process.kill()).await);
                tokio::time::sleep(fault.lasts).await;
                *client = self.start_client(fault.client).ok();
                Some(Effect { kills: 1, ..Effect::default() })
            }
            Kind::StopClient => {
                let number = process.number();
                // Until the process reports the gap itself, and a moment after, it is noted here.
                let noted = {
                    let mut history = self.history.get();
                    let gaps = &mut history.processes[number].gaps;
                    gaps.push((now(), u64::MAX));
                    gaps.len() - 1
                };
                process.signal(Signal::SIGSTOP);
                tokio::time::sleep(fault.lasts).await;
                process.signal(Signal::SIGCONT);
                self.history.get().processes[number].gaps[noted].1 = now() + 200_000;
                Some(Effect { stops: 1, ..Effect::default() })
            }
            Kind::FullDisk => {
                limit_files(process.id(), "1024");
                tokio::time::sleep(fault.lasts).await;
                limit_files(process.id(), "unlimited");
                Some(Effect::default())
            }
            _ => {
                let off = i64::try_from(fault.amount).unwrap_or(0) - 300;
                process.order(&format!("clock {off}"));
                tokio::time::sleep(fault.lasts).await;
                process.order("clock 0");
                Some(Effect::default())
            }
        }
    }

    /// Hits the network of a client.
    async fn hit_network(&self, fault: &Planned) -> Effect {
        let Some(proxy) = self.proxies.get(fault.client) else { return Effect::default() };
        let proxy = proxy.lock().await;
        let _noted = self.note(fault, Some(fault.client));
        let (mut cuts, before) = (0, proxy.duplicates());
        match fault.kind {
            Kind::CutStorm => {
                let end = Instant::now() + fault.lasts;
                while Instant::now() < end {
                    cuts += proxy.cut();
                    tokio::time::sleep(Duration::from_millis(30)).await;
                }
            }
            Kind::Reset => {
                proxy.set(Fault::ResetAfter(usize::try_from(fault.amount).unwrap_or(0)));
                tokio::time::sleep(fault.lasts).await;
                cuts += 1;
            }
            Kind::Duplicate => {
                // It affects connections that begin now, and lasts until they end.
                proxy.set(Fault::Duplicate(Duration::from_millis(fault.amount)));
                cuts += proxy.cut();
                tokio::time::sleep(fault.lasts).await;
                proxy.set(Fault::None);
                cuts += proxy.cut();
            }
            kind => {
                proxy.set(match kind {
                    Kind::LoseReplies => Fault::SwallowReplies,
                    Kind::LoseRequests => Fault::SwallowRequests,
                    Kind::Delay => Fault::Delay(Duration::from_millis(fault.amount)),
                    _ => Fault::BlackHole,
                });
                tokio::time::sleep(fault.lasts).await;
            }
        }
        proxy.set(Fault::None);
        let duplicates = proxy.duplicates() - before;
        Effect { cuts: cuts as u64, duplicates, ..Effect::default() }
    }

    /// Returns the writes that the resource in the store accepted, in order.
    pub async fn writes_in_store(&self) -> Vec<Accepted> {
        let store = self.store.lock().await;
        tokio::task::block_in_place(|| store.accepted_writes())
    }

    async fn hit_servers(&self, fault: Planned) -> Effect {
        let mut store = self.store.lock().await;
        let _noted = self.note(&fault, None);
        tokio::task::block_in_place(|| store.hit(&fault))
    }

    /// Sends an order to all clients.
    pub async fn order(&self, order: &str) {
        for client in &self.clients {
            if let Some(process) = client.lock().await.as_mut() {
                process.order(order);
            }
        }
    }

    /// Stops all clients and waits until they have ended; kills one that takes too long.
    pub async fn finish(&self, limit: Duration) {
        self.order("stop").await;
        let end = Instant::now() + limit;
        for client in &self.clients {
            let Some(mut process) = client.lock().await.take() else { continue };
            while !process.has_ended() && Instant::now() < end {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            let is_stuck = !process.has_ended();
            let finish = move || if is_stuck { process.kill() } else { process.finish() };
            drop(tokio::task::spawn_blocking(finish).await);
        }
    }

    /// Kills all clients.
    pub async fn abort(&self) {
        for client in &self.clients {
            if let Some(process) = client.lock().await.take() {
                process.kill();
            }
        }
    }
}

/// A fault that is not over.
struct OpenFault<'a> {
    history: &'a SharedHistory,
    number: usize,
}

impl Drop for OpenFault<'_> {
    fn drop(&mut self) {
        self.history.get().faults[self.number].to = now();
    }
}

/// Limits the size of the files that a process can write.
fn limit_files(process: u32, size: &str) {
    let mut command = std::process::Command::new("prlimit");
    // The process may be gone.
    drop(command.args(["--pid", &process.to_string()]).arg(format!("--fsize={size}:")).output());
}
