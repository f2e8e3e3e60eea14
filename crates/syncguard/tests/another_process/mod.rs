//! A backend in another process: this program again, which reads commands line by line. Every
//! backend of the kit is its own process, so the backends share only the file.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};
use syncguard::backend::{
    AcquireOutcome, AcquireRequest, Capabilities, ExtendRequest, Extension, Fenced, Lease,
    ReleaseRequest, StoredLock, TimeAuthority,
};
use syncguard::conformance::{Fixture, RawLock};
use syncguard::sqlite::SqliteConfig;
use syncguard::{
    Error, ErrorCode, ExtendOutcome, Fence, HolderInfo, Key, LockBackend, LockId, NotHeldReason,
    ReleaseOutcome, Result, SqliteBackend, Timestamp, Ttl, diagnostics,
};
use tokio::sync::oneshot;

use super::SqliteFixture;

const FILE: &str = "SYNCGUARD_TEST_REMOTE";
const CLEANS_UP: &str = "SYNCGUARD_TEST_REMOTE_CLEANS_UP";

/// The SQLite fixture, with every backend in its own process.
pub(crate) struct RemoteFixture(SqliteFixture);

impl RemoteFixture {
    pub(crate) fn new() -> Self {
        Self(SqliteFixture::new())
    }
}

impl Fixture for RemoteFixture {
    type Backend = Remote;

    async fn backend(&self) -> Remote {
        Remote::start(self.0.config().path(), false)
    }

    async fn backend_with_cleanup(&self) -> Remote {
        Remote::start(self.0.config().path(), true)
    }

    async fn plant(&self, lock: &RawLock) {
        self.0.plant(lock).await;
    }

    async fn peek(&self, key: &Key) -> Option<RawLock> {
        self.0.peek(key).await
    }

    async fn knows_id(&self, lock_id: &LockId) -> bool {
        self.0.knows_id(lock_id).await
    }

    async fn fence_counter(&self, key: &Key) -> u64 {
        self.0.fence_counter(key).await
    }

    async fn set_fence_counter(&self, key: &Key, counter: u64) {
        self.0.set_fence_counter(key, counter).await;
    }

    async fn corrupt(&self, key: &Key) -> bool {
        self.0.corrupt(key).await
    }

    async fn restart(&self) -> bool {
        self.0.restart().await
    }
}

/// A backend in another process.
#[derive(Debug)]
pub(crate) struct Remote {
    child: Mutex<Child>,
    orders: Mutex<ChildStdin>,
    waiting: Arc<Mutex<HashMap<u64, oneshot::Sender<Value>>>>,
    count: AtomicU64,
}

impl Remote {
    fn start(path: &Path, cleans_up: bool) -> Self {
        let mut child = Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", "another_process::serve", "--ignored", "--nocapture"])
            .env(FILE, path)
            .env(CLEANS_UP, cleans_up.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("starts");
        let waiting: Arc<Mutex<HashMap<u64, oneshot::Sender<Value>>>> = Arc::default();
        let answers = BufReader::new(child.stdout.take().expect("piped"));
        std::thread::spawn({
            let waiting = Arc::clone(&waiting);
            move || {
                for line in answers.lines().map_while(std::result::Result::ok) {
                    let Some(line) = line.strip_prefix("> ") else { continue };
                    let answer: Value = serde_json::from_str(line).expect("JSON");
                    let number = answer["n"].as_u64().expect("a number");
                    let asked = waiting.lock().expect("no panic inside").remove(&number);
                    drop(asked.map(|asked| asked.send(answer)));
                }
            }
        });
        let orders = Mutex::new(child.stdin.take().expect("piped"));
        Self { child: Mutex::new(child), orders, waiting, count: AtomicU64::new(0) }
    }

    async fn ask(&self, mut order: Value) -> Result<Value> {
        let number = self.count.fetch_add(1, Ordering::Relaxed);
        order["n"] = json!(number);
        let (sender, answer) = oneshot::channel();
        self.waiting.lock().expect("no panic inside").insert(number, sender);
        writeln!(self.orders.lock().expect("no panic inside"), "{order}").expect("it reads");
        let answer = answer.await.expect("it responds");
        match answer["error"].as_str() {
            None => Ok(answer["ok"].clone()),
            Some("Internal") => {
                let error = Error::new(ErrorCode::Internal, "there").without_effect();
                let operation = if answer["operation"] == "acquire" { "acquire" } else { "other" };
                Err(error.with_operation("sqlite", operation))
            }
            Some(code) => panic!("unexpected error in the other process: {code}"),
        }
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        let child = self.child.get_mut().expect("no panic inside");
        drop(child.kill());
        drop(child.wait());
    }
}

fn reason(value: &Value) -> NotHeldReason {
    if value == "expired" { NotHeldReason::Expired } else { NotHeldReason::NotFound }
}

fn millis(value: &Value) -> Timestamp {
    Timestamp::from_millis(value.as_u64().expect("a number"))
}

fn fence(value: &Value) -> Fence {
    Fence::new(value.as_u64().expect("a number")).expect("a fence")
}

fn stored(value: &Value) -> Option<StoredLock> {
    let text = |name: &str| value[name].as_str().expect("a text");
    (!value.is_null()).then(|| {
        StoredLock::new(
            Key::new(text("key")).expect("valid"),
            LockId::parse(text("id")).expect("valid"),
            fence(&value["fence"]),
        )
        .acquired_at(millis(&value["acquired"]))
        .expires_at(millis(&value["expires"]))
        .held_by(value["holder"].as_str().and_then(HolderInfo::parse))
    })
}

impl LockBackend for Remote {
    type Fencing = Fenced;

    fn capabilities(&self) -> Capabilities {
        // A command that was sent to the other process cannot be taken back.
        Capabilities::new::<Fenced>("sqlite", TimeAuthority::Server)
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<AcquireOutcome> {
        let (key, id) = (request.key().as_str(), request.lock_id());
        let order = json!({
            "acquire": key, "id": id.expose(), "ttl": request.ttl().as_millis(),
            "holder": request.holder().map(HolderInfo::as_str),
        });
        let answer = self.ask(order).await.map_err(|error| error.with_key(request.key()))?;
        Ok(if answer["fence"].is_u64() {
            let fence = fence(&answer["fence"]);
            // The other process logs the warning too, but the kit reads only the log of this one.
            fence.warn_near_the_end(request.key());
            AcquireOutcome::Acquired(Lease::new(fence, millis(&answer["expires"])))
        } else if answer == "spent" {
            AcquireOutcome::AlreadyUsed
        } else {
            let expires_in = answer["expires_in"].as_u64().map(Duration::from_millis);
            AcquireOutcome::Contended { expires_in }
        })
    }

    async fn release(&self, request: &ReleaseRequest) -> Result<ReleaseOutcome> {
        let answer = self.ask(json!({"release": request.lock_id().expose()})).await?;
        Ok(if answer == "released" {
            ReleaseOutcome::Released
        } else {
            ReleaseOutcome::NotHeld(reason(&answer))
        })
    }

    async fn extend(&self, request: &ExtendRequest) -> Result<ExtendOutcome> {
        let id = request.lock_id();
        let order = json!({"extend": id.expose(), "ttl": request.ttl().as_millis()});
        let answer = self.ask(order).await?;
        Ok(if answer.is_u64() {
            ExtendOutcome::Extended(Extension::new(millis(&answer)))
        } else {
            ExtendOutcome::NotHeld(reason(&answer))
        })
    }

    async fn is_locked(&self, key: &Key) -> Result<bool> {
        let answer = self.ask(json!({"is_locked": key.as_str()})).await?;
        Ok(answer == true)
    }

    async fn lookup_key(&self, key: &Key) -> Result<Option<StoredLock>> {
        Ok(stored(&self.ask(json!({"lookup_key": key.as_str()})).await?))
    }

    async fn lookup_id(&self, lock_id: &LockId) -> Result<Option<StoredLock>> {
        Ok(stored(&self.ask(json!({"lookup_id": lock_id.expose()})).await?))
    }
}

#[test]
#[ignore = "not a test: the other process"]
fn serve() {
    let Some(path) = std::env::var_os(FILE) else { return };
    let cleans_up = std::env::var(CLEANS_UP).is_ok_and(|word| word == "true");
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let runtime = runtime.expect("a runtime");
    let config = SqliteConfig::new(path).cleanup_in_is_locked(cleans_up);
    let backend = runtime.block_on(SqliteBackend::open(config)).expect("opens");
    for line in std::io::stdin().lines().map_while(std::result::Result::ok) {
        let order: Value = serde_json::from_str(&line).expect("JSON");
        let backend = backend.clone();
        runtime.spawn(async move {
            let answer = match follow(&backend, &order).await {
                Ok(answer) => json!({"n": order["n"], "ok": answer}),
                Err(error) => json!({
                    "n": order["n"], "error": error.code().as_str(), "operation": error.operation(),
                }),
            };
            let mut stdout = std::io::stdout().lock();
            drop(writeln!(stdout, "> {answer}").and_then(|()| stdout.flush()));
        });
    }
}

async fn follow(backend: &SqliteBackend, order: &Value) -> Result<Value> {
    let text = |name: &str| order[name].as_str();
    let ttl = || Ttl::new(Duration::from_millis(order["ttl"].as_u64().expect("a number")));
    let why = |reason| if reason == NotHeldReason::Expired { "expired" } else { "not found" };
    let show = |found: Option<diagnostics::LockInfoRaw>| match found {
        None => Value::Null,
        Some(found) => json!({
            "key": found.key.as_str(), "id": found.lock_id.expose(),
            "fence": found.info.fence.expect("fenced").get(),
            "acquired": found.info.acquired_at.as_millis(),
            "expires": found.info.expires_at.as_millis(),
            "holder": found.info.holder.as_ref().map(HolderInfo::as_str),
        }),
    };
    if let Some(key) = text("acquire") {
        let id = LockId::parse(text("id").expect("an id"))?;
        let holder = text("holder").and_then(HolderInfo::parse);
        let request = AcquireRequest::from_parts(Key::new(key)?, id, ttl()?).with_holder(holder);
        return Ok(match backend.acquire(&request).await? {
            AcquireOutcome::Acquired(lease) => {
                json!({"fence": lease.fence().get(), "expires": lease.expires_at().as_millis()})
            }
            AcquireOutcome::Contended { expires_in } => {
                json!({"expires_in": expires_in.map(|time| time.as_millis())})
            }
            AcquireOutcome::AlreadyUsed => json!("spent"),
        });
    }
    if let Some(id) = text("release") {
        return Ok(match backend.release(&ReleaseRequest::new(LockId::parse(id)?)).await? {
            ReleaseOutcome::Released => json!("released"),
            ReleaseOutcome::NotHeld(reason) => json!(why(reason)),
        });
    }
    if let Some(id) = text("extend") {
        return Ok(match backend.extend(&ExtendRequest::new(LockId::parse(id)?, ttl()?)).await? {
            ExtendOutcome::Extended(extension) => json!(extension.expires_at().as_millis()),
            ExtendOutcome::NotHeld(reason) => json!(why(reason)),
        });
    }
    if let Some(key) = text("is_locked") {
        return Ok(json!(backend.is_locked(&Key::new(key)?).await?));
    }
    if let Some(key) = text("lookup_key") {
        return Ok(show(diagnostics::get_by_key_raw(backend, &Key::new(key)?).await?));
    }
    let id = LockId::parse(text("lookup_id").expect("one of them"))?;
    Ok(show(diagnostics::get_by_id_raw(backend, &id).await?))
}
