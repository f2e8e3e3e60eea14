//! A call to the backend that is never abandoned: dropped half-way, it goes on in the background.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

pub(super) type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// What becomes of a call whose caller has gone.
pub(super) trait Orphanage<T>: Unpin {
    /// Takes the rest of the call.
    fn adopt(self, rest: BoxFuture<T>);
}

/// A call to the backend, polled by its caller. When it is dropped after it began and before it
/// ended, the rest of it goes to the [`Orphanage`].
pub(super) struct Carried<T, O: Orphanage<T>> {
    call: Option<BoxFuture<T>>,
    orphanage: Option<O>,
    has_begun: bool,
}

impl<T, O: Orphanage<T>> Carried<T, O> {
    pub(super) fn new(call: impl Future<Output = T> + Send + 'static, orphanage: O) -> Self {
        Self {
            call: Some(Box::pin(call)),
            orphanage: Some(orphanage),
            has_begun: false,
        }
    }
}

impl<T, O: Orphanage<T>> Future for Carried<T, O> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        self.has_begun = true;
        // Taken out while it runs: a call that panics is not polled again in the background.
        let mut call = self
            .call
            .take()
            .expect("BUG: a call is not polled after its end");
        let poll = call.as_mut().poll(context);
        if poll.is_pending() {
            self.call = Some(call);
        }
        poll
    }
}

impl<T, O: Orphanage<T>> Drop for Carried<T, O> {
    fn drop(&mut self) {
        if self.has_begun
            && let (Some(rest), Some(orphanage)) = (self.call.take(), self.orphanage.take())
        {
            orphanage.adopt(rest);
        }
    }
}
