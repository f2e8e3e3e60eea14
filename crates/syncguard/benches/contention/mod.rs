//! Contention for one lock between tasks of one process and between processes, for every backend.

#![allow(dead_code, reason = "every benchmark uses a part of it")]

use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Write as _};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

use syncguard::backend::{AcquireOutcome, AcquireRequest, Fenced};
use syncguard::{AnyBackend, Key, LockBackend, LockOptions, Locker, Ttl, diagnostics};
use tokio::runtime::{Builder, Runtime};

use crate::support::{Demand, Report, percentile};

pub(crate) const RUN: Duration = Duration::from_secs(5);
const CHILD: &str = "SYNCGUARD_BENCH_CHILD";

pub(crate) fn runtime() -> Runtime {
    Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

pub(crate) async fn locker(url: &str) -> Locker<AnyBackend> {
    let backend = syncguard::connect(url).await.unwrap();
    let options = LockOptions::default().wait_forever();
    Locker::builder(backend).options(options).build().unwrap()
}

/// Measures cycles per second of tasks that use distinct keys.
pub(crate) async fn cycles<Cycle, Work>(
    tasks: usize,
    slice: Duration,
    make: impl Fn(usize) -> Cycle,
) -> f64
where
    Cycle: FnMut(String) -> Work + Send + 'static,
    Work: Future<Output = ()> + Send,
{
    let started = Instant::now();
    let tasks: Vec<_> = (0..tasks)
        .map(|task| {
            let mut cycle = make(task);
            tokio::spawn(async move {
                let mut count = 0_usize;
                while started.elapsed() < slice {
                    cycle(format!("task{task:04}:key{:04}", count % 256)).await;
                    count += 1;
                }
                count
            })
        })
        .collect();
    let mut total = 0;
    for task in tasks {
        total += task.await.unwrap();
    }
    total as f64 / started.elapsed().as_secs_f64()
}

/// Measures lock-and-release cycles per second of tasks that use distinct keys.
pub(crate) async fn lock_cycles<B>(locker: &Locker<B>, tasks: usize, slice: Duration) -> f64
where
    B: LockBackend<Fencing = Fenced>,
{
    cycles(tasks, slice, |_task| {
        let locker = locker.clone();
        move |key: String| {
            let locker = locker.clone();
            async move {
                let guard = locker.lock(key).await.unwrap();
                guard.release().await.unwrap();
            }
        }
    })
    .await
}

/// Measures how long a guard with renewal takes to notice that another process has broken its lock.
/// Without notifications it would notice at its next renewal, up to 10 seconds later.
pub(crate) async fn time_to_detection(report: &mut Report, url: &str) {
    const COUNT: usize = 20;
    /// Longer than a guard waits before it watches its lock.
    const HELD: Duration = Duration::from_millis(300);
    report.section("Detection of a lost lock");
    let locker = Locker::builder(syncguard::connect(url).await.unwrap()).renew().build().unwrap();
    let breaker = syncguard::connect(url).await.unwrap();
    let mut times = Vec::new();
    for number in 0..COUNT {
        let guard = locker.lock(format!("loss:{number}")).await.unwrap();
        tokio::time::sleep(HELD).await;
        let shown = diagnostics::get_by_key_raw(&breaker, guard.key()).await.unwrap().unwrap();
        let started = Instant::now();
        assert!(diagnostics::break_lock(&breaker, &shown).await.unwrap());
        guard.lost().await;
        times.push(started.elapsed().as_secs_f64() * 1e3);
    }
    let (half, most) = (percentile(&mut times, 50.0), percentile(&mut times, 100.0));
    report.check("time to detect a broken lock, median", half, "ms", Demand::AtMost(100.0));
    report.check("time to detect a broken lock, longest", most, "ms", Demand::AtMost(1000.0));
}

/// Measures how long after the expiry of a crashed holder's lock, including the tolerance, a waiter
/// gets it.
pub(crate) async fn take_over(report: &mut Report, url: &str) {
    const COUNT: usize = 10;
    const TTL: Duration = Duration::from_millis(500);
    const TOLERANCE: Duration = Duration::from_secs(1);
    report.section("Take-over from a crashed holder");
    let (locker, crashed) = (locker(url).await, syncguard::connect(url).await.unwrap());
    let waits = (0..COUNT).map(|number| {
        let (locker, crashed) = (locker.clone(), crashed.clone());
        tokio::spawn(async move {
            let key = Key::new(format!("crashed:{number}")).unwrap();
            let request = AcquireRequest::new(key.clone(), Ttl::new(TTL).unwrap()).unwrap();
            let started = Instant::now();
            let outcome = crashed.acquire(&request).await.unwrap();
            assert!(matches!(outcome, AcquireOutcome::Acquired(_)));
            let guard = locker.lock(key.as_str()).await.unwrap();
            let late = started.elapsed().as_secs_f64() - (TTL + TOLERANCE).as_secs_f64();
            guard.release().await.unwrap();
            late * 1e3
        })
    });
    let mut late = Vec::new();
    for wait in waits.collect::<Vec<_>>() {
        late.push(wait.await.unwrap());
    }
    let half = percentile(&mut late, 50.0);
    report.check("take-over after the expiry, median", half, "ms", Demand::AtMost(50.0));
    let most = percentile(&mut late, 100.0);
    report.check("take-over after the expiry, longest", most, "ms", Demand::AtMost(250.0));
}

/// Measures tasks on one key. Handovers per second and the longest wait have demands.
pub(crate) async fn tasks(
    report: &mut Report,
    url: &str,
    count: usize,
    [rate, longest]: [Demand; 2],
) {
    report.section("Hand-over between tasks");
    let locker = locker(url).await;
    let end = Instant::now() + RUN;
    let tasks: Vec<_> = (0..count)
        .map(|task| {
            let locker = locker.clone();
            tokio::spawn(async move {
                let (mut waits, mut fences) = (Vec::new(), Vec::new());
                while Instant::now() < end {
                    let asked = Instant::now();
                    let guard = locker.lock("hot").await.unwrap();
                    waits.push(asked.elapsed().as_secs_f64() * 1000.0);
                    fences.push((guard.fence().get(), task));
                    guard.release().await.unwrap();
                }
                (waits, fences)
            })
        })
        .collect();
    let (mut waits, mut fences, mut counts) = (Vec::new(), Vec::new(), Vec::new());
    for task in tasks {
        let (wait, fence) = task.await.unwrap();
        counts.push(wait.len());
        waits.extend(wait);
        fences.extend(fence);
    }
    fences.sort_unstable();
    let hand_overs = fences.windows(2).filter(|pair| pair[0].1 != pair[1].1).count();
    let hand_overs = hand_overs as f64 / RUN.as_secs_f64();
    report.check(format!("{count} tasks on one key"), hand_overs, "hand-overs/s", rate);
    shares(report, &format!("{count} tasks"), &counts);
    report.info(format!("{count} tasks, median wait"), percentile(&mut waits, 50.0), "ms");
    report.histogram(format!("{count} tasks, wait for the lock"), &waits, "ms");
    let worst = percentile(&mut waits, 100.0);
    report.check(format!("{count} tasks, longest wait"), worst, "ms", longest);
}

fn shares(report: &mut Report, who: &str, counts: &[usize]) {
    let average = counts.iter().sum::<usize>() as f64 / counts.len() as f64;
    let least = counts.iter().min().copied().unwrap_or(0) as f64 / average;
    let most = counts.iter().max().copied().unwrap_or(0) as f64 / average;
    report.check(format!("{who}, least share / average"), least, "x", Demand::AtLeast(0.5));
    report.check(format!("{who}, largest share / average"), most, "x", Demand::AtMost(2.0));
}

fn now_us() -> u128 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_micros()
}

/// Runs this process as a child if it was started as one. Returns whether it was.
pub(crate) fn is_child() -> bool {
    let Ok(order) = std::env::var(CHILD) else { return false };
    let [tasks, key, url] = order.splitn(3, ' ').collect::<Vec<_>>().try_into().unwrap();
    runtime().block_on(child(url, key, tasks.parse().unwrap()));
    true
}

/// Runs tasks on one key in a child process. Prints when each lock was requested, acquired and
/// released.
async fn child(url: &str, key: &str, tasks: usize) {
    let locker = locker(url).await;
    let end = Instant::now() + RUN;
    let tasks: Vec<_> = (0..tasks)
        .map(|_| {
            let (locker, key) = (locker.clone(), key.to_owned());
            tokio::spawn(async move {
                let mut lines = String::new();
                while Instant::now() < end {
                    let asked = now_us();
                    let guard = locker.lock(&key).await.unwrap();
                    let acquired = now_us();
                    let released = now_us();
                    guard.release().await.unwrap();
                    writeln!(lines, "{asked} {acquired} {released}").unwrap();
                }
                lines
            })
        })
        .collect();
    for task in tasks {
        std::io::stdout().write_all(task.await.unwrap().as_bytes()).unwrap();
    }
}

pub(crate) fn start_child(url: &str, key: &str, tasks: usize) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .env(CHILD, format!("{tasks} {key} {url}"))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Reads the lines of a child: when each lock was requested, acquired and released, in
/// microseconds.
fn holds(child: Child) -> impl Iterator<Item = [f64; 3]> {
    BufReader::new(child.stdout.unwrap()).lines().map(|line| {
        let line = line.unwrap();
        let numbers = line.split(' ').map(|number| number.parse().unwrap());
        numbers.collect::<Vec<f64>>().try_into().unwrap()
    })
}

/// Returns how long a child waited for each lock, in milliseconds.
pub(crate) fn waits(child: Child) -> Vec<f64> {
    holds(child).map(|[asked, acquired, _]| (acquired - asked) / 1000.0).collect()
}

/// Measures processes on one key. Hand-overs per second, the median gap and the longest wait have
/// demands.
pub(crate) fn processes(
    report: &mut Report,
    url: &str,
    processes: usize,
    tasks: usize,
    [rate, gap, longest]: [Demand; 3],
) {
    report.section("Hand-over between processes");
    let children: Vec<_> = (0..processes).map(|_| start_child(url, "processes", tasks)).collect();
    let (mut all, mut waits, mut counts) = (Vec::new(), Vec::new(), Vec::new());
    for (process, child) in children.into_iter().enumerate() {
        let before = all.len();
        for [asked, acquired, released] in holds(child) {
            waits.push((acquired - asked) / 1000.0);
            all.push((acquired, released, process));
        }
        counts.push(all.len() - before);
    }
    all.sort_by(|one, two| one.0.total_cmp(&two.0));
    let mut gaps: Vec<f64> = all.windows(2).map(|pair| (pair[1].0 - pair[0].1) / 1000.0).collect();
    let between = all.windows(2).filter(|pair| pair[0].2 != pair[1].2).count();
    let name = format!("{processes} processes x {tasks} tasks");
    let per_second = |count: usize| count as f64 / RUN.as_secs_f64();
    report.check(format!("{name}, one key"), per_second(all.len()), "hand-overs/s", rate);
    report.info(format!("{name}, between processes"), per_second(between), "hand-overs/s");
    report.check(format!("{name}, median gap"), percentile(&mut gaps, 50.0), "ms", gap);
    report.histogram(format!("{name}, from release to the next grant"), &gaps, "ms");
    shares(report, &name, &counts);
    report.check(format!("{name}, longest wait"), percentile(&mut waits, 100.0), "ms", longest);
}

/// A client that polls, and sends no notification when it releases, like the TypeScript
/// implementation.
pub(crate) trait Poller: Send + 'static {
    fn try_lock(&mut self, key: &str) -> impl Future<Output = bool> + Send;
    fn unlock(&mut self) -> impl Future<Output = ()> + Send;
}

/// Sleeps for 2 to 10 ms.
async fn think(random: &mut u64) {
    *random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
    tokio::time::sleep(Duration::from_micros(2000 + (*random >> 33) % 8000)).await;
}

/// Measures tasks of ours beside as many pollers on one key. All hold it for 1 ms, and use it again
/// after 2 to 10 ms; pollers also ask that often.
pub(crate) async fn beside_pollers<P: Poller>(report: &mut Report, url: &str, pollers: Vec<P>) {
    const HELD: Duration = Duration::from_millis(1);
    const KEY: &str = "mixed";
    report.section("Fairness");
    let (locker, end, count) = (locker(url).await, Instant::now() + RUN, pollers.len());
    let polling: Vec<_> = (1..)
        .zip(pollers)
        .map(|(mut random, mut poller)| {
            tokio::spawn(async move {
                let mut grants = 0_usize;
                while Instant::now() < end {
                    if poller.try_lock(KEY).await {
                        grants += 1;
                        tokio::time::sleep(HELD).await;
                        poller.unlock().await;
                    }
                    think(&mut random).await;
                }
                grants
            })
        })
        .collect();
    let tasks: Vec<_> = (0..count as u64)
        .map(|mut random| {
            let locker = locker.clone();
            tokio::spawn(async move {
                let mut waits = Vec::new();
                while Instant::now() < end {
                    let asked = Instant::now();
                    let guard = locker.lock(KEY).await.unwrap();
                    waits.push(asked.elapsed().as_secs_f64() * 1000.0);
                    tokio::time::sleep(HELD).await;
                    guard.release().await.unwrap();
                    think(&mut random).await;
                }
                waits
            })
        })
        .collect();
    let (mut waits, mut others) = (Vec::new(), 0);
    for task in tasks {
        waits.extend(task.await.unwrap());
    }
    for poller in polling {
        others += poller.await.unwrap();
    }
    let share = waits.len() as f64 / (waits.len() + others) as f64;
    let name = format!("{count} tasks beside {count} pollers");
    report.check(format!("{name}, share of the grants"), share, "", Demand::AtLeast(0.4));
    let longest = percentile(&mut waits, 100.0);
    report.check(format!("{name}, longest wait"), longest, "ms", Demand::AtMost(2000.0));
}

/// Measures two processes on one key while something disturbs them.
pub(crate) fn disturbed(report: &mut Report, name: &str, url: &str, disturb: impl Fn()) {
    report.section("Fairness");
    let children = [(); 2].map(|()| start_child(url, "disturbed", 4));
    let end = Instant::now() + RUN;
    while Instant::now() < end {
        disturb();
        std::thread::sleep(Duration::from_millis(300));
    }
    let mut waits = children.map(waits);
    let counts = [&waits[0], &waits[1]].map(|waits| waits.len() as f64);
    let least = counts[0].min(counts[1]) / counts[0].max(counts[1]);
    report.check(format!("{name}, smaller share / larger"), least, "x", Demand::AtLeast(0.5));
    let longest = waits.iter_mut().map(|waits| percentile(waits, 100.0)).fold(0.0, f64::max);
    report.check(format!("{name}, longest wait"), longest, "ms", Demand::AtMost(2000.0));
}
