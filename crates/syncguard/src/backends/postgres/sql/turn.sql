-- turn: read the lock and, unless it is live, wait for the key's turn, and then until nobody changes the
-- row. A live lock is only read.
-- $1 key   $2 tolerance in ms
-- answers the time, and lock id, fence and expiry of what is there
SELECT now, lock_id, fence, expires_at_ms
FROM (
  SELECT now, lock_id, fence, expires_at_ms,
    CASE WHEN expires_at_ms > now - $2 THEN NULL
      ELSE pg_advisory_xact_lock(hashtext($1))::text || set_config('syncguard.turn', 'mine', true)
      END AS turn
  FROM (SELECT {now} AS now OFFSET 0) AS clock LEFT JOIN {locks} ON key = $1
  OFFSET 0) AS seen
LEFT JOIN LATERAL (
  SELECT FROM {locks} WHERE key = $1 AND seen.lock_id IS NOT NULL AND seen.turn IS NOT NULL
  FOR UPDATE) AS locked ON true
