-- acquire: read the lock and, unless it is live, try to get the key's advisory lock and acquire the lock.
-- A live lock is only read.
-- The statement does not wait for the advisory lock, but may get it after its snapshot was taken. Another
-- transaction may have acquired the lock in between, unseen; if so, it has advanced the counter. The
-- counter is therefore only advanced from the value in the snapshot. A dead row is checked once more when
-- it is overwritten.
-- $1 key   $2 tolerance in ms   $3 lock id   $4 ttl in ms   $5 largest fence   $6 key of the counter
-- $7 key as the user knows it   $8 fences per ms of the clock, 0 to count only
-- $9 holder, if the table has the column
-- returns the fence and expiry if the lock was acquired; otherwise the time, the lock id, fence and expiry
-- of the stored row, and the counter
WITH counted AS (
  INSERT INTO {fences} AS f (fence_key, fence, key_debug)
  SELECT $6, greatest(1, floor), $7
  FROM (SELECT {now} * $8 AS floor OFFSET 0) AS clock
  WHERE floor <= $5 AND CASE WHEN EXISTS (
      SELECT FROM {locks}
      WHERE key = $1 AND (lock_id = $3 OR expires_at_ms > {now} - $2 OR NOT {sensible}))
    THEN false ELSE pg_try_advisory_xact_lock(hashtext($1)) END
  ON CONFLICT (fence_key) DO UPDATE SET fence = greatest(f.fence + 1, excluded.fence)
    WHERE f.fence = (SELECT fence FROM {fences} WHERE fence_key = $6)
      AND f.fence >= 0 AND f.fence < $5
  RETURNING fence),
taken AS (
  INSERT INTO {locks} AS l (key, lock_id, expires_at_ms, acquired_at_ms, fence, user_key{column})
  SELECT $1, $3, now + $4, now, lpad(fence::text, 15, '0'), $7{value}
  FROM counted, (SELECT {now} AS now OFFSET 0) AS clock
  ON CONFLICT (key) DO UPDATE SET
    lock_id = excluded.lock_id, expires_at_ms = {now} + $4, acquired_at_ms = {now},
    fence = excluded.fence, user_key = excluded.user_key{update}
    WHERE l.expires_at_ms <= {now} - $2
  RETURNING fence, expires_at_ms)
SELECT fence, expires_at_ms, NULL, NULL, NULL, NULL, NULL FROM taken
UNION ALL
SELECT NULL, NULL, now, lock_id, l.fence, l.expires_at_ms, f.fence
FROM (SELECT {now} AS now OFFSET 0) AS clock
  LEFT JOIN {locks} AS l ON key = $1
  LEFT JOIN {fences} AS f ON fence_key = $6
WHERE NOT EXISTS (SELECT FROM taken)
