-- take: take the lock, if it is still free and it is our turn. A statement of its own, so that it sees
-- what was committed while we waited, and reads the clock after that.
-- Whoever saw a live lock has not waited for its turn and takes nothing, whatever is there by now.
-- $1 key   $2 tolerance in ms   $3 lock id   $4 ttl in ms   $5 largest fence
-- answers fence and expiry, or nothing
WITH counted AS (
  INSERT INTO {fences} AS f (fence_key, fence, key_debug)
  SELECT 'fence:' || $1, 1, $1
  WHERE current_setting('syncguard.turn', true) = 'mine' AND NOT EXISTS (
      SELECT FROM {locks}
      WHERE key = $1 AND (lock_id = $3 OR expires_at_ms > {now} - $2 OR NOT {sensible}))
  ON CONFLICT (fence_key) DO UPDATE SET fence = f.fence + 1
    WHERE f.fence >= 0 AND f.fence < $5
  RETURNING fence)
INSERT INTO {locks} AS l (key, lock_id, expires_at_ms, acquired_at_ms, fence, user_key)
SELECT $1, $3, now + $4, now, lpad(fence::text, 15, '0'), $1
FROM counted, (SELECT {now} AS now OFFSET 0) AS clock
ON CONFLICT (key) DO UPDATE SET
  lock_id = excluded.lock_id, expires_at_ms = excluded.expires_at_ms,
  acquired_at_ms = excluded.acquired_at_ms, fence = excluded.fence, user_key = excluded.user_key
  WHERE l.expires_at_ms <= excluded.acquired_at_ms - $2
RETURNING fence, expires_at_ms
