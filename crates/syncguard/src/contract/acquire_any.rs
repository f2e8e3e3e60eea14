//! How a backend acquires one of several locks without an operation for that.

use std::time::Duration;

use super::LockBackend;
use super::outcome::{AcquireAnyOutcome, AcquireOutcome};
use super::request::AcquireAnyRequest;
use crate::common::error::{Error, Result};
use crate::common::join::join_all;

/// Looks at all locks at the same time, then acquires the first that is free.
pub(crate) async fn look_then_acquire<B: LockBackend + ?Sized>(
    backend: &B,
    request: &AcquireAnyRequest,
) -> Result<AcquireAnyOutcome<B::Fencing>> {
    let looks = join_all(request.keys().iter().map(|key| backend.is_locked(key))).await;
    let mut soonest = Soonest::default();
    for (key, is_locked) in request.keys().iter().zip(looks) {
        // Nothing was sent yet that could have an effect.
        if is_locked.map_err(Error::without_effect)? {
            soonest.add(None);
            continue;
        }
        match backend.acquire(&request.for_key(key)).await? {
            AcquireOutcome::Acquired(lease) => {
                return Ok(AcquireAnyOutcome::Acquired { key: key.clone(), lease });
            }
            AcquireOutcome::Contended { expires_in } => soonest.add(expires_in),
            AcquireOutcome::AlreadyUsed => soonest.add(None),
        }
    }
    Ok(soonest.contended())
}

/// Collects when the first of several locks is dead.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Soonest(Option<Duration>);

impl Soonest {
    /// Adds a lock, which may be one of which nothing is known.
    pub(crate) fn add(&mut self, expires_in: Option<Duration>) {
        self.0 = match (self.0, expires_in) {
            (Some(one), Some(other)) => Some(one.min(other)),
            (one, other) => one.or(other),
        };
    }

    pub(crate) fn expires_in(self) -> Option<Duration> {
        self.0
    }

    pub(crate) fn contended<F: crate::common::fence::Fencing>(self) -> AcquireAnyOutcome<F> {
        AcquireAnyOutcome::Contended { expires_in: self.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_soonest_of_several_locks_is_the_first_that_is_known_to_end() {
        let second = Duration::from_secs;
        let soonest = |ends: &[Option<u64>]| {
            let mut soonest = Soonest::default();
            for end in ends {
                soonest.add(end.map(second));
            }
            soonest.expires_in()
        };
        assert_eq!(soonest(&[]), None);
        assert_eq!(soonest(&[None, Some(3), None]), Some(second(3)));
        assert_eq!(soonest(&[Some(5), Some(2), Some(4)]), Some(second(2)));
    }
}
