//! What a command runs under: a lock, several locks, a slot of a semaphore, or the lead.

use std::time::Duration;

use syncguard::primitives::{Leadership, MultiGuard, Permit};
use syncguard::{
    AnyBackend, ExtendOutcome, Fence, Key, LockGuard, LockHandle, LostReason, ReleaseOutcome, Ttl,
};

/// What this process holds while the command runs.
#[derive(Debug)]
pub(crate) enum Held {
    Lock(LockGuard<AnyBackend>),
    All(MultiGuard<AnyBackend>),
    Slot(Permit<AnyBackend>),
    Lead(Leadership<AnyBackend>),
}

impl Held {
    /// Returns the locks, at least one.
    fn locks(&self) -> Vec<LockHandle<AnyBackend>> {
        match self {
            Self::Lock(guard) => vec![guard.handle()],
            Self::All(guard) => guard.handles(),
            Self::Slot(permit) => vec![permit.handle()],
            Self::Lead(leadership) => vec![leadership.handle()],
        }
    }

    /// Returns the first lock by key.
    fn first(&self) -> LockHandle<AnyBackend> {
        self.locks().swap_remove(0)
    }

    pub(crate) fn fence(&self) -> Fence {
        self.first().fence()
    }

    pub(crate) fn remaining(&self) -> Duration {
        self.locks().iter().map(LockHandle::remaining).min().unwrap_or_default()
    }

    pub(crate) fn is_valid(&self) -> bool {
        !self.remaining().is_zero()
    }

    pub(crate) async fn lost(&self) -> LostReason {
        match self {
            Self::Lock(guard) => guard.lost().await,
            Self::All(guard) => guard.lost().await,
            Self::Slot(permit) => permit.lost().await,
            Self::Lead(leadership) => leadership.lost().await,
        }
    }

    pub(crate) async fn extend(&self, ttl: Ttl) -> syncguard::Result<ExtendOutcome> {
        match self {
            Self::All(guard) => guard.extend(ttl).await,
            one => one.first().extend(ttl).await,
        }
    }

    pub(crate) async fn release(&self) -> syncguard::Result<ReleaseOutcome> {
        match self {
            Self::Lock(guard) => guard.release().await,
            Self::All(guard) => guard.release().await,
            Self::Slot(permit) => permit.release().await,
            Self::Lead(leadership) => leadership.resign().await,
        }
    }

    /// Returns the environment variables for the command.
    pub(crate) fn variables(&self) -> Vec<(&'static str, String)> {
        let first = self.first();
        let mut variables = vec![
            ("SYNCGUARD_KEY", first.key().as_str().to_owned()),
            ("SYNCGUARD_FENCE", first.fence().to_string()),
        ];
        match self {
            Self::Slot(permit) => variables.push(("SYNCGUARD_SLOT", permit.slot().to_string())),
            Self::All(guard) => {
                let line = |(key, fence): (&Key, Fence)| format!("{fence} {}", key.as_str());
                let lines: Vec<String> = guard.fences().map(line).collect();
                variables.push(("SYNCGUARD_FENCES", lines.join("\n")));
            }
            Self::Lock(_) | Self::Lead(_) => {}
        }
        variables
    }
}
