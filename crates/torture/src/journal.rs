//! Writes the events of a client process to its standard output, one line at a time.

use std::collections::HashMap;
use std::io::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use syncguard::{Error, Key, LockId};

use crate::history::{Event, Micros, micros, now};

/// What every key begins with. It must appear in no log and no error.
pub const CANARY: &str = "torture-canary-5e1d";

/// Returns the key with a number.
///
/// # Panics
///
/// Never panics, because the key is short.
#[must_use]
pub fn key_of(number: u32) -> Key {
    Key::new(format!("{CANARY}-{number}")).expect("valid")
}

/// Returns the number of a key.
#[must_use]
pub fn number_of(key: &Key) -> u32 {
    let number = key.as_str().rsplit('-').next();
    number.and_then(|number| number.parse().ok()).unwrap_or(u32::MAX)
}

/// Reports times at which this process did not run, from a thread of its own: because it was
/// stopped, or because the machine was busy. Ends when the callback returns `false`.
pub fn watch_gaps(mut report: impl FnMut(Micros, Micros) -> bool + Send + 'static) {
    const INTERVAL: Duration = Duration::from_millis(20);
    /// Less than any limit that is checked, by far.
    const LATE: Micros = 20_000;
    std::thread::spawn(move || {
        loop {
            let due = now() + micros(INTERVAL);
            std::thread::sleep(INTERVAL);
            let at = now();
            if at.saturating_sub(due) > LATE && !report(due, at) {
                return;
            }
        }
    });
}

/// The journal of a process.
#[derive(Debug, Default)]
pub struct Journal {
    numbers: AtomicU64,
    keys: Mutex<HashMap<LockId, u32>>,
}

impl Journal {
    /// Returns a new number for an operation or a call.
    pub fn number(&self) -> u64 {
        self.numbers.fetch_add(1, Ordering::Relaxed)
    }

    /// Writes an event. It is written when this returns, even if the process is killed then.
    pub fn write(&self, event: &Event) {
        let line = format!("{event}\n");
        // The coordinator is gone if this fails, and then this process ends too.
        drop(std::io::stdout().lock().write_all(line.as_bytes()));
    }

    /// Notes which key a lock id is for.
    pub fn note_key(&self, id: LockId, key: u32) {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner).insert(id, key);
    }

    /// Returns the key that a lock id is for.
    pub fn key_of(&self, id: LockId) -> Option<u32> {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner).get(&id).copied()
    }

    /// Notes the begin of a call, which returns when the value is dropped.
    pub fn call(self: &Arc<Self>, name: &str, key: u32, limit: Duration) -> OpenCall {
        let (call, at, name) = (self.number(), now(), name.to_owned());
        self.write(&Event::Call { call, at, name, key, limit: micros(limit) });
        OpenCall { journal: Arc::clone(self), call, result: None }
    }

    /// Checks that an error contains no key and no lock id.
    pub fn check(&self, error: &Error, id: Option<LockId>) {
        let text = format!("{error} {error:?}");
        if text.contains(CANARY) || id.is_some_and(|id| text.contains(id.expose())) {
            self.write(&Event::Leak { place: format!("an error with code {:?}", error.code()) });
        }
    }

    /// Reports times at which this process did not run, from a thread of its own.
    pub fn report_gaps(self: &Arc<Self>) {
        let journal = Arc::clone(self);
        watch_gaps(move |from, to| {
            journal.write(&Event::Gap { from, to });
            true
        });
    }
}

/// A call of the library that has not returned.
#[derive(Debug)]
pub struct OpenCall {
    journal: Arc<Journal>,
    call: u64,
    result: Option<String>,
}

impl OpenCall {
    /// Notes that the call returned.
    pub fn returned(mut self, result: &str) {
        self.result = Some(result.to_owned());
    }
}

impl Drop for OpenCall {
    fn drop(&mut self) {
        let result = self.result.take().unwrap_or_else(|| "dropped".to_owned());
        self.journal.write(&Event::Return { call: self.call, at: now(), result });
    }
}
