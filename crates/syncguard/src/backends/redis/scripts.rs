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
}

macro_rules! script {
    ($($file:literal)*) => {
        Script::new(concat!(include_str!("lua/common.lua"), $(include_str!($file)),*))
    };
}

impl Scripts {
    pub(super) fn new() -> Self {
        Self {
            acquire: script!("lua/acquire.lua"),
            release: script!("lua/find.lua" "lua/release.lua"),
            extend: script!("lua/find.lua" "lua/extend.lua"),
            is_locked: script!("lua/is_locked.lua"),
            lookup: script!("lua/lookup.lua"),
            cleanup: script!("lua/cleanup.lua"),
            list: script!("lua/list.lua"),
        }
    }
}

impl Script {
    fn new(text: &'static str) -> Self {
        Self { text, hash: Sha1::from(text).digest().to_string() }
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
