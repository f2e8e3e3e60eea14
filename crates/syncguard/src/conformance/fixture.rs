//! The access to a store that the kit needs.

use std::future::{Future, ready};
use std::time::Duration;

use crate::common::fence::{Fence, Fenced};
use crate::common::key::Key;
use crate::common::lock_id::LockId;
use crate::contract::LockBackend;

/// A store that the kit can read and change without going through the backend.
///
/// The kit does not rely on the code under test to check itself. It does not sleep either: it
/// plants records with a chosen expiry instead.
pub trait Fixture: Send + Sync + 'static {
    /// The backend under test.
    type Backend: LockBackend<Fencing = Fenced>;

    /// Returns a backend on this store. All of them see the same locks.
    fn backend(&self) -> impl Future<Output = Self::Backend> + Send;

    /// Returns a backend on this store that cleans up in `is_locked`.
    fn backend_with_cleanup(&self) -> impl Future<Output = Self::Backend> + Send;

    /// Returns a backend on this store whose fences come from the clock
    /// ([`FenceSource::Clock`](crate::FenceSource::Clock)), if the backend supports that.
    fn backend_with_clock_fences(&self) -> impl Future<Output = Option<Self::Backend>> + Send {
        ready(None)
    }

    /// Puts a record into the store and replaces the one under its key, with everything that
    /// belongs to it, such as an index entry. Sets the fence counter to the record's fence.
    fn plant(&self, lock: &RawLock) -> impl Future<Output = ()> + Send;

    /// Reads the record of a key, dead or alive.
    fn peek(&self, key: &Key) -> impl Future<Output = Option<RawLock>> + Send;

    /// Returns whether the store can still find something by this lock id, dead or alive.
    fn knows_id(&self, lock_id: &LockId) -> impl Future<Output = bool> + Send;

    /// Reads the fence counter of a key; 0 if there is none.
    fn fence_counter(&self, key: &Key) -> impl Future<Output = u64> + Send;

    /// Sets the fence counter of a key.
    fn set_fence_counter(&self, key: &Key, counter: u64) -> impl Future<Output = ()> + Send;

    /// Deletes the fence counter of a key, as a loss of data does.
    fn delete_fence_counter(&self, key: &Key) -> impl Future<Output = ()> + Send {
        self.set_fence_counter(key, 0)
    }

    /// Lets time pass on the time authority's clock: moves the clock, or sleeps.
    fn advance(&self, by: Duration) -> impl Future<Output = ()> + Send {
        tokio::time::sleep(by)
    }

    /// Returns how much the time authority's clock may move by itself during a test: zero if it
    /// stands still. The edges of the tolerance are tested this far inside, on the live side.
    fn clock_margin(&self) -> Duration {
        Duration::from_millis(500)
    }

    /// Returns whether the backend distinguishes a lock that has expired from one that it does not
    /// find, as long as its record is still in the store. `false` if that would cost another
    /// request.
    fn tells_expired_from_not_found(&self) -> bool {
        true
    }

    /// Returns whether the store has a place for [holders](crate::HolderInfo).
    fn stores_holders(&self) -> bool {
        true
    }

    /// Returns whether a holder learns who broke its lock, where it learns of the break at once.
    fn passes_break_notes_on(&self) -> bool {
        true
    }

    /// Restarts the store as after a crash. Returns `false` if nothing is meant to survive that.
    fn restart(&self) -> impl Future<Output = bool> + Send {
        ready(false)
    }

    /// Replaces the record of a key by a corrupt one. Returns `false` if the store's types do not
    /// allow such a record.
    #[expect(unused_variables, reason = "the name is documentation")]
    fn corrupt(&self, key: &Key) -> impl Future<Output = bool> + Send {
        ready(false)
    }

    /// Returns the same store with every backend wrapped by `wrap`. Use it to run the kit over a
    /// layer or the erased form.
    ///
    /// ```
    /// use syncguard::AnyBackend;
    /// use syncguard::conformance::{Fixture, MemoryFixture};
    ///
    /// syncguard::conformance_tests!(MemoryFixture::new().wrapped(AnyBackend::new));
    /// # fn main() {}
    /// ```
    fn wrapped<B, Wrap>(self, wrap: Wrap) -> Wrapped<Self, Wrap>
    where
        Self: Sized,
        B: LockBackend<Fencing = Fenced>,
        Wrap: Fn(Self::Backend) -> B + Send + Sync + 'static,
    {
        Wrapped { inner: self, wrap }
    }
}

/// A fixture whose backends are wrapped, from [`Fixture::wrapped`].
#[derive(Clone, Debug)]
pub struct Wrapped<F, Wrap> {
    inner: F,
    wrap: Wrap,
}

impl<F, B, Wrap> Fixture for Wrapped<F, Wrap>
where
    F: Fixture,
    B: LockBackend<Fencing = Fenced>,
    Wrap: Fn(F::Backend) -> B + Send + Sync + 'static,
{
    type Backend = B;

    async fn backend(&self) -> B {
        (self.wrap)(self.inner.backend().await)
    }

    async fn backend_with_cleanup(&self) -> B {
        (self.wrap)(self.inner.backend_with_cleanup().await)
    }

    async fn plant(&self, lock: &RawLock) {
        self.inner.plant(lock).await;
    }

    async fn peek(&self, key: &Key) -> Option<RawLock> {
        self.inner.peek(key).await
    }

    async fn knows_id(&self, lock_id: &LockId) -> bool {
        self.inner.knows_id(lock_id).await
    }

    async fn fence_counter(&self, key: &Key) -> u64 {
        self.inner.fence_counter(key).await
    }

    async fn set_fence_counter(&self, key: &Key, counter: u64) {
        self.inner.set_fence_counter(key, counter).await;
    }

    async fn backend_with_clock_fences(&self) -> Option<B> {
        Some((self.wrap)(self.inner.backend_with_clock_fences().await?))
    }

    async fn delete_fence_counter(&self, key: &Key) {
        self.inner.delete_fence_counter(key).await;
    }

    async fn advance(&self, by: Duration) {
        self.inner.advance(by).await;
    }

    fn clock_margin(&self) -> Duration {
        self.inner.clock_margin()
    }

    fn tells_expired_from_not_found(&self) -> bool {
        self.inner.tells_expired_from_not_found()
    }

    fn stores_holders(&self) -> bool {
        self.inner.stores_holders()
    }

    fn passes_break_notes_on(&self) -> bool {
        self.inner.passes_break_notes_on()
    }

    async fn restart(&self) -> bool {
        self.inner.restart().await
    }

    async fn corrupt(&self, key: &Key) -> bool {
        self.inner.corrupt(key).await
    }
}

/// A record as it is in the store. Times are relative to the time authority's clock, so that a test
/// can set an exact edge.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "fixtures build it")]
pub struct RawLock {
    /// The key, as stored.
    pub key: Key,
    /// The lock id.
    pub lock_id: LockId,
    /// The fence.
    pub fence: Fence,
    /// How many milliseconds ago it was acquired.
    pub acquired_ms_ago: i64,
    /// In how many milliseconds it expires; negative if it has expired.
    pub expires_in_ms: i64,
}
