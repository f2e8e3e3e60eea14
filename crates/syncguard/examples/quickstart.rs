//! Takes a lock, works under it, gives it back.
//! Run it with `cargo run --example quickstart`.
//! You see who holds the lock, with growing fences, one after the other.

use std::time::Duration;

use syncguard::{Locker, MemoryBackend};

#[tokio::main]
async fn main() -> syncguard::Result<()> {
    let locker = Locker::new(MemoryBackend::new())?;

    // Three workers want the same thing at the same time; they get it one after the other.
    let workers: Vec<_> = (1..=3)
        .map(|worker| {
            let locker = locker.clone();
            tokio::spawn(async move {
                let mut guard = locker.lock("invoice:42").await?;
                println!("worker {worker} holds the lock with fence {}", guard.fence());
                tokio::time::sleep(Duration::from_millis(50)).await;
                guard.release().await
            })
        })
        .collect();
    for worker in workers {
        worker.await.expect("a worker does not panic")?;
    }

    // Releases in the background end with the runtime, so wait for them before.
    locker.shutdown().await
}
