//! Acquires locks in a program without an async runtime.
//! Run it with `cargo run --example blocking --features blocking`.
//! Four threads increment a counter that only the lock protects.

use std::sync::atomic::{AtomicU32, Ordering};

use syncguard::{MemoryBackend, blocking::Locker};

fn main() -> syncguard::Result<()> {
    let locker = Locker::new(MemoryBackend::new())?;
    let counter = AtomicU32::new(0);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..25 {
                    let add = |_held: &_| {
                        let read = counter.load(Ordering::SeqCst);
                        std::thread::yield_now();
                        counter.store(read + 1, Ordering::SeqCst);
                    };
                    locker.with_lock("counter", add).expect("the lock is acquired in time");
                }
            });
        }
    });
    println!("four threads counted to {}", counter.load(Ordering::SeqCst));
    assert_eq!(counter.load(Ordering::SeqCst), 100);
    Ok(())
}
