//! Five workers share two licenses.
//! Run it with `cargo run --example licenses`.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use syncguard::{Locker, MemoryBackend};

#[tokio::main]
async fn main() -> syncguard::Result<()> {
    let locker = Locker::new(MemoryBackend::new())?;
    let licenses = locker.semaphore("license", 2)?;
    let in_use = Arc::new(AtomicU32::new(0));
    let workers = (1..=5).map(|worker| {
        let (licenses, in_use) = (licenses.clone(), Arc::clone(&in_use));
        tokio::spawn(async move {
            let permit = licenses.acquire().await?;
            let count = in_use.fetch_add(1, Ordering::SeqCst) + 1;
            println!("worker {worker} uses license {}; {count} in use", permit.slot());
            assert!(count <= 2);
            tokio::time::sleep(Duration::from_millis(50)).await;
            in_use.fetch_sub(1, Ordering::SeqCst);
            permit.release().await
        })
    });
    for worker in workers.collect::<Vec<_>>() {
        worker.await.expect("no panic")?;
    }
    assert_eq!(licenses.available().await?, 2);
    locker.shutdown().await
}
