//! The sink for the `metrics` facade: what it counts, and that no label contains a key.
#![cfg(feature = "metrics")]

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use metrics::{
    Counter, CounterFn, Gauge, GaugeFn, Histogram, HistogramFn, Key, KeyName, Metadata, Recorder,
    SharedString, Unit,
};
use syncguard::backend::Layer;
use syncguard::telemetry::MetricsSink;
use syncguard::testing::{FaultLayer, Faulty, LocalClock};
use syncguard::{ErrorCode, LockOptions, Locker, MemoryBackend};

/// The sum of everything that was recorded, and how often, by name and labels.
#[derive(Clone, Debug, Default)]
struct Recorded(Arc<Mutex<BTreeMap<String, (u64, f64)>>>);

struct Metric(Recorded, String);

impl Metric {
    fn add(&self, value: f64) {
        let mut all = self.0.0.lock().expect("no panic");
        let (count, sum) = all.entry(self.1.clone()).or_default();
        *count += 1;
        *sum += value;
    }
}

impl CounterFn for Metric {
    fn increment(&self, value: u64) {
        self.add(u32::try_from(value).expect("small").into());
    }

    fn absolute(&self, _value: u64) {}
}

impl GaugeFn for Metric {
    fn increment(&self, value: f64) {
        self.add(value);
    }

    fn decrement(&self, value: f64) {
        self.add(-value);
    }

    fn set(&self, _value: f64) {}
}

impl HistogramFn for Metric {
    fn record(&self, value: f64) {
        self.add(value);
    }
}

impl Recorded {
    fn metric(&self, key: &Key) -> Arc<Metric> {
        let labels = key.labels().map(|label| format!("{}={}", label.key(), label.value()));
        let labels: Vec<_> = labels.collect();
        Arc::new(Metric(self.clone(), format!("{} {}", key.name(), labels.join(" "))))
    }

    /// How often a metric was updated, whatever its labels.
    fn count(&self, name: &str) -> u64 {
        let all = self.0.lock().expect("no panic");
        let matching = all.iter().filter(|(metric, _)| metric.starts_with(&format!("{name} ")));
        matching.map(|(_, (count, _))| count).sum()
    }

    /// The sum of a metric with exactly these labels.
    fn sum(&self, metric: &str) -> Option<f64> {
        self.0.lock().expect("no panic").get(metric).map(|(_, sum)| *sum)
    }
}

impl Recorder for Recorded {
    fn describe_counter(&self, _key: KeyName, _unit: Option<Unit>, _text: SharedString) {}

    fn describe_gauge(&self, _key: KeyName, _unit: Option<Unit>, _text: SharedString) {}

    fn describe_histogram(&self, _key: KeyName, _unit: Option<Unit>, _text: SharedString) {}

    fn register_counter(&self, key: &Key, _metadata: &Metadata<'_>) -> Counter {
        Counter::from_arc(self.metric(key))
    }

    fn register_gauge(&self, key: &Key, _metadata: &Metadata<'_>) -> Gauge {
        Gauge::from_arc(self.metric(key))
    }

    fn register_histogram(&self, key: &Key, _metadata: &Metadata<'_>) -> Histogram {
        Histogram::from_arc(self.metric(key))
    }
}

/// Runs work with a locker in virtual time, and returns what a sink recorded meanwhile.
fn recorded<Work: Future<Output = ()>>(
    sink: MetricsSink,
    work: impl FnOnce(Locker<Faulty<MemoryBackend>>, FaultLayer) -> Work,
) -> Recorded {
    let recorded = Recorded::default();
    metrics::with_local_recorder(&recorded, || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .start_paused(true)
            .build()
            .expect("a runtime");
        runtime.block_on(async {
            let faults = FaultLayer::default();
            let options = LockOptions::default().ttl(Duration::from_millis(300));
            let builder = Locker::builder(faults.layer(MemoryBackend::new()));
            let locker = builder.telemetry(Arc::new(sink)).options(options);
            let locker = locker.clock(LocalClock::Tokio).build().expect("in a runtime");
            work(locker, faults).await;
        });
    });
    recorded
}

#[test]
fn waiting_holding_contention_and_loss_are_counted_without_keys() {
    let recorded = recorded(MetricsSink::new(), |locker, _faults| async move {
        let guard = locker.lock("canary").await.expect("free");
        assert!(locker.try_lock("canary").await.expect("works").is_none());
        guard.lost().await;
        guard.release().await.expect("works");
    });
    for (metric, count) in [
        ("syncguard_operations_total", 3),
        ("syncguard_operation_seconds", 3),
        ("syncguard_acquired_total", 1),
        ("syncguard_contended_total", 1),
        ("syncguard_timed_out_total", 0),
        ("syncguard_wait_seconds", 2),
        ("syncguard_queue_depth", 2),
        ("syncguard_hold_seconds", 1),
        ("syncguard_hand_over_seconds", 0),
    ] {
        assert_eq!(recorded.count(metric), count, "{metric} {recorded:?}");
    }
    let contended = "syncguard_operations_total backend=memory operation=acquire outcome=locked";
    assert_eq!(recorded.sum(contended), Some(1.0));
    assert_eq!(recorded.sum("syncguard_lost_total backend=memory reason=expired"), Some(1.0));
    assert!(!format!("{recorded:?}").contains("canary"), "{recorded:?}");
}

#[test]
fn gauges_return_to_zero_and_hand_overs_are_measured() {
    let recorded = recorded(MetricsSink::new(), |locker, _faults| async move {
        let guard = locker.lock("k").await.expect("free");
        let impatient = locker.lock("k").timeout(Duration::from_millis(10)).await;
        assert_eq!(impatient.expect_err("held").code(), ErrorCode::AcquisitionTimeout);
        let hold = async {
            tokio::time::sleep(Duration::from_millis(20)).await;
            guard.release().await.expect("works");
        };
        let (next, ()) = tokio::join!(locker.lock("k"), hold);
        let id = next.expect("released").detach();
        let resumed = locker.resume(id).await.expect("works").expect("held");
        resumed.release().await.expect("works");
    });
    for gauge in ["syncguard_held_locks", "syncguard_queued_calls"] {
        assert_eq!(recorded.sum(&format!("{gauge} backend=memory")), Some(0.0), "{recorded:?}");
    }
    assert_eq!(recorded.count("syncguard_held_locks"), 6, "three guards");
    assert_eq!(recorded.count("syncguard_queued_calls"), 4, "two waits");
    assert_eq!(recorded.sum("syncguard_timed_out_total backend=memory"), Some(1.0));
    assert_eq!(recorded.count("syncguard_hand_over_seconds"), 1);
}

#[test]
fn renewals_that_fail_are_counted() {
    let recorded = recorded(MetricsSink::new(), |locker, faults| async move {
        let guard = locker.lock("k").ttl(Duration::from_secs(3)).renew().await.expect("free");
        // Past the first look at the lock in the store, so that the fault meets a renewal.
        tokio::time::sleep(Duration::from_millis(500)).await;
        faults.fail_next(ErrorCode::ServiceUnavailable);
        tokio::time::sleep(Duration::from_secs(2)).await;
        guard.release().await.expect("works");
    });
    assert_eq!(recorded.sum("syncguard_renewals_failed_total backend=memory"), Some(1.0));
    assert_eq!(recorded.count("syncguard_lost_total"), 0, "the next one succeeded");
}

#[test]
fn a_label_for_keys_is_chosen_by_the_user_and_bounded() {
    let kind = |key: &str| match key.split_once(':') {
        Some(("panic", _)) => panic!("a bug of the user"),
        Some((kind, _)) => Some(kind.to_owned()),
        None => None,
    };
    let recorded = recorded(MetricsSink::new().key_label(kind), |locker, _faults| async move {
        for key in ["job:canary", "job:43", "plain", "panic:1"] {
            locker.lock(key).await.expect("free").release().await.expect("works");
        }
        for number in 0..200 {
            let guard = locker.lock(format!("kind{number}:x")).await.expect("free");
            guard.release().await.expect("works");
        }
    });
    let acquired =
        |key: &str| recorded.sum(&format!("syncguard_acquired_total backend=memory{key}"));
    assert_eq!(acquired(" key=job"), Some(2.0));
    assert_eq!(acquired(""), Some(2.0), "without a label");
    assert_eq!(acquired(" key=kind98"), Some(1.0));
    assert_eq!(acquired(" key=kind99"), None);
    assert_eq!(acquired(" key=other"), Some(101.0));
    assert!(!format!("{recorded:?}").contains("canary"), "{recorded:?}");
}
