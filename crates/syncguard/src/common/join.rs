//! Waits for several futures at once.

use std::cell::RefCell;
use std::future::{Future, poll_fn};
use std::mem;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};

/// What the futures of a `join_all` have started, to be polled with them.
type Errand = Pin<Box<dyn Future<Output = ()> + Send>>;

thread_local! {
    /// The `join_all` that polls its futures now, and the errands that they start meanwhile.
    static TOGETHER: RefCell<Option<(u64, Vec<Errand>)>> = const { RefCell::new(None) };
}

/// Returns the number of the `join_all` that polls the caller, if one does: what the caller sends
/// can travel with what its other futures send.
#[cfg(feature = "_listener")]
pub(crate) fn together() -> Option<u64> {
    TOGETHER.with_borrow(|together| together.as_ref().map(|(number, _)| *number))
}

/// Lets the `join_all` that polls the caller poll an errand too, for the first time as soon as it
/// has polled all its futures. Without one, and if it is dropped, the errand becomes a task.
#[cfg(feature = "_listener")]
pub(crate) fn start_errand(errand: Errand) {
    let rest = TOGETHER.with_borrow_mut(|together| match together {
        Some((_, errands)) => {
            errands.push(errand);
            None
        }
        None => Some(errand),
    });
    if let Some(errand) = rest {
        spawn(errand);
    }
}

/// Starts a task, if there is a runtime.
pub(crate) fn spawn(errand: Errand) {
    #[cfg(test)]
    if shuttle::current::try_get_current_task().is_some() {
        // Dropping the handle would let the schedule end before the task.
        mem::forget(shuttle::future::spawn(errand));
        return;
    }
    if let Ok(runtime) = tokio::runtime::Handle::try_current() {
        runtime.spawn(errand);
    }
}

/// Waits for all futures and returns their outputs in order.
pub(crate) async fn join_all<F: Future>(futures: impl IntoIterator<Item = F>) -> Vec<F::Output> {
    static NUMBERS: AtomicU64 = AtomicU64::new(0);
    enum Progress<F: Future> {
        Pending(Pin<Box<F>>),
        Done(F::Output),
    }
    let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
    let mut all: Vec<Option<Progress<F>>> =
        futures.into_iter().map(|future| Some(Progress::Pending(Box::pin(future)))).collect();
    let mut errands = Errands::default();
    poll_fn(|context| {
        loop {
            let mut is_pending = false;
            let together = Together::begin(number);
            for progress in &mut all {
                if let Some(Progress::Pending(future)) = progress {
                    match future.as_mut().poll(context) {
                        Poll::Ready(output) => *progress = Some(Progress::Done(output)),
                        Poll::Pending => is_pending = true,
                    }
                }
            }
            errands.0.extend(together.end());
            if !is_pending {
                return Poll::Ready(());
            }
            if !errands.poll(context) {
                return Poll::Pending;
            }
        }
    })
    .await;
    let output = |progress: Option<Progress<F>>| match progress {
        Some(Progress::Done(output)) => Some(output),
        _ => None,
    };
    all.into_iter().filter_map(output).collect()
}

/// The time in which a `join_all` polls its futures.
struct Together {
    before: Option<(u64, Vec<Errand>)>,
}

impl Together {
    fn begin(number: u64) -> Self {
        Self { before: TOGETHER.replace(Some((number, Vec::new()))) }
    }

    /// Returns the errands that were started.
    fn end(mut self) -> Vec<Errand> {
        let started = TOGETHER.replace(self.before.take());
        mem::forget(self);
        started.map_or_else(Vec::new, |(_, errands)| errands)
    }
}

/// After a panic.
impl Drop for Together {
    fn drop(&mut self) {
        TOGETHER.set(self.before.take());
    }
}

/// Errands that become tasks if no one polls them anymore.
#[derive(Default)]
struct Errands(Vec<Errand>);

impl Errands {
    /// Returns whether one has ended.
    fn poll(&mut self, context: &mut Context<'_>) -> bool {
        let count = self.0.len();
        self.0.retain_mut(|errand| errand.as_mut().poll(context).is_pending());
        self.0.len() < count
    }
}

impl Drop for Errands {
    fn drop(&mut self) {
        self.0.drain(..).for_each(spawn);
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

    #[cfg(feature = "_listener")]
    #[test]
    fn after_a_panic_nothing_travels_with_the_futures_that_were_left() {
        let mut joined = Box::pin(join_all([async { panic!("on purpose") }]));
        let mut context = Context::from_waker(std::task::Waker::noop());
        let poll = std::panic::AssertUnwindSafe(|| joined.as_mut().poll(&mut context));
        assert!(std::panic::catch_unwind(poll).is_err());
        assert_eq!(together(), None);
    }
}
