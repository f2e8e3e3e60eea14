//! Waits for several futures at once.

use std::cell::Cell;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::Poll;

thread_local! {
    static IS_TOGETHER: Cell<bool> = const { Cell::new(false) };
}

/// Whether the caller is one of several futures that are waited for at once, so that what it sends
/// can travel with what the others send.
#[cfg(feature = "_listener")]
pub(crate) fn is_together() -> bool {
    IS_TOGETHER.get()
}

/// Waits for all futures and returns their outputs in order.
pub(crate) async fn join_all<F: Future>(futures: impl IntoIterator<Item = F>) -> Vec<F::Output> {
    enum Progress<F: Future> {
        Pending(Pin<Box<F>>),
        Done(F::Output),
    }
    let mut all: Vec<Option<Progress<F>>> =
        futures.into_iter().map(|future| Some(Progress::Pending(Box::pin(future)))).collect();
    poll_fn(|context| {
        let mut is_pending = false;
        let _restore = Restore(IS_TOGETHER.replace(true));
        for progress in &mut all {
            if let Some(Progress::Pending(future)) = progress {
                match future.as_mut().poll(context) {
                    Poll::Ready(output) => *progress = Some(Progress::Done(output)),
                    Poll::Pending => is_pending = true,
                }
            }
        }
        if is_pending { Poll::Pending } else { Poll::Ready(()) }
    })
    .await;
    let output = |progress: Option<Progress<F>>| match progress {
        Some(Progress::Done(output)) => Some(output),
        _ => None,
    };
    all.into_iter().filter_map(output).collect()
}

/// Restores whether the caller is one of several, even after a panic.
struct Restore(bool);

impl Drop for Restore {
    fn drop(&mut self) {
        IS_TOGETHER.set(self.0);
    }
}

/// Waits for the first of several futures and drops the others. Without futures it never completes.
pub(crate) async fn first_of<F: Future>(futures: impl IntoIterator<Item = F>) -> F::Output {
    let mut all: Vec<Pin<Box<F>>> = futures.into_iter().map(Box::pin).collect();
    poll_fn(|context| {
        let ready = all.iter_mut().find_map(|future| match future.as_mut().poll(context) {
            Poll::Ready(output) => Some(output),
            Poll::Pending => None,
        });
        ready.map_or(Poll::Pending, Poll::Ready)
    })
    .await
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    async fn after(ms: u64) -> u64 {
        tokio::time::sleep(Duration::from_millis(ms)).await;
        ms
    }

    #[tokio::test(start_paused = true)]
    async fn outputs_keep_their_order_and_the_futures_run_at_the_same_time() {
        let started = tokio::time::Instant::now();
        assert_eq!(join_all([30, 10, 20].map(after)).await, [30, 10, 20]);
        assert_eq!(started.elapsed(), Duration::from_millis(30));
        assert_eq!(first_of([30, 10, 20].map(after)).await, 10);
    }
}
