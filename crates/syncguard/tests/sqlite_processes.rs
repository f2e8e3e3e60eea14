//! The SQLite backend between processes, and under faults of its file.
#![cfg(feature = "sqlite")]

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rusqlite::Connection;
use syncguard::backend::{AcquireOutcome, AcquireRequest, ExtendRequest, ReleaseRequest};
use syncguard::sqlite::SqliteConfig;
use syncguard::{
    Error, ErrorCode, ExtendOutcome, Key, LockBackend, LockOptions, Locker, ReleaseOutcome,
    RetryPolicy, SqliteBackend, Ttl,
};
use test_support::TempDir;

const FILE: &str = "SYNCGUARD_TEST_FILE";
const ROLE: &str = "SYNCGUARD_TEST_ROLE";

fn key(text: &str) -> Key {
    Key::new(text).expect("valid")
}

fn request(text: &str) -> AcquireRequest {
    AcquireRequest::new(key(text), Ttl::DEFAULT).expect("randomness")
}

async fn open(path: &Path) -> SqliteBackend {
    SqliteBackend::open(SqliteConfig::new(path)).await.expect("opens")
}

/// Builds a locker that is woken by notifications, never by polling.
async fn locker(path: &Path) -> Locker<SqliteBackend> {
    let much_later = Duration::from_hours(1);
    let retry = RetryPolicy::default().delay(much_later);
    let options = LockOptions::default().timeout(Duration::from_mins(1)).retry(retry);
    let builder = Locker::builder(open(path).await).options(options);
    builder.poll_interval(much_later).build().expect("in a runtime")
}

/// Starts this program again, as a process that plays one role with the file.
fn child(role: &str, path: &Path) -> Child {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    in_role(&mut command, role, path).spawn().expect("starts")
}

fn in_role<'a>(command: &'a mut Command, role: &str, path: &Path) -> &'a mut Command {
    command
        .args(["--exact", "another_process", "--ignored", "--nocapture"])
        .env(FILE, path)
        .env(ROLE, role)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
}

/// Returns the lines that a child prints for its parent.
fn lines(child: &mut Child) -> impl Iterator<Item = String> + use<> {
    let lines = BufReader::new(child.stdout.take().expect("piped")).lines();
    lines.map_while(Result::ok).filter_map(|line| line.strip_prefix("> ").map(str::to_owned))
}

#[test]
#[ignore = "not a test: what the children of the tests do"]
fn another_process() {
    let (Some(path), Ok(role)) = (std::env::var_os(FILE), std::env::var(ROLE)) else { return };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    runtime.expect("a runtime").block_on(play(&role, Path::new(&path)));
}

async fn play(role: &str, path: &Path) {
    let print = |text: &str| {
        let mut stdout = std::io::stdout().lock();
        writeln!(stdout, "> {text}").expect("the parent listens");
        stdout.flush().expect("the parent listens");
    };
    match role {
        "open" => print(&format!("{:?}", outcome(path).await)),
        // Increments a number in a file, under the lock.
        "count" => {
            let (locker, number) = (locker(path).await, path.with_extension("number"));
            for _ in 0..50 {
                let guard = locker.lock("number").await.expect("acquired");
                let text = fs::read_to_string(&number).unwrap_or_default();
                let (count, fence) = text.split_once(' ').unwrap_or(("0", "0"));
                let (count, fence): (u64, u64) =
                    (count.parse().expect("a number"), fence.parse().expect("a number"));
                assert!(guard.fence().get() > fence, "fences grow");
                let text = format!("{} {}", count + 1, guard.fence().get());
                fs::write(&number, text).expect("writable");
                assert_eq!(guard.release().await.expect("works"), ReleaseOutcome::Released);
            }
        }
        // Prints every fence until the process is killed.
        "fences" => {
            let backend = open(path).await;
            loop {
                let request = request("k");
                match backend.acquire(&request).await.expect("works") {
                    AcquireOutcome::Acquired(lease) => {
                        print(&lease.fence().get().to_string());
                        let release = ReleaseRequest::new(request.lock_id());
                        backend.release(&release).await.expect("works");
                    }
                    // A killed process left its lock behind.
                    other => {
                        drop(other);
                        let conn = Connection::open(path).expect("opens");
                        conn.busy_timeout(Duration::from_secs(5)).expect("works");
                        conn.execute("DELETE FROM syncguard_locks", []).expect("works");
                    }
                }
            }
        }
        "wait" => {
            let locker = locker(path).await;
            print("waiting");
            let guard = locker.lock("awaited").await.expect("woken");
            print(&guard.fence().get().to_string());
        }
        // Opens the file by a relative path, then changes its directory.
        "move" => {
            let folder = path.parent().expect("a folder");
            std::env::set_current_dir(folder).expect("exists");
            let backend = open(Path::new(path.file_name().expect("a name"))).await;
            let request = request("k");
            drop(backend.acquire(&request).await.expect("works"));
            std::env::set_current_dir(folder.join("elsewhere")).expect("exists");
            let released = backend.release(&ReleaseRequest::new(request.lock_id())).await;
            print(&format!("{:?}", released.expect("works")));
        }
        other => panic!("unknown role: {other}"),
    }
}

/// Acquires and releases one lock, and returns the outcome.
async fn outcome(path: &Path) -> Result<ReleaseOutcome, ErrorCode> {
    let cycle = async {
        let backend = SqliteBackend::open(SqliteConfig::new(path)).await?;
        let request = request("k");
        drop(backend.acquire(&request).await?);
        backend.release(&ReleaseRequest::new(request.lock_id())).await
    };
    cycle.await.map_err(|error: Error| error.code())
}

fn file(folder: &TempDir) -> PathBuf {
    folder.path().join("locks.db")
}

#[test]
fn processes_exclude_each_other_and_wake_each_other() {
    let folder = TempDir::new();
    let path = file(&folder);
    let children: Vec<_> = (0..4).map(|_| child("count", &path)).collect();
    for mut child in children {
        assert!(child.wait().expect("ends").success());
    }
    let text = fs::read_to_string(path.with_extension("number")).expect("written");
    assert_eq!(text, "200 200", "no update was lost, and no fence was skipped");
}

#[test]
fn a_process_that_changes_its_directory_uses_the_same_file() {
    let folder = TempDir::new();
    let elsewhere = folder.path().join("elsewhere");
    fs::create_dir(&elsewhere).expect("created");
    let mut child = child("move", &file(&folder));
    assert_eq!(lines(&mut child).collect::<Vec<_>>(), ["Released"]);
    child.wait().expect("ends");
    assert_eq!(fs::read_dir(&elsewhere).expect("readable").count(), 0, "no other file");
}

#[test]
fn many_processes_create_the_file_at_once() {
    for _ in 0..8 {
        let folder = TempDir::new();
        let children: Vec<_> = (0..12).map(|_| child("open", &file(&folder))).collect();
        for mut child in children {
            let printed: Vec<_> = lines(&mut child).collect();
            let fine = ["Ok(Released)", "Ok(NotHeld(NotFound))"];
            assert!(fine.contains(&printed[0].as_str()), "{printed:?}");
        }
    }
}

#[test]
fn no_fence_repeats_when_writers_are_killed() {
    let folder = TempDir::new();
    let mut last = 0;
    for round in 0..10 {
        let mut killed = child("fences", &file(&folder));
        let mut printed = lines(&mut killed);
        for _ in 0..5 + 3 * round {
            let fence: u64 = printed.next().expect("it is alive").parse().expect("a fence");
            assert!(fence > last, "{fence} after {last}");
            last = fence;
        }
        killed.kill().expect("it is alive");
        // Lines that it printed before it was killed count too.
        for fence in printed {
            last = fence.parse().expect("a fence");
        }
        killed.wait().expect("ends");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_release_wakes_a_waiter_in_another_process() {
    let folder = TempDir::new();
    let locker = locker(&file(&folder)).await;
    for fence in ["2", "4"] {
        let guard = locker.lock("awaited").await.expect("free");
        let mut waiting = child("wait", &file(&folder));
        let mut printed = lines(&mut waiting);
        assert_eq!(printed.next().as_deref(), Some("waiting"));
        tokio::time::sleep(Duration::from_millis(500)).await;
        assert_eq!(guard.release().await.expect("works"), ReleaseOutcome::Released);
        let woken = tokio::task::spawn_blocking(move || printed.next());
        let woken = tokio::time::timeout(Duration::from_secs(20), woken).await;
        assert_eq!(woken.expect("woken, not polled").expect("no panic").as_deref(), Some(fence));
        waiting.wait().expect("ends");
        // The next waiter is woken even if the wake file is deleted.
        fs::remove_file(folder.path().join("locks.db-wake")).expect("it was written");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_busy_file_is_a_timeout_and_readers_do_not_wait() {
    let folder = TempDir::new();
    let backend = open(&file(&folder)).await;
    let held = request("held");
    assert!(matches!(backend.acquire(&held).await.expect("works"), AcquireOutcome::Acquired(_)));
    let writer = Connection::open(file(&folder)).expect("opens");
    writer.execute_batch("BEGIN IMMEDIATE").expect("free");
    let config = SqliteConfig::new(file(&folder)).busy_timeout(Duration::from_millis(300));
    let impatient = SqliteBackend::open(config).await.expect("opens");
    let error = impatient.acquire(&request("k")).await.expect_err("busy");
    assert_eq!(error.code(), ErrorCode::NetworkTimeout, "{error:?}");
    assert!(!error.may_have_taken_effect());
    // Operations that only read do not wait, and neither does an acquire of a held lock.
    assert!(impatient.is_locked(&key("held")).await.expect("works"));
    assert!(impatient.lookup_id(&held.lock_id()).await.expect("works").is_some());
    let outcome = impatient.acquire(&request("held")).await.expect("works");
    assert!(matches!(outcome, AcquireOutcome::Contended { .. }), "{outcome:?}");
    // A release that waits behind an acquire runs as soon as the file is free.
    let acquiring = tokio::spawn({
        let backend = backend.clone();
        async move { backend.acquire(&request("k")).await }
    });
    tokio::time::sleep(Duration::from_millis(50)).await;
    let releasing = tokio::spawn({
        let backend = backend.clone();
        async move { backend.release(&ReleaseRequest::new(held.lock_id())).await }
    });
    tokio::time::sleep(Duration::from_millis(100)).await;
    writer.execute_batch("COMMIT").expect("works");
    assert_eq!(releasing.await.expect("no panic").expect("works"), ReleaseOutcome::Released);
    let outcome = acquiring.await.expect("no panic").expect("works");
    assert!(matches!(outcome, AcquireOutcome::Acquired(_)), "{outcome:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_acquire_does_not_take_effect_later() {
    let folder = TempDir::new();
    let backend = open(&file(&folder)).await;
    let writer = Connection::open(file(&folder)).expect("opens");
    writer.execute_batch("BEGIN IMMEDIATE").expect("free");
    let given_up = request("k");
    let waited = tokio::time::timeout(Duration::from_millis(100), backend.acquire(&given_up)).await;
    assert!(waited.is_err(), "the file is busy");
    let undoing = tokio::spawn({
        let (backend, undo) = (backend.clone(), ReleaseRequest::undo(&given_up));
        async move { backend.release(&undo).await }
    });
    writer.execute_batch("COMMIT").expect("works");
    let undone = undoing.await.expect("no panic").expect("works");
    assert!(matches!(undone, ReleaseOutcome::NotHeld(_)), "{undone:?}");
    assert!(!backend.is_locked(&key("k")).await.expect("works"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replaced_or_deleted_file_is_noticed() {
    let folder = TempDir::new();
    let backend = open(&file(&folder)).await;
    let held = request("k");
    assert!(matches!(backend.acquire(&held).await.expect("works"), AcquireOutcome::Acquired(_)));
    // The file is replaced by one with another lock.
    let other = folder.path().join("other.db");
    let elsewhere = open(&other).await;
    let theirs = request("theirs");
    assert!(matches!(
        elsewhere.acquire(&theirs).await.expect("works"),
        AcquireOutcome::Acquired(_)
    ));
    drop(elsewhere);
    let checkpoint = Connection::open(&other).expect("opens");
    checkpoint.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_row| Ok(())).expect("works");
    drop(checkpoint);
    for end in ["", "-wal", "-shm"] {
        drop(fs::remove_file(format!("{}{end}", file(&folder).display())));
    }
    fs::rename(&other, file(&folder)).expect("renamed");
    let extended = backend.extend(&ExtendRequest::new(held.lock_id(), Ttl::DEFAULT)).await;
    assert!(matches!(extended.expect("works"), ExtendOutcome::NotHeld(_)), "the lock is lost");
    assert!(backend.is_locked(&key("theirs")).await.expect("works"));
    // The file is deleted, and a new one is created.
    for end in ["", "-wal", "-shm"] {
        drop(fs::remove_file(format!("{}{end}", file(&folder).display())));
    }
    assert!(!backend.is_locked(&key("theirs")).await.expect("works"));
    assert!(matches!(
        backend.acquire(&request("k")).await.expect("works"),
        AcquireOutcome::Acquired(_)
    ));
}

#[tokio::test(flavor = "multi_thread")]
async fn configuration_mistakes_have_a_code_and_change_nothing() {
    let folder = TempDir::new();
    let path = |name: &str| folder.path().join(name);
    fs::write(
        path("text"),
        "this text is long enough that it is not an empty database\n".repeat(40),
    )
    .expect("written");
    let theirs = Connection::open(path("theirs.db")).expect("opens");
    theirs.execute_batch("CREATE TABLE t (x)").expect("works");
    let later = open(&path("later.db")).await;
    drop(later);
    let raw = Connection::open(path("later.db")).expect("opens");
    raw.pragma_update(None, "user_version", 99).expect("works");
    for (name, expected) in [
        ("text", ErrorCode::Internal),
        ("theirs.db", ErrorCode::InvalidArgument),
        ("later.db", ErrorCode::InvalidArgument),
        ("no/such/folder/locks.db", ErrorCode::ServiceUnavailable),
        (".", ErrorCode::ServiceUnavailable),
    ] {
        let before = fs::read(path(name)).ok();
        let started = Instant::now();
        let error = SqliteBackend::open(SqliteConfig::new(path(name))).await.expect_err(name);
        assert_eq!(error.code(), expected, "{name}: {error:?}");
        assert!(started.elapsed() < Duration::from_secs(2), "{name}: it does not hang");
        assert_eq!(fs::read(path(name)).ok(), before, "{name} is unchanged");
    }
    for path in ["", ":memory:"] {
        let error = SqliteBackend::open(SqliteConfig::new(path)).await.expect_err(path);
        assert_eq!(error.code(), ErrorCode::InvalidArgument, "{path:?}");
    }
    for url in ["sqlite:", "sqlite:/x?unknown=1", "sqlite:/x?busy_timeout_ms=x", "redis:/x"] {
        let error = SqliteConfig::from_url(url).expect_err(url);
        assert_eq!(error.code(), ErrorCode::InvalidArgument, "{url}");
    }
    let config = SqliteConfig::from_url("sqlite:///a%20b/locks.db?busy_timeout_ms=9");
    assert_eq!(config.expect("a URL").path(), Path::new("/a b/locks.db"));
}

/// Runs a child under a shell that restricts it first, and returns its last line.
fn deprived(folder: &TempDir, how: &str, role: &str) -> String {
    // In a directory that every user can read.
    let program = folder.path().join("program");
    fs::copy(std::env::current_exe().expect("this program"), &program).expect("copied");
    let mut shell = Command::new("sh");
    shell.arg("-c").arg(format!("{how} \"$0\" \"$@\"")).arg(&program);
    let mut child = in_role(&mut shell, role, &file(folder)).spawn().expect("starts");
    let printed = lines(&mut child).last().unwrap_or_default();
    child.wait().expect("ends");
    printed
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_is_not_writable_is_an_auth_failure() {
    let folder = TempDir::new();
    drop(open(&file(&folder)).await);
    let who = Command::new("id").arg("-u").output().expect("runs").stdout;
    let nobody = "exec setpriv --reuid 65534 --regid 65534 --clear-groups";
    let how = if who.starts_with(b"0\n") { nobody } else { "exec" };
    for (mode, expected) in [("a+rw", "Ok(Released)"), ("a-w", "Err(AuthFailed)")] {
        let changed = Command::new("chmod").arg("-R").arg(mode).arg(folder.path()).status();
        assert!(changed.expect("runs").success());
        // The child runs as the user `nobody`, who must still be able to enter the directory.
        drop(Command::new("chmod").arg("a+rx").arg(folder.path()).status());
        if mode == "a+rw" {
            drop(Command::new("chmod").arg("a+rwx").arg(folder.path()).status());
        }
        assert_eq!(deprived(&folder, how, "open"), expected, "{mode}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_is_an_error_and_loses_nothing() {
    let folder = TempDir::new();
    let backend = open(&file(&folder)).await;
    let held = request("held");
    assert!(matches!(backend.acquire(&held).await.expect("works"), AcquireOutcome::Acquired(_)));
    drop(backend);
    // The child's files cannot grow beyond the limit of `ulimit -f`.
    let printed = deprived(&folder, "trap '' XFSZ; ulimit -f 1; exec", "open");
    assert!(
        ["Err(ServiceUnavailable)", "Err(RateLimited)"].contains(&printed.as_str()),
        "{printed}"
    );
    let backend = open(&file(&folder)).await;
    let released = backend.release(&ReleaseRequest::new(held.lock_id())).await.expect("works");
    assert_eq!(released, ReleaseOutcome::Released);
}
