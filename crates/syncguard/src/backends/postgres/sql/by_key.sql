-- by_key: return the lock of a key, dead or alive, and the time.
-- $1 key
SELECT user_key, lock_id, fence, acquired_at_ms, expires_at_ms, {now}, {holder}
FROM {locks} AS l WHERE key = $1
