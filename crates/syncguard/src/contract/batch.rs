//! Operations that travel together ([ADR 057](../../../../docs/adr/057-batches.md)).
//!
//! While a batch of one kind is on its way, operations of that kind that arrive gather, and go with
//! the next batch. An operation that finds none on its way is sent at once, by its caller, and so
//! are the operations of a `join_all`. What has gathered otherwise is sent by a task, so that no
//! caller depends on the others being polled. No timer delays an operation.

use std::collections::{HashSet, VecDeque};
use std::hash::{BuildHasher, RandomState};
use std::pin::Pin;
use std::sync::{Arc, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::sync::{Notify, oneshot};
use tokio::time::{Instant, timeout};

use super::BoxFuture;
use crate::common::error::{Error, ErrorCode, Result};
use crate::common::join::{spawn, start_errand, together};
use crate::common::sync::{Mutex, MutexGuard};

/// How long a batch keeps the next one waiting. After that, what has gathered is sent without it,
/// so that a connection that no longer answers, or one slow operation, delays no other.
const OVERDUE: Duration = Duration::from_millis(50);

/// One operation of a batch.
pub(crate) trait Batched: Send + 'static {
    /// The answer of the store.
    type Answer: Send + 'static;

    /// Returns what no other operation of the same batch may have.
    fn conflict_key(&self) -> Option<&[u8]>;
}

/// Gathers the operations of one kind.
pub(crate) struct Batcher<O: Batched> {
    queue: Arc<BatchQueue<O>>,
}

struct BatchQueue<O: Batched> {
    state: Mutex<BatchState<O>>,
    /// Notified when a batch is back, or enough operations have gathered.
    may_depart: Notify,
    /// The most operations of one batch.
    limit: usize,
    /// So many operations leave although a batch is on its way.
    enough: usize,
}

struct BatchState<O: Batched> {
    /// When the batches left that are on their way.
    departures: Vec<Instant>,
    /// Operations that wait for the next batch.
    gathered: VecDeque<Gathered<O>>,
    /// Whether a task will send them.
    is_boarding: bool,
    /// Whether the last batch had more than one operation.
    has_company: bool,
}

struct Gathered<O: Batched> {
    operation: O,
    reply: ReplySender<O>,
    /// The number of the `join_all` that it is a part of.
    together: Option<u64>,
}

/// The duty to send what has gathered. If it cannot be done, because the runtime has ended, the
/// callers learn it.
struct Boarding<O: Batched>(Option<Arc<BatchQueue<O>>>);

impl<O: Batched> Drop for Boarding<O> {
    fn drop(&mut self) {
        if let Some(queue) = self.0.take() {
            let mut state = queue.state();
            state.is_boarding = false;
            let gathered = std::mem::take(&mut state.gathered);
            drop(state);
            drop(gathered);
        }
    }
}

/// A batch that is on its way.
pub(crate) struct Departure<O: Batched> {
    queue: Arc<BatchQueue<O>>,
    departed: Instant,
}

impl<O: Batched> Departure<O> {
    fn new(queue: &Arc<BatchQueue<O>>, state: &mut BatchState<O>) -> Self {
        let departed = Instant::now();
        state.departures.push(departed);
        Self { queue: Arc::clone(queue), departed }
    }
}

impl<O: Batched> Drop for Departure<O> {
    fn drop(&mut self) {
        let mut state = self.queue.state();
        if let Some(place) = state.departures.iter().position(|at| *at == self.departed) {
            state.departures.swap_remove(place);
        }
        drop(state);
        self.queue.may_depart.notify_one();
    }
}

/// Operations that are sent together.
struct Batch<O: Batched> {
    operations: Vec<O>,
    replies: Vec<ReplySender<O>>,
    departure: Departure<O>,
    /// The number of the `join_all` that all of them are a part of.
    together: Option<u64>,
}

impl<O: Batched> Batch<O> {
    async fn fly<Sending>(self, send: &(impl Fn(Vec<O>) -> Sending + Sync))
    where
        Sending: Future<Output = Vec<Result<O::Answer>>> + Send,
    {
        if self.operations.is_empty() {
            return;
        }
        let answers = send(self.operations).await;
        for (reply, answer) in self.replies.into_iter().zip(answers) {
            // A caller that was dropped needs no answer.
            drop(reply.send(answer));
        }
        drop(self.departure);
    }
}

type ReplySender<O> = oneshot::Sender<Result<<O as Batched>::Answer>>;

/// What becomes of an operation.
pub(crate) enum Joined<O: Batched> {
    /// The caller sends it now, and keeps the departure until the answer is there.
    Alone(O, Departure<O>),
    /// It is sent with others.
    Gathered(Reply<O::Answer>),
}

/// The answer to an operation that is sent with others.
pub(crate) struct Reply<T>(oneshot::Receiver<Result<T>>);

impl<T> Future for Reply<T> {
    type Output = Result<T>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let reply = ready!(Pin::new(&mut self.0).poll(context));
        // The runtime of the batch has ended before its answer came.
        Poll::Ready(reply.unwrap_or_else(|_closed| {
            Err(Error::new(
                ErrorCode::ServiceUnavailable,
                "the runtime that sent this operation has ended",
            ))
        }))
    }
}

impl<O: Batched> Batcher<O> {
    /// Creates a batcher whose batches have at most `limit` operations. If `enough` have gathered,
    /// they do not wait for a batch that is on its way.
    pub(crate) fn new(limit: usize, enough: usize) -> Self {
        let state = BatchState {
            departures: Vec::new(),
            gathered: VecDeque::new(),
            is_boarding: false,
            has_company: false,
        };
        let (state, may_depart) = (Mutex::new(state), Notify::new());
        Self { queue: Arc::new(BatchQueue { state, may_depart, limit, enough }) }
    }

    /// Adds an operation to those that are sent together, or returns it to be sent alone.
    ///
    /// `send` gets a batch, which is never empty, and returns an answer for each operation, in the
    /// same order.
    ///
    /// # Cancel safety
    ///
    /// If you drop the reply while its operation gathers, the operation is not sent. Later, its
    /// batch continues in the background.
    pub(crate) fn join<Sending>(
        &self,
        operation: O,
        send: impl Fn(Vec<O>) -> Sending + Send + Sync + 'static,
    ) -> Joined<O>
    where
        Sending: Future<Output = Vec<Result<O::Answer>>> + Send + 'static,
    {
        let queue = &self.queue;
        let mut state = queue.state();
        let together = together();
        let must_wait = state.departs_in().is_some();
        let expects_others = together.is_some() || state.has_company;
        if !state.is_boarding && !expects_others && !must_wait {
            let departure = Departure::new(queue, &mut state);
            return Joined::Alone(operation, departure);
        }
        let (reply, answer) = oneshot::channel();
        state.gathered.push_back(Gathered { operation, reply, together });
        if state.gathered.len() >= queue.enough {
            queue.may_depart.notify_one();
        }
        let is_first = !std::mem::replace(&mut state.is_boarding, true);
        drop(state);
        if is_first {
            let boarding = Boarding(Some(Arc::clone(queue)));
            if together.is_some() && !must_wait {
                start_errand(depart(boarding, together, Arc::new(send)));
            } else {
                spawn(depart(boarding, None, Arc::new(send)));
            }
        }
        Joined::Gathered(Reply(answer))
    }

    /// Sends an operation, together with others if there are any, and returns its answer.
    ///
    /// # Cancel safety
    ///
    /// As [`join`](Self::join). If the operation was sent alone, the future that `send` returned is
    /// dropped.
    #[cfg(any(test, feature = "postgres"))]
    pub(crate) async fn run<Sending>(
        &self,
        operation: O,
        send: impl Fn(Vec<O>) -> Sending + Clone + Send + Sync + 'static,
    ) -> Result<O::Answer>
    where
        Sending: Future<Output = Vec<Result<O::Answer>>> + Send + 'static,
    {
        match self.join(operation, send.clone()) {
            Joined::Alone(operation, _departure) => {
                let mut answers = send(vec![operation]).await;
                answers.pop().expect("BUG: every operation has an answer")
            }
            Joined::Gathered(reply) => reply.await,
        }
    }
}

/// Sends what has gathered as soon as a batch may leave.
///
/// With `together`, it is sent within that `join_all`, at once: all its futures have been polled,
/// so none is missing. If an operation of another caller has joined them, a task sends the batch.
fn depart<O, Send, Sending>(
    boarding: Boarding<O>,
    together: Option<u64>,
    send: Arc<Send>,
) -> BoxFuture<'static, ()>
where
    O: Batched,
    Send: Fn(Vec<O>) -> Sending + std::marker::Send + Sync + 'static,
    Sending: Future<Output = Vec<Result<O::Answer>>> + std::marker::Send + 'static,
{
    Box::pin(async move {
        let Some(queue) = boarding.0.clone() else { return };
        if together.is_none() {
            while let Some(wait) = queue.departs_in() {
                // Whether it ended or not, the queue is looked at again.
                drop(timeout(wait, queue.may_depart.notified()).await);
            }
            // Tasks that are ready to run join, such as those that the last batch has answered.
            tokio::task::yield_now().await;
        }
        let (batch, rest) = queue.take(boarding);
        if let Some(rest) = rest {
            spawn(depart(rest, None, Arc::clone(&send)));
        }
        if together.is_none() || batch.together == together {
            batch.fly(&*send).await;
        } else {
            spawn(Box::pin(async move { batch.fly(&*send).await }));
        }
    })
}

impl<O: Batched> BatchQueue<O> {
    fn state(&self) -> MutexGuard<'_, BatchState<O>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns how long what has gathered waits for batches that are on their way.
    fn departs_in(&self) -> Option<Duration> {
        let state = self.state();
        state.departs_in().filter(|_| state.gathered.len() < self.enough)
    }

    /// Takes the next batch. What it has no room for, or what conflicts, remains to be sent.
    /// Operations whose callers are gone are dropped.
    fn take(self: &Arc<Self>, mut boarding: Boarding<O>) -> (Batch<O>, Option<Boarding<O>>) {
        boarding.0 = None;
        let mut state = self.state();
        let gathered = std::mem::take(&mut state.gathered);
        let count = gathered.len().min(self.limit);
        let (mut operations, mut replies) = (Vec::with_capacity(count), Vec::with_capacity(count));
        let hasher = RandomState::new();
        let mut keys = HashSet::new();
        let first = gathered.front().and_then(|first| first.together);
        let mut together = first;
        for Gathered { operation, reply, together: part_of } in gathered {
            if reply.is_closed() {
                continue;
            }
            // Two keys with the same hash are merely sent one after the other.
            let fits = operations.len() < count
                && operation.conflict_key().is_none_or(|key| keys.insert(hasher.hash_one(key)));
            if fits {
                together = together.filter(|_| part_of == first);
                operations.push(operation);
                replies.push(reply);
            } else {
                state.gathered.push_back(Gathered { operation, reply, together: part_of });
            }
        }
        state.has_company = operations.len() > 1;
        let departure = Departure::new(self, &mut state);
        state.is_boarding = !state.gathered.is_empty();
        let rest = state.is_boarding.then(|| Boarding(Some(Arc::clone(self))));
        drop(state);
        (Batch { operations, replies, departure, together }, rest)
    }
}

impl<O: Batched> BatchState<O> {
    /// Returns how long the next batch waits for those that are on their way. One that is overdue
    /// keeps no other waiting.
    fn departs_in(&self) -> Option<Duration> {
        let left = |departed: &Instant| OVERDUE.checked_sub(departed.elapsed());
        self.departures.iter().filter_map(left).filter(|left| !left.is_zero()).max()
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Waker;

    use shuttle::rand::{Rng, thread_rng};
    use tokio::sync::Semaphore;

    use super::*;
    use crate::common::join::join_all;

    /// An operation with a number, which is also its answer.
    struct Numbered {
        number: usize,
        conflict_key: Option<String>,
    }

    impl Batched for Numbered {
        type Answer = usize;

        fn conflict_key(&self) -> Option<&[u8]> {
            self.conflict_key.as_deref().map(str::as_bytes)
        }
    }

    /// A store that answers a batch when a permit is added, and remembers the batches.
    struct Server {
        batcher: Batcher<Numbered>,
        sent: Mutex<Vec<Vec<usize>>>,
        permits: Semaphore,
    }

    impl Server {
        fn new(limit: usize) -> Arc<Self> {
            Self::with_enough(limit, limit)
        }

        fn with_enough(limit: usize, enough: usize) -> Arc<Self> {
            let (batcher, sent) = (Batcher::new(limit, enough), Mutex::default());
            Arc::new(Self { batcher, sent, permits: Semaphore::new(0) })
        }

        async fn call(self: Arc<Self>, number: usize) -> Result<usize> {
            self.call_with(number, None).await
        }

        async fn call_with(self: Arc<Self>, number: usize, key: Option<&str>) -> Result<usize> {
            let server = Arc::clone(&self);
            let send = move |batch: Vec<Numbered>| {
                let server = Arc::clone(&server);
                async move {
                    let numbers: Vec<usize> = batch.iter().map(|one| one.number).collect();
                    server.sent.lock().expect("no panic").push(numbers.clone());
                    server.permits.acquire().await.expect("open").forget();
                    numbers.into_iter().map(Ok).collect()
                }
            };
            let conflict_key = key.map(str::to_owned);
            self.batcher.run(Numbered { number, conflict_key }, send).await
        }

        fn sent(&self) -> Vec<Vec<usize>> {
            self.sent.lock().expect("no panic").clone()
        }

        /// Starts calls, and lets each run until it waits.
        async fn start(
            self: &Arc<Self>,
            numbers: impl IntoIterator<Item = usize>,
        ) -> Vec<tokio::task::JoinHandle<Result<usize>>> {
            let mut calls = Vec::new();
            for number in numbers {
                calls.push(tokio::spawn(Arc::clone(self).call(number)));
                settle().await;
            }
            calls
        }
    }

    /// Lets all other tasks run until they wait.
    async fn settle() {
        for _ in 0..10 {
            tokio::task::yield_now().await;
        }
    }

    async fn answers(calls: Vec<tokio::task::JoinHandle<Result<usize>>>) -> Vec<usize> {
        let mut answers = Vec::new();
        for call in calls {
            answers.push(call.await.expect("not aborted").expect("an answer"));
        }
        answers
    }

    #[tokio::test(start_paused = true)]
    async fn what_arrives_while_a_batch_is_on_its_way_goes_with_the_next() {
        let server = Server::new(64);
        let calls = server.start(1..=5).await;
        assert_eq!(server.sent(), [vec![1]], "the first is sent at once, the others gather");
        server.permits.add_permits(2);
        assert_eq!(answers(calls).await, [1, 2, 3, 4, 5]);
        assert_eq!(server.sent(), [vec![1], vec![2, 3, 4, 5]]);
        server.permits.add_permits(1);
        assert_eq!(Arc::clone(&server).call(6).await.expect("an answer"), 6);
        assert_eq!(server.sent()[2..], [vec![6]]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_full_batch_does_not_wait() {
        let server = Server::new(3);
        let calls = server.start(1..=5).await;
        assert_eq!(server.sent(), [vec![1], vec![2, 3, 4]]);
        server.permits.add_permits(3);
        assert_eq!(answers(calls).await, [1, 2, 3, 4, 5]);
    }

    #[tokio::test(start_paused = true)]
    async fn no_batch_is_larger_than_its_limit() {
        let server = Server::with_enough(2, 64);
        let calls = server.start(1..=6).await;
        server.permits.add_permits(4);
        assert_eq!(answers(calls).await, [1, 2, 3, 4, 5, 6]);
        assert_eq!(server.sent(), [vec![1], vec![2, 3], vec![4, 5], vec![6]]);
    }

    #[tokio::test(start_paused = true)]
    async fn after_a_batch_without_company_an_operation_is_sent_by_its_caller() {
        let server = Server::new(64);
        for (others, sent_by_caller) in [(1, true), (2, false)] {
            let calls = server.start(0..=others).await;
            server.permits.add_permits(2);
            drop(answers(calls).await);
            settle().await;
            let next: BoxFuture<'static, _> = Box::pin(Arc::clone(&server).call(9));
            let (mut next, before) = (next, server.sent().len());
            assert!(poll_once(&mut next).is_pending());
            assert_eq!(server.sent().len() > before, sent_by_caller, "{others}");
            server.permits.add_permits(1);
            next.await.expect("an answer");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn operations_that_are_started_together_wait_for_a_batch_on_its_way() {
        let server = Server::new(64);
        let first = server.start([0]).await;
        let calls = (1..=2).map(|number| Arc::clone(&server).call(number));
        let all = tokio::spawn(join_all(calls.collect::<Vec<_>>()));
        settle().await;
        assert_eq!(server.sent(), [vec![0]]);
        server.permits.add_permits(2);
        drop(all.await.expect("no panic"));
        assert_eq!(server.sent(), [vec![0], vec![1, 2]]);
        assert_eq!(answers(first).await, [0]);
    }

    #[tokio::test(start_paused = true)]
    async fn enough_operations_do_not_wait_for_a_batch() {
        let server = Server::with_enough(64, 2);
        let calls = server.start(1..=6).await;
        assert_eq!(server.sent(), [vec![1], vec![2, 3], vec![4, 5]]);
        server.permits.add_permits(4);
        assert_eq!(answers(calls).await, [1, 2, 3, 4, 5, 6]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_batch_that_takes_long_keeps_no_other_waiting() {
        let server = Server::new(64);
        let calls = server.start(1..=3).await;
        assert_eq!(server.sent(), [vec![1]]);
        tokio::time::sleep(OVERDUE * 2).await;
        assert_eq!(server.sent(), [vec![1], vec![2, 3]]);
        server.permits.add_permits(2);
        assert_eq!(answers(calls).await, [1, 2, 3]);
        assert_eq!(server.batcher.queue.state().departures, []);
    }

    #[tokio::test(start_paused = true)]
    async fn a_dropped_caller_neither_cancels_nor_repeats_the_others() {
        let server = Server::new(64);
        let mut calls = server.start(1..=5).await;
        // One that gathers is not sent.
        calls.remove(2).abort();
        server.permits.add_permits(1);
        assert_eq!(calls.remove(0).await.expect("not aborted").expect("an answer"), 1);
        settle().await;
        assert_eq!(server.sent(), [vec![1], vec![2, 4, 5]]);
        // The leader of a batch that is on its way.
        calls.remove(0).abort();
        server.permits.add_permits(1);
        assert_eq!(answers(calls).await, [4, 5]);
        assert_eq!(server.sent().len(), 2, "nothing was sent twice");
    }

    #[tokio::test(start_paused = true)]
    async fn a_lone_call_that_is_dropped_lets_the_next_one_go() {
        let server = Server::new(64);
        let mut calls = server.start(1..=2).await;
        calls.remove(0).abort();
        settle().await;
        server.permits.add_permits(1);
        assert_eq!(answers(calls).await, [2]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_caller_that_is_not_polled_keeps_no_other_waiting() {
        let server = Server::new(64);
        // Sent alone, and not polled again.
        let mut alone = Box::pin(Arc::clone(&server).call(1));
        assert!(futures_util::poll!(&mut alone).is_pending());
        // Gathers, and is not polled again.
        let mut gathers = Box::pin(Arc::clone(&server).call(2));
        assert!(futures_util::poll!(&mut gathers).is_pending());
        server.permits.add_permits(3);
        let others = server.start(3..=4).await;
        let answered = timeout(OVERDUE * 10, answers(others)).await;
        assert_eq!(answered.expect("not kept waiting"), [3, 4]);
        assert_eq!(server.sent(), [vec![1], vec![2, 3, 4]]);
        assert_eq!(gathers.await.expect("an answer"), 2);
        assert_eq!(alone.await.expect("an answer"), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn operations_that_are_started_together_go_in_one_batch() {
        let server = Server::new(64);
        server.permits.add_permits(2);
        let calls = || join_all((1..=4).map(|number| Arc::clone(&server).call(number)));
        drop(calls().await);
        assert_eq!(server.sent(), [vec![1, 2, 3, 4]]);
    }

    /// Polls a future once, without letting other tasks run.
    fn poll_once<T>(future: &mut BoxFuture<'static, T>) -> Poll<T> {
        future.as_mut().poll(&mut Context::from_waker(Waker::noop()))
    }

    #[tokio::test(start_paused = true)]
    async fn operations_that_are_started_together_are_sent_by_their_caller() {
        let server = Server::new(64);
        let calls = (1..=4).map(|number| Arc::clone(&server).call(number));
        let mut all: BoxFuture<'static, _> = Box::pin(join_all(calls.collect::<Vec<_>>()));
        assert!(poll_once(&mut all).is_pending());
        assert_eq!(server.sent(), [vec![1, 2, 3, 4]], "without a task");
        // If they are dropped, a task waits for the answers.
        drop(all);
        server.permits.add_permits(1);
        settle().await;
        assert_eq!(server.permits.available_permits(), 0);
        assert_eq!(server.batcher.queue.state().departures, []);
    }

    #[tokio::test(start_paused = true)]
    async fn an_operation_of_another_caller_is_not_sent_by_those_that_are_started_together() {
        let server = Server::new(64);
        let other: BoxFuture<'static, _> = Box::pin(Arc::clone(&server).call(9));
        let other = Mutex::new(other);
        let runtime = tokio::runtime::Handle::current();
        let mut together: Vec<BoxFuture<'_, Result<usize>>> = Vec::new();
        together.push(Box::pin(Arc::clone(&server).call(1)));
        together.push(Box::pin(poll_fn(|_context| {
            let joined = std::thread::scope(|scope| {
                let joining = scope.spawn(|| {
                    let _runtime = runtime.enter();
                    poll_once(&mut other.lock().expect("no panic")).is_pending()
                });
                joining.join().expect("no panic")
            });
            assert!(joined);
            Poll::Ready(Ok(0))
        })));
        let mut all = Box::pin(join_all(together));
        let mut context = Context::from_waker(Waker::noop());
        assert!(all.as_mut().poll(&mut context).is_pending());
        server.permits.add_permits(1);
        settle().await;
        assert_eq!(server.sent(), [vec![1, 9]]);
        let answer = poll_once(&mut other.lock().expect("no panic"));
        assert!(matches!(answer, Poll::Ready(Ok(9))), "{answer:?}");
        // Until here, those that are started together are not polled again.
        drop(all);
    }

    #[test]
    fn a_runtime_that_ends_abandons_its_batch_and_no_other() {
        let server = Server::new(64);
        let runtime = || {
            let mut runtime = tokio::runtime::Builder::new_current_thread();
            runtime.enable_time().start_paused(true).build().expect("a runtime")
        };
        let (ending, lasting) = (runtime(), runtime());
        let calls: Vec<_> = lasting.block_on(async {
            let _inside = ending.enter();
            let mut calls = Vec::new();
            for number in 1..=3 {
                let mut call = Box::pin(Arc::clone(&server).call(number));
                assert!(futures_util::poll!(&mut call).is_pending());
                calls.push(call);
            }
            calls
        });
        drop(ending);
        lasting.block_on(async {
            let mut calls = calls.into_iter();
            server.permits.add_permits(2);
            assert_eq!(calls.next().expect("three").await.expect("an answer"), 1);
            for call in calls {
                assert_eq!(call.await.expect_err("not sent").code(), ErrorCode::ServiceUnavailable);
            }
            assert_eq!(Arc::clone(&server).call(4).await.expect("an answer"), 4);
        });
        assert_eq!(server.sent(), [vec![1], vec![4]]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_key_is_in_a_batch_only_once() {
        let server = Server::new(64);
        let keys = [Some("a"), Some("b"), Some("c"), Some("b"), None, None];
        let mut calls = Vec::new();
        for (number, key) in keys.into_iter().enumerate() {
            calls.push(tokio::spawn(Arc::clone(&server).call_with(number, key)));
            settle().await;
        }
        server.permits.add_permits(3);
        assert_eq!(answers(calls).await, [0, 1, 2, 3, 4, 5]);
        assert_eq!(server.sent(), [vec![0], vec![1, 2, 4, 5], vec![3]]);
    }

    #[test]
    fn under_every_schedule_each_caller_gets_the_answer_to_its_own_operation() {
        crate::lock::schedules::explore("batches", |_time| async {
            const CALLERS: usize = 4;
            let (batcher, count) =
                (Arc::new(Batcher::<Numbered>::new(3, 2)), Arc::new(AtomicUsize::new(0)));
            let callers = (0..CALLERS).map(|number| {
                let (batcher, count) = (Arc::clone(&batcher), Arc::clone(&count));
                shuttle::future::spawn(async move {
                    let key = thread_rng().gen_range(0..2_u8).to_string();
                    let send = move |batch: Vec<Numbered>| {
                        count.fetch_add(batch.len(), Ordering::Relaxed);
                        async move {
                            shuttle::future::yield_now().await;
                            batch.into_iter().map(|one| Ok(one.number)).collect()
                        }
                    };
                    let operation = Numbered { number, conflict_key: Some(key) };
                    let call = batcher.run(operation, send);
                    let answer = crate::lock::schedules::dropped_midway(call).await;
                    assert!(answer.is_none_or(|answer| answer.expect("an answer") == number));
                })
            });
            for caller in callers.collect::<Vec<_>>() {
                caller.await.expect("no panic");
            }
            assert!(count.load(Ordering::Relaxed) <= CALLERS, "an operation was sent twice");
            // Whoever was dropped, the next caller is served.
            let send = |batch: Vec<Numbered>| async move {
                batch.into_iter().map(|one| Ok(one.number)).collect()
            };
            let last = Numbered { number: CALLERS, conflict_key: None };
            assert_eq!(batcher.run(last, send).await.expect("an answer"), CALLERS);
        });
    }
}
