-- by_id: return the lock that a lock id holds, dead or alive, and the time.
-- $1 lock id
SELECT user_key, lock_id, fence, acquired_at_ms, expires_at_ms, {now}, {holder}
FROM {locks} AS l WHERE lock_id = $1
