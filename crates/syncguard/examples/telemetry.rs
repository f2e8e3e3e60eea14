//! Listens to what happens: operations at the backend, waiting and holding in the engine.
//! Run it with `cargo run --example telemetry`.
//! You see one line per event, with hashes in place of keys and lock ids.

use std::sync::Arc;

use syncguard::{Event, Layer, Locker, MemoryBackend, QueuedSink, TelemetryLayer};

#[tokio::main]
async fn main() -> syncguard::Result<()> {
    let sink = Arc::new(QueuedSink::new(|event| match event {
        Event::Operation(event) => {
            let result = if event.ok { "ok" } else { "fail" };
            println!("{} {result} {:?}", event.operation.as_str(), event.reason);
        }
        event => println!("{event:?}"),
    })?);
    let backend = TelemetryLayer::new(Arc::<QueuedSink>::clone(&sink)).layer(MemoryBackend::new());
    let locker = Locker::builder(backend).observer(sink).build()?;

    let mut guard = locker.lock("customer:4711").await?;
    assert!(locker.try_lock("customer:4711").await?.is_none());
    guard.release().await?;
    locker.shutdown().await
}
