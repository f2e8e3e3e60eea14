//! Exports metrics to Prometheus: prints what a scrape would get.
//! Run it with `cargo run -p telemetry-examples --bin prometheus`.

use std::sync::Arc;
use std::time::Duration;

use metrics_exporter_prometheus::PrometheusBuilder;
use syncguard::telemetry::MetricsSink;
use syncguard::{Locker, MemoryBackend};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Without buckets, histograms are exported as summaries, which the dashboard cannot add up.
    let buckets = [0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0, 300.0];
    // A program with an HTTP server returns `exporter.render()` from its own route.
    let exporter = PrometheusBuilder::new().set_buckets(&buckets)?.install_recorder()?;

    // `report:daily` and `report:weekly` share the label `report`.
    let sink = MetricsSink::new().key_label(|key| key.split(':').next().map(str::to_owned));
    let locker = Locker::builder(MemoryBackend::new()).telemetry(Arc::new(sink)).build()?;
    telemetry_examples::run_jobs(&locker).await?;
    locker.shutdown().await?;

    // A lock that is lost is reported after its work has been told to stop. A scrape comes later.
    tokio::time::sleep(Duration::from_millis(100)).await;
    println!("{}", exporter.render());
    Ok(())
}
