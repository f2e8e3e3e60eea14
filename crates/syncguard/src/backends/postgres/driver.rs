//! Whoever uses a connection also drives it: no other task has to be woken for an answer.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use futures_util::task::AtomicWaker;
use tokio_postgres::tls::MakeTlsConnect;
use tokio_postgres_rustls::MakeRustlsConnect;

/// What drives a connection: it must be polled.
pub(super) type Driver = tokio_postgres::Connection<
    tokio_postgres::Socket,
    <MakeRustlsConnect as MakeTlsConnect<tokio_postgres::Socket>>::Stream,
>;

/// Waits for an answer while driving the connection that it comes on; `None` when that ends first.
pub(super) async fn drive<T>(
    driver: Option<&mut Pin<Box<Driver>>>,
    work: impl Future<Output = T>,
) -> Option<T> {
    let Some(driver) = driver else { return Some(work.await) };
    let mut work = pin!(work);
    let news = Arc::new(News::default());
    let waker = Waker::from(Arc::clone(&news));
    poll_fn(|task| {
        news.task.register(task.waker());
        let mut context = Context::from_waker(&waker);
        for _ in 0..ROUNDS {
            news.state.swap(LOOKING, Ordering::SeqCst);
            if let Poll::Ready(done) = work.as_mut().poll(&mut context) {
                return Poll::Ready(Some(done));
            }
            if driver.as_mut().poll(&mut context).is_ready() {
                // Its last words may have been the answer.
                return match work.as_mut().poll(&mut context) {
                    Poll::Ready(done) => Poll::Ready(Some(done)),
                    Poll::Pending => Poll::Ready(None),
                };
            }
            let looking =
                news.state.compare_exchange(LOOKING, AWAY, Ordering::SeqCst, Ordering::SeqCst);
            if looking.is_ok() {
                return Poll::Pending;
            }
        }
        // Whoever has used up its share of time is woken at once, again and again, until it lets
        // others go first.
        news.state.swap(AWAY, Ordering::SeqCst);
        task.waker().wake_by_ref();
        Poll::Pending
    })
    .await
}

/// The two wake each other, one with a question and the other with its answer. While both are being
/// looked at, that is noted here, and the runtime, which would call in another thread, need not know.
#[derive(Default)]
struct News {
    state: AtomicU8,
    task: AtomicWaker,
}

/// A question and its answer take two or three.
const ROUNDS: u32 = 8;

const AWAY: u8 = 0;
const LOOKING: u8 = 1;
const LOOK_AGAIN: u8 = 2;

impl Wake for News {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if self.state.swap(LOOK_AGAIN, Ordering::SeqCst) == AWAY {
            self.task.wake();
        }
    }
}
