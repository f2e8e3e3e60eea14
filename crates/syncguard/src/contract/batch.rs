//! Operations that travel together ([ADR 057](../../../../docs/adr/057-batches.md)).
//!
//! While enough batches of a kind are on their way, operations of that kind that arrive gather, and
//! go with the next batch. An operation that finds fewer on their way is sent at once. There is no
//! timer that delays an operation, and no task: every batch is sent by one of the callers whose
//! operations it contains, its *leader*.

use std::collections::{HashSet, VecDeque};
use std::hash::{BuildHasher, RandomState};
use std::pin::pin;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use tokio::sync::oneshot;

use super::BoxFuture;
use super::detach::DetachOnDrop;
use crate::common::error::{Error, ErrorCode, Result};
use crate::common::sync::{Mutex, MutexGuard};

/// How long a batch keeps the next one waiting. After that, what has gathered is sent without it,
/// so that a connection that no longer answers, or one slow operation, delays no other.
const OVERDUE: Duration = Duration::from_millis(50);

/// One operation of a batch.
pub(crate) trait Batched: Send + 'static {
    /// The answer of the store.
    type Answer: Send + 'static;

    /// Returns what no other operation of the same batch may have.
    fn conflict_key(&self) -> Option<&str>;
}

/// Gathers the operations of one kind.
pub(crate) struct Batcher<O: Batched> {
    queue: Arc<BatchQueue<O>>,
}

struct BatchQueue<O: Batched> {
    state: Mutex<BatchState<O>>,
    /// The most operations of one batch.
    limit: usize,
    /// How many batches may be on their way before operations gather.
    depth: usize,
}

struct BatchState<O: Batched> {
    /// How many batches are on their way and not overdue.
    in_flight: usize,
    /// Operations that wait for the next batch.
    gathered: VecDeque<Gathered<O>>,
    /// Whether the last batch had more than one operation.
    has_company: bool,
}

struct Gathered<O: Batched> {
    operation: O,
    reply: oneshot::Sender<Reply<O>>,
}

/// What the caller of a gathered operation receives.
enum Reply<O: Batched> {
    /// Its operation, to send with all others that have gathered.
    Lead(O, Departure<O>),
    Answer(Result<O::Answer>),
}

/// The right to send the next batch. When it is dropped, one of the gathered operations gets it.
struct Departure<O: Batched> {
    queue: Arc<BatchQueue<O>>,
}

impl<O: Batched> Drop for Departure<O> {
    fn drop(&mut self) {
        self.queue.pass_on();
    }
}

enum Joined<O: Batched> {
    Leads(O, Departure<O>),
    Waits(oneshot::Receiver<Reply<O>>),
}

impl<O: Batched> Batcher<O> {
    /// Creates a batcher whose batches have at most `limit` operations. Operations gather while
    /// `depth` batches are on their way.
    pub(crate) fn new(limit: usize, depth: usize) -> Self {
        let state = BatchState { in_flight: 0, gathered: VecDeque::new(), has_company: false };
        Self { queue: Arc::new(BatchQueue { state: Mutex::new(state), limit, depth }) }
    }

    /// Sends an operation, together with others if there are any, and returns its answer.
    ///
    /// `send` gets a batch, which is never empty, and returns an answer for each operation, in the
    /// same order. It is called only if this caller is the leader.
    ///
    /// # Cancel safety
    ///
    /// If you drop the future while its operation gathers, the operation is not sent. Later, its
    /// batch continues in the background if it contains operations of others; otherwise the future
    /// that `send` returned is dropped.
    pub(crate) async fn run<Sending>(
        &self,
        operation: O,
        send: impl FnOnce(Vec<O>) -> Sending + Send,
    ) -> Result<O::Answer>
    where
        Sending: Future<Output = Vec<Result<O::Answer>>> + Send + 'static,
    {
        let (operation, departure) = match self.queue.join(operation) {
            Joined::Leads(operation, departure) => (operation, departure),
            Joined::Waits(reply) => match reply.await {
                Ok(Reply::Lead(operation, departure)) => (operation, departure),
                Ok(Reply::Answer(answer)) => return answer,
                Err(_closed) => return Err(abandoned()),
            },
        };
        if self.queue.state().has_company {
            // Tasks that are ready to run join, such as those that the last batch has answered.
            tokio::task::yield_now().await;
        }
        let (operations, replies) = self.queue.take(operation);
        if replies.is_empty() {
            return deliver(send(operations), departure, replies).await;
        }
        let runtime = tokio::runtime::Handle::try_current();
        let flight = deliver(send(operations), departure, replies);
        let detach = move |flight: Option<BoxFuture<'static, Result<O::Answer>>>| {
            if let (Some(flight), Ok(runtime)) = (flight, runtime) {
                spawn(&runtime, flight);
            }
        };
        DetachOnDrop::new(flight, detach).await
    }
}

/// Waits for the answers of a batch and passes them on. Returns that of the leader.
async fn deliver<O: Batched>(
    sending: impl Future<Output = Vec<Result<O::Answer>>> + Send,
    departure: Departure<O>,
    replies: Vec<oneshot::Sender<Reply<O>>>,
) -> Result<O::Answer> {
    let mut sending = pin!(sending);
    let (answers, departure) = match tokio::time::timeout(OVERDUE, sending.as_mut()).await {
        Ok(answers) => (answers, Some(departure)),
        Err(_elapsed) => {
            drop(departure);
            (sending.await, None)
        }
    };
    let mut answers = answers.into_iter();
    let own = answers.next();
    for (reply, answer) in replies.into_iter().zip(answers) {
        // A caller that was dropped needs no answer.
        drop(reply.send(Reply::Answer(answer)));
    }
    // Last, because a runtime runs the task that was woken last before the others.
    drop(departure);
    own.unwrap_or_else(|| Err(abandoned()))
}

impl<O: Batched> BatchQueue<O> {
    fn state(&self) -> MutexGuard<'_, BatchState<O>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn join(self: &Arc<Self>, operation: O) -> Joined<O> {
        let mut state = self.state();
        // A full batch has nothing to wait for.
        let is_full = state.gathered.len() + 1 >= self.limit;
        if state.in_flight < self.depth || is_full {
            state.in_flight += 1;
            return Joined::Leads(operation, Departure { queue: Arc::clone(self) });
        }
        let (reply, answer) = oneshot::channel();
        state.gathered.push_back(Gathered { operation, reply });
        Joined::Waits(answer)
    }

    /// Takes the next batch, which begins with an operation of the leader. Operations whose callers
    /// are gone are dropped.
    fn take(&self, first: O) -> (Vec<O>, Vec<oneshot::Sender<Reply<O>>>) {
        let mut state = self.state();
        let gathered = std::mem::take(&mut state.gathered);
        let count = gathered.len().min(self.limit - 1);
        let (mut operations, mut replies) =
            (Vec::with_capacity(count + 1), Vec::with_capacity(count));
        if !gathered.is_empty() {
            let hasher = RandomState::new();
            let hash = |operation: &O| operation.conflict_key().map(|key| hasher.hash_one(key));
            let mut keys: HashSet<u64> = hash(&first).into_iter().collect();
            for Gathered { operation, reply } in gathered {
                if reply.is_closed() {
                    continue;
                }
                // Two keys with the same hash are merely sent one after the other.
                let fits = replies.len() < count
                    && hash(&operation).is_none_or(|conflict_key| keys.insert(conflict_key));
                if fits {
                    operations.push(operation);
                    replies.push(reply);
                } else {
                    state.gathered.push_back(Gathered { operation, reply });
                }
            }
        }
        state.has_company = !replies.is_empty();
        drop(state);
        operations.insert(0, first);
        (operations, replies)
    }

    /// Lets the first of the gathered operations lead the next batch.
    fn pass_on(self: &Arc<Self>) {
        let mut state = self.state();
        loop {
            let Some(Gathered { operation, reply }) = state.gathered.pop_front() else {
                state.in_flight -= 1;
                return;
            };
            if !reply.is_closed() {
                drop(state);
                let departure = Departure { queue: Arc::clone(self) };
                // If its caller is dropped meanwhile, so is the departure, which is passed on.
                drop(reply.send(Reply::Lead(operation, departure)));
                return;
            }
        }
    }
}

/// Creates the error for a batch whose runtime ended before its answer came.
fn abandoned() -> Error {
    Error::new(ErrorCode::ServiceUnavailable, "the runtime that sent this operation has ended")
}

/// Continues a batch whose leader was dropped.
fn spawn<T: Send + 'static>(runtime: &tokio::runtime::Handle, flight: BoxFuture<'static, T>) {
    #[cfg(test)]
    if shuttle::current::try_get_current_task().is_some() {
        // Dropping the handle would let the schedule end before the task.
        std::mem::forget(shuttle::future::spawn(flight));
        return;
    }
    runtime.spawn(flight);
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use shuttle::rand::{Rng, thread_rng};
    use tokio::sync::Semaphore;

    use super::*;

    /// An operation with a number, which is also its answer.
    struct Numbered {
        number: usize,
        conflict_key: Option<String>,
    }

    impl Batched for Numbered {
        type Answer = usize;

        fn conflict_key(&self) -> Option<&str> {
            self.conflict_key.as_deref()
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
            let (batcher, sent) = (Batcher::new(limit, 1), Mutex::default());
            Arc::new(Self { batcher, sent, permits: Semaphore::new(0) })
        }

        async fn call(self: Arc<Self>, number: usize) -> Result<usize> {
            self.call_with(number, None).await
        }

        async fn call_with(self: Arc<Self>, number: usize, key: Option<&str>) -> Result<usize> {
            let server = Arc::clone(&self);
            let send = move |batch: Vec<Numbered>| async move {
                let numbers: Vec<usize> = batch.iter().map(|one| one.number).collect();
                server.sent.lock().expect("no panic").push(numbers.clone());
                server.permits.acquire().await.expect("open").forget();
                numbers.into_iter().map(Ok).collect()
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
        assert_eq!(server.sent(), [vec![1], vec![4, 2, 3]]);
        server.permits.add_permits(3);
        assert_eq!(answers(calls).await, [1, 2, 3, 4, 5]);
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
        assert_eq!(server.batcher.queue.state().in_flight, 0);
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
                (Arc::new(Batcher::<Numbered>::new(3, 1)), Arc::new(AtomicUsize::new(0)));
            let callers = (0..CALLERS).map(|number| {
                let (batcher, count) = (Arc::clone(&batcher), Arc::clone(&count));
                shuttle::future::spawn(async move {
                    let key = thread_rng().gen_range(0..2_u8).to_string();
                    let send = move |batch: Vec<Numbered>| async move {
                        count.fetch_add(batch.len(), Ordering::Relaxed);
                        shuttle::future::yield_now().await;
                        batch.into_iter().map(|one| Ok(one.number)).collect()
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
