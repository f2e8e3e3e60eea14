//! A client process: lockers with many tasks that take, keep, extend, release, drop and cancel
//! locks, as its seed decides.

use std::io::BufRead;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::time::Duration;

use syncguard::backend::{Clock, SystemClock};
use syncguard::firestore::FirestoreConfig;
use syncguard::telemetry::TracingSink;
use syncguard::{AnyBackend, ErrorCode, FirestoreBackend, Jitter, Locker, RetryPolicy, Timestamp};

use crate::bug::{Bug, Buggy};
use crate::check::RECONNECT;
use crate::history::{Event, now};
use crate::journal::Journal;
use crate::random::Random;
use crate::recorded::Recorded;
use crate::register::Register;
use crate::resource::Resource;
use crate::script::Worker;

/// What a client leaves that has released everything.
pub const NOTHING: &str = "nothing";
/// What a client leaves whose undos or releases go on.
pub const UNFINISHED: &str = "unfinished undos";

/// What a client process does.
#[derive(Clone, Debug)]
pub struct ClientOptions {
    /// The URL of the store.
    pub url: String,
    /// The seed of its tasks.
    pub seed: u64,
    /// The number of lockers, each with connections of its own.
    pub lockers: u32,
    /// The number of tasks of each locker.
    pub tasks: u32,
    /// The address of the fenced register.
    pub register: SocketAddr,
    /// Whether the store also has a fenced resource.
    pub has_resource: bool,
    /// The planted bug.
    pub bug: Option<Bug>,
}

impl ClientOptions {
    /// Returns the arguments that start such a client.
    #[must_use]
    pub fn to_arguments(&self) -> Vec<String> {
        vec![
            "client".to_owned(),
            self.url.clone(),
            self.seed.to_string(),
            self.lockers.to_string(),
            self.tasks.to_string(),
            self.register.to_string(),
            self.has_resource.to_string(),
            self.bug.map_or("-", Bug::name).to_owned(),
        ]
    }

    /// Reads the arguments.
    #[must_use]
    pub fn parse(arguments: &[String]) -> Option<Self> {
        let [url, seed, lockers, tasks, register, resource, bug] = arguments else { return None };
        Some(Self {
            url: url.clone(),
            seed: seed.parse().ok()?,
            lockers: lockers.parse().ok()?,
            tasks: tasks.parse().ok()?,
            register: register.parse().ok()?,
            has_resource: resource.parse().ok()?,
            bug: Bug::named(bug),
        })
    }
}

/// What the coordinator asks of a client, and its tasks look at.
#[derive(Debug, Default)]
pub struct Orders {
    /// Whether to end.
    pub stop: AtomicBool,
    /// Whether all faults are over.
    pub is_quiet: AtomicBool,
    /// Whether they have been over for so long that connections are open again.
    pub is_settled: AtomicBool,
    /// How far the wall clock is off, in milliseconds.
    pub clock_off_ms: AtomicI64,
}

/// A wall clock that the coordinator can set wrong.
#[derive(Debug)]
struct SkewedClock(Arc<Orders>);

impl Clock for SkewedClock {
    fn now(&self) -> Timestamp {
        let off = self.0.clock_off_ms.load(Ordering::Relaxed);
        Timestamp::from_millis(SystemClock.now().as_millis().saturating_add_signed(off))
    }
}

/// Reads orders from the standard input. The process ends when it closes.
fn follow_orders(orders: Arc<Orders>) {
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines() {
            let Ok(line) = line else { break };
            match line.split_once(' ').unwrap_or((&line, "")) {
                ("stop", _) => orders.stop.store(true, Ordering::SeqCst),
                ("quiet", _) => {
                    orders.is_quiet.store(true, Ordering::SeqCst);
                    let orders = Arc::clone(&orders);
                    std::thread::spawn(move || {
                        std::thread::sleep(RECONNECT);
                        orders.is_settled.store(true, Ordering::SeqCst);
                    });
                }
                ("clock", off) => {
                    let off = off.parse().unwrap_or(0);
                    orders.clock_off_ms.store(off, Ordering::SeqCst);
                }
                _ => {}
            }
        }
        std::process::exit(3);
    });
}

/// Runs a client until it is ordered to stop.
pub fn run(options: &ClientOptions) {
    tracing_subscriber::fmt()
        .with_max_level(tracing_subscriber::filter::LevelFilter::DEBUG)
        .with_ansi(false)
        // A full disk must not end the process.
        .log_internal_errors(false)
        .with_writer(std::io::stderr)
        .init();
    let orders = Arc::new(Orders::default());
    follow_orders(Arc::clone(&orders));
    let journal = Arc::new(Journal::default());
    journal.report_gaps();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.expect("a runtime").block_on(work(options, &orders, &journal));
}

/// Connects to the store. Waits until it can be reached.
async fn connect(url: &str, orders: &Arc<Orders>) -> Option<AnyBackend> {
    while !orders.stop.load(Ordering::SeqCst) {
        let connected = if url.starts_with("firestore:") {
            let clock = Arc::new(SkewedClock(Arc::clone(orders)));
            let config = FirestoreConfig::from_url(url).expect("a valid URL").clock(clock);
            FirestoreBackend::connect(config).await.map(AnyBackend::new)
        } else {
            syncguard::connect(url).await
        };
        match connected {
            Ok(backend) => return Some(backend),
            Err(_unreachable) => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
    None
}

async fn work(options: &ClientOptions, orders: &Arc<Orders>, journal: &Arc<Journal>) {
    let Some(register) = Register::connect(options.register).await else { return };
    let resource = options.has_resource.then(|| Arc::new(Resource::new(&options.url)));
    let mut lockers = Vec::new();
    let mut shared: Option<AnyBackend> = None;
    for number in 0..options.lockers {
        // Only a store outside this process can be opened twice.
        let backend = match &shared {
            Some(backend) if options.url.starts_with("memory:") => backend.clone(),
            _ => match connect(&options.url, orders).await {
                Some(backend) => backend,
                None => return,
            },
        };
        shared = Some(backend.clone());
        let backend = match options.bug {
            Some(bug) => AnyBackend::new(Buggy::new(backend, bug)),
            None => backend,
        };
        let backend = Recorded::new(backend, Arc::clone(journal), number)
            .undoes_grants(options.url.contains("wait_for_replicas"));
        // The TTL of a resumed lock: one whose release is lost expires before the last checks.
        let ttl = Duration::from_millis(2_500);
        let mut builder = Locker::builder(backend).telemetry(Arc::new(TracingSink)).ttl(ttl);
        if number % 2 == 1 {
            // This one relies on notifications: it hardly polls.
            let seldom = Duration::from_secs(20);
            let retry = RetryPolicy::default().delay(seldom).max_delay(seldom).jitter(Jitter::None);
            builder = builder.poll_interval(seldom).retry(retry.max_retries(None));
        }
        lockers.push(builder.build().expect("valid options"));
    }
    let mut tasks = Vec::new();
    for (number, locker) in lockers.iter().enumerate() {
        let worker = || Worker {
            locker: locker.clone(),
            other: lockers[(number + 1) % lockers.len()].clone(),
            journal: Arc::clone(journal),
            register: register.clone(),
            resource: resource.clone(),
            orders: Arc::clone(orders),
            is_patient: number % 2 == 1,
        };
        for task in 0..options.tasks {
            let random = Random::of(options.seed, number as u64 * 1_000 + u64::from(task) + 1);
            tasks.push(tokio::spawn(worker().run(random)));
        }
        if worker().is_patient {
            tasks.push(tokio::spawn(worker().pass_on()));
        }
    }
    for task in tasks {
        // A panic is printed to the log, and the process then does not end clean.
        if task.await.is_err() {
            journal.write(&Event::Leak { place: "a task panicked; see the log".to_owned() });
        }
    }
    let mut left = NOTHING.to_owned();
    for locker in lockers {
        match locker.shutdown_within(Duration::from_secs(4)).await {
            // An undo of a request whose TTL is long may take longer, and is allowed to.
            Err(error) if error.code() == ErrorCode::NetworkTimeout => {
                UNFINISHED.clone_into(&mut left);
            }
            Err(error) => error.message().clone_into(&mut left),
            Ok(()) => {}
        }
    }
    journal.write(&Event::Shutdown { at: now(), left });
    std::process::exit(0);
}
