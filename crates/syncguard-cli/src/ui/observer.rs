//! Watches the store for the page: lists its locks, listens for changes, and publishes what it sees
//! as JSON.

use std::collections::{HashMap, HashSet};
use std::future::pending;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::Serialize;
use syncguard::backend::{Admin, BreakNote, Clock, Cursor, Subscription, SystemClock};
use syncguard::diagnostics::LockInfoRaw;
use syncguard::{AnyBackend, HolderInfo, Key, LockBackend, diagnostics};
use tokio::sync::{mpsc, watch};
use tokio::task::AbortHandle;
use tokio::time::{Instant, timeout};

use super::history::{History, Lock, Percentiles, Row, WINDOW_MS};
use crate::Context;
use crate::commands::doctor::{Check, safety};
use crate::exit::{FAILED, Failure};
use crate::output::printable;

/// How often the locks are listed, at least.
const INTERVAL: Duration = Duration::from_millis(400);

/// The least time between two lists, so that a busy store is not asked in a loop.
const PAUSE: Duration = Duration::from_millis(50);

/// How long one list may take.
const STORE_TIMEOUT: Duration = Duration::from_secs(5);

/// How often the store's settings are checked.
const CHECK_INTERVAL: Duration = Duration::from_mins(5);

/// The most locks that are watched. The page can still leaf through all of them.
const MOST_LOCKS: usize = 2000;

/// The most locks that are sent with every change.
const MOST_SENT: usize = 500;

/// The most rows of the timeline that are sent.
const MOST_ROWS: usize = 40;

/// The most keys that are listened to.
const MOST_LISTENERS: usize = 64;

/// The most locks, of those that ended since the last list, that are looked up as broken.
const MOST_NOTES: usize = 64;

/// How often the waiters of such a key are counted.
const COUNT_INTERVAL: Duration = Duration::from_secs(1);

/// What the page shows.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct State<'a> {
    store: Option<&'a str>,
    error: Option<&'a str>,
    now_ms: u64,
    window_ms: u64,
    held: usize,
    /// Whether there are more locks than are watched.
    is_partial: bool,
    /// Whether there are more locks than are sent.
    has_more: bool,
    may_break: bool,
    locks: &'a [Lock],
    timeline: Vec<Row<'a>>,
    hand_overs: Option<Percentiles>,
    waits: Option<Percentiles>,
    holds: Option<Percentiles>,
    checks: &'a [Check],
}

/// A part of all locks, for the pager.
#[derive(Debug, Serialize)]
pub(super) struct LockPage {
    locks: Vec<Lock>,
    /// Where the next page begins.
    next: Option<String>,
}

/// What the metrics of the store need.
#[derive(Clone, Debug, Default)]
pub(super) struct Summary {
    pub(super) is_up: bool,
    pub(super) held: usize,
    pub(super) is_partial: bool,
    pub(super) oldest: Option<Duration>,
    pub(super) waiters: u32,
}

/// Watches the store, on behalf of all pages that are open.
pub(super) struct Observer {
    context: Context,
    may_break: bool,
    backend: Mutex<Option<AnyBackend>>,
    history: Mutex<History>,
    summary: Mutex<Summary>,
    published: watch::Sender<Arc<str>>,
}

impl Observer {
    pub(super) fn new(context: Context, may_break: bool) -> Arc<Self> {
        Arc::new(Self {
            context,
            may_break,
            backend: Mutex::default(),
            history: Mutex::default(),
            summary: Mutex::default(),
            published: watch::Sender::new("{}".into()),
        })
    }

    pub(super) fn subscribe(&self) -> watch::Receiver<Arc<str>> {
        let mut receiver = self.published.subscribe();
        // A page that opens gets the last state at once.
        receiver.mark_changed();
        receiver
    }

    pub(super) fn summary(&self) -> Summary {
        lock(&self.summary).clone()
    }

    pub(super) fn may_break(&self) -> bool {
        self.may_break
    }

    /// Watches the store until the process ends. A store that fails is asked again.
    pub(super) async fn watch(self: Arc<Self>) {
        let (sender, mut changes) = mpsc::unbounded_channel();
        let mut listeners = Listeners { sender, tasks: HashMap::new() };
        let mut checks = Vec::new();
        let mut check_at = Instant::now();
        let mut before = Vec::new();
        loop {
            match timeout(STORE_TIMEOUT, self.look()).await {
                Ok(Ok((mut locks, is_complete))) => {
                    let now_ms = SystemClock.now().as_millis();
                    drop(timeout(STORE_TIMEOUT, self.note_breaks(&before, &locks)).await);
                    lock(&self.history).observe(now_ms, &locks, is_complete);
                    for found in &mut locks {
                        found.waiters = lock(&self.history).waiters(&found.key);
                    }
                    self.publish(&locks, is_complete, &checks, None);
                    let held: Vec<String> =
                        lock(&self.history).held_keys().into_iter().map(str::to_owned).collect();
                    listeners.listen_to(self.backend(), &held);
                    if Instant::now() >= check_at
                        && let Some(backend) = self.backend()
                    {
                        check_at = Instant::now() + CHECK_INTERVAL;
                        checks = timeout(STORE_TIMEOUT, safety(&backend)).await.unwrap_or_default();
                        self.publish(&locks, is_complete, &checks, None);
                    }
                    before = locks;
                }
                failed => {
                    let failure = match failed {
                        Ok(Err(failure)) => self.context.target.locate(failure),
                        _ => Failure::new(FAILED, "the store does not answer"),
                    };
                    // A backend reconnects by itself, but a file may have been replaced.
                    *lock(&self.backend) = None;
                    listeners.tasks.clear();
                    self.publish(&[], false, &checks, Some(&failure.message));
                }
            }
            tokio::time::sleep(PAUSE).await;
            let next = Instant::now() + INTERVAL;
            if let Ok(Some(first)) = tokio::time::timeout_at(next, changes.recv()).await {
                self.note(&first);
                while let Ok(change) = changes.try_recv() {
                    self.note(&change);
                }
            }
        }
    }

    fn note(&self, change: &KeyChange) {
        let mut history = lock(&self.history);
        match change.kind {
            // Listing the locks shows what it was.
            ChangeKind::Changed => {}
            ChangeKind::Released { holder_age_ms } => {
                history.released(&change.key, change.at_ms, holder_age_ms);
            }
            ChangeKind::Waiters(waiters) => history.waiting(&change.key, change.at_ms, waiters),
        }
    }

    /// Looks up which of the locks that are no longer held were broken.
    async fn note_breaks(&self, before: &[Lock], now: &[Lock]) {
        let Some(backend) = self.backend() else { return };
        let held: HashSet<&str> = now.iter().map(|lock| lock.id_hash.as_str()).collect();
        let ended = before.iter().filter(|lock| !held.contains(lock.id_hash.as_str()));
        for ended in ended.take(MOST_NOTES) {
            if backend.break_note(&ended.id).await.is_some() {
                lock(&self.history).broken(&ended.key, ended.id_hash.clone());
            }
        }
    }

    /// Lists the locks. Returns whether these are all.
    async fn look(&self) -> Result<(Vec<Lock>, bool), Failure> {
        if self.context.target.is_unused_default() {
            // The first lock creates it.
            return Ok((Vec::new(), true));
        }
        let backend = if let Some(backend) = self.backend() {
            backend
        } else {
            let backend = self.context.target.connect_existing().await?;
            lock(&self.backend).insert(backend).clone()
        };
        let admin = admin(&backend)?;
        let (mut locks, mut next) = (Vec::new(), None);
        loop {
            let page = admin.list(next.as_ref()).await?;
            locks.extend(page.locks.into_iter().map(|lock| shown(&lock.into())));
            next = page.next;
            if next.is_none() || locks.len() >= MOST_LOCKS {
                break;
            }
        }
        locks.sort_by(|one, two| {
            (one.acquired_at_ms, &one.key).cmp(&(two.acquired_at_ms, &two.key))
        });
        // A store may list a lock twice.
        locks.dedup_by(|one, two| one.id_hash == two.id_hash);
        Ok((locks, next.is_none()))
    }

    /// Returns some of all locks whose keys contain a text, from a cursor on. Reads a bounded
    /// number of locks, so it may return none although others follow.
    pub(super) async fn page(
        &self,
        after: Option<String>,
        filter: &str,
    ) -> Result<LockPage, Failure> {
        const PAGES: usize = 50;
        const MOST: usize = 200;
        let backend =
            self.backend().ok_or_else(|| Failure::new(FAILED, "the store is not connected"))?;
        let admin = admin(&backend)?;
        let mut next = after.map(Cursor::new);
        let mut locks = Vec::new();
        for _ in 0..PAGES {
            let page = admin.list(next.as_ref()).await?;
            let found = page.locks.into_iter().map(|lock| shown(&lock.into()));
            locks.extend(found.filter(|lock| lock.key.contains(filter)));
            next = page.next;
            if next.is_none() || locks.len() >= MOST {
                break;
            }
        }
        Ok(LockPage { locks, next: next.map(|cursor| cursor.place().to_owned()) })
    }

    /// Breaks a lock if its holder is still the one that the page showed.
    pub(super) async fn break_lock(&self, key: &str, lock_id_hash: &str) -> Result<bool, Failure> {
        let backend =
            self.backend().ok_or_else(|| Failure::new(FAILED, "the store is not connected"))?;
        let found = diagnostics::get_by_key_raw(&backend, &Key::new(key)?).await?;
        let Some(found) = found.filter(|found| found.info.lock_id_hash.as_str() == lock_id_hash)
        else {
            return Ok(false);
        };
        // Not every store keeps the note.
        lock(&self.history).broken(key, lock_id_hash.to_owned());
        let note = BreakNote::new(Some(HolderInfo::of_this_process(Some("ui"))), None);
        Ok(diagnostics::break_lock_with(&backend, &found, note).await?)
    }

    fn backend(&self) -> Option<AnyBackend> {
        lock(&self.backend).clone()
    }

    fn publish(&self, locks: &[Lock], is_complete: bool, checks: &[Check], error: Option<&str>) {
        let now_ms = SystemClock.now().as_millis();
        let oldest = locks.first().map(|lock| now_ms.saturating_sub(lock.acquired_at_ms));
        *lock(&self.summary) = Summary {
            is_up: error.is_none(),
            held: locks.len(),
            is_partial: !is_complete,
            oldest: oldest.map(Duration::from_millis),
            waiters: lock(&self.history).all_waiters(),
        };
        let history = lock(&self.history);
        let store = self.context.target.place();
        let state = State {
            store: store.as_deref(),
            error,
            now_ms,
            window_ms: WINDOW_MS,
            held: locks.len(),
            is_partial: !is_complete && error.is_none(),
            has_more: locks.len() > MOST_SENT || (!is_complete && error.is_none()),
            may_break: self.may_break,
            locks: &locks[..locks.len().min(MOST_SENT)],
            timeline: history.rows(MOST_ROWS),
            hand_overs: history.hand_overs(),
            waits: history.waits(),
            holds: history.holds(),
            checks,
        };
        if let Ok(json) = serde_json::to_string(&state) {
            self.published.send_replace(json.into());
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn admin(backend: &AnyBackend) -> Result<Arc<dyn Admin>, Failure> {
    backend.admin().ok_or_else(|| Failure::new(FAILED, "this store cannot list its locks"))
}

fn shown(lock: &LockInfoRaw) -> Lock {
    Lock {
        id: lock.lock_id,
        shown: printable(lock.key.as_str()),
        key: lock.key.as_str().to_owned(),
        id_hash: lock.info.lock_id_hash.to_string(),
        fence: lock.info.fence.map(|fence| fence.to_string()),
        acquired_at_ms: lock.info.acquired_at.as_millis(),
        expires_at_ms: lock.info.expires_at.as_millis(),
        holder: lock.info.holder.as_ref().map(|holder| printable(&holder.to_string())),
        waiters: None,
    }
}

/// A change of a key that its task has noticed.
struct KeyChange {
    key: String,
    at_ms: u64,
    kind: ChangeKind,
}

enum ChangeKind {
    /// The lock may have changed.
    Changed,
    Released {
        holder_age_ms: Option<u64>,
    },
    Waiters(Option<u32>),
}

/// The tasks that listen to keys.
struct Listeners {
    sender: mpsc::UnboundedSender<KeyChange>,
    tasks: HashMap<String, ListenerTask>,
}

/// A task that ends when this is dropped.
struct ListenerTask(AbortHandle);

impl Drop for ListenerTask {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Listeners {
    /// Listens to some of these keys, and to no others.
    fn listen_to(&mut self, backend: Option<AnyBackend>, keys: &[String]) {
        let Some(backend) = backend else { return };
        self.tasks.retain(|key, _| keys.contains(key));
        for key in keys {
            if self.tasks.len() >= MOST_LISTENERS {
                return;
            }
            if !self.tasks.contains_key(key) {
                let task = listen(backend.clone(), key.clone(), self.sender.clone());
                let task = ListenerTask(tokio::spawn(task).abort_handle());
                self.tasks.insert(key.clone(), task);
            }
        }
    }
}

/// Reports changes and releases of a lock, and how many processes wait for it. A store without
/// notifications reports nothing here; listing has to be enough.
async fn listen(backend: AnyBackend, key: String, sender: mpsc::UnboundedSender<KeyChange>) {
    let Ok(parsed) = Key::new(key.as_str()) else { return };
    let mut changes = backend.watch(&parsed).await;
    // Listening for releases counts as waiting, and makes releases notify. So it is done only while
    // others wait, who cause the same.
    let mut releases = None;
    let mut count_at = Instant::now();
    loop {
        let kind = tokio::select! {
            _age = notified(&mut changes) => ChangeKind::Changed,
            age = notified(&mut releases) => ChangeKind::Released {
                holder_age_ms: age.map(|age| u64::try_from(age.as_millis()).unwrap_or(u64::MAX)),
            },
            () = tokio::time::sleep_until(count_at) => {
                count_at = Instant::now() + COUNT_INTERVAL;
                let own = u32::from(releases.is_some());
                let waiters = backend.waiters(&parsed).await.map(|all| all.saturating_sub(own));
                if waiters.is_none_or(|waiters| waiters == 0) {
                    releases = None;
                } else if releases.is_none() {
                    releases = backend.subscribe(&parsed).await;
                }
                ChangeKind::Waiters(waiters)
            }
        };
        let change = KeyChange { key: key.clone(), at_ms: SystemClock.now().as_millis(), kind };
        if sender.send(change).is_err() {
            return;
        }
    }
}

/// Waits for a notification; without a subscription, forever.
async fn notified(subscription: &mut Option<Subscription>) -> Option<Duration> {
    match subscription {
        Some(subscription) => subscription.notified().await,
        None => pending().await,
    }
}
