//! Protects a resource with fences: it refuses the write of a holder that lost its lock.
//! Run it with `cargo run --example fencing`.
//! The resource refuses the write of the paused holder.

use std::sync::Mutex;
use std::time::Duration;

use syncguard::{Fence, LockOptions, Locker, MemoryBackend};

/// A resource that remembers the largest fence it has seen.
#[derive(Default)]
struct Account {
    state: Mutex<(Option<Fence>, i64)>,
}

impl Account {
    fn deposit(&self, fence: Fence, amount: i64) -> Result<i64, &'static str> {
        let mut state = self.state.lock().expect("no thread panics while it holds the mutex");
        if state.0.is_some_and(|largest| fence < largest) {
            return Err("refused: a later holder has already written");
        }
        *state = (Some(fence), state.1 + amount);
        Ok(state.1)
    }
}

#[tokio::main]
async fn main() -> syncguard::Result<()> {
    let options = LockOptions::default().ttl(Duration::from_millis(100));
    let locker = Locker::builder(MemoryBackend::new()).options(options).build()?;
    let account = Account::default();

    let paused = locker.lock("account:7").await?;
    println!("the first holder has fence {} and is paused", paused.fence());
    tokio::time::sleep(Duration::from_millis(1200)).await; // longer than TTL plus tolerance

    let next = locker.lock("account:7").await?;
    println!("the second holder has fence {}", next.fence());
    println!("its deposit: {:?}", account.deposit(next.fence(), 100));
    println!("the first holder continues: {:?}", account.deposit(paused.fence(), 50));
    assert!(account.deposit(paused.fence(), 50).is_err());

    drop((paused, next));
    locker.shutdown().await
}
