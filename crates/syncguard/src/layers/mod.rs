//! Ring 3: decorators. A layer turns a backend into another backend.

pub(crate) mod telemetry;

use crate::contract::LockBackend;

/// Wraps a backend in another one that does a little more. Fencing is preserved.
///
/// ```
/// use std::sync::Arc;
/// use syncguard::{Layer, Locker, MemoryBackend, TelemetryLayer, TracingSink};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> syncguard::Result<()> {
/// let backend = TelemetryLayer::new(Arc::new(TracingSink)).layer(MemoryBackend::new());
/// let locker = Locker::new(backend)?;
/// # locker.shutdown().await
/// # }
/// ```
///
/// The layer that is applied first is the innermost:
///
/// ```text
/// outer.layer(inner.layer(backend))      call → outer → inner → backend
/// ```
pub trait Layer<B: LockBackend> {
    /// The wrapped backend.
    type Backend: LockBackend<Fencing = B::Fencing>;

    /// Wraps a backend.
    fn layer(&self, inner: B) -> Self::Backend;
}
