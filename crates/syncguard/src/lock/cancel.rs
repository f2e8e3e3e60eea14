//! Cancels any operation with a token.

use std::future::Future;

use tokio_util::sync::CancellationToken;

use crate::common::error::{Error, Result};

/// Ends any operation of this crate with [`ErrorCode::Aborted`](crate::ErrorCode::Aborted) when the
/// token is canceled.
///
/// If the token is already canceled, the operation does not begin. If it is canceled later, the
/// operation's future is dropped, as its own *Cancel safety* section describes: a
/// [`Locker`](crate::Locker) undoes the acquire, and a guard's release continues in the background.
/// A bare [`LockBackend::acquire`](crate::LockBackend::acquire) is not undone; send
/// [`ReleaseRequest::undo`](crate::backend::ReleaseRequest::undo) yourself.
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
/// The same as that of the operation.
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
