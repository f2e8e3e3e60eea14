//! What the examples lock: a few jobs that compete for two keys.

use std::time::Duration;

use syncguard::{ErrorCode, Locker, MemoryBackend};

/// Runs jobs that wait for each other, one that gives up, and one that loses its lock.
pub async fn run_jobs(locker: &Locker<MemoryBackend>) -> syncguard::Result<()> {
    let job = async |name: &str, work: Duration| {
        let guard = locker.lock("report:daily").label(name.to_owned()).await?;
        tokio::time::sleep(work).await;
        guard.release().await
    };
    let (first, second) = tokio::join!(
        job("first", Duration::from_millis(50)),
        job("second", Duration::from_millis(20)),
    );
    first?;
    second?;

    let guard = locker.lock("report:daily").await?;
    let timed_out = locker.lock("report:daily").timeout(Duration::from_millis(10)).await;
    assert_eq!(
        timed_out.map(drop).map_err(|error| error.code()),
        Err(ErrorCode::AcquisitionTimeout)
    );
    assert!(locker.try_lock("report:daily").await?.is_none(), "it is held");
    guard.release().await?;

    let short = locker.lock("import").ttl(Duration::from_millis(30)).await?;
    short.lost().await;
    Ok(())
}
