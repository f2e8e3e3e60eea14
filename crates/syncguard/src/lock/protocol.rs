//! The protocol as a model: clients that run the real [`Acquisition`] and [`LeaseState`], a network
//! that delays and loses requests and answers, and a store. Every reachable state within the bounds
//! is visited.

#![cfg(test)]

use std::collections::{HashSet, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use super::acquisition::{Acquisition, Verdict};
use super::clock::LocalInstant;
use super::lease_state::{AfterExtend, BeginExtend, ExtendAnswer, LeaseState, SentExtend, Step};
use crate::common::error::{Error, ErrorCode, Result};
use crate::common::fence::{Fence, Fenced};
use crate::common::key::Key;
use crate::common::lost_reason::LostReason;
use crate::common::time::{TIME_TOLERANCE_MS, Timestamp};
use crate::common::ttl::Ttl;
use crate::contract::outcome::{AcquireOutcome, Lease, NotHeldReason, ReleaseOutcome};
use crate::contract::request::AcquireRequest;

/// The unit of time is a second, which is also the tolerance.
const TOLERANCE: u8 = 1;
/// A request arrives at most this much later than it was sent, or never.
const LATEST: u8 = 1;
const _: () = assert!(TIME_TOLERANCE_MS == 1000, "the model's unit is the tolerance");

fn at(now: u8) -> LocalInstant {
    LocalInstant::from_start(Duration::from_secs(u64::from(now)))
}

fn ttl(units: u8) -> Ttl {
    Ttl::from_secs(u64::from(units))
}

/// How far a walk goes.
#[derive(Clone, Copy)]
struct Bounds {
    /// How many requests each client may make.
    requests: [u8; 2],
    /// How often a request may be sent.
    copies: u8,
    /// How many extends a lease may see.
    extends: u8,
    ttl: u8,
    end: u8,
    undo_is_final: bool,
}

/// A mistake in the store or in what a client does with the decisions of its state machines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bug {
    None,
    /// The store grants a lock that another request holds.
    GrantsHeldLock,
    /// The store counts a lock as dead a tolerance too early.
    ToleranceHasWrongSign,
    /// An extend also extends the lock of another request.
    ExtendIgnoresOwner,
    /// A lease counts from the answer to its request.
    ValidFromAnswer,
    /// A lease counts from the last copy of its request.
    ValidFromLastCopy,
    /// An extend without an answer counts as one without effect.
    UnknownExtendIsForgotten,
    /// An abandoned request is not undone.
    NoUndo,
    /// A request is undone without waiting for its copy in progress.
    UndoDoesNotWait,
    /// The first answer to an undo ends it.
    UndoOnce,
    /// A guard forgets the open copies of its request.
    OpenCopyIsForgotten,
    /// A release without an answer is not repeated.
    ReleaseOnce,
}

/// A request of a client, by a number that is unique in the model.
type Id = u8;

#[derive(Clone, Debug)]
struct Tracked {
    id: Id,
    machine: Acquisition,
}

impl Hash for Tracked {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.id, self.machine.facts()).hash(state);
    }
}

#[derive(Clone, Debug, Hash)]
enum Phase {
    Idle,
    /// A copy of the request is in progress.
    Asking(Tracked),
    /// The last copy failed; it can be sent again.
    Unsettled(Tracked),
    /// The guard exists.
    Holding(Held),
    /// The guard has let go, and its release is not answered. When it was last sent.
    Releasing(Held, Option<u8>),
}

#[derive(Clone, Debug, Hash)]
struct Held {
    id: Id,
    state: LeaseState,
    unsettled: Option<Tracked>,
    extends_left: u8,
}

/// The undo of an abandoned request.
#[derive(Clone, Debug, Hash)]
struct Undo {
    request: Tracked,
    /// Whether a copy is in progress, whose answer is waited for.
    waits_for_copy: bool,
    dead_at: LocalInstant,
    /// When the last undo was sent.
    sent: Option<u8>,
    is_answered: bool,
}

#[derive(Clone, Debug, Hash)]
struct Client {
    phase: Phase,
    undos: Vec<Undo>,
    requests_left: u8,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Message {
    client: usize,
    id: Id,
    sent: u8,
    /// Whether the client still waits for the answer.
    is_awaited: bool,
    content: Content,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Content {
    Acquire,
    Extend { number: u8, units: u8 },
    Acquired,
    Contended,
    AlreadyUsed,
    Extended { number: u8 },
    ExtendNotHeld { number: u8 },
}

#[derive(Clone, Debug, Hash)]
struct World {
    now: u8,
    /// The request that holds the lock, or held it, and its expiry.
    record: Option<(Id, u8)>,
    /// Requests whose undo was final.
    refused: Vec<Id>,
    clients: [Client; 2],
    /// Sorted: the network keeps no order.
    network: Vec<Message>,
    /// The extends that were sent, by number.
    extends: Vec<SentExtend>,
    /// When each request was last sent.
    last_sent: Vec<(Id, u8)>,
}

/// A step of the model.
type Change<'a> = &'a dyn Fn(&mut World);

/// What happens to a release or an undo. A late one changes nothing more than a lost one: no other
/// request has its id.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fate {
    Answered,
    AnswerLost,
    Lost,
}

const FATES: [Fate; 3] = [Fate::Answered, Fate::AnswerLost, Fate::Lost];

struct Model {
    bounds: Bounds,
    bug: Bug,
    request: AcquireRequest,
}

fn timed_out() -> Result<AcquireOutcome> {
    Err(Error::new(ErrorCode::NetworkTimeout, "no answer"))
}

impl World {
    fn fingerprint(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.hash(&mut hasher);
        hasher.finish()
    }

    fn is_live(&self, bug: Bug) -> bool {
        let Some((_id, expires)) = self.record else { return false };
        match bug {
            Bug::ToleranceHasWrongSign => expires > self.now + TOLERANCE,
            _ => expires + TOLERANCE > self.now,
        }
    }

    fn send(&mut self, client: usize, id: Id, content: Content) {
        if content == Content::Acquire {
            self.last_sent.retain(|(other, _)| *other != id);
            self.last_sent.push((id, self.now));
            self.last_sent.sort_unstable();
        }
        let message = Message { client, id, sent: self.now, is_awaited: true, content };
        let place = self.network.partition_point(|other| *other < message);
        self.network.insert(place, message);
    }

    /// The client no longer waits for an answer to what it has sent for a request.
    fn stop_waiting(&mut self, id: Id) {
        self.network.retain_mut(|message| {
            if message.id == id {
                message.is_awaited = false;
            }
            message.id != id || matches!(message.content, Content::Acquire | Content::Extend { .. })
        });
        self.network.sort();
    }
}

impl Model {
    fn new(bounds: Bounds, bug: Bug) -> Self {
        let request = AcquireRequest::new(Key::new("k").expect("valid"), ttl(bounds.ttl));
        Self { bounds, bug, request: request.expect("random") }
    }

    /// The first client has just sent its request: nothing happens before.
    fn start(&self) -> World {
        let client =
            |requests_left| Client { phase: Phase::Idle, undos: Vec::new(), requests_left };
        let mut world = World {
            now: 0,
            record: None,
            refused: Vec::new(),
            clients: self.bounds.requests.map(client),
            network: Vec::new(),
            extends: Vec::new(),
            last_sent: Vec::new(),
        };
        self.begin(&mut world, 0);
        world
    }

    /// Visits every state, and returns how many there are and how many steps lead to them, or the
    /// first state that breaks a rule.
    fn walk(&self) -> std::result::Result<(usize, usize), String> {
        let start = self.start();
        // By hash, which saves most of the memory. A collision could hide a state, but among a
        // million states there is none with a probability of 0.99999997.
        let mut seen = HashSet::from([start.fingerprint()]);
        let (mut queue, mut steps) = (VecDeque::from([start]), 0);
        while let Some(world) = queue.pop_front() {
            self.check(&world)?;
            for next in self.successors(&world) {
                steps += 1;
                if seen.insert(next.fingerprint()) {
                    queue.push_back(next);
                }
            }
        }
        Ok((seen.len(), steps))
    }

    fn check(&self, world: &World) -> std::result::Result<(), String> {
        let believers = world.clients.iter().filter_map(|client| match &client.phase {
            Phase::Holding(held) if !held.state.remaining(at(world.now)).is_zero() => Some(held.id),
            _ => None,
        });
        let believers: Vec<Id> = believers.collect();
        if believers.len() > 1 {
            return Err(format!("two valid holders: {world:#?}"));
        }
        let (holder, expires) = world.record.unwrap_or((Id::MAX, 0));
        if believers.iter().any(|&id| id != holder || expires <= world.now) {
            return Err(format!("a guard is valid and the store disagrees: {world:#?}"));
        }
        let is_answerable = |client: &Client| {
            client.undos.iter().any(|undo| undo.request.id == holder)
                || match &client.phase {
                    Phase::Idle => false,
                    Phase::Asking(request) | Phase::Unsettled(request) => request.id == holder,
                    Phase::Holding(held) | Phase::Releasing(held, _) => held.id == holder,
                }
        };
        // From then on, the engine counts every grant of the request as dead. One that was late may
        // live longer, by as much as it was late.
        let sent = world.last_sent.iter().find(|(id, _)| *id == holder);
        let is_dead = sent.is_none_or(|(_, sent)| world.now >= sent + self.bounds.ttl + TOLERANCE);
        let is_orphan =
            world.is_live(Bug::None) && !is_dead && !world.clients.iter().any(is_answerable);
        if is_orphan { Err(format!("no client will release the lock: {world:#?}")) } else { Ok(()) }
    }

    fn successors(&self, world: &World) -> Vec<World> {
        let mut next = Vec::new();
        for index in 0..world.network.len() {
            self.deliver(world, index, &mut next);
        }
        for client in 0..world.clients.len() {
            self.act(world, client, &mut next);
        }
        self.pass_time(world, &mut next);
        next
    }

    /// A unit of time passes, unless an undo is due. What is too old arrives no more.
    fn pass_time(&self, world: &World, next: &mut Vec<World>) {
        let is_due = |undo: &Undo| !undo.waits_for_copy && undo.sent != Some(world.now);
        let is_busy = world.clients.iter().flat_map(|client| &client.undos).any(is_due);
        if is_busy || world.now == self.bounds.end {
            return;
        }
        let mut after = world.clone();
        after.now += 1;
        after.network.retain(|message| message.sent + LATEST >= after.now);
        self.end_undos(&mut after);
        next.push(after);
    }

    /// Delivers a message. That it is lost needs no step: it may stay in the network.
    fn deliver(&self, world: &World, index: usize, next: &mut Vec<World>) {
        let mut after = world.clone();
        let message = after.network.remove(index);
        let (client, id) = (message.client, message.id);
        let answer = match message.content {
            Content::Acquire => Some(self.store_acquires(&mut after, id)),
            Content::Extend { number, units } => {
                let is_live = after.is_live(self.bug);
                let is_owner = |holder| holder == id || self.bug == Bug::ExtendIgnoresOwner;
                Some(match &mut after.record {
                    Some((holder, expires)) if is_owner(*holder) && is_live => {
                        *expires = after.now + units;
                        Content::Extended { number }
                    }
                    _ => Content::ExtendNotHeld { number },
                })
            }
            answer => {
                self.receive(&mut after, client, id, answer);
                None
            }
        };
        if let Some(answer) = answer.filter(|_| message.is_awaited) {
            after.send(client, id, answer);
        }
        next.push(after);
    }

    fn store_acquires(&self, world: &mut World, id: Id) -> Content {
        let is_live = world.is_live(self.bug) && self.bug != Bug::GrantsHeldLock;
        match world.record {
            Some((holder, _)) if holder == id && is_live => Content::Acquired,
            Some((holder, _)) if holder == id => Content::AlreadyUsed,
            Some(_) if is_live => Content::Contended,
            _ if world.refused.contains(&id) => Content::AlreadyUsed,
            _ => {
                world.record = Some((id, world.now + self.bounds.ttl));
                Content::Acquired
            }
        }
    }

    /// The client receives an answer.
    fn receive(&self, world: &mut World, client: usize, id: Id, answer: Content) {
        let now = at(world.now);
        let outcome = match answer {
            Content::Acquired => {
                let fence = Fence::new(1).expect("valid");
                Ok(AcquireOutcome::Acquired(Lease::new(fence, Timestamp::from_millis(1))))
            }
            Content::Contended => Ok(AcquireOutcome::Contended { expires_in: None }),
            _ => Ok(AcquireOutcome::AlreadyUsed),
        };
        let extends = world.extends.clone();
        let me = &mut world.clients[client];
        match answer {
            Content::Acquired | Content::Contended | Content::AlreadyUsed => {
                if let Some(undo) = me.undos.iter_mut().find(|undo| undo.request.id == id) {
                    undo.request.machine.answered::<Fenced>(&outcome);
                    undo.waits_for_copy = false;
                } else if let Phase::Asking(request) = &mut me.phase {
                    let verdict = request.machine.answered::<Fenced>(&outcome);
                    assert_ne!(verdict, Verdict::Impossible, "a copy was counted wrongly");
                    let request = request.clone();
                    me.phase = match verdict {
                        Verdict::Granted => Phase::Holding(self.held(request, now)),
                        _ if request.machine.needs_undo() => Phase::Unsettled(request),
                        _ => Phase::Idle,
                    };
                }
            }
            Content::Extended { number } | Content::ExtendNotHeld { number } => {
                let sent = extends[usize::from(number)];
                let is_extended = matches!(answer, Content::Extended { .. });
                let answer = if is_extended {
                    ExtendAnswer::Extended
                } else {
                    ExtendAnswer::NotHeld(LostReason::NotHeld)
                };
                // After the guard has let go, the answer is ignored; see `SharedLease::note_later`.
                if let Phase::Holding(held) = &mut me.phase
                    && held.id == id
                {
                    let after = held.state.extend_ended(sent, answer, now);
                    if let AfterExtend::ReleaseIt(_) = after {
                        // In the background, while the guard still exists.
                        let held = held.clone();
                        me.phase = Phase::Releasing(held, None);
                        world.stop_waiting(id);
                    }
                }
            }
            Content::Acquire | Content::Extend { .. } => unreachable!("these are not answers"),
        }
        self.end_undos(world);
    }

    fn held(&self, request: Tracked, now: LocalInstant) -> Held {
        let since = match self.bug {
            Bug::ValidFromAnswer => now,
            Bug::ValidFromLastCopy => request.machine.facts().1,
            _ => request.machine.first_sent(),
        };
        let is_unsettled = request.machine.is_open() && self.bug != Bug::OpenCopyIsForgotten;
        Held {
            id: request.id,
            state: LeaseState::new(since, ttl(self.bounds.ttl), Duration::ZERO),
            unsettled: is_unsettled.then_some(request),
            extends_left: self.bounds.extends,
        }
    }

    fn undo(&self, request: Tracked, waits_for_copy: bool) -> Undo {
        let dead_at = request.machine.dead_at();
        let waits_for_copy = waits_for_copy && self.bug != Bug::UndoDoesNotWait;
        Undo { request, waits_for_copy, dead_at, sent: None, is_answered: false }
    }

    /// Ends the undos that have nothing more to do; see `cleanup::undo`.
    fn end_undos(&self, world: &mut World) {
        let now = at(world.now);
        for client in &mut world.clients {
            client.undos.retain(|undo| {
                let is_done = !undo.waits_for_copy
                    && (!undo.request.machine.needs_undo()
                        || (self.bug == Bug::UndoOnce && undo.is_answered));
                let is_late = now >= undo.dead_at;
                !is_done && !is_late && self.bug != Bug::NoUndo
            });
        }
    }

    /// What a client may do by itself.
    fn act(&self, world: &World, client: usize, next: &mut Vec<World>) {
        let now = at(world.now);
        let mut push = |change: Change<'_>| {
            let mut after = world.clone();
            change(&mut after);
            self.end_undos(&mut after);
            next.push(after);
        };
        let me = &world.clients[client];
        for (index, undo) in me.undos.iter().enumerate() {
            if undo.waits_for_copy {
                // The copy fails, or its time is over.
                push(&|world| {
                    let undo = &mut world.clients[client].undos[index];
                    undo.request.machine.answered::<Fenced>(&timed_out());
                    undo.waits_for_copy = false;
                    let id = undo.request.id;
                    world.stop_waiting(id);
                });
            } else if undo.sent != Some(world.now) {
                for fate in FATES {
                    push(&|world| self.send_undo(world, client, index, fate));
                }
            }
        }
        match &me.phase {
            Phase::Idle if me.requests_left > 0 => push(&|world| self.begin(world, client)),
            Phase::Idle => {}
            Phase::Asking(request) => {
                let id = request.id;
                push(&|world| {
                    let mut request = request.clone();
                    request.machine.answered::<Fenced>(&timed_out());
                    world.clients[client].phase = Phase::Unsettled(request);
                    world.stop_waiting(id);
                });
                push(&|world| {
                    world.clients[client].phase = Phase::Idle;
                    let undo = self.undo(request.clone(), true);
                    world.clients[client].undos.push(undo);
                });
            }
            Phase::Unsettled(request) => {
                let copies = request.machine.facts().2;
                if copies < u32::from(self.bounds.copies) && request.machine.is_worth_repeating(now)
                {
                    push(&|world| {
                        let mut request = request.clone();
                        request.machine.sent_again(now);
                        world.send(client, request.id, Content::Acquire);
                        world.clients[client].phase = Phase::Asking(request);
                    });
                }
                push(&|world| {
                    world.clients[client].phase = Phase::Idle;
                    let undo = self.undo(request.clone(), false);
                    world.clients[client].undos.push(undo);
                });
            }
            Phase::Holding(held) => self.hold(held, client, &mut push),
            Phase::Releasing(held, sent) => {
                if *sent != Some(world.now) {
                    for fate in FATES {
                        push(&|world| self.send_release(world, client, held, fate));
                    }
                }
            }
        }
    }

    /// A release or an undo reaches the store. Returns its outcome.
    fn store_releases(&self, world: &mut World, id: Id) -> ReleaseOutcome {
        let holds = world.record.is_some_and(|(holder, _)| holder == id);
        if holds && world.is_live(self.bug) {
            world.record = None;
            ReleaseOutcome::Released
        } else {
            ReleaseOutcome::NotHeld(NotHeldReason::NotFound)
        }
    }

    fn send_undo(&self, world: &mut World, client: usize, index: usize, fate: Fate) {
        let undo = &mut world.clients[client].undos[index];
        let id = undo.request.id;
        (undo.sent, undo.is_answered) = (Some(world.now), fate == Fate::Answered);
        if fate == Fate::Lost {
            return;
        }
        if self.bounds.undo_is_final && !world.refused.contains(&id) {
            world.refused.push(id);
            world.refused.sort_unstable();
        }
        let outcome = self.store_releases(world, id);
        if fate == Fate::Answered {
            let undo = &mut world.clients[client].undos[index];
            undo.request.machine.undone(outcome, self.bounds.undo_is_final);
        }
    }

    fn send_release(&self, world: &mut World, client: usize, held: &Held, fate: Fate) {
        let mut held = held.clone();
        if fate != Fate::Lost {
            self.store_releases(world, held.id);
        }
        let is_over = fate == Fate::Answered || self.bug == Bug::ReleaseOnce;
        let me = &mut world.clients[client];
        if !is_over {
            me.phase = Phase::Releasing(held, Some(world.now));
            return;
        }
        me.phase = Phase::Idle;
        if let Some(mut request) = held.unsettled.take() {
            request.machine.released();
            me.undos.push(self.undo(request, false));
        }
    }

    fn begin(&self, world: &mut World, client: usize) {
        let me = &mut world.clients[client];
        me.requests_left -= 1;
        let made_before = self.bounds.requests[client] - me.requests_left;
        let id = Id::try_from(client).expect("small") * 10 + made_before;
        let machine = Acquisition::new(self.request.clone(), at(world.now));
        me.phase = Phase::Asking(Tracked { id, machine });
        world.send(client, id, Content::Acquire);
    }

    /// What the guard, its task and its handles may do.
    fn hold(&self, held: &Held, client: usize, push: &mut dyn FnMut(Change<'_>)) {
        let set =
            |world: &mut World, held: Held| world.clients[client].phase = Phase::Holding(held);
        push(&|world| {
            let mut held = held.clone();
            held.state.let_go(at(world.now));
            world.stop_waiting(held.id);
            world.clients[client].phase = Phase::Releasing(held, None);
        });
        push(&|world| {
            let mut held = held.clone();
            if let Step::Lost(_) = held.state.next(at(world.now)) {
                set(world, held);
            }
        });
        for units in [self.bounds.ttl, 1] {
            push(&|world| {
                let mut held = held.clone();
                if held.extends_left == 0 {
                    return;
                }
                if let BeginExtend::Send(sent) = held.state.begin_extend(ttl(units), at(world.now))
                {
                    held.extends_left -= 1;
                    let number = u8::try_from(world.extends.len()).expect("few");
                    world.extends.push(sent);
                    world.send(client, held.id, Content::Extend { number, units });
                    set(world, held);
                }
            });
        }
        push(&|world| {
            let mut held = held.clone();
            if let Some(&open) = world.extends.iter().find(|sent| held.state.is_open(**sent)) {
                let answer = match self.bug {
                    Bug::UnknownExtendIsForgotten => ExtendAnswer::Refused,
                    _ => ExtendAnswer::Unknown,
                };
                held.state.extend_ended(open, answer, at(world.now));
                set(world, held);
            }
        });
    }
}

const BOUNDS: Bounds =
    Bounds { requests: [1, 1], copies: 2, extends: 0, ttl: 2, end: 4, undo_is_final: false };

fn walk(bounds: Bounds) -> (usize, usize) {
    let started = std::time::Instant::now();
    let (states, steps) = Model::new(bounds, Bug::None).walk().expect("no rule is broken");
    println!("{states} states, {steps} steps, {:.1?}", started.elapsed());
    (states, steps)
}

#[test]
fn no_state_has_two_holders_or_a_lock_that_is_never_released() {
    let (mut states, mut steps) = (0, 0);
    for bounds in [
        BOUNDS,
        Bounds { undo_is_final: true, ..BOUNDS },
        Bounds { requests: [2, 0], ..BOUNDS },
        Bounds { extends: 1, copies: 1, end: 3, ..BOUNDS },
        Bounds { extends: 2, requests: [1, 0], copies: 1, end: 5, ..BOUNDS },
        // Long enough that copies are sent at different times.
        Bounds { extends: 1, requests: [1, 0], ttl: 3, end: 5, ..BOUNDS },
    ] {
        let (found, taken) = walk(bounds);
        states += found;
        steps += taken;
    }
    test_support::figure("protocol model: states", states);
    test_support::figure("protocol model: steps between states", steps);
}

#[test]
#[ignore = "takes minutes; run it with cargo xtask soak"]
fn no_state_within_wider_bounds_breaks_a_rule() {
    let mut states = 0;
    for bounds in [
        Bounds { end: 5, ..BOUNDS },
        Bounds { requests: [2, 1], copies: 1, ..BOUNDS },
        Bounds { extends: 1, copies: 1, ..BOUNDS },
    ] {
        states += walk(bounds).0;
    }
    test_support::figure("protocol model: states within wider bounds", states);
}

#[test]
fn every_planted_bug_is_found() {
    let (two, wrong) = ("two valid holders", "a guard is valid and the store disagrees");
    let orphan = "no client will release the lock";
    let bugs = [
        (Bug::GrantsHeldLock, [two, wrong]),
        (Bug::ToleranceHasWrongSign, [orphan, wrong]),
        (Bug::ExtendIgnoresOwner, [two, wrong]),
        (Bug::ValidFromAnswer, [wrong, wrong]),
        (Bug::ValidFromLastCopy, [wrong, wrong]),
        (Bug::UnknownExtendIsForgotten, [wrong, wrong]),
        (Bug::NoUndo, [orphan, orphan]),
        (Bug::UndoDoesNotWait, [orphan, orphan]),
        (Bug::UndoOnce, [orphan, orphan]),
        (Bug::OpenCopyIsForgotten, [orphan, orphan]),
        (Bug::ReleaseOnce, [orphan, orphan]),
    ];
    for (bug, rules) in bugs {
        let bounds = match bug {
            Bug::ExtendIgnoresOwner | Bug::UnknownExtendIsForgotten => {
                Bounds { extends: 1, copies: 1, ..BOUNDS }
            }
            Bug::ValidFromLastCopy => Bounds { ttl: 3, end: 6, ..BOUNDS },
            _ => BOUNDS,
        };
        let found = Model::new(bounds, bug).walk().expect_err(&format!("{bug:?} is found"));
        let found = found.lines().next().unwrap_or_default();
        assert!(rules.iter().any(|rule| found.starts_with(rule)), "{bug:?}: {found}");
    }
    test_support::figure("protocol model: planted bugs found", bugs.len());
}
