//! The Lua scripts, and calls of them. A script is sent by hash, and as text only if the server
//! does not know it.

use std::fmt::Write as _;
use std::sync::LazyLock;

use redis::{Arg, Cmd, ErrorKind, RedisWrite, ToRedisArgs};
use sha1_smol::Sha1;

/// A script and the hash by which the server knows it.
#[derive(Debug)]
pub(super) struct Script {
    text: &'static str,
    hash: String,
    /// The variant for the node that imports a slot, which declares only its first key.
    asked: &'static str,
}

/// An argument of a script.
#[derive(Clone, Copy, Debug)]
pub(super) enum Argument<'a> {
    Text(&'a str),
    Number(u64),
}

impl ToRedisArgs for Argument<'_> {
    fn write_redis_args<W: ?Sized + RedisWrite>(&self, out: &mut W) {
        match self {
            Self::Text(text) => text.write_redis_args(out),
            Self::Number(number) => number.write_redis_args(out),
        }
    }
}

/// A script for one lock, and the same for many.
#[derive(Debug)]
pub(super) struct BatchedScript {
    one: Script,
    many: Script,
    /// How many keys a lock has.
    keys: usize,
}

/// The keys of one lock, and the arguments that it does not share with others, for a
/// [`BatchedScript`].
///
/// It is one allocation, because a batch is often freed on another thread than its items were made
/// on, where the allocators of both wait for each other.
pub(super) struct Item {
    text: String,
    /// Where each part ends.
    ends: [usize; Self::PARTS],
    parts: usize,
}

impl Item {
    /// The most parts: those of an acquire.
    const PARTS: usize = 6;

    /// Joins the keys and the arguments.
    pub(super) fn new<const N: usize>(parts: [Argument<'_>; N]) -> Self {
        const { assert!(N <= Self::PARTS, "BUG: more parts than an item has") };
        let bytes = parts.iter().map(|part| match part {
            Argument::Text(text) => text.len(),
            // The digits of the largest number.
            Argument::Number(_) => 20,
        });
        let mut text = String::with_capacity(bytes.sum());
        let mut ends = [0; Self::PARTS];
        for (part, end) in parts.iter().zip(&mut ends) {
            match part {
                Argument::Text(part) => text.push_str(part),
                Argument::Number(number) => {
                    write!(text, "{number}").expect("BUG: a string takes any text");
                }
            }
            *end = text.len();
        }
        Self { text, ends, parts: N }
    }

    fn part(&self, place: usize) -> &str {
        let start = place.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.text[start..self.ends[place]]
    }

    /// Returns the first key.
    pub(super) fn first_key(&self) -> &str {
        self.part(0)
    }
}

/// One script per operation.
pub(super) static SCRIPTS: LazyLock<Scripts> = LazyLock::new(Scripts::new);

#[derive(Debug)]
pub(super) struct Scripts {
    pub(super) acquire: BatchedScript,
    pub(super) acquire_any: Script,
    pub(super) release: BatchedScript,
    pub(super) extend: BatchedScript,
    pub(super) is_locked: Script,
    pub(super) lookup: Script,
    pub(super) cleanup: Script,
    pub(super) list: Script,
    pub(super) resolve: Script,
    pub(super) collect_fences: Script,
    pub(super) check_fence: Script,
    pub(super) shards: Script,
    // For keys that are on two nodes while their slot moves; each script has one key.
    pub(super) claim: Script,
    pub(super) draw: Script,
    pub(super) seal: Script,
    pub(super) extend_one: Script,
    pub(super) release_one: Script,
    pub(super) index: Script,
}

macro_rules! lua {
    ($name:literal) => {
        include_str!(concat!("lua/", $name, ".lua"))
    };
}

/// A script, from files and other text.
macro_rules! script {
    ($($part:expr),* $(,)?) => {
        Script::new(
            concat!("local is_asked = false\n", lua!("common"), $($part),*),
            concat!(lua!("asked"), lua!("common"), $($part),*),
        )
    };
}

/// The beginning of a function that runs an operation for one lock.
macro_rules! function {
    ($($parameter:literal)*) => {
        concat!("local function one(raw", $(", ", $parameter,)* ")\n")
    };
}

impl Scripts {
    fn new() -> Self {
        Self {
            acquire: BatchedScript {
                one: script!(
                    lua!("fence"),
                    lua!("acquire_shared"),
                    lua!("acquire_alone"),
                    lua!("acquire"),
                ),
                many: script!(
                    lua!("fence"),
                    lua!("acquire_shared"),
                    function!("lock" "index" "lock_id" "ttl" "key" "counter"),
                    lua!("acquire"),
                    "\nend\n",
                    lua!("many"),
                    "return answers\n",
                ),
                keys: 3,
            },
            acquire_any: script!(
                lua!("fence"),
                lua!("acquire_shared"),
                function!("lock" "index" "lock_id" "ttl" "key" "counter"),
                lua!("acquire"),
                "\nend\n",
                lua!("acquire_any"),
            ),
            release: BatchedScript {
                one: script!(
                    lua!("find"),
                    lua!("release_shared"),
                    lua!("delete_one"),
                    lua!("release_alone"),
                    lua!("release"),
                ),
                many: script!(
                    lua!("find"),
                    lua!("release_shared"),
                    lua!("delete_many"),
                    function!("index" "hint" "lock_id" "channel" "age"),
                    lua!("release"),
                    "\nend\n",
                    lua!("many"),
                    lua!("release_many"),
                ),
                keys: 2,
            },
            extend: BatchedScript {
                one: script!(
                    lua!("find"),
                    lua!("expiry"),
                    lua!("extend_shared"),
                    lua!("extend_alone"),
                    lua!("extend"),
                ),
                many: script!(
                    lua!("find"),
                    lua!("expiry"),
                    lua!("extend_shared"),
                    function!("index" "hint" "lock_id" "ttl"),
                    lua!("extend"),
                    "\nend\n",
                    lua!("many"),
                    "return answers\n",
                ),
                keys: 2,
            },
            is_locked: script!(lua!("is_locked")),
            lookup: script!(lua!("lookup")),
            cleanup: script!(lua!("cleanup")),
            list: script!(lua!("list")),
            resolve: script!(lua!("resolve")),
            collect_fences: script!(lua!("collect_fences")),
            check_fence: script!(lua!("fenced"), lua!("check_fence")),
            shards: script!(lua!("shards")),
            claim: script!(lua!("claim")),
            draw: script!(lua!("fence"), lua!("draw")),
            seal: script!(lua!("seal")),
            extend_one: script!(lua!("expiry"), lua!("extend_one")),
            release_one: script!(lua!("delete_one"), lua!("release_one")),
            index: script!(lua!("index")),
        }
    }
}

impl Script {
    fn new(text: &'static str, asked: &'static str) -> Self {
        Self { text, hash: Sha1::from(text).digest().to_string(), asked }
    }

    /// Encodes a call.
    pub(super) fn call(&'static self, keys: &[&str], arguments: &[Argument<'_>]) -> Call {
        /// Enough for most calls; longer ones reallocate.
        const BYTES: usize = 512;
        let mut command = Cmd::with_capacity(3 + keys.len() + arguments.len(), BYTES);
        command.arg("EVALSHA").arg(&self.hash).arg(keys.len()).arg(keys).arg(arguments);
        Call { script: self, keys: keys.len(), command }
    }
}

/// A call of a script.
pub(super) struct Call {
    script: &'static Script,
    /// How many keys it has.
    keys: usize,
    /// `EVALSHA`, the hash, the number of keys, the keys and the arguments.
    pub(super) command: Cmd,
}

impl Call {
    /// Returns the parts of the command, from a place on.
    fn parts(&self, from: usize) -> impl Iterator<Item = &[u8]> {
        let bytes = |part| match part {
            Arg::Simple(bytes) => bytes,
            // A call has no cursor.
            _ => &[][..],
        };
        self.command.args_iter().skip(from).map(bytes)
    }

    fn first_key(&self) -> Option<&[u8]> {
        self.parts(3).next()
    }

    /// Returns the command for a server that does not know the script. Loading it and trying the
    /// hash again would race with a flush.
    pub(super) fn with_text(&self) -> Cmd {
        let mut command = redis::cmd("EVAL");
        command.arg(self.script.text);
        for part in self.parts(2) {
            command.arg(part);
        }
        command
    }

    /// Returns the command for the node that imports the slot of the keys, right after `ASKING`.
    /// Such a node refuses a script that declares several keys if one of them is missing, so only
    /// the first is declared.
    pub(super) fn asked(&self) -> Cmd {
        let mut command = redis::cmd("EVAL");
        command.arg(self.script.asked).arg(1).arg(self.first_key()).arg(self.keys);
        for part in self.parts(4) {
            command.arg(part);
        }
        command
    }
}

impl BatchedScript {
    /// Encodes a call for one or many locks. `shared` are the arguments that all locks have in
    /// common.
    pub(super) fn call(&'static self, shared: &[Argument<'_>], items: &[Item]) -> Call {
        /// For the hash and the shared arguments.
        const BYTES: usize = 200;
        let script = if items.len() == 1 { &self.one } else { &self.many };
        let keys = self.keys * items.len();
        let parts: usize = items.iter().map(|item| item.parts).sum();
        let bytes: usize = items.iter().map(|item| item.text.len()).sum();
        let mut command = Cmd::with_capacity(3 + shared.len() + parts, BYTES + bytes);
        command.arg("EVALSHA").arg(&script.hash).arg(keys);
        for item in items {
            for place in 0..self.keys {
                command.arg(item.part(place));
            }
        }
        command.arg(shared);
        for item in items {
            for place in self.keys..item.parts {
                command.arg(item.part(place));
            }
        }
        Call { script, keys, command }
    }
}

/// Whether a server does not know a script.
pub(super) fn is_unknown(error: &redis::RedisError) -> bool {
    error.kind() == ErrorKind::Server(redis::ServerErrorKind::NoScript)
}
