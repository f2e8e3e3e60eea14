//! One run: starts a store and its clients, injects faults, lets everything settle, and checks.

use std::collections::HashMap;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use syncguard::diagnostics::get_by_key_raw;
use syncguard::{AnyBackend, Locker};

use crate::bug::Bug;
use crate::check::{
    Checked, Precision, Violation, check, check_hand_overs, check_register, ids_that_may_stay,
};
use crate::client::{NOTHING, UNFINISHED};
use crate::history::{History, Micros, Op, Outcome, now};
use crate::journal::{CANARY, key_of};
use crate::nemesis::{Damage, Nemesis};
use crate::plan::{Deployment, Plan};
use crate::register::RegisterServer;
use crate::script::{COLD_KEYS, DROP_KEYS, HOT_KEYS};
use crate::store::Store;

/// What a run did and found.
#[derive(Debug)]
pub struct Run {
    /// The plan.
    pub plan: Plan,
    /// The planted bug.
    pub bug: Option<Bug>,
    /// Everything that happened.
    pub history: History,
    /// When the run began.
    pub began: Micros,
    /// When the faults ended.
    pub calm_from: Micros,
    /// When the run ended.
    pub ended: Micros,
    /// What the check found.
    pub checked: Checked,
    /// What the faults amounted to.
    pub damage: Damage,
    /// How many stale writes the register and the store refused.
    pub refused: u64,
    /// How many writes they accepted.
    pub accepted: u64,
    /// The version of the store.
    pub version: String,
}

impl Run {
    /// Returns how many futures were dropped before they completed.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.history.calls.iter().filter(|call| call.result == "dropped").count() as u64
    }

    /// Returns for how much of the time the machine was so busy that the coordinator did not run.
    #[must_use]
    pub fn busy_percent(&self) -> u64 {
        let lag: Micros = self.history.lags.iter().map(|lag| lag.1 - lag.0).sum();
        lag * 100 / (self.ended - self.began).max(1)
    }

    /// Returns how many times a rule was broken.
    #[must_use]
    pub fn broken(&self, rule: &str) -> u64 {
        let is_broken = |violation: &&Violation| violation.rule == rule;
        self.checked.violations.iter().filter(is_broken).count() as u64
    }
}

/// The TTL of the locks that are taken when the faults are over.
const CALM_TTL: Duration = Duration::from_secs(12);

/// Runs a plan. Ends early when a planted bug is found.
pub async fn run(plan: Plan, bug: Option<Bug>, directory: &Path) -> std::io::Result<Run> {
    let directory = directory.join(plan.deployment.name());
    // The directory of an earlier run.
    drop(fs::remove_dir_all(&directory));
    fs::create_dir_all(&directory)?;
    let register = RegisterServer::default();
    let address = register.start().await?;
    let (store, proxies) = Store::start(plan.deployment).await;
    for proxy in &proxies {
        proxy.rewrite(bug.map_or(&[], Bug::rewrites));
    }
    let version = store.version();
    let began = now();
    let nemesis =
        Nemesis::start(plan.clone(), (store, proxies), address, bug, directory.clone()).await?;
    let precision = precision(plan.deployment);
    let mut early = Checked::default();
    // A bug that is found ends the run.
    let watch = async {
        loop {
            tokio::time::sleep(Duration::from_millis(if bug.is_some() { 700 } else { 5_000 }))
                .await;
            let history = nemesis.history().get().clone();
            let accepted = register.contents().0;
            let check = move || check(&history, &accepted, precision);
            let checked = tokio::task::spawn_blocking(check).await.unwrap_or_default();
            if !checked.violations.is_empty() {
                return checked;
            }
        }
    };
    let faults = async {
        nemesis.strike().await;
        let calm_from = now();
        nemesis.order("quiet").await;
        tokio::time::sleep(plan.quiet).await;
        calm_from
    };
    let calm_from = tokio::select! {
        checked = watch => {
            early = checked;
            now()
        }
        calm_from = faults => calm_from,
    };
    if early.violations.is_empty() {
        nemesis.finish(Duration::from_secs(15)).await;
    } else {
        nemesis.abort().await;
    }
    let ended = now();
    let mut history = nemesis.history().get().clone();
    history.leaks.extend(leaks_in(&nemesis.logs(), &history));
    let (accepted, _refused) = register.contents();
    let refused = history.writes.iter().filter(|write| !write.accepted).count() as u64;
    let mut written = 0;
    // It takes a while, and would block the register and the proxies of other runs.
    let (history, accepted, mut checked) = tokio::task::spawn_blocking(move || {
        let checked = check(&history, &accepted, precision);
        (history, accepted, checked)
    })
    .await
    .map_err(std::io::Error::other)?;
    let mut history = history;
    if early.violations.is_empty() {
        if plan.deployment.has_notifications() {
            checked.violations.extend(check_hand_overs(&history, calm_from));
        }
        let in_store = nemesis.writes_in_store().await;
        checked.violations.extend(check_register(&history, &in_store));
        written = in_store.len() as u64;
        checked.violations.extend(settle(&nemesis, &mut history).await);
    } else if checked.violations.is_empty() {
        checked = early;
    }
    fs::write(directory.join("operations.tsv"), dump(&history, began))?;
    let damage = nemesis.damage();
    let accepted = accepted.len() as u64 + written;
    Ok(Run {
        plan,
        bug,
        history,
        began,
        calm_from,
        ended,
        checked,
        damage,
        refused,
        accepted,
        version,
    })
}

fn precision(deployment: Deployment) -> Precision {
    match deployment {
        // The clocks of two clients differ by up to 600 ms.
        Deployment::Firestore => Precision { expiry: 650_000, shares_releases: true },
        _ => Precision::default(),
    }
}

/// Returns the operations as a table, with times in microseconds from the begin of the run.
fn dump(history: &History, began: Micros) -> String {
    let mut text =
        "client\tprocess\tlocker\tkey\tid\tkind\tttl_ms\tbegin\tend\toutcome\n".to_owned();
    for op in &history.ops {
        let client = history.processes[op.process].client;
        let end = if op.end == Micros::MAX { "-".to_owned() } else { (op.end - began).to_string() };
        let Op { process, locker, key, id, kind, ttl_ms, start, outcome, .. } = op;
        let from = start.saturating_sub(began);
        writeln!(
            text,
            "{client}\t{process}\t{locker}\t{key}\t{id}\t{kind:?}\t{ttl_ms}\t{from}\t{end}\t\
             {outcome:?}"
        )
        .ok();
    }
    text
}

/// Looks for keys and lock ids in the logs.
fn leaks_in(logs: &[PathBuf], history: &History) -> Vec<String> {
    let ids: std::collections::HashSet<&str> = history.ids().collect();
    let mut found = Vec::new();
    for log in logs {
        let text = fs::read(log).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let is_id_character = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        let mut words = text.split(|c| !is_id_character(c));
        if text.contains(CANARY) || words.any(|word| word.len() == 22 && ids.contains(word)) {
            found.push(format!("the log {}", log.display()));
        }
        if text.contains("panicked at") {
            found.push(format!("the log {}: a panic", log.display()));
        }
    }
    found
}

/// I5: after the faults, every lock is free in time, and a client that shut down left none.
async fn settle(nemesis: &Arc<Nemesis>, history: &mut History) -> Vec<Violation> {
    let url = nemesis.url();
    if url.starts_with("memory:") {
        // The locks are gone with the process.
        return Vec::new();
    }
    let violation = |what: String, key| Violation {
        rule: "I5",
        what,
        key: Some(key),
        window: (now() - 1_000_000, now()),
    };
    let mut tries = 0;
    let backend = loop {
        match syncguard::connect(url).await {
            Ok(backend) => break backend,
            Err(_just_now) if tries < 20 => {
                tries += 1;
                tokio::time::sleep(Duration::from_millis(250)).await;
            }
            Err(error) => return vec![violation(format!("the store is gone: {error}"), 0)],
        }
    };
    let mut found = Vec::new();
    let grants: HashMap<u32, usize> = history
        .ops
        .iter()
        .filter(|op| op.kind == crate::history::Kind::Acquire && op.outcome != Outcome::Contended)
        .map(|op| (op.id, op.process))
        .collect();
    let excused = ids_that_may_stay(history);
    let keys = HOT_KEYS + COLD_KEYS + DROP_KEYS;
    for key in 0..keys {
        let Ok(Some(held)) = get_by_key_raw(&backend, &key_of(key)).await else { continue };
        let id = history.number_of(held.lock_id.expose());
        if excused.contains(&id) {
            continue;
        }
        let Some(&process) = grants.get(&id) else {
            found.push(violation("a lock is held that no client asked for".to_owned(), key));
            continue;
        };
        let may_stay = match history.processes[process].left.as_deref() {
            None => true,
            // It was still undoing or releasing something.
            Some(UNFINISHED) => {
                history.ops.iter().any(|op| op.id == id && op.outcome == Outcome::Unknown)
            }
            Some(_) => false,
        };
        if !may_stay && !history.abandoned.contains(&id) {
            found.push(violation("a client that shut down left a lock behind".to_owned(), key));
        }
    }
    for process in &history.processes {
        let left = process.left.as_ref();
        if let Some(left) = left.filter(|left| ![NOTHING, UNFINISHED].contains(&left.as_str())) {
            found.push(violation(format!("a client could not shut down: {left}"), 0));
        }
    }
    found.extend(take_every_key(&backend, HOT_KEYS + COLD_KEYS).await.into_iter().map(|key| {
        violation("a lock was not free a TTL and a second after the faults".to_owned(), key)
    }));
    found
}

/// Takes every lock once, and returns the keys that are not free in time.
async fn take_every_key(backend: &AnyBackend, keys: u32) -> Vec<u32> {
    let Ok(locker) = Locker::new(backend.clone()) else { return Vec::new() };
    let limit = CALM_TTL + Duration::from_secs(3);
    let begin = Instant::now();
    let mut late = Vec::new();
    for key in 0..keys {
        // The first one waits for all the others.
        let left = limit.saturating_sub(begin.elapsed()).max(Duration::from_secs(5));
        let taken = locker.lock(key_of(key)).timeout(left).retry_on_error(true).await;
        match taken {
            Ok(guard) => drop(guard.release().await),
            Err(_not_free) => late.push(key),
        }
    }
    // Releases in the background have their own limit.
    drop(locker.shutdown().await);
    late
}
