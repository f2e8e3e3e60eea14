//! The scripts, sent by their hash; their text only when the server does not know them.

use redis::aio::ConnectionManager;
use redis::{Cmd, ErrorKind, RedisError, RedisResult, ServerErrorKind, Value};

/// A script and the hash that the server knows it by.
#[derive(Debug)]
pub(super) struct Script {
    text: &'static str,
    hash: String,
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
        }
    }
}

impl Script {
    fn new(text: &'static str) -> Self {
        Self { text, hash: redis::Script::new(text).get_hash().to_owned() }
    }

    /// Runs the script, in one round trip unless the server has to learn it.
    ///
    /// The text itself is sent then: loading it first and trying the hash again would race a flush.
    pub(super) async fn run(
        &self,
        mut connection: ConnectionManager,
        keys: &[&str],
        arguments: &[&str],
    ) -> RedisResult<Value> {
        let call = |command: &str, script: &str| {
            let mut call = Cmd::new();
            call.arg(command).arg(script).arg(keys.len()).arg(keys).arg(arguments);
            call
        };
        match call("EVALSHA", &self.hash).query_async(&mut connection).await {
            Err(error) if is_unknown(&error) => {
                call("EVAL", self.text).query_async(&mut connection).await
            }
            answer => answer,
        }
    }
}

fn is_unknown(error: &RedisError) -> bool {
    error.kind() == ErrorKind::Server(ServerErrorKind::NoScript)
}
