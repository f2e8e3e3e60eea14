//! Operations that travel together: one script for many locks.

use redis::Value;

use super::error;
use super::route::GiveUp;
use super::scripts::{BatchedScript, Call, SCRIPTS};
use super::shard::Shard;
use crate::common::error::Result;
use crate::common::join::join_all;
use crate::contract::batch::{Batched, Batcher, Joined};

/// The most operations of one batch. The server does nothing else while it runs one.
const LIMIT: usize = 64;

/// How many operations leave although a batch is on its way: the server runs one batch while the
/// callers of another get their answers and ask again.
const ENOUGH: usize = 12;

impl Batched for Call {
    /// `None` if the keys are on two nodes while their slot moves.
    type Answer = Option<Value>;

    /// The lock of an acquire, or the index of the lock id: a script reads the locks of all calls
    /// before it changes any.
    fn conflict_key(&self) -> Option<&[u8]> {
        self.first_key()
    }
}

/// The calls of one script that gather.
pub(super) struct Batches {
    script: &'static BatchedScript,
    calls: Batcher<Call>,
}

/// The calls of each operation.
pub(super) struct BatchedCalls {
    pub(super) acquires: Batches,
    pub(super) releases: Batches,
    pub(super) extends: Batches,
}

impl BatchedCalls {
    pub(super) fn new() -> Self {
        let batches = |script| Batches { script, calls: Batcher::new(LIMIT, ENOUGH) };
        Self {
            acquires: batches(&SCRIPTS.acquire),
            releases: batches(&SCRIPTS.release),
            extends: batches(&SCRIPTS.extend),
        }
    }
}

impl Shard {
    /// Runs a script for one lock, together with the calls of other callers. Returns `None`, and
    /// changes nothing, if its keys are on two nodes while their slot moves.
    pub(super) async fn run_batched(&self, batches: &Batches, call: Call) -> Result<Option<Value>> {
        let (shard, script) = (self.clone(), batches.script);
        let send = move |calls| Box::pin(shard.clone().run_batch(script, calls));
        match batches.calls.join(call, send) {
            // Boxed, so that operations in a batch are smaller.
            Joined::Alone(call, _departure) => {
                Box::pin(self.shared.route.drive(&call, GiveUp::IfApart)).await
            }
            Joined::Gathered(reply) => reply.await,
        }
    }

    async fn run_batch(
        self,
        script: &'static BatchedScript,
        calls: Vec<Call>,
    ) -> Vec<Result<Option<Value>>> {
        let route = &self.shared.route;
        let many = match calls.as_slice() {
            [_] => Ok(None),
            many => route.drive(&script.call_many(many), GiveUp::IfRefused).await,
        };
        let answers = match many {
            Ok(Some(Value::Array(answers))) if answers.len() == calls.len() => answers,
            Ok(Some(_)) => {
                return calls.iter().map(|_| Err(error::unexpected_response())).collect();
            }
            // The server did not run the script, so each call is sent by itself.
            Ok(None) => calls.iter().map(|_| Value::Nil).collect(),
            Err(error) => return calls.iter().map(|_| Err(error.clone())).collect(),
        };
        let outcomes = answers.into_iter().zip(&calls).map(|(answer, call)| async move {
            match answer {
                Value::Nil => Box::pin(route.drive(call, GiveUp::IfApart)).await,
                answer => Ok(Some(answer)),
            }
        });
        join_all(outcomes).await
    }
}
