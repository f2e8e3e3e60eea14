//! What happened: the events that clients write, and the history that is made of them.

use std::collections::HashMap;
use std::fmt;
use std::time::Duration;

/// A time in microseconds, by the clock that all processes of this machine share.
pub type Micros = u64;

/// Returns the current time.
#[must_use]
pub fn now() -> Micros {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    seconds * 1_000_000 + u64::try_from(time.tv_nsec).unwrap_or(0) / 1_000
}

/// Converts a duration to microseconds.
#[must_use]
pub fn micros(duration: Duration) -> Micros {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// An operation of a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Acquires a lock.
    Acquire,
    /// Releases a lock.
    Release,
    /// Releases what an acquire of unknown outcome may have acquired.
    Undo,
    /// Extends a lock.
    Extend,
}

/// How an operation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// The lock was granted with this fence.
    Granted(u64),
    /// Another request held the lock.
    Contended,
    /// The request had been used before.
    AlreadyUsed,
    /// The lock was released.
    Released,
    /// The lock was extended.
    Extended,
    /// The lock was not held by this id.
    NotHeld,
    /// The operation failed without effect.
    Failed,
    /// The operation failed. If it took effect, it was undone before it ended.
    Undone,
    /// The operation may or may not have taken effect, now or later.
    Unknown,
}

/// A line that a client writes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// An operation begins.
    Begin {
        /// Its number in this process.
        op: u64,
        /// When.
        at: Micros,
        /// What it does.
        kind: Kind,
        /// The number of the key.
        key: u32,
        /// The lock id.
        id: String,
        /// The TTL of an acquire or extend.
        ttl_ms: u64,
        /// The number of the locker in this process.
        locker: u32,
    },
    /// An operation ends.
    End {
        /// Its number.
        op: u64,
        /// When.
        at: Micros,
        /// How.
        outcome: Outcome,
    },
    /// A guard was valid at some time between two times.
    Valid {
        /// The time before the guard was asked.
        before: Micros,
        /// The time after.
        after: Micros,
        /// The number of the key.
        key: u32,
        /// The lock id.
        id: String,
    },
    /// A write to the fenced register.
    Write {
        /// When it was sent.
        from: Micros,
        /// When it was answered.
        to: Micros,
        /// The number of the key.
        key: u32,
        /// The lock id.
        id: String,
        /// Its fence.
        fence: u64,
        /// Whether it was accepted.
        accepted: bool,
        /// Whether the guard was still valid after the answer.
        is_valid: bool,
    },
    /// A call of the library begins.
    Call {
        /// Its number in this process.
        call: u64,
        /// When.
        at: Micros,
        /// Its name.
        name: String,
        /// The number of the key.
        key: u32,
        /// How long it may take.
        limit: Micros,
    },
    /// A call of the library ends.
    Return {
        /// Its number.
        call: u64,
        /// When.
        at: Micros,
        /// Its result, in a word; `dropped` if the future was dropped.
        result: String,
    },
    /// The process did not run between two times.
    Gap {
        /// From.
        from: Micros,
        /// To.
        to: Micros,
    },
    /// A key or lock id was found where it must not be.
    Leak {
        /// Where.
        place: String,
    },
    /// The client gave up a lock that it could not release.
    Abandoned {
        /// The lock id.
        id: String,
    },
    /// The client shut its lockers down.
    Shutdown {
        /// When.
        at: Micros,
        /// What was left, in a word; `nothing` if all of them released everything.
        left: String,
    },
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Begin { op, at, kind, key, id, ttl_ms, locker } => {
                write!(f, "begin\t{op}\t{at}\t{kind:?}\t{key}\t{id}\t{ttl_ms}\t{locker}")
            }
            Self::End { op, at, outcome: Outcome::Granted(fence) } => {
                write!(f, "end\t{op}\t{at}\tGranted\t{fence}")
            }
            Self::End { op, at, outcome } => write!(f, "end\t{op}\t{at}\t{outcome:?}\t0"),
            Self::Valid { before, after, key, id } => {
                write!(f, "valid\t{before}\t{after}\t{key}\t{id}")
            }
            Self::Write { from, to, key, id, fence, accepted, is_valid } => {
                write!(f, "write\t{from}\t{to}\t{key}\t{id}\t{fence}\t{accepted}\t{is_valid}")
            }
            Self::Call { call, at, name, key, limit } => {
                write!(f, "call\t{call}\t{at}\t{name}\t{key}\t{limit}")
            }
            Self::Return { call, at, result } => write!(f, "return\t{call}\t{at}\t{result}"),
            Self::Gap { from, to } => write!(f, "gap\t{from}\t{to}"),
            Self::Leak { place } => write!(f, "leak\t{}", place.replace(['\t', '\n'], " ")),
            Self::Abandoned { id } => write!(f, "abandoned\t{id}"),
            Self::Shutdown { at, left } => {
                write!(f, "shutdown\t{at}\t{}", left.replace(['\t', '\n'], " "))
            }
        }
    }
}

impl Event {
    /// Returns when it was written, if it says so.
    fn at(&self) -> Option<Micros> {
        match self {
            Self::Begin { at, .. }
            | Self::End { at, .. }
            | Self::Call { at, .. }
            | Self::Return { at, .. }
            | Self::Shutdown { at, .. }
            | Self::Valid { after: at, .. }
            | Self::Write { to: at, .. }
            | Self::Gap { to: at, .. } => Some(*at),
            Self::Leak { .. } | Self::Abandoned { .. } => None,
        }
    }

    /// Reads a line. Returns `None` for a line that a killed process did not finish.
    #[must_use]
    pub fn parse(line: &str) -> Option<Self> {
        let mut fields = line.split('\t');
        let mut next = || fields.next();
        let name = next()?;
        macro_rules! number {
            () => {
                next()?.parse().ok()?
            };
        }
        Some(match name {
            "begin" => Self::Begin {
                op: number!(),
                at: number!(),
                kind: match next()? {
                    "Acquire" => Kind::Acquire,
                    "Release" => Kind::Release,
                    "Undo" => Kind::Undo,
                    "Extend" => Kind::Extend,
                    _ => return None,
                },
                key: number!(),
                id: next()?.to_owned(),
                ttl_ms: number!(),
                locker: number!(),
            },
            "end" => Self::End {
                op: number!(),
                at: number!(),
                outcome: match (next()?, number!()) {
                    ("Granted", fence) => Outcome::Granted(fence),
                    ("Contended", _) => Outcome::Contended,
                    ("AlreadyUsed", _) => Outcome::AlreadyUsed,
                    ("Released", _) => Outcome::Released,
                    ("Extended", _) => Outcome::Extended,
                    ("NotHeld", _) => Outcome::NotHeld,
                    ("Failed", _) => Outcome::Failed,
                    ("Undone", _) => Outcome::Undone,
                    ("Unknown", _) => Outcome::Unknown,
                    _ => return None,
                },
            },
            "valid" => Self::Valid {
                before: number!(),
                after: number!(),
                key: number!(),
                id: next()?.to_owned(),
            },
            "write" => Self::Write {
                from: number!(),
                to: number!(),
                key: number!(),
                id: next()?.to_owned(),
                fence: number!(),
                accepted: number!(),
                is_valid: number!(),
            },
            "call" => Self::Call {
                call: number!(),
                at: number!(),
                name: next()?.to_owned(),
                key: number!(),
                limit: number!(),
            },
            "return" => Self::Return { call: number!(), at: number!(), result: next()?.to_owned() },
            "gap" => Self::Gap { from: number!(), to: number!() },
            "leak" => Self::Leak { place: next()?.to_owned() },
            "abandoned" => Self::Abandoned { id: next()?.to_owned() },
            "shutdown" => Self::Shutdown { at: number!(), left: next()?.to_owned() },
            _ => return None,
        })
    }
}

/// An operation of a backend, with its outcome.
#[derive(Clone, Debug)]
pub struct Op {
    /// The process, by its number; a restarted client is another one.
    pub process: usize,
    /// The number of the locker in its process.
    pub locker: u32,
    /// What it did.
    pub kind: Kind,
    /// The number of the key.
    pub key: u32,
    /// The number of the lock id.
    pub id: u32,
    /// The TTL.
    pub ttl_ms: u64,
    /// When it began.
    pub start: Micros,
    /// When it ended; [`Micros::MAX`] if it did not, or if its outcome is unknown.
    pub end: Micros,
    /// How it ended.
    pub outcome: Outcome,
}

/// A time during which a guard was valid.
#[derive(Clone, Debug)]
pub struct Belief {
    /// The process.
    pub process: usize,
    /// The number of the key.
    pub key: u32,
    /// The number of the lock id.
    pub id: u32,
    /// The end of the first check.
    pub from: Micros,
    /// The begin of the last check.
    pub to: Micros,
}

/// A write to the fenced register.
#[derive(Clone, Debug)]
pub struct Write {
    /// The process.
    pub process: usize,
    /// The number of the key.
    pub key: u32,
    /// The number of the lock id.
    pub id: u32,
    /// Its fence.
    pub fence: u64,
    /// When it was sent.
    pub from: Micros,
    /// When it was answered.
    pub to: Micros,
    /// Whether it was accepted.
    pub accepted: bool,
    /// Whether the guard was valid after the answer.
    pub is_valid: bool,
}

/// A call of the library.
#[derive(Clone, Debug)]
pub struct Call {
    /// The process.
    pub process: usize,
    /// Its name.
    pub name: String,
    /// The number of the key.
    pub key: u32,
    /// When it began.
    pub start: Micros,
    /// When it ended, if it did.
    pub end: Option<Micros>,
    /// How long it may take.
    pub limit: Micros,
    /// Its result; `dropped` if the future was dropped.
    pub result: String,
}

/// A client process.
#[derive(Clone, Debug)]
pub struct Process {
    /// The number of the client; a restarted client keeps it.
    pub client: usize,
    /// When it started.
    pub started: Micros,
    /// When it ended.
    pub ended: Option<Micros>,
    /// The time of its latest event. What it did later is not known yet.
    pub seen: Micros,
    /// What it left when it shut down; `nothing` if it released everything.
    pub left: Option<String>,
    /// When it did not run.
    pub gaps: Vec<(Micros, Micros)>,
}

/// A fault that was injected.
#[derive(Clone, Debug)]
pub struct FaultSpan {
    /// Its name, such as `SIGSTOP`.
    pub name: String,
    /// The client that it hit; `None` for the store.
    pub client: Option<usize>,
    /// When it began.
    pub from: Micros,
    /// When it ended.
    pub to: Micros,
    /// What the documentation allows it to break.
    pub allows: Allowance,
}

/// What a fault may break, by the documentation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Allowance {
    /// Nothing.
    #[default]
    Nothing,
    /// Locks may end early or late: a clock jumped, or the store evicted them.
    Expiry,
    /// Releases and extends may be lost, because they were not replicated.
    LostWrites,
    /// Releases may be lost, because they were answered before they were on the disk.
    LostReleases,
    /// Both: the store was replaced by a copy or by an empty one.
    LostStore,
    /// Operations may take effect a second time, because their requests were sent twice.
    Repetition,
}

/// Everything that happened in a run.
#[derive(Clone, Debug, Default)]
pub struct History {
    /// The operations, in the order in which they began.
    pub ops: Vec<Op>,
    /// What guards said of themselves.
    pub beliefs: Vec<Belief>,
    /// The writes to the fenced register.
    pub writes: Vec<Write>,
    /// The calls of the library.
    pub calls: Vec<Call>,
    /// The processes.
    pub processes: Vec<Process>,
    /// The faults.
    pub faults: Vec<FaultSpan>,
    /// When the coordinator did not run although it wanted to: the machine was busy.
    pub lags: Vec<(Micros, Micros)>,
    /// Where keys or lock ids were found that must not be there.
    pub leaks: Vec<String>,
    /// Lock ids that clients could not release.
    pub abandoned: Vec<u32>,
    ids: HashMap<String, u32>,
    open_ops: HashMap<(usize, u64), usize>,
    open_calls: HashMap<(usize, u64), usize>,
    open_beliefs: HashMap<(usize, u32), usize>,
}

impl Process {
    /// Returns until when it is known what the process did.
    #[must_use]
    pub fn known_until(&self) -> Micros {
        self.ended.unwrap_or(self.seen)
    }
}

impl History {
    /// Adds a process, and returns its number.
    pub fn add_process(&mut self, client: usize, at: Micros) -> usize {
        let (ended, left, gaps) = (None, None, Vec::new());
        self.processes.push(Process { client, started: at, ended, seen: at, left, gaps });
        self.processes.len() - 1
    }

    /// Returns the number of a lock id.
    pub fn number_of(&mut self, id: &str) -> u32 {
        let next = u32::try_from(self.ids.len()).unwrap_or(u32::MAX);
        *self.ids.entry(id.to_owned()).or_insert(next)
    }

    /// Returns all lock ids.
    pub fn ids(&self) -> impl Iterator<Item = &str> {
        self.ids.keys().map(String::as_str)
    }

    /// Adds an event of a process.
    pub fn add(&mut self, process: usize, event: Event) {
        let seen = &mut self.processes[process].seen;
        *seen = event.at().map_or(*seen, |at| at.max(*seen));
        match event {
            Event::Begin { op, at, kind, key, id, ttl_ms, locker } => {
                let id = self.number_of(&id);
                self.open_ops.insert((process, op), self.ops.len());
                let (end, outcome) = (Micros::MAX, Outcome::Unknown);
                let start = at;
                self.ops.push(Op { process, locker, kind, key, id, ttl_ms, start, end, outcome });
            }
            Event::End { op, at, outcome } => {
                let Some(index) = self.open_ops.remove(&(process, op)) else { return };
                let op = &mut self.ops[index];
                op.outcome = outcome;
                op.end = if outcome == Outcome::Unknown { Micros::MAX } else { at };
            }
            Event::Valid { before, after, key, id } => {
                let id = self.number_of(&id);
                let next = self.beliefs.len();
                let index = *self.open_beliefs.entry((process, id)).or_insert(next);
                if index == next {
                    let (from, to) = (after, before);
                    self.beliefs.push(Belief { process, key, id, from, to });
                } else {
                    let belief = &mut self.beliefs[index];
                    belief.from = belief.from.min(after);
                    belief.to = belief.to.max(before);
                }
            }
            Event::Write { from, to, key, id, fence, accepted, is_valid } => {
                let id = self.number_of(&id);
                self.writes.push(Write { process, key, id, fence, from, to, accepted, is_valid });
            }
            Event::Call { call, at, name, key, limit } => {
                self.open_calls.insert((process, call), self.calls.len());
                let (end, result) = (None, String::new());
                self.calls.push(Call { process, name, key, start: at, end, limit, result });
            }
            Event::Return { call, at, result } => {
                let Some(index) = self.open_calls.remove(&(process, call)) else { return };
                self.calls[index].end = Some(at);
                self.calls[index].result = result;
            }
            Event::Gap { from, to } => self.processes[process].gaps.push((from, to)),
            Event::Leak { place } => self.leaks.push(place),
            Event::Abandoned { id } => {
                let id = self.number_of(&id);
                self.abandoned.push(id);
            }
            Event::Shutdown { left, .. } => self.processes[process].left = Some(left),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Event, History, Kind, Micros, Outcome};

    fn begin(op: u64, at: Micros) -> Event {
        let (kind, id) = (Kind::Acquire, "an id".to_owned());
        Event::Begin { op, at, kind, key: 3, id, ttl_ms: 500, locker: 1 }
    }

    #[test]
    fn every_event_is_read_as_it_was_written() {
        let id = || "an id".to_owned();
        let events = [
            begin(1, 2),
            Event::End { op: 1, at: 9, outcome: Outcome::Granted(17) },
            Event::End { op: 1, at: 9, outcome: Outcome::NotHeld },
            Event::End { op: 1, at: 9, outcome: Outcome::Undone },
            Event::Valid { before: 1, after: 2, key: 3, id: id() },
            Event::Write {
                from: 1,
                to: 2,
                key: 3,
                id: id(),
                fence: 4,
                accepted: true,
                is_valid: false,
            },
            Event::Call { call: 1, at: 2, name: "lock".to_owned(), key: 3, limit: 4 },
            Event::Return { call: 1, at: 2, result: "ok".to_owned() },
            Event::Gap { from: 1, to: 2 },
            Event::Leak { place: "a log".to_owned() },
            Event::Abandoned { id: id() },
            Event::Shutdown { at: 1, left: "nothing".to_owned() },
        ];
        for event in events {
            assert_eq!(Event::parse(&event.to_string()), Some(event));
        }
    }

    #[test]
    fn an_unfinished_line_is_no_event() {
        let line = begin(1, 2).to_string();
        assert_eq!(Event::parse(&line[..line.len() - 4]), None);
        assert_eq!(Event::parse(""), None);
    }

    #[test]
    fn an_operation_without_an_end_is_unknown() {
        let mut history = History::default();
        let process = history.add_process(0, 0);
        history.add(process, begin(1, 5));
        assert_eq!((history.ops[0].end, history.ops[0].outcome), (Micros::MAX, Outcome::Unknown));
    }
}
