//! What happened in the last minutes, as far as it can be seen from the store: who held which lock,
//! and how locks changed hands. It does no I/O.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap, VecDeque};

use serde::Serialize;
use syncguard::LockId;

/// How far back the timeline reaches.
pub(super) const WINDOW_MS: u64 = 10 * 60 * 1000;

/// The most keys in the timeline: those that changed last.
const MOST_KEYS: usize = 200;

/// The most holds of one key in the timeline: the latest.
const MOST_HOLDS: usize = 100;

/// How many samples the percentiles are taken from.
const SAMPLES: usize = 1000;

/// A held lock, as the store lists it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Lock {
    #[serde(skip)]
    pub(super) id: LockId,
    /// The key itself, which identifies the lock in requests.
    pub(super) key: String,
    /// The key as it is displayed.
    pub(super) shown: String,
    #[serde(rename = "lockIdHash")]
    pub(super) id_hash: String,
    pub(super) fence: Option<String>,
    pub(super) acquired_at_ms: u64,
    pub(super) expires_at_ms: u64,
    /// Who holds it, as it is displayed.
    pub(super) holder: Option<String>,
    /// How many processes wait for it, as far as that is known.
    pub(super) waiters: Option<u32>,
}

/// How a hold ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum End {
    Released,
    /// Its time was over: the holder crashed, was cut off, or did not renew it.
    Expired,
    Broken,
}

/// A bar of the timeline.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Hold {
    /// How long the holder had waited, if that is known.
    waited_ms: Option<u64>,
    from_ms: u64,
    /// `None` while it is held.
    to_ms: Option<u64>,
    fence: Option<String>,
    holder: Option<String>,
    end: Option<End>,
    #[serde(skip)]
    lock_id_hash: String,
    #[serde(skip)]
    expires_at_ms: u64,
}

/// A time during which processes waited for a lock.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Queue {
    from_ms: u64,
    /// When it was last seen.
    to_ms: u64,
    /// The most waiters in that time.
    most: u32,
}

/// The timeline of one key.
#[derive(Clone, Debug, Default)]
struct Track {
    shown: String,
    holds: VecDeque<Hold>,
    queues: VecDeque<Queue>,
    waiters: Option<u32>,
    /// When the lock was released, if no other holder was seen since.
    released_at_ms: Option<u64>,
    /// The lock id whose hold was broken, until its end is seen.
    broken: Option<String>,
}

/// A row of the timeline.
#[derive(Debug, Serialize)]
pub(super) struct Row<'a> {
    shown: &'a str,
    holds: &'a VecDeque<Hold>,
    queues: &'a VecDeque<Queue>,
}

/// Percentiles in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Percentiles {
    count: usize,
    p50: u64,
    p90: u64,
    p99: u64,
}

/// The last samples of a duration.
#[derive(Debug, Default)]
struct Samples(VecDeque<u64>);

impl Samples {
    fn add(&mut self, ms: u64) {
        if self.0.len() == SAMPLES {
            self.0.pop_front();
        }
        self.0.push_back(ms);
    }

    fn percentiles(&self) -> Option<Percentiles> {
        let mut sorted: Vec<u64> = self.0.iter().copied().collect();
        sorted.sort_unstable();
        let count = sorted.len();
        let at = |percent: usize| sorted.get((count * percent / 100).min(count.checked_sub(1)?));
        Some(Percentiles { count, p50: *at(50)?, p90: *at(90)?, p99: *at(99)? })
    }
}

/// The holds of the last minutes.
#[derive(Debug, Default)]
pub(super) struct History {
    tracks: BTreeMap<String, Track>,
    hand_overs: Samples,
    waits: Samples,
    holds: Samples,
}

impl History {
    /// Notes the locks that are held now. With `is_complete`, all others are free.
    pub(super) fn observe(&mut self, now_ms: u64, locks: &[Lock], is_complete: bool) {
        let seen: HashMap<&str, &Lock> =
            locks.iter().map(|lock| (lock.key.as_str(), lock)).collect();
        for (key, track) in &mut self.tracks {
            let lock = seen.get(key.as_str());
            if let Some(hold) = track.holds.back_mut().filter(|hold| hold.to_ms.is_none()) {
                match lock {
                    Some(lock) if lock.id_hash == hold.lock_id_hash => {
                        hold.expires_at_ms = lock.expires_at_ms;
                    }
                    None if !is_complete => {}
                    _ => {
                        // A lock that was taken over ended before its successor began.
                        let end = lock.map_or(now_ms, |lock| lock.acquired_at_ms.min(now_ms));
                        let broken = track.broken.take();
                        let is_broken = broken.as_ref() == Some(&hold.lock_id_hash);
                        self.holds.add(hold.close(end, is_broken));
                    }
                }
            }
        }
        for lock in locks {
            self.begin(lock);
        }
        self.forget(now_ms);
    }

    /// Notes that the lock of a key was released, and how long its holder had waited and held it,
    /// if that is known.
    pub(super) fn released(&mut self, key: &str, now_ms: u64, holder_age_ms: Option<u64>) {
        let Some(track) = self.tracks.get_mut(key) else { return };
        let broken = track.broken.take();
        let Some(hold) = track.holds.back_mut().filter(|hold| hold.to_ms.is_none()) else { return };
        self.holds.add(hold.close(now_ms, broken.as_ref() == Some(&hold.lock_id_hash)));
        let waited_from = holder_age_ms.map(|age| now_ms.saturating_sub(age));
        if let Some(from) = waited_from.filter(|from| *from < hold.from_ms) {
            let waited_ms = hold.from_ms - from;
            hold.waited_ms = Some(waited_ms);
            self.waits.add(waited_ms);
        }
        track.released_at_ms = Some(now_ms);
    }

    /// Notes how many processes wait for the lock of a key.
    pub(super) fn waiting(&mut self, key: &str, now_ms: u64, waiters: Option<u32>) {
        /// A queue that was not seen for this long has ended.
        const GAP_MS: u64 = 2500;
        let Some(track) = self.tracks.get_mut(key) else { return };
        track.waiters = waiters;
        let Some(count) = waiters.filter(|count| *count > 0) else { return };
        match track.queues.back_mut().filter(|queue| now_ms <= queue.to_ms + GAP_MS) {
            Some(queue) => {
                queue.to_ms = now_ms;
                queue.most = queue.most.max(count);
            }
            None => track.queues.push_back(Queue { from_ms: now_ms, to_ms: now_ms, most: count }),
        }
    }

    /// Returns how many processes wait for the lock of a key, if that is known.
    pub(super) fn waiters(&self, key: &str) -> Option<u32> {
        self.tracks.get(key)?.waiters
    }

    /// Returns how many processes wait for any lock that is listened to.
    pub(super) fn all_waiters(&self) -> u32 {
        self.tracks.values().filter_map(|track| track.waiters).sum()
    }

    /// Notes that a lock was broken, or is about to be. Its end may have been seen as a release.
    pub(super) fn broken(&mut self, key: &str, lock_id_hash: String) {
        let Some(track) = self.tracks.get_mut(key) else { return };
        let ended = track.holds.iter_mut().rev().filter(|hold| hold.to_ms.is_some());
        match { ended }.find(|hold| hold.lock_id_hash == lock_id_hash) {
            Some(hold) => hold.end = Some(End::Broken),
            None => track.broken = Some(lock_id_hash),
        }
    }

    /// The keys that are worth listening to: those whose locks are held, latest first.
    pub(super) fn held_keys(&self) -> Vec<&str> {
        let held = self.tracks.iter().filter_map(|(key, track)| {
            let hold = track.holds.back().filter(|hold| hold.to_ms.is_none())?;
            Some((Reverse(hold.from_ms), key.as_str()))
        });
        let mut held: Vec<_> = held.collect();
        held.sort_unstable();
        held.into_iter().map(|(_from_ms, key)| key).collect()
    }

    /// The rows that changed last.
    pub(super) fn rows(&self, most: usize) -> Vec<Row<'_>> {
        let mut tracks: Vec<&Track> =
            self.tracks.values().filter(|track| !track.holds.is_empty()).collect();
        tracks.sort_by_key(|track| Reverse(track.changed_at_ms()));
        tracks.truncate(most);
        tracks.sort_by(|one, two| one.shown.cmp(&two.shown));
        tracks.into_iter().map(Track::row).collect()
    }

    pub(super) fn hand_overs(&self) -> Option<Percentiles> {
        self.hand_overs.percentiles()
    }

    pub(super) fn waits(&self) -> Option<Percentiles> {
        self.waits.percentiles()
    }

    pub(super) fn holds(&self) -> Option<Percentiles> {
        self.holds.percentiles()
    }

    fn begin(&mut self, lock: &Lock) {
        let track = self.tracks.entry(lock.key.clone()).or_default();
        if let Some(last) = track.holds.back_mut()
            && last.lock_id_hash == lock.id_hash
        {
            // A notification does not prove a release: it may follow a lost connection.
            (last.to_ms, last.end) = (None, None);
            return;
        }
        track.shown.clone_from(&lock.shown);
        if let Some(released_at) = track.released_at_ms.take() {
            self.hand_overs.add(lock.acquired_at_ms.saturating_sub(released_at));
        }
        track.holds.push_back(Hold {
            waited_ms: None,
            from_ms: lock.acquired_at_ms,
            to_ms: None,
            fence: lock.fence.clone(),
            holder: lock.holder.clone(),
            end: None,
            lock_id_hash: lock.id_hash.clone(),
            expires_at_ms: lock.expires_at_ms,
        });
        if track.holds.len() > MOST_HOLDS {
            track.holds.pop_front();
        }
    }

    /// Drops what is older than the window, and the keys that changed least recently.
    fn forget(&mut self, now_ms: u64) {
        let oldest = now_ms.saturating_sub(WINDOW_MS);
        self.tracks.retain(|_, track| {
            track.holds.retain(|hold| hold.to_ms.is_none_or(|to| to >= oldest));
            track.queues.retain(|queue| queue.to_ms >= oldest);
            !track.holds.is_empty()
        });
        if self.tracks.len() > MOST_KEYS {
            let mut changes: Vec<u64> = self.tracks.values().map(Track::changed_at_ms).collect();
            changes.sort_unstable();
            let oldest = changes[changes.len() - MOST_KEYS];
            self.tracks.retain(|_, track| track.changed_at_ms() >= oldest);
        }
    }
}

impl Track {
    fn row(&self) -> Row<'_> {
        Row { shown: &self.shown, holds: &self.holds, queues: &self.queues }
    }

    fn changed_at_ms(&self) -> u64 {
        self.holds.back().map_or(0, |hold| hold.to_ms.unwrap_or(hold.from_ms))
    }
}

impl Hold {
    /// Ends the hold, and returns how long it lasted.
    fn close(&mut self, at_ms: u64, is_broken: bool) -> u64 {
        let at_ms = at_ms.max(self.from_ms);
        self.to_ms = Some(at_ms);
        self.end = Some(if is_broken {
            End::Broken
        } else if at_ms >= self.expires_at_ms {
            End::Expired
        } else {
            End::Released
        });
        at_ms - self.from_ms
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lock(key: &str, id: &str, acquired_at_ms: u64, expires_at_ms: u64) -> Lock {
        let (key, id_hash) = (key.to_owned(), id.to_owned());
        Lock {
            id: LockId::parse("0000000000000000000000").expect("valid"),
            shown: key.clone(),
            key,
            id_hash,
            fence: None,
            acquired_at_ms,
            expires_at_ms,
            holder: None,
            waiters: None,
        }
    }

    fn ends(history: &History, key: &str) -> Vec<(u64, Option<u64>, Option<End>)> {
        let holds = &history.tracks[key].holds;
        holds.iter().map(|hold| (hold.from_ms, hold.to_ms, hold.end)).collect()
    }

    #[test]
    fn the_keys_that_are_listened_to_are_held_and_the_latest_come_first() {
        let mut history = History::default();
        let held = [lock("b", "2", 800, 9000), lock("c", "3", 950, 9000)];
        history.observe(1000, &[&held[..], &[lock("a", "1", 900, 5000)]].concat(), true);
        history.observe(2000, &held, true);
        assert_eq!(history.held_keys(), ["c", "b"]);
    }

    #[test]
    fn a_lock_that_vanishes_was_released_or_expired() {
        let mut history = History::default();
        history.observe(1000, &[lock("a", "1", 900, 5000), lock("b", "2", 900, 1500)], true);
        history.observe(2000, &[], true);
        assert_eq!(ends(&history, "a"), [(900, Some(2000), Some(End::Released))]);
        assert_eq!(ends(&history, "b"), [(900, Some(2000), Some(End::Expired))]);
    }

    #[test]
    fn a_renewed_lock_is_one_hold() {
        let mut history = History::default();
        history.observe(1000, &[lock("a", "1", 900, 1500)], true);
        history.observe(2000, &[lock("a", "1", 900, 2500)], true);
        history.observe(2200, &[], true);
        assert_eq!(ends(&history, "a"), [(900, Some(2200), Some(End::Released))]);
    }

    #[test]
    fn an_incomplete_list_ends_nothing() {
        let mut history = History::default();
        history.observe(1000, &[lock("a", "1", 900, 5000)], true);
        history.observe(2000, &[], false);
        assert_eq!(ends(&history, "a"), [(900, None, None)]);
    }

    #[test]
    fn a_release_shows_waiting_and_hand_over() {
        let mut history = History::default();
        history.observe(1000, &[lock("a", "1", 900, 5000)], true);
        history.released("a", 1300, Some(600));
        history.observe(1310, &[lock("a", "2", 1304, 6000)], true);
        assert_eq!(
            ends(&history, "a"),
            [(900, Some(1300), Some(End::Released)), (1304, None, None)]
        );
        assert_eq!(history.tracks["a"].holds[0].waited_ms, Some(200));
        assert_eq!(history.waits().map(|waits| waits.p50), Some(200));
        assert_eq!(history.hand_overs().map(|times| times.p99), Some(4));
        assert_eq!(history.holds().map(|times| times.p50), Some(400));
    }

    #[test]
    fn a_queue_lasts_while_it_is_seen() {
        let mut history = History::default();
        history.observe(1000, &[lock("a", "1", 900, 90_000)], true);
        for (now_ms, count) in [(1000, 1), (2000, 3), (3000, 0), (9000, 2)] {
            history.waiting("a", now_ms, Some(count));
        }
        let queues: Vec<_> = history.tracks["a"]
            .queues
            .iter()
            .map(|queue| (queue.from_ms, queue.to_ms, queue.most))
            .collect();
        assert_eq!(queues, [(1000, 2000, 3), (9000, 9000, 2)]);
        assert_eq!((history.waiters("a"), history.all_waiters()), (Some(2), 2));
    }

    #[test]
    fn a_notification_without_a_release_ends_nothing() {
        let mut history = History::default();
        history.observe(1000, &[lock("a", "1", 900, 5000)], true);
        history.released("a", 1300, None);
        history.observe(1310, &[lock("a", "1", 900, 5000)], true);
        assert_eq!(ends(&history, "a"), [(900, None, None)]);
    }

    #[test]
    fn a_break_is_marked_before_and_after_its_end_is_seen() {
        let mut history = History::default();
        history.observe(1000, &[lock("a", "1", 900, 5000)], true);
        history.broken("a", "1".to_owned());
        history.observe(1100, &[lock("a", "2", 1050, 5000)], true);
        history.released("a", 1200, None);
        history.broken("a", "2".to_owned());
        assert_eq!(
            ends(&history, "a"),
            [(900, Some(1050), Some(End::Broken)), (1050, Some(1200), Some(End::Broken))]
        );
    }

    #[test]
    fn what_is_kept_is_bounded() {
        let mut history = History::default();
        for number in 0..3000_u64 {
            let key = format!("key {number}");
            history.observe(number, &[lock(&key, "1", number, number + 10)], true);
        }
        assert_eq!(history.tracks.len(), MOST_KEYS);
        for number in 3000..4000_u64 {
            history.observe(number, &[lock("hot", &number.to_string(), number, 9999)], true);
        }
        assert_eq!(history.tracks["hot"].holds.len(), MOST_HOLDS);
        history.observe(4000 + 2 * WINDOW_MS, &[], true);
        history.observe(4001 + 4 * WINDOW_MS, &[], true);
        assert!(history.tracks.is_empty());
        assert_eq!(history.holds().map(|holds| holds.count), Some(SAMPLES));
    }
}
