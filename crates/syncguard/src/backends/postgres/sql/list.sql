-- list: return one page of locks in key order, dead or alive, and the time.
-- $1 key after which the page begins
SELECT user_key, lock_id, fence, acquired_at_ms, expires_at_ms, {now}, {holder}, key
FROM {locks} AS l WHERE key > $1 ORDER BY key LIMIT 200
