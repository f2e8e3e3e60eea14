//! The keys of the locks that elections and semaphores are made of.

use crate::common::error::Result;
use crate::common::key::Key;

/// What follows the name of an election.
const LEADER: &str = ":leader";
/// What stands between the name of a semaphore and the number of a slot.
const SLOT: &str = ":slot:";
/// What follows the name of a semaphore in the key of the lock that is held while several permits
/// are collected.
const GATE: &str = ":gate";

/// Returns the key of the lock of an election: `<name>:leader`.
pub fn leader_key(name: &Key) -> Result<Key> {
    Key::new(format!("{}{LEADER}", name.as_str()))
}

/// Returns the key of the lock of a semaphore's slot: `<name>:slot:<number>`.
pub fn slot_key(name: &Key, slot: u32) -> Result<Key> {
    Key::new(format!("{}{SLOT}{slot}", name.as_str()))
}

/// Returns the number of the slot of a semaphore that a key belongs to.
pub(super) fn slot_of(name: &Key, key: &Key) -> Option<u32> {
    key.as_str().strip_prefix(name.as_str())?.strip_prefix(SLOT)?.parse().ok()
}

pub(super) fn gate_key(name: &Key) -> Result<Key> {
    Key::new(format!("{}{GATE}", name.as_str()))
}
