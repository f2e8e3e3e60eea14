//! The Lua scripts. They are sent by hash, and as text only if the server does not know them.

use redis::{
    Cmd, ErrorKind, RedisError, RedisResult, RedisWrite, ServerErrorKind, ToRedisArgs, Value,
};
use sha1_smol::Sha1;

use super::connection::CommandSink;

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

/// One script per operation.
#[derive(Debug)]
pub(super) struct Scripts {
    // For one lock, and for many.
    pub(super) acquire: (Script, Script),
    pub(super) acquire_any: Script,
    pub(super) release: (Script, Script),
    pub(super) extend: (Script, Script),
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

macro_rules! script {
    ($($file:literal)*) => {
        Script::new(
            concat!("local is_asked = false\n", include_str!("lua/common.lua"), $(include_str!($file)),*),
            concat!(include_str!("lua/asked.lua"), include_str!("lua/common.lua"), $(include_str!($file)),*),
        )
    };
}

/// A script for one lock, and the same for many.
macro_rules! scripts {
    ($($shared:literal)*; $file:literal) => {
        (script!($($shared)* $file), {
            const MANY: &str = concat!(
                "local is_asked = false\n",
                include_str!("lua/common.lua"),
                $(include_str!($shared),)*
                "local function one(KEYS, ARGV)\n",
                include_str!($file),
                "\nend\n",
                include_str!("lua/many.lua"),
            );
            // A node that imports a slot runs only scripts for one lock.
            Script::new(MANY, MANY)
        })
    };
}

impl Scripts {
    pub(super) fn new() -> Self {
        Self {
            acquire: scripts!("lua/fence.lua"; "lua/acquire.lua"),
            acquire_any: script!(
                "lua/fence.lua" "lua/acquire_any_begin.lua" "lua/acquire.lua" "lua/acquire_any.lua"
            ),
            release: scripts!("lua/find.lua"; "lua/release.lua"),
            extend: scripts!("lua/find.lua" "lua/expiry.lua"; "lua/extend.lua"),
            is_locked: script!("lua/is_locked.lua"),
            lookup: script!("lua/lookup.lua"),
            cleanup: script!("lua/cleanup.lua"),
            list: script!("lua/list.lua"),
            resolve: script!("lua/resolve.lua"),
            collect_fences: script!("lua/collect_fences.lua"),
            check_fence: script!("lua/fenced.lua" "lua/check_fence.lua"),
            shards: script!("lua/shards.lua"),
            claim: script!("lua/claim.lua"),
            draw: script!("lua/fence.lua" "lua/draw.lua"),
            seal: script!("lua/seal.lua"),
            extend_one: script!("lua/expiry.lua" "lua/extend_one.lua"),
            release_one: script!("lua/release_one.lua"),
            index: script!("lua/index.lua"),
        }
    }
}

impl Script {
    fn new(text: &'static str, asked: &'static str) -> Self {
        Self { text, hash: Sha1::from(text).digest().to_string(), asked }
    }

    /// Runs the script on the node that imports the slot of its keys, right after `ASKING`. Such a
    /// node refuses a script that declares several keys if one of them is missing, so only the
    /// first is declared.
    pub(super) async fn run_asked(
        &self,
        sink: &mut CommandSink,
        keys: &[&str],
        arguments: &[Argument<'_>],
    ) -> RedisResult<Value> {
        let (declared, others) = keys.split_first().ok_or((ErrorKind::Client, "no key"))?;
        let mut call = redis::cmd("EVAL");
        call.arg(self.asked).arg(1).arg(declared).arg(keys.len()).arg(others).arg(arguments);
        sink.send(call).await
    }

    /// Runs the script, in one round trip if the server knows it.
    ///
    /// If not, the text itself is sent: loading it and trying the hash again would race with a
    /// flush.
    pub(super) async fn run(
        &self,
        sink: &mut CommandSink,
        keys: &[&str],
        arguments: &[Argument<'_>],
    ) -> RedisResult<Value> {
        let call = |command: &str, script: &str| {
            /// Enough for most calls; longer ones reallocate.
            const BYTES: usize = 512;
            let mut call = Cmd::with_capacity(3 + keys.len() + arguments.len(), BYTES);
            call.arg(command).arg(script).arg(keys.len()).arg(keys).arg(arguments);
            call
        };
        match sink.send(call("EVALSHA", &self.hash)).await {
            Err(error) if is_unknown(&error) => sink.send(call("EVAL", self.text)).await,
            answer => answer,
        }
    }
}

fn is_unknown(error: &RedisError) -> bool {
    error.kind() == ErrorKind::Server(ServerErrorKind::NoScript)
}
