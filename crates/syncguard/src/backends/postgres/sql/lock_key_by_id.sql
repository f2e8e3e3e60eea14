-- lock_key_by_id: wait for the advisory lock of the key that a lock id holds. It locks no row first:
-- acquire takes the advisory lock before the row, and the other order could deadlock.
-- $1 lock id
SELECT pg_advisory_xact_lock(hashtext(key))
FROM (SELECT key FROM {locks} WHERE lock_id = $1 OFFSET 0) AS found
