//! The mutex behind which threads share state. It is the standard library's. In unit tests, shuttle
//! can interrupt a thread before it locks one and after it unlocks one.

#[cfg(test)]
pub(crate) use interruptible::{Mutex, MutexGuard};
#[cfg(not(test))]
pub(crate) use std::sync::{Mutex, MutexGuard};

#[cfg(test)]
mod interruptible {
    use std::fmt;
    use std::ops::{Deref, DerefMut};
    use std::sync::{LockResult, TryLockError};

    /// Lets shuttle continue with another task or thread, inside one of its executions.
    pub(crate) fn interruption_point() {
        if shuttle::current::try_get_current_task().is_some() && !std::thread::panicking() {
            shuttle::thread::yield_now();
        }
    }

    #[derive(Default)]
    pub(crate) struct Mutex<T>(std::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub(crate) const fn new(value: T) -> Self {
            Self(std::sync::Mutex::new(value))
        }

        pub(crate) fn lock(&self) -> LockResult<MutexGuard<'_, T>> {
            if shuttle::current::try_get_current_task().is_none() {
                return MutexGuard::wrap(self.0.lock());
            }
            // All tasks of an execution run on one thread, so none may block it.
            loop {
                interruption_point();
                match self.0.try_lock() {
                    Ok(guard) => return MutexGuard::wrap(Ok(guard)),
                    Err(TryLockError::Poisoned(guard)) => return MutexGuard::wrap(Err(guard)),
                    Err(TryLockError::WouldBlock) => {}
                }
            }
        }
    }

    impl<T: fmt::Debug> fmt::Debug for Mutex<T> {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            self.0.fmt(f)
        }
    }

    pub(crate) struct MutexGuard<'a, T>(Option<std::sync::MutexGuard<'a, T>>);

    impl<'a, T> MutexGuard<'a, T> {
        fn wrap(locked: LockResult<std::sync::MutexGuard<'a, T>>) -> LockResult<Self> {
            let guard = |guard| Self(Some(guard));
            locked
                .map(guard)
                .map_err(|poisoned| std::sync::PoisonError::new(guard(poisoned.into_inner())))
        }
    }

    impl<T> Deref for MutexGuard<'_, T> {
        type Target = T;

        fn deref(&self) -> &T {
            self.0.as_ref().expect("BUG: used after it was dropped")
        }
    }

    impl<T> DerefMut for MutexGuard<'_, T> {
        fn deref_mut(&mut self) -> &mut T {
            self.0.as_mut().expect("BUG: used after it was dropped")
        }
    }

    impl<T> Drop for MutexGuard<'_, T> {
        fn drop(&mut self) {
            drop(self.0.take());
            interruption_point();
        }
    }
}
