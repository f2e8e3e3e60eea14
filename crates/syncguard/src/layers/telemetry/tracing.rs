//! Records events as `tracing` events.

use tracing::{debug, warn};

use crate::common::hash_id::HashId;
use crate::contract::event::{EngineEvent, EngineEventKind, EventSink, LockEvent, WaitOutcome};

/// Emits `tracing` events: operations at `DEBUG`, waits that ended without the lock and lost locks
/// at `WARN`. Raw keys and lock ids are never emitted, even if the layer includes them.
#[derive(Clone, Copy, Debug, Default)]
pub struct TracingSink;

impl EventSink for TracingSink {
    fn is_inline(&self) -> bool {
        true
    }

    fn operation(&self, event: &LockEvent) {
        debug!(
            target: "syncguard::operation",
            operation = event.operation.as_str(),
            ok = event.ok,
            reason = event.reason.map(crate::contract::event::Reason::as_str),
            key_hash = event.key_hash.as_ref().map(HashId::as_str),
            lock_id_hash = event.lock_id_hash.as_ref().map(HashId::as_str),
            elapsed_us = u64::try_from(event.elapsed.as_micros()).unwrap_or(u64::MAX),
        );
    }

    fn engine(&self, event: &EngineEvent) {
        let (key_hash, label) = (&event.key_hash, event.label.as_deref());
        let fence = event.fence.map(tracing::field::display);
        match &event.kind {
            EngineEventKind::Waited { outcome, waited, attempts, .. } => {
                let is_expected = matches!(outcome, WaitOutcome::Acquired | WaitOutcome::Contended);
                let outcome = outcome.as_str();
                if is_expected {
                    debug!(target: "syncguard::engine", %key_hash, label, fence, outcome, ?waited, attempts, "waited");
                } else {
                    warn!(target: "syncguard::engine", %key_hash, label, outcome, ?waited, attempts, "not acquired");
                }
            }
            EngineEventKind::Held { held } => {
                debug!(target: "syncguard::engine", %key_hash, label, fence, ?held, "released");
            }
            EngineEventKind::Lost { reason } => {
                warn!(target: "syncguard::engine", %key_hash, label, fence, reason = reason.as_str(), "lost");
            }
            EngineEventKind::RenewalFailed { code } => {
                debug!(target: "syncguard::engine", %key_hash, label, fence, code = code.as_str(), "not renewed");
            }
            // Reported when they end.
            EngineEventKind::Waiting | EngineEventKind::Acquired => {}
        }
    }
}
