//! A call to the backend that is never abandoned: dropped half-way, it goes on in the background.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

pub(super) type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// A call to the backend, polled by its caller. When it began and does not end here, `adopt` gets
/// the rest of it: the call itself when it was dropped half-way, nothing when it panicked.
pub(super) struct Carried<T, Adopt: FnOnce(Option<BoxFuture<T>>)> {
    call: Option<BoxFuture<T>>,
    /// Taken when the call has ended or was handed on.
    adopt: Option<Adopt>,
    has_begun: bool,
}

impl<T, Adopt: FnOnce(Option<BoxFuture<T>>)> Carried<T, Adopt> {
    pub(super) fn new(call: impl Future<Output = T> + Send + 'static, adopt: Adopt) -> Self {
        Self { call: Some(Box::pin(call)), adopt: Some(adopt), has_begun: false }
    }
}

impl<T, Adopt: FnOnce(Option<BoxFuture<T>>) + Unpin> Future for Carried<T, Adopt> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        self.has_begun = true;
        // Taken out while it runs: a call that panics is not polled again in the background.
        let mut call = self.call.take().expect("BUG: a call is not polled after its end");
        let poll = call.as_mut().poll(context);
        if poll.is_pending() {
            self.call = Some(call);
        } else {
            self.adopt = None;
        }
        poll
    }
}

impl<T, Adopt: FnOnce(Option<BoxFuture<T>>)> Drop for Carried<T, Adopt> {
    fn drop(&mut self) {
        if self.has_begun
            && let Some(adopt) = self.adopt.take()
        {
            adopt(self.call.take());
        }
    }
}
