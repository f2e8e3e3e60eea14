//! Contention for one lock between tasks of one process and between processes, for every backend.

#![allow(dead_code, reason = "every benchmark uses a part of it")]

use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Write as _};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

use syncguard::backend::Fenced;
use syncguard::{AnyBackend, LockBackend, LockOptions, Locker, diagnostics};
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

/// Measures tasks on one key. Handovers per second and the longest wait have demands.
pub(crate) async fn tasks(
    report: &mut Report,
    url: &str,
    count: usize,
    [rate, longest]: [Demand; 2],
) {
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

/// Measures processes on one key. The median gap and the longest wait have demands.
pub(crate) fn processes(
    report: &mut Report,
    url: &str,
    processes: usize,
    tasks: usize,
    [gap, longest]: [Demand; 2],
) {
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
    let rate = between as f64 / RUN.as_secs_f64();
    report.info(format!("{name}, between processes"), rate, "hand-overs/s");
    report.check(format!("{name}, median gap"), percentile(&mut gaps, 50.0), "ms", gap);
    shares(report, &name, &counts);
    report.check(format!("{name}, longest wait"), percentile(&mut waits, 100.0), "ms", longest);
}
