//! `cargo xtask mutants`: plants one bug at a time in a copy of the source tree. A bug that no test
//! catches is a gap in the tests.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::shell::{Outcome, cargo, root, step};
use crate::test::{REQUIRE_SERVERS, install_servers};

/// A deliberate bug: a file of the library (or of the command, with the prefix `cli/`), the text to
/// replace, its replacement, and the test file that must fail: `lib/` is for unit tests, by name,
/// and `torture/` for a run with a store.
struct Mutant {
    name: &'static str,
    file: &'static str,
    original: &'static str,
    mutated: &'static str,
    caught_by: &'static str,
}

impl Mutant {
    /// Returns the file in a tree and its text. Fails if the text to replace is not there.
    fn read(&self, tree: &Path) -> Outcome<(PathBuf, String)> {
        let path = match self.file.strip_prefix("cli/") {
            Some(file) => tree.join("crates/syncguard-cli/src").join(file),
            None => tree.join("crates/syncguard/src").join(self.file),
        };
        let source =
            fs::read_to_string(&path).map_err(|cause| format!("{}: {cause}", self.file))?;
        if !source.contains(self.original) {
            return Err(format!("\"{}\" no longer applies to {}", self.name, self.file));
        }
        Ok((path, source))
    }
}

const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "ownership is not checked",
        file: "backends/memory/mod.rs",
        original: "slot.record.filter(|record| record.lock_id == lock_id)",
        mutated: "slot.record.filter(|_record| true)",
        caught_by: "memory",
    },
    Mutant {
        name: "the fence does not grow",
        file: "backends/memory/mod.rs",
        original: "slot.fence_counter = fence.get();",
        mutated: "",
        caught_by: "memory",
    },
    Mutant {
        name: "an extend revives an expired lock",
        file: "backends/memory/mod.rs",
        original: "return ExtendOutcome::NotHeld(NotHeldReason::Expired);",
        mutated: "",
        caught_by: "memory",
    },
    Mutant {
        name: "the tolerance has the wrong sign",
        file: "common/time.rs",
        original: "expires_at.0.saturating_add(TIME_TOLERANCE_MS) > now.0",
        mutated: "expires_at.0 > now.0.saturating_add(TIME_TOLERANCE_MS)",
        caught_by: "memory",
    },
    Mutant {
        name: "a release leaves the index entry",
        file: "backends/memory/mod.rs",
        original: "slot.record = None;\n            self.store.shards.index(&lock_id).remove(&lock_id);",
        mutated: "slot.record = None;",
        caught_by: "memory",
    },
    Mutant {
        name: "an extend is sent after the guard released the lock",
        file: "lock/lease_state.rs",
        original: "if self.end().is_some() {\n            return BeginExtend::Over(None);",
        mutated: "if false {\n            return BeginExtend::Over(None);",
        caught_by: "renewal",
    },
    Mutant {
        name: "renewal does not end with its guard",
        file: "lock/lease_task.rs",
        original: "Step::Over | Step::Lost(_) => return,",
        mutated: "Step::Over | Step::Lost(_) => std::future::pending().await,",
        caught_by: "renewal",
    },
    Mutant {
        name: "validity counts from the response",
        file: "lock/attempt.rs",
        original: "sent: acquisition.first_sent(),",
        mutated: "sent: self.context.engine.ticker.now(),",
        caught_by: "renewal",
    },
    Mutant {
        name: "a dropped acquire is abandoned",
        file: "contract/detach.rs",
        original: "detach(self.call.take());",
        mutated: "drop(detach);",
        caught_by: "memory",
    },
    Mutant {
        name: "a request of unknown outcome is forgotten",
        file: "lock/attempt.rs",
        original: "undo_later(self.call.context, self.call.key.clone(), *acquisition, None);",
        mutated: "drop(acquisition);",
        caught_by: "waiting",
    },
    Mutant {
        name: "one \"not held\" ends an undo",
        file: "lock/acquisition.rs",
        original: "if undo_is_final || self.open == 0 {",
        mutated: "if true {",
        caught_by: "waiting",
    },
    Mutant {
        name: "a dropped guard releases nothing",
        file: "lock/guard.rs",
        original: "self.0.abandon();",
        mutated: "",
        caught_by: "guards",
    },
    Mutant {
        name: "a late extension is kept",
        file: "lock/lease_state.rs",
        original: "Some(_) => AfterExtend::ReleaseIt(None),",
        mutated: "Some(_) => AfterExtend::Noted,",
        caught_by: "renewal",
    },
    Mutant {
        name: "fairness never lets other processes go first",
        file: "lock/wait_queue.rs",
        original: "if self.in_a_row <= self.allowed {",
        mutated: "if true {",
        caught_by: "waiting",
    },
    Mutant {
        name: "a lock acquired after the timeout is returned",
        file: "lock/wait.rs",
        original: "Ok(late) if self.is_late() =>",
        mutated: "Ok(late) if false =>",
        caught_by: "waiting",
    },
    Mutant {
        name: "an error shows the key",
        file: "common/key.rs",
        original: "write!(f, \"Key({})\", self.hash_id())",
        mutated: "write!(f, \"Key({})\", self.0)",
        caught_by: "canary",
    },
    Mutant {
        name: "postgres: an old snapshot is trusted",
        file: "backends/postgres/sql/acquire.sql",
        original: "WHERE f.fence = (SELECT fence FROM {fences} WHERE fence_key = $6)",
        mutated: "WHERE true",
        caught_by: "postgres_faults",
    },
    Mutant {
        name: "postgres: the key's advisory lock is not tried",
        file: "backends/postgres/sql/acquire.sql",
        original: "ELSE pg_try_advisory_xact_lock(hashtext($1)) END",
        mutated: "ELSE true END",
        caught_by: "postgres_faults",
    },
    Mutant {
        name: "firestore: writes have no preconditions",
        file: "backends/firestore/requests.rs",
        original: "current_document: Some(api::Precondition { condition_type: Some(condition) }),",
        mutated: "current_document: { drop(condition); None },",
        caught_by: "firestore_wire",
    },
    Mutant {
        name: "firestore: the owner of a lock is not checked",
        file: "backends/firestore/change.rs",
        original: "held.lock_id == lock_id && self",
        mutated: "self",
        caught_by: "firestore_faults",
    },
    Mutant {
        name: "firestore: cleanup ignores a wrong clock",
        file: "backends/firestore/mod.rs",
        original: "if requests.approve_clock().await.is_ok() {",
        mutated: "if true {",
        caught_by: "firestore_clocks",
    },
    Mutant {
        name: "firestore: a release wakes no waiter",
        file: "backends/firestore/listener.rs",
        original: "Some(ResponseType::DocumentDelete(gone)) => self.wake(&gone.document),",
        mutated: "Some(ResponseType::DocumentDelete(_)) => {}",
        caught_by: "firestore_faults",
    },
    Mutant {
        name: "firestore: a lost response is not looked up",
        file: "backends/firestore/mod.rs",
        original: "return self.look_again(request, &lock).await.ok_or(error);",
        mutated: "return Err(error);",
        caught_by: "firestore_faults",
    },
    Mutant {
        name: "a release does not end the lease",
        file: "lock/lease_state.rs",
        original: "self.lost.clone().or(self.let_go_at.map(|_at| LostReason::Released))",
        mutated: "self.lost.clone()",
        caught_by: "renewal",
    },
    Mutant {
        name: "an extend of unknown outcome is forgotten",
        file: "lock/lease_state.rs",
        original: "self.unknown_until = self.shortest_unknown.map(|shortest| sent.at + shortest);",
        mutated: "self.unknown_until = None;",
        caught_by: "renewal",
    },
    Mutant {
        name: "the undo of a replay ends with its first release",
        file: "lock/acquisition.rs",
        original: "} else if answer == ReleaseOutcome::Released && !self.is_granted {",
        mutated: "} else if answer == ReleaseOutcome::Released {",
        caught_by: "waiting",
    },
    Mutant {
        name: "the stop margin is ignored",
        file: "lock/lease_state.rs",
        original: "self.believed_until() - self.stop_margin",
        mutated: "self.believed_until()",
        caught_by: "renewal",
    },
    Mutant {
        name: "a renewal waits for its response until the lock expires",
        file: "lock/lease_state.rs",
        original: "let limit = (left / 2).max(SHORTEST).min(left);",
        mutated: "let limit = left;",
        caught_by: "renewal",
    },
    Mutant {
        name: "memory: liveness follows the wall clock",
        file: "backends/memory/config.rs",
        original: "clock: Arc::new(MonotonicClock::new())",
        mutated: "clock: Arc::new(crate::common::clock::SystemClock)",
        caught_by: "memory_clock",
    },
    Mutant {
        name: "postgres: a read-only connection is kept",
        file: "backends/postgres/error.rs",
        original: "\"25006\" => Remedy::FindPrimary,",
        mutated: "\"25006\" => Remedy::None,",
        caught_by: "postgres_connections",
    },
    Mutant {
        name: "postgres: connections have no maximum age",
        file: "backends/postgres/pool.rs",
        original: "Instant::now() >= self.ends_at",
        mutated: "Instant::now() >= self.ends_at + A_LONG_TIME",
        caught_by: "postgres_connections",
    },
    Mutant {
        name: "postgres: stale plans are not prepared again",
        file: "backends/postgres/error.rs",
        original: "\"0A000\" => Remedy::PrepareAgain,",
        mutated: "\"0A000\" => Remedy::None,",
        caught_by: "postgres_connections",
    },
    Mutant {
        name: "postgres: the driver logs parameters",
        file: "backends/postgres/statements.rs",
        original: "f.write_str(\"redacted\")",
        mutated: "if let Self::Text(text) = self { f.write_str(text) } else { Ok(()) }",
        caught_by: "postgres_log",
    },
    Mutant {
        name: "postgres: every awaited key is marked",
        file: "backends/postgres/listener.rs",
        original: "const MOST_MARKED_KEYS: usize = 64;",
        mutated: "const MOST_MARKED_KEYS: usize = usize::MAX;",
        caught_by: "postgres_wake",
    },
    Mutant {
        name: "postgres: waiters without a marker are not notified",
        file: "backends/postgres/sql/release.sql",
        original: "WHEN pg_try_advisory_lock($4, 0) THEN NOT pg_advisory_unlock($4, 0)",
        mutated: "WHEN $4 = $4 THEN false",
        caught_by: "postgres_wake",
    },
    Mutant {
        name: "postgres: a notification is not sent immediately",
        file: "backends/postgres/batches.rs",
        original: "if notifying.as_mut().poll(&mut context).is_pending() {",
        mutated: "if context.waker().will_wake(TaskWaker::noop()) || notifying.as_mut().poll(&mut context).is_pending() {",
        caught_by: "postgres_wake",
    },
    Mutant {
        name: "postgres: quiesce does not wait for notifications",
        file: "backends/postgres/mod.rs",
        original: "self.shared.background.wait().await;",
        mutated: "",
        caught_by: "postgres_wake",
    },
    Mutant {
        name: "postgres: the expiry is computed with the local clock",
        file: "backends/postgres/record.rs",
        original: "return Ok(Some(AcquireOutcome::Acquired(Lease::new(granted, millis(column(row, 1)?)?))));",
        mutated: "let now = std::time::UNIX_EPOCH.elapsed().map_or(0, |now| now.as_millis() as i64); \
                  let expires_at = millis(now + integer(request.ttl().as_millis()))?; \
                  return Ok(Some(AcquireOutcome::Acquired(Lease::new(granted, expires_at))));",
        caught_by: "postgres_wire",
    },
    Mutant {
        name: "postgres: an expired lock is reported as not found",
        file: "backends/postgres/batches.rs",
        original: "if column(row, 3)? { NotHeldReason::NotFound } else { NotHeldReason::Expired };",
        mutated: "NotHeldReason::NotFound;",
        caught_by: "postgres_wire",
    },
    Mutant {
        name: "sqlite: a moved file is not noticed",
        file: "backends/sqlite/file.rs",
        original: "!has_moved(&self.db) && identity",
        mutated: "identity",
        caught_by: "sqlite_faults",
    },
    Mutant {
        name: "sqlite: a deleted wake file is not noticed",
        file: "backends/sqlite/listener.rs",
        original: ".union(WatchFlags::ATTRIB)",
        mutated: "",
        caught_by: "sqlite_faults",
    },
    Mutant {
        name: "sqlite: the wake file may be a symbolic link",
        file: "backends/sqlite/listener.rs",
        original: "options.custom_flags(",
        mutated: "drop(",
        caught_by: "sqlite_faults",
    },
    Mutant {
        name: "firestore: an extend ignores the commit's time",
        file: "backends/firestore/change.rs",
        original: "let Err(clock_is_off) = requests.known_clock() else { return Ok(false) };",
        mutated: "let Err(clock_is_off) = Ok::<(), crate::common::error::Error>(()) else { return Ok(false) };",
        caught_by: "firestore_clocks",
    },
    Mutant {
        name: "firestore: a grant ignores the commit's time",
        file: "backends/firestore/mod.rs",
        original: "requests.known_clock().map_err(Error::after_effect)?;",
        mutated: "",
        caught_by: "firestore_clocks",
    },
    Mutant {
        name: "firestore: a failed read after the last conflict is ignored",
        file: "backends/firestore/mod.rs",
        original: "let [found] = requests.read([&lock]).await?;\n        let found = found.map(Record::read)",
        mutated: "let [found] = requests.read([&lock]).await.unwrap_or_default();\n        let found = found.map(Record::read)",
        caught_by: "firestore_faults",
    },
    Mutant {
        name: "firestore: a dead channel is kept",
        file: "backends/firestore/requests.rs",
        original: "self.replace_channel(number);",
        mutated: "",
        caught_by: "firestore_paths",
    },
    Mutant {
        name: "firestore: any message resets the backoff",
        file: "backends/firestore/listener.rs",
        original: "stream.opened_at.elapsed() >= STABLE",
        mutated: "stream.opened_at.elapsed() < STABLE",
        caught_by: "firestore_paths",
    },
    Mutant {
        name: "firestore: the result of a query is not checked",
        file: "backends/firestore/mod.rs",
        original: ".filter(|record| record.lock.lock_id == lock_id)",
        mutated: "",
        caught_by: "firestore_answers",
    },
    Mutant {
        name: "firestore: duplicates are not reported",
        file: "backends/firestore/mod.rs",
        original: "if records.len() > 1 {",
        mutated: "if records.len() > 1 && false {",
        caught_by: "firestore_answers",
    },
    Mutant {
        name: "a failed undo counts as without effect",
        file: "backends/redis/shard.rs",
        original: "_ => error.after_effect(),",
        mutated: "_ => error.without_effect(),",
        caught_by: "redis_replicas",
    },
    Mutant {
        name: "an undo leaves its marker in one shard",
        file: "backends/redis/shards.rs",
        original: "if request.is_undo() {",
        mutated: "if false {",
        caught_by: "redis_shards",
    },
    Mutant {
        name: "another number of shards is accepted",
        file: "backends/redis/shards.rs",
        original: "Some(remembered) if remembered == u64::from(count) => Ok(()),",
        mutated: "Some(_) => Ok(()),",
        caught_by: "redis_shards",
    },
    Mutant {
        name: "a shard that moves is not followed",
        file: "backends/redis/route.rs",
        original: "Self::Shard { nodes, .. } => nodes.refresh(version).await,",
        mutated: "Self::Shard { .. } => {}",
        caught_by: "redis_shards",
    },
    Mutant {
        name: "replicas confirm a replay that wrote nothing",
        file: "backends/redis/lua/acquire.lua",
        original: "redis.call('SET', lock, raw, 'KEEPTTL')",
        mutated: "",
        caught_by: "redis_replicas",
    },
    Mutant {
        name: "a Redis prefix is not normalized",
        file: "backends/redis/config.rs",
        original: "self.prefix = prefix.into().nfc().collect();",
        mutated: "self.prefix = prefix.into();",
        caught_by: "redis_wire",
    },
    Mutant {
        name: "the first sentinel decides",
        file: "backends/redis/survey.rs",
        original: "best.rank < answer.rank",
        mutated: "best.rank < answer.rank && false",
        caught_by: "redis_search",
    },
    Mutant {
        name: "a clock on Redis does not raise a fence",
        file: "backends/redis/lua/fence.lua",
        original: "fence = math.max(fence, floor)",
        mutated: "",
        caught_by: "redis",
    },
    Mutant {
        name: "a clock on Redis replaces the counter",
        file: "backends/redis/lua/fence.lua",
        original: "fence = math.max(fence, floor)",
        mutated: "fence = floor",
        caught_by: "redis",
    },
    Mutant {
        name: "a clock on PostgreSQL replaces the counter",
        file: "backends/postgres/sql/acquire.sql",
        original: "fence = greatest(f.fence + 1, excluded.fence)",
        mutated: "fence = excluded.fence",
        caught_by: "postgres",
    },
    Mutant {
        name: "PostgreSQL collects counters that are in use",
        file: "backends/postgres/sql/collect_fences.sql",
        original: "fence < ({now} - $2) * $3",
        mutated: "fence < {now} * $3",
        caught_by: "fence_collection",
    },
    Mutant {
        name: "Redis accepts a stale fence",
        file: "backends/redis/lua/fenced.lua",
        original: "tonumber(largest) > tonumber(fence)",
        mutated: "false",
        caught_by: "fenced_writes",
    },
    Mutant {
        name: "Firestore accepts a stale fence",
        file: "backends/firestore/fenced.rs",
        original: "if fence < largest {",
        mutated: "if false {",
        caught_by: "fenced_writes",
    },
    Mutant {
        name: "an acquire on Redis has no physical expiry",
        file: "backends/redis/lua/acquire.lua",
        original: "redis.call('SET', lock, record, 'PX', stored_ms, raw",
        mutated: "redis.call('SET', lock, record, raw",
        caught_by: "redis_wire",
    },
    Mutant {
        name: "an extend on Redis has no physical expiry",
        file: "backends/redis/lua/extend.lua",
        original: "redis.call('SET', lock, record, 'PX', stored_ms)",
        mutated: "redis.call('SET', lock, record, 'KEEPTTL')",
        caught_by: "redis_wire",
    },
    Mutant {
        name: "a claim is granted without its fence",
        file: "backends/redis/lua/seal.lua",
        original: "redis.call('SET', KEYS[1], sealed, 'KEEPTTL')",
        mutated: "",
        caught_by: "redis_topologies",
    },
    Mutant {
        name: "a renewal ignores its time limit",
        file: "contract/request.rs",
        original: "Some(limit) => tokio::time::timeout(limit, attempt).await.ok(),",
        mutated: "Some(_limit) => Some(attempt.await),",
        caught_by: "redis_faults",
    },
    Mutant {
        name: "a timeout hides the store error",
        file: "lock/wait.rs",
        original: "error.with_source(cause)",
        mutated: "{ drop(cause); error }",
        caught_by: "waiting",
    },
    Mutant {
        name: "run: an orphaned watcher does not terminate the group",
        file: "cli/watcher.rs",
        original: "return end(owner, left.map_or(grace, |left| grace.min(before_expiry(left))));",
        mutated: "return u8::from(left.is_none());",
        caught_by: "cli/run_loss",
    },
    Mutant {
        name: "run: the watcher ignores the announced time",
        file: "cli/watcher.rs",
        original: "expires_at = time.ok().map(|time| Instant::now() + time);",
        mutated: "expires_at = time.ok().and_then(|_: Duration| None);",
        caught_by: "cli/run_loss",
    },
    Mutant {
        name: "run: a dead watcher is not replaced",
        file: "cli/supervision.rs",
        original: "if let Err(failure) = self.watcher.replace() {",
        mutated: "if let Err(failure) = Ok::<(), Failure>(()) {",
        caught_by: "cli/run_loss",
    },
    Mutant {
        name: "run: the command starts without a check of the lock",
        file: "cli/supervision.rs",
        original: "if age < FRESH.min(self.ttl.as_duration() / 6) { None }",
        mutated: "if age < FRESH.max(self.ttl.as_duration()) { None }",
        caught_by: "cli/run_loss",
    },
    Mutant {
        name: "run: a release that finds no lock is not reported",
        file: "cli/commands/run.rs",
        original: "|outcome| outcome == ReleaseOutcome::Released;",
        mutated: "|_outcome| true;",
        caught_by: "cli/run_loss",
    },
    Mutant {
        name: "run: a signal to all processes is forwarded again",
        file: "cli/supervision.rs",
        original: "&& !self.watcher.has_seen(signal).await",
        mutated: "",
        caught_by: "cli/run_signals",
    },
    Mutant {
        name: "race: a loss between two polls of a token is missed",
        file: "lock/guard.rs",
        original: "handle.lost().await;\n                    drop(cancel_on_drop);",
        mutated: "let token = cancel_on_drop.disarm();
                    let lost = async {
                        while handle.lost().await == LostReason::Released {
                            std::future::pending::<()>().await;
                        }
                    };
                    tokio::select! {
                        biased;
                        () = lost => token.cancel(),
                        reason = handle.lost() => {
                            if reason == LostReason::Released {
                                token.cancel();
                            }
                        }
                    }",
        caught_by: "lib/schedules::scenarios::no_loss_is_missed",
    },
    Mutant {
        name: "race: an observer registers after it has looked",
        file: "lock/shared_lease.rs",
        original: "let changed = self.changed.notified();
            let mut changed = pin!(changed);
            // Registers before checking, so that no change in between is missed.
            changed.as_mut().enable();
            let found = look(&self.inner().state);
            if let Some(found) = found {
                return found;
            }
            changed.await;",
        mutated: "let found = look(&self.inner().state);
            if let Some(found) = found {
                return found;
            }
            self.changed.notified().await;",
        caught_by: "lib/schedules::scenarios::every_observer",
    },
    Mutant {
        name: "race: a release wakes only a waiter that sleeps",
        file: "lock/wait_queue.rs",
        original: "queue.forget(holder);\n            queue.released.notify_one();",
        mutated: "queue.forget(holder);\n            queue.released.notify_waiters();",
        caught_by: "lib/schedules::scenarios::a_queue_hands_over",
    },
    Mutant {
        name: "race: a waiter subscribes and does not ask again",
        file: "lock/wait.rs",
        original: "        !head.subscriptions.is_empty()\n    }",
        mutated: "        false\n    }",
        caught_by: "lib/schedules::scenarios::processes_hand_over",
    },
    Mutant {
        name: "race: a subscription ends outside the mutex",
        file: "contract/notifier.rs",
        original: "let mut topics = self.notifier.lock();
        // Under the mutex, so that of two concurrent drops one sees that it is the last.
        drop(self.receiver.take());
        if topics.get(&self.key).is_some_and(|sender| sender.receiver_count() == 0) {",
        mutated: "let is_last = |sender: &watch::Sender<Latest>| sender.receiver_count() == 1;
        let is_last = self.notifier.lock().get(&self.key).is_some_and(is_last);
        drop(self.receiver.take());
        let mut topics = self.notifier.lock();
        if is_last {",
        caught_by: "lib/schedules::scenarios::no_subscription",
    },
    Mutant {
        name: "redis: the key of a record is trusted",
        file: "backends/redis/record.rs",
        original: "Key::new(record.key).map_err(|_cause| foreign())?,",
        mutated: "Key::new(record.key).expect(\"a key\"),",
        caught_by: "lib/redis::record",
    },
    Mutant {
        name: "surplus locks of a set are not given back",
        file: "primitives/lock_all.rs",
        original: "        give_back(surplus).await;\n        refusal.map_or(Ok(()), Err)",
        mutated: "        std::mem::forget(surplus);\n        refusal.map_or(Ok(()), Err)",
        caught_by: "memory",
    },
    Mutant {
        name: "locks of a set expire while another one is waited for",
        file: "primitives/holding.rs",
        original: "while !locker.options().renew {",
        mutated: "while locker.options().renew {",
        caught_by: "primitives",
    },
    Mutant {
        name: "a candidate that resigned wins again",
        file: "primitives/election.rs",
        original: "const STAND_BACK: Duration = Duration::from_millis(50);",
        mutated: "const STAND_BACK: Duration = Duration::ZERO;",
        caught_by: "primitives",
    },
    Mutant {
        name: "the first number of permits counts",
        file: "primitives/semaphore.rs",
        original: "*largest = count.max(before);",
        mutated: "*largest = before;",
        caught_by: "primitives",
    },
    Mutant {
        name: "waiters for a permit listen to one slot only",
        file: "lock/wait.rs",
        original: "keys.iter().take(MOST_SUBSCRIPTIONS)",
        mutated: "keys.iter().take(1)",
        caught_by: "memory",
    },
    Mutant {
        name: "torture, redis: an extend revives a dead lock",
        file: "backends/redis/lua/extend.lua",
        original: "if expires <= now - ARGV[1] then",
        mutated: "if false then",
        caught_by: "torture/redis",
    },
    Mutant {
        name: "torture, postgres: an extend revives a dead lock",
        file: "backends/postgres/sql/extend.sql",
        original: "WHERE lock_id = $1 AND l.expires_at_ms > now - $2 AND {sensible}",
        mutated: "WHERE lock_id = $1 AND {sensible}",
        caught_by: "torture/postgres",
    },
    Mutant {
        name: "torture, sqlite: an extend revives a dead lock",
        file: "backends/sqlite/record.rs",
        original: "return Ok(ExtendOutcome::NotHeld(NotHeldReason::Expired));",
        mutated: "",
        caught_by: "torture/sqlite",
    },
    Mutant {
        name: "torture, firestore: writes have no preconditions",
        file: "backends/firestore/requests.rs",
        original: "current_document: Some(api::Precondition { condition_type: Some(condition) }),",
        mutated: "current_document: { drop(condition); None },",
        caught_by: "torture/firestore",
    },
];

/// The test files that catch the bugs.
const TESTS: &[&str] = &[
    "lib/schedules",
    "lib/redis::record",
    "memory",
    "primitives",
    "renewal",
    "waiting",
    "guards",
    "canary",
    "postgres_faults",
    "firestore_wire",
    "firestore_clocks",
    "firestore_faults",
    "memory_clock",
    "postgres_connections",
    "postgres_log",
    "postgres_wake",
    "postgres_wire",
    "firestore_paths",
    "firestore_answers",
    "sqlite_faults",
    "redis_faults",
    "redis_replicas",
    "redis_search",
    "redis_shards",
    "redis_topologies",
    "redis_wire",
    "cli/run_loss",
    "cli/run_signals",
    "torture/redis",
    "torture/postgres",
    "torture/sqlite",
    "torture/firestore",
];

/// Plants every bug in turn, or those whose name contains one of the given texts. The error lists
/// those that were not caught.
pub(crate) fn run(texts: &[String]) -> Outcome {
    let is_chosen =
        |name: &str| texts.is_empty() || texts.iter().any(|text| name.contains(text.as_str()));
    let chosen: Vec<_> = MUTANTS.iter().filter(|mutant| is_chosen(mutant.name)).collect();
    let is_needed = |test: &str| {
        // A group of unit tests stands for each of its tests.
        texts.is_empty() || chosen.iter().any(|mutant| mutant.caught_by.starts_with(test))
    };
    let home = root().join("target/mutants");
    let tree = home.join("tree");
    copy_the_tree(&tree)?;
    let programs = install_servers(&["postgres", "redis", "firestore"])?;
    let mut build = cargo(&["test", "--no-run", "--package", "syncguard", "--all-features"]);
    build.current_dir(&tree).env("CARGO_TARGET_DIR", home.join("build"));
    step("building", &mut build)?;
    println!("== without a bug: every test must pass");
    for &test in TESTS.iter().filter(|test| is_needed(test)) {
        if !passes(&home, &tree, &programs, test)? {
            return Err(format!("the tests of {test} fail without any bug"));
        }
    }
    let mut survivors = Vec::new();
    for mutant in &chosen {
        let (path, source) = mutant.read(&tree)?;
        let write = |text: &str| fs::write(&path, text).map_err(|cause| cause.to_string());
        write(&source.replacen(mutant.original, mutant.mutated, 1))?;
        let compiles = succeeds(&home, &tree, &programs, mutant.caught_by, &["--no-run"])?;
        let survived = !compiles || passes(&home, &tree, &programs, mutant.caught_by)?;
        write(&source)?;
        println!("{:44} {}", mutant.name, if survived { "SURVIVED" } else { "caught" });
        if survived {
            survivors.push(mutant.name);
        }
    }
    let caught = chosen.len() - survivors.len();
    println!("{caught} passed, {} failed", survivors.len());
    if survivors.is_empty() { Ok(()) } else { Err(format!("not caught: {}", survivors.join("; "))) }
}

/// Copies the files that git does not ignore, so that the real tree is never changed.
fn copy_the_tree(to: &Path) -> Outcome {
    let listed = Command::new("git")
        .current_dir(root())
        .args(["ls-files", "--cached", "--others", "--exclude-standard"])
        .output()
        .map_err(|cause| format!("git: {cause}"))?;
    for file in String::from_utf8_lossy(&listed.stdout).lines() {
        let (from, to) = (root().join(file), to.join(file));
        if !from.is_file() {
            continue;
        }
        let parent = to.parent().expect("a file lies in a directory");
        fs::create_dir_all(parent).map_err(|cause| format!("{}: {cause}", parent.display()))?;
        let text = fs::read(&from).map_err(|cause| format!("{file}: {cause}"))?;
        // Unchanged files keep their modification time, so that cargo does not rebuild them.
        if fs::read(&to).ok().as_deref() != Some(&text) {
            fs::write(&to, text).map_err(|cause| format!("{file}: {cause}"))?;
        }
    }
    Ok(())
}

/// Returns whether a test file passes in the copy. A test that hangs counts as a failure.
fn passes(home: &Path, tree: &Path, path: &OsStr, test: &str) -> Outcome<bool> {
    succeeds(home, tree, path, test, &[])
}

fn succeeds(home: &Path, tree: &Path, path: &OsStr, test: &str, more: &[&str]) -> Outcome<bool> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let (package, which) = match test.split_once('/') {
        Some(("cli", test)) => ("syncguard-cli", vec!["--test", test]),
        Some(("torture", store)) => {
            let ignored = if more.is_empty() { &["--", "--ignored"][..] } else { &[] };
            ("torture", [&["--test", "stores", store][..], ignored].concat())
        }
        Some((_, name)) => ("syncguard", vec!["--lib", name]),
        None => ("syncguard", vec!["--test", test]),
    };
    let status = Command::new("timeout")
        .arg("180")
        .arg(cargo)
        .current_dir(tree)
        .env("CARGO_TARGET_DIR", home.join("build"))
        .env("PATH", path)
        .env(REQUIRE_SERVERS, "1")
        .args(["test", "--quiet", "--package", package, "--all-features"])
        .args(which)
        .args(more)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .map_err(|cause| format!("cargo test: {cause}"))?;
    Ok(status.success())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `cargo xtask mutants` is too slow for CI, which notices here that a bug cannot be planted.
    #[test]
    fn every_planted_bug_applies_to_the_source() {
        let errors: Vec<_> =
            MUTANTS.iter().filter_map(|mutant| mutant.read(&root()).err()).collect();
        assert!(errors.is_empty(), "{errors:#?}");
    }
}
