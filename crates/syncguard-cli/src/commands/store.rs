//! `setup` and `doctor`: the store itself.

use std::fmt::Write;
use std::time::{Duration, Instant};

use serde::Serialize;
use syncguard::{
    Acquire, AcquireRequest, AnyBackend, Clock, ExtendRequest, Hint, Key, LockBackend, Release,
    ReleaseRequest, SystemClock, TimeAuthority, Timestamp, Ttl,
};

use crate::Context;
use crate::exit::{FAILED, Failure, NO, USAGE};
use crate::output::{GOOD, WARNING};

#[derive(Serialize)]
struct Setup {
    ready: bool,
}

pub(crate) async fn setup(context: &Context) -> Result<u8, Failure> {
    let backend = context.target.connect().await?;
    if let Some(inspector) = backend.inspector() {
        inspector.setup().await?;
    }
    context.output.data(&Setup { ready: true }, || "ready\n".to_owned());
    Ok(0)
}

#[derive(Serialize)]
struct Diagnosis {
    healthy: bool,
    checks: Vec<Check>,
}

#[derive(Serialize)]
struct Check {
    subject: &'static str,
    ok: bool,
    text: String,
}

impl Check {
    fn new(subject: &'static str, ok: bool, text: impl Into<String>) -> Self {
        Self { subject, ok, text: text.into() }
    }
}

pub(crate) async fn doctor(context: &Context) -> Result<u8, Failure> {
    let started = Instant::now();
    let checks = match context.target.connect().await {
        Ok(backend) => {
            let name = backend.capabilities().backend;
            let took = millis(started.elapsed());
            let mut checks =
                vec![Check::new("reachable", true, format!("{name}, connected in {took}"))];
            checks.extend(examine(&backend).await);
            checks
        }
        Err(failure) if failure.code == USAGE => return Err(failure),
        Err(failure) => vec![Check::new("reachable", false, failure.message)],
    };
    let diagnosis = Diagnosis { healthy: checks.iter().all(|check| check.ok), checks };
    context.output.data(&diagnosis, || {
        let mut text = String::new();
        for check in &diagnosis.checks {
            let (style, word) = if check.ok { (GOOD, "ok  ") } else { (WARNING, "look") };
            let line = format!("{style}{word}{style:#} {}: {}", check.subject, check.text);
            writeln!(text, "{line}").unwrap_or_default();
        }
        text
    });
    Ok(if diagnosis.healthy { 0 } else { NO })
}

fn millis(duration: Duration) -> String {
    format!("{:.1} ms", duration.as_secs_f64() * 1000.0)
}

async fn examine(backend: &AnyBackend) -> Vec<Check> {
    let mut checks = Vec::new();
    match try_a_lock(backend).await {
        Ok(Trial { latency, clock }) => {
            let text = format!(
                "acquire, extend, look up and release work; a lock takes {}",
                millis(latency)
            );
            checks.push(Check::new("rights", true, text));
            checks.push(clock);
        }
        Err(failure) => checks.push(Check::new("rights", false, failure.message)),
    }
    if let Some(inspector) = backend.inspector() {
        match inspector.advice().await {
            Ok(advice) if advice.is_empty() => {
                checks.push(Check::new(
                    "safety",
                    true,
                    "fences cannot go backwards by its settings",
                ));
            }
            // What may not be asked is not wrong.
            Ok(advice) => checks.extend(advice.iter().map(|advice| {
                Check::new(advice.subject(), advice.subject() == "unknown", advice.text())
            })),
            Err(error) => checks.push(Check::new("safety", false, Failure::from(error).message)),
        }
    }
    checks
}

struct Trial {
    latency: Duration,
    clock: Check,
}

/// Takes a lock of its own and gives it back, with all that a lock can do.
async fn try_a_lock(backend: &AnyBackend) -> Result<Trial, Failure> {
    const TTL: Duration = Duration::from_secs(10);
    let (key, ttl) = (Key::new("syncguard-doctor")?, Ttl::new(TTL)?);
    let request = AcquireRequest::new(key.clone(), ttl)?;
    let started = Instant::now();
    let before = SystemClock.now();
    let Acquire::Acquired(lease) = backend.acquire(&request).await? else {
        let message = "another doctor holds the lock \"syncguard-doctor\" at the moment";
        return Err(Failure::new(FAILED, message));
    };
    let (latency, after) = (started.elapsed(), SystemClock.now());
    let hint = Hint::key(key.clone());
    drop(
        backend.extend(&ExtendRequest::new(request.lock_id(), ttl).with_hint(hint.clone())).await?,
    );
    let seen = backend.lookup_key(&key).await?.is_some();
    let release = ReleaseRequest::new(request.lock_id()).with_hint(hint);
    let released = backend.release(&release).await? == Release::Released;
    if !(seen && released) {
        return Err(Failure::new(FAILED, "a lock that was taken a moment ago was not there"));
    }
    let clock = match backend.capabilities().time_authority {
        TimeAuthority::Server => clock(lease.expires_at(), before, after, TTL),
        // Such a backend compares it all the time, and grants nothing by one that is off.
        TimeAuthority::Client => {
            Check::new("clock", true, "this machine's decides, and is near enough to the store's")
        }
    };
    Ok(Trial { latency, clock })
}

/// Compares the store's clock with this machine's, as far as the way there allows.
fn clock(expires_at: Timestamp, before: Timestamp, after: Timestamp, ttl: Duration) -> Check {
    const TOLERATED_MS: u64 = 500;
    let ttl_ms = u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX);
    let there = expires_at.as_millis().saturating_sub(ttl_ms);
    let behind = before.as_millis().saturating_sub(there);
    let ahead = there.saturating_sub(after.as_millis());
    match behind.max(ahead) {
        0 => Check::new("clock", true, "the store's clock and this machine's agree"),
        off => {
            let direction = if behind > 0 { "behind" } else { "ahead of" };
            let text = format!("the store's clock is {off} ms {direction} this machine's");
            Check::new("clock", off <= TOLERATED_MS, text)
        }
    }
}
