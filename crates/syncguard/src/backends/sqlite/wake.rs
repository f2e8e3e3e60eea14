//! Wake-ups: within the process at once, and between processes by a small file beside the locks.
//!
//! The file has a number for every group of keys. Whoever releases a lock writes a new number for
//! its group, after the commit; processes with waiters watch the file, see which numbers have
//! changed, and wake who waits for a key of these groups. A write that is lost costs time, nothing
//! else.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::common::hash_id::number_of;
use crate::common::key::Key;
use crate::contract::wake::{WakeHub, WakeUps};
use watch::Watch;

/// Groups of keys.
const GROUPS: usize = 256;
const BYTES: usize = 8;

type Numbers = [u64; GROUPS];

/// Tells of releases, and hears of them.
#[derive(Debug)]
pub(super) struct Waker {
    hub: WakeHub,
    path: PathBuf,
    file: Mutex<Option<Arc<File>>>,
    /// What was last seen in the file, our own writes included.
    seen: Mutex<Numbers>,
    watcher: Mutex<Watcher>,
}

/// What the thread that watches the file does.
#[derive(Debug)]
enum Watcher {
    /// There is none; the next subscription starts it.
    Idle,
    Watching(Watch),
    /// The backend is gone.
    Closed,
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
            seen: Mutex::new([0; GROUPS]),
            watcher: Mutex::new(Watcher::Idle),
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
        let mut watcher = locked(&self.watcher);
        if matches!(*watcher, Watcher::Idle) {
            if let Some(watch) = Watch::start(self) {
                *watcher = Watcher::Watching(watch);
            }
            self.hub.set_working(matches!(*watcher, Watcher::Watching(_)));
        }
        wake_ups
    }

    /// Ends the thread that watches, whatever has become of the file.
    pub(super) fn close(&self) {
        let watcher = std::mem::replace(&mut *locked(&self.watcher), Watcher::Closed);
        if let Watcher::Watching(watch) = watcher {
            watch.end();
        }
    }

    /// The file that is at the path now, or none where it cannot be opened.
    fn file(&self) -> Option<Arc<File>> {
        let mut file = locked(&self.file);
        if file.as_ref().is_none_or(|file| !is_at(file, &self.path)) {
            *file = open(&self.path).map(Arc::new);
        }
        file.clone()
    }

    /// Writes a new number for a group, and does not take it for another's.
    fn write(&self, group: usize) {
        let Some(file) = self.file() else { return };
        let Ok(number) = getrandom::u64() else { return };
        {
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

/// Opens or creates the file. A symbolic link is refused: others may be able to write to the
/// directory, and must not choose a file of ours to be written to.
#[cfg(unix)]
fn open(path: &Path) -> Option<File> {
    use std::os::unix::fs::OpenOptionsExt;
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(false);
    options.custom_flags(rustix::fs::OFlags::NOFOLLOW.bits().cast_signed());
    let file = options.open(path).ok()?;
    file.metadata().is_ok_and(|metadata| metadata.is_file()).then_some(file)
}

#[cfg(not(unix))]
fn open(path: &Path) -> Option<File> {
    File::options().read(true).write(true).create(true).truncate(false).open(path).ok()
}

/// Whether the file is the one at the path, where others look for it.
#[cfg(unix)]
fn is_at(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let identity = |metadata: std::fs::Metadata| (metadata.dev(), metadata.ino());
    let found = std::fs::symlink_metadata(path).map(identity);
    found.is_ok_and(|found| file.metadata().map(identity).is_ok_and(|ours| ours == found))
}

#[cfg(not(unix))]
fn is_at(_file: &File, _path: &Path) -> bool {
    true
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
    let mut bytes = [0; GROUPS * BYTES];
    let mut filled = 0;
    while let Ok(count @ 1..) = file.read_at(&mut bytes[filled..], filled as u64) {
        filled += count;
    }
    let mut numbers = [0; GROUPS];
    for (number, chunk) in numbers.iter_mut().zip(bytes.as_chunks::<BYTES>().0) {
        *number = u64::from_le_bytes(*chunk);
    }
    numbers
}

#[cfg(not(unix))]
fn read_numbers(_file: &File) -> Numbers {
    [0; GROUPS]
}

#[cfg(target_os = "linux")]
mod watch {
    use std::fs::File;
    use std::mem::MaybeUninit;
    use std::os::fd::OwnedFd;
    use std::sync::Arc;

    use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};

    use super::{Waker, Watcher};

    /// The file as the kernel watches it for us.
    #[derive(Debug)]
    pub(super) struct Watch {
        inotify: Arc<OwnedFd>,
        descriptor: i32,
        file: Arc<File>,
    }

    impl Watch {
        /// Watches the file from now on, in a thread of its own; `None` where that is not possible.
        pub(super) fn start(waker: &Arc<Waker>) -> Option<Self> {
            let inotify = Arc::new(inotify::init(CreateFlags::CLOEXEC).ok()?);
            let watch = Self::add(waker, inotify)?;
            let (waker, inotify) = (Arc::clone(waker), Arc::clone(&watch.inotify));
            let thread = std::thread::Builder::new().name("syncguard-sqlite-wake".to_owned());
            thread.spawn(move || serve(&waker, &inotify)).is_ok().then_some(watch)
        }

        /// Watches the file that is at the path now.
        fn add(waker: &Waker, inotify: Arc<OwnedFd>) -> Option<Self> {
            /// A deleted file is one whose attributes change: we have it open, so it is not gone.
            const EVENTS: WatchFlags = WatchFlags::MODIFY
                .union(WatchFlags::ATTRIB)
                .union(WatchFlags::MOVE_SELF)
                .union(WatchFlags::DONT_FOLLOW);
            const TRIES: u32 = 3;
            for _ in 0..TRIES {
                let file = waker.file()?;
                let descriptor = inotify::add_watch(&inotify, &waker.path, EVENTS).ok()?;
                // The path may have come to name another file between the two.
                if super::is_at(&file, &waker.path) {
                    *super::locked(&waker.seen) = super::read_numbers(&file);
                    return Some(Self { inotify, descriptor, file });
                }
                inotify::remove_watch(&inotify, descriptor).unwrap_or_default();
            }
            None
        }

        /// Ends the thread: the kernel reports that nothing is watched, and the thread looks why.
        pub(super) fn end(&self) {
            // It may have ended already.
            inotify::remove_watch(&self.inotify, self.descriptor).unwrap_or_default();
        }
    }

    fn serve(waker: &Waker, inotify: &OwnedFd) {
        let mut buffer = [MaybeUninit::uninit(); 1024];
        let mut events = Reader::new(inotify, &mut buffer);
        let mut has_changed = false;
        loop {
            match events.next() {
                Ok(event) => {
                    let is_unwatched = event.events().contains(ReadFlags::IGNORED);
                    let unwatched = is_unwatched.then_some(event.wd());
                    let is_write = event.events().contains(ReadFlags::MODIFY);
                    if !is_write && !waker.keep_watching(unwatched) {
                        return;
                    }
                    has_changed |= is_write;
                    if has_changed && events.is_buffer_empty() {
                        has_changed = false;
                        waker.look();
                    }
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(_) => return waker.stop_watching(&mut super::locked(&waker.watcher)),
            }
        }
    }

    impl Waker {
        /// Watches the file that is at the path now, if it is not the one that is watched already;
        /// `false` when the thread has to end.
        fn keep_watching(&self, unwatched: Option<i32>) -> bool {
            let mut watcher = super::locked(&self.watcher);
            let Watcher::Watching(watch) = &*watcher else { return false };
            if unwatched != Some(watch.descriptor) && super::is_at(&watch.file, &self.path) {
                return true;
            }
            watch.end();
            // What was released meanwhile, nobody has told: everybody is woken when it works again.
            self.hub.set_working(false);
            let Some(watch) = Watch::add(self, Arc::clone(&watch.inotify)) else {
                self.stop_watching(&mut watcher);
                return false;
            };
            *watcher = Watcher::Watching(watch);
            self.hub.set_working(true);
            true
        }

        /// Whoever waits polls; the next subscription tries again.
        fn stop_watching(&self, watcher: &mut Watcher) {
            if matches!(watcher, Watcher::Watching(_)) {
                *watcher = Watcher::Idle;
            }
            self.hub.set_working(false);
        }
    }
}

#[cfg(not(target_os = "linux"))]
mod watch {
    use std::sync::Arc;

    use super::Waker;

    /// Other processes are noticed by polling.
    #[derive(Debug)]
    pub(super) struct Watch;

    impl Watch {
        pub(super) fn start(_waker: &Arc<Waker>) -> Option<Self> {
            None
        }

        pub(super) fn end(&self) {}
    }
}
