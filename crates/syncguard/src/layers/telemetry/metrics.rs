//! Records events as metrics through the `metrics` facade. No label contains a key.

use metrics::{counter, histogram};

use crate::contract::event::{EngineEvent, EventSink, LockEvent, Operation, Reason};

/// Records counters and histograms through the `metrics` facade.
///
/// | metric | kind | labels |
/// |---|---|---|
/// | `syncguard_operations_total` | counter | `operation`, `result` (`ok` or the reason) |
/// | `syncguard_operation_seconds` | histogram | `operation` |
/// | `syncguard_contended_total` | counter | |
/// | `syncguard_wait_seconds` | histogram | `outcome` |
/// | `syncguard_queue_depth` | histogram | |
/// | `syncguard_hold_seconds` | histogram | |
/// | `syncguard_lost_total` | counter | `reason` |
///
/// Pass it to [`LockerBuilder::telemetry`](crate::LockerBuilder::telemetry). A
/// [`TelemetryLayer`](crate::telemetry::TelemetryLayer) sends only the first three.
#[derive(Clone, Copy, Debug, Default)]
pub struct MetricsSink;

impl EventSink for MetricsSink {
    fn is_inline(&self) -> bool {
        true
    }

    fn operation(&self, event: &LockEvent) {
        let operation = event.operation.as_str();
        let result = match event.reason {
            Some(reason) => reason.as_str(),
            None if event.ok => "ok",
            None => "fail",
        };
        counter!("syncguard_operations_total", "operation" => operation, "result" => result)
            .increment(1);
        histogram!("syncguard_operation_seconds", "operation" => operation).record(event.elapsed);
        if event.operation == Operation::Acquire && event.reason == Some(Reason::Locked) {
            counter!("syncguard_contended_total").increment(1);
        }
    }

    fn engine(&self, event: &EngineEvent) {
        match event {
            EngineEvent::Waited { outcome, waited, queued_behind, .. } => {
                histogram!("syncguard_wait_seconds", "outcome" => outcome.as_str()).record(*waited);
                // The queue of one key in this process, as the wait found it.
                histogram!("syncguard_queue_depth").record(*queued_behind);
            }
            EngineEvent::Held { held, .. } => {
                histogram!("syncguard_hold_seconds").record(*held);
            }
            EngineEvent::Lost { reason, .. } => {
                counter!("syncguard_lost_total", "reason" => reason.as_str()).increment(1);
            }
        }
    }
}
