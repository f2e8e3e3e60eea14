//! One acquire request, from the first copy sent until no copy can leave a lock behind: a state
//! machine without I/O.

use std::time::Duration;

use super::clock::LocalInstant;
use crate::common::error::Result;
use crate::common::fence::Fencing;
use crate::common::time::TIME_TOLERANCE_MS;
use crate::contract::outcome::{AcquireOutcome, ReleaseOutcome};
use crate::contract::request::AcquireRequest;

/// How long after its expiry a lock still counts as held.
pub(super) const TOLERANCE: Duration = Duration::from_millis(TIME_TOLERANCE_MS);

/// A request and what is known about the copies of it that were sent.
///
/// A copy is *open* from when it is sent until it is answered. After an error that leaves the
/// outcome unknown, the copy stays open, because the store may still apply it. An open copy can be
/// granted whenever the key is free, so the request must be sent again, or undone, before it can be
/// forgotten.
#[derive(Clone, Debug)]
pub(super) struct Acquisition {
    request: AcquireRequest,
    first_sent: LocalInstant,
    last_sent: LocalInstant,
    open: u32,
    is_granted: bool,
}

/// What the answer to a copy means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// The request is granted.
    Granted,
    /// The request is not granted; another one may be.
    NotGranted,
    /// The backend reports a request that was sent only once as already used.
    Impossible,
    /// There is no answer, or it is an error.
    Failed,
}

impl Acquisition {
    /// Creates the state of a request whose first copy is sent now.
    pub(super) fn new(request: AcquireRequest, now: LocalInstant) -> Self {
        Self { request, first_sent: now, last_sent: now, open: 1, is_granted: false }
    }

    /// Records that another copy is sent.
    pub(super) fn sent_again(&mut self, now: LocalInstant) {
        self.last_sent = now;
        self.open += 1;
    }

    /// Records the answer to a copy.
    pub(super) fn answered<F: Fencing>(&mut self, answer: &Result<AcquireOutcome<F>>) -> Verdict {
        match answer {
            Ok(AcquireOutcome::Acquired(_)) => {
                self.close_one();
                self.is_granted = true;
                Verdict::Granted
            }
            // An answer to this copy says nothing about the others.
            Ok(AcquireOutcome::Contended { .. }) => {
                self.close_one();
                Verdict::NotGranted
            }
            Ok(AcquireOutcome::AlreadyUsed) => {
                self.close_one();
                if self.open == 0 {
                    return Verdict::Impossible;
                }
                // One of the other copies was granted, and that lease is over.
                self.close_one();
                Verdict::NotGranted
            }
            Err(error) => {
                if !error.may_have_taken_effect() {
                    self.close_one();
                }
                Verdict::Failed
            }
        }
    }

    /// Records the answer to an undo.
    pub(super) fn undone(&mut self, answer: ReleaseOutcome, undo_is_final: bool) {
        if undo_is_final || self.open == 0 {
            self.open = 0;
            self.is_granted = false;
        } else if answer == ReleaseOutcome::Released && !self.is_granted {
            // The lock that was released was granted to one of the open copies.
            self.close_one();
        }
        // Otherwise an open copy may still arrive, and find the key free.
    }

    /// Records that the guard has released the granted lock.
    pub(super) fn released(&mut self) {
        self.is_granted = false;
    }

    fn close_one(&mut self) {
        self.open = self.open.saturating_sub(1);
    }

    pub(super) fn request(&self) -> &AcquireRequest {
        &self.request
    }

    /// Returns when the first copy was sent. A grant counts from here, because it may have been
    /// given to the first copy.
    pub(super) fn first_sent(&self) -> LocalInstant {
        self.first_sent
    }

    /// Returns whether a copy is open.
    pub(super) fn is_open(&self) -> bool {
        self.open > 0
    }

    /// Returns whether the request must be undone before it can be forgotten, if its lock is not
    /// wanted.
    pub(super) fn needs_undo(&self) -> bool {
        self.is_open() || self.is_granted
    }

    /// Returns when every grant of this request is dead by itself.
    pub(super) fn dead_at(&self) -> LocalInstant {
        self.last_sent + self.request.ttl().as_duration() + TOLERANCE
    }

    /// Returns whether another copy is worth sending now: a grant counts from the *first* copy.
    pub(super) fn is_worth_repeating(&self, now: LocalInstant) -> bool {
        now.since(self.first_sent) < self.request.ttl().as_duration() / 2
    }
}

/// Two states of one request are equal if all further inputs lead to equal states.
#[cfg(test)]
impl Acquisition {
    pub(super) fn facts(&self) -> (LocalInstant, LocalInstant, u32, bool) {
        (self.first_sent, self.last_sent, self.open, self.is_granted)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::common::error::{Error, ErrorCode};
    use crate::common::fence::{Fence, Fenced};
    use crate::common::key::Key;
    use crate::common::time::Timestamp;
    use crate::common::ttl::Ttl;
    use crate::contract::outcome::{Lease, NotHeldReason};

    fn at(ms: u64) -> LocalInstant {
        LocalInstant::from_start(Duration::from_millis(ms))
    }

    fn acquisition() -> Acquisition {
        let request = AcquireRequest::new(Key::new("k").expect("valid"), Ttl::DEFAULT);
        Acquisition::new(request.expect("random"), at(0))
    }

    const CONTENDED: Result<AcquireOutcome> = Ok(AcquireOutcome::Contended { expires_in: None });

    fn acquired() -> AcquireOutcome {
        let fence = Fence::new(1).expect("valid");
        AcquireOutcome::Acquired(Lease::new(fence, Timestamp::from_millis(1)))
    }

    fn unknown() -> Error {
        Error::new(ErrorCode::NetworkTimeout, "no answer")
    }

    #[test]
    fn a_replayed_grant_is_undone_until_the_other_copy_cannot_arrive() {
        let mut acquisition = acquisition();
        assert_eq!(acquisition.answered::<Fenced>(&Err(unknown())), Verdict::Failed);
        acquisition.sent_again(at(10));
        assert_eq!(acquisition.answered(&Ok(acquired())), Verdict::Granted);
        acquisition.undone(ReleaseOutcome::Released, false);
        assert!(acquisition.needs_undo(), "the first copy may still arrive");
        assert_eq!(acquisition.dead_at(), at(10) + Ttl::DEFAULT.as_duration() + TOLERANCE);
        acquisition.undone(ReleaseOutcome::NotHeld(NotHeldReason::NotFound), true);
        assert!(!acquisition.needs_undo());
    }

    #[test]
    fn a_request_is_repeated_within_half_of_its_ttl() {
        let acquisition = acquisition();
        let half = at(0) + Ttl::DEFAULT.as_duration() / 2;
        assert!(acquisition.is_worth_repeating(half - Duration::from_millis(1)));
        assert!(!acquisition.is_worth_repeating(half));
    }

    #[test]
    fn a_released_grant_needs_no_undo() {
        let mut acquisition = acquisition();
        assert_eq!(acquisition.answered(&Ok(acquired())), Verdict::Granted);
        assert!(acquisition.needs_undo());
        acquisition.released();
        assert!(!acquisition.needs_undo());
    }

    #[test]
    fn a_new_request_cannot_be_used_already() {
        assert_eq!(
            acquisition().answered::<Fenced>(&Ok(AcquireOutcome::AlreadyUsed)),
            Verdict::Impossible
        );
    }

    /// What the store and the network can do to one request, with two copies and lost answers.
    #[derive(Clone, Debug, PartialEq, Eq, Hash)]
    struct World {
        /// Copies on their way to the store.
        travelling: u8,
        /// The request holds the key.
        holds: bool,
        /// How many more copies may be sent.
        copies_left: u8,
        open: u32,
        is_granted: bool,
        is_abandoned: bool,
    }

    /// Walks every order of sending, delivery, lost answers, undo and abandonment: whenever the
    /// machine reports that nothing needs to be undone, nothing can be left behind.
    #[test]
    fn in_every_order_nothing_is_left_behind() {
        let start = World {
            travelling: 1,
            holds: false,
            copies_left: 2,
            open: 1,
            is_granted: false,
            is_abandoned: false,
        };
        let (mut seen, mut queue) = (HashSet::from([start.clone()]), vec![start]);
        while let Some(world) = queue.pop() {
            let mut machine = acquisition();
            machine.open = world.open;
            machine.is_granted = world.is_granted;
            if !machine.needs_undo() {
                assert!(!world.holds, "a lock was left behind: {world:?}");
                assert_eq!(world.travelling, 0, "a copy can still arrive: {world:?}");
            }
            for next in successors(&world, &machine) {
                if seen.insert(next.clone()) {
                    queue.push(next);
                }
            }
        }
        assert!(seen.len() > 20, "the walk reached too few states: {}", seen.len());
    }

    fn successors(world: &World, machine: &Acquisition) -> Vec<World> {
        let mut next = Vec::new();
        let mut push = |machine: &Acquisition, change: &dyn Fn(&mut World)| {
            let mut after = world.clone();
            after.open = machine.open;
            after.is_granted = machine.is_granted;
            change(&mut after);
            next.push(after);
        };
        if !world.is_abandoned && world.copies_left > 0 && machine.is_open() {
            let mut sending = machine.clone();
            sending.sent_again(at(1));
            push(&sending, &|world| {
                world.travelling += 1;
                world.copies_left -= 1;
            });
        }
        if !world.is_abandoned {
            push(machine, &|world| world.is_abandoned = true);
        }
        if world.travelling > 0 {
            // Delivered to a free key, or to our own record, and answered; or the answer is lost.
            let mut granted = machine.clone();
            granted.answered(&Ok(acquired()));
            for machine in [&granted, machine] {
                push(machine, &|world| {
                    world.travelling -= 1;
                    world.holds = true;
                });
            }
            // Delivered while another request holds the key.
            if !world.holds {
                let mut refused = machine.clone();
                refused.answered(&CONTENDED);
                for machine in [&refused, machine] {
                    push(machine, &|world| world.travelling -= 1);
                }
            }
        }
        if world.is_abandoned && machine.needs_undo() {
            let answer = if world.holds {
                ReleaseOutcome::Released
            } else {
                ReleaseOutcome::NotHeld(NotHeldReason::NotFound)
            };
            let mut undone = machine.clone();
            undone.undone(answer, false);
            for machine in [&undone, machine] {
                push(machine, &|world| world.holds = false);
            }
        }
        next
    }
}
