//! Transfers money between accounts, with the locks of both.
//! Run it with `cargo run --example transfer`.
//! No transfer is lost, and opposite transfers do not deadlock.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use syncguard::{Locker, MemoryBackend};

#[tokio::main]
async fn main() -> syncguard::Result<()> {
    let locker = Locker::new(MemoryBackend::new())?;
    let accounts = ["alice", "bob", "carol"].map(|name| (name, 100_i64));
    let balances = Arc::new(Mutex::new(HashMap::from(accounts)));
    let transfers = [("alice", "bob", 30), ("bob", "alice", 10), ("carol", "bob", 5)];
    let tasks = transfers.map(|(from, to, amount)| {
        let (locker, balances) = (locker.clone(), Arc::clone(&balances));
        tokio::spawn(async move {
            let guard = locker.lock_all([from, to].map(|name| format!("account:{name}"))).await?;
            let read = |name| balances.lock().expect("no panic")[name];
            let (before_from, before_to) = (read(from), read(to));
            // Other tasks run here; without both locks, this would lose their updates.
            tokio::task::yield_now().await;
            let write = |name, balance| balances.lock().expect("no panic").insert(name, balance);
            write(from, before_from - amount);
            write(to, before_to + amount);
            println!("{from} paid {to} {amount} with {} fences", guard.fences().count());
            guard.release().await
        })
    });
    for task in tasks {
        task.await.expect("no panic")?;
    }
    let balances = balances.lock().expect("no panic").clone();
    println!("{balances:?}");
    assert_eq!(balances, HashMap::from([("alice", 80), ("bob", 125), ("carol", 95)]));
    locker.shutdown().await
}
