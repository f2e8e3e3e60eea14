//! `doctor`: checks whether the store is reachable, locks work, and settings are safe.

use std::fmt::Write;
use std::time::{Duration, Instant};

use anstyle::Style;
use serde::Serialize;
use syncguard::backend::{
    AcquireOutcome, AcquireRequest, Clock, ExtendRequest, Hint, ReleaseRequest, SystemClock,
    TimeAuthority,
};
use syncguard::{
    AnyBackend, ErrorCode, FenceSource, Key, LockBackend, ReleaseOutcome, Timestamp, Ttl,
};

use crate::Context;
use crate::args::Doctor;
use crate::exit::{FAILED, Failure, NO, USAGE};
use crate::output::{self, BAD, GOOD, WARNING};

#[derive(Serialize)]
struct Diagnosis {
    store: Option<String>,
    healthy: bool,
    checks: Vec<Check>,
}

#[derive(Serialize)]
pub(crate) struct Check {
    subject: &'static str,
    severity: Severity,
    text: String,
}

/// The severity of a check.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
enum Severity {
    Ok,
    /// Information only.
    Note,
    /// Locks work, but may be lost in some situation.
    Warning,
    /// Locks do not work.
    Error,
}

impl Severity {
    fn word(self) -> String {
        let (style, word) = match self {
            Self::Ok => (GOOD, "ok"),
            Self::Note => (Style::new(), "note"),
            Self::Warning => (WARNING, "warning"),
            Self::Error => (BAD, "error"),
        };
        format!("{style}{word}{style:#}")
    }
}

impl Check {
    fn new(subject: &'static str, severity: Severity, text: impl Into<String>) -> Self {
        Self { subject, severity, text: text.into() }
    }

    fn ok(subject: &'static str, text: impl Into<String>) -> Self {
        Self::new(subject, Severity::Ok, text)
    }

    fn error(subject: &'static str, text: impl Into<String>) -> Self {
        Self::new(subject, Severity::Error, text)
    }
}

pub(crate) async fn doctor(context: &Context, args: Doctor) -> Result<u8, Failure> {
    let started = Instant::now();
    let mut checks = match context.target.connect_existing().await {
        Ok(backend) if !context.target.is_unused_default() => {
            let name = backend.capabilities().backend;
            let took = millis(started.elapsed());
            let mut checks = vec![Check::ok("reachable", format!("{name}, connected in {took}"))];
            checks.extend(examine(&backend).await);
            checks
        }
        Ok(_stand_in) => {
            let text = "the file does not exist yet; the first lock creates it";
            vec![Check::new("reachable", Severity::Note, text)]
        }
        Err(failure) if failure.code == USAGE => return Err(failure),
        Err(failure) => {
            vec![Check::error("reachable", context.target.locate(failure).message)]
        }
    };
    checks.sort_by_key(|check| check.severity);
    let worst = checks.last().map_or(Severity::Ok, |check| check.severity);
    let healthy = worst < if args.strict { Severity::Warning } else { Severity::Error };
    let diagnosis = Diagnosis { store: context.target.place(), healthy, checks };
    context.output.data(&diagnosis, || {
        let mut text = String::new();
        if let Some(store) = &diagnosis.store {
            writeln!(text, "store: {}", output::printable(store)).unwrap_or_default();
        }
        for check in &diagnosis.checks {
            let (word, what) = (check.severity.word(), output::printable(&check.text));
            writeln!(text, "{word} {}: {what}", check.subject).unwrap_or_default();
        }
        text
    })?;
    Ok(if healthy { 0 } else { NO })
}

fn millis(duration: Duration) -> String {
    format!("{:.1} ms", duration.as_secs_f64() * 1000.0)
}

async fn examine(backend: &AnyBackend) -> Vec<Check> {
    let mut checks = Vec::new();
    match try_a_lock(backend).await {
        Ok(Trial { latency, clock }) => {
            let text =
                format!("acquire, extend, look up and release succeeded in {}", millis(latency));
            checks.push(Check::ok("rights", text));
            checks.push(clock);
        }
        Err((subject, failure)) => {
            let hint = failure.hint.map_or_else(String::new, |hint| format!("; {hint}"));
            checks.push(Check::error(subject, failure.message + &hint));
        }
    }
    add_findings(&mut checks, safety(backend).await);
    checks.extend(fences(backend));
    checks.extend(shards(backend));
    checks
}

/// Adds the findings about a store. One about its clock says more than the trial does.
fn add_findings(checks: &mut Vec<Check>, findings: Vec<Check>) {
    checks.retain(|check| findings.iter().all(|finding| finding.subject != check.subject));
    checks.extend(findings);
}

/// Says over how many shards a store distributes its locks.
fn shards(backend: &AnyBackend) -> Option<Check> {
    let count = backend.capabilities().shards?;
    Some(Check::ok("shards", format!("the locks are distributed over {count} shards")))
}

/// Checks the store's settings. It only reads.
pub(crate) async fn safety(backend: &AnyBackend) -> Vec<Check> {
    let Some(admin) = backend.admin() else { return Vec::new() };
    match admin.findings().await {
        Ok(findings) if findings.is_empty() => {
            vec![Check::ok("safety", "the store's settings are safe for locks and fences")]
        }
        Ok(findings) => findings
            .iter()
            .map(|finding| {
                // A setting that may not be read is not a problem.
                let is_known = finding.subject() != "unknown";
                let severity = if is_known { Severity::Warning } else { Severity::Note };
                Check::new(finding.subject(), severity, finding.text())
            })
            .collect(),
        Err(error) => {
            vec![Check::new("safety", Severity::Warning, Failure::from(error).message)]
        }
    }
}

/// Says what fences from the clock cannot do. For counted fences, the findings say it where it
/// matters.
fn fences(backend: &AnyBackend) -> Option<Check> {
    match backend.admin()?.fence_source() {
        FenceSource::Clock => Some(Check::ok(
            "fences",
            "they come from the clock and survive the loss of their counter, unless the clock is \
             set back past the loss, or a program that only counts, such as a TypeScript one, \
             starts the counter again",
        )),
        _ => None,
    }
}

struct Trial {
    latency: Duration,
    clock: Check,
}

/// Why the trial failed: the subject of the check, and the failure.
type Flaw = (&'static str, Failure);

fn flaw(error: syncguard::Error) -> Flaw {
    let subject = match error.code() {
        ErrorCode::AuthFailed => "rights",
        ErrorCode::RateLimited => "capacity",
        ErrorCode::ServiceUnavailable | ErrorCode::NetworkTimeout => "reachable",
        _ => "lock",
    };
    (subject, error.into())
}

/// Acquires, extends, looks up and releases a lock of its own.
async fn try_a_lock(backend: &AnyBackend) -> Result<Trial, Flaw> {
    const TTL: Duration = Duration::from_secs(10);
    let (key, ttl) = (Key::new("syncguard-doctor").map_err(flaw)?, Ttl::new(TTL).map_err(flaw)?);
    let capabilities = backend.capabilities();
    let request = AcquireRequest::for_backend(capabilities, key.clone(), ttl).map_err(flaw)?;
    let started = Instant::now();
    let before = SystemClock.now();
    let AcquireOutcome::Acquired(lease) = backend.acquire(&request).await.map_err(flaw)? else {
        let message = "another `syncguard doctor` holds the lock \"syncguard-doctor\"; try again";
        return Err(("lock", Failure::new(FAILED, message)));
    };
    let after = SystemClock.now();
    let hint = Hint::key(key.clone());
    let extend = ExtendRequest::new(request.lock_id(), ttl).with_hint(hint.clone());
    drop(backend.extend(&extend).await.map_err(flaw)?);
    let seen = backend.lookup_key(&key).await.map_err(flaw)?.is_some();
    let release = ReleaseRequest::new(request.lock_id()).with_hint(hint);
    let released = backend.release(&release).await.map_err(flaw)? == ReleaseOutcome::Released;
    let latency = started.elapsed();
    if !(seen && released) {
        let message = "a lock disappeared right after it was acquired";
        return Err(("lock", Failure::new(FAILED, message)));
    }
    let clock = match capabilities.time_authority {
        TimeAuthority::Server => clock(lease.expires_at(), before, after, TTL),
        // Such a backend compares the clocks itself, and refuses locks if they differ too much.
        TimeAuthority::Client => Check::ok(
            "clock",
            "this machine's clock decides about expiry, and agrees with the store's",
        ),
    };
    Ok(Trial { latency, clock })
}

/// Compares the store's clock with this machine's, as exactly as the latency allows.
fn clock(expires_at: Timestamp, before: Timestamp, after: Timestamp, ttl: Duration) -> Check {
    const TOLERATED_MS: u64 = 500;
    let ttl_ms = u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX);
    let there = expires_at.as_millis().saturating_sub(ttl_ms);
    let behind = before.as_millis().saturating_sub(there);
    let ahead = there.saturating_sub(after.as_millis());
    match behind.max(ahead) {
        0 => Check::ok("clock", "the store's clock and this machine's agree"),
        off => {
            let direction = if behind > 0 { "behind" } else { "ahead of" };
            let text = format!("the store's clock is {off} ms {direction} this machine's");
            let severity = if off <= TOLERATED_MS { Severity::Ok } else { Severity::Warning };
            Check::new("clock", severity, text)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_finding_about_the_clock_replaces_the_check_of_the_trial() {
        let mut checks = vec![Check::ok("rights", "fine"), Check::ok("clock", "they agree")];
        let finding = Check::new("clock", Severity::Warning, "they may differ");
        add_findings(&mut checks, vec![finding]);
        let shown: Vec<_> = checks.iter().map(|check| check.text.as_str()).collect();
        assert_eq!(shown, ["fine", "they may differ"]);
    }
}
