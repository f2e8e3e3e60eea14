//! `watch`: prints a line for every change of a lock.
//!
//! The store is looked at when it notifies of a change of a named key, and at every interval. What
//! happens between two looks is seen as its result: a lock that was acquired and released in
//! between is not reported.

use std::collections::HashMap;
use std::task::Poll;
use std::time::{Duration, Instant};

use serde::Serialize;
use syncguard::backend::{BreakNote, Clock, Subscription, SystemClock};
use syncguard::diagnostics::{self, LockInfoRaw};
use syncguard::{AnyBackend, HashId, HolderInfo, Key, LockBackend, Timestamp};

use crate::Context;
use crate::args::Watch;
use crate::event::millis;
use crate::exit::{FAILED, Failure, USAGE};
use crate::output;

/// A change of a lock, as one line.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Change {
    event: Kind,
    at_ms: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    key_hash: Option<HashId>,
    #[serde(skip_serializing_if = "Option::is_none")]
    fence: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    holder: Option<HolderInfo>,
    /// How long the lock was held, or how long changes may have been missed.
    #[serde(skip_serializing_if = "Option::is_none")]
    duration_ms: Option<u64>,
    /// Who broke the lock.
    #[serde(skip_serializing_if = "Option::is_none")]
    by: Option<HolderInfo>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
enum Kind {
    /// It was held when the watch began.
    Held,
    Acquired,
    RenewedLate,
    Released,
    Expired,
    Broken,
    /// The store could not be asked for a while.
    Gap,
}

impl Change {
    fn of(kind: Kind, lock: &LockInfoRaw, duration: Option<Duration>) -> Self {
        Self {
            event: kind,
            at_ms: SystemClock.now().as_millis(),
            key: Some(lock.key.as_str().to_owned()),
            key_hash: Some(lock.info.key_hash),
            fence: lock.info.fence.map(|fence| fence.to_string()),
            holder: lock.info.holder.clone(),
            duration_ms: duration.map(millis),
            by: None,
            reason: None,
        }
    }

    fn gap(duration: Duration) -> Self {
        Self {
            event: Kind::Gap,
            at_ms: SystemClock.now().as_millis(),
            key: None,
            key_hash: None,
            fence: None,
            holder: None,
            duration_ms: Some(millis(duration)),
            by: None,
            reason: None,
        }
    }

    fn text(&self) -> String {
        let time = output::time(Timestamp::from_millis(self.at_ms));
        let duration = Duration::from_millis(self.duration_ms.unwrap_or_default());
        let duration = output::duration(duration);
        let key = output::printable(self.key.as_deref().unwrap_or_default());
        let holder = self.holder.as_ref().map(|holder| format!(" by {}", output::holder(holder)));
        let holder = holder.unwrap_or_default();
        let fence = self.fence.as_deref().map(|fence| format!(", fence {fence}"));
        let fence = fence.unwrap_or_default();
        let line = match self.event {
            Kind::Held => format!("{key} is held{holder}, for {duration}{fence}"),
            Kind::Acquired => format!("{key} acquired{holder}{fence}"),
            Kind::RenewedLate => {
                format!("{key} renewed late{holder}, {duration} before its expiry{fence}")
            }
            Kind::Released => format!("{key} released, was held{holder}, for {duration}{fence}"),
            Kind::Expired => format!("{key} expired, was held{holder}, for {duration}{fence}"),
            Kind::Broken => {
                let by = self.by.as_ref().map(|by| format!(" by {}", output::holder(by)));
                let reason = self.reason.as_deref();
                let reason = reason.map(|reason| format!(" ({})", output::printable(reason)));
                let (by, reason) = (by.unwrap_or_default(), reason.unwrap_or_default());
                format!("{key} broken{by}{reason}, was held{holder}, for {duration}{fence}")
            }
            Kind::Gap => {
                format!("the store was unreachable for {duration}; changes may be missing")
            }
        };
        format!("{time} {line}\n")
    }
}

/// A lock as it was seen last.
struct Seen {
    lock: LockInfoRaw,
    /// The longest time that was left when it was seen: about its TTL.
    ttl: Duration,
}

pub(crate) async fn watch(context: &Context, args: Watch) -> Result<u8, Failure> {
    let keys = args.keys.iter().map(|key| Key::new(key.as_str())).collect::<Result<Vec<_>, _>>();
    let keys = keys.map_err(|error| Failure::new(USAGE, error.message()))?;
    if args.interval.is_zero() {
        return Err(Failure::new(USAGE, "--interval must be greater than zero"));
    }
    let backend = context.target.connect_existing().await?;
    let mut watcher = Watcher { context, backend, keys, seen: None, failing_since: None };
    let mut changes = Vec::new();
    loop {
        if changes.len() < watcher.keys.len() {
            changes = watcher.subscribe().await;
        }
        if !watcher.look().await? {
            return Ok(0);
        }
        let mut notified: Vec<_> =
            changes.iter_mut().map(|change| Box::pin(change.notified())).collect();
        let any = std::future::poll_fn(|task| {
            let is_ready =
                notified.iter_mut().any(|notified| notified.as_mut().poll(task).is_ready());
            if is_ready { Poll::Ready(()) } else { Poll::Pending }
        });
        drop(tokio::time::timeout(args.interval, any).await);
    }
}

struct Watcher<'a> {
    context: &'a Context,
    backend: AnyBackend,
    /// The keys to watch; none for all.
    keys: Vec<Key>,
    /// `None` before the first look.
    seen: Option<HashMap<Key, Seen>>,
    failing_since: Option<Instant>,
}

impl Watcher<'_> {
    /// Subscribes to the changes of the named keys, where the store has notifications.
    async fn subscribe(&self) -> Vec<Subscription> {
        let mut changes = Vec::new();
        for key in &self.keys {
            changes.extend(self.backend.watch(key).await);
        }
        changes
    }

    /// Looks at the store and prints what has changed. Returns `false` when standard output is
    /// closed.
    async fn look(&mut self) -> Result<bool, Failure> {
        let now = match self.locks().await {
            Ok(now) => now,
            Err(failure) if failure.may_pass() => {
                if self.failing_since.is_none() {
                    let message = &failure.message;
                    self.context.output.note(&format!("{message}; changes may be missed"));
                }
                self.failing_since.get_or_insert_with(Instant::now);
                return Ok(true);
            }
            Err(failure) => return Err(failure),
        };
        let mut lines = Vec::new();
        if let Some(since) = self.failing_since.take() {
            lines.push(Change::gap(since.elapsed()));
        }
        let is_first = self.seen.is_none();
        let mut before = self.seen.take().unwrap_or_default();
        let mut seen = HashMap::with_capacity(now.len());
        for lock in now {
            let left = lock.info.expires_at.since(SystemClock.now());
            let ttl = match before.remove(&lock.key) {
                Some(last) if last.lock.lock_id == lock.lock_id => {
                    lines.extend(renewed_late(&last, &lock));
                    last.ttl.max(left)
                }
                last => {
                    if let Some(last) = last {
                        lines.push(self.end_of(&last.lock, Some(&lock)).await);
                    }
                    if !is_first {
                        lines.push(Change::of(Kind::Acquired, &lock, None));
                    } else if !self.keys.is_empty() {
                        let held = SystemClock.now().since(lock.info.acquired_at);
                        lines.push(Change::of(Kind::Held, &lock, Some(held)));
                    }
                    left
                }
            };
            seen.insert(lock.key.clone(), Seen { lock, ttl });
        }
        for last in before.into_values() {
            lines.push(self.end_of(&last.lock, None).await);
        }
        self.seen = Some(seen);
        for line in lines {
            if !self.context.output.stream(&line, || line.text())? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    async fn locks(&self) -> Result<Vec<LockInfoRaw>, Failure> {
        let mut found = Vec::new();
        if !self.keys.is_empty() {
            for key in &self.keys {
                found.extend(diagnostics::get_by_key_raw(&self.backend, key).await?);
            }
            return Ok(once(found));
        }
        let unlistable = || Failure::new(FAILED, "this store cannot list its locks; name keys");
        let admin = self.backend.admin().ok_or_else(unlistable)?;
        let mut next = None;
        loop {
            let page = admin.list(next.as_ref()).await?;
            found.extend(page.locks.into_iter().map(LockInfoRaw::from));
            next = page.next;
            if next.is_none() {
                return Ok(once(found));
            }
        }
    }

    /// Returns how a lock ended that is no longer there.
    async fn end_of(&self, lock: &LockInfoRaw, next: Option<&LockInfoRaw>) -> Change {
        let ended_at = next.map_or_else(|| SystemClock.now(), |next| next.info.acquired_at);
        let held = ended_at.since(lock.info.acquired_at);
        if let Some(BreakNote { by, reason, .. }) = self.backend.break_note(&lock.lock_id).await {
            let reason = reason.map(|reason| (*reason).to_owned());
            return Change { by, reason, ..Change::of(Kind::Broken, lock, Some(held)) };
        }
        let has_expired = ended_at >= lock.info.expires_at;
        Change::of(if has_expired { Kind::Expired } else { Kind::Released }, lock, Some(held))
    }
}

/// Returns every lock once, by key, as its last holder has it: a store may list a lock twice.
fn once(mut locks: Vec<LockInfoRaw>) -> Vec<LockInfoRaw> {
    locks.sort_by(|one, other| {
        one.key.cmp(&other.key).then_with(|| other.info.fence.cmp(&one.info.fence))
    });
    locks.dedup_by(|one, other| one.key == other.key);
    locks
}

/// Returns the change of a lock that was renewed when less than a third of its TTL was left. A
/// guard renews when two thirds are left, so it was held up.
fn renewed_late(last: &Seen, lock: &LockInfoRaw) -> Option<Change> {
    let (before, after) = (last.lock.info.expires_at, lock.info.expires_at);
    let gained = after.since(before);
    let left = last.ttl.saturating_sub(gained);
    (after > before && left < last.ttl / 3).then(|| Change::of(Kind::RenewedLate, lock, Some(left)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn change(event: Kind) -> Change {
        Change {
            event,
            at_ms: 0,
            key: Some("deploy\n".to_owned()),
            key_hash: None,
            fence: Some("000000000000007".to_owned()),
            holder: HolderInfo::parse("web-3/4211/syncguard/./deploy.sh"),
            duration_ms: Some(130_000),
            by: HolderInfo::parse("ops-1/99/syncguard/ana"),
            reason: Some("stuck\u{1b}".to_owned()),
        }
    }

    #[test]
    fn a_line_says_who_and_how_long_and_escapes_foreign_text() {
        assert_eq!(
            change(Kind::Broken).text(),
            "1970-01-01T00:00:00Z deploy\\n broken by ops-1, pid 99, ana (stuck\\u{1b}), was held \
             by web-3, pid 4211, ./deploy.sh, for 2m 10s, fence 000000000000007\n"
        );
        assert_eq!(
            change(Kind::Acquired).text(),
            "1970-01-01T00:00:00Z deploy\\n acquired by web-3, pid 4211, ./deploy.sh, fence \
             000000000000007\n"
        );
    }
}
