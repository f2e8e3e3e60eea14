//! Release and extend: finding a held lock by its receipt, its key or its id, and changing it in
//! one commit that fails if it has changed meanwhile.

use super::record::{self, Record, Version};
use super::requests::{self, Commit, Committed, Conflict};
use super::{FirestoreBackend, Held, deletion, error};
use crate::common::error::Result;
use crate::common::lock_id::LockId;
use crate::common::time::{Timestamp, is_live};
use crate::common::ttl::Ttl;
use crate::contract::outcome::NotHeldReason;
use crate::contract::request::{Hint, Receipt};
use googleapis_tonic_google_firestore_v1::google::firestore::v1 as api;

/// A change of a held lock.
#[derive(Clone, Copy)]
pub(super) enum Change {
    Release,
    Extend(Ttl),
}

/// A change that took effect.
pub(super) struct Changed {
    pub(super) document: String,
    pub(super) version: Option<Version>,
    pub(super) now: Timestamp,
}

/// The outcome of one attempt at a change.
enum Attempt {
    Done(Changed),
    Conflict(Conflict),
    /// The lock has expired, by this machine's clock or by the server's time. Nothing was
    /// committed.
    TooLate,
    /// The lock had already expired when the change was committed, by the server's time.
    WasDead,
}

/// The lock with an id, and expired duplicates to delete with it.
struct Resolved {
    lock: Result<Record, NotHeldReason>,
    debris: Vec<Record>,
}

impl FirestoreBackend {
    /// Changes the lock with an id, and tries again on conflicts with other clients.
    pub(super) async fn change(
        &self,
        lock_id: LockId,
        hint: &Hint,
        change: Change,
    ) -> Result<Result<Changed, NotHeldReason>> {
        let mut has_conflicted = false;
        let changed = self.try_change(lock_id, hint, change, &mut has_conflicted).await;
        // A conflict does not prove that the commit had no effect.
        changed.map_err(|error| if has_conflicted { error.after_effect() } else { error })
    }

    async fn try_change(
        &self,
        lock_id: LockId,
        hint: &Hint,
        change: Change,
        has_conflicted: &mut bool,
    ) -> Result<Result<Changed, NotHeldReason>> {
        let held = hint.receipt.as_ref().and_then(Receipt::get::<Held>);
        let is_ours =
            |held: &&Held| held.lock_id == lock_id && self.shared.names.is_lock(&held.document);
        if let Some(held) = held.filter(is_ours) {
            let place = (held.document.as_str(), held.version, held.expires_at);
            match self.commit(lock_id, place, &[], change).await? {
                Attempt::Done(changed) => return Ok(Ok(changed)),
                Attempt::WasDead => return Ok(Err(NotHeldReason::Expired)),
                // The receipt is out of date.
                Attempt::Conflict(_) => *has_conflicted = true,
                Attempt::TooLate => {}
            }
        }
        let mut refused = None;
        for round in 0..super::ROUNDS {
            super::pause(round).await;
            let Resolved { lock, debris } = self.resolve(lock_id, hint).await?;
            let record = match lock {
                Ok(record) => record,
                Err(reason) => {
                    if !debris.is_empty() {
                        let deletions = debris.iter().map(deletion).collect();
                        // Best effort: what cannot be deleted now is found again later.
                        drop(self.shared.requests.commit(deletions).await);
                    }
                    return Ok(Err(reason));
                }
            };
            if let Some((before, error)) = refused.take()
                && before == record.version
            {
                return Err(error);
            }
            let place = (record.name.as_str(), record.version, record.lock.expires_at);
            match self.commit(lock_id, place, &debris, change).await? {
                Attempt::Done(changed) => return Ok(Ok(changed)),
                Attempt::TooLate | Attempt::WasDead => return Ok(Err(NotHeldReason::Expired)),
                Attempt::Conflict(conflict) => {
                    *has_conflicted = true;
                    if !conflict.is_race && debris.is_empty() {
                        refused = Some((record.version, conflict.error));
                    }
                }
            }
        }
        Err(error::conflict())
    }

    /// Makes a change in one commit, if the lock is still live.
    async fn commit(
        &self,
        lock_id: LockId,
        (document, version, expires_at): (&str, Version, Timestamp),
        debris: &[Record],
        change: Change,
    ) -> Result<Attempt> {
        let requests = &self.shared.requests;
        if let Change::Extend(_) = change
            && let Err(error) = requests.approve_clock().await
        {
            // If this machine's clocks stood still, the lock lives longer by them than for other
            // clients. Report the expiry as soon as the server's time shows it.
            let is_dead =
                requests.earliest_server_time().is_some_and(|now| !is_live(expires_at, now));
            return if is_dead { Ok(Attempt::TooLate) } else { Err(error) };
        }
        let now = requests.now();
        if !is_live(expires_at, now) {
            return Ok(Attempt::TooLate);
        }
        let mut writes: Vec<api::Write> = debris.iter().map(deletion).collect();
        writes.push(change.write(document, version, now));
        let changed = |version| Changed { document: document.to_owned(), version, now };
        match requests.commit(writes).await {
            Ok(Commit::Done(committed)) => {
                let version = committed.last_version();
                match change {
                    Change::Extend(ttl)
                        if self
                            .was_dead(&committed, expires_at, now.expiry(ttl), document)
                            .await? =>
                    {
                        Ok(Attempt::WasDead)
                    }
                    _ => Ok(Attempt::Done(changed(version))),
                }
            }
            Ok(Commit::Conflict(conflict)) => Ok(Attempt::Conflict(conflict)),
            Err(error) if error.may_have_taken_effect() => {
                // The response was lost; the document shows whether the commit took effect.
                let Ok([found]) = requests.read([document]).await else { return Err(error) };
                let is_known = matches!(change, Change::Release) || requests.is_clock_good();
                match found.map(Record::read).transpose() {
                    Ok(found) if is_known && change.is_seen_in(found.as_ref(), lock_id, now) => {
                        Ok(Attempt::Done(changed(found.map(|found| found.version))))
                    }
                    _ => Err(error),
                }
            }
            Err(error) => Err(error),
        }
    }

    /// Returns whether a committed extend came too late, by the time of the commit.
    ///
    /// All clocks of this machine may have stood still together, for example in a paused virtual
    /// machine. No local clock shows that, and the expiry that was written is earlier than the
    /// holder believes, or already past.
    async fn was_dead(
        &self,
        committed: &Committed,
        before: Timestamp,
        after: Timestamp,
        document: &str,
    ) -> Result<bool> {
        let requests = &self.shared.requests;
        let Err(clock_is_off) = requests.known_clock() else { return Ok(false) };
        let Some(at) = committed.at else { return Err(clock_is_off.after_effect()) };
        if is_live(before, at) && is_live(after, at) {
            // The lock is held, but for a shorter time than the holder would believe.
            return Err(clock_is_off.after_effect());
        }
        if is_live(after, at)
            && let Some(version) = committed.last_version()
        {
            // The extend revived an expired lock. If the deletion fails, the lock expires again.
            drop(requests.commit(vec![requests::delete(document, version)]).await);
        }
        Ok(true)
    }

    /// Finds the lock with an id: at the key in the hint, or else by a query for the id.
    async fn resolve(&self, lock_id: LockId, hint: &Hint) -> Result<Resolved> {
        if let Some(key) = &hint.key {
            let [lock, _] = self.shared.names.documents(key)?;
            let [found] = self.shared.requests.read([&lock]).await?;
            // A malformed document is skipped here; the query by id still finds it if it has the
            // id.
            let found = found.and_then(|found| Record::read(found).ok());
            let is_ours = |record: &Record| {
                let is_live = is_live(record.lock.expires_at, self.shared.requests.now());
                record.lock.lock_id == lock_id && is_live
            };
            if let Some(record) = found.filter(is_ours) {
                return Ok(Resolved { lock: Ok(record), debris: Vec::new() });
            }
        }
        let found = self.find(lock_id).await?;
        let now = self.shared.requests.now();
        let is_single = found.len() == 1;
        let (mut live, dead): (Vec<Record>, Vec<Record>) =
            found.into_iter().partition(|record| is_live(record.lock.expires_at, now));
        let lock = match (live.pop(), dead.is_empty()) {
            (Some(record), _) if live.is_empty() => Ok(record),
            // Several locks are live, and the request does not specify which one.
            (Some(_), _) => Err(NotHeldReason::Unknown),
            (None, true) => Err(NotHeldReason::NotFound),
            (None, false) => Err(NotHeldReason::Expired),
        };
        // A single expired record stays, so that the next outcome is the same.
        Ok(Resolved { lock, debris: if is_single { Vec::new() } else { dead } })
    }
}

impl Change {
    fn write(self, document: &str, version: Version, now: Timestamp) -> api::Write {
        match self {
            Self::Release => requests::delete(document, version),
            Self::Extend(ttl) => {
                requests::update(document, record::expiry_field(now.expiry(ttl)), version)
            }
        }
    }

    /// Returns whether the document shows that this change took effect.
    fn is_seen_in(self, found: Option<&Record>, lock_id: LockId, now: Timestamp) -> bool {
        match (self, found) {
            (Self::Release, found) => found.is_none(),
            (Self::Extend(ttl), Some(Record { lock, .. })) => {
                lock.lock_id == lock_id && lock.expires_at == now.expiry(ttl)
            }
            (Self::Extend(_), None) => false,
        }
    }
}
