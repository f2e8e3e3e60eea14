//! The contract as a small model, and random histories that compare a backend with it.

use std::collections::HashMap;
use std::fmt::Debug;

use super::fixture::{Fixture, RawLock};
use crate::common::fence::Fence;
use crate::common::key::Key;
use crate::common::lock_id::LockId;
use crate::common::ttl::Ttl;
use crate::contract::LockBackend;
use crate::contract::outcome::{AcquireOutcome, ExtendOutcome, ReleaseOutcome};
use crate::contract::request::{AcquireRequest, ExtendRequest, Hint, ReleaseRequest};

/// The state of a key.
#[derive(Clone, Copy, Debug, Default)]
struct ModelSlot {
    counter: u64,
    record: Option<Record>,
}

#[derive(Clone, Copy, Debug)]
struct Record {
    lock_id: LockId,
    fence: u64,
    is_live: bool,
}

/// The result of an operation, without times.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ModelAnswer {
    Granted(u64),
    Contended,
    AlreadyUsed,
    Yes,
    No,
    Found(LockId, u64),
    Nothing,
}

/// The contract: what each operation does and returns, on one timeline.
#[derive(Debug, Default)]
struct Model {
    slots: HashMap<Key, ModelSlot>,
}

impl Model {
    fn acquire(&mut self, request: &AcquireRequest) -> ModelAnswer {
        let slot = self.slots.entry(request.key().clone()).or_default();
        match slot.record {
            Some(own) if own.lock_id == request.lock_id() && own.is_live => {
                ModelAnswer::Granted(own.fence)
            }
            Some(own) if own.lock_id == request.lock_id() => ModelAnswer::AlreadyUsed,
            Some(other) if other.is_live => ModelAnswer::Contended,
            _ => {
                slot.counter += 1;
                let (lock_id, fence) = (request.lock_id(), slot.counter);
                slot.record = Some(Record { lock_id, fence, is_live: true });
                ModelAnswer::Granted(fence)
            }
        }
    }

    fn live_slot_of(&mut self, lock_id: LockId) -> Option<&mut ModelSlot> {
        let holds = |record: &Record| record.lock_id == lock_id && record.is_live;
        self.slots.values_mut().find(|slot| slot.record.as_ref().is_some_and(holds))
    }

    fn release(&mut self, lock_id: LockId) -> ModelAnswer {
        match self.live_slot_of(lock_id) {
            Some(slot) => {
                slot.record = None;
                ModelAnswer::Yes
            }
            None => ModelAnswer::No,
        }
    }

    fn extend(&mut self, lock_id: LockId) -> ModelAnswer {
        if self.live_slot_of(lock_id).is_some() { ModelAnswer::Yes } else { ModelAnswer::No }
    }

    fn live_record(&self, key: &Key) -> Option<Record> {
        self.slots.get(key).and_then(|slot| slot.record).filter(|record| record.is_live)
    }

    fn lookup_id(&mut self, lock_id: LockId) -> ModelAnswer {
        let record = self.live_slot_of(lock_id).and_then(|slot| slot.record);
        record
            .map_or(ModelAnswer::Nothing, |record| ModelAnswer::Found(record.lock_id, record.fence))
    }
}

/// One step of a history.
#[derive(Clone, Copy, Debug)]
enum Step {
    Acquire {
        key: usize,
    },
    Replay {
        request: usize,
    },
    Release {
        request: usize,
        hint: Option<usize>,
    },
    Extend {
        request: usize,
        hint: Option<usize>,
    },
    IsLocked {
        key: usize,
    },
    LookupKey {
        key: usize,
    },
    LookupId {
        request: usize,
    },
    /// Moves the record of a key to just inside the tolerance, where it is still live.
    Age {
        key: usize,
    },
    /// Moves the record of a key to just outside the tolerance, where it is dead.
    Kill {
        key: usize,
    },
}

/// Runs a random history of `steps` steps on a backend and compares every answer with the model.
///
/// # Panics
///
/// If an answer differs. The message contains the seed, the step and both answers.
pub async fn check_history<F: Fixture>(fixture: &F, seed: u64, steps: usize) {
    let backend = fixture.backend().await;
    let mut random = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
    let keys: Vec<_> = (0..3).map(|_| super::cases::fresh_key("history")).collect();
    let mut requests = vec![new_request(&keys[0])];
    let mut model = Model::default();
    for number in 0..steps {
        let step = random.step(keys.len(), requests.len());
        let (expected, actual) = match step {
            Step::Acquire { key } => {
                let request = new_request(&keys[key]);
                let answers = (model.acquire(&request), acquire(&backend, &request).await);
                requests.push(request);
                answers
            }
            Step::Replay { request } => {
                let request = &requests[request];
                // A request whose lease was released may or may not be granted again; the engine
                // never sends one.
                if !model.holds_record_of(request) {
                    continue;
                }
                (model.acquire(request), acquire(&backend, request).await)
            }
            Step::Release { request, hint } => {
                let lock_id = requests[request].lock_id();
                let release = ReleaseRequest::new(lock_id).with_hint(hint_for(&keys, hint));
                let answer = match backend.release(&release).await.expect("the store works") {
                    ReleaseOutcome::Released => ModelAnswer::Yes,
                    ReleaseOutcome::NotHeld(_) => ModelAnswer::No,
                };
                (model.release(lock_id), answer)
            }
            Step::Extend { request, hint } => {
                let lock_id = requests[request].lock_id();
                let extend =
                    ExtendRequest::new(lock_id, Ttl::DEFAULT).with_hint(hint_for(&keys, hint));
                let answer = match backend.extend(&extend).await.expect("the store works") {
                    ExtendOutcome::Extended(_) => ModelAnswer::Yes,
                    ExtendOutcome::NotHeld(_) => ModelAnswer::No,
                };
                (model.extend(lock_id), answer)
            }
            Step::IsLocked { key } => {
                let locked = backend.is_locked(&keys[key]).await.expect("the store works");
                let expected = model.live_record(&keys[key]).is_some();
                (yes_or_no(expected), yes_or_no(locked))
            }
            Step::LookupKey { key } => {
                let found = backend.lookup_key(&keys[key]).await.expect("the store works");
                let expected =
                    model.live_record(&keys[key]).map_or(ModelAnswer::Nothing, |record| {
                        ModelAnswer::Found(record.lock_id, record.fence)
                    });
                (
                    expected,
                    found.map_or(ModelAnswer::Nothing, |lock| {
                        found_answer(lock.lock_id, lock.token)
                    }),
                )
            }
            Step::LookupId { request } => {
                let lock_id = requests[request].lock_id();
                let found = backend.lookup_id(&lock_id).await.expect("the store works");
                let actual = found
                    .map_or(ModelAnswer::Nothing, |lock| found_answer(lock.lock_id, lock.token));
                (model.lookup_id(lock_id), actual)
            }
            Step::Age { key } | Step::Kill { key } => {
                let dies = matches!(step, Step::Kill { .. });
                model.age(fixture, &keys[key], dies).await;
                continue;
            }
        };
        assert_eq!(expected, actual, "seed {seed}, step {number}: {step:?}\n{model:?}");
    }
    for key in &keys {
        let slot = model.slots.get(key).copied().unwrap_or_default();
        assert_eq!(fixture.fence_counter(key).await, slot.counter, "seed {seed}: fence counter");
    }
}

impl Model {
    fn holds_record_of(&self, request: &AcquireRequest) -> bool {
        let record = self.slots.get(request.key()).and_then(|slot| slot.record);
        record.is_some_and(|record| record.lock_id == request.lock_id())
    }

    /// Moves the live record of a key to an edge of its life, in the store and here.
    async fn age<F: Fixture>(&mut self, fixture: &F, key: &Key, dies: bool) {
        let Some(record) = self.slots.get_mut(key).and_then(|slot| slot.record.as_mut()) else {
            return;
        };
        if !record.is_live {
            return;
        }
        record.is_live = !dies;
        let edge = RawLock {
            key: key.clone(),
            lock_id: record.lock_id,
            fence: Fence::new(record.fence).expect("a small fence"),
            acquired_ms_ago: 60_000,
            // A live record must outlast the rest of the history where the clock moves.
            expires_in_ms: match (dies, fixture.clock_margin().is_zero()) {
                (true, _) => super::cases::dead_edge_ms(),
                (false, true) => super::cases::live_edge_ms(fixture),
                (false, false) => 30_000,
            },
        };
        fixture.plant(&edge).await;
    }
}

fn new_request(key: &Key) -> AcquireRequest {
    AcquireRequest::new(key.clone(), Ttl::DEFAULT).expect("randomness")
}

async fn acquire(
    backend: &impl LockBackend<Fencing = crate::backend::Fenced>,
    request: &AcquireRequest,
) -> ModelAnswer {
    match backend.acquire(request).await.expect("the store works") {
        AcquireOutcome::Acquired(lease) => ModelAnswer::Granted(lease.fence().get()),
        AcquireOutcome::Contended { .. } => ModelAnswer::Contended,
        AcquireOutcome::AlreadyUsed => ModelAnswer::AlreadyUsed,
    }
}

fn hint_for(keys: &[Key], hint: Option<usize>) -> Hint {
    hint.map_or_else(Hint::default, |hint| Hint::key(keys[hint].clone()))
}

fn yes_or_no(answer: bool) -> ModelAnswer {
    if answer { ModelAnswer::Yes } else { ModelAnswer::No }
}

fn found_answer(lock_id: LockId, fence: Fence) -> ModelAnswer {
    ModelAnswer::Found(lock_id, fence.get())
}

/// A small generator, so that a seed produces the same history everywhere.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from((self.0 >> 32) % bound as u64).expect("a small number")
    }

    fn hint(&mut self, keys: usize) -> Option<usize> {
        let choice = self.below(keys + 1);
        (choice < keys).then_some(choice)
    }

    /// Chooses a recent request: old ones seldom hold anything.
    fn request(&mut self, requests: usize) -> usize {
        requests - 1 - self.below(requests.min(6))
    }

    fn step(&mut self, keys: usize, requests: usize) -> Step {
        let key = self.below(keys);
        let request = self.request(requests);
        match self.below(16) {
            0..=4 => Step::Acquire { key },
            5 => Step::Replay { request },
            6..=8 => Step::Release { request, hint: self.hint(keys) },
            9..=10 => Step::Extend { request, hint: self.hint(keys) },
            11 => Step::IsLocked { key },
            12 => Step::LookupKey { key },
            13 => Step::LookupId { request },
            14 => Step::Age { key },
            _ => Step::Kill { key },
        }
    }
}
