//! Drives a connection in the task that uses it, so that no other task is woken for an answer.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use futures_util::task::AtomicWaker;
use tokio_postgres::tls::MakeTlsConnect;
use tokio_postgres_rustls::MakeRustlsConnect;

/// The part of a connection that does its I/O, and must be polled.
pub(super) type Driver = tokio_postgres::Connection<
    tokio_postgres::Socket,
    <MakeRustlsConnect as MakeTlsConnect<tokio_postgres::Socket>>::Stream,
>;

/// Waits for an answer while driving its connection. Returns `None` if the connection ends first.
pub(super) async fn drive<T>(
    driver: Option<&mut Pin<Box<Driver>>>,
    work: impl Future<Output = T>,
) -> Option<T> {
    let Some(driver) = driver else { return Some(work.await) };
    let mut work = pin!(work);
    let waker_state = Arc::new(SharedWaker::default());
    let waker = Waker::from(Arc::clone(&waker_state));
    poll_fn(|task| {
        waker_state.task.register(task.waker());
        let mut context = Context::from_waker(&waker);
        for _ in 0..ROUNDS {
            waker_state.state.swap(LOOKING, Ordering::SeqCst);
            if let Poll::Ready(done) = work.as_mut().poll(&mut context) {
                return Poll::Ready(Some(done));
            }
            if driver.as_mut().poll(&mut context).is_ready() {
                // The answer may have come before the end.
                return match work.as_mut().poll(&mut context) {
                    Poll::Ready(done) => Poll::Ready(Some(done)),
                    Poll::Pending => Poll::Ready(None),
                };
            }
            let looking = waker_state.state.compare_exchange(
                LOOKING,
                AWAY,
                Ordering::SeqCst,
                Ordering::SeqCst,
            );
            if looking.is_ok() {
                return Poll::Pending;
            }
        }
        // A task that has used up its budget is woken at once, again and again, until it yields to
        // other tasks.
        waker_state.state.swap(AWAY, Ordering::SeqCst);
        task.waker().wake_by_ref();
        Poll::Pending
    })
    .await
}

/// The waker for both the work and the driver, which wake each other: one with a request, the other
/// with its answer. While both are being polled, this is only recorded here: waking through the
/// runtime would involve another thread.
#[derive(Default)]
struct SharedWaker {
    state: AtomicU8,
    task: AtomicWaker,
}

/// How many rounds of polling one poll makes. A request and its answer take two or three.
const ROUNDS: u32 = 8;

const AWAY: u8 = 0;
const LOOKING: u8 = 1;
const LOOK_AGAIN: u8 = 2;

impl Wake for SharedWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if self.state.swap(LOOK_AGAIN, Ordering::SeqCst) == AWAY {
            self.task.wake();
        }
    }
}
