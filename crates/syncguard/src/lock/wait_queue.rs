//! The waiters of this process, in one queue per key. Only the first of a queue asks the store.

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, Weak};
use std::time::Duration;

use tokio::sync::Notify;

use super::clock::LocalInstant;
use super::trust::Trust;
use crate::common::fence::Fence;
use crate::common::join::first_of;
use crate::common::key::Key;
use crate::common::sharded::Sharded;
use crate::common::sync::{Mutex, MutexGuard};
use crate::contract::notifier::Subscription;

/// All queues of a locker. A queue exists while a task waits in it or a guard holds its lock.
pub(super) struct WaitQueues {
    by_key: Sharded<Key, Entry>,
    /// The last keys whose queue ended while notifications were not reliable.
    doubted: Mutex<VecDeque<Key>>,
    /// How many there are, so that most queues begin without the mutex.
    doubts: AtomicUsize,
}

struct Entry {
    queue: Arc<WaitQueue>,
    tickets: usize,
}

/// The waiters for one key.
#[derive(Default)]
pub(super) struct WaitQueue {
    /// The waiter that holds this mutex is the first. The mutex is fair, so it is the queue.
    pub(super) head: tokio::sync::Mutex<QueueHead>,
    /// Notifies the first waiter that this process has released the lock.
    pub(super) released: Notify,
    /// The lock, if this process holds it.
    local: Mutex<Option<LocalHold>>,
    /// Whether notifications are not reliable.
    is_doubted: AtomicBool,
}

/// A lock that this process holds itself.
struct LocalHold {
    /// About when the lock expires. `None` once that is over: it may have been extended since.
    until: Option<LocalInstant>,
    holder: Weak<dyn LocalHolder>,
}

/// A holder of a lock in this process.
pub(super) trait LocalHolder: Send + Sync {
    /// Releases the lock in the background although its guard still exists.
    fn release_now(self: Arc<Self>);
}

impl WaitQueue {
    /// Returns until when this process is known to hold the lock.
    pub(super) fn held_until(&self) -> Option<LocalInstant> {
        self.local().as_ref().and_then(|hold| hold.until)
    }

    /// Records that the time of the lock is over, as far as it is known here.
    pub(super) fn set_overdue(&self) {
        if let Some(hold) = &mut *self.local() {
            hold.until = None;
        }
    }

    /// Forgets a holder, unless another one has followed it.
    fn forget(&self, holder: &dyn LocalHolder) {
        let is_it = |hold: &mut LocalHold| std::ptr::addr_eq(hold.holder.as_ptr(), holder);
        self.local().take_if(is_it);
    }

    /// Records whether the head relies on notifications.
    pub(super) fn note_trust(&self, trust: &Trust) {
        self.is_doubted.store(!trust.is_reliable(), Ordering::Relaxed);
    }

    /// Creates a queue for a key whose last one did not rely on notifications.
    fn doubted() -> Self {
        let head = QueueHead { trust: Trust::doubtful(), ..QueueHead::default() };
        let head = tokio::sync::Mutex::new(head);
        Self { head, is_doubted: AtomicBool::new(true), ..Self::default() }
    }

    fn set_held(&self, until: LocalInstant, holder: Weak<dyn LocalHolder>) {
        *self.local() = Some(LocalHold { until: Some(until), holder });
    }

    fn local(&self) -> MutexGuard<'_, Option<LocalHold>> {
        self.local.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// State that the first waiter passes on to the next.
#[derive(Debug, Default)]
pub(super) struct QueueHead {
    /// The subscriptions, kept from waiter to waiter: one for each key that is waited for.
    pub(super) subscriptions: Vec<Subscription>,
    /// Without a subscription: when to try to subscribe again.
    pub(super) subscribe_after: Option<LocalInstant>,
    pub(super) fairness: Fairness,
    pub(super) trust: Trust,
}

impl QueueHead {
    /// Returns how many notifications of releases have come.
    pub(super) fn notifications(&self) -> u64 {
        self.subscriptions.iter().map(Subscription::count).sum()
    }

    /// Returns whether notifications arrive at the moment.
    pub(super) fn is_notified(&self) -> bool {
        !self.subscriptions.is_empty() && self.subscriptions.iter().all(Subscription::is_working)
    }

    /// Returns whether certainly no other waiter is notified, in any process.
    pub(super) fn is_alone(&self) -> bool {
        !self.subscriptions.is_empty() && self.subscriptions.iter().all(Subscription::is_alone)
    }

    pub(super) fn mark_seen(&mut self) {
        self.subscriptions.iter_mut().for_each(Subscription::mark_seen);
    }

    /// Waits for a notification. Without a subscription it never completes.
    pub(super) async fn notified(&mut self) -> Option<Duration> {
        match &mut *self.subscriptions {
            [only] => only.notified().await,
            several => first_of(several.iter_mut().map(Subscription::notified)).await,
        }
    }
}

/// Decides when this process lets other processes go first.
///
/// After [`Self::LEAST`] hand-overs in a row within this process, it sits out one round of
/// notifications. The allowance doubles, up to [`Self::MOST`], while no other process takes the
/// lock. As soon as one does, it starts from [`Self::LEAST`] again.
#[derive(Debug)]
pub(super) struct Fairness {
    in_a_row: u32,
    allowed: u32,
    /// The fence of the last grant to this process.
    last: Option<Fence>,
}

impl Fairness {
    const LEAST: u32 = 4;
    const MOST: u32 = 64;

    /// Counts a hand-over within this process. Returns whether to let others go first this time.
    pub(super) fn count_handoff(&mut self) -> bool {
        self.in_a_row += 1;
        if self.in_a_row <= self.allowed {
            return false;
        }
        self.in_a_row = 0;
        self.allowed = (self.allowed * 2).min(Self::MOST);
        true
    }

    /// Records a grant to this process. A gap in fences that count grants means that another holder
    /// had the lock in between. Those from the clock always have gaps, so one may have.
    pub(super) fn granted(&mut self, fence: Option<Fence>, fences_count_grants: bool) {
        let next = self.last.map(|last| last.get() + 1);
        if next.is_some() && next != fence.map(Fence::get) {
            if fences_count_grants {
                self.met_others();
            } else {
                self.allowed = Self::LEAST;
            }
        }
        self.last = fence;
    }

    /// Records that another process has, or had, the lock.
    pub(super) fn met_others(&mut self) {
        *self = Self::default();
    }
}

impl Default for Fairness {
    fn default() -> Self {
        Self { in_a_row: 0, allowed: Self::LEAST, last: None }
    }
}

/// Returns whether waiters of different processes are served in order, given how long ago the
/// holder began to wait. For a lock that changes hands quickly, order costs more than it gains.
pub(super) fn is_worth_order(holder_age: Duration) -> bool {
    holder_age >= Duration::from_millis(200)
}

/// Returns how long a notified waiter pauses before it asks, so that waiters of different processes
/// get the lock in about the order in which they came.
///
/// `waited` is the waiter's age, `holder_age` that of the holder that has just released the lock.
/// The pause depends on how much later than that holder the waiter came, on a logarithmic scale: a
/// waiter that came twice as late pauses one step longer, however long both have waited. Waiters
/// that came at about the same time are distinguished when they are next. A waiter that came before
/// the holder was overtaken, and goes before all others.
pub(super) fn pause_in_order(waited: Duration, holder_age: Duration) -> Duration {
    /// The difference between one waiter and another that came twice as late.
    const STEP: Duration = Duration::from_micros(1600);
    /// The steps of the waiter that came last.
    const STEPS: f64 = 10.0;
    /// The most steps of a waiter that was overtaken.
    const OVERTAKEN: f64 = 2.0;
    if !is_worth_order(holder_age) {
        return Duration::ZERO;
    }
    let behind = holder_age.saturating_sub(waited);
    let steps = if behind.is_zero() {
        // The longer it has waited, the shorter the pause.
        OVERTAKEN * holder_age.as_secs_f64() / waited.as_secs_f64()
    } else {
        let halvings = (holder_age.as_secs_f64() / behind.as_secs_f64()).log2();
        (STEPS - halvings).clamp(OVERTAKEN, STEPS)
    };
    // Only a small part of the time that the lock was waited for and held, however short that was.
    STEP.min(holder_age / 640).mul_f64(steps)
}

impl WaitQueues {
    pub(super) fn new() -> Self {
        Self {
            by_key: Sharded::new(),
            doubted: Mutex::new(VecDeque::new()),
            doubts: AtomicUsize::new(0),
        }
    }

    /// Enters the queue of a key. Dropping the ticket leaves it.
    pub(super) fn enter<'a>(&'a self, key: &'a Key) -> Ticket<'a> {
        let (queue, ahead) = self.add_ticket(key, |_queue| {});
        let ahead = u32::try_from(ahead).unwrap_or(u32::MAX);
        Ticket { wait_queues: self, key, queue, ahead, has_become_a_hold: AtomicBool::new(false) }
    }

    /// Records that this process holds the lock of a key, until [`Self::note_released`].
    pub(super) fn hold(&self, key: &Key, until: LocalInstant, holder: Weak<dyn LocalHolder>) {
        self.add_ticket(key, |queue| queue.set_held(until, holder));
    }

    /// Returns everything that holds a lock in this process now.
    pub(super) fn holders(&self) -> Vec<Arc<dyn LocalHolder>> {
        let holder = |entry: &Entry| entry.queue.local().as_ref()?.holder.upgrade();
        self.by_key
            .shards()
            .flat_map(|shard| shard.values().filter_map(holder).collect::<Vec<_>>())
            .collect()
    }

    /// Records that a holder in this process no longer holds the lock, and notifies the first
    /// waiter.
    pub(super) fn note_released(&self, key: &Key, holder: &dyn LocalHolder) {
        self.remove_ticket(key, |queue| {
            queue.forget(holder);
            queue.released.notify_one();
        });
    }

    /// Notifies the first waiter, if there is one, that the lock may be free.
    pub(super) fn wake_head(&self, key: &Key) {
        if let Some(entry) = self.by_key.shard_of(key).get(key) {
            entry.queue.released.notify_one();
        }
    }

    /// Returns whether a task of this process waits for the lock of a key or holds it.
    pub(super) fn is_wanted(&self, key: &Key) -> bool {
        self.by_key.shard_of(key).contains_key(key)
    }

    /// Returns whether a guard of this process holds the lock of a key, as far as it knows.
    pub(super) fn has_holder(&self, key: &Key) -> bool {
        self.by_key.shard_of(key).get(key).is_some_and(|entry| entry.queue.local().is_some())
    }

    /// Returns whether this process is known to hold the lock of a key.
    pub(super) fn is_held(&self, key: &Key) -> bool {
        self.by_key.shard_of(key).get(key).is_some_and(|entry| entry.queue.held_until().is_some())
    }

    /// Returns the queue, and how many tickets it had before.
    fn add_ticket(&self, key: &Key, note: impl FnOnce(&WaitQueue)) -> (Arc<WaitQueue>, usize) {
        let mut shard = self.by_key.shard_of(key);
        if let Some(entry) = shard.get_mut(key) {
            entry.tickets += 1;
            note(&entry.queue);
            return (Arc::clone(&entry.queue), entry.tickets - 1);
        }
        let is_doubted = self.doubts.load(Ordering::Relaxed) > 0 && self.forget_doubt(key);
        let queue = if is_doubted { WaitQueue::doubted() } else { WaitQueue::default() };
        let queue = Arc::new(queue);
        note(&queue);
        shard.insert(key.clone(), Entry { queue: Arc::clone(&queue), tickets: 1 });
        (queue, 0)
    }

    fn remove_ticket(&self, key: &Key, note: impl FnOnce(&WaitQueue)) {
        let mut shard = self.by_key.shard_of(key);
        if let Some(entry) = shard.get_mut(key) {
            note(&entry.queue);
            entry.tickets -= 1;
            if entry.tickets == 0 {
                if entry.queue.is_doubted.load(Ordering::Relaxed) {
                    self.remember_doubt(key);
                }
                shard.remove(key);
            }
        }
    }

    fn remember_doubt(&self, key: &Key) {
        /// A key that is forgotten has to lose its trust again.
        const MOST: usize = 64;
        let mut doubted = self.doubted.lock().unwrap_or_else(PoisonError::into_inner);
        if doubted.len() == MOST {
            doubted.pop_front();
        }
        doubted.push_back(key.clone());
        self.doubts.store(doubted.len(), Ordering::Relaxed);
    }

    /// Returns whether the last queue of a key did not rely on notifications.
    fn forget_doubt(&self, key: &Key) -> bool {
        let mut doubted = self.doubted.lock().unwrap_or_else(PoisonError::into_inner);
        let place = doubted.iter().position(|one| one == key);
        let was_doubted = place.and_then(|place| doubted.remove(place)).is_some();
        self.doubts.store(doubted.len(), Ordering::Relaxed);
        was_doubted
    }

    /// Returns how many keys are waited for or held.
    pub(super) fn len(&self) -> usize {
        self.by_key.len()
    }
}

impl fmt::Debug for WaitQueues {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WaitQueues").field("keys", &self.len()).finish()
    }
}

/// A place in a queue.
pub(super) struct Ticket<'a> {
    wait_queues: &'a WaitQueues,
    key: &'a Key,
    pub(super) queue: Arc<WaitQueue>,
    /// How many tasks of this process held or waited for the lock before.
    pub(super) ahead: u32,
    has_become_a_hold: AtomicBool,
}

impl Ticket<'_> {
    /// Records that its owner has acquired the lock, until [`WaitQueues::note_released`].
    pub(super) fn hold(&self, until: LocalInstant, holder: Weak<dyn LocalHolder>) {
        self.queue.set_held(until, holder);
        self.has_become_a_hold.store(true, Ordering::Relaxed);
    }
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        if !*self.has_become_a_hold.get_mut() {
            self.wait_queues.remove_ticket(self.key, |_queue| {});
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contract::detach::poll_once;
    use crate::contract::notifier::Notifier;
    use crate::lock::clock::{LocalClock, Ticker};

    struct NoHolder;

    impl LocalHolder for NoHolder {
        fn release_now(self: Arc<Self>) {}
    }

    #[test]
    fn a_queue_is_removed_with_its_last_ticket() {
        let wait_queues = WaitQueues::new();
        let key = Key::new("k").expect("valid");
        let (first, second) = (wait_queues.enter(&key), wait_queues.enter(&key));
        assert_eq!(wait_queues.len(), 1);
        drop(first);
        assert_eq!(wait_queues.len(), 1);
        drop(second);
        assert_eq!(wait_queues.len(), 0);
    }

    #[tokio::test]
    async fn a_key_keeps_its_doubt_from_queue_to_queue() {
        let wait_queues = WaitQueues::new();
        let keys: Vec<Key> =
            (0..100).map(|number| Key::new(format!("k{number}")).expect("valid")).collect();
        let is_doubted = |key| {
            let ticket = wait_queues.enter(key);
            let head = ticket.queue.head.try_lock().expect("free");
            !head.trust.is_reliable()
        };
        for key in &keys {
            assert!(!is_doubted(key));
            wait_queues.enter(key).queue.note_trust(&Trust::doubtful());
        }
        assert!(is_doubted(&keys[99]) && is_doubted(&keys[99]));
        let remembered = keys.iter().filter(|key| is_doubted(key)).count();
        assert_eq!(remembered, 64, "only the last keys are remembered");
    }

    #[tokio::test]
    async fn a_queue_exists_while_its_lock_is_held_here() {
        let wait_queues = WaitQueues::new();
        let key = Key::new("k").expect("valid");
        let until = Ticker::new(LocalClock::Tokio, tokio::runtime::Handle::current()).now();
        let [first, second]: [Arc<dyn LocalHolder>; 2] = [Arc::new(NoHolder), Arc::new(NoHolder)];
        wait_queues.hold(&key, until, Arc::downgrade(&first));
        assert_eq!(wait_queues.enter(&key).queue.held_until(), Some(until));
        wait_queues.hold(&key, until, Arc::downgrade(&second));
        wait_queues.note_released(&key, &*first);
        assert!(wait_queues.is_held(&key), "by the second");
        wait_queues.note_released(&key, &*second);
        assert_eq!(wait_queues.len(), 0);
        wait_queues.note_released(&key, &*second);
        wait_queues.wake_head(&key);
    }

    #[tokio::test]
    async fn a_queue_knows_its_holder_and_whether_the_lock_may_have_expired() {
        let wait_queues = WaitQueues::new();
        let key = Key::new("k").expect("valid");
        let until = Ticker::new(LocalClock::Tokio, tokio::runtime::Handle::current()).now();
        assert!(!wait_queues.is_wanted(&key) && !wait_queues.has_holder(&key));
        let waiter = wait_queues.enter(&key);
        assert!(wait_queues.is_wanted(&key));
        assert!(!wait_queues.has_holder(&key) && !wait_queues.is_held(&key));
        let holder: Arc<dyn LocalHolder> = Arc::new(NoHolder);
        let owner = wait_queues.enter(&key);
        owner.hold(until, Arc::downgrade(&holder));
        drop(owner);
        assert_eq!((waiter.ahead, wait_queues.enter(&key).ahead), (0, 2));
        assert!(wait_queues.has_holder(&key) && wait_queues.is_held(&key));
        assert_eq!(wait_queues.holders().len(), 1);
        waiter.queue.set_overdue();
        assert!(wait_queues.has_holder(&key) && !wait_queues.is_held(&key));
        wait_queues.note_released(&key, &*holder);
        assert!(!wait_queues.has_holder(&key) && wait_queues.holders().is_empty());
        waiter.queue.released.notified().await;
        wait_queues.wake_head(&key);
        waiter.queue.released.notified().await;
    }

    #[tokio::test]
    async fn a_head_hears_all_its_keys_and_works_only_with_all_of_them() {
        let notifiers = [Notifier::new(), Notifier::in_process()];
        let keys = ["a", "b"].map(|key| Key::new(key).expect("valid"));
        let mut head = QueueHead::default();
        assert!(!head.is_notified() && !head.is_alone());
        head.subscriptions = vec![notifiers[1].subscribe(&keys[1])];
        assert!(head.is_notified() && head.is_alone());
        head.subscriptions.push(notifiers[0].subscribe(&keys[0]));
        assert!(head.is_notified() && !head.is_alone());
        notifiers[0].set_working(false);
        assert!(!head.is_notified());
        notifiers[0].set_working(true);
        assert!(head.is_notified());
        head.mark_seen();
        let age = Duration::from_secs(3);
        for (notifier, key) in notifiers.iter().zip(&keys) {
            let before = head.notifications();
            notifier.notify(key, Some(age));
            assert_eq!(head.notifications(), before + 1);
            assert_eq!(head.notified().await, Some(age));
        }
        notifiers[0].notify(&keys[0], Some(age));
        head.mark_seen();
        let next = std::pin::pin!(head.notified());
        assert!(poll_once(next).await.is_pending());
    }

    #[test]
    fn a_waiter_pauses_for_longer_the_later_it_came() {
        let ms = Duration::from_millis;
        let pause = |waited, holder_age| pause_in_order(ms(waited), ms(holder_age)).as_micros();
        // A step is 1.6 ms if the holder has waited for at least 1,024 ms.
        for (waited, pause_us) in [
            (0, 16_000),
            (512, 14_400),
            (768, 12_800),
            (1_023, 3_200),
            (1_024, 3_200),
            (2_048, 1_600),
        ] {
            assert_eq!(pause(waited, 1_024), pause_us, "{waited}");
        }
        // A shorter wait means shorter steps, and no order below 200 ms.
        assert_eq!(pause(0, 640), 10_000);
        assert_eq!(pause(100, 200), 2_812);
        assert_eq!(pause(0, 199), 0);
        assert!(is_worth_order(ms(200)) && !is_worth_order(ms(199)));
    }

    #[test]
    fn a_gap_in_the_fences_reveals_another_process() {
        let fence = |number| Fence::new(number).ok();
        let mut fairness = Fairness { allowed: 64, ..Fairness::default() };
        fairness.granted(fence(7), true);
        fairness.granted(fence(8), true);
        assert_eq!(fairness.allowed, 64);
        fairness.in_a_row = 3;
        fairness.granted(fence(10), true);
        assert_eq!((fairness.allowed, fairness.in_a_row), (Fairness::LEAST, 0));
        // From the clock, there may have been none.
        let mut fairness = Fairness { allowed: 64, in_a_row: 3, last: fence(10) };
        fairness.granted(fence(20), false);
        assert_eq!((fairness.allowed, fairness.in_a_row), (Fairness::LEAST, 3));
    }

    #[test]
    fn others_go_first_after_four_hand_overs_and_less_often_while_none_takes_the_lock() {
        let mut fairness = Fairness::default();
        let gap = |fairness: &mut Fairness| {
            let mut hand_overs = 0;
            while !fairness.count_handoff() {
                hand_overs += 1;
            }
            hand_overs
        };
        assert_eq!([4, 8, 16, 32, 64, 64], [(); 6].map(|()| gap(&mut fairness)));
        fairness.met_others();
        assert_eq!(gap(&mut fairness), 4);
    }
}
