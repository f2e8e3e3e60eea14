//! Wake-ups: within the process at once, and between processes by a small file beside the locks.
//!
//! The file has a number for every group of keys. Whoever releases a lock writes a new number for
//! its group, after the commit; processes with waiters watch the file, see which numbers have
//! changed, and wake who waits for a key of these groups. A write that is lost costs time, nothing
//! else.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::common::hash_id::number_of;
use crate::common::key::Key;
use crate::contract::wake::{WakeHub, WakeUps};

/// Groups of keys; one more is for the end of a watcher.
const GROUPS: usize = 256;
const LAST: usize = GROUPS;
const BYTES: usize = 8;

type Numbers = [u64; GROUPS + 1];

/// Tells of releases, and hears of them.
#[derive(Debug)]
pub(super) struct Waker {
    hub: WakeHub,
    path: PathBuf,
    file: Mutex<Option<Arc<File>>>,
    /// What was last seen in the file, our own writes included.
    seen: Mutex<Numbers>,
    is_watching: Mutex<bool>,
    is_closed: AtomicBool,
}

/// The same in every process.
fn group_of(key: &Key) -> usize {
    let number = number_of(key.as_str());
    (number ^ (number >> 16)) as usize % GROUPS
}

impl Waker {
    pub(super) fn new(lock_file: &Path) -> Self {
        let mut path = lock_file.as_os_str().to_owned();
        path.push("-wake");
        Self {
            hub: WakeHub::new(),
            path: path.into(),
            file: Mutex::new(None),
            seen: Mutex::new([0; GROUPS + 1]),
            is_watching: Mutex::new(false),
            is_closed: AtomicBool::new(false),
        }
    }

    /// Tells of keys that are free now, here and in other processes.
    pub(super) fn tell(&self, freed: &[Key]) {
        for key in freed {
            self.hub.wake(key);
            self.write(group_of(key));
        }
    }

    /// Subscribes; between processes only where files can be watched.
    pub(super) fn subscribe(self: &Arc<Self>, key: &Key) -> WakeUps {
        let wake_ups = self.hub.subscribe(key);
        // Whoever comes second waits until the first is watching.
        let mut is_watching = locked(&self.is_watching);
        if !*is_watching {
            *is_watching = watch::start(self);
            self.hub.set_working(*is_watching);
        }
        wake_ups
    }

    /// Ends the watcher.
    pub(super) fn close(&self) {
        self.is_closed.store(true, Ordering::SeqCst);
        if *locked(&self.is_watching) {
            self.write(LAST);
        }
    }

    /// The file that is at the path now, or none where it cannot be opened.
    fn file(&self) -> Option<Arc<File>> {
        let mut file = locked(&self.file);
        if file.as_ref().is_none_or(|file| is_deleted(file)) {
            let mut options = File::options();
            let opened =
                options.read(true).write(true).create(true).truncate(false).open(&self.path);
            *file = opened.ok().map(Arc::new);
        }
        file.clone()
    }

    /// Writes a new number for a group, and does not take it for another's.
    fn write(&self, group: usize) {
        let Some(file) = self.file() else { return };
        let Ok(number) = getrandom::u64() else { return };
        if group != LAST {
            let mut seen = locked(&self.seen);
            // What another has written meanwhile must still be heard.
            if read_numbers(&file)[group] == seen[group] {
                seen[group] = number;
            }
        }
        // A wake-up that is lost costs time, nothing else.
        drop(write_at(&file, &number.to_le_bytes(), group * BYTES));
    }

    /// Reads the numbers, and wakes who waits for a key of a group whose number has changed.
    fn look(&self) {
        let Some(numbers) = self.file().map(|file| read_numbers(&file)) else { return };
        let changed: Vec<bool> = {
            let mut seen = locked(&self.seen);
            let changed = seen.iter().zip(&numbers).map(|(old, new)| old != new).collect();
            *seen = numbers;
            changed
        };
        self.hub.wake_matching(|key| changed[group_of(key)]);
    }
}

fn locked<T>(value: &Mutex<T>) -> MutexGuard<'_, T> {
    value.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether the file has lost its name, so that nobody else can find it any more.
#[cfg(unix)]
fn is_deleted(file: &File) -> bool {
    file.metadata().is_ok_and(|metadata| std::os::unix::fs::MetadataExt::nlink(&metadata) == 0)
}

#[cfg(not(unix))]
fn is_deleted(_file: &File) -> bool {
    false
}

#[cfg(unix)]
fn write_at(file: &File, bytes: &[u8], offset: usize) -> std::io::Result<()> {
    std::os::unix::fs::FileExt::write_all_at(file, bytes, offset as u64)
}

#[cfg(not(unix))]
fn write_at(_file: &File, _bytes: &[u8], _offset: usize) -> std::io::Result<()> {
    Ok(())
}

/// The numbers in the file; what was never written is zero.
#[cfg(unix)]
fn read_numbers(file: &File) -> Numbers {
    use std::os::unix::fs::FileExt;
    let mut bytes = [0; (GROUPS + 1) * BYTES];
    let mut filled = 0;
    while let Ok(count @ 1..) = file.read_at(&mut bytes[filled..], filled as u64) {
        filled += count;
    }
    let mut numbers = [0; GROUPS + 1];
    for (number, chunk) in numbers.iter_mut().zip(bytes.as_chunks::<BYTES>().0) {
        *number = u64::from_le_bytes(*chunk);
    }
    numbers
}

#[cfg(not(unix))]
fn read_numbers(_file: &File) -> Numbers {
    [0; GROUPS + 1]
}

#[cfg(target_os = "linux")]
mod watch {
    use std::fs::File;
    use std::mem::MaybeUninit;
    use std::os::fd::OwnedFd;
    use std::sync::Arc;
    use std::sync::atomic::Ordering;

    use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};

    use super::Waker;

    /// Watches the file from now on, in a thread of its own; `false` where that is not possible.
    pub(super) fn start(waker: &Arc<Waker>) -> bool {
        let Some(file) = waker.file() else { return false };
        let watched = || -> rustix::io::Result<OwnedFd> {
            let watched = inotify::init(CreateFlags::CLOEXEC)?;
            inotify::add_watch(
                &watched,
                &waker.path,
                WatchFlags::MODIFY | WatchFlags::DELETE_SELF,
            )?;
            Ok(watched)
        };
        let Ok(watched) = watched() else { return false };
        *super::locked(&waker.seen) = super::read_numbers(&file);
        let name = "syncguard-sqlite-wake".to_owned();
        let waker = Arc::clone(waker);
        std::thread::Builder::new().name(name).spawn(move || serve(&waker, watched, &file)).is_ok()
    }

    fn serve(waker: &Waker, watched: OwnedFd, watched_file: &File) {
        let mut buffer = [MaybeUninit::uninit(); 1024];
        let mut events = Reader::new(watched, &mut buffer);
        while !waker.is_closed.load(Ordering::SeqCst) {
            match events.next() {
                Ok(event) if event.events().contains(ReadFlags::MODIFY) => {
                    if events.is_buffer_empty() {
                        waker.look();
                    }
                }
                // Deleted, perhaps: whoever waits next watches the new one.
                Ok(_) if !super::is_deleted(watched_file) => {}
                Err(rustix::io::Errno::INTR) => {}
                _ => break,
            }
        }
        *super::locked(&waker.is_watching) = false;
        waker.hub.set_working(false);
    }
}

#[cfg(not(target_os = "linux"))]
mod watch {
    use std::sync::Arc;

    use super::Waker;

    /// Other processes are noticed by polling.
    pub(super) fn start(_waker: &Arc<Waker>) -> bool {
        false
    }
}
