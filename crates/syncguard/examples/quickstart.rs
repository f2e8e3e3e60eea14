//! Acquires a lock, works under it, and releases it.
//! Run it with `cargo run --example quickstart`.
//! Three workers hold the lock one after the other, each with a larger fence.

use std::time::Duration;

use syncguard::{Locker, MemoryBackend};

#[tokio::main]
async fn main() -> syncguard::Result<()> {
    let locker = Locker::new(MemoryBackend::new())?;

    // Three workers want the same lock at the same time; they acquire it one after the other.
    let workers: Vec<_> = (1..=3)
        .map(|worker| {
            let locker = locker.clone();
            tokio::spawn(async move {
                let guard = locker.lock("invoice:42").await?;
                println!("worker {worker} holds the lock with fence {}", guard.fence());
                tokio::time::sleep(Duration::from_millis(50)).await;
                guard.release().await
            })
        })
        .collect();
    for worker in workers {
        worker.await.expect("a worker does not panic")?;
    }

    // Background releases stop when the runtime ends, so wait for them.
    locker.shutdown().await
}
