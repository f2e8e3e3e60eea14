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
