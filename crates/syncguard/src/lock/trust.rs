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
///   the fence, and a second, different one is a silent change of hands.
/// * A notification while the holder stays the same counts as nothing.
#[derive(Debug, Default)]
pub(super) struct Trust {
    /// Grows with every change of hands in silence, and shrinks with every one that was notified.
    misses: u8,
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
        Self { misses: Self::ENOUGH, holder: None }
    }

    /// Returns whether a waiter can wait for a notification.
    pub(super) fn is_reliable(&self) -> bool {
        self.misses < Self::ENOUGH
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
        let expires_at = now + expires_in;
        let new = OtherHolder { notifications, expires_at, since: now, fence: None };
        let Some(holder) = &mut self.holder else {
            self.holder = Some(new);
            return Sighting::Known;
        };
        if expires_at <= holder.expires_at + SLACK {
            // The same holder. A notification that came was that of an earlier release.
            holder.notifications = notifications;
            return Sighting::Known;
        }
        if holder.notifications != notifications {
            self.holder = Some(new);
            self.hit();
            return Sighting::Known;
        }
        holder.expires_at = expires_at;
        Sighting::Unclear
    }

    /// Records the fence of an [unclear](Sighting::Unclear) holder.
    pub(super) fn saw(&mut self, now: LocalInstant, fence: Fence) {
        let Some(holder) = &mut self.holder else { return };
        let before = holder.fence.replace(fence);
        if before.is_some_and(|before| before != fence) {
            holder.since = now;
            self.miss();
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
        const LEAST: Duration = Duration::from_millis(2);
        let since = self.holder.as_ref().map_or(waiting_since, |holder| holder.since);
        (now.since(since) / 8).max(LEAST).mul_f64(0.5 + random / 2.0)
    }

    fn hit(&mut self) {
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
            trust.acquired(start + MS(51), 7);
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
            trust.saw(now, fence(number));
        }
        assert!(trust.is_reliable(), "its holder extends it");
        for (step, number) in [(5, 8), (6, 9)] {
            let now = start + MS(step * 1000);
            assert_eq!(trust.contended(now, TTL, 7), Sighting::Unclear);
            trust.saw(now, fence(number));
        }
        assert!(!trust.is_reliable(), "others pass it on");
    }

    #[tokio::test(start_paused = true)]
    async fn the_longer_a_holder_is_seen_the_less_often_is_asked() {
        let (start, mut trust) = (start(), Trust::default());
        assert_eq!(trust.interval(start, start, 1.0), MS(2));
        assert_eq!(trust.interval(start + MS(8000), start, 1.0), MS(1000), "as for a known holder");
        assert_eq!(trust.contended(start, TTL, 7), Sighting::Known);
        assert_eq!(trust.interval(start + MS(8000), start, 1.0), MS(1000));
        assert_eq!(trust.interval(start + MS(8000), start, 0.0), MS(500));
    }
}
