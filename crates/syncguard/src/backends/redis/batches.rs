//! Operations that travel together: one script for many locks.

use redis::Value;

use super::error;
use super::scripts::{Argument, Script};
use super::shard::Shard;
use crate::common::error::Result;
use crate::contract::batch::{Batched, Batcher};

/// The most operations of one batch. The server does nothing else while it runs one.
const LIMIT: usize = 64;

/// A call of a script for one lock.
pub(super) struct Call {
    keys: Vec<String>,
    arguments: Vec<OwnedArgument>,
}

#[derive(PartialEq)]
enum OwnedArgument {
    Text(String),
    Number(u64),
}

impl OwnedArgument {
    fn as_argument(&self) -> Argument<'_> {
        match self {
            Self::Text(text) => Argument::Text(text),
            Self::Number(number) => Argument::Number(*number),
        }
    }
}

impl Call {
    fn new(keys: &[&str], arguments: &[Argument<'_>]) -> Self {
        let owned = |argument: &Argument<'_>| match argument {
            Argument::Text(text) => OwnedArgument::Text((*text).to_owned()),
            Argument::Number(number) => OwnedArgument::Number(*number),
        };
        Self {
            keys: keys.iter().map(|&key| key.to_owned()).collect(),
            arguments: arguments.iter().map(owned).collect(),
        }
    }
}

impl Batched for Call {
    /// `None` if the keys are on two nodes while their slot moves.
    type Answer = Option<Value>;

    /// A script handles one lock after the other, so two may have the same key.
    fn conflict_key(&self) -> Option<&str> {
        None
    }
}

/// The calls of each script that gather.
pub(super) struct Batches {
    acquires: Batcher<Call>,
    releases: Batcher<Call>,
    extends: Batcher<Call>,
}

impl Batches {
    pub(super) fn new() -> Self {
        let [acquires, releases, extends] = [(); 3].map(|()| Batcher::new(LIMIT));
        Self { acquires, releases, extends }
    }
}

/// An operation whose calls travel together.
#[derive(Clone, Copy)]
pub(super) enum Operation {
    Acquire,
    Release,
    Extend,
}

impl Operation {
    fn name(self) -> &'static str {
        match self {
            Self::Acquire => "acquire",
            Self::Release => "release",
            Self::Extend => "extend",
        }
    }
}

impl Shard {
    /// Runs a script, together with the same operations of other callers. Returns `None`, and
    /// changes nothing, if its keys are on two nodes while their slot moves.
    pub(super) async fn run_batched(
        &self,
        operation: Operation,
        keys: &[&str],
        arguments: &[Argument<'_>],
    ) -> Result<Option<Value>> {
        let kinds = &self.shared.batches;
        let batcher = match operation {
            Operation::Acquire => &kinds.acquires,
            Operation::Release => &kinds.releases,
            Operation::Extend => &kinds.extends,
        };
        let backend = self.clone();
        let send = move |calls| Box::pin(backend.clone().run_batch(operation, calls));
        batcher.run(Call::new(keys, arguments), send).await
    }

    async fn run_batch(self, operation: Operation, calls: Vec<Call>) -> Vec<Result<Option<Value>>> {
        let (connection, name) = (&self.shared.connection, operation.name());
        let many = match calls.as_slice() {
            [_] => Ok(None),
            many => {
                let (keys, layout, arguments) = encode(many);
                let width = u64::try_from(many[0].keys.len()).unwrap_or(0);
                let mut all = vec![Argument::Number(width), Argument::Text(&layout)];
                all.extend(arguments);
                connection.run_many(name, &self.script(operation).1, &keys, &all).await
            }
        };
        let answers = match many {
            Ok(Some(Value::Array(answers))) if answers.len() == calls.len() => answers,
            Ok(Some(_)) => {
                return calls.iter().map(|_| Err(error::unexpected_response(name))).collect();
            }
            // The server did not run the script, so each call is sent by itself.
            Ok(None) => calls.iter().map(|_| Value::Nil).collect(),
            Err(error) => return calls.iter().map(|_| Err(error.clone())).collect(),
        };
        let mut outcomes = Vec::with_capacity(calls.len());
        for (answer, call) in answers.into_iter().zip(&calls) {
            outcomes.push(match answer {
                Value::Nil => {
                    let keys: Vec<&str> = call.keys.iter().map(String::as_str).collect();
                    let arguments: Vec<Argument<'_>> =
                        call.arguments.iter().map(OwnedArgument::as_argument).collect();
                    let script = &self.script(operation).0;
                    connection.run_together(name, script, &keys, &arguments).await
                }
                answer => Ok(Some(answer)),
            });
        }
        outcomes
    }

    /// Returns the scripts of an operation, for one lock and for many.
    fn script(&self, operation: Operation) -> &(Script, Script) {
        let scripts = &self.shared.scripts;
        match operation {
            Operation::Acquire => &scripts.acquire,
            Operation::Release => &scripts.release,
            Operation::Extend => &scripts.extend,
        }
    }
}

/// Returns the keys and arguments for `many.lua`: arguments that are the same for all locks are
/// sent once.
fn encode<'a>(calls: &'a [Call]) -> (Vec<&'a str>, String, Vec<Argument<'a>>) {
    let keys = calls.iter().flat_map(|call| call.keys.iter().map(String::as_str)).collect();
    let first = &calls[0].arguments;
    let is_shared: Vec<bool> = (0..first.len())
        .map(|place| calls.iter().all(|call| call.arguments.get(place) == first.get(place)))
        .collect();
    let layout = is_shared.iter().map(|&shared| if shared { 's' } else { 'o' }).collect();
    let mut arguments = Vec::new();
    let mut add = |call: &'a Call, shared: bool| {
        let chosen = call.arguments.iter().zip(&is_shared);
        let chosen = chosen.filter(|&(_, &is_shared)| is_shared == shared);
        arguments.extend(chosen.map(|(argument, _)| argument.as_argument()));
    };
    add(&calls[0], true);
    for call in calls {
        add(call, false);
    }
    (keys, layout, arguments)
}
