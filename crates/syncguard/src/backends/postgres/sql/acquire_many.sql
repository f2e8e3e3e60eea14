-- acquire_many: like acquire, for many locks with different keys. One that cannot be acquired does not affect
-- the others. Counters and locks are written in the order of their keys. A row that another transaction
-- has locked ends the statement soon, and each lock is then acquired by itself.
-- $1 keys   $2 tolerance in ms   $3 lock ids   $4 ttls in ms   $5 largest fence   $6 keys of the counters
-- $7 keys as the user knows them   $8 longest wait for a row in ms
-- $9 fences per ms of the clock, 0 to count only   $10 holders, if the table has the column
-- returns for each lock what acquire returns, and its place in the arrays
WITH asked AS MATERIALIZED (
  SELECT a.*, l.*, counter, {now} AS now, CASE
      WHEN held_by = lock_id OR held_until > {now} - $2 OR NOT is_sensible
        OR counter < 0 OR counter >= $5 THEN false
      ELSE pg_try_advisory_xact_lock(hashtext(key)) END AS is_free
  FROM (SELECT set_config('lock_timeout', $8, true) OFFSET 0) AS limited,
    unnest($1::text[], $3::text[], $4::bigint[], $6::text[], $7::text[]{value})
      WITH ORDINALITY AS a (key, lock_id, ttl_ms, fence_key, user_key{column}, place)
    LEFT JOIN LATERAL (
      SELECT lock_id AS held_by, fence AS held_fence, expires_at_ms AS held_until,
        {sensible} AS is_sensible
      FROM {locks} AS stored WHERE stored.key = a.key OFFSET 0) AS l ON true
    LEFT JOIN LATERAL (
      SELECT fence AS counter
      FROM {fences} AS stored WHERE stored.fence_key = a.fence_key OFFSET 0) AS f ON true),
counted AS (
  INSERT INTO {fences} AS f (fence_key, fence, key_debug)
  SELECT fence_key, greatest(1, floor), user_key
  FROM asked, (SELECT {now} * $9 AS floor OFFSET 0) AS clock
  WHERE is_free AND floor <= $5 ORDER BY fence_key
  ON CONFLICT (fence_key) DO UPDATE SET fence = greatest(f.fence + 1, excluded.fence)
    WHERE f.fence = (SELECT fence FROM {fences} AS seen WHERE seen.fence_key = f.fence_key)
      AND f.fence >= 0 AND f.fence < $5
  RETURNING fence_key, fence),
taken AS (
  INSERT INTO {locks} AS l (key, lock_id, expires_at_ms, acquired_at_ms, fence, user_key{column})
  SELECT key, lock_id, clock.now + ttl_ms, clock.now, lpad(fence::text, 15, '0'), user_key{column}
  FROM counted JOIN asked USING (fence_key), (SELECT {now} AS now OFFSET 0) AS clock
  ORDER BY key
  ON CONFLICT (key) DO UPDATE SET
    lock_id = excluded.lock_id, acquired_at_ms = {now},
    expires_at_ms = {now} + excluded.expires_at_ms - excluded.acquired_at_ms,
    fence = excluded.fence, user_key = excluded.user_key{update}
    WHERE l.expires_at_ms <= {now} - $2
  RETURNING key, fence, expires_at_ms)
SELECT taken.fence, taken.expires_at_ms, now, held_by, held_fence, held_until, counter, place
FROM asked LEFT JOIN taken USING (key)
