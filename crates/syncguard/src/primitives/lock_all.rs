//! Takes several locks: all or none.

use std::collections::BTreeSet;
use std::fmt;
use std::future::IntoFuture;
use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::holding::{all_or_none, bounded, extend, give_back, keep};
use super::multi_guard::MultiGuard;
use crate::common::error::{Error, ErrorCode, Result};
use crate::common::join::join_all;
use crate::common::key::Key;
use crate::common::ttl::Ttl;
use crate::contract::{BoxFuture, LockBackend};
use crate::lock::clock::LocalInstant;
use crate::lock::guard::LockGuard;
use crate::lock::lock_request::none_if_held;
use crate::lock::locker::Locker;
use crate::lock::options::{LockOptions, option_setters};
use crate::lock::release_errors::{ReleaseContext, ReleaseErrors};
use crate::lock::retry::RetryPolicy;

/// The most keys of one [`Locker::lock_all`].
pub const MAX_KEYS: usize = 64;

impl<B: LockBackend> Locker<B> {
    /// Takes the locks of several keys, all or none, waiting for them up to the
    /// [timeout](LockOptions::timeout). Await the request, or change its options first.
    ///
    /// ```
    /// # use syncguard::{Locker, MemoryBackend};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> syncguard::Result<()> {
    /// # let locker = Locker::new(MemoryBackend::new())?;
    /// let accounts = locker.lock_all(["account:2", "account:1"]).await?;
    /// for (key, fence) in accounts.fences() {
    ///     println!("writing {} with fence {fence}", key.as_str());
    /// }
    /// accounts.release().await?;
    /// # locker.shutdown().await
    /// # }
    /// ```
    ///
    /// * Callers that want overlapping keys do not deadlock: a caller waits for a key only while it
    ///   holds smaller ones.
    /// * Free locks are asked for at the same time, which is one round trip on a backend that sends
    ///   concurrent operations together.
    /// * Locks that are held while the caller waits for others are extended meanwhile.
    /// * Duplicate keys count once. There must be 1 to [`MAX_KEYS`] of them.
    ///
    /// Do not call it while you hold another lock that the same callers take: no order protects
    /// that from a deadlock.
    ///
    /// # Cancel safety
    ///
    /// Dropping the request releases what it has taken, in the background.
    pub fn lock_all<K>(&self, keys: impl IntoIterator<Item = K>) -> LockAllRequest<B>
    where
        K: TryInto<Key>,
        Error: From<K::Error>,
    {
        let options = self.options().clone();
        LockAllRequest { locker: self.unscoped(), keys: sorted(self, keys), options }
    }

    /// Takes the locks of several keys if all are free: one attempt each, at the same time. Returns
    /// `None` if one is held; then none is taken.
    ///
    /// # Cancel safety
    ///
    /// If dropped before it completes, the attempts continue in the background and the locks that
    /// they get are released.
    pub async fn try_lock_all<K>(
        &self,
        keys: impl IntoIterator<Item = K>,
    ) -> Result<Option<MultiGuard<B>>>
    where
        K: TryInto<Key>,
        Error: From<K::Error>,
    {
        self.lock_all(keys).try_now().await
    }
}

/// Returns the keys of a request in the order in which they are taken.
fn sorted<B: LockBackend, K>(
    locker: &Locker<B>,
    keys: impl IntoIterator<Item = K>,
) -> Result<Vec<Key>>
where
    K: TryInto<Key>,
    Error: From<K::Error>,
{
    let mut all = BTreeSet::new();
    for key in keys {
        all.insert(locker.key(key)?);
        if all.len() > MAX_KEYS {
            return Err(Error::invalid(format!("lock_all takes at most {MAX_KEYS} keys")));
        }
    }
    if all.is_empty() {
        return Err(Error::invalid("lock_all needs at least one key"));
    }
    Ok(all.into_iter().collect())
}

/// A request for several locks, from [`Locker::lock_all`]. Await it, or change its options first.
///
/// ```
/// use std::time::Duration;
/// # use syncguard::{Locker, MemoryBackend};
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> syncguard::Result<()> {
/// # let locker = Locker::new(MemoryBackend::new())?;
/// let guard = locker.lock_all(["a", "b"]).timeout(Duration::from_secs(60)).renew().await?;
/// assert!(locker.lock_all(["b", "c"]).try_now().await?.is_none());
/// # drop(guard); locker.shutdown().await
/// # }
/// ```
///
/// # Cancel safety
///
/// Dropping the future releases what it has taken, in the background.
#[must_use = "a request for locks does nothing unless it is awaited"]
pub struct LockAllRequest<B: LockBackend> {
    locker: Locker<B>,
    keys: Result<Vec<Key>>,
    options: LockOptions,
}

impl<B: LockBackend> LockAllRequest<B> {
    option_setters!();

    fn options_mut(&mut self) -> &mut LockOptions {
        &mut self.options
    }

    /// Makes one attempt at every lock, without waiting or queueing. Returns `None` if one is held.
    ///
    /// # Cancel safety
    ///
    /// If dropped before it completes, the attempts continue in the background and the locks that
    /// they get are released.
    pub async fn try_now(self) -> Result<Option<MultiGuard<B>>> {
        let (locker, keys) = self.begin()?;
        // As for one lock, no time means one attempt without a limit.
        let timeout = locker.options().timeout.filter(|timeout| !timeout.is_zero());
        let taking = Taking::new(&locker, &keys, timeout);
        let tried = async {
            let tried = keys.iter().map(|key| locker.try_lock(key));
            Ok(all_or_none(tried).await?.map(MultiGuard::new))
        };
        bounded(&locker, taking.deadline, tried).await?.ok_or_else(|| taking.timed_out())
    }

    /// Waits for at most this long. Returns `None` if one of the locks is still held then.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future releases what it has taken, in the background.
    pub async fn try_for(self, limit: Duration) -> Result<Option<MultiGuard<B>>> {
        if limit.is_zero() {
            return self.try_now().await;
        }
        none_if_held(self.timeout(limit).await)
    }

    /// Returns the keys and the locker that takes them. Invalid input is reported here, before any
    /// I/O.
    fn begin(self) -> Result<(Locker<B>, Vec<Key>)> {
        let keys = self.keys?;
        self.locker.check_usable()?;
        if !self.options.hold_at_least.is_zero() {
            return Err(Error::invalid(
                "hold_at_least does not work with lock_all, which gives locks back while it waits",
            ));
        }
        Ok((self.locker.with_options(self.options)?, keys))
    }

    async fn take(self) -> Result<MultiGuard<B>> {
        let (locker, keys) = self.begin()?;
        let taking = Taking::new(&locker, &keys, locker.options().timeout);
        let taken = async {
            loop {
                if let Some(guards) = taking.all().await? {
                    return Ok(MultiGuard::new(guards));
                }
            }
        };
        bounded(&locker, taking.deadline, taken).await?.ok_or_else(|| taking.timed_out())
    }
}

impl<B: LockBackend> IntoFuture for LockAllRequest<B> {
    type Output = Result<MultiGuard<B>>;
    type IntoFuture = BoxFuture<'static, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.take())
    }
}

impl<B: LockBackend> fmt::Debug for LockAllRequest<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockAllRequest").finish_non_exhaustive()
    }
}

/// One call of `lock_all`.
struct Taking<'a, B: LockBackend> {
    locker: &'a Locker<B>,
    keys: &'a [Key],
    started: LocalInstant,
    deadline: Option<LocalInstant>,
}

impl<'a, B: LockBackend> Taking<'a, B> {
    fn new(locker: &'a Locker<B>, keys: &'a [Key], timeout: Option<Duration>) -> Self {
        let started = locker.now();
        Self { locker, keys, started, deadline: timeout.map(|timeout| started + timeout) }
    }

    /// Takes all locks. Returns `None` if one of them was lost while others were waited for.
    ///
    /// What is held always belongs to the smallest keys, and grows by at least one lock with every
    /// wait. While it waits, this caller holds nothing beyond the key that it waits for, so callers
    /// cannot wait for each other in a circle.
    async fn all(&self) -> Result<Option<Vec<LockGuard<B>>>> {
        let mut held: Vec<LockGuard<B>> = Vec::with_capacity(self.keys.len());
        let mut has_waited = false;
        loop {
            self.take_free(&mut held).await?;
            let Some(key) = self.keys.get(held.len()) else { break };
            has_waited = true;
            let mut request = self.locker.lock(key);
            if let Some(left) = self.left() {
                request = request.timeout(left);
            }
            tokio::select! {
                biased;
                acquired = request => held.push(acquired.map_err(|error| self.judge(error))?),
                () = keep(self.locker, &held) => {
                    give_back(held).await;
                    return Ok(None);
                }
            }
        }
        // Without renewal, the caller counts on the whole TTL of every lock.
        let is_kept =
            !has_waited || self.locker.options().renew || extend(self.locker, &held).await;
        if is_kept && held.iter().all(LockGuard::is_valid) {
            return Ok(Some(held));
        }
        give_back(held).await;
        Ok(None)
    }

    /// Asks for the locks that are not held yet, at the same time. Keeps those up to the first that
    /// is not free, and gives the others back.
    async fn take_free(&self, held: &mut Vec<LockGuard<B>>) -> Result<()> {
        if self.left() == Some(Duration::ZERO) {
            return Err(self.timed_out());
        }
        let rest = &self.keys[held.len()..];
        // Beyond a key that another task of this process holds or waits for, everything would have
        // to be given back. That task also goes first.
        let wanted = rest.iter().position(|key| self.locker.is_wanted_here(key));
        let asked = &rest[..wanted.unwrap_or(rest.len())];
        let tried = join_all(asked.iter().map(|key| {
            let request = self.locker.lock(key);
            match self.left() {
                Some(left) => request.timeout(left),
                None => request,
            }
            .try_now()
        }));
        let (mut surplus, mut is_next, mut refusal) = (Vec::new(), true, None);
        for attempt in tried.await {
            match attempt {
                Ok(Some(guard)) if is_next => held.push(guard),
                Ok(Some(guard)) => surplus.push(guard),
                Ok(None) => is_next = false,
                Err(error) => {
                    is_next = false;
                    if !(self.locker.options().retry_on_error && error.is_retryable()) {
                        refusal = Some(self.judge(error));
                    }
                }
            }
        }
        give_back(surplus).await;
        refusal.map_or(Ok(()), Err)
    }

    /// Returns what is left of the timeout.
    fn left(&self) -> Option<Duration> {
        self.deadline.map(|deadline| deadline.since(self.locker.now()))
    }

    fn timed_out(&self) -> Error {
        let elapsed_ms = self.locker.now().since(self.started).as_millis();
        let count = self.keys.len();
        let message = format!("the {count} locks were not acquired within {elapsed_ms} ms");
        Error::new(ErrorCode::AcquisitionTimeout, message)
    }

    /// Replaces the timeout of one wait by that of the whole call.
    fn judge(&self, error: Error) -> Error {
        if error.code() != ErrorCode::AcquisitionTimeout {
            return error;
        }
        let mut timed_out = self.timed_out().with_holder(error.holder().cloned());
        if let Some(key) = error.key() {
            timed_out = timed_out.with_key(key);
        }
        match std::error::Error::source(&error) {
            Some(_) => timed_out.with_source(error),
            None => timed_out,
        }
    }
}
