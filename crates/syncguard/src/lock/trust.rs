//! Whether the notifications of a key's releases can be relied on
//! ([ADR 058](../../../../docs/adr/058-falling-back-from-notifications.md)).

use std::time::Duration;

use super::clock::LocalInstant;
use crate::common::fence::Fence;

/// Compares how a lock changes hands with the notifications that come.
///
/// Clients of other implementations send none, and a connection that is closed again and again
/// loses them. After two changes of hands in silence, a waiter asks often, until notifications come
/// again.
///
/// * A grant after contention with another process was notified, or was silent unless the holder's
///   lock had expired.
/// * Without a grant, the expiry shows it: if it moves without a notification, the waiter looks up
///   the fence, and a second, different one is a silent change of hands. Until it knows, it asks as
///   often as if there were no notifications.
/// * A notification while the holder stays the same counts as nothing.
#[derive(Debug, Default)]
pub(super) struct Trust {
    /// Grows with every change of hands in silence, and shrinks with every one that was notified.
    misses: u8,
    /// When the lock was last extended, or changed hands, without a notification.
    suspected_at: Option<LocalInstant>,
    /// The holder in another process, while one is known.
    holder: Option<OtherHolder>,
}

#[derive(Debug)]
struct OtherHolder {
    /// How many notifications had come when it was last seen.
    notifications: u64,
    /// When its lock expires, as far as is known.
    expires_at: LocalInstant,
    /// When it was first seen.
    since: LocalInstant,
    fence: Option<Fence>,
}

/// What an attempt that found the lock held reveals about its holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sighting {
    /// Nothing new.
    Known,
    /// It was extended, or another one has taken over in silence. Its fence would tell.
    Unclear,
}

impl Trust {
    /// How many changes of hands in silence end the reliance on notifications.
    const ENOUGH: u8 = 2;
    const MOST: u8 = 4;

    /// Creates one that does not rely on notifications.
    pub(super) fn doubtful() -> Self {
        Self { misses: Self::ENOUGH, ..Self::default() }
    }

    /// Returns whether a waiter can wait for a notification.
    pub(super) fn is_reliable(&self) -> bool {
        self.misses < Self::ENOUGH && self.suspected_at.is_none()
    }

    /// Records that a process other than this one holds the lock.
    pub(super) fn contended(
        &mut self,
        now: LocalInstant,
        expires_in: Duration,
        notifications: u64,
    ) -> Sighting {
        /// By how much the time until the expiry may be off.
        const SLACK: Duration = Duration::from_millis(10);
        /// A holder that stays for so long after its expiry has moved has extended its lock.
        const STAY: Duration = Duration::from_millis(50);
        let expires_at = now + expires_in;
        let new = OtherHolder { notifications, expires_at, since: now, fence: None };
        let Some(holder) = &mut self.holder else {
            self.holder = Some(new);
            return Sighting::Known;
        };
        if expires_at <= holder.expires_at + SLACK {
            // The same holder. A notification that came was that of an earlier release.
            holder.notifications = notifications;
            self.suspected_at.take_if(|suspected_at| now.since(*suspected_at) >= STAY);
            return Sighting::Known;
        }
        if holder.notifications != notifications {
            self.holder = Some(new);
            self.hit();
            return Sighting::Known;
        }
        holder.expires_at = expires_at;
        self.suspected_at = Some(now);
        Sighting::Unclear
    }

    /// Records the fence of an [unclear](Sighting::Unclear) holder, or that it was gone by then.
    pub(super) fn saw(&mut self, now: LocalInstant, fence: Option<Fence>) {
        let Some(holder) = &mut self.holder else { return };
        let Some(fence) = fence else {
            // Its notification may be on its way.
            holder.since = now;
            return;
        };
        match holder.fence.replace(fence) {
            // It was extended.
            Some(before) if before == fence => self.suspected_at = None,
            Some(_) => {
                holder.since = now;
                self.miss();
            }
            None => {}
        }
    }

    /// Records that this process has acquired the lock.
    pub(super) fn acquired(&mut self, now: LocalInstant, notifications: u64) {
        match self.holder.take() {
            Some(holder) if holder.notifications != notifications => self.hit(),
            // An expiry sends no notification.
            Some(holder) if now < holder.expires_at => self.miss(),
            _ => {}
        }
    }

    /// Returns how long to wait before asking without a notification: a small part of the time for
    /// which the holder has been seen, or for which the waiter has waited if no holder is known.
    pub(super) fn interval(
        &self,
        now: LocalInstant,
        waiting_since: LocalInstant,
        random: f64,
    ) -> Duration {
        const LEAST: Duration = Duration::from_millis(1);
        let since = self.holder.as_ref().map_or(waiting_since, |holder| holder.since);
        (now.since(since) / 8).max(LEAST).mul_f64(0.5 + random / 2.0)
    }

    fn hit(&mut self) {
        self.suspected_at = None;
        self.misses = self.misses.saturating_sub(1);
    }

    fn miss(&mut self) {
        self.misses = (self.misses + 1).min(Self::MOST);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lock::clock::{LocalClock, Ticker};

    const TTL: Duration = Duration::from_secs(30);
    const MS: fn(u64) -> Duration = Duration::from_millis;

    fn start() -> LocalInstant {
        Ticker::new(LocalClock::Tokio, tokio::runtime::Handle::current()).now()
    }

    fn fence(number: u64) -> Fence {
        Fence::new(number).expect("valid")
    }

    #[tokio::test(start_paused = true)]
    async fn two_hand_overs_in_silence_end_the_reliance_and_two_that_are_notified_restore_it() {
        let (start, mut trust) = (start(), Trust::default());
        for round in 0..2 {
            assert!(trust.is_reliable(), "after {round} hand-overs in silence");
            assert_eq!(trust.contended(start, TTL, 7), Sighting::Known);
            trust.acquired(start + MS(10), 7);
        }
        assert!(!trust.is_reliable());
        assert_eq!(trust.contended(start, TTL, 7), Sighting::Known);
        trust.acquired(start + MS(10), 8);
        assert!(trust.is_reliable());
    }

    #[tokio::test(start_paused = true)]
    async fn a_late_notification_of_an_earlier_release_proves_nothing() {
        let (start, mut trust) = (start(), Trust::default());
        for round in 0..2 {
            assert_eq!(trust.contended(start, TTL, 2 * round), Sighting::Known);
            assert_eq!(trust.contended(start + MS(5), TTL, 2 * round + 1), Sighting::Known);
            trust.acquired(start + MS(50), 2 * round + 1);
        }
        assert!(!trust.is_reliable());
    }

    #[tokio::test(start_paused = true)]
    async fn an_expiry_proves_nothing() {
        let (start, mut trust) = (start(), Trust::default());
        for _ in 0..9 {
            assert_eq!(trust.contended(start, MS(50), 7), Sighting::Known);
            trust.acquired(start + MS(50), 7);
        }
        assert!(trust.is_reliable());
    }

    #[tokio::test(start_paused = true)]
    async fn an_extended_lock_is_told_from_one_that_changed_hands() {
        let (start, mut trust) = (start(), Trust::default());
        assert_eq!(trust.contended(start, TTL, 7), Sighting::Known);
        for (step, number) in [(1, 5), (2, 5), (3, 5), (4, 5)] {
            let now = start + MS(step * 1000);
            assert_eq!(trust.contended(now, TTL, 7), Sighting::Unclear);
            trust.saw(now, Some(fence(number)));
        }
        assert!(trust.is_reliable(), "its holder extends it");
        for (step, number) in [(5, 8), (6, 9)] {
            let now = start + MS(step * 1000);
            assert_eq!(trust.contended(now, TTL, 7), Sighting::Unclear);
            trust.saw(now, Some(fence(number)));
        }
        assert!(!trust.is_reliable(), "others pass it on");
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_change_is_looked_into_at_once() {
        let (start, mut trust) = (start(), Trust::default());
        assert_eq!(trust.contended(start, TTL, 7), Sighting::Known);
        assert!(trust.is_reliable());
        // The next attempt comes after the first delay of the retry policy.
        let now = start + MS(100);
        assert_eq!(trust.contended(now, TTL, 7), Sighting::Unclear);
        trust.saw(now, Some(fence(5)));
        assert!(!trust.is_reliable(), "extended, or passed on?");
        let now = now + MS(12);
        assert_eq!(trust.contended(now, TTL, 7), Sighting::Unclear);
        trust.saw(now, Some(fence(8)));
        let now = now + MS(2);
        assert_eq!(trust.contended(now, TTL, 7), Sighting::Known, "too soon to tell them apart");
        assert!(!trust.is_reliable());
        let now = now + MS(12);
        assert_eq!(trust.contended(now, TTL, 7), Sighting::Unclear);
        trust.saw(now, Some(fence(11)));
        assert_eq!(trust.contended(now + MS(60), MS(30_000 - 60), 7), Sighting::Known);
        assert!(!trust.is_reliable(), "passed on twice");
    }

    #[tokio::test(start_paused = true)]
    async fn a_suspicion_ends_when_the_holder_stays_or_notifies() {
        let (start, mut trust) = (start(), Trust::default());
        let suspect = |trust: &mut Trust, now: LocalInstant, number: u64| {
            assert_eq!(trust.contended(now, TTL, 7), Sighting::Unclear);
            trust.saw(now, Some(fence(number)));
            assert!(!trust.is_reliable());
        };
        assert_eq!(trust.contended(start, TTL, 7), Sighting::Known);
        suspect(&mut trust, start + MS(100), 5);
        assert_eq!(trust.contended(start + MS(140), MS(30_000 - 40), 7), Sighting::Known);
        assert!(!trust.is_reliable());
        assert_eq!(trust.contended(start + MS(150), MS(30_000 - 50), 7), Sighting::Known);
        assert!(trust.is_reliable(), "it was extended");
        suspect(&mut trust, start + MS(300), 6);
        assert_eq!(trust.contended(start + MS(320), TTL, 8), Sighting::Known);
        assert!(trust.is_reliable(), "notified");
        assert_eq!(trust.contended(start + MS(340), TTL, 8), Sighting::Unclear);
        trust.acquired(start + MS(350), 9);
        assert!(trust.is_reliable(), "notified");
    }

    #[tokio::test(start_paused = true)]
    async fn a_holder_that_is_gone_when_it_is_looked_up_is_not_counted_as_old() {
        let (start, mut trust) = (start(), Trust::default());
        assert_eq!(trust.contended(start, TTL, 7), Sighting::Known);
        let now = start + MS(8000);
        assert_eq!(trust.contended(now, TTL, 7), Sighting::Unclear);
        trust.saw(now, None);
        assert_eq!(trust.interval(now, start, 1.0), MS(1));
        assert_eq!(trust.contended(now + MS(50), MS(30_000 - 50), 7), Sighting::Known);
        assert!(trust.is_reliable(), "its notification may be late");
    }

    #[tokio::test(start_paused = true)]
    async fn the_longer_a_holder_is_seen_the_less_often_is_asked() {
        let (start, mut trust) = (start(), Trust::default());
        assert_eq!(trust.interval(start, start, 1.0), MS(1));
        assert_eq!(trust.interval(start + MS(8000), start, 1.0), MS(1000), "as for a known holder");
        assert_eq!(trust.contended(start, TTL, 7), Sighting::Known);
        assert_eq!(trust.interval(start + MS(8000), start, 1.0), MS(1000));
        assert_eq!(trust.interval(start + MS(8000), start, 0.0), MS(500));
    }
}
