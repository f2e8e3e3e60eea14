//! The conformance kit on the memory backend, on its erased and shared forms and under telemetry.
#![cfg(feature = "conformance")]

use std::sync::Arc;

use syncguard::AnyBackend;
use syncguard::backend::Layer;
use syncguard::conformance::{Fixture, MemoryFixture, Yielding};
use syncguard::telemetry::{TelemetryLayer, TracingSink};

mod plain {
    syncguard::conformance_tests!(super::MemoryFixture::new());
}

mod erased {
    use super::{AnyBackend, Fixture};

    syncguard::conformance_tests!(super::MemoryFixture::new().wrapped(AnyBackend::new));
}

mod shared {
    use super::{Arc, Fixture};

    syncguard::conformance_tests!(super::MemoryFixture::new().wrapped(Arc::new));
}

mod under_telemetry {
    use super::{Arc, Fixture, Layer, TelemetryLayer, TracingSink};

    syncguard::conformance_tests!({
        let layer = TelemetryLayer::new(Arc::new(TracingSink));
        super::MemoryFixture::new().wrapped(move |backend| layer.layer(backend))
    });
}

/// With await points on both sides of every effect, for the cases that drop futures.
mod yielding {
    use super::{Fixture, Yielding};

    syncguard::conformance_tests!(super::MemoryFixture::new().wrapped(Yielding::new));
}

/// Twenty thousand random histories, each compared with the model step by step.
#[test]
fn twenty_thousand_histories_match_the_model() {
    syncguard::conformance::run(async {
        for seed in 0..20_000 {
            let fixture = MemoryFixture::new();
            syncguard::conformance::model::check_history(&fixture, seed, 30).await;
        }
    });
    test_support::figure("histories that match the model: memory", 20_000);
}
