//! The scripts, sent by their hash; their text only when the server does not know them.

use redis::{
    Cmd, ErrorKind, RedisError, RedisResult, RedisWrite, ServerErrorKind, ToRedisArgs, Value,
};
use sha1_smol::Sha1;

use super::connection::Line;

/// A script and the hash that the server knows it by.
#[derive(Debug)]
pub(super) struct Script {
    text: &'static str,
    hash: String,
    /// The same for the node that imports a slot: it declares the first key only.
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
    pub(super) acquire: Script,
    pub(super) release: Script,
    pub(super) extend: Script,
    pub(super) is_locked: Script,
    pub(super) lookup: Script,
    pub(super) cleanup: Script,
    pub(super) list: Script,
    pub(super) resolve: Script,
    // For keys that are at two nodes while their slot moves: one key each.
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

impl Scripts {
    pub(super) fn new() -> Self {
        Self {
            acquire: script!("lua/acquire.lua"),
            release: script!("lua/find.lua" "lua/release.lua"),
            extend: script!("lua/find.lua" "lua/expiry.lua" "lua/extend.lua"),
            is_locked: script!("lua/is_locked.lua"),
            lookup: script!("lua/lookup.lua"),
            cleanup: script!("lua/cleanup.lua"),
            list: script!("lua/list.lua"),
            resolve: script!("lua/resolve.lua"),
            claim: script!("lua/claim.lua"),
            draw: script!("lua/draw.lua"),
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

    /// Runs the script at the node that imports the slot of its keys, right after `ASKING`. Such a
    /// node refuses a script that declares several keys of which one is missing, so only the first
    /// is declared.
    pub(super) async fn run_asked(
        &self,
        line: &mut Line,
        keys: &[&str],
        arguments: &[Argument<'_>],
    ) -> RedisResult<Value> {
        let (declared, others) = keys.split_first().ok_or((ErrorKind::Client, "no key"))?;
        let mut call = redis::cmd("EVAL");
        call.arg(self.asked).arg(1).arg(declared).arg(keys.len()).arg(others).arg(arguments);
        line.send(call).await
    }

    /// Runs the script, in one round trip unless the server has to learn it.
    ///
    /// The text itself is sent then: loading it first and trying the hash again would race a flush.
    pub(super) async fn run(
        &self,
        line: &mut Line,
        keys: &[&str],
        arguments: &[Argument<'_>],
    ) -> RedisResult<Value> {
        let call = |command: &str, script: &str| {
            /// Enough for most calls; more is only a little slower.
            const BYTES: usize = 512;
            let mut call = Cmd::with_capacity(3 + keys.len() + arguments.len(), BYTES);
            call.arg(command).arg(script).arg(keys.len()).arg(keys).arg(arguments);
            call
        };
        match line.send(call("EVALSHA", &self.hash)).await {
            Err(error) if is_unknown(&error) => line.send(call("EVAL", self.text)).await,
            answer => answer,
        }
    }
}

fn is_unknown(error: &RedisError) -> bool {
    error.kind() == ErrorKind::Server(ServerErrorKind::NoScript)
}
