-- lock_keys_by_id: wait for the advisory locks of the keys that lock ids hold, always in the same order, so that
-- no two transactions wait for each other. A long wait ends the transaction, and each lock is then extended by
-- itself.
-- $1 lock ids   $2 longest wait for a lock in ms
SELECT pg_advisory_xact_lock(hash)
FROM (
  SELECT hashtext(key) AS hash
  FROM (SELECT set_config('lock_timeout', $2, true) OFFSET 0) AS limited, {locks}
  WHERE lock_id = ANY ($1) ORDER BY hash OFFSET 0) AS found
