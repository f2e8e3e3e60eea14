//! Notifications: directly within the process, and between processes through a small file next to
//! the lock file (the wake file).
//!
//! The wake file has a number for every group of keys. After a release is committed, the releasing
//! process writes a new number for the key's group. Processes with waiters watch the file, see
//! which numbers have changed, and wake the waiters for keys of these groups. A lost write only
//! delays waiters until they poll.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::waiters::WaiterSlots;
use crate::common::hash_id::number_of;
use crate::common::key::Key;
use crate::contract::notifier::{Notifier, Subscription};
use watch::Watch;

/// The number of groups of keys.
const GROUPS: usize = 256;
const BYTES: usize = 8;

type Numbers = [u64; GROUPS];

/// Publishes releases to other processes, and receives theirs.
#[derive(Debug)]
pub(super) struct SqliteListener {
    notifier: Notifier,
    /// Notified like the waiters, for holders and those who watch.
    changes: Notifier,
    waiters: Arc<WaiterSlots>,
    path: PathBuf,
    file: Mutex<Option<Arc<File>>>,
    /// The numbers last seen in the file, including those that this process wrote.
    seen: Mutex<Numbers>,
    watcher: Mutex<Watcher>,
}

/// The state of the thread that watches the file.
#[derive(Debug)]
enum Watcher {
    /// There is no thread; the next subscription starts one.
    Idle,
    Watching(Watch),
    /// The backend was dropped.
    Closed,
}

/// Returns the group of a key, which is the same in every process.
fn group_of(key: &Key) -> usize {
    let number = number_of(key.as_str());
    (number ^ (number >> 16)) as usize % GROUPS
}

impl SqliteListener {
    pub(super) fn new(lock_file: &Path) -> Self {
        let mut path = lock_file.as_os_str().to_owned();
        path.push("-wake");
        let path = PathBuf::from(path);
        let waiters = Arc::new(WaiterSlots::new(path.clone(), GROUPS * BYTES));
        let slots = Arc::clone(&waiters);
        Self {
            notifier: Notifier::with_idle_hook(move |key| slots.leave(key)),
            changes: Notifier::new(),
            waiters,
            path,
            file: Mutex::new(None),
            seen: Mutex::new([0; GROUPS]),
            watcher: Mutex::new(Watcher::Idle),
        }
    }

    /// Notifies waiters in this and in other processes that keys are free.
    pub(super) fn notify(&self, freed: &[Freed]) {
        for Freed { key, holder_age } in freed {
            self.notifier.notify(key, *holder_age);
            self.changes.notify(key, None);
            self.write(group_of(key), *holder_age);
        }
    }

    /// Subscribes to a key. Releases by other processes are reported only where files can be
    /// watched.
    pub(super) fn subscribe(self: &Arc<Self>, key: &Key) -> Subscription {
        let subscription = self.notifier.subscribe(key);
        self.waiters.enter(key);
        self.watch_file();
        subscription
    }

    /// Subscribes to changes of a key, in the same way, without counting as a waiter.
    pub(super) fn watch(self: &Arc<Self>, key: &Key) -> Subscription {
        let subscription = self.changes.subscribe(key);
        self.watch_file();
        subscription
    }

    /// Returns how many processes wait for a key.
    pub(super) fn waiters(&self, key: &Key) -> Option<u32> {
        self.waiters.count(key)
    }

    fn watch_file(self: &Arc<Self>) {
        // A concurrent subscription waits here until the first one watches the file.
        let mut watcher = locked(&self.watcher);
        if matches!(*watcher, Watcher::Idle) {
            if let Some(watch) = Watch::start(self) {
                *watcher = Watcher::Watching(watch);
            }
            self.set_working(matches!(*watcher, Watcher::Watching(_)));
        }
    }

    /// Watches the wake file that is at the path now, if one is watched. Call it when the lock file
    /// was replaced: if that happened by its directory, the watch did not notice.
    pub(super) fn watch_current_file(&self) {
        self.keep_watching(None, None);
    }

    fn set_working(&self, is_working: bool) {
        self.notifier.set_working(is_working);
        self.changes.set_working(is_working);
    }

    /// Ends the thread that watches the file, even if the file was deleted or replaced.
    pub(super) fn close(&self) {
        let watcher = std::mem::replace(&mut *locked(&self.watcher), Watcher::Closed);
        if let Watcher::Watching(watch) = watcher {
            watch.end();
        }
    }

    /// Returns the file that is at the path now, or `None` if it cannot be opened.
    fn file(&self) -> Option<Arc<File>> {
        let mut file = locked(&self.file);
        if file.as_ref().is_none_or(|file| !is_at(file, &self.path)) {
            *file = open(&self.path).map(Arc::new);
        }
        file.clone()
    }

    /// Writes a new number for a group, and marks it as seen so that it does not wake this process.
    fn write(&self, group: usize, holder_age: Option<Duration>) {
        let Some(file) = self.file() else { return };
        let Ok(random) = getrandom::u32() else { return };
        let number = with_holder_age(random, holder_age);
        {
            let mut seen = locked(&self.seen);
            // A number that another process wrote meanwhile must still wake the waiters here.
            if read_numbers(&file)[group] == seen[group] {
                seen[group] = number;
            }
        }
        // A lost notification only delays waiters until they poll.
        drop(write_at(&file, &number.to_le_bytes(), group * BYTES));
    }

    /// Reads the numbers, and wakes the waiters for keys of groups whose number has changed.
    fn look(&self) {
        let Some(numbers) = self.file().map(|file| read_numbers(&file)) else { return };
        let before = std::mem::replace(&mut *locked(&self.seen), numbers);
        let changed = |key: &Key| {
            let group = group_of(key);
            (before[group] != numbers[group]).then(|| holder_age_in(numbers[group]))
        };
        self.notifier.notify_matching(changed);
        self.changes.notify_matching(changed);
    }
}

/// A key that was released, and how long ago its holder had begun to wait for it.
#[derive(Debug)]
pub(super) struct Freed {
    pub(super) key: Key,
    pub(super) holder_age: Option<Duration>,
}

/// Returns a number for a group. The upper half differs from release to release; the lower half is
/// the age of the holder in milliseconds plus one, or zero if it is unknown.
fn with_holder_age(random: u32, holder_age: Option<Duration>) -> u64 {
    let age = holder_age.map_or(0, |age| age.as_millis().saturating_add(1));
    u64::from(random) << 32 | u64::from(u32::try_from(age).unwrap_or(u32::MAX))
}

fn holder_age_in(number: u64) -> Option<Duration> {
    let age = number & u64::from(u32::MAX);
    age.checked_sub(1).map(Duration::from_millis)
}

fn locked<T>(value: &Mutex<T>) -> MutexGuard<'_, T> {
    value.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Opens or creates the file. A symbolic link is refused: another user who can write to the
/// directory could otherwise make this process write to a file of that user's choice.
#[cfg(unix)]
pub(super) fn open(path: &Path) -> Option<File> {
    use std::os::unix::fs::OpenOptionsExt;
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(false);
    options.custom_flags(rustix::fs::OFlags::NOFOLLOW.bits().cast_signed());
    let file = options.open(path).ok()?;
    file.metadata().is_ok_and(|metadata| metadata.is_file()).then_some(file)
}

#[cfg(not(unix))]
pub(super) fn open(path: &Path) -> Option<File> {
    File::options().read(true).write(true).create(true).truncate(false).open(path).ok()
}

/// Returns whether the file is still the one at the path, which other processes use.
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
pub(super) fn write_at(file: &File, bytes: &[u8], offset: usize) -> std::io::Result<()> {
    std::os::unix::fs::FileExt::write_all_at(file, bytes, offset as u64)
}

#[cfg(not(unix))]
pub(super) fn write_at(_file: &File, _bytes: &[u8], _offset: usize) -> std::io::Result<()> {
    Ok(())
}

/// Fills the bytes from the file, and returns how many there were.
#[cfg(unix)]
pub(super) fn read_at(file: &File, bytes: &mut [u8], offset: usize) -> usize {
    use std::os::unix::fs::FileExt;
    let mut filled = 0;
    while let Ok(count @ 1..) = file.read_at(&mut bytes[filled..], (offset + filled) as u64) {
        filled += count;
    }
    filled
}

#[cfg(not(unix))]
pub(super) fn read_at(_file: &File, _bytes: &mut [u8], _offset: usize) -> usize {
    0
}

/// Returns the numbers in the file. A number that was never written is zero.
fn read_numbers(file: &File) -> Numbers {
    let mut bytes = [0; GROUPS * BYTES];
    read_at(file, &mut bytes, 0);
    let mut numbers = [0; GROUPS];
    for (number, chunk) in numbers.iter_mut().zip(bytes.as_chunks::<BYTES>().0) {
        *number = u64::from_le_bytes(*chunk);
    }
    numbers
}

#[cfg(target_os = "linux")]
mod watch {
    use std::fs::File;
    use std::mem::MaybeUninit;
    use std::os::fd::OwnedFd;
    use std::sync::Arc;

    use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};

    use super::{SqliteListener, Watcher};

    /// An inotify watch on the wake file.
    #[derive(Debug)]
    pub(super) struct Watch {
        inotify: Arc<OwnedFd>,
        descriptor: i32,
        file: Arc<File>,
    }

    impl Watch {
        /// Watches the file in a new thread. Returns `None` if that is not possible.
        pub(super) fn start(listener: &Arc<SqliteListener>) -> Option<Self> {
            let inotify = Arc::new(inotify::init(CreateFlags::CLOEXEC).ok()?);
            let watch = Self::add(listener, inotify)?;
            let (listener, inotify) = (Arc::clone(listener), Arc::clone(&watch.inotify));
            let thread = std::thread::Builder::new().name("syncguard-sqlite-wake".to_owned());
            thread.spawn(move || serve(&listener, &inotify)).is_ok().then_some(watch)
        }

        /// Watches the file that is at the path now.
        fn add(listener: &SqliteListener, inotify: Arc<OwnedFd>) -> Option<Self> {
            /// Deletion is reported as a change of attributes, because we keep the file open.
            const EVENTS: WatchFlags = WatchFlags::MODIFY
                .union(WatchFlags::ATTRIB)
                .union(WatchFlags::MOVE_SELF)
                .union(WatchFlags::DONT_FOLLOW);
            const TRIES: u32 = 3;
            for _ in 0..TRIES {
                let file = listener.file()?;
                let descriptor = inotify::add_watch(&inotify, &listener.path, EVENTS).ok()?;
                // Another file may have replaced this one between the two calls.
                if super::is_at(&file, &listener.path) {
                    *super::locked(&listener.seen) = super::read_numbers(&file);
                    return Some(Self { inotify, descriptor, file });
                }
                inotify::remove_watch(&inotify, descriptor).unwrap_or_default();
            }
            None
        }

        /// Removes the watch. The kernel reports that to the thread, which then checks whether to
        /// end.
        pub(super) fn end(&self) {
            // The kernel may have removed the watch already.
            inotify::remove_watch(&self.inotify, self.descriptor).unwrap_or_default();
        }
    }

    fn serve(listener: &SqliteListener, inotify: &OwnedFd) {
        let mut buffer = [MaybeUninit::uninit(); 1024];
        let mut events = Reader::new(inotify, &mut buffer);
        let mut has_changed = false;
        loop {
            match events.next() {
                Ok(event) => {
                    let is_unwatched = event.events().contains(ReadFlags::IGNORED);
                    let unwatched = is_unwatched.then_some(event.wd());
                    let is_write = event.events().contains(ReadFlags::MODIFY);
                    if !is_write && !listener.keep_watching(Some(inotify), unwatched) {
                        return;
                    }
                    has_changed |= is_write;
                    if has_changed && events.is_buffer_empty() {
                        has_changed = false;
                        listener.look();
                    }
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(_) => return listener.stop_watching(&mut super::locked(&listener.watcher)),
            }
        }
    }

    impl SqliteListener {
        /// Watches the file that is at the path now, unless it is watched already. Returns `false`
        /// if the thread that calls this must end: `own` is what it reads.
        pub(super) fn keep_watching(&self, own: Option<&OwnedFd>, unwatched: Option<i32>) -> bool {
            let mut watcher = super::locked(&self.watcher);
            let Watcher::Watching(watch) = &*watcher else { return false };
            if own.is_some_and(|own| !std::ptr::eq(own, Arc::as_ptr(&watch.inotify))) {
                // Another thread serves the listener now.
                return false;
            }
            if unwatched != Some(watch.descriptor) && super::is_at(&watch.file, &self.path) {
                return true;
            }
            watch.end();
            // Releases in the meantime were missed, so all waiters are woken when it works again.
            self.set_working(false);
            let Some(watch) = Watch::add(self, Arc::clone(&watch.inotify)) else {
                self.stop_watching(&mut watcher);
                return false;
            };
            *watcher = Watcher::Watching(watch);
            self.set_working(true);
            true
        }

        /// Stops watching. Waiters poll, and the next subscription tries again.
        fn stop_watching(&self, watcher: &mut Watcher) {
            if matches!(watcher, Watcher::Watching(_)) {
                *watcher = Watcher::Idle;
            }
            self.set_working(false);
        }
    }
}

#[cfg(not(target_os = "linux"))]
mod watch {
    use std::sync::Arc;

    use super::SqliteListener;

    /// On this platform, waiters notice releases by other processes only by polling.
    #[derive(Debug)]
    pub(super) struct Watch;

    impl Watch {
        pub(super) fn start(_waker: &Arc<SqliteListener>) -> Option<Self> {
            None
        }

        pub(super) fn end(&self) {}
    }

    impl SqliteListener {
        pub(super) fn keep_watching(
            &self,
            _own: Option<&std::fs::File>,
            _unwatched: Option<i32>,
        ) -> bool {
            false
        }
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn no_wake_file_panics() {
        let directory = test_support::TempDir::new();
        let listener = SqliteListener::new(&directory.path().join("locks.db"));
        let key = Key::new("k").expect("valid");
        let _subscription = listener.notifier.subscribe(&key);
        let mut written = vec![0_u8; GROUPS * BYTES];
        written[group_of(&key) * BYTES..][..BYTES]
            .copy_from_slice(&with_holder_age(7, Some(Duration::from_secs(3))).to_le_bytes());
        let seeds: [&[u8]; 3] = [&written, b"", b"short"];
        test_support::fuzz("sqlite_wake_file", env!("CARGO_MANIFEST_DIR"), seeds, |bytes| {
            let file = listener.file().expect("a file");
            file.set_len(bytes.len() as u64).expect("written");
            write_at(&file, bytes, 0).expect("written");
            let numbers = read_numbers(&file);
            let expected = bytes.chunks(BYTES).map(|chunk| {
                let mut number = [0; BYTES];
                number[..chunk.len()].copy_from_slice(chunk);
                u64::from_le_bytes(number)
            });
            assert!(expected.zip(numbers).all(|(expected, number)| expected == number));
            listener.look();
            format!("{:?}", holder_age_in(numbers[group_of(&key)]).map(|age| age.as_secs().min(9)))
        });
    }
}
