-- extend_many: like extend, for many locks with different ids.
-- $1 lock ids   $2 tolerance in ms   $3 ttls in ms
-- returns what extend returns, and the lock id; no row for an id that holds no lock
WITH held AS MATERIALIZED (
  SELECT lock_id, fence FROM {locks} WHERE lock_id = ANY ($1) ORDER BY lock_id FOR UPDATE),
clock AS MATERIALIZED (
  SELECT {now} AS now FROM (SELECT count(*) FROM held) AS after_the_wait),
extended AS (
  UPDATE {locks} AS l SET expires_at_ms = now + ttl_ms
  FROM clock, unnest($1::text[], $3::bigint[]) AS asked (id, ttl_ms)
  WHERE lock_id = id AND lock_id = ANY ($1) AND l.expires_at_ms > now - $2 AND {sensible}
  RETURNING l.lock_id, l.expires_at_ms)
SELECT extended.expires_at_ms, held.fence, held.lock_id
FROM held LEFT JOIN extended USING (lock_id)
