//! The statements. Each operation is a few of them in one transaction, sent at once.
//!
//! The order of locks is that of decision 023: acquire reads first, then takes the advisory lock of
//! the key, then the row. Every statement sees what was committed before it began (`READ
//! COMMITTED`), so what is read after a wait is current, and the clock is read after the wait too.

use tokio_postgres::types::Type;

use super::names::TableName;

/// A statement and the types of its parameters, which are fixed: a value that could not be encoded
/// would be left out, and the rest committed without it.
#[derive(Clone, Debug)]
pub(super) struct Sql {
    pub(super) text: String,
    pub(super) types: &'static [Type],
}

/// All statements of one pair of tables.
#[derive(Clone, Debug)]
pub(super) struct Statements {
    /// Reads the lock and, unless it is live, waits for the key's turn.
    pub(super) turn: Sql,
    /// Takes the lock, if it is our turn and the lock is still free.
    pub(super) take: Sql,
    pub(super) release: Sql,
    /// Waits for the turn of the key that a lock id holds.
    pub(super) turn_by_id: Sql,
    pub(super) extend: Sql,
    pub(super) by_key: Sql,
    pub(super) by_id: Sql,
    pub(super) clean_up: Sql,
    pub(super) list: Sql,
    /// Tells of a release, if somebody waits.
    pub(super) notify: Sql,
}

/// The server's clock, in milliseconds.
const NOW: &str = "floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint";

/// Raises `synchronous_commit` where it would let a grant be forgotten; never lowers it.
const KEEP: &str = "set_config('synchronous_commit', \
    CASE WHEN current_setting('synchronous_commit') IN ('off', 'local') THEN 'on' \
    ELSE current_setting('synchronous_commit') END, true) IS NOT NULL";

/// What a lock of ours has; other data is never changed.
const SENSIBLE: &str = "fence ~ '^[0-9]{15}$'";

impl Statements {
    pub(super) fn new(locks: &TableName, fences: &TableName) -> Self {
        let (locks, fences) = (locks.quoted(), fences.quoted());
        Self {
            // $1 key, $2 tolerance
            turn: Sql {
                text: format!(
                    "WITH clock AS MATERIALIZED (SELECT {NOW} AS now),
                     held AS MATERIALIZED (
                       SELECT lock_id, fence, expires_at_ms, expires_at_ms > now - $2 AS is_live
                       FROM {locks}, clock WHERE key = $1)
                     SELECT now, lock_id, fence, expires_at_ms,
                       set_config('syncguard.turn', CASE WHEN is_live THEN 'none' ELSE
                         'mine' || pg_advisory_xact_lock(hashtext($1))::text END, true)
                     FROM clock LEFT JOIN held ON true"
                ),
                types: &[Type::TEXT, Type::INT8],
            },
            // $1 key, $2 tolerance, $3 lock id, $4 ttl, $5 largest fence
            take: Sql {
                text: format!(
                    "WITH turn AS MATERIALIZED (
                       SELECT current_setting('syncguard.turn', true) = 'mine' AND {KEEP} AS is_mine),
                     held AS MATERIALIZED (
                       SELECT lock_id, expires_at_ms FROM {locks}
                       WHERE key = $1 AND (SELECT is_mine FROM turn) FOR UPDATE),
                     clock AS MATERIALIZED (
                       SELECT is_mine, {NOW} AS now
                       FROM turn, (SELECT count(*) FROM held) AS after_the_wait),
                     free AS MATERIALIZED (
                       SELECT now FROM clock WHERE is_mine AND NOT EXISTS (
                         SELECT FROM held WHERE lock_id = $3 OR expires_at_ms > now - $2)),
                     counted AS (
                       INSERT INTO {fences} AS f (fence_key, fence, key_debug)
                       SELECT 'fence:' || $1, 1, $1 FROM free
                       ON CONFLICT (fence_key) DO UPDATE SET fence = f.fence + 1
                         WHERE f.fence >= 0 AND f.fence < $5
                       RETURNING f.fence),
                     written AS (
                       INSERT INTO {locks}
                         (key, lock_id, expires_at_ms, acquired_at_ms, fence, user_key)
                       SELECT $1, $3, now + $4, now, lpad(counted.fence::text, 15, '0'), $1
                       FROM free, counted
                       ON CONFLICT (key) DO UPDATE SET
                         lock_id = excluded.lock_id, expires_at_ms = excluded.expires_at_ms,
                         acquired_at_ms = excluded.acquired_at_ms, fence = excluded.fence,
                         user_key = excluded.user_key
                       RETURNING fence, expires_at_ms)
                     SELECT is_mine, now, held.lock_id, held.expires_at_ms,
                       written.fence, written.expires_at_ms
                     FROM clock LEFT JOIN held ON true LEFT JOIN written ON true"
                ),
                types: &[Type::TEXT, Type::INT8, Type::TEXT, Type::INT8, Type::INT8],
            },
            // $1 lock id, $2 tolerance
            release: Sql {
                text: format!(
                    "WITH gone AS (
                       DELETE FROM {locks}
                       WHERE lock_id = $1 AND expires_at_ms > {NOW} - $2 AND {SENSIBLE}
                       RETURNING key)
                     SELECT (SELECT key FROM gone),
                       (SELECT fence FROM {locks} WHERE lock_id = $1)"
                ),
                types: &[Type::TEXT, Type::INT8],
            },
            // $1 lock id
            turn_by_id: Sql {
                text: format!(
                    "SELECT pg_advisory_xact_lock(hashtext(key))
                     FROM (SELECT key FROM {locks} WHERE lock_id = $1 OFFSET 0) AS found"
                ),
                types: &[Type::TEXT],
            },
            // $1 lock id, $2 tolerance, $3 ttl
            extend: Sql {
                text: format!(
                    "WITH held AS MATERIALIZED (
                       SELECT fence FROM {locks} WHERE lock_id = $1 AND {KEEP} FOR UPDATE),
                     clock AS MATERIALIZED (
                       SELECT {NOW} AS now FROM (SELECT count(*) FROM held) AS after_the_wait),
                     extended AS (
                       UPDATE {locks} AS l SET expires_at_ms = now + $3 FROM clock
                       WHERE lock_id = $1 AND l.expires_at_ms > now - $2 AND {SENSIBLE}
                       RETURNING l.expires_at_ms)
                     SELECT (SELECT expires_at_ms FROM extended), (SELECT fence FROM held)"
                ),
                types: &[Type::TEXT, Type::INT8, Type::INT8],
            },
            // $1 key
            by_key: Sql {
                text: format!(
                    "SELECT key, lock_id, fence, acquired_at_ms, expires_at_ms, {NOW}
                     FROM {locks} WHERE key = $1"
                ),
                types: &[Type::TEXT],
            },
            // $1 lock id
            by_id: Sql {
                text: format!(
                    "SELECT key, lock_id, fence, acquired_at_ms, expires_at_ms, {NOW}
                     FROM {locks} WHERE lock_id = $1"
                ),
                types: &[Type::TEXT],
            },
            // $1 lock id, $2 for how long it must have been dead
            clean_up: Sql {
                text: format!(
                    "DELETE FROM {locks} WHERE lock_id = $1 AND expires_at_ms < {NOW} - $2"
                ),
                types: &[Type::TEXT, Type::INT8],
            },
            // $1 key after which to begin, $2 tolerance
            list: Sql {
                text: format!(
                    "SELECT key, lock_id, fence, acquired_at_ms, expires_at_ms, {NOW}
                     FROM {locks} WHERE key > $1 ORDER BY key LIMIT 200"
                ),
                types: &[Type::TEXT],
            },
            // $1 channel, $2 payload, $3 number of the table, $4 key
            notify: Sql {
                text: "SELECT pg_notify($1, $2)
                       WHERE NOT pg_try_advisory_xact_lock($3, hashtext($4))"
                    .to_owned(),
                types: &[Type::TEXT, Type::TEXT, Type::INT4, Type::TEXT],
            },
        }
    }

    /// In the order in which a connection keeps them.
    pub(super) fn all(&self) -> [&Sql; 10] {
        [
            &self.turn,
            &self.take,
            &self.release,
            &self.turn_by_id,
            &self.extend,
            &self.by_key,
            &self.by_id,
            &self.clean_up,
            &self.list,
            &self.notify,
        ]
    }
}
