//! The notes of recent breaks, for backends that keep them in memory.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

use crate::common::hash_id::HashId;
use crate::common::holder::BreakNote;

/// The latest notes by the hash of the lock id.
#[derive(Debug, Default)]
pub(crate) struct BreakNotes(Mutex<VecDeque<(HashId, BreakNote)>>);

impl BreakNotes {
    const MOST: usize = 256;

    pub(crate) fn add(&self, lock_id: HashId, note: BreakNote) {
        let mut notes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        notes.push_back((lock_id, note));
        if notes.len() > Self::MOST {
            notes.pop_front();
        }
    }

    pub(crate) fn of(&self, lock_id: HashId) -> Option<BreakNote> {
        let notes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let found = notes.iter().rev().find(|(broken, _note)| *broken == lock_id);
        found.map(|(_broken, note)| note.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::common::hash_id::hash_key;

    #[test]
    fn the_latest_note_of_a_lock_id_is_found_until_too_many_follow() {
        let notes = BreakNotes::default();
        let note = |reason: &str| BreakNote::new(None, Some(reason));
        let id = |number: usize| hash_key(&number.to_string());
        notes.add(id(0), note("first"));
        notes.add(id(0), note("second"));
        assert_eq!(notes.of(id(0)), Some(note("second")));
        assert_eq!(notes.of(id(1)), None);
        for number in 1..BreakNotes::MOST {
            notes.add(id(number), note("other"));
        }
        assert_eq!(notes.of(id(0)), Some(note("second")), "one of as many as are kept");
        notes.add(id(BreakNotes::MOST), note("other"));
        assert_eq!(notes.of(id(0)), None);
        assert_eq!(notes.of(id(1)), Some(note("other")));
    }
}
