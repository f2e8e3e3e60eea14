//! What the tasks of a client do, drawn from their seed.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use syncguard::backend::{ExtendRequest, Hint, ReleaseRequest};
use syncguard::{
    CancellationToken, Error, ErrorCode, ExtendOutcome, LockBackend, LockGuard, LockId, Locker, Ttl,
};

use crate::client::Orders;
use crate::history::{Event, now};
use crate::journal::{Journal, key_of};
use crate::random::Random;
use crate::recorded::Recorded;
use crate::register::Register;
use crate::resource::Resource;

/// How many keys many tasks want at once.
pub const HOT_KEYS: u32 = 3;
/// The hot key that only lockers use that rely on notifications: no other polls it. They use it
/// when the faults are over, because waiters poll for ten seconds after a subscription that failed.
pub const PATIENT_KEY: u32 = HOT_KEYS - 1;
/// How many other keys there are.
pub const COLD_KEYS: u32 = 260;
/// How many keys are for requests that are dropped: their TTL is long, so that a lock that is left
/// behind is found.
pub const DROP_KEYS: u32 = 12;

/// The key that is passed on once when the faults are over, by lockers that rely on notifications.
pub const BATON_KEY: u32 = HOT_KEYS + COLD_KEYS + DROP_KEYS;

/// The TTL of locks on those keys.
const LONG_TTL: Duration = Duration::from_secs(40);
/// How long a call without a timeout of its own may take: the store's timeouts to connect and to
/// respond, twice, because a broken connection is replaced.
const CALL_LIMIT: Duration = Duration::from_secs(4);

/// A task of a client.
#[derive(Debug)]
pub struct Worker {
    /// Takes locks.
    pub locker: Locker<Recorded>,
    /// Another locker of the same process.
    pub other: Locker<Recorded>,
    /// Where events go.
    pub journal: Arc<Journal>,
    /// The fenced resource.
    pub register: Register,
    /// Another one, in the store itself.
    pub resource: Option<Arc<Resource>>,
    /// What the coordinator wants.
    pub orders: Arc<Orders>,
    /// Whether the locker relies on notifications.
    pub is_patient: bool,
}

type Guard = LockGuard<Recorded>;

impl Worker {
    /// Works until the coordinator wants it to stop.
    pub async fn run(self, mut random: Random) {
        let mut old_ids: Vec<(LockId, u32)> = Vec::new();
        while !self.orders.stop.load(Ordering::Relaxed) {
            let key = self.draw_key(&mut random);
            match random.below(100) {
                0..=49 => self.lock(&mut random, key, &mut old_ids).await,
                50..=64 => self.try_lock(&mut random, key, &mut old_ids).await,
                65..=82 => self.drop_requests(&mut random, key).await,
                83..=86 => self.cancel(&mut random, key).await,
                87..=91 => self.use_an_old_id(&mut random, &old_ids).await,
                92..=94 => self.hand_over(&mut random, key).await,
                95..=96 => self.outlive(&mut random, key).await,
                _ => self.look(key).await,
            }
            let longest = if self.orders.is_quiet.load(Ordering::Relaxed) { 4 } else { 12 };
            tokio::time::sleep(random.millis(0..longest)).await;
        }
    }

    /// When the faults are over and connections are open again, takes a lock that others want at
    /// the same time, keeps it for a while, and passes it on. None of them takes it twice: if they
    /// are not notified, it stays free.
    pub async fn pass_on(self) {
        while !self.orders.is_settled.load(Ordering::Relaxed) {
            tokio::time::sleep(Duration::from_millis(10)).await;
            if self.orders.stop.load(Ordering::Relaxed) {
                return;
            }
        }
        // All processes are here by then.
        tokio::time::sleep(Duration::from_millis(300)).await;
        let timeout = Duration::from_secs(8);
        let call = self.journal.call("lock", BATON_KEY, timeout);
        match self.locker.lock(key_of(BATON_KEY)).ttl(timeout).timeout(timeout).await {
            Ok(guard) => {
                call.returned("granted");
                tokio::time::sleep(Duration::from_millis(400)).await;
                drop(guard.release().await);
            }
            Err(error) => call.returned(error.code().as_str()),
        }
    }

    fn draw_key(&self, random: &mut Random) -> u32 {
        let hot = random.chance(35);
        let draw = random.below(u64::from(if hot { HOT_KEYS } else { COLD_KEYS }));
        let draw = u32::try_from(draw).unwrap_or(0);
        match hot {
            true if self.is_patient && self.orders.is_settled.load(Ordering::Relaxed) => draw,
            true => draw.min(PATIENT_KEY - 1),
            false => HOT_KEYS + draw,
        }
    }

    /// Draws a TTL. When all faults are over, it is long: then only a release frees a lock.
    fn ttl(&self, random: &mut Random) -> Duration {
        if self.orders.is_quiet.load(Ordering::Relaxed) {
            return Duration::from_secs(12);
        }
        random.one_of(&[300, 500, 800, 1_200, 2_500].map(Duration::from_millis))
    }

    /// Handles an error of a call.
    async fn failed(&self, error: &Error, random: &mut Random) {
        self.journal.check(error, None);
        if error.code() != ErrorCode::AcquisitionTimeout {
            tokio::time::sleep(random.millis(10..60)).await;
        }
    }

    async fn lock(&self, random: &mut Random, key: u32, old_ids: &mut Vec<(LockId, u32)>) {
        let is_quiet = self.orders.is_quiet.load(Ordering::Relaxed);
        let drawn = random.millis(300..3_000);
        let timeout = if is_quiet { Duration::from_secs(6) } else { drawn };
        let mut request = self.locker.lock(key_of(key)).ttl(self.ttl(random)).timeout(timeout);
        let is_renewed = random.chance(40);
        if is_renewed {
            request = request.renew();
        }
        if random.chance(50) {
            request = request.retry_on_error(true);
        }
        let call = self.journal.call("lock", key, timeout);
        match request.await {
            Ok(guard) => {
                call.returned("granted");
                old_ids.push((guard.lock_id(), key));
                self.hold(random, key, guard, is_renewed).await;
            }
            Err(error) => {
                call.returned(error.code().as_str());
                self.failed(&error, random).await;
            }
        }
        let many = old_ids.len().saturating_sub(20);
        old_ids.drain(..many);
    }

    async fn try_lock(&self, random: &mut Random, key: u32, old_ids: &mut Vec<(LockId, u32)>) {
        let timeout = random.millis(300..2_000);
        let request = self.locker.lock(key_of(key)).ttl(self.ttl(random)).timeout(timeout);
        let call = self.journal.call("try_lock", key, timeout);
        match request.try_now().await {
            Ok(Some(guard)) => {
                call.returned("granted");
                old_ids.push((guard.lock_id(), key));
                self.hold(random, key, guard, false).await;
            }
            Ok(None) => call.returned("held"),
            Err(error) => {
                call.returned(error.code().as_str());
                self.failed(&error, random).await;
            }
        }
    }

    /// Notes whether a guard is valid now.
    fn sample(&self, guard: &Guard, key: u32) -> bool {
        let before = now();
        let is_valid = guard.is_valid();
        let after = now();
        if is_valid {
            let id = guard.lock_id().expose().to_owned();
            self.journal.write(&Event::Valid { before, after, key, id });
        }
        is_valid
    }

    async fn write(&self, guard: &Guard, key: u32) {
        let (id, fence) = (guard.lock_id(), guard.fence().get());
        let from = now();
        let Some(accepted) = self.register.write(key, fence, id.expose()).await else { return };
        let (is_valid, id) = (self.sample(guard, key), id.expose().to_owned());
        let to = now();
        self.journal.write(&Event::Write { from, to, key, id, fence, accepted, is_valid });
    }

    async fn write_to_the_store(&self, guard: &Guard, key: u32) {
        let Some(resource) = &self.resource else { return };
        let (id, from) = (guard.lock_id().expose().to_owned(), now());
        let accepted = resource.write(&key_of(key), guard.fence(), &id).await;
        let Some(accepted) = accepted else { return };
        let (is_valid, fence) = (self.sample(guard, key), guard.fence().get());
        let to = now();
        self.journal.write(&Event::Write { from, to, key, id, fence, accepted, is_valid });
    }

    /// Holds a lock for a while, writes under it, and ends it in one of many ways.
    async fn hold(&self, random: &mut Random, key: u32, guard: Guard, is_renewed: bool) {
        self.sample(&guard, key);
        let is_quiet = self.orders.is_quiet.load(Ordering::Relaxed);
        // Some stay longer than their lease, and some of those do not look at it.
        let overstays = !is_quiet && random.chance(3);
        let is_blind = overstays && random.chance(50);
        let time = match (overstays, is_quiet) {
            (true, _) => random.millis(1_500..5_000),
            (false, true) => random.millis(0..15),
            (false, false) if is_renewed && random.chance(10) => random.millis(200..1_500),
            (false, false) => random.millis(0..60),
        };
        let end = tokio::time::Instant::now() + time;
        let mut is_first = true;
        while is_first || tokio::time::Instant::now() < end {
            is_first = false;
            if !self.sample(&guard, key) && !is_blind {
                break;
            }
            self.write(&guard, key).await;
            if random.chance(30) {
                self.write_to_the_store(&guard, key).await;
            }
            if random.chance(8) {
                self.extend(random, key, &guard).await;
            }
            let left = end.saturating_duration_since(tokio::time::Instant::now());
            tokio::time::sleep(left.min(random.millis(2..40))).await;
        }
        self.sample(&guard, key);
        match random.below(10) {
            0..=5 => self.release(random, key, &guard).await,
            6..=7 => drop(guard),
            8 => {
                self.release(random, key, &guard).await;
                self.release(random, key, &guard).await;
            }
            _ => {
                let call = self.journal.call("release", key, CALL_LIMIT);
                let wait = random.millis(0..4);
                drop(
                    tokio::time::timeout(wait, guard.release()).await.map(|_| call.returned("ok")),
                );
            }
        }
    }

    async fn extend(&self, random: &mut Random, key: u32, guard: &Guard) {
        let ttl = self.ttl(random);
        let call = self.journal.call("extend", key, CALL_LIMIT);
        if random.chance(20) {
            let wait = random.millis(0..3);
            drop(tokio::time::timeout(wait, guard.extend(ttl)).await.map(|_| call.returned("ok")));
            return;
        }
        match guard.extend(ttl).await {
            Ok(ExtendOutcome::Extended(_)) => call.returned("extended"),
            Ok(ExtendOutcome::NotHeld(_)) => call.returned("lost"),
            Err(error) => {
                call.returned(error.code().as_str());
                self.failed(&error, random).await;
            }
        }
    }

    async fn release(&self, random: &mut Random, key: u32, guard: &Guard) {
        let call = self.journal.call("release", key, CALL_LIMIT);
        match guard.release().await {
            Ok(_outcome) => call.returned("ok"),
            Err(error) => {
                call.returned(error.code().as_str());
                self.failed(&error, random).await;
            }
        }
    }

    /// Drops a few requests, each at some time before it completes.
    async fn drop_requests(&self, random: &mut Random, key: u32) {
        for _ in 0..3 {
            self.drop_a_request(random, key).await;
        }
    }

    async fn drop_a_request(&self, random: &mut Random, key: u32) {
        // A lock that is left behind is found on keys with a long TTL.
        let (key, ttl) = if random.chance(50) || self.is_waiting_checked() {
            let draw = u32::try_from(random.below(u64::from(DROP_KEYS))).unwrap_or(0);
            (HOT_KEYS + COLD_KEYS + draw, LONG_TTL)
        } else {
            (key, self.ttl(random))
        };
        let call = self.journal.call("lock", key, Duration::from_secs(5));
        let request = self.locker.lock(key_of(key)).ttl(ttl).timeout(Duration::from_secs(5));
        let wait = Duration::from_micros(random.below(6_000));
        match tokio::time::timeout(wait, request.into_future()).await {
            Err(_dropped) => drop(call),
            Ok(Ok(guard)) => {
                call.returned("granted");
                drop(guard);
            }
            Ok(Err(error)) => {
                call.returned(error.code().as_str());
                self.failed(&error, random).await;
            }
        }
    }

    /// Returns whether the waits of this locker are checked: it relies on notifications, and no
    /// fault excuses that they are missed. A waiter that is dropped while it subscribes does: those
    /// after it in its queue poll.
    fn is_waiting_checked(&self) -> bool {
        self.is_patient && self.orders.is_quiet.load(Ordering::Relaxed)
    }

    async fn cancel(&self, random: &mut Random, key: u32) {
        if self.is_waiting_checked() {
            return;
        }
        let token = CancellationToken::new();
        let timeout = Duration::from_secs(3);
        let call = self.journal.call("lock", key, timeout);
        let request = self.locker.lock(key_of(key)).ttl(self.ttl(random)).timeout(timeout);
        let request = request.cancel(token.clone()).into_future();
        let wait = random.millis(0..30);
        let (result, ()) = tokio::join!(request, async {
            tokio::time::sleep(wait).await;
            token.cancel();
        });
        match result {
            Ok(guard) => {
                call.returned("granted");
                self.release(random, key, &guard).await;
            }
            Err(error) => {
                call.returned(error.code().as_str());
                self.failed(&error, random).await;
            }
        }
    }

    /// Uses the id of a lock that was released or lost, with a hint that may be wrong.
    async fn use_an_old_id(&self, random: &mut Random, old_ids: &[(LockId, u32)]) {
        if old_ids.is_empty() {
            return;
        }
        let (id, key) = random.one_of(old_ids);
        let hint = match random.below(3) {
            0 => Hint::default(),
            1 => Hint::key(key_of(key)),
            _ => Hint::key(key_of(self.draw_key(random))),
        };
        let backend = self.locker.backend();
        let failed = if random.chance(50) {
            let request = ReleaseRequest::new(id).with_hint(hint);
            backend.release(&request).await.err()
        } else {
            let ttl = Ttl::from_millis(400);
            backend.extend(&ExtendRequest::new(id, ttl).with_hint(hint)).await.err()
        };
        if let Some(error) = failed {
            self.failed(&error, random).await;
        }
    }

    /// Detaches a lock, and resumes it with another locker.
    async fn hand_over(&self, random: &mut Random, key: u32) {
        let Ok(Some(guard)) = self.locker.lock(key_of(key)).ttl(self.ttl(random)).try_now().await
        else {
            return;
        };
        self.sample(&guard, key);
        let id = guard.detach();
        let call = self.journal.call("resume", key, 2 * CALL_LIMIT);
        match self.other.resume(id).await {
            Ok(Some(guard)) => {
                call.returned("resumed");
                self.write(&guard, key).await;
                self.release(random, key, &guard).await;
            }
            Ok(None) => call.returned("lost"),
            Err(error) => {
                call.returned(error.code().as_str());
                let id = id.expose().to_owned();
                self.journal.write(&Event::Abandoned { id });
                self.failed(&error, random).await;
            }
        }
    }

    /// Lets a lock die, and then uses its id.
    async fn outlive(&self, random: &mut Random, key: u32) {
        if self.orders.is_quiet.load(Ordering::Relaxed) || self.is_patient {
            return;
        }
        let ttl = Duration::from_millis(200);
        let Ok(Some(guard)) = self.locker.lock(key_of(key)).ttl(ttl).try_now().await else {
            return;
        };
        let id = guard.detach();
        self.journal.write(&Event::Abandoned { id: id.expose().to_owned() });
        tokio::time::sleep(ttl + random.millis(1_050..1_500)).await;
        let failed = if random.chance(70) {
            let request = ExtendRequest::new(id, Ttl::from_millis(400));
            self.locker.backend().extend(&request).await.err()
        } else {
            self.locker.backend().release(&ReleaseRequest::new(id)).await.err()
        };
        if let Some(error) = failed {
            self.failed(&error, random).await;
        }
    }

    async fn look(&self, key: u32) {
        let results = (
            self.locker.is_locked(key_of(key)).await.err(),
            self.locker.info(key_of(key)).await.err(),
        );
        for error in [results.0, results.1].into_iter().flatten() {
            self.journal.check(&error, None);
        }
    }
}
