-- turn_by_id: wait for the turn of the key that a lock id holds. No row is locked before that: acquire
-- takes both in the other order.
-- $1 lock id
SELECT pg_advisory_xact_lock(hashtext(key))
FROM (SELECT key FROM {locks} WHERE lock_id = $1 OFFSET 0) AS found
