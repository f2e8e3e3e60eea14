//! Two candidates, of which one leads; when it shuts down, the other takes over.
//! Run it with `cargo run --example leader`.

use std::time::Duration;

use syncguard::primitives::Role;
use syncguard::{Locker, MemoryBackend};

#[tokio::main]
async fn main() -> syncguard::Result<()> {
    // In production each replica has its own locker, on Redis, PostgreSQL or another shared store.
    let store = MemoryBackend::new();
    let mut candidates = Vec::new();
    for name in ["replica 1", "replica 2"] {
        let locker = Locker::builder(store.clone()).ttl(Duration::from_secs(5)).build()?;
        let election = locker.election("scheduler")?;
        let candidate = election.clone();
        let serving = tokio::spawn(async move {
            let work = |lead: syncguard::LockHandle<MemoryBackend>| async move {
                println!("{name} leads in term {}", lead.fence());
                loop {
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    if lead.ensure_valid().is_err() {
                        return;
                    }
                }
            };
            candidate.run(work).await
        });
        tokio::time::sleep(Duration::from_millis(50)).await;
        println!("{name} is {}", election.role());
        candidates.push((locker, election, serving));
    }
    let (first, _election, serving) = candidates.remove(0);
    first.shutdown().await?;
    serving.await.expect("no panic")?;

    let (second, election, serving) = candidates.remove(0);
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(election.role(), Role::Leading);
    println!("replica 2 is {}", election.role());
    second.shutdown().await?;
    serving.await.expect("no panic")
}
