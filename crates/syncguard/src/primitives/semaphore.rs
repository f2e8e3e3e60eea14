//! Semaphores: at most a number of holders at a time.

use std::convert::Infallible;
use std::fmt;
use std::future::pending;
use std::mem;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use tokio::sync::watch;

use super::holding::{all_or_none, bounded, extend, give_back, keep};
use super::names::{gate_key, slot_key, slot_of};
use super::permit::Permit;
use crate::common::backoff::random_fraction;
use crate::common::error::{Error, ErrorCode, Result};
use crate::common::join::join_all;
use crate::common::key::Key;
use crate::common::sync::Mutex;
use crate::contract::LockBackend;
use crate::lock::clock::LocalInstant;
use crate::lock::guard::LockGuard;
use crate::lock::lock_request::LockRequest;
use crate::lock::locker::Locker;

/// The most permits of a [`Semaphore`].
pub const MAX_PERMITS: u32 = 1000;

impl<B: LockBackend> Locker<B> {
    /// Returns a semaphore: at most `permits` of its permits are held at a time, by all processes
    /// together.
    ///
    /// Each permit is the lock of a slot, with the key `<name>:slot:<number>`. The options of those
    /// locks are those of this locker. If programs disagree about the number of permits, the larger
    /// number counts, and those with the smaller one log a warning once they notice.
    ///
    /// Fails with [`ErrorCode::InvalidArgument`](crate::ErrorCode::InvalidArgument) unless there
    /// are 1 to [`MAX_PERMITS`], and if the keys of the slots would be too long.
    pub fn semaphore<K>(&self, name: K, permits: u32) -> Result<Semaphore<B>>
    where
        K: TryInto<Key>,
        Error: From<K::Error>,
    {
        if !(1..=MAX_PERMITS).contains(&permits) {
            return Err(Error::invalid(format!(
                "a semaphore has 1 to {MAX_PERMITS} permits, not {permits}"
            )));
        }
        let name = self.key(name)?;
        // The longest of its keys; it also names the queue of its waiters.
        let queue = slot_key(&name, MAX_PERMITS)?;
        let gate = gate_key(&name)?;
        let locker = self.unscoped();
        let slots = locker.shared_state(&queue, || Slots::new(permits));
        slots.settle_on(permits, &name);
        Ok(Semaphore { locker, name, queue, gate, slots })
    }
}

/// A semaphore, from [`Locker::semaphore`]. Clones are cheap and share everything.
///
/// * A permit is a lock: it has a TTL, a fence and a holder, and a crashed process loses its
///   permits after their TTL.
/// * Tasks of one process are served in order. Between processes there is no strict order.
/// * A free permit costs one request on memory, SQLite, PostgreSQL and Redis, for more than 64
///   permits at most two; on Firestore, and on Redis with shards or `wait_for_replicas`, it costs
///   one lookup per slot and an acquire.
/// * It limits how many hold a permit at the same time, not how many get one per second: it is not
///   a rate limiter.
/// * Waiters are woken by the store, where it can do that, for up to 64 slots. Of a larger
///   semaphore they listen to 64 slots and poll for the others.
///
/// ```
/// use syncguard::{Locker, MemoryBackend};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> syncguard::Result<()> {
/// let locker = Locker::new(MemoryBackend::new())?;
/// let gpus = locker.semaphore("gpu", 4)?;
/// let permit = gpus.acquire().await?;
/// println!("computing on GPU {} with fence {}", permit.slot(), permit.fence());
/// assert_eq!(gpus.available().await?, 3);
/// permit.release().await?;
/// # locker.shutdown().await
/// # }
/// ```
pub struct Semaphore<B: LockBackend> {
    locker: Locker<B>,
    name: Key,
    /// The key of the queue in this process.
    queue: Key,
    /// The key of the lock that a caller holds while it collects several permits: only one at a
    /// time holds some and waits for more.
    gate: Key,
    slots: Arc<Slots>,
}

/// What all semaphores of one name share within a process.
struct Slots {
    count: watch::Sender<u32>,
    /// The keys of the slots, made when they are first needed.
    keys: Mutex<Arc<[Key]>>,
    has_warned: AtomicBool,
    has_looked: AtomicBool,
}

impl Slots {
    fn new(count: u32) -> Self {
        Self {
            count: watch::Sender::new(count),
            keys: Mutex::new(Arc::default()),
            has_warned: AtomicBool::new(false),
            has_looked: AtomicBool::new(false),
        }
    }

    fn count(&self) -> u32 {
        *self.count.borrow()
    }

    /// Takes the larger of two numbers, and warns once if they differ.
    fn settle_on(&self, count: u32, name: &Key) {
        let mut before = count;
        self.count.send_if_modified(|largest| {
            before = *largest;
            *largest = count.max(before);
            before < count
        });
        if before != count && !self.has_warned.swap(true, Ordering::SeqCst) {
            tracing::warn!(
                key_hash = %name.hash_id(),
                "a semaphore is used with {before} and with {count} permits; the larger number \
                 counts"
            );
        }
    }
}

impl<B: LockBackend> Semaphore<B> {
    /// Returns the number of permits.
    #[must_use]
    pub fn permits(&self) -> u32 {
        self.slots.count()
    }

    /// Waits for a permit, up to the [timeout](crate::LockOptions::timeout).
    ///
    /// Fails like [`Locker::lock`].
    ///
    /// # Cancel safety
    ///
    /// Dropping the future gives up the place in the queue. A permit that it gets meanwhile is
    /// given back in the background.
    pub async fn acquire(&self) -> Result<Permit<B>> {
        let started = self.locker.now();
        let mut count = self.slots.count.subscribe();
        let mut request = self.request();
        let mut look = pin!(self.look_for_more());
        loop {
            tokio::select! {
                biased;
                guard = &mut request => return Ok(self.permit(guard?)),
                never = look.as_mut() => match never {},
                // The semaphore, which has the sender, exists.
                _changed = count.changed() => {}
            }
            // There are more slots than this request asks for.
            request = self.request();
            if let Some(timeout) = self.locker.options().timeout {
                let waited = self.locker.now().since(started);
                request = request.timeout(timeout.saturating_sub(waited));
            }
        }
    }

    /// Takes a permit if one is free: one attempt, without queueing. Returns `None` if all are
    /// held.
    ///
    /// # Cancel safety
    ///
    /// If dropped before it completes, the attempt continues in the background and a permit that it
    /// gets is given back.
    pub async fn try_acquire(&self) -> Result<Option<Permit<B>>> {
        Ok(self.request().try_now().await?.map(|guard| self.permit(guard)))
    }

    /// Waits for several permits, all or none.
    ///
    /// Callers that want several do not deadlock: only one of them at a time holds some while it
    /// waits for more. Do not call it, or [`acquire`](Self::acquire), while you hold a permit of
    /// the same semaphore: no order protects that from a deadlock.
    ///
    /// Fails with [`ErrorCode::InvalidArgument`](crate::ErrorCode::InvalidArgument) for none, and
    /// for more than the semaphore has.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future gives back what it has taken, in the background.
    pub async fn acquire_many(&self, count: u32) -> Result<Vec<Permit<B>>> {
        self.check_count(count)?;
        if count == 1 {
            return Ok(vec![self.acquire().await?]);
        }
        let options = self.locker.options();
        let started = self.locker.now();
        if options.timeout == Some(Duration::ZERO) {
            return Err(self.timed_out(count, started));
        }
        let deadline = options.timeout.map(|timeout| started + timeout);
        let left = || deadline.map(|deadline| deadline.since(self.locker.now()));
        let acquired = async {
            match self.try_acquire_many(count).await {
                Ok(Some(permits)) => return Ok(permits),
                Err(error) if !(options.retry_on_error && error.is_retryable()) => {
                    return Err(error);
                }
                Ok(None) | Err(_) => {}
            }
            loop {
                let gate = self.locker.lock(&self.gate).renew().stop_margin(Duration::ZERO);
                let gate = gate.timeout(left()).await?;
                let collected = tokio::select! {
                    biased;
                    _reason = gate.lost() => None,
                    collected = self.collect(count, left) => collected?,
                };
                gate.finish().await;
                if let Some(guards) = collected {
                    return Ok(self.permits_of(guards));
                }
            }
        };
        let acquired = bounded(&self.locker, deadline, acquired).await?;
        acquired.ok_or_else(|| self.timed_out(count, started))
    }

    fn timed_out(&self, count: u32, started: LocalInstant) -> Error {
        let elapsed_ms = self.locker.now().since(started).as_millis();
        let message = format!("{count} permits were not acquired within {elapsed_ms} ms");
        Error::new(ErrorCode::AcquisitionTimeout, message)
    }

    /// Takes several permits if so many are free, without waiting. Returns `None` if they are not.
    ///
    /// # Cancel safety
    ///
    /// If dropped before it completes, the attempts continue in the background and the permits that
    /// they get are given back.
    pub async fn try_acquire_many(&self, count: u32) -> Result<Option<Vec<Permit<B>>>> {
        self.check_count(count)?;
        let started = self.locker.now();
        // As for one permit, no time means one attempt without a limit.
        let timeout = self.locker.options().timeout.filter(|timeout| !timeout.is_zero());
        let deadline = timeout.map(|timeout| started + timeout);
        let tried = all_or_none((0..count).map(|_| self.request().try_now()));
        let tried = bounded(&self.locker, deadline, tried).await?;
        let guards = tried.ok_or_else(|| self.timed_out(count, started))?;
        Ok(guards.map(|guards| self.permits_of(guards)))
    }

    /// Takes permits one after another. Returns `None` if one was lost meanwhile.
    async fn collect(
        &self,
        count: u32,
        left: impl Fn() -> Option<Duration>,
    ) -> Result<Option<Vec<LockGuard<B>>>> {
        let mut held: Vec<LockGuard<B>> = Vec::new();
        while held.len() < count as usize {
            let request = self.request().timeout(left());
            tokio::select! {
                biased;
                guard = request => held.push(guard?),
                () = keep(&self.locker, &held) => {
                    give_back(held).await;
                    return Ok(None);
                }
            }
        }
        let is_kept = self.locker.options().renew || extend(&self.locker, &held).await;
        if is_kept && held.iter().all(LockGuard::is_valid) {
            return Ok(Some(held));
        }
        give_back(held).await;
        Ok(None)
    }

    /// Returns how many permits are free. For display only: it is out of date at once.
    ///
    /// # Cancel safety
    ///
    /// It only reads, so dropping the future changes nothing.
    pub async fn available(&self) -> Result<u32> {
        const AT_ONCE: usize = 64;
        let mut free = 0;
        for keys in self.keys().chunks(AT_ONCE) {
            for is_locked in join_all(keys.iter().map(|key| self.locker.is_locked(key))).await {
                free += u32::from(!is_locked?);
            }
        }
        Ok(free)
    }

    fn check_count(&self, count: u32) -> Result<()> {
        let permits = self.permits();
        if !(1..=permits).contains(&count) {
            return Err(Error::invalid(format!(
                "cannot acquire {count} permits of a semaphore that has {permits}"
            )));
        }
        if count > 1 && !self.locker.options().hold_at_least.is_zero() {
            return Err(Error::invalid(
                "hold_at_least does not work with several permits, which are given back if there \
                 are too few",
            ));
        }
        Ok(())
    }

    /// Returns a request for the lock of any slot, from a random one on.
    fn request(&self) -> LockRequest<'_, B> {
        let (keys, count) = (self.keys(), self.permits());
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "below 1000")]
        let first = (random_fraction() * f64::from(count)) as usize % keys.len();
        let keys = keys[first..].iter().chain(&keys[..first]).cloned().collect();
        self.locker.lock_any(&self.queue, keys)
    }

    fn keys(&self) -> Arc<[Key]> {
        let count = self.permits();
        let mut keys = self.slots.keys.lock().unwrap_or_else(PoisonError::into_inner);
        if keys.len() != count as usize {
            *keys = (0..count).map(|slot| self.slot_key(slot)).collect();
        }
        Arc::clone(&keys)
    }

    fn slot_key(&self, slot: u32) -> Key {
        slot_key(&self.name, slot).expect("BUG: the longest slot key was valid")
    }

    fn permits_of(&self, guards: Vec<LockGuard<B>>) -> Vec<Permit<B>> {
        guards.into_iter().map(|guard| self.permit(guard)).collect()
    }

    fn permit(&self, guard: LockGuard<B>) -> Permit<B> {
        let slot = slot_of(&self.name, guard.key());
        Permit::new(guard, slot.expect("BUG: only slots are asked for"))
    }

    /// Looks at slots beyond the own ones after a while, once in this process. If one is held, a
    /// program has a larger number of permits.
    async fn look_for_more(&self) -> Infallible {
        const AFTER: Duration = Duration::from_millis(500);
        const SLOTS: u32 = 16;
        if !self.slots.has_looked.load(Ordering::SeqCst) {
            self.locker.sleep(AFTER).await;
        }
        if self.slots.has_looked.swap(true, Ordering::SeqCst) {
            return pending().await;
        }
        let unfinished = Unfinished(&self.slots.has_looked);
        let count = self.permits();
        let beyond: Vec<u32> = (count..(count + SLOTS).min(MAX_PERMITS)).collect();
        let keys: Vec<Key> = beyond.iter().map(|&slot| self.slot_key(slot)).collect();
        let looks = join_all(keys.iter().map(|key| self.locker.is_locked(key))).await;
        if looks.iter().all(Result::is_ok) {
            mem::forget(unfinished);
        }
        let held = beyond.iter().zip(looks).filter(|(_slot, held)| matches!(held, Ok(true)));
        if let Some((slot, _held)) = held.last() {
            self.slots.settle_on(slot + 1, &self.name);
        }
        pending().await
    }
}

/// Lets another waiter look if the one that began did not finish.
struct Unfinished<'a>(&'a AtomicBool);

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}

impl<B: LockBackend> Clone for Semaphore<B> {
    fn clone(&self) -> Self {
        Self {
            locker: self.locker.clone(),
            name: self.name.clone(),
            queue: self.queue.clone(),
            gate: self.gate.clone(),
            slots: Arc::clone(&self.slots),
        }
    }
}

impl<B: LockBackend> fmt::Debug for Semaphore<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Semaphore")
            .field("name", &self.name)
            .field("permits", &self.permits())
            .finish_non_exhaustive()
    }
}
