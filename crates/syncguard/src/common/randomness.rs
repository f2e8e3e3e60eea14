//! The operating system's randomness, fetched for several ids at once.

use std::cell::RefCell;
use std::process;

use super::error::{Error, ErrorCode, Result};

/// The bytes of one id.
pub(crate) type IdBytes = [u8; 16];

/// How many ids to fetch at once. A system call costs as much as everything else about an id.
const BATCH: usize = 32;

/// Random bytes that no id has used yet.
struct Reserve {
    ids: [IdBytes; BATCH],
    left: usize,
    /// The process that fetched the bytes: after a fork, parent and child must not use the same
    /// ids.
    process_id: u32,
}

impl Reserve {
    fn take(&mut self) -> Result<IdBytes> {
        let process_id = process::id();
        if self.left == 0 || self.process_id != process_id {
            self.left = 0;
            getrandom::fill(self.ids.as_flattened_mut()).map_err(|cause| {
                Error::new(ErrorCode::Internal, "the operating system provided no randomness")
                    .with_source(cause)
                    .without_effect()
            })?;
            (self.left, self.process_id) = (BATCH, process_id);
        }
        self.left -= 1;
        // Wipes the bytes, because an id is a secret.
        Ok(std::mem::take(&mut self.ids[self.left]))
    }
}

/// Returns random bytes for one id.
pub(crate) fn id_bytes() -> Result<IdBytes> {
    thread_local! {
        static RESERVE: RefCell<Reserve> =
            const { RefCell::new(Reserve { ids: [[0; 16]; BATCH], left: 0, process_id: 0 }) };
    }
    RESERVE.with_borrow_mut(Reserve::take)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_used_once_and_wiped() {
        let mut reserve = Reserve { ids: [[0; 16]; BATCH], left: 0, process_id: 0 };
        let drawn: Vec<_> = (0..2 * BATCH).map(|_| reserve.take().expect("randomness")).collect();
        for (i, id) in drawn.iter().enumerate() {
            assert!(drawn[i + 1..].iter().all(|other| other != id));
        }
        assert_eq!(reserve.left, 0);
        assert_eq!(reserve.ids, [[0; 16]; BATCH], "used up and wiped");
    }

    #[test]
    fn a_forked_process_fetches_its_own_bytes() {
        let mut reserve = Reserve { ids: [[0; 16]; BATCH], left: 0, process_id: 0 };
        reserve.take().expect("randomness");
        let parents = reserve.ids[reserve.left - 1];
        // As a child sees it after a fork.
        reserve.process_id = reserve.process_id.wrapping_add(1);
        assert_ne!(reserve.take().expect("randomness"), parents);
        assert_eq!(reserve.left, BATCH - 1, "fetched anew");
    }
}
