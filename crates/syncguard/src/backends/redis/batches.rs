//! Operations that travel together: one script for many locks.

use std::pin::Pin;
use std::slice;
use std::task::{Context, Poll};

use redis::Value;

use super::error;
use super::route::GiveUp;
use super::scripts::Argument::{Number, Text};
use super::scripts::{Call, Item, SCRIPTS};
use super::shard::{MARK_MS, OUTLIVES_MS, Shard};
use crate::common::error::Result;
use crate::common::join::join_all;
use crate::common::time::TIME_TOLERANCE_MS;
use crate::contract::BoxFuture;
use crate::contract::batch::{Batched, Batcher, Joined, Reply};

/// The most operations of one batch. The server does nothing else while it runs one.
const LIMIT: usize = 64;

/// How many operations leave although a batch is on its way: the server runs one batch while the
/// callers of another get their answers and ask again.
const ENOUGH: usize = 6;

impl Batched for Item {
    /// `None` if the keys are on two nodes while their slot moves.
    type Answer = Option<Value>;

    /// The lock of an acquire, or the index of the lock id: a script reads the locks of all items
    /// before it changes any.
    fn conflict_key(&self) -> Option<&[u8]> {
        Some(self.first_key().as_bytes())
    }
}

/// An operation whose calls travel together.
#[derive(Clone, Copy)]
pub(super) enum Operation {
    Acquire,
    Release,
    Extend,
}

/// The calls that gather, by operation.
pub(super) struct Batches {
    acquires: Batcher<Item>,
    releases: Batcher<Item>,
    extends: Batcher<Item>,
}

impl Batches {
    pub(super) fn new() -> Self {
        let batcher = || Batcher::new(LIMIT, ENOUGH);
        Self { acquires: batcher(), releases: batcher(), extends: batcher() }
    }

    fn of(&self, operation: Operation) -> &Batcher<Item> {
        match operation {
            Operation::Acquire => &self.acquires,
            Operation::Release => &self.releases,
            Operation::Extend => &self.extends,
        }
    }
}

/// The answer of a script for one lock: `None`, and nothing was changed, if its keys are on two
/// nodes while their slot moves.
pub(super) enum Answering<'a> {
    Alone(BoxFuture<'a, Result<Option<Value>>>),
    Gathered(Reply<Option<Value>>),
}

impl Future for Answering<'_> {
    type Output = Result<Option<Value>>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match self.get_mut() {
            Self::Alone(call) => call.as_mut().poll(context),
            Self::Gathered(reply) => Pin::new(reply).poll(context),
        }
    }
}

impl Shard {
    /// Runs a script for one lock, together with the calls of other callers.
    ///
    /// Not an `async fn`: such a future would contain the item as long as it waits.
    pub(super) fn run_batched(&self, operation: Operation, item: Item) -> Answering<'_> {
        let shard = self.clone();
        let send = move |items| Box::pin(shard.clone().run_batch(operation, items));
        match self.shared.batches.of(operation).join(item, send) {
            Joined::Alone(item, departure) => Answering::Alone(Box::pin(async move {
                let _departure = departure;
                self.run_alone(operation, &item).await
            })),
            Joined::Gathered(reply) => Answering::Gathered(reply),
        }
    }

    async fn run_alone(&self, operation: Operation, item: &Item) -> Result<Option<Value>> {
        let call = self.call(operation, slice::from_ref(item));
        self.shared.route.drive(&call, GiveUp::IfApart).await
    }

    async fn run_batch(self, operation: Operation, items: Vec<Item>) -> Vec<Result<Option<Value>>> {
        let many = match items.as_slice() {
            [_] => Ok(None),
            many => {
                let call = self.call(operation, many);
                self.shared.route.drive(&call, GiveUp::IfRefused).await
            }
        };
        let answers = match many {
            Ok(Some(Value::Array(answers))) if answers.len() == items.len() => answers,
            Ok(Some(_)) => {
                return items.iter().map(|_| Err(error::unexpected_response())).collect();
            }
            // The server did not run the script, so each lock is tried by itself.
            Ok(None) => items.iter().map(|_| Value::Nil).collect(),
            Err(error) => return items.iter().map(|_| Err(error.clone())).collect(),
        };
        if !answers.contains(&Value::Nil) {
            return answers.into_iter().map(|answer| Ok(Some(answer))).collect();
        }
        let outcomes = answers.into_iter().zip(&items).map(|(answer, item)| async {
            match answer {
                Value::Nil => self.run_alone(operation, item).await,
                answer => Ok(Some(answer)),
            }
        });
        Box::pin(join_all(outcomes)).await
    }

    /// Encodes the call of an operation for one or many locks.
    pub(super) fn call(&self, operation: Operation, items: &[Item]) -> Call {
        match operation {
            Operation::Acquire => SCRIPTS.acquire.call(&self.acquire_arguments(), items),
            Operation::Release => {
                let arguments = [
                    Number(TIME_TOLERANCE_MS),
                    Text(self.shared.channels.prefix()),
                    Text(if self.shared.is_cluster { "S" } else { "" }),
                    Number(MARK_MS),
                ];
                SCRIPTS.release.call(&arguments, items)
            }
            Operation::Extend => {
                let arguments = [Number(TIME_TOLERANCE_MS), Number(OUTLIVES_MS)];
                SCRIPTS.extend.call(&arguments, items)
            }
        }
    }
}
