//! Fenced writes to your own keys: a write that comes too late is refused.

use std::sync::LazyLock;
use std::time::Duration;

use redis::aio::ConnectionLike;
use redis::{ErrorKind, FromRedisValue, ServerErrorKind, ToRedisArgs, Value};
use sha1_smol::Sha1;

use super::error;
use crate::common::error::{Error, Result};
use crate::common::fence_source::FenceSource;
use crate::common::key::Key;
use crate::common::storage_key::KeySpace;
use crate::contract::fenced_lock::FencedLock;

/// Writes to your own keys that the server refuses if a later holder of the lock has written.
///
/// * Each write is one script: it compares the fence with the largest one seen for the key,
///   remembers it, and writes.
/// * The largest fence is in a record next to your key, named `{key}:syncguard-fence`, or
///   `key:syncguard-fence` if the key has a tag in braces. It is in the same Cluster slot, and it
///   stays when you delete the key.
/// * A key belongs to the lock under which it was first written. A fence of another lock is
///   refused, because the fences of two locks cannot be compared.
/// * Other commands that write to the key are not checked.
///
/// The connection is yours; the data need not be on the server of the locks.
///
/// ```no_run
/// use syncguard::LockGuard;
/// use syncguard::redis::{FencedKeys, RedisBackend, redis};
///
/// # async fn write(mut connection: redis::aio::MultiplexedConnection, guard: LockGuard<RedisBackend>) -> syncguard::Result<()> {
/// let fenced = FencedKeys::new();
/// // Each of them fails if a later holder has written.
/// fenced.set(&mut connection, &guard, "invoice:42", "paid").await?;
/// fenced.hset(&mut connection, &guard, "invoice:42:log", &[("paid", "yes")]).await?;
/// fenced.del(&mut connection, &guard, "invoice:42:draft").await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct FencedKeys {
    expiry: Option<Duration>,
}

/// A script of yours that runs only if the fence is not stale. See [`FencedKeys::run`].
#[derive(Clone, Debug)]
pub struct FencedScript {
    text: String,
    hash: String,
}

static SET: LazyLock<FencedScript> =
    LazyLock::new(|| FencedScript::with_check("return redis.call('SET', KEYS[1], ARGV[1])"));
static HSET: LazyLock<FencedScript> =
    LazyLock::new(|| FencedScript::with_check("return redis.call('HSET', KEYS[1], unpack(ARGV))"));
static DEL: LazyLock<FencedScript> =
    LazyLock::new(|| FencedScript::with_check("return redis.call('DEL', KEYS[1])"));

impl FencedScript {
    /// Creates a script from its text. `KEYS` and `ARGV` are yours, as in `EVAL`.
    pub fn new(text: &str) -> Result<Self> {
        if text.trim_start().starts_with("#!") {
            return Err(Error::invalid(
                "a fenced script must not begin with \"#!\": the fence is checked before it",
            ));
        }
        Ok(Self::with_check(text))
    }

    fn with_check(text: &str) -> Self {
        let text = format!("{}{text}", include_str!("lua/fenced.lua"));
        Self { hash: Sha1::from(&text).digest().to_string(), text }
    }
}

impl FencedKeys {
    /// How many fields fit in one call; Lua cannot pass arbitrarily many arguments.
    const MOST_FIELDS: usize = 3000;

    /// Creates a value whose records of the largest fence are kept for good.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets how long after the last write the record of the largest fence is kept: at least 48
    /// hours. A holder that was paused for longer is no longer refused.
    pub fn fence_expiry(mut self, expiry: Duration) -> Result<Self> {
        FenceSource::check_age(expiry)?;
        self.expiry = Some(expiry);
        Ok(self)
    }

    /// Sets a string, like `SET`, unless the fence is stale: then it fails with
    /// [`Aborted`](crate::ErrorCode::Aborted), and [`is_stale_fence`](Error::is_stale_fence) is
    /// true.
    ///
    /// # Cancel safety
    ///
    /// If you drop the future before it completes, the write may or may not take effect.
    pub async fn set<C: ConnectionLike + Send>(
        &self,
        connection: &mut C,
        lock: &(impl FencedLock + Sync),
        key: impl AsRef<[u8]> + Send + Sync,
        value: impl ToRedisArgs + Send + Sync,
    ) -> Result<()> {
        self.run::<_, Value>(connection, lock, &SET, &[key], value).await.map(drop)
    }

    /// Sets fields of a hash, like `HSET`, unless the fence is stale. Returns how many fields are
    /// new. At most 3000 fields.
    ///
    /// # Cancel safety
    ///
    /// If you drop the future before it completes, the write may or may not take effect.
    pub async fn hset<C: ConnectionLike + Send>(
        &self,
        connection: &mut C,
        lock: &(impl FencedLock + Sync),
        key: impl AsRef<[u8]> + Send + Sync,
        fields: &[(impl ToRedisArgs + Sync, impl ToRedisArgs + Sync)],
    ) -> Result<u64> {
        if fields.is_empty() || fields.len() > Self::MOST_FIELDS {
            return Err(Error::invalid("a fenced hset needs 1 to 3000 fields"));
        }
        self.run(connection, lock, &HSET, &[key], fields).await
    }

    /// Deletes a key, like `DEL`, unless the fence is stale. Returns whether it existed. The record
    /// of the largest fence stays.
    ///
    /// # Cancel safety
    ///
    /// If you drop the future before it completes, the deletion may or may not take effect.
    pub async fn del<C: ConnectionLike + Send>(
        &self,
        connection: &mut C,
        lock: &(impl FencedLock + Sync),
        key: impl AsRef<[u8]> + Send + Sync,
    ) -> Result<bool> {
        self.run(connection, lock, &DEL, &[key], &[] as &[&str]).await
    }

    /// Runs a script of yours unless the fence is stale. The largest fence is remembered for the
    /// first key; on a Cluster all keys must be in its slot.
    ///
    /// ```no_run
    /// use syncguard::LockGuard;
    /// use syncguard::redis::{FencedKeys, FencedScript, RedisBackend, redis};
    ///
    /// # async fn write(mut connection: redis::aio::MultiplexedConnection, guard: LockGuard<RedisBackend>) -> syncguard::Result<()> {
    /// let append = FencedScript::new("return redis.call('RPUSH', KEYS[1], unpack(ARGV))")?;
    /// let lines = ["charged", "mailed"];
    /// let length: u64 =
    ///     FencedKeys::new().run(&mut connection, &guard, &append, &["log:42"], &lines).await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Cancel safety
    ///
    /// If you drop the future before it completes, the script may or may not run.
    pub async fn run<C: ConnectionLike + Send, T: FromRedisValue>(
        &self,
        connection: &mut C,
        lock: &(impl FencedLock + Sync),
        script: &FencedScript,
        keys: &[impl AsRef<[u8]> + Sync],
        arguments: impl ToRedisArgs + Send + Sync,
    ) -> Result<T> {
        let first = keys.first().ok_or_else(|| Error::invalid("a fenced write needs a key"))?;
        let record = record_of(first.as_ref())?;
        let expiry_ms = self.expiry.map_or(0, |expiry| expiry.as_millis());
        let call = |command: &str, text: &str| {
            let mut call = redis::cmd(command);
            call.arg(text).arg(keys.len() + 1);
            for key in keys {
                call.arg(key.as_ref());
            }
            call.arg(&record).arg(&arguments);
            call.arg(lock.fence().get()).arg(lock_hash(lock.key())).arg(expiry_ms.to_string());
            call
        };
        let mut answer = call("EVALSHA", &script.hash).query_async::<Value>(connection).await;
        if let Err(cause) = &answer
            && cause.kind() == ErrorKind::Server(ServerErrorKind::NoScript)
        {
            answer = call("EVAL", &script.text).query_async::<Value>(connection).await;
        }
        answer
            .map_err(|cause| match cause.code() {
                // One of the script's commands failed, and Redis keeps what others wrote before.
                Some("WRONGTYPE" | "NOPERM") => error::map(&cause).after_effect(),
                _ => error::map(&cause),
            })
            .and_then(|answer| {
                T::from_redis_value(answer).map_err(|_cause| error::unexpected_response())
            })
            .map_err(error::of_key("fenced write", lock.key()))
    }
}

/// Returns what identifies the lock of a fence in records.
pub(super) fn lock_hash(key: &Key) -> String {
    KeySpace::hashed(key.as_str())
}

/// Returns the name of the record with the largest fence of a key. It is in the same Cluster slot:
/// a slot is chosen by the text in the first braces, or by the whole key without such a text.
fn record_of(key: &[u8]) -> Result<Vec<u8>> {
    if key.is_empty() || key.len() > super::RedisConfig::LIMIT_BYTES {
        return Err(Error::invalid("the key of a fenced write must have 1 to 1000 bytes"));
    }
    let tag = key.iter().position(|&byte| byte == b'{').and_then(|open| {
        let length = key[open + 1..].iter().position(|&byte| byte == b'}')?;
        (length > 0).then_some(())
    });
    match tag {
        Some(()) => Ok([key, b":syncguard-fence"].concat()),
        None if key.contains(&b'}') => Err(Error::invalid(
            "the key of a fenced write has a closing brace without a tag in braces; its fence \
             cannot be stored in the same Cluster slot",
        )),
        None => Ok([b"{", key, b"}:syncguard-fence"].concat()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_record_of_a_fence_is_in_the_slot_of_its_key() {
        let record = |key: &str| {
            record_of(key.as_bytes()).map(|name| String::from_utf8(name).expect("UTF-8"))
        };
        let same = |key: &str, name: &str| assert_eq!(record(key).expect("a name"), name);
        same("invoice:42", "{invoice:42}:syncguard-fence");
        same("shop:{42}:paid", "shop:{42}:paid:syncguard-fence");
        same("a{", "{a{}:syncguard-fence");
        for bad in ["", "a}", "{}a", "}{", "a}b{c", &"k".repeat(1001)] {
            assert!(record(bad).is_err(), "{bad}");
        }
        same("a}{b}", "a}{b}:syncguard-fence");
    }

    #[test]
    fn a_script_with_a_shebang_is_refused() {
        assert!(FencedScript::new("#!lua flags=no-writes\nreturn 1").is_err());
        assert!(FencedScript::new("return 1").is_ok());
    }
}
