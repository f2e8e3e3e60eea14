//! The properties of a backend, as values for tools and tests.

use std::fmt;

use crate::common::fence::Fencing;

/// The clock that decides whether a lock is alive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TimeAuthority {
    /// One clock for all clients: the store's, or this machine's when the store lives on it.
    Server,
    /// Each client's own clock. All of them must be synchronized.
    Client,
}

impl fmt::Display for TimeAuthority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Server => "server",
            Self::Client => "client",
        })
    }
}

/// The properties of a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// The name of the backend: `"memory"`, `"redis"`, …
    pub backend: &'static str,
    /// Whether every grant has a fence. The type [`Fencing`] tells the compiler the same.
    pub fencing: bool,
    /// The clock that decides whether a lock is alive.
    pub time_authority: TimeAuthority,
    /// Whether an [undo](crate::backend::ReleaseRequest::undo) that returned is final: once the
    /// futures of the acquire have completed or were dropped, no copy of the request that is still
    /// in flight can be granted. If it is not final, the locker repeats an undo that found nothing
    /// until the request can no longer take effect.
    pub undo_is_final: bool,
    /// The number of shards that keys are distributed over, if the store has shards. Lock ids made
    /// for it name the shard of their lock.
    pub shards: Option<u16>,
}

impl Capabilities {
    /// Creates the capabilities of a backend whose undo is not final.
    #[must_use]
    pub const fn new<F: Fencing>(backend: &'static str, time_authority: TimeAuthority) -> Self {
        Self { backend, fencing: F::SUPPORTED, time_authority, undo_is_final: false, shards: None }
    }

    /// States that an undo that returned is final: it leaves a marker by which a late copy of the
    /// acquire gets [`AlreadyUsed`](crate::backend::AcquireOutcome::AlreadyUsed), or nothing can be
    /// in flight. A layer that delays or repeats calls must withdraw this.
    #[must_use]
    pub const fn with_final_undo(mut self) -> Self {
        self.undo_is_final = true;
        self
    }

    /// States that keys are distributed over this many shards.
    #[cfg(feature = "redis")]
    pub(crate) const fn with_shards(mut self, shards: u16) -> Self {
        self.shards = Some(shards);
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_authority_has_a_word() {
        assert_eq!(TimeAuthority::Server.to_string(), "server");
        assert_eq!(TimeAuthority::Client.to_string(), "client");
    }
}
