//! Exports traces to OpenTelemetry: prints the spans of waiting for a lock and of holding it.
//! Run it with `cargo run -p telemetry-examples --bin opentelemetry`.

use opentelemetry::trace::TracerProvider;
use opentelemetry_sdk::trace::SdkTracerProvider;
use syncguard::{Locker, MemoryBackend};
use tracing::Instrument;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::{Layer, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    // A program in production uses `opentelemetry-otlp` in place of this exporter.
    let exporter = opentelemetry_stdout::SpanExporter::default();
    let provider = SdkTracerProvider::builder().with_simple_exporter(exporter).build();
    let layer = tracing_opentelemetry::layer().with_tracer(provider.tracer("example"));
    // The spans of the library are at DEBUG.
    let shown = Targets::new()
        .with_target("syncguard::engine", LevelFilter::DEBUG)
        .with_target("opentelemetry", LevelFilter::INFO);
    tracing_subscriber::registry().with(layer.with_filter(shown)).init();

    let locker = Locker::new(MemoryBackend::new())?;
    let request = tracing::info_span!("request");
    telemetry_examples::run_jobs(&locker).instrument(request).await?;
    locker.shutdown().await?;

    provider.shutdown()?;
    Ok(())
}
