//! A call to the backend that is never abandoned: if its caller drops it, it continues in the
//! background.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::{Context, Poll};

use super::BoxFuture;

/// A call to the backend, polled by its caller.
///
/// If the call has begun but does not complete here, `detach` receives what is left of it: the call
/// itself if it was dropped before it completed, `None` if it panicked.
pub(crate) struct DetachOnDrop<T, Detach: FnOnce(Option<BoxFuture<'static, T>>)> {
    call: Option<BoxFuture<'static, T>>,
    /// `None` once the call has completed or was detached.
    detach: Option<Detach>,
    has_begun: bool,
}

impl<T, Detach: FnOnce(Option<BoxFuture<'static, T>>)> DetachOnDrop<T, Detach> {
    pub(crate) fn new(call: impl Future<Output = T> + Send + 'static, detach: Detach) -> Self {
        Self { call: Some(Box::pin(call)), detach: Some(detach), has_begun: false }
    }
}

impl<T, Detach: FnOnce(Option<BoxFuture<'static, T>>) + Unpin> Future for DetachOnDrop<T, Detach> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        self.has_begun = true;
        // Taken out while it runs, so that a call that panics is not polled again.
        let mut call = self.call.take().expect("BUG: polled after completion");
        let poll = call.as_mut().poll(context);
        if poll.is_pending() {
            self.call = Some(call);
        } else {
            self.detach = None;
        }
        poll
    }
}

impl<T, Detach: FnOnce(Option<BoxFuture<'static, T>>)> Drop for DetachOnDrop<T, Detach> {
    fn drop(&mut self) {
        if self.has_begun
            && let Some(detach) = self.detach.take()
        {
            detach(self.call.take());
        }
    }
}

/// Polls a future once.
pub(crate) async fn poll_once<T>(mut future: Pin<&mut impl Future<Output = T>>) -> Poll<T> {
    poll_fn(|context| Poll::Ready(future.as_mut().poll(context))).await
}
