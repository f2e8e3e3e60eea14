//! The sink for the `metrics` facade: what it counts, and that no label contains a key.
#![cfg(feature = "metrics")]

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use metrics::{
    Counter, CounterFn, Gauge, Histogram, HistogramFn, Key, KeyName, Metadata, Recorder,
    SharedString, Unit,
};
use syncguard::telemetry::{EventSink, MetricsSink};
use syncguard::testing::LocalClock;
use syncguard::{LockOptions, Locker, MemoryBackend, Ttl};

/// How often each metric was updated, by name and labels.
#[derive(Clone, Debug, Default)]
struct Touches(Arc<Mutex<BTreeMap<String, u64>>>);

struct Touch(Touches, String);

impl Touch {
    fn note(&self) {
        *self.0.0.lock().expect("no panic").entry(self.1.clone()).or_default() += 1;
    }
}

impl CounterFn for Touch {
    fn increment(&self, _value: u64) {
        self.note();
    }

    fn absolute(&self, _value: u64) {}
}

impl HistogramFn for Touch {
    fn record(&self, _value: f64) {
        self.note();
    }
}

impl Touches {
    fn touch(&self, key: &Key) -> Arc<Touch> {
        let labels: Vec<_> = key.labels().map(|label| format!("{label:?}")).collect();
        Arc::new(Touch(self.clone(), format!("{} {}", key.name(), labels.join(" "))))
    }
}

impl Recorder for Touches {
    fn describe_counter(&self, _key: KeyName, _unit: Option<Unit>, _text: SharedString) {}

    fn describe_gauge(&self, _key: KeyName, _unit: Option<Unit>, _text: SharedString) {}

    fn describe_histogram(&self, _key: KeyName, _unit: Option<Unit>, _text: SharedString) {}

    fn register_counter(&self, key: &Key, _metadata: &Metadata<'_>) -> Counter {
        Counter::from_arc(self.touch(key))
    }

    fn register_gauge(&self, _key: &Key, _metadata: &Metadata<'_>) -> Gauge {
        Gauge::noop()
    }

    fn register_histogram(&self, key: &Key, _metadata: &Metadata<'_>) -> Histogram {
        Histogram::from_arc(self.touch(key))
    }
}

#[test]
fn waiting_holding_contention_and_loss_are_counted_without_keys() {
    let touches = Touches::default();
    metrics::with_local_recorder(&touches, || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .start_paused(true)
            .build()
            .expect("a runtime");
        runtime.block_on(async {
            let sink: Arc<dyn EventSink> = Arc::new(MetricsSink);
            let ttl = Ttl::new(Duration::from_millis(50)).expect("valid");
            let builder =
                Locker::builder(MemoryBackend::new()).telemetry(sink).clock(LocalClock::Tokio);
            let locker = builder.options(LockOptions::default().ttl(ttl)).build();
            let locker = locker.expect("in a runtime");
            let guard = locker.lock("canary").await.expect("free");
            assert!(locker.try_lock("canary").await.expect("works").is_none());
            guard.lost().await;
            guard.release().await.expect("works");
        });
    });
    let counts = touches.0.lock().expect("no panic").clone();
    let count = |name: &str| {
        let matching = counts.iter().filter(|(metric, _)| metric.starts_with(name));
        matching.map(|(_, count)| count).sum::<u64>()
    };
    assert_eq!(count("syncguard_operations_total"), 3, "{counts:?}");
    assert_eq!(count("syncguard_operation_seconds"), 3);
    assert_eq!(count("syncguard_contended_total"), 1);
    assert_eq!(count("syncguard_wait_seconds"), 2);
    assert_eq!(count("syncguard_queue_depth"), 2);
    assert_eq!(count("syncguard_hold_seconds"), 1);
    assert_eq!(count("syncguard_lost_total"), 1);
    assert!(!format!("{counts:?}").contains("canary"), "{counts:?}");
}
