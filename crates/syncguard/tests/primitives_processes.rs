//! Semaphores, elections and sets of locks between processes, some of which are killed or stopped
//! until their leases have ended.
#![cfg(all(feature = "redis", feature = "postgres", feature = "sqlite"))]

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, SystemTime};

use syncguard::{AnyBackend, LockOptions, Locker};
use test_support::{PostgresOptions, PostgresServer, RedisOptions, RedisServer, TempDir};

const URL: &str = "SYNCGUARD_TEST_URL";
const WORK: &str = "SYNCGUARD_TEST_WORK";

const PERMITS: u32 = 2;
/// Shorter than a process is stopped, so that it comes back without its leases.
const TTL: Duration = Duration::from_millis(1500);

/// When a guard was valid: from its grant to the last time that its process saw it valid.
struct Held {
    process: usize,
    task: String,
    key: String,
    fence: u64,
    from: u128,
    until: u128,
}

/// Returns the machine's time, which all processes share.
fn now() -> u128 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    now.expect("after 1970").as_micros()
}

/// Prints a line for the parent: `+` at the grant, `-` for the last time that it was valid.
fn report(sign: char, task: &str, key: &str, fence: u64, time: u128) {
    let mut stdout = std::io::stdout().lock();
    // A parent that is gone needs no report.
    drop(writeln!(stdout, "> {sign} {task} {key} {fence} {time}"));
    drop(stdout.flush());
}

/// Reports how long leases are valid while work is done.
async fn work(task: &str, leases: &[(String, u64)], is_valid: impl Fn() -> bool) {
    let mut last = now();
    if !is_valid() {
        return;
    }
    for (key, fence) in leases {
        report('+', task, key, *fence, last);
    }
    for _ in 0..10 {
        tokio::time::sleep(Duration::from_millis(1)).await;
        // Valid afterward means valid at this time too, even if the process stops in between.
        let time = now();
        if !is_valid() {
            break;
        }
        last = time;
    }
    for (key, fence) in leases {
        report('-', task, key, *fence, last);
    }
}

#[test]
#[ignore = "not a test: what the children of the tests do"]
fn another_process() {
    let (Ok(url), Ok(kinds)) = (std::env::var(URL), std::env::var(WORK)) else { return };
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(async {
        let backend = syncguard::connect(&url).await.expect("connects");
        let options = LockOptions::default().ttl(TTL).renew().timeout(Duration::from_secs(30));
        let locker = Locker::builder(backend).options(options.retry_on_error(true));
        let locker = locker.build().expect("in a runtime");
        let tasks = kinds.split(',').enumerate().map(|(number, kind)| {
            tokio::spawn(repeat(locker.clone(), kind.to_owned(), format!("{kind}{number}")))
        });
        for task in tasks.collect::<Vec<_>>() {
            task.await.expect("no panic");
        }
    });
}

async fn repeat(locker: Locker<AnyBackend>, kind: String, task: String) {
    let semaphore = locker.semaphore("gpu", PERMITS).expect("valid");
    let election = locker.election("service").expect("valid");
    loop {
        match kind.as_str() {
            "semaphore" => {
                let Ok(permit) = semaphore.acquire().await else { continue };
                let lease = [(format!("slot{}", permit.slot()), permit.fence().get())];
                work(&task, &lease, || permit.is_valid()).await;
                drop(permit.release().await);
            }
            "election" => {
                let Ok(lead) = election.campaign().await else { continue };
                let lease = [("leader".to_owned(), lead.term().get())];
                work(&task, &lease, || lead.is_valid()).await;
                drop(lead.resign().await);
            }
            set => {
                // Two sets that share one key.
                let keys = [if set == "set" { "a" } else { "c" }, "b"];
                let Ok(guard) = locker.lock_all(keys).await else { continue };
                let fences = guard.fences();
                let leases = fences.map(|(key, fence)| (key.as_str().to_owned(), fence.get()));
                let leases: Vec<_> = leases.collect();
                work(&task, &leases, || guard.is_valid()).await;
                drop(guard.release().await);
            }
        }
    }
}

/// Processes that use the same store, and what they have reported.
struct Fleet {
    url: String,
    work: &'static str,
    processes: Vec<Child>,
    readers: Vec<JoinHandle<()>>,
    held: Arc<Mutex<Vec<Held>>>,
}

impl Fleet {
    fn start(url: String, work: &'static str, count: usize) -> Self {
        let (processes, readers, held) = (Vec::new(), Vec::new(), Arc::default());
        let mut fleet = Self { url, work, processes, readers, held };
        for _ in 0..count {
            fleet.add();
        }
        fleet
    }

    fn add(&mut self) {
        let mut child = Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", "another_process", "--ignored", "--nocapture"])
            .envs([(URL, self.url.as_str()), (WORK, self.work)])
            .stdout(Stdio::piped())
            .spawn()
            .expect("starts");
        let lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        let (process, held) = (self.processes.len(), Arc::clone(&self.held));
        self.readers.push(thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                let Some(line) = line.strip_prefix("> ") else { continue };
                let fields: Vec<&str> = line.split(' ').collect();
                let [sign, task, key, fence, time] = fields[..] else { continue };
                let (Ok(fence), Ok(time)) = (fence.parse(), time.parse()) else { continue };
                let mut held = held.lock().expect("no panic");
                if sign == "+" {
                    let (task, key) = (task.to_owned(), key.to_owned());
                    held.push(Held { process, task, key, fence, from: time, until: time });
                } else {
                    let mut open = held.iter_mut().rev();
                    let same = open.find(|one| one.key == key && one.fence == fence);
                    same.expect("it began").until = time;
                }
            }
        }));
        self.processes.push(child);
    }

    fn signal(&self, process: usize, name: &str) {
        let pid = self.processes[process].id().to_string();
        let sent = Command::new("kill").args([&format!("-{name}"), &pid]).status();
        assert!(sent.expect("kill runs").success());
    }

    /// Stops a process until its leases have ended, and others have taken over.
    ///
    /// A process that was stopped within a transaction keeps the lock of a SQLite file, and nobody
    /// can write. It is then stopped again a moment later.
    fn stop_past_its_leases(&self, process: usize) {
        const PATIENCE: Duration = Duration::from_secs(5);
        for _ in 0..10 {
            self.signal(process, "STOP");
            thread::sleep(TTL + Duration::from_millis(1500));
            if self.are_granted(20, PATIENCE) {
                return;
            }
            self.signal(process, "CONT");
            thread::sleep(Duration::from_millis(7));
        }
        panic!("no progress while a process is stopped");
    }

    /// Waits until the processes have reported this many grants more.
    fn until_granted(&self, count: usize) {
        assert!(self.are_granted(count, Duration::from_mins(1)), "no progress");
    }

    /// Waits for this many grants more, for at most this long.
    fn are_granted(&self, count: usize, limit: Duration) -> bool {
        let target = self.count() + count;
        let waiting = SystemTime::now();
        while self.count() < target {
            if waiting.elapsed().expect("no jump") > limit {
                return false;
            }
            thread::sleep(Duration::from_millis(20));
        }
        true
    }

    fn count(&self) -> usize {
        self.held.lock().expect("no panic").len()
    }

    fn kill_all(&mut self) {
        for process in &mut self.processes {
            drop(process.kill());
            drop(process.wait());
        }
    }

    fn end(mut self) -> Vec<Held> {
        self.kill_all();
        for reader in std::mem::take(&mut self.readers) {
            reader.join().expect("no panic");
        }
        std::mem::take(&mut *self.held.lock().expect("no panic"))
    }
}

/// Leaves no process behind when a test fails.
impl Drop for Fleet {
    fn drop(&mut self) {
        self.kill_all();
    }
}

/// Checks that leases of one key never overlap, and that their fences grow.
fn check(held: &[Held]) {
    let mut by_key: HashMap<&str, Vec<&Held>> = HashMap::new();
    for one in held {
        by_key.entry(&one.key).or_default().push(one);
    }
    assert_eq!(by_key.len(), usize::try_from(PERMITS).expect("few") + 4, "every key was held");
    for (key, mut all) in by_key {
        all.sort_by_key(|one| one.fence);
        for pair in all.windows(2) {
            assert!(pair[0].fence < pair[1].fence, "{key}: fence {} twice", pair[0].fence);
            assert!(pair[0].until <= pair[1].from, "{key}: two were valid at once");
        }
    }
}

fn under_faults(url: String) {
    let work = "semaphore,semaphore,election,set,other";
    let mut fleet = Fleet::start(url, work, 3);
    fleet.until_granted(60);
    for round in 0..2 {
        fleet.signal(round + 1, "KILL");
        fleet.add();
        fleet.stop_past_its_leases(round);
        fleet.signal(round, "CONT");
        fleet.until_granted(60);
        fleet.signal(round, "KILL");
        fleet.add();
    }
    check(&fleet.end());
}

fn fairly(url: String) {
    let fleet = Fleet::start(url, "semaphore,semaphore,semaphore,semaphore", 4);
    // All have begun.
    while fleet.held.lock().expect("no panic").iter().map(|one| one.process).max() < Some(3) {
        thread::sleep(Duration::from_millis(20));
    }
    fleet.until_granted(20);
    let begun = fleet.count();
    fleet.until_granted(480);
    let held = fleet.end();
    let mut shares: HashMap<(usize, &str), u32> = HashMap::new();
    for one in &held[begun..] {
        *shares.entry((one.process, &one.task)).or_default() += 1;
    }
    let average = shares.values().sum::<u32>() / 16;
    let is_fair = |share: &u32| (average / 2..=average * 2).contains(share);
    let mut counts: Vec<u32> = shares.into_values().collect();
    counts.sort_unstable();
    assert!(counts.len() == 16 && counts.iter().all(is_fair), "{counts:?}");
}

macro_rules! on {
    ($store:ident, $start:expr) => {
        mod $store {
            use super::*;

            #[test]
            fn killed_and_stopped_processes_never_hold_what_others_hold() {
                let Some((_server, url)) = $start else { return };
                under_faults(url);
            }

            #[test]
            fn sixteen_tasks_of_four_processes_get_about_equal_shares() {
                let Some((_server, url)) = $start else { return };
                fairly(url);
            }
        }
    };
}

fn with_tables(server: PostgresServer) -> (PostgresServer, String) {
    let url = server.url();
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(async {
        let backend = syncguard::connect(&url).await.expect("connects");
        let locker = Locker::builder(backend).build().expect("in a runtime");
        locker.setup().await.expect("creates tables");
    });
    (server, url)
}

on!(
    redis,
    RedisServer::start(&RedisOptions::default()).map(|server| {
        let url = server.url();
        (server, url)
    })
);
on!(postgres, PostgresServer::start(&PostgresOptions::default()).map(with_tables));
on!(
    sqlite,
    Some(TempDir::new()).map(|folder| {
        let url = format!("sqlite:{}", folder.path().join("locks.db").display());
        (folder, url)
    })
);
