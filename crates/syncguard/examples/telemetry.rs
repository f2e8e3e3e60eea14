//! Prints telemetry events: operations of the backend, waiting and holding in the engine.
//! Run it with `cargo run --example telemetry`.
//! It prints one line per event, with hashes instead of keys and lock ids.

use std::sync::Arc;

use syncguard::telemetry::{Event, QueuedSink};
use syncguard::{Locker, MemoryBackend};

#[tokio::main]
async fn main() -> syncguard::Result<()> {
    let sink = Arc::new(QueuedSink::new(|event| match event {
        Event::Operation(event) => {
            let result = if event.ok { "ok" } else { "fail" };
            println!("{} {result} {:?}", event.operation.as_str(), event.reason);
        }
        event => println!("{event:?}"),
    })?);
    let locker = Locker::builder(MemoryBackend::new()).telemetry(sink).build()?;

    let guard = locker.lock("customer:4711").await?;
    assert!(locker.try_lock("customer:4711").await?.is_none());
    guard.release().await?;
    locker.shutdown().await
}
