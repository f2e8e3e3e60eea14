//! Cancels a wait with a token and by dropping the future; no lock is left behind.
//! Run it with `cargo run --example cancel`.
//! Both waits end early, and the key is free afterwards.

use std::time::Duration;

use syncguard::{CancellationToken, ErrorCode, LockBackend, LockOptions, Locker, MemoryBackend};

#[tokio::main]
async fn main() -> syncguard::Result<()> {
    let locker = Locker::new(MemoryBackend::new())?;
    let guard = locker.lock("deploy").await?;

    let token = CancellationToken::new();
    let waiter =
        locker.with_options(LockOptions::default().wait_forever().cancel(token.clone()))?;
    let waiting = tokio::spawn(async move { waiter.lock("deploy").await.map(drop) });
    tokio::time::sleep(Duration::from_millis(50)).await;
    token.cancel();
    let error = waiting.await.expect("no panic").expect_err("canceled");
    assert_eq!(error.code(), ErrorCode::Aborted);
    println!("canceled by its token: {error}");

    let dropped = tokio::time::timeout(Duration::from_millis(50), locker.lock("deploy")).await;
    assert!(dropped.is_err());
    println!("dropped after 50 ms");

    guard.release().await?;
    assert!(!locker.backend().is_locked(guard.key()).await?);
    println!("the key is free");
    locker.shutdown().await
}
