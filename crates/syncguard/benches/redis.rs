//! Compares the Redis backend with a bare client that runs the same scripts, and with the scripts
//! that the wire format describes, in one run.
//!
//! `cargo xtask bench redis`. With the argument `cycles`, only the first section is measured.

#![allow(clippy::unwrap_used, clippy::cast_precision_loss, reason = "a program, not a library")]

mod contention;
mod support;

use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{AsyncCommands, Client, Script};
use support::{Demand, Report, median};
use syncguard::backend::AcquireRequest;
use syncguard::redis::RedisConfig;
use syncguard::{Key, LockOptions, Locker, RedisBackend, Ttl};
use test_support::{RedisOptions, RedisServer};

const ROUNDS: usize = 5;
const SLICE: Duration = Duration::from_millis(1500);

fn main() {
    if contention::is_child() {
        return;
    }
    let Some(server) = RedisServer::start(&RedisOptions::default()) else { return };
    let mut report = Report::default();
    report.section("Acquire and release");
    let runtime = contention::runtime();
    runtime.block_on(uncontended(&mut report, &server));
    if std::env::args().any(|argument| argument == "cycles") {
        report.finish("redis");
        return;
    }
    load_generator(&mut report, &server);
    runtime.block_on(server_time(&mut report, &server));
    runtime.block_on(contention::tasks(
        &mut report,
        &server.url(),
        16,
        [Demand::AtLeast(2000.0), Demand::AtMost(100.0)],
    ));
    let demands = [Demand::AtLeast(1000.0), Demand::AtMost(2.0), Demand::AtMost(250.0)];
    contention::processes(&mut report, &server.url(), 4, 4, demands);
    runtime.block_on(async {
        let plain = Bare::plain(raw(&server).await);
        let pollers = vec![plain.clone(), plain.clone(), plain.clone(), plain];
        contention::beside_pollers(&mut report, &server.url(), pollers).await;
    });
    runtime.block_on(contention::take_over(&mut report, &server.url()));
    runtime.block_on(contention::time_to_detection(&mut report, &server.url()));
    report.section("Resources");
    runtime.block_on(memory(&mut report, &server));
    report.finish("redis");
}

async fn raw(server: &RedisServer) -> MultiplexedConnection {
    Client::open(server.url()).unwrap().get_multiplexed_async_connection().await.unwrap()
}

async fn locker(url: &str) -> Locker<RedisBackend> {
    let backend = RedisBackend::connect(RedisConfig::from_url(url).unwrap()).await.unwrap();
    let options = LockOptions::default().wait_forever();
    Locker::builder(backend).options(options).build().unwrap()
}

/// A bare client that runs scripts and does nothing else.
#[derive(Clone)]
struct Bare {
    raw: MultiplexedConnection,
    acquire: Arc<Script>,
    release: Arc<Script>,
    is_plain: bool,
    /// The lock that it holds as a poller, and its id.
    held: Option<(String, String)>,
}

/// Uses the names of the backend, so that it excludes the library.
impl contention::Poller for Bare {
    async fn try_lock(&mut self, key: &str) -> bool {
        let request = AcquireRequest::new(Key::new(key).unwrap(), Ttl::DEFAULT).unwrap();
        let (lock, id) = (format!("syncguard:{key}"), request.lock_id().expose().to_owned());
        let index = format!("syncguard:id:{id}");
        let mut call = self.acquire.key(&lock);
        call.key(&index).key(format!("syncguard:fence:syncguard:{key}"));
        call.arg(&id).arg("30000").arg("1000").arg(&lock).arg(key);
        let answer: redis::Value = call.invoke_async(&mut self.raw).await.unwrap();
        let is_granted = matches!(answer, redis::Value::Array(_));
        self.held = is_granted.then_some((index, id));
        is_granted
    }

    async fn unlock(&mut self) {
        let (index, id) = self.held.take().unwrap();
        let mut call = self.release.key(index);
        call.arg(id).arg("1000");
        assert_eq!(call.invoke_async::<i64>(&mut self.raw).await.unwrap(), 1);
    }
}

macro_rules! lua {
    ($($file:literal)*) => {
        concat!(
            "local is_asked = false\n",
            $(include_str!(concat!("../src/backends/redis/lua/", $file, ".lua"))),*
        )
    };
}

impl Bare {
    fn ours(raw: MultiplexedConnection) -> Self {
        let script = |text: &str| Arc::new(Script::new(text));
        Self {
            raw,
            acquire: script(lua!("common" "fence" "acquire_shared" "acquire_alone" "acquire")),
            release: script(lua!(
                "common" "find" "release_shared" "delete_one" "release_alone" "release"
            )),
            is_plain: false,
            held: None,
        }
    }

    /// Uses the scripts that the wire format describes.
    fn plain(raw: MultiplexedConnection) -> Self {
        let acquire = Script::new(include_str!("../tests/typescript/acquire.lua"));
        let release = Script::new(include_str!("../tests/typescript/release.lua"));
        Self {
            raw,
            acquire: Arc::new(acquire),
            release: Arc::new(release),
            is_plain: true,
            held: None,
        }
    }

    async fn cycle(&mut self, key: &str) {
        let request = AcquireRequest::new(Key::new(key).unwrap(), Ttl::DEFAULT).unwrap();
        let lock_id = request.lock_id();
        let (lock, index) = (format!("bare:{key}"), format!("bare:id:{}", lock_id.expose()));
        let id = lock_id.expose();
        let quoted = format!("\"{key}\"");
        let mut call = self.acquire.key(&lock);
        call.key(&index).key(format!("bare:fence:bare:{key}"));
        if self.is_plain {
            call.arg(id).arg("30000").arg("1000").arg(&lock).arg(&quoted);
        } else {
            call.arg("1000").arg("900000000000000").arg("0").arg("0").arg("2000").arg("0");
            call.arg(id).arg("30000").arg(&quoted);
        }
        let granted: (i64, redis::Value, redis::Value) =
            call.invoke_async(&mut self.raw).await.unwrap();
        assert_eq!(granted.0, 1);
        let mut call = self.release.key(&index);
        if self.is_plain {
            call.arg(id).arg("1000");
        } else {
            call.key(&lock).arg("1000").arg("bare:wake:").arg("").arg("60000");
            call.arg(id).arg("bare:wake").arg("");
        }
        assert_eq!(call.invoke_async::<i64>(&mut self.raw).await.unwrap(), 1);
    }
}

async fn bare_cycles(bare: &Bare, tasks: usize) -> f64 {
    contention::cycles(tasks, SLICE, |_task| {
        let bare = bare.clone();
        move |key: String| {
            let mut bare = bare.clone();
            async move { bare.cycle(&key).await }
        }
    })
    .await
}

async fn uncontended(report: &mut Report, server: &RedisServer) {
    let (bare, ours) = (Bare::ours(raw(server).await), locker(&server.url()).await);
    for tasks in [16, 64] {
        let (mut limits, mut figures) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            limits.push(bare_cycles(&bare, tasks).await);
            figures.push(contention::lock_cycles(&ours, tasks, SLICE).await);
        }
        let ratios = limits.iter().zip(&figures).map(|(limit, figure)| figure / limit).collect();
        report.info(format!("{tasks} tasks, bare client"), median(limits), "cycles/s");
        report.info(format!("{tasks} tasks, ours"), median(figures), "cycles/s");
        let name = format!("{tasks} tasks, ours / bare client");
        let least = if tasks == 64 { 1.4 } else { 0.85 };
        report.check(name, median(ratios), "x", Demand::AtLeast(least));
    }
}

/// Measures redis-benchmark with the simplest possible lock: `SET … NX` and `DEL`, without owner,
/// fence or expiry check. Two commands are one cycle.
fn load_generator(report: &mut Report, server: &RedisServer) {
    for clients in ["16", "64"] {
        let port = server.port().to_string();
        let run = |command: &[&str]| -> Option<f64> {
            let fixed = ["-p", &port, "-c", clients, "-n", "100000", "-r", "4096", "--csv"];
            let output = Command::new("redis-benchmark").args(fixed).args(command).output().ok()?;
            let text = String::from_utf8(output.stdout).ok()?;
            text.lines().last()?.split("\",\"").nth(1)?.trim_matches('"').parse().ok()
        };
        let set = run(&["SET", "bench:__rand_int__", "id", "NX", "PX", "30000"]);
        let cycle = set.zip(run(&["DEL", "bench:__rand_int__"]));
        if let Some((set, del)) = cycle {
            let rate = 1.0 / (1.0 / set + 1.0 / del);
            report.info(
                format!("{clients} clients, redis-benchmark SET NX + DEL"),
                rate,
                "cycles/s",
            );
        }
    }
}

/// Returns the microseconds that the server spent per cycle, by its own statistics.
async fn micros_per_cycle(raw: &mut MultiplexedConnection, work: impl Future<Output = f64>) -> f64 {
    redis::cmd("CONFIG").arg("RESETSTAT").query_async::<()>(raw).await.unwrap();
    let count = work.await * SLICE.as_secs_f64();
    let info: String = redis::cmd("INFO").arg("commandstats").query_async(raw).await.unwrap();
    let line = info.lines().find(|line| line.starts_with("cmdstat_evalsha:")).unwrap();
    let usec = line.split(&['=', ','][..]).nth(3).unwrap();
    usec.parse::<f64>().unwrap() / count
}

async fn server_time(report: &mut Report, server: &RedisServer) {
    let mut raw = raw(server).await;
    let (plain, ours) = (Bare::plain(raw.clone()), locker(&server.url()).await);
    let (mut limits, mut figures) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        limits.push(micros_per_cycle(&mut raw, bare_cycles(&plain, 16)).await);
        figures.push(micros_per_cycle(&mut raw, contention::lock_cycles(&ours, 16, SLICE)).await);
    }
    let ratios = limits.iter().zip(&figures).map(|(limit, figure)| figure / limit).collect();
    report.info("server time per cycle, plain scripts", median(limits), "us");
    report.info("server time per cycle, ours", median(figures), "us");
    let name = "server time, ours / plain scripts";
    report.check(name, median(ratios), "x", Demand::AtMost(1.15));
}

async fn memory(report: &mut Report, server: &RedisServer) {
    const COUNT: usize = 10_000;
    let mut raw = raw(server).await;
    redis::cmd("FLUSHALL").query_async::<()>(&mut raw).await.unwrap();
    let used = |info: String| {
        let line =
            info.lines().find_map(|line| line.strip_prefix("used_memory:").map(str::to_owned));
        line.unwrap().trim().parse::<f64>().unwrap()
    };
    let info = || {
        let mut info = redis::cmd("INFO");
        info.arg("memory");
        info
    };
    let locker = locker(&server.url()).await;
    drop(locker.lock("warm up").await.unwrap());
    let before = used(info().query_async(&mut raw).await.unwrap());
    let mut guards = Vec::new();
    for number in 0..COUNT {
        guards.push(locker.lock(format!("an-18-byte-k{number:06}")).await.unwrap());
    }
    let after = used(info().query_async(&mut raw).await.unwrap());
    let each = (after - before) / COUNT as f64;
    report.check("server memory per held lock", each, "bytes", Demand::AtMost(750.0));
    let names: usize = redis::cmd("DBSIZE").query_async(&mut raw).await.unwrap();
    assert!(names >= 3 * COUNT);
    raw.flushall::<()>().await.unwrap();
}
