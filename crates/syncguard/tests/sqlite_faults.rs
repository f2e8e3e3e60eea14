//! The SQLite backend under faults of its files: replaced while they are opened, deleted while they
//! are watched, links in their place. Also its outcomes and the context of its errors.
#![cfg(all(feature = "sqlite", unix))]

use std::fs;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use rusqlite::{Connection, params};
use syncguard::backend::{
    AcquireOutcome, AcquireRequest, Capabilities, Clock, ExtendRequest, Fenced, Hint,
    ReleaseRequest, SystemClock, TimeAuthority,
};
use syncguard::sqlite::SqliteConfig;
use syncguard::{
    Error, ErrorCode, ExtendOutcome, HolderInfo, Key, LockBackend, LockId, LockOptions, Locker,
    NotHeldReason, ReleaseOutcome, RetryPolicy, SqliteBackend, Ttl, diagnostics,
};
use test_support::TempDir;

fn key(text: &str) -> Key {
    Key::new(text).expect("valid")
}

fn request(text: &str) -> AcquireRequest {
    AcquireRequest::new(key(text), Ttl::DEFAULT).expect("randomness")
}

fn file(folder: &TempDir) -> PathBuf {
    folder.path().join("locks.db")
}

fn beside(path: &Path, end: &str) -> PathBuf {
    format!("{}{end}", path.display()).into()
}

async fn open(path: &Path) -> SqliteBackend {
    SqliteBackend::open(SqliteConfig::new(path)).await.expect("opens")
}

async fn grant(backend: &SqliteBackend, name: &str) -> AcquireRequest {
    let request = request(name);
    let outcome = backend.acquire(&request).await.expect("works");
    assert!(matches!(outcome, AcquireOutcome::Acquired(_)), "{outcome:?}");
    request
}

/// Deletes a lock file and the files that belong to it.
fn delete(path: &Path) {
    for end in ["", "-wal", "-shm"] {
        drop(fs::remove_file(beside(path, end)));
    }
}

/// Creates lock files without locks, and closes them.
async fn spare_files(folder: &TempDir, count: usize) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for number in 0..count {
        let path = folder.path().join(format!("spare{number}.db"));
        drop(open(&path).await);
        let raw = Connection::open(&path).expect("opens");
        raw.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_row| Ok(())).expect("works");
        drop(raw);
        files.push(path);
    }
    files
}

#[tokio::test(flavor = "multi_thread")]
async fn replacing_the_file_while_it_is_opened_allows_no_second_holder() {
    let folder = TempDir::new();
    let path = file(&folder);
    let mut hits = 0;
    for spare in spare_files(&folder, 60).await {
        delete(&path);
        // Replaces the file as soon as SQLite has opened the first one.
        let has_opened = Arc::new(AtomicBool::new(false));
        let replacing = thread::spawn({
            let (path, has_opened) = (path.clone(), Arc::clone(&has_opened));
            move || {
                while !beside(&path, "-wal").exists() {
                    if has_opened.load(Ordering::SeqCst) {
                        return false;
                    }
                }
                delete(&path);
                fs::rename(spare, &path).expect("renamed");
                !has_opened.load(Ordering::SeqCst)
            }
        });
        let opened = SqliteBackend::open(SqliteConfig::new(&path)).await;
        has_opened.store(true, Ordering::SeqCst);
        hits += u32::from(replacing.join().expect("no panic"));
        // Opening may fail, but must not lock in a file that is no longer at the path.
        let Ok(first) = opened else { continue };
        let held = grant(&first, "k").await;
        let second = open(&path).await;
        let outcome = second.acquire(&request("k")).await.expect("works");
        assert!(matches!(outcome, AcquireOutcome::Contended { .. }), "two holders: {outcome:?}");
        let released = second.release(&ReleaseRequest::new(held.lock_id())).await.expect("works");
        assert_eq!(released, ReleaseOutcome::Released);
    }
    assert!(hits > 0, "no file was replaced in time");
}

/// Builds a locker that is woken by notifications, never by polling.
async fn waiter(path: &Path) -> Locker<SqliteBackend> {
    let much_later = Duration::from_hours(1);
    let retry = RetryPolicy::default().delay(much_later);
    let options = LockOptions::default().wait_forever().retry(retry);
    let builder = Locker::builder(open(path).await).options(options);
    builder.poll_interval(much_later).build().expect("in a runtime")
}

#[cfg(target_os = "linux")]
#[tokio::test(flavor = "multi_thread")]
async fn waiters_notice_a_wake_file_that_is_deleted_or_renamed() {
    let folder = TempDir::new();
    let (path, wake) = (file(&folder), beside(&file(&folder), "-wake"));
    let holder = open(&path).await;
    let waiter = waiter(&path).await;
    let changes: [fn(&Path); 3] = [
        |wake| fs::remove_file(wake).expect("it was written"),
        |wake| fs::rename(wake, wake.with_extension("old")).expect("it was written"),
        |wake| {
            fs::remove_file(wake).expect("it was written");
            fs::write(wake, [7; 9]).expect("written");
        },
    ];
    for change in changes {
        let held = grant(&holder, "awaited").await;
        let waiting = tokio::spawn({
            let waiter = waiter.clone();
            async move { waiter.lock("awaited").await.map(|_guard| ()) }
        });
        tokio::time::sleep(Duration::from_millis(300)).await;
        change(&wake);
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert!(!waiting.is_finished());
        let released = holder.release(&ReleaseRequest::new(held.lock_id())).await.expect("works");
        assert_eq!(released, ReleaseOutcome::Released);
        let woken = tokio::time::timeout(Duration::from_secs(20), waiting).await;
        woken.expect("woken, not polled").expect("no panic").expect("acquired");
        let freed = async || !holder.is_locked(&key("awaited")).await.expect("works");
        while !freed().await {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

/// The wake file in the old directory is neither deleted nor renamed.
#[cfg(target_os = "linux")]
#[tokio::test(flavor = "multi_thread")]
async fn waiters_are_woken_after_the_directory_was_exchanged() {
    let folder = TempDir::new();
    let [current, other] = ["current", "other"].map(|name| folder.path().join(name));
    fs::create_dir(&current).expect("created");
    fs::create_dir(&other).expect("created");
    let path = current.join("locks.db");
    let holder = open(&path).await;
    let waiter = waiter(&path).await;
    for round in 0..2 {
        let held = grant(&holder, "awaited").await;
        let waiting = tokio::spawn({
            let waiter = waiter.clone();
            async move { waiter.lock("awaited").await?.release().await }
        });
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert!(!waiting.is_finished());
        let released = holder.release(&ReleaseRequest::new(held.lock_id())).await.expect("works");
        assert_eq!(released, ReleaseOutcome::Released);
        let woken = tokio::time::timeout(Duration::from_secs(10), waiting).await;
        woken.expect("woken, not polled").expect("no panic").expect("acquired");
        if round == 0 {
            let [before, after] = [&other, &current];
            let flags = rustix::fs::RenameFlags::EXCHANGE;
            let cwd = rustix::fs::CWD;
            rustix::fs::renameat_with(cwd, before, cwd, after, flags).expect("exchanged");
        }
    }
}

/// Waits until the check succeeds, and panics with `what` if it does not.
async fn until(what: &str, check: impl Fn() -> bool) {
    let started = Instant::now();
    while !check() {
        assert!(started.elapsed() < Duration::from_secs(10), "{what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

const FOLDER: &str = "SYNCGUARD_TEST_FOLDER";

#[cfg(target_os = "linux")]
#[test]
#[ignore = "not a test: the process in which threads are counted"]
fn close_and_count_threads() {
    let Some(folder) = std::env::var_os(FOLDER) else { return };
    let threads = || {
        let tasks = fs::read_dir("/proc/self/task").expect("Linux").flatten();
        let names = tasks.filter_map(|task| fs::read_to_string(task.path().join("comm")).ok());
        names.filter(|name| name.starts_with("syncguard")).count()
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime").block_on(async {
        let changes: [fn(&Path); 3] = [
            |_wake| {},
            |wake| fs::remove_file(wake).expect("there"),
            |wake| {
                // With a link in its place, the file cannot be created again.
                let link = wake.with_extension("link");
                std::os::unix::fs::symlink("nowhere/at/all", &link).expect("linked");
                fs::rename(link, wake).expect("renamed");
            },
        ];
        for (number, change) in changes.into_iter().enumerate() {
            let path = Path::new(&folder).join(format!("{number}.db"));
            let backend = open(&path).await;
            let subscription = backend.subscribe(&key("k")).await.expect("it has them");
            assert!(subscription.is_working());
            // The worker and the watcher. A thread has its name only once it runs.
            until("the threads run", || threads() == 2).await;
            change(&beside(&path, "-wake"));
            drop((subscription, backend));
            until(&format!("no thread is left, case {number}"), || threads() == 0).await;
        }
    });
}

#[cfg(target_os = "linux")]
#[test]
fn closing_leaves_no_thread_whatever_happened_to_the_wake_file() {
    let folder = TempDir::new();
    let mut child = Command::new(std::env::current_exe().expect("this program"));
    child.args(["--exact", "close_and_count_threads", "--ignored"]).env(FOLDER, folder.path());
    let ended = child.output().expect("runs");
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stdout));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_link_in_place_of_the_wake_file_is_not_followed() {
    let folder = TempDir::new();
    let (path, victim) = (file(&folder), folder.path().join("victim"));
    fs::write(&victim, "precious").expect("written");
    std::os::unix::fs::symlink(&victim, beside(&path, "-wake")).expect("linked");
    let backend = open(&path).await;
    let held = grant(&backend, "k").await;
    let subscription = backend.subscribe(&key("k")).await.expect("within the process");
    assert!(!subscription.is_working(), "between processes only polling helps");
    let released = backend.release(&ReleaseRequest::new(held.lock_id())).await.expect("works");
    assert_eq!(released, ReleaseOutcome::Released);
    assert_eq!(fs::read(&victim).expect("there"), b"precious");
    // The target of a dangling link is not created.
    let nowhere = folder.path().join("nowhere");
    fs::remove_file(beside(&path, "-wake")).expect("removed");
    std::os::unix::fs::symlink(&nowhere, beside(&path, "-wake")).expect("linked");
    let held = grant(&backend, "k").await;
    backend.release(&ReleaseRequest::new(held.lock_id())).await.expect("works");
    assert!(!nowhere.exists());
}

/// A waker that unparks a thread.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Runs a future without a runtime.
fn block_on<T>(future: impl Future<Output = T>) -> T {
    let mut future = pin!(future);
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(answer) => return answer,
            Poll::Pending => thread::park(),
        }
    }
}

fn raw(path: &Path) -> Connection {
    let raw = Connection::open(path).expect("opens");
    raw.busy_timeout(Duration::from_secs(5)).expect("works");
    raw
}

fn now_ms() -> i64 {
    SystemClock.now().as_millis().try_into().expect("this century")
}

/// Stores an expired lock and returns its id.
fn plant(path: &Path, name: &str, expired_ms_ago: i64) -> LockId {
    let lock_id = request(name).lock_id();
    let insert = "INSERT OR REPLACE INTO syncguard_locks VALUES (?1, ?2, 1, ?3, ?3, NULL)";
    let expired = now_ms() - expired_ms_ago;
    raw(path).execute(insert, params![name, lock_id.expose(), expired]).expect("works");
    lock_id
}

fn rows(path: &Path) -> i64 {
    raw(path)
        .query_row("SELECT count(*) FROM syncguard_locks", [], |row| row.get(0))
        .expect("works")
}

#[test]
fn no_operation_needs_a_runtime() {
    let folder = TempDir::new();
    let path = file(&folder);
    let config = SqliteConfig::new(&path).cleanup_in_is_locked(true);
    let backend = block_on(SqliteBackend::open(config)).expect("opens");
    plant(&path, "dead", 60_000);
    assert!(!block_on(backend.is_locked(&key("dead"))).expect("works"));
    let started = Instant::now();
    while rows(&path) > 0 {
        assert!(started.elapsed() < Duration::from_secs(10), "the dead row is cleaned up");
        thread::sleep(Duration::from_millis(10));
    }
    let request = request("k");
    let outcome = block_on(backend.acquire(&request)).expect("works");
    assert!(matches!(outcome, AcquireOutcome::Acquired(_)), "{outcome:?}");
    assert!(block_on(backend.subscribe(&key("k"))).is_some());
    let extend = ExtendRequest::new(request.lock_id(), Ttl::DEFAULT);
    let extended = block_on(backend.extend(&extend)).expect("works");
    assert!(matches!(extended, ExtendOutcome::Extended(_)), "{extended:?}");
    let released = block_on(backend.release(&ReleaseRequest::new(request.lock_id())));
    assert_eq!(released.expect("works"), ReleaseOutcome::Released);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_lock_is_expired_and_a_missing_one_is_not_found() {
    let folder = TempDir::new();
    let backend = open(&file(&folder)).await;
    let dead = plant(&file(&folder), "dead", 1_001);
    let missing = request("missing").lock_id();
    for (lock_id, name, reason) in
        [(dead, "dead", NotHeldReason::Expired), (missing, "missing", NotHeldReason::NotFound)]
    {
        for hint in [Hint::default(), Hint::key(key(name))] {
            let extend = ExtendRequest::new(lock_id, Ttl::DEFAULT).with_hint(hint.clone());
            let extended = backend.extend(&extend).await.expect("works");
            assert!(
                matches!(extended, ExtendOutcome::NotHeld(why) if why == reason),
                "{extended:?}"
            );
            let release = ReleaseRequest::new(lock_id).with_hint(hint);
            let released = backend.release(&release).await.expect("works");
            assert_eq!(released, ReleaseOutcome::NotHeld(reason), "{name}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_expiry_is_computed_after_the_wait_for_the_file() {
    let folder = TempDir::new();
    let path = file(&folder);
    let backend = open(&path).await;
    let ttl = Ttl::new(Duration::from_mins(1)).expect("valid");
    let held = grant(&backend, "held").await;
    let writer = raw(&path);
    writer.execute_batch("BEGIN IMMEDIATE").expect("free");
    let asking = tokio::spawn({
        let (backend, held) = (backend.clone(), held.lock_id());
        async move {
            let request = AcquireRequest::new(key("new"), ttl).expect("randomness");
            let extend = ExtendRequest::new(held, ttl);
            let (acquired, extended) =
                tokio::join!(backend.acquire(&request), backend.extend(&extend));
            let (acquired, extended) = (acquired.expect("works"), extended.expect("works"));
            let AcquireOutcome::Acquired(lease) = acquired else { panic!("{acquired:?}") };
            let ExtendOutcome::Extended(extension) = extended else { panic!("{extended:?}") };
            [lease.expires_at(), extension.expires_at()]
        }
    });
    tokio::time::sleep(Duration::from_millis(700)).await;
    let free_at = SystemClock.now();
    writer.execute_batch("COMMIT").expect("works");
    for expires_at in asking.await.expect("no panic") {
        assert!(
            expires_at >= free_at.expiry(ttl),
            "{expires_at:?} was computed before {free_at:?}"
        );
        assert!(expires_at <= SystemClock.now().expiry(ttl));
    }
    let stored: i64 = writer
        .query_row("SELECT min(expires_at_ms) FROM syncguard_locks", [], |row| row.get(0))
        .expect("works");
    let earliest = free_at.expiry(ttl).as_millis();
    assert!(u64::try_from(stored).expect("positive") >= earliest, "{stored} before {earliest}");
}

#[tokio::test(flavor = "multi_thread")]
async fn capabilities_and_error_contexts_are_correct() {
    let folder = TempDir::new();
    let path = file(&folder);
    let config = SqliteConfig::new(&path).busy_timeout(Duration::from_millis(100));
    let backend = SqliteBackend::open(config).await.expect("opens");
    let expected = Capabilities::new::<Fenced>("sqlite", TimeAuthority::Server).with_final_undo();
    assert_eq!(backend.capabilities(), expected);
    let check = |error: Error, operation: &str, key: Option<&Key>, lock_id: Option<LockId>| {
        assert_eq!(error.backend(), Some("sqlite"), "{error:?}");
        assert_eq!(error.operation(), Some(operation), "{error:?}");
        assert_eq!(error.key(), key, "{error:?}");
        assert!(error.lock_id() == lock_id, "{error:?}");
        error.code()
    };
    let (key, request) = (key("k"), request("k"));
    let lock_id = request.lock_id();
    let (extend, release) =
        (ExtendRequest::new(lock_id, Ttl::DEFAULT), ReleaseRequest::new(lock_id));
    // Writes, while the file is busy.
    let writer = raw(&path);
    writer.execute_batch("BEGIN IMMEDIATE").expect("free");
    let error = backend.acquire(&request).await.expect_err("busy");
    assert_eq!(check(error, "acquire", Some(&key), None), ErrorCode::NetworkTimeout);
    let error = backend.extend(&extend).await.expect_err("busy");
    assert_eq!(check(error, "extend", None, Some(lock_id)), ErrorCode::NetworkTimeout);
    let error = backend.release(&release).await.expect_err("busy");
    assert_eq!(check(error, "release", None, Some(lock_id)), ErrorCode::NetworkTimeout);
    writer.execute_batch("COMMIT").expect("works");
    // Reads of an invalid row.
    writer
        .execute(
            "INSERT INTO syncguard_locks VALUES ('k', ?1, -1, 1, ?2, NULL)",
            params![lock_id.expose(), now_ms() + 60_000],
        )
        .expect("works");
    let error = backend.is_locked(&key).await.expect_err("invalid");
    assert_eq!(check(error, "is_locked", Some(&key), None), ErrorCode::Internal);
    let error = backend.lookup_key(&key).await.expect_err("invalid");
    assert_eq!(check(error, "lookup", Some(&key), None), ErrorCode::Internal);
    let error = backend.lookup_id(&lock_id).await.expect_err("invalid");
    assert_eq!(check(error, "lookup", None, Some(lock_id)), ErrorCode::Internal);
    // Opening and listing without a directory.
    let missing = SqliteConfig::new(folder.path().join("no/locks.db"));
    let error = SqliteBackend::open(missing).await.expect_err("no folder");
    assert_eq!(check(error, "open", None, None), ErrorCode::ServiceUnavailable);
    drop(writer);
    fs::remove_dir_all(folder.path()).expect("removed");
    let admin = backend.admin().expect("it has one");
    let error = admin.list(None).await.expect_err("no folder");
    assert_eq!(check(error, "list", None, None), ErrorCode::ServiceUnavailable);
}

/// A file of an earlier release has no place for holders. It gets one when it is opened, and a
/// process of that release continues to use it.
#[tokio::test(flavor = "multi_thread")]
async fn a_file_of_an_earlier_release_gets_holders_and_stays_usable() {
    let folder = TempDir::new();
    let path = file(&folder);
    drop(open(&path).await);
    let earlier = raw(&path);
    earlier.execute_batch("ALTER TABLE syncguard_locks DROP COLUMN holder").expect("works");
    let backend = open(&path).await;
    let holder = HolderInfo::of_this_process(Some("new"));
    let named = request("k").with_holder(Some(holder.clone()));
    let outcome = backend.acquire(&named).await.expect("works");
    assert!(matches!(outcome, AcquireOutcome::Acquired(_)), "{outcome:?}");
    let held_by = async || {
        let found = diagnostics::get_by_key(&backend, &key("k")).await.expect("works");
        found.expect("held").holder
    };
    assert_eq!(held_by().await, Some(holder));
    let replace = "INSERT OR REPLACE INTO syncguard_locks (key, lock_id, fence, acquired_at_ms, \
                   expires_at_ms) VALUES ('k', 'AAAAAAAAAAAAAAAAAAAAAA', 2, 1, ?1)";
    earlier.execute(replace, [now_ms() + 60_000]).expect("works");
    assert_eq!(held_by().await, None);
}
