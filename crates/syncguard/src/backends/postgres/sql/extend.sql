-- extend: set the expiry of the lock to now + ttl if this id holds it and it is live.
-- $1 lock id   $2 tolerance in ms   $3 ttl in ms
-- returns the new expiry, or NULL if it was not extended, and the fence of the stored row
WITH held AS MATERIALIZED (
  SELECT fence FROM {locks} WHERE lock_id = $1 FOR UPDATE),
clock AS MATERIALIZED (
  SELECT {now} AS now FROM (SELECT count(*) FROM held) AS after_the_wait),
extended AS (
  UPDATE {locks} AS l SET expires_at_ms = now + $3 FROM clock
  WHERE lock_id = $1 AND l.expires_at_ms > now - $2 AND {sensible}
  RETURNING l.expires_at_ms)
SELECT (SELECT expires_at_ms FROM extended), (SELECT fence FROM held)
