//! Ring 3: layers. A layer wraps a backend in another backend.

pub(crate) mod telemetry;

use crate::contract::LockBackend;

/// Wraps a backend in another one that adds behavior. It preserves fencing.
///
/// ```
/// use std::sync::Arc;
/// use syncguard::{Locker, MemoryBackend};
/// use syncguard::backend::Layer;
/// use syncguard::telemetry::{TelemetryLayer, TracingSink};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> syncguard::Result<()> {
/// let backend = TelemetryLayer::new(Arc::new(TracingSink)).layer(MemoryBackend::new());
/// let locker = Locker::new(backend)?;
/// # locker.shutdown().await
/// # }
/// ```
///
/// The layer that you apply first is the innermost:
///
/// ```text
/// outer.layer(inner.layer(backend))      call → outer → inner → backend
/// ```
pub trait Layer<B: LockBackend> {
    /// The backend that the layer returns.
    type Backend: LockBackend<Fencing = B::Fencing>;

    /// Wraps a backend.
    fn layer(&self, inner: B) -> Self::Backend;
}
