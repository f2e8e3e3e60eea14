//! Any operation, ended by a token.

use std::future::Future;

use tokio_util::sync::CancellationToken;

use crate::common::error::{Error, Result};

/// Ends any operation of this crate with [`ErrorCode::Aborted`](crate::ErrorCode::Aborted) when the
/// token is canceled.
///
/// Canceled before, the operation does not begin. Canceled half-way, its future is dropped, with the
/// consequences that its own *Cancel safety* names: a [`Locker`](crate::Locker) undoes the acquire, a
/// guard's release goes on in the background. A bare
/// [`LockBackend::acquire`](crate::LockBackend::acquire) is not undone; send
/// [`ReleaseRequest::undo`](crate::ReleaseRequest::undo) yourself.
///
/// ```
/// use syncguard::{CancellationToken, ErrorCode, Key, MemoryBackend, cancellable, diagnostics};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> syncguard::Result<()> {
/// let (backend, key) = (MemoryBackend::new(), Key::new("job")?);
/// let token = CancellationToken::new();
/// assert!(cancellable(&token, diagnostics::get_by_key(&backend, &key)).await?.is_none());
/// token.cancel();
/// let error = cancellable(&token, diagnostics::get_by_key(&backend, &key)).await.unwrap_err();
/// assert_eq!(error.code(), ErrorCode::Aborted);
/// # Ok(()) }
/// ```
///
/// # Cancel safety
///
/// That of the operation.
pub async fn cancellable<T>(
    token: &CancellationToken,
    operation: impl Future<Output = Result<T>>,
) -> Result<T> {
    tokio::select! {
        biased;
        () = token.cancelled() => Err(Error::canceled("the operation was canceled")),
        result = operation => result,
    }
}
