-- acquire_any: acquire the first of several locks that is not live and whose advisory lock is free.
-- If none is, the locks are only read. The rest is as in acquire.
-- $1 keys   $2 tolerance in ms   $3 lock id   $4 ttl in ms   $5 largest fence   $6 keys of the counters
-- $7 keys as the user knows them   $8 fences per ms of the clock, 0 to count only
-- $9 holder, if the table has the column
-- returns the place of the key, the fence and the expiry if a lock was acquired; otherwise in how many
-- milliseconds the first lock is dead, and whether one looked free
WITH wanted AS MATERIALIZED (
  SELECT key, fence_key, user_key, place
  FROM unnest($1::text[], $6::text[], $7::text[])
    WITH ORDINALITY AS w (key, fence_key, user_key, place)),
chosen AS MATERIALIZED (
  SELECT key, fence_key, user_key, place FROM wanted AS w
  WHERE CASE WHEN EXISTS (
      SELECT FROM {locks} AS l
      WHERE l.key = w.key AND (expires_at_ms > {now} - $2 OR NOT {sensible}))
    THEN false ELSE pg_try_advisory_xact_lock(hashtext(w.key)) END
  LIMIT 1),
counted AS (
  INSERT INTO {fences} AS f (fence_key, fence, key_debug)
  SELECT fence_key, greatest(1, floor), user_key
  FROM chosen, (SELECT {now} * $8 AS floor OFFSET 0) AS clock
  WHERE floor <= $5
  ON CONFLICT (fence_key) DO UPDATE SET fence = greatest(f.fence + 1, excluded.fence)
    WHERE f.fence = (SELECT g.fence FROM {fences} AS g WHERE g.fence_key = f.fence_key)
      AND f.fence >= 0 AND f.fence < $5
  RETURNING fence),
taken AS (
  INSERT INTO {locks} AS l (key, lock_id, expires_at_ms, acquired_at_ms, fence, user_key{column})
  SELECT key, $3, now + $4, now, lpad(fence::text, 15, '0'), user_key{value}
  FROM counted, chosen, (SELECT {now} AS now OFFSET 0) AS clock
  ON CONFLICT (key) DO UPDATE SET
    lock_id = excluded.lock_id, expires_at_ms = {now} + $4, acquired_at_ms = {now},
    fence = excluded.fence, user_key = excluded.user_key{update}
    WHERE l.expires_at_ms <= {now} - $2
  RETURNING fence, expires_at_ms)
SELECT place, fence, expires_at_ms, NULL::bigint, true FROM taken, chosen
UNION ALL
SELECT NULL, NULL, NULL,
  (SELECT min(l.expires_at_ms) FROM {locks} AS l WHERE l.key = ANY ($1)) + $2 - {now},
  EXISTS (SELECT FROM chosen)
WHERE NOT EXISTS (SELECT FROM taken)
