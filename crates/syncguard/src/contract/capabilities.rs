//! What a backend is and can do, as values for tools and tests.

use std::fmt;

use crate::common::fence::Fencing;

/// Whose clock decides whether a lock is alive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TimeAuthority {
    /// One clock for all clients: the store's, or this machine's when the store lives on it.
    Server,
    /// Every client's own clock. All of them must be synchronized.
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

/// What a backend is and can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// The backend's name: `"memory"`, `"redis"`, …
    pub backend: &'static str,
    /// Whether every grant carries a fence. The type [`Fencing`] says the same to the compiler.
    pub fencing: bool,
    /// Whose clock decides.
    pub time_authority: TimeAuthority,
    /// Whether an answered [undo](crate::ReleaseRequest::undo) is final: once the futures of the
    /// acquire have ended or were dropped, no copy of the request that is still under way can be
    /// granted after it. Where it is not, an undo that found nothing is repeated until the request
    /// can no longer matter.
    pub undo_is_final: bool,
}

impl Capabilities {
    /// The capabilities of a backend whose undo is not final.
    #[must_use]
    pub const fn new<F: Fencing>(backend: &'static str, time_authority: TimeAuthority) -> Self {
        Self { backend, fencing: F::SUPPORTED, time_authority, undo_is_final: false }
    }

    /// States that an answered undo is final.
    #[must_use]
    pub const fn with_final_undo(mut self) -> Self {
        self.undo_is_final = true;
        self
    }
}
