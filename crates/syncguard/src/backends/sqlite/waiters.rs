//! Which processes wait for which keys, in the wake file behind its numbers.
//!
//! A process that waits for a key writes its process id and the hash of the key into a free slot,
//! and clears it when it no longer waits. The slot of a process that has ended is free. All of this
//! is for display: two processes that take the same slot at once are counted as one.

use std::collections::HashMap;
use std::fs::File;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use super::listener::{open, read_at, write_at};
use crate::common::hash_id::number_of;
use crate::common::key::Key;

const SLOTS: usize = 512;
/// The process id, four bytes that are zero, and the hash of the key.
const BYTES: usize = 16;

/// The slots of the wake file.
#[derive(Debug)]
pub(super) struct WaiterSlots {
    path: PathBuf,
    /// Where the slots begin.
    offset: usize,
    /// The slots of this process.
    own: Mutex<HashMap<Key, usize>>,
}

impl WaiterSlots {
    pub(super) fn new(path: PathBuf, offset: usize) -> Self {
        Self { path, offset, own: Mutex::default() }
    }

    /// Records that this process waits for a key, if a slot is free.
    pub(super) fn enter(&self, key: &Key) {
        let mut own = self.own.lock().unwrap_or_else(PoisonError::into_inner);
        if own.contains_key(key) {
            return;
        }
        let Some(file) = open(&self.path) else { return };
        let slots = self.read(&file);
        let is_free = |slot: usize| slots.get(slot).is_none_or(|(pid, _)| !is_running(*pid));
        // Processes begin at different places, so that they rarely take the same slot.
        let first = std::process::id() as usize;
        let mut places = (0..SLOTS).map(|place| (first + place) % SLOTS);
        if let Some(slot) =
            places.find(|slot| is_free(*slot) && !own.values().any(|mine| mine == slot))
            && self.write(&file, slot, std::process::id(), hash_of(key))
        {
            own.insert(key.clone(), slot);
        }
    }

    /// Records that this process no longer waits for a key.
    pub(super) fn leave(&self, key: &Key) {
        let slot = self.own.lock().unwrap_or_else(PoisonError::into_inner).remove(key);
        if let (Some(slot), Some(file)) = (slot, open(&self.path)) {
            self.write(&file, slot, 0, 0);
        }
    }

    /// Returns how many processes wait for a key; `None` where the system does not tell which
    /// processes run.
    pub(super) fn count(&self, key: &Key) -> Option<u32> {
        if !cfg!(target_os = "linux") {
            return None;
        }
        let hash = hash_of(key);
        let mut waiting: Vec<u32> = self
            .read(&open(&self.path)?)
            .into_iter()
            .filter(|(pid, waits_for)| *waits_for == hash && is_running(*pid))
            .map(|(pid, _)| pid)
            .collect();
        waiting.sort_unstable();
        waiting.dedup();
        u32::try_from(waiting.len()).ok()
    }

    fn read(&self, file: &File) -> Vec<(u32, u64)> {
        let mut bytes = vec![0; SLOTS * BYTES];
        let filled = read_at(file, &mut bytes, self.offset);
        bytes.truncate(filled);
        let slot = |slot: &[u8; BYTES]| {
            let number = |at: usize| {
                slot[at..]
                    .iter()
                    .take(8)
                    .rev()
                    .fold(0, |number, byte| number << 8 | u64::from(*byte))
            };
            (u32::try_from(number(0)).unwrap_or(0), number(8))
        };
        bytes.as_chunks::<BYTES>().0.iter().map(slot).collect()
    }

    fn write(&self, file: &File, slot: usize, pid: u32, hash: u64) -> bool {
        let mut bytes = [0; BYTES];
        bytes[..4].copy_from_slice(&pid.to_le_bytes());
        bytes[8..].copy_from_slice(&hash.to_le_bytes());
        write_at(file, &bytes, self.offset + slot * BYTES).is_ok()
    }
}

fn hash_of(key: &Key) -> u64 {
    let other = number_of(&format!("waiter {}", key.as_str()));
    u64::from(number_of(key.as_str())) << 32 | u64::from(other)
}

/// Returns whether a process of this machine, as far as it can be seen from here, is running.
fn is_running(pid: u32) -> bool {
    pid != 0 && std::path::Path::new(&format!("/proc/{pid}")).exists()
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn waiting_processes_are_counted_and_those_that_ended_are_not() {
        let path = std::env::temp_dir().join(format!("syncguard-waiters-{}", std::process::id()));
        let slots = WaiterSlots::new(path.clone(), 2048);
        let [a, b] = ["a", "b"].map(|text| Key::new(text).expect("valid"));
        assert_eq!(slots.count(&a), Some(0));
        slots.enter(&a);
        slots.enter(&a);
        slots.enter(&b);
        assert_eq!((slots.count(&a), slots.count(&b)), (Some(1), Some(1)));
        let file = open(&path).expect("opens");
        // Process 1 always runs; the other number is larger than any process id.
        assert!(slots.write(&file, 7, 1, hash_of(&a)));
        assert!(slots.write(&file, 8, u32::MAX, hash_of(&a)));
        assert_eq!(slots.count(&a), Some(2));
        slots.leave(&a);
        assert_eq!((slots.count(&a), slots.count(&b)), (Some(1), Some(1)));
        std::fs::remove_file(path).expect("removed");
    }
}
