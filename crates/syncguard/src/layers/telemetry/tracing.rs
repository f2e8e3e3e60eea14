//! Events as `tracing` events.

use tracing::{debug, warn};

use crate::common::hash_id::HashId;
use crate::contract::event::{EngineEvent, EventSink, LockEvent, WaitOutcome};

/// Tells `tracing`: operations at `DEBUG`, waits that ended without the lock and lost locks at
/// `WARN`. Raw keys and lock ids are never told, even when the layer includes them.
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
        match event {
            EngineEvent::Waited {
                key_hash,
                outcome: outcome @ (WaitOutcome::Acquired | WaitOutcome::Contended),
                waited,
                attempts,
            } => {
                let outcome = outcome.as_str();
                debug!(target: "syncguard::engine", %key_hash, outcome, ?waited, attempts, "asked");
            }
            EngineEvent::Waited { key_hash, outcome, waited, attempts } => {
                let outcome = outcome.as_str();
                warn!(target: "syncguard::engine", %key_hash, outcome, ?waited, attempts, "not acquired");
            }
            EngineEvent::Held { key_hash, held } => {
                debug!(target: "syncguard::engine", %key_hash, ?held, "let go");
            }
            EngineEvent::Lost { key_hash, reason } => {
                warn!(target: "syncguard::engine", %key_hash, reason = reason.as_str(), "lost");
            }
        }
    }
}
