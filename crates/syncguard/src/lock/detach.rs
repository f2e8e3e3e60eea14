//! A call to the backend that is never abandoned: dropped half-way, it goes on in the background.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::{Context, Poll};

pub(super) type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// A call to the backend, polled by its caller. When it began and does not end here, `detach` gets
/// the rest of it: the call itself when it was dropped half-way, nothing when it panicked.
pub(super) struct DetachOnDrop<T, Detach: FnOnce(Option<BoxFuture<T>>)> {
    call: Option<BoxFuture<T>>,
    /// Taken when the call has ended or was handed on.
    detach: Option<Detach>,
    has_begun: bool,
}

impl<T, Detach: FnOnce(Option<BoxFuture<T>>)> DetachOnDrop<T, Detach> {
    pub(super) fn new(call: impl Future<Output = T> + Send + 'static, detach: Detach) -> Self {
        Self { call: Some(Box::pin(call)), detach: Some(detach), has_begun: false }
    }
}

impl<T, Detach: FnOnce(Option<BoxFuture<T>>) + Unpin> Future for DetachOnDrop<T, Detach> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        self.has_begun = true;
        // Taken out while it runs: a call that panics is not polled again in the background.
        let mut call = self.call.take().expect("BUG: a call is not polled after its end");
        let poll = call.as_mut().poll(context);
        if poll.is_pending() {
            self.call = Some(call);
        } else {
            self.detach = None;
        }
        poll
    }
}

impl<T, Detach: FnOnce(Option<BoxFuture<T>>)> Drop for DetachOnDrop<T, Detach> {
    fn drop(&mut self) {
        if self.has_begun
            && let Some(detach) = self.detach.take()
        {
            detach(self.call.take());
        }
    }
}

/// Polls a future once.
pub(super) async fn poll_once<T>(mut future: Pin<&mut impl Future<Output = T>>) -> Poll<T> {
    poll_fn(|context| Poll::Ready(future.as_mut().poll(context))).await
}
