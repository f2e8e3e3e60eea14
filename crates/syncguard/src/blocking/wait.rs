//! Blocks a thread on a future, and detects where blocking is not allowed.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};

use tokio::runtime::Runtime;
use tokio::task::coop::poll_proceed;
use tokio::task::yield_now;

/// Runs a future to completion on this thread, with the timers and connections of `runtime`.
///
/// Unlike `Runtime::block_on`, it does not panic inside another runtime.
pub(super) fn wait_for<T>(runtime: &Runtime, work: impl Future<Output = T>) -> T {
    let _inside = runtime.enter();
    let mut work = pin!(work);
    let parked = Arc::new(Parked { thread: thread::current(), is_woken: AtomicBool::new(false) });
    let waker = Waker::from(Arc::clone(&parked));
    let mut context = Context::from_waker(&waker);
    loop {
        if let Poll::Ready(value) = work.as_mut().poll(&mut context) {
            return value;
        }
        // A flag of our own, because the future may have consumed the thread's park token.
        while !parked.is_woken.swap(false, Ordering::Acquire) {
            thread::park();
        }
    }
}

/// Returns whether this thread currently runs the tasks of a tokio runtime, so that blocking it
/// would stall them. Threads of `spawn_blocking` do not, nor does code in `block_in_place`.
///
/// Tokio has no API for this question; it only panics. Two properties answer it: code that tokio
/// polls has a coop budget, and a task that yields there is woken later and not at once.
pub(super) fn would_stop_a_runtime() -> bool {
    has_a_budget() || is_woken_later()
}

fn has_a_budget() -> bool {
    let mut context = Context::from_waker(Waker::noop());
    // Dropping this value at the end restores the budget that the loop spends.
    let Poll::Ready(_restore) = poll_proceed(&mut context) else { return true };
    (0..=u8::MAX).any(|_| match poll_proceed(&mut context) {
        Poll::Ready(spent) => {
            spent.made_progress();
            false
        }
        Poll::Pending => true,
    })
}

fn is_woken_later() -> bool {
    let woken = Arc::new(Parked { thread: thread::current(), is_woken: AtomicBool::new(false) });
    let waker = Waker::from(Arc::clone(&woken));
    let mut yielding = pin!(yield_now());
    let is_pending = yielding.as_mut().poll(&mut Context::from_waker(&waker)).is_pending();
    is_pending && !woken.is_woken.load(Ordering::Acquire)
}

/// A thread that waits to be woken.
struct Parked {
    thread: Thread,
    is_woken: AtomicBool,
}

impl Wake for Parked {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if !self.is_woken.swap(true, Ordering::Release) {
            self.thread.unpark();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::runtime::Builder;
    use tokio::task::{LocalSet, block_in_place, coop, spawn_blocking};

    use super::*;

    fn runtime() -> Runtime {
        Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime")
    }

    #[test]
    fn blocking_is_allowed_on_threads_that_run_no_tasks() {
        assert!(!would_stop_a_runtime(), "a plain thread");
        let runtime = runtime();
        let _inside = runtime.enter();
        assert!(!would_stop_a_runtime(), "a thread that only entered a runtime");
        let single = Builder::new_current_thread().build().expect("a runtime");
        for runtime in [&runtime, &single] {
            runtime.block_on(async {
                assert!(!spawn_blocking(would_stop_a_runtime).await.expect("no panic"));
            });
        }
        runtime.block_on(async {
            assert!(!block_in_place(would_stop_a_runtime), "the root, in block_in_place");
            let task = tokio::spawn(async { block_in_place(would_stop_a_runtime) });
            assert!(!task.await.expect("no panic"), "a task, in block_in_place");
        });
    }

    #[test]
    fn blocking_is_refused_on_threads_that_run_tasks() {
        let runtime = runtime();
        let single = Builder::new_current_thread().build().expect("a runtime");
        for runtime in [&runtime, &single] {
            runtime.block_on(async {
                assert!(would_stop_a_runtime(), "the root");
                let task = tokio::spawn(async { would_stop_a_runtime() });
                assert!(task.await.expect("no panic"), "a task");
                let task = tokio::spawn(coop::unconstrained(async { would_stop_a_runtime() }));
                assert!(task.await.expect("no panic"), "a task without a budget");
                let local = LocalSet::new();
                assert!(local.run_until(async { would_stop_a_runtime() }).await, "a local task");
                let nested = spawn_blocking(|| {
                    let inner = Builder::new_current_thread().build().expect("a runtime");
                    inner.block_on(async { would_stop_a_runtime() })
                });
                assert!(nested.await.expect("no panic"), "a runtime inside a blocking thread");
            });
        }
    }

    #[test]
    fn the_check_costs_no_budget() {
        runtime().block_on(async {
            for _ in 0..1000 {
                assert!(would_stop_a_runtime());
            }
            assert!(coop::has_budget_remaining());
        });
    }

    #[test]
    fn a_future_that_sleeps_completes_even_inside_another_runtime() {
        let (ours, theirs) = (runtime(), Builder::new_current_thread().build().expect("one"));
        let sleeps = || async {
            tokio::time::sleep(Duration::from_millis(5)).await;
            7
        };
        assert_eq!(wait_for(&ours, sleeps()), 7);
        // This runtime has no timers of its own.
        theirs.block_on(async { assert_eq!(wait_for(&ours, sleeps()), 7) });
    }
}
