//! Randomness of the operating system, fetched for several ids at once.

use std::cell::RefCell;
use std::process;

use super::error::{Error, ErrorCode, Result};

/// The bytes of one id.
pub(crate) type IdBytes = [u8; 16];

/// How many ids are fetched at once. A call to the system costs as much as the rest of an id.
const BATCH: usize = 32;

/// Bytes that no id has used.
struct Reserve {
    ids: [IdBytes; BATCH],
    left: usize,
    /// The process that fetched them: after a fork parent and child would draw the same ids.
    process_id: u32,
}

impl Reserve {
    fn take(&mut self) -> Result<IdBytes> {
        let process_id = process::id();
        if self.left == 0 || self.process_id != process_id {
            self.left = 0;
            getrandom::fill(self.ids.as_flattened_mut()).map_err(|cause| {
                Error::new(ErrorCode::Internal, "the operating system gave no randomness")
                    .with_source(cause)
                    .without_effect()
            })?;
            (self.left, self.process_id) = (BATCH, process_id);
        }
        self.left -= 1;
        // What was drawn is not kept: an id is a secret.
        Ok(std::mem::take(&mut self.ids[self.left]))
    }
}

/// Draws the bytes of one id.
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
    fn nothing_is_drawn_twice_or_kept() {
        let mut reserve = Reserve { ids: [[0; 16]; BATCH], left: 0, process_id: 0 };
        let drawn: Vec<_> = (0..2 * BATCH).map(|_| reserve.take().expect("randomness")).collect();
        for (i, id) in drawn.iter().enumerate() {
            assert!(drawn[i + 1..].iter().all(|other| other != id));
        }
        assert_eq!(reserve.left, 0);
        assert_eq!(reserve.ids, [[0; 16]; BATCH], "used up and wiped");
    }

    #[test]
    fn another_process_draws_its_own() {
        let mut reserve = Reserve { ids: [[0; 16]; BATCH], left: 0, process_id: 0 };
        reserve.take().expect("randomness");
        let parents = reserve.ids[reserve.left - 1];
        // As a child sees it after a fork.
        reserve.process_id = reserve.process_id.wrapping_add(1);
        assert_ne!(reserve.take().expect("randomness"), parents);
        assert_eq!(reserve.left, BATCH - 1, "fetched anew");
    }
}
