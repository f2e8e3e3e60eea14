//! Tests that take too long for CI: `cargo xtask soak`.
#![cfg(feature = "conformance")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use syncguard::conformance::{Fixture, MemoryFixture, Yielding};
use syncguard::{Key, LockBackend, LockOptions, Locker};

#[test]
#[ignore = "takes minutes; run it with cargo xtask soak"]
fn a_million_histories_match_the_model() {
    syncguard::conformance::run(async {
        for seed in 0..1_000_000 {
            syncguard::conformance::model::check_history(&MemoryFixture::new(), seed, 30).await;
        }
    });
}

/// Tasks take a lock and cancel at random moments, for a minute: a lock never has two holders, and
/// at the end every key is free.
#[test]
#[ignore = "takes minutes; run it with cargo xtask soak"]
fn a_minute_of_random_cancellations_leaves_no_lock() {
    const KEYS: u64 = 4;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    runtime.expect("a runtime").block_on(async {
        let fixture = MemoryFixture::new();
        let backend = Yielding::new(fixture.backend().await);
        let options = LockOptions::default().timeout(Duration::from_secs(5));
        let locker = Locker::builder(backend).options(options).build().expect("in a runtime");
        let inside: Arc<Vec<AtomicU64>> = Arc::new((0..KEYS).map(|_| AtomicU64::new(0)).collect());
        let end = Instant::now() + Duration::from_mins(1);
        let tasks: Vec<_> = (0..16_u64)
            .map(|task| {
                let (locker, inside) = (locker.clone(), Arc::clone(&inside));
                tokio::spawn(async move {
                    let (mut random, mut taken) = (task + 1, 0_u64);
                    while Instant::now() < end {
                        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(task);
                        let number = (random >> 33) % KEYS;
                        let patience = Duration::from_micros((random >> 40) % 300);
                        let lock = locker.lock(format!("key {number}"));
                        if let Ok(Ok(guard)) = tokio::time::timeout(patience, lock).await {
                            let slot = &inside[usize::try_from(number).expect("small")];
                            assert_eq!(slot.fetch_add(1, Ordering::SeqCst), 0, "two holders");
                            tokio::task::yield_now().await;
                            slot.fetch_sub(1, Ordering::SeqCst);
                            taken += 1;
                            if random.is_multiple_of(3) {
                                guard.release().await.expect("works");
                            }
                        }
                    }
                    taken
                })
            })
            .collect();
        let mut taken = 0;
        for task in tasks {
            taken += task.await.expect("no panic");
        }
        locker.shutdown().await.expect("all releases end");
        for number in 0..KEYS {
            let key = Key::new(format!("key {number}")).expect("valid");
            assert!(!locker.backend().is_locked(&key).await.expect("works"));
        }
        println!("{taken} locks taken and released");
        assert!(taken > 1000);
    });
}
