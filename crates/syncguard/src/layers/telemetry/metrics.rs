//! Records events as metrics through the `metrics` facade. No label contains a key, unless you ask
//! for it.

use std::collections::HashSet;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};

use metrics::{Label, SharedString, counter, gauge, histogram};

use crate::common::key::Key;
use crate::contract::event::{
    EngineEvent, EngineEventKind, EventSink, LockEvent, Operation, Reason, WaitOutcome,
};

/// Records counters, gauges and histograms through the `metrics` facade.
///
/// | metric | kind | labels besides `backend` |
/// |---|---|---|
/// | `syncguard_operations_total` | counter | `operation`, `outcome` (`ok` or the reason) |
/// | `syncguard_operation_seconds` | histogram | `operation`, `outcome` |
/// | `syncguard_acquired_total` | counter | |
/// | `syncguard_contended_total` | counter | |
/// | `syncguard_timed_out_total` | counter | |
/// | `syncguard_lost_total` | counter | `reason` |
/// | `syncguard_renewals_failed_total` | counter | |
/// | `syncguard_wait_seconds` | histogram | `outcome` |
/// | `syncguard_hold_seconds` | histogram | |
/// | `syncguard_hand_over_seconds` | histogram | |
/// | `syncguard_queue_depth` | histogram | |
/// | `syncguard_held_locks` | gauge | |
/// | `syncguard_queued_calls` | gauge | |
///
/// Pass it to [`LockerBuilder::telemetry`](crate::LockerBuilder::telemetry). A
/// [`TelemetryLayer`](crate::telemetry::TelemetryLayer) sends only operations: the first two, and
/// `syncguard_contended_total`.
///
/// ```
/// use std::sync::Arc;
/// use syncguard::telemetry::MetricsSink;
/// use syncguard::{Locker, MemoryBackend};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> syncguard::Result<()> {
/// // `job:42` and `job:43` are counted together.
/// let kind = |key: &str| key.split(':').next().map(str::to_owned);
/// let sink = MetricsSink::new().key_label(kind);
/// let locker = Locker::builder(MemoryBackend::new()).telemetry(Arc::new(sink)).build()?;
/// # locker.shutdown().await
/// # }
/// ```
#[derive(Clone, Debug, Default)]
pub struct MetricsSink {
    key_label: Option<Arc<KeyLabel>>,
}

type Choose = dyn Fn(&str) -> Option<String> + Send + Sync;

/// Chooses the value of the label `key`.
struct KeyLabel {
    choose: Box<Choose>,
    /// The values so far.
    seen: Mutex<HashSet<String>>,
}

impl KeyLabel {
    /// The most values. Further keys share the value `other`, because every value is a time series.
    const MOST: usize = 100;

    fn of(&self, key: &Key) -> Option<SharedString> {
        // A panic in a user's function must never break a lock.
        let chosen = catch_unwind(AssertUnwindSafe(|| (self.choose)(key.as_str()))).ok()??;
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        if seen.contains(&chosen) {
            return Some(chosen.into());
        }
        if seen.len() >= Self::MOST {
            return Some("other".into());
        }
        seen.insert(chosen.clone());
        Some(chosen.into())
    }
}

impl fmt::Debug for KeyLabel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeyLabel").finish_non_exhaustive()
    }
}

impl MetricsSink {
    /// Creates a sink without a label for keys.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds the label `key` to every metric except those of operations, with the value that
    /// `choose` returns for a key; `None` for no label. It receives raw keys: return a kind of key,
    /// not the key itself. After 100 different values, further ones become `other`.
    #[must_use]
    pub fn key_label(
        mut self,
        choose: impl Fn(&str) -> Option<String> + Send + Sync + 'static,
    ) -> Self {
        let (choose, seen) = (Box::new(choose), Mutex::default());
        self.key_label = Some(Arc::new(KeyLabel { choose, seen }));
        self
    }

    /// Returns the labels that every metric of a lock has.
    fn labels(&self, backend: &'static str, key: Option<&Key>) -> Vec<Label> {
        let mut labels = vec![label("backend", backend)];
        let key = self.key_label.as_ref().zip(key).and_then(|(of, key)| of.of(key));
        labels.extend(key.map(|key| Label::new("key", key)));
        labels
    }
}

fn label(name: &'static str, value: &'static str) -> Label {
    Label::from_static_parts(name, value)
}

/// Returns labels with one more.
fn with(labels: &[Label], name: &'static str, value: &'static str) -> Vec<Label> {
    let mut labels = labels.to_vec();
    labels.push(label(name, value));
    labels
}

impl EventSink for MetricsSink {
    fn is_inline(&self) -> bool {
        true
    }

    fn wants_keys(&self) -> bool {
        self.key_label.is_some()
    }

    fn operation(&self, event: &LockEvent) {
        let outcome = match event.reason {
            Some(reason) => reason.as_str(),
            None if event.ok => "ok",
            None => "fail",
        };
        let labels = vec![
            label("backend", event.backend),
            label("operation", event.operation.as_str()),
            label("outcome", outcome),
        ];
        counter!("syncguard_operations_total", labels.clone()).increment(1);
        histogram!("syncguard_operation_seconds", labels).record(event.elapsed);
        if event.operation == Operation::Acquire && event.reason == Some(Reason::Locked) {
            let labels = self.labels(event.backend, event.key.as_ref());
            counter!("syncguard_contended_total", labels).increment(1);
        }
    }

    fn engine(&self, event: &EngineEvent) {
        let labels = self.labels(event.backend, event.key.as_ref());
        match &event.kind {
            EngineEventKind::Waiting => gauge!("syncguard_queued_calls", labels).increment(1),
            EngineEventKind::Waited {
                outcome,
                waited,
                was_queued,
                hand_over,
                queued_behind,
                ..
            } => {
                if *was_queued {
                    gauge!("syncguard_queued_calls", labels.clone()).decrement(1);
                }
                if *outcome == WaitOutcome::TimedOut {
                    counter!("syncguard_timed_out_total", labels.clone()).increment(1);
                }
                if let Some(hand_over) = hand_over {
                    histogram!("syncguard_hand_over_seconds", labels.clone()).record(*hand_over);
                }
                histogram!("syncguard_queue_depth", labels.clone()).record(*queued_behind);
                let labels = with(&labels, "outcome", outcome.as_str());
                histogram!("syncguard_wait_seconds", labels).record(*waited);
            }
            EngineEventKind::Acquired => {
                counter!("syncguard_acquired_total", labels.clone()).increment(1);
                gauge!("syncguard_held_locks", labels).increment(1);
            }
            EngineEventKind::Held { held } => {
                gauge!("syncguard_held_locks", labels.clone()).decrement(1);
                histogram!("syncguard_hold_seconds", labels).record(*held);
            }
            EngineEventKind::Lost { reason } => {
                let labels = with(&labels, "reason", reason.as_str());
                counter!("syncguard_lost_total", labels).increment(1);
            }
            EngineEventKind::RenewalFailed { .. } => {
                counter!("syncguard_renewals_failed_total", labels).increment(1);
            }
        }
    }
}
