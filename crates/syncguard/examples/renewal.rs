//! Renews a lock with a short TTL during long work, and stops the work when the lock is lost.
//! Run it with `cargo run --example renewal`.
//! Work that takes three TTLs completes; work that takes longer than `max_hold` is stopped.

use std::time::Duration;

use syncguard::{ErrorCode, LockOptions, Locker, MemoryBackend};

#[tokio::main]
async fn main() -> syncguard::Result<()> {
    let options = LockOptions::default()
        .ttl(Duration::from_millis(200))
        .renew()
        .max_hold(Duration::from_secs(1));
    let locker = Locker::builder(MemoryBackend::new()).options(options).build()?;

    let work = |time| move |_held| async move { tokio::time::sleep(time).await };
    locker.with_lock("report", work(Duration::from_millis(600))).await?;
    println!("600 ms of work under a lock with a TTL of 200 ms: done");

    let cut_off = locker.with_lock("report", work(Duration::from_mins(1))).await;
    let error = cut_off.expect_err("a minute is longer than max_hold");
    assert_eq!(error.code(), ErrorCode::Aborted);
    println!("a minute of work: {error}");

    locker.shutdown().await
}
